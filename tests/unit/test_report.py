"""The page of a run: what is read of damaged directories, what is embedded and what is left out, and what is served."""

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
from pathlib import Path

import pytest

from viewer.__main__ import main
from viewer.growing import find_file
from viewer.report import write_report
from viewer.runs import Run
from viewer.sampled import encode_step, pack
from viewer.serve import Server
from viewer.thinning import PAGE_BUDGET, describe_kept, keep_steps

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "experiment": "experiment_base",
    **{"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8, "epochs_per_step": 1, "minibatch_size": None},
    **{"clip_eps": 0.2, "kl_weight": 0.02},
}
SCRIPT = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"


def a_row(step: int, prompt: int = 0, completion: int = 0, **changes) -> dict:
    """Two tokens of the prompt, two sampled, one of a tool, one sampled."""
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
    """Of a finished run with three steps."""
    place = tmp_path / "experiment_base" / "a"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(CONFIG))
    (place / "summary.json").write_text('{"seconds": 3.5}')
    metrics = [{"step": 0, "eval/greedy/accuracy": 0.5}, *({"step": n, "loss/total": n / 3} for n in (1, 2, 3))]
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


# What a page holds


def test_a_page_holds_what_the_run_wrote(directory):
    data, chunks = read_page(write_report(directory))
    (run,) = data["runs"]
    assert (run["name"], run["experiment"], run["state"]) == ("a", "experiment_base", "finished")
    assert run["config"] == CONFIG
    assert run["metrics"]["steps"] == [0, 1, 2, 3]
    assert run["metrics"]["series"]["loss/total"] == pytest.approx([None, 1 / 3, 2 / 3, 1], abs=1e-7)
    assert data["tokens"] == {"7": [" four", 0], "2": ["<|end|>", 3], "5": ["in the prompt", 0]}
    assert [step["complete"] for step in data["samples"]["steps"]] == [True] * 3
    assert data["samples"]["left_out"] == []
    assert chunks.keys() == {1, 2, 3}
    assert [len(group["rows"]) for group in chunks[2]["groups"]] == [2, 2]
    assert (directory.parent / "a" / data["metrics_page"]).resolve() == ROOT / "docs" / "metrics.md"


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
    tokens = {"terms": [-1.23457e-05, 0.125, 1], "push": [0.5, None, None], "clipped": [1, 0, 0]}
    assert update == {"epoch": 0, "minibatch": 0, "log_probs": [-10_000, 1, -1], "tokens": tokens}


def test_what_is_damaged_of_an_update_is_not_known():
    def encoded(**changes) -> dict:
        (update,) = a_row(1)["updates"]
        return encode_step([a_row(1, updates=[update | changes])])["groups"][0]["rows"][0]["updates"][0]["tokens"]

    hostile = [0.0, 0.0, SCRIPT, float("nan"), 0.0, 1e300]
    for damaged in ("no", 1, {}, [], [1.0], None, hostile):
        assert encoded(terms=damaged)["terms"] == [None] * 3
    assert encoded(terms=[0, 0, True, 1])["terms"] == [None, 1, None]
    assert encoded(**{SCRIPT: [0, 0, 2.0, 2.5, 0, -1]})[SCRIPT] == [2, 2.5, -1]


def test_what_a_row_does_not_have_is_null(directory):
    changes = {"log_probs_ref": None, "entropy": None, "updates": [], "answer": None}
    same = a_row(1)["sampler_log_probs"]
    row = a_row(1, **changes, old_log_probs=same)
    del row["return"]
    (directory / "samples.jsonl").write_bytes(lines([row]))
    _, chunks = read_page(write_report(directory))
    (group,) = chunks[1]["groups"]
    (encoded,) = group["rows"]
    assert [encoded[key] for key in ("ref", "entropy", "old", "return", "turns")] == [None] * 5
    assert encoded["updates"] == []


def test_findings_are_grouped_into_ranges_of_steps(directory):
    found = [(3, "long"), (4, "long"), (4, "flat"), (5, "long"), (9, "long")]
    rows = [{"step": step, "finding": finding, "sentence": f"{finding} at {step}"} for step, finding in found]
    (directory / "diagnosis.jsonl").write_bytes(lines([*rows, {"step": 9, "finding": 5}]))
    data, _ = read_page(write_report(directory))
    long, flat = data["runs"][0]["diagnosis"]
    assert (long["finding"], long["sentence"], long["steps"]) == ("long", "long at 9", [[3, 5], [9, 9]])
    assert flat["steps"] == [[4, 4]]
    heading = "## " + long["link"].partition("#")[2].replace("-", " ")
    titles = [re.sub(r"[^\w #]", "", line) for line in (ROOT / "docs/metrics.md").read_text().splitlines()]
    assert heading in [title.lower() for title in titles]


def test_two_runs_have_the_samples_of_the_first(directory, tmp_path):
    other = tmp_path / "b"
    other.mkdir()
    (other / "metrics.jsonl").write_bytes(lines([{"step": 7, "loss/total": 1}]))
    (directory / "samples.jsonl").write_bytes(lines(rows_of(2)))
    data, chunks = read_page(write_report(directory, other, tmp_path / "both.html"))
    assert "; its only step is in this page, in" in data["samples"]["note"]
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["runs"][1]["metrics"] == {"steps": [7], "series": {"loss/total": [1]}}
    assert data["runs"][1]["state"] == "not finished"
    assert chunks.keys() == {2}


# How it stays small


def test_of_many_steps_the_first_and_the_last_are_kept(directory):
    """And of the others complete ones, evenly spread, up to the budget; the page says what it leaves out."""
    rows = [row for step in range(1, 101) for row in (rows_of(step) if step % 5 == 0 else [a_row(step)])]
    (directory / "samples.jsonl").write_bytes(lines(rows))
    run = Run(directory)
    run.update()
    kept = keep_steps(run.samples, 4, page_budget=8000)
    assert sum(map(len, kept.chunks.values())) <= 8000
    steps = sorted(kept.chunks)
    assert {1, 100} < {*steps}
    assert 8 < len(steps) < 20
    assert all(step % 5 == 0 for step in steps[1:])
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert max(gaps) <= 15


def test_what_is_left_out_is_said(directory):
    texts = [base64.b64encode(os.urandom(18_000)).decode() for _ in range(64)]  # 24 KB each, also compressed
    rows = [row | {"text": text} for row, text in zip(rows_of(*range(1, 17)), texts, strict=True)]
    (directory / "samples.jsonl").write_bytes(lines(rows))
    path = write_report(directory)
    data, chunks = read_page(path)
    samples = data["samples"]
    assert 3 < len(chunks) < 16
    assert PAGE_BUDGET / 2 < sum(step["bytes"] for step in samples["steps"]) <= PAGE_BUDGET
    assert path.stat().st_size < 2_000_000
    missing = {n for first, last in samples["left_out"] for n in range(first, last + 1)}
    assert missing | chunks.keys() == {*range(1, 17)}
    assert not missing & chunks.keys()
    assert f"{len(chunks)} of its 16 steps are in this page" in samples["note"]
    assert f"python -m viewer {directory} --serve shows all" in samples["note"]


def test_of_a_step_that_is_too_long_the_first_groups_are_kept(directory):
    texts = [base64.b64encode(os.urandom(3000)).decode() for _ in range(12)]  # 4 KB each
    rows = [row | {"text": text} for row, text in zip(rows_of(1, 2, 3), texts, strict=True)]
    (directory / "samples.jsonl").write_bytes(lines(rows))
    run = Run(directory)
    run.update()
    assert {*keep_steps(run.samples, 4, step_budget=20_000).num_rows.values()} == {4}
    kept = keep_steps(run.samples, 4, step_budget=14_000)
    assert kept.num_rows == {1: 2, 2: 2, 3: 2}
    described = describe_kept(kept, run.samples, 4, "")
    assert not any(step["complete"] for step in described["steps"])
    assert "Only the first groups are here of what is very long: step 1, 2, 3" in described["note"]
    assert keep_steps(run.samples, 4, step_budget=100).chunks == {}
    short = [a_row(1, prompt, text=text[:2000]) for prompt, text in enumerate(texts)]
    (directory / "samples.jsonl").write_bytes(lines(short))
    run.update()
    assert keep_steps(run.samples, 12, step_budget=20_000).num_rows == {1: 2}  # no more than fit into a quarter of it


def test_a_very_long_curve_keeps_its_evaluations(directory):
    rows = [{"step": n, "loss/total": n / 7} | ({"eval/loss": 1.5} if n == 7777 else {}) for n in range(10_000)]
    (directory / "metrics.jsonl").write_bytes(lines(rows))
    data, _ = read_page(write_report(directory))
    metrics = data["runs"][0]["metrics"]
    assert len(metrics["steps"]) <= 2002
    assert {0, 7777, 9999} < {*metrics["steps"]}
    assert metrics["series"]["eval/loss"][metrics["steps"].index(7777)] == 1.5


# Damaged, killed and empty runs


@pytest.mark.parametrize("missing", ["config.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl", "summary.json"])
def test_a_file_may_be_missing(directory, missing):
    (directory / missing).unlink()
    data, chunks = read_page(write_report(directory))
    assert len(chunks) == (0 if missing == "samples.jsonl" else 3)
    assert (data["runs"][0]["state"] == "finished") == (missing != "summary.json")
    assert (data["runs"][0]["config"] == {}) == (missing == "config.json")


def test_an_empty_run_has_a_page(directory):
    for path in directory.iterdir():
        path.write_text("")
    data, chunks = read_page(write_report(directory))
    assert (data["runs"][0]["metrics"], chunks) == ({"steps": [], "series": {}}, {})
    assert data["samples"]["note"] == "There are no samples."


def test_a_torn_last_line_is_left_out_and_said(directory):
    path = directory / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    data, chunks = read_page(write_report(directory))
    assert [len(group["rows"]) for group in chunks[3]["groups"]] == [2, 1]
    assert [step["complete"] for step in data["samples"]["steps"]] == [True, True, False]
    assert "The last line is not complete" in data["samples"]["note"]


def test_damaged_lines_are_counted_and_left_out(directory):
    deep = b'{"step": 1, "ids": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    damaged = [
        b"\0\0\0\n",
        b"[1, 2]\n",
        b"\xff\xfe{}\n",
        deep,
        a_row(10**30),
        a_row(-1),
        a_row(True),
        a_row(1, ids="x"),
    ]
    damaged += [
        a_row(1, action_mask=[1]),
        a_row(1, ids=[10**30] * 6),
        a_row(2, prompt_length=99),
        b'{"step": 2, "ids": [1,\n',
        b"{}\n",
    ]
    (directory / "samples.jsonl").write_bytes(lines([*damaged[:6], *rows_of(1, 2), *damaged[6:]]))
    (directory / "metrics.jsonl").write_bytes(
        b'{"step": 1, "a": NaN, "b": 1e999, "c": "x", "d": 2}\nnull\n{"step": "1"}\n'
    )
    data, chunks = read_page(write_report(directory))
    assert {step: sum(len(group["rows"]) for group in chunk["groups"]) for step, chunk in chunks.items()} == {
        1: 4,
        2: 4,
    }
    assert f"{len(damaged)} damaged lines are left out" in data["samples"]["note"]
    assert data["runs"][0]["metrics"] == {"steps": [1], "series": {"d": [2]}}


def test_wrong_types_become_null_or_text(directory):
    wrong = {"question": ["a", float("nan")], "answer": 4, "text": None, "turns": [["tool"], ["a", "b"], 3]}
    wrong |= {"rewards": {"correct": float("inf"), "x": "1"}, "return": "1", "advantage": None, "finish_reason": 3}
    wrong |= {"sampler_log_probs": "no", "old_log_probs": [], "entropy": 1, "updates": [5, {"epoch": "0"}]}
    (directory / "samples.jsonl").write_bytes(lines([a_row(1, **wrong)]))
    _, chunks = read_page(write_report(directory))
    ((group,),) = (chunk["groups"] for chunk in chunks.values())
    assert (group["question"], group["answer"]) == ('["a", null]', "4")
    (row,) = group["rows"]
    assert (row["text"], row["turns"], row["finish_reason"]) == ("", [["a", "b"]], "3")
    assert (row["rewards"], row["return"], row["advantage"]) == ({"correct": None, "x": None}, None, None)
    assert row["sampler"] == row["old"] == [None] * 3
    assert (row["entropy"], row["updates"]) == (None, [])
    (group,) = encode_step([a_row(1, sampler_log_probs=[0, 0, 1e300, -1e12, 0, -1.0])])["groups"]
    assert group["rows"][0]["sampler"] == [None, None, -1_000_000]  # others are not exact in JavaScript


def test_rows_that_are_not_the_same_are_kept_apart():
    rows = [a_row(1, completion=None), a_row(1, completion=None), a_row(1, ids=[1, 6, 7, 8, 9, 2])]
    assert [len(group["rows"]) for group in encode_step(rows)["groups"]] == [2, 1]


def test_the_same_samples_give_the_same_text():
    assert base64.b64decode(pack(encode_step(rows_of(1))))[4:8] == bytes(4)  # gzip's place for the time


def test_of_two_lines_of_one_row_the_later_counts(directory):
    """A run that was killed and resumed can write a step twice."""
    (directory / "samples.jsonl").write_bytes(lines([*rows_of(1), *rows_of(2), a_row(1, 1, 1, text="later")]))
    _, chunks = read_page(write_report(directory))
    assert [row["text"] for group in chunks[1]["groups"] for row in group["rows"]] == ["four"] * 3 + ["later"]


def test_a_line_beyond_all_measure_is_skipped(directory, monkeypatch):
    monkeypatch.setattr("viewer.growing.LONGEST_LINE", 2000)
    path = directory / "samples.jsonl"
    path.write_bytes(path.read_bytes() + lines([a_row(3, text="x" * 9000), a_row(4)]))
    data, chunks = read_page(write_report(directory))
    assert chunks.keys() == {1, 2, 3, 4}
    assert "1 damaged line is left out" in data["samples"]["note"]


def test_only_what_is_new_is_read_and_a_resumed_run_anew(directory):
    path = directory / "samples.jsonl"
    run = Run(directory)
    run.update()
    size, content = run.samples.size, path.read_bytes()
    with path.open("ab") as file:
        file.write(lines([a_row(4)])[:-9])
    run.update()
    assert (run.samples.size, run.samples.torn, run.samples.steps) == (size, True, [1, 2, 3])
    path.write_bytes(content.replace(b'"step": 1,', b'"step": 9,') + lines([a_row(4)]))  # what was read stays
    run.update()
    assert (run.samples.torn, run.samples.steps) == (False, [1, 2, 3, 4])
    path.write_bytes(lines(rows_of(1)))
    run.update()
    assert run.samples.steps == [1]
    path.write_bytes(lines(rows_of(6, 7)))  # longer, and other lines
    run.update()
    assert run.samples.steps == [6, 7]


def test_a_file_may_go_while_it_is_looked_for(directory, monkeypatch):
    """Such as those of a run that is deleted while its page is served."""

    def find_and_delete(*arguments) -> Path | None:
        path = find_file(*arguments)
        if path is not None:
            path.unlink()
        return path

    run = Run(directory)
    run.update()
    monkeypatch.setattr("viewer.growing.find_file", find_and_delete)
    assert run.samples.read(1) == []
    run.update()
    assert (run.samples.steps, run.metrics.rows) == ([], [])


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_a_link_to_another_place_is_not_followed(directory, tmp_path):
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(lines(rows_of(5)))
    for name in ("samples.jsonl", "config.json"):
        (directory / name).unlink()
        (directory / name).symlink_to(secret)
    (directory / "metrics.jsonl").unlink()
    os.mkfifo(directory / "metrics.jsonl")  # reading it would wait for a writer
    data, chunks = read_page(write_report(directory))
    assert (chunks, data["runs"][0]["config"], data["runs"][0]["metrics"]["steps"]) == ({}, {}, [])


# Hostile text


@pytest.mark.parametrize("text", [SCRIPT, "<!--<script>", "\u2028\u2029", "\ud800", "\x00\x1b[2J\u202e", "x" * 10**6])
def test_text_of_a_model_is_only_data(directory, text):
    texts = {"question": text, "answer": text, "text": text, "turns": [["assistant", text]], "finish_reason": text}
    (directory / "samples.jsonl").write_bytes(lines([a_row(1, **texts, rewards={text: 1.0})]))
    (directory / "tokens.jsonl").write_bytes(lines([{"id": 7, "text": text}]))
    (directory / "config.json").write_bytes(lines([CONFIG | {"task": text, text: 1}]))
    (directory / "metrics.jsonl").write_bytes(lines([{"step": 1, f"reward/{text}": 1}]))
    (directory / "diagnosis.jsonl").write_bytes(lines([{"step": 1, "finding": text, "sentence": text}]))
    path = write_report(directory)
    data, chunks = read_page(path)
    (group,) = chunks[1]["groups"]
    assert (group["question"], group["rows"][0]["text"], data["tokens"]["7"][0]) == (text, text, text)
    assert data["runs"][0]["diagnosis"][0]["sentence"] == text
    assert len(text) == 10**6 or text not in path.read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform == "win32", reason="no such names there")
def test_the_name_of_a_run_is_only_text(directory, capsys):
    named = directory.with_name('<img src=x onerror=alert(1)>"\x1b[2J\udc80')
    directory.rename(named)
    main([str(named)])
    assert "\x1b" not in capsys.readouterr().out
    page = (named / "report.html").read_text(encoding="utf-8")
    assert "<img" not in page
    assert "&lt;img src=x" in page


def test_the_policy_allows_the_scripts_of_the_page_only(directory):
    page = write_report(directory).read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not re.search(r"unsafe|connect|http|\*", policy)


# The command line


def test_help_is_quick_because_nothing_large_is_imported(cold):
    code = "import sys, viewer.__main__, viewer.serve; sys.exit(' '.join({'torch', 'jinja2'} & {*sys.modules}) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give the directory of one run, or of two to compare, not of 0"),
        (["a", "a", "a"], "not of 3"),
        (["nowhere\x1b[2J"], "there is no directory nowhere\ufffd[2J"),
        (["a/config.json"], "is a file, not the directory of a run"),
        (["."], "is no run's directory: it has neither config.json nor metrics.jsonl; did you mean ./a?"),
        (["a", "--output", "a/metrics.jsonl"], "give the name of a file that ends in .html"),
        (["a", "--output", "none/a.html"], "cannot be written: No such file or directory"),
        (["a", "--port", "70000"], "--port 70000 is no port"),
        (["a", "--serve", "--output", "b.html"], "--serve writes no file"),
        (["nowhere", "--serve"], "there is no directory nowhere"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(directory, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(directory.parent)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert sentence in said
    assert said.count("\n") == 1


# The server


@pytest.fixture
def ask(directory) -> Iterator:
    """Ask a server of the run: (status, body); `ask.port` is where."""
    with Server([directory], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def send(path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            try:
                connection.putrequest(method, path, skip_host=True)
                for name, value in ({"Host": f"127.0.0.1:{server.server_port}"} | headers).items():
                    connection.putheader(name, value)
                connection.endheaders()
                response = connection.getresponse()
                send.headers = response.headers
                return response.status, response.fp.read()  # also what should not follow an answer to HEAD
            finally:
                connection.close()

        send.port = server.server_port
        yield send
        server.shutdown()
        thread.join()


def test_the_page_its_data_and_its_samples_are_served(ask, directory):
    status, page = ask("/")
    assert (status, b"data-live" in page, b'id="samples-1"' in page) == (200, True, False)
    assert b"connect-src &#39;self&#39;" in page
    assert ask.headers["X-Content-Type-Options"] == "nosniff"
    assert ask.headers["Cache-Control"] == "no-store"
    assert ask.headers["X-Frame-Options"] == "DENY"
    assert ask.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert not [name for name in ask.headers if name.lower().startswith("access-control")]
    data = json.loads(ask("/data.json")[1])
    assert [step["step"] for step in data["samples"]["steps"]] == [1, 2, 3]
    assert data["tokens"].keys() == {"7", "2", "99", "5"}
    assert data["samples"]["note"].startswith("samples.jsonl has ")
    status, samples = ask("/samples/2.json")
    assert (status, json.loads(samples)) == (200, encode_step(rows_of(2)))
    assert ask("/data.json", "HEAD") == (200, b"")
    assert ask("/", Host=f"localhost:{ask.port}")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/config.json", "/samples.jsonl", "/samples/", "/samples/9.json", "/samples/2", "/samples/-1.json"),
        *("/samples/../config.json", "/samples/..%2f..%2fetc%2fpasswd.json", "/../../etc/passwd", "//etc/passwd"),
        *(
            "/samples/2.json/..",
            "/samples/2.json?x=/etc/passwd",
            "/samples/%D9%A2.json",
            "/secret",
            "http://a/data.json",
        ),
        *("/data.json/", "/?x", "/samples/" + "9" * 400 + ".json", "/report.html", "/viewer/page/report.css"),
    ],
)
def test_nothing_else_is_served(ask, directory, path):
    (directory / "secret").write_text("secret")
    status, body = ask(path)
    assert (status, b"root:" in body, b"secret" in body) == (404, False, False)


@pytest.mark.parametrize(
    "host", ["example.com", "127.0.0.1", "127.0.0.1.example.com:{}", "localhost:1", "", "[::1]:{}"]
)
def test_another_host_name_is_refused(ask, host):
    """A page of another site could have its name point to 127.0.0.1."""
    for path in ("/", "/data.json", "/samples/1.json"):
        assert ask(path, Host=host.format(ask.port))[0] == 403
        assert ask(path, host=host.format(ask.port))[0] == 403  # a second one, behind the right one


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "<script>"])
def test_other_methods_are_refused(ask, method):
    status, body = ask("/data.json", method)
    assert (status, body) == (501, b"this server answers GET and HEAD only")


def test_the_server_follows_a_run_until_it_is_deleted(ask, directory):
    def data() -> dict:
        return json.loads(ask("/data.json")[1])

    with (directory / "samples.jsonl").open("ab") as samples:
        samples.write(lines([a_row(4)])[:-5])
        samples.flush()
        assert [step["step"] for step in data()["samples"]["steps"]] == [1, 2, 3]
        samples.write(lines([a_row(4)])[-5:])
    assert data()["samples"]["steps"][-1]["step"] == 4
    assert len(json.loads(ask("/samples/4.json")[1])["groups"][0]["rows"]) == 1
    (directory / "diagnosis.jsonl").write_bytes(lines([{"step": 3, "finding": "flat", "sentence": "flat"}]))
    assert data()["runs"][0]["diagnosis"][0]["steps"] == [[3, 3]]
    times = (directory / "metrics.jsonl").stat()
    (directory / "new").write_bytes((directory / "metrics.jsonl").read_bytes().replace(b'"step": 3', b'"step": 7'))
    os.utime(directory / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (directory / "new").replace(directory / "metrics.jsonl")
    assert data()["runs"][0]["metrics"]["steps"] == [0, 1, 2, 7]
    (directory / "metrics.jsonl").unlink()
    assert data()["runs"][0]["metrics"]["steps"] == []
    directory.rename(directory.with_name("elsewhere"))
    status, body = ask("/data.json")
    assert (status, b"is gone" in body) == (503, True)
    directory.with_name("elsewhere").rename(directory)
    assert ask("/samples/4.json")[0] == 200


def test_a_port_in_use_is_told_in_one_sentence(ask, directory, capsys):
    with pytest.raises(SystemExit):
        main([str(directory), "--serve", "--port", str(ask.port)])
    assert f"error: port {ask.port} of 127.0.0.1 cannot be used" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="a signal cannot be sent there")
def test_ctrl_c_ends_the_server_quietly(directory):
    command = [sys.executable, "-m", "viewer", str(directory), "--serve", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(2)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 130


def test_nothing_is_left_when_the_page_cannot_be_written(directory, monkeypatch):
    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", no_space)
    before = {path.name for path in directory.iterdir()}
    with pytest.raises(OSError, match=r"No space left on device: '.*/report\.html'$"):
        write_report(directory)
    assert {path.name for path in directory.iterdir()} == before
