"""The page of a run: reading damaged directories, what the page embeds and omits, and the server."""

import base64
import gzip
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from viewer.__main__ import main
from viewer.report import MOST_POINTS, write_report
from viewer.runs import Run, RunError
from viewer.sampled_rows import describe, encode_step, keep_steps
from viewer.serve import Server

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "experiment": "experiment_base",
    **{"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8, "epochs_per_step": 1, "minibatch_size": None},
    **{"clip_eps": 0.2, "kl_weight": 0.02},
}
SCRIPT = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"


def a_row(step: int, prompt: int = 0, completion: int = 0, **changes) -> dict:
    """Two prompt tokens, two sampled tokens, one tool token, one sampled token."""
    return {
        **{"step": step, "question": "2+2", "answer": "4", "text": "four", "prompt_index": prompt},
        **{"completion_index": completion, "prompt_length": 2, "ids": [1, 5, 7, 8, 9, 2]},
        "action_mask": [0, 0, 1, 1, 0, 1],
        "sampler_log_probs": [0.0, 0.0, -0.25, -1.000001, 0.0, -2e-06],
        "old_log_probs": [0.0, 0.0, -0.250001, -1.0, 0.0, -3e-06],
        "log_probs_ref": [0.0, 0.0, -0.5, None, 0.0, -1.0],
        "entropy": [0.0, 0.0, 0.123456, 0.5, 0.0, 0.25],
        **{"rewards": {"correct": 1.0}, "return": 1.0, "advantage": 0.5, "finish_reason": "stop"},
        "updates": [
            {
                **{"epoch": 0, "minibatch": 0, "log_probs": [0.0, 0.0, -0.26, -1.0, 0.0, -3e-06]},
                **{"terms": [0.0, 0.0, -1.23457e-05, 0.125, 0.0, 1.0], "push": [0.0, 0.0, 0.5, None, 0.0, 1e300]},
                "clipped": [0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
            }
        ],
    } | changes


def rows_of(*steps: int) -> list[dict]:
    """All four rows of each step."""
    return [a_row(step, prompt, completion) for step in steps for prompt in (0, 1) for completion in (0, 1)]


def lines(rows: list) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def directory(tmp_path) -> Path:
    """The directory of a finished run with three steps."""
    place = tmp_path / "experiment_base" / "a"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(CONFIG))
    (place / "summary.json").write_text('{"seconds": 3.5, "num_questions": 64}')
    metrics = [{"step": 0, "eval/greedy/accuracy": 0.5}, *({"step": n, "loss/total": n / 3} for n in (1, 2, 3))]
    metrics.append({"step": 3, "eval/greedy/accuracy": 0.625})
    (place / "metrics.jsonl").write_bytes(lines(metrics))
    (place / "samples.jsonl").write_bytes(lines(rows_of(1, 2, 3)))
    marks = {"special": True, "end_of_turn": True}
    texts = [{"id": 7, "text": " four"}, {"id": 2, "text": "<|end|>", **marks}, {"id": 99, "text": "not there"}]
    texts += [{"id": 5, "text": "in the prompt"}]
    (place / "tokens.jsonl").write_bytes(lines(texts))
    return place


def read_page(path: Path) -> tuple[dict, dict[int, dict]]:
    """The data of a page, and its samples by step."""
    page = path.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="run-data">(.*?)</script>', page, re.DOTALL)
    packed = re.findall(r'<script type="text/plain" id="samples-(\d+)">(.*?)</script>', page, re.DOTALL)
    return json.loads(data), {int(n): json.loads(gzip.decompress(base64.b64decode(text))) for n, text in packed}


def text_of(path: Path, element: str) -> str:
    """The text of an element in a page, without tags."""
    page = path.read_text(encoding="utf-8")
    found = re.search(rf'<(\w+) id="{element}"[^>]*>(.*?)</\1>', page, re.DOTALL)
    return " ".join(re.sub("<[^>]*>", "", found[2]).split())


# The content of a page


def test_a_page_holds_what_the_run_wrote(directory):
    path = write_report(directory)
    data, chunks = read_page(path)
    assert data["metrics"]["steps"] == [0, 1, 2, 3, 3]
    assert data["metrics"]["series"]["loss/total"] == pytest.approx([None, 1 / 3, 2 / 3, 1, None], abs=1e-7)
    assert data["tokenTexts"] == {"7": [" four", 0], "2": ["<|end|>", 3], "5": ["in the prompt", 0]}
    assert data["steps"] == [{"step": step, "rows": 4, "of": 4, "prompts": [0, 1]} for step in (1, 2, 3)]
    assert chunks.keys() == {1, 2, 3}
    assert [len(group["rows"]) for group in chunks[2]["groups"]] == [2, 2]
    page = path.read_text(encoding="utf-8")
    assert text_of(path, "introduction") == (
        "experiment_base trained a policy for 3 steps, each with 2 questions and 2 completions of every question. "
        "Of its greedy answers to 64 held-out questions, 50 % were right before training and 62.5 % after 3 steps. "
        "Training took 3.5 s."
    )
    for name, value in CONFIG.items():
        assert f'<th scope="row">{name}</th><td>{"none" if value is None else value}</td>' in page
    assert "The run has found nothing wrong." in page
    policy = re.search(r'Policy" content="(.*?)"', page)[1]
    assert policy.startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    assert not re.search(r"unsafe|connect|http|\*", policy)
    (address,) = re.findall(r'href="(.*?)">docs/metrics.md<', page)
    assert (directory / address).resolve() == ROOT / "docs" / "metrics.md"


def test_log_probs_decode_to_what_was_written():
    (group,) = encode_step([a_row(1)])["groups"]
    assert (group["question"], group["answer"], group["prompt"]) == ("2+2", "4", [1, 5])
    (row,) = group["rows"]
    assert (row["ids"], row["mask"]) == ([7, 8, 9, 2], [1, 1, 0, 1])
    assert row["sampler"] == [-250_000, -1_000_001, -2]
    assert [a + b for a, b in zip(row["sampler"], row["old"], strict=True)] == [-250_001, -1_000_000, -3]
    assert row["ref"] == [-250_000, None, -999_998]
    assert row["entropy"] == [123_456, 500_000, 250_000]
    (update,) = row["updates"]
    measurements = {"terms": [-1.23457e-05, 0.125, 1], "push": [0.5, None, None], "clipped": [1, 0, 0]}
    assert update == {"epoch": 0, "minibatch": 0, "log_probs": [-10_000, 1, -1], "measurements": measurements}


def test_what_a_row_does_not_have_is_null():
    changes = {"log_probs_ref": None, "entropy": None, "updates": [], "return": None, "rewards": {"x": float("inf")}}
    (group,) = encode_step([a_row(1, **changes, old_log_probs=a_row(1)["sampler_log_probs"])])["groups"]
    (encoded,) = group["rows"]
    assert [encoded[key] for key in ("ref", "entropy", "old", "return", "turns")] == [None] * 5
    assert (encoded["updates"], encoded["rewards"]) == ([], {"x": None})


def test_findings_are_grouped_into_ranges_of_steps(directory):
    rows = [{"step": step, "finding": "long", "sentence": f"long at {step}"} for step in (3, 4, 5, 9)]
    (directory / "diagnosis.jsonl").write_bytes(lines(rows))
    path = write_report(directory)
    assert "long long at 9 Steps 3 to 5, 9" in text_of(path, "diagnosis")
    assert 'href="#step=3"' in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("changes", "sentence", "compares"), [
    ({}, "Its advantage says how much better it did than the others of its group.", True),
    ({"teacher": "tiny_teacher"}, "A teacher judges every token", False),
    ({"hint": "both"}, "A teacher judges every token", False),
    ({"gae_lambda": 1.0}, "than a second network, the critic, had expected", False),
    ({"baseline": "mean", "group_size": 1}, "each once. Each completion earns a reward. Its advantage says how", False),
])  # fmt: skip
def test_a_page_explains_the_algorithm_of_its_run(directory, changes, sentence, compares):
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    path = write_report(directory)
    assert sentence in text_of(path, "reading")
    assert ("nothing to compare" in text_of(path, "reading")) == compares
    (directory / "config.json").write_text(json.dumps({"pairs_per_step": 2}))
    assert "give the chosen one a higher score" in text_of(write_report(directory), "reading")


# Limits on its size


def test_of_many_steps_the_first_and_the_last_are_kept(directory):
    """The others are complete steps, evenly spread, up to the budget."""
    rows = [row for step in range(1, 101) for row in (rows_of(step) if step % 5 == 0 else [a_row(step)])]
    (directory / "samples.jsonl").write_bytes(lines(rows))
    kept = keep_steps(Run(directory).samples, 4, page_budget=8000)
    assert sum(map(len, kept.chunks.values())) <= 8000
    steps = sorted(kept.chunks)
    assert {1, 100} < {*steps}
    assert 8 < len(steps) < 20
    assert all(step % 5 == 0 for step in steps[1:])
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 15


def test_of_a_step_that_is_too_long_the_first_groups_are_kept(directory):
    rows = [row | {"text": base64.b64encode(os.urandom(3000)).decode()} for row in rows_of(1)]  # 4 KB each
    (directory / "samples.jsonl").write_bytes(lines(rows))
    index = Run(directory).samples
    for budget, num_rows in ((20_000, {1: 4}), (14_000, {1: 2}), (100, {})):
        assert keep_steps(index, 4, step_budget=budget).num_rows == num_rows
    assert "step 1." in describe(index, keep_steps(index, 4, step_budget=14_000), "")


def test_a_very_long_curve_is_thinned_and_keeps_its_evaluations(directory):
    rows = [{"step": n, "loss/total": n / 7} | ({"eval/loss": 1.5} if n == 7777 else {}) for n in range(10_000)]
    (directory / "metrics.jsonl").write_bytes(lines(rows))
    metrics = read_page(write_report(directory))[0]["metrics"]
    assert len(metrics["steps"]) <= MOST_POINTS + 2
    assert {0, 7777, 9999} < {*metrics["steps"]}
    assert metrics["series"]["eval/loss"][metrics["steps"].index(7777)] == 1.5


# Damaged, killed and empty runs


@pytest.mark.parametrize("missing", ["config.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl", "summary.json"])
def test_a_file_may_be_missing_or_empty(directory, missing):
    for change in (lambda path: path.write_text(""), Path.unlink):
        change(directory / missing)
        path = write_report(directory)
        assert len(read_page(path)[1]) == (0 if missing == "samples.jsonl" else 3)
        assert ("There are no samples." in text_of(path, "samples-note")) == (missing == "samples.jsonl")
        assert ("The run has logged no step yet." in text_of(path, "diagnosis")) == (missing == "metrics.jsonl")
    assert ("The run is not finished." in path.read_text(encoding="utf-8")) == (missing == "summary.json")


def test_damaged_lines_are_counted_and_left_out(directory):
    deep = b'{"step": 1, "ids": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    damaged = [b"\0\0\0\n", b"[1, 2]\n", b"\xff\xfe{}\n", deep, a_row(True), a_row(1, ids=[1]), a_row(2, updates=[5])]
    cut_off = lines([a_row(3)])[:-30]
    (directory / "samples.jsonl").write_bytes(lines([*damaged[:4], *rows_of(1, 2), *damaged[4:], cut_off]))
    (directory / "metrics.jsonl").write_bytes(
        b'{"step": 1, "a": NaN, "b": 1e999, "c": "x", "d": 2}\nnull\n{"step": "1"}\n'
    )
    path = write_report(directory)
    data, chunks = read_page(path)
    assert [len(group["rows"]) for step in (1, 2) for group in chunks[step]["groups"]] == [2] * 4
    assert chunks.keys() == {1, 2}
    assert f"{len(damaged)} damaged lines are left out. The last line is not complete" in text_of(path, "samples-note")
    assert data["metrics"] == {"steps": [1], "series": {"d": [2]}}


def test_rows_of_other_prompts_are_kept_apart_and_of_one_row_the_later_line_counts(directory):
    """A run that was killed and resumed can write a step twice."""
    rows = [a_row(1), a_row(1, ids=[1, 6, 7, 8, 9, 2])]
    assert [len(group["rows"]) for group in encode_step(rows)["groups"]] == [1, 1]
    (directory / "samples.jsonl").write_bytes(lines([*rows_of(1), *rows_of(2), a_row(1, 1, 1, text="later")]))
    _, chunks = read_page(write_report(directory))
    assert [row["text"] for group in chunks[1]["groups"] for row in group["rows"]] == ["four"] * 3 + ["later"]


# Hostile text


@pytest.mark.parametrize("text", [SCRIPT, "<!--<script>", "\u2028\ud800\x00\x1b[2J\u202e"])
def test_text_of_a_model_is_only_data(directory, text):
    texts = {"question": text, "answer": text, "text": text, "turns": [["assistant", text]], "finish_reason": text}
    for name, row in {
        "samples.jsonl": a_row(1, **texts, rewards={text: 1.0}),
        "tokens.jsonl": {"id": 7, "text": text},
        "config.json": CONFIG | {"task": text, "loss": text, text: text},
        "metrics.jsonl": {"step": 1, f"reward/{text}": 1},
        "diagnosis.jsonl": {"step": 1, "finding": text, "sentence": text},
    }.items():
        (directory / name).write_bytes(lines([row]))
    path = write_report(directory)
    data, chunks = read_page(path)
    (group,) = chunks[1]["groups"]
    assert (group["question"], group["rows"][0]["text"], data["tokenTexts"]["7"][0]) == (text, text, text)
    assert text not in path.read_text(encoding="utf-8")


def test_the_name_of_a_run_is_only_text(directory, capsys):
    named = directory.with_name('<img src=x onerror=alert(1)>"\x1b[2J\udc80')
    directory.rename(named)
    main([str(named)])
    page = (named / "report.html").read_text(encoding="utf-8")
    assert "&lt;img src=x" in page
    assert "<img" not in page
    assert "\x1b" not in page + capsys.readouterr().out


# The command line


# The server


@pytest.fixture
def ask(directory) -> Iterator:
    """Ask a server of the run: (status, body); `ask.port` is its port."""
    with Server(directory, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def send(path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
            with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)) as connection:
                connection.request(method, path, headers={"Host": f"127.0.0.1:{server.server_port}"} | headers)
                response = connection.getresponse()
                send.headers = response.headers
                return response.status, response.read().decode()

        send.port = server.server_port
        yield send
        server.shutdown()
        thread.join()


def test_the_page_and_all_samples_are_served(ask, directory):
    status, page = ask("/")
    assert (status, 'id="samples-1"' in page) == (200, False)
    assert "connect-src &#39;self&#39;" in page
    assert (ask.headers["X-Frame-Options"], ask.headers["Cross-Origin-Resource-Policy"]) == ("DENY", "same-origin")
    assert not [name for name in ask.headers if name.lower().startswith("access-control")]
    assert f'data-version="{ask("/version")[1]}"' in page
    assert json.loads(ask("/samples/2.json")[1]) == encode_step(rows_of(2))
    assert ask("/", Host=f"localhost:{ask.port}")[0] == 200
    assert ask("/", "POST")[0] == 501
    with pytest.raises(RunError, match=rf"^port {ask.port} of 127.0.0.1 cannot be used"):
        Server(directory, ask.port)


def test_nothing_else_is_served(ask):
    paths = ["/config.json", "/samples/9.json", "/samples/-1.json", "/samples/2.json?x=/etc/passwd", "/report.html"]
    paths += ["/samples/../config.json", "/samples/..%2f..%2fetc%2fpasswd.json", "/../../etc/passwd", "//etc/passwd"]
    for path in (*paths, "http://a/version", "/?x"):
        assert ask(path) == (404, "there is no such page"), path


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com:{}", "localhost:1", "", "[::1]:{}"])
def test_another_host_name_is_refused(ask, host):
    """A page of another site could point its own name to 127.0.0.1."""
    for path in ("/", "/version", "/samples/1.json"):
        assert ask(path, Host=host.format(ask.port))[0] == 403
        assert ask(path, host=host.format(ask.port))[0] == 403  # a second one after the right one


def test_the_page_is_made_again_when_a_file_changes(ask, directory):
    def steps() -> list[int]:
        """The steps of the samples in the page."""
        data = json.loads(re.search(r'id="run-data">(.*?)</script>', ask("/")[1])[1])
        return [step["step"] for step in data["steps"]]

    assert steps() == [1, 2, 3]
    before, cut_off = (directory / "samples.jsonl").read_bytes(), lines([a_row(4)])[:-5]
    (directory / "samples.jsonl").write_bytes(before + cut_off)
    assert steps() == [1, 2, 3]
    (directory / "samples.jsonl").write_bytes(before + lines([a_row(4)]))
    assert steps() == [1, 2, 3, 4]
    assert len(json.loads(ask("/samples/4.json")[1])["groups"][0]["rows"]) == 1
    (directory / "samples.jsonl").write_bytes(lines(rows_of(1)))  # the run was resumed
    assert steps() == [1]
    directory.rename(directory.with_name("elsewhere"))
    for path in ("/", "/version"):
        status, body = ask(path)
        assert (status, "is gone" in body) == (503, True)


def test_ctrl_c_ends_the_server_quietly(directory):
    command = [sys.executable, "-m", "viewer", str(directory), "--serve", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(2)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 130
