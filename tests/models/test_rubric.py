"""A rubric: what the judge is asked, what its first word says, and a server that fails as servers do."""

import json
import math
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_files import json_of, metrics_of, read_lines, rows_of

from common.errors import EngineError, UserError

from harness.base.config import TINY_POLICY, ModelConfig, RunConfig
from harness.engines import chat_server
from harness.evaluation.figures import mean_with_interval
from harness.models.loading import load_policy
from harness.task import rubric
from harness.task.answer_judge import load_judges
from harness.task.rubric import Criterion, Rubric, read_rubric

FORMS = (str.lower, str.capitalize, str.upper)
QUESTION = [{"role": "user", "content": "What is 20 + 38?"}]
EXAMPLES = [{"answer": "It is 5.", "verdict": "yes"}, {"prompt": "2+2?", "answer": "No idea.", "verdict": "NO"}]
POLITE = {"name": "polite", "question": "Text: {answer}\nIs it polite?", "examples": EXAMPLES}
LONG = {"name": "long", "question": "Is the answer too long?", "weight": -0.5}


@pytest.fixture
def write(tmp_path):
    def write(*rows: dict | str) -> str:
        path = tmp_path / "rubric.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


def conversations(*answers: str) -> list[list[dict]]:
    return [[*QUESTION, {"role": "assistant", "content": answer}] for answer in answers]


def test_the_judge_is_asked_about_the_answer_and_nothing_in_an_answer_is_replaced(write):
    polite, long = read_rubric(write(POLITE, "", LONG))
    assert (polite.weight, long.weight) == (1.0, -0.5)
    assert [turn["content"] for turn in polite.conversation("20+38?", "{prompt}")] == [
        "Text: It is 5.\nIs it polite? Answer yes or no.", "Yes",
        "Text: No idea.\nIs it polite? Answer yes or no.", "No",
        "Text: {prompt}\nIs it polite? Answer yes or no.",
    ]  # fmt: skip
    (asked,) = long.conversation("20+38?", "58 {answer}")
    expected = "Request: 20+38?\n\nAnswer: 58 {answer}\n\nIs the answer too long? Answer yes or no."
    assert asked == {"role": "user", "content": expected}
    assert [one.name for one in read_rubric(write({"question": "a"}, {"question": "b"}))] == ["judge_1", "judge_2"]
    assert read_rubric(write({"question": "a"}))[0].name == "judge"


@pytest.mark.parametrize(("rows", "problem"), [
    ([], "is empty"),
    (["not json"], "line 1: Expecting value"),
    ([{"question": "a"}, {"name": "b"}], "line 2: a question is missing"),
    ([{"question": "a", "wieght": 2}], "line 1: there is no field 'wieght'"),
    ([{"question": "a", "weight": "2"}], "line 1: weight cannot be '2'"),
    ([{"question": "a", "weight": True}], "line 1: weight cannot be True"),
    (['{"question": "a", "weight": NaN}'], "line 1: weight cannot be nan"),
    ([POLITE, POLITE], "line 2: the name 'polite' is there twice"),
    ([{"question": "a", "examples": [{"answer": "b", "verdict": "maybe"}]}], "not 'maybe'"),
    ([{"question": "a", "examples": [["b", "yes"]]}], "an example has an answer"),
])  # fmt: skip
def test_a_rubric_that_is_none_is_refused(write, rows, problem):
    with pytest.raises(UserError, match=r"--judge .*rubric\.jsonl") as refused:
        read_rubric(write(*rows))
    assert problem in str(refused.value)


def test_verdicts_equal_a_slow_loop_and_each_is_asked_once(write, monkeypatch):
    """Of the bundled policy, which is no judge: all that it says is read here."""
    monkeypatch.setattr(rubric, "UNREAD", 0.0)
    config = SimpleNamespace(judge=write(POLITE, LONG), judge_model="tiny", judge_url=None, device="cpu", strict=False)
    vars(config).update(answer_begins="</think>", generation_batch_size=3)
    (judge,) = load_judges(config)
    texts = ["<think>20+38=58</think>It is 58.", "58", "<think>20+", "No. " * 30, "58"]
    found = judge.score([QUESTION] * 5, texts)
    assert judge.weights == {"polite": 1.0, "long": -0.5}
    assert found[2] == {"polite": 0.0, "long": 1.0}  # no answer: the worst verdicts
    assert found[1] == found[4]

    policy = load_policy(ModelConfig(model="tiny", device="cpu", dtype="float32"), 1.0, is_frozen=True)
    encode = policy.tokenizer.encode
    first = [{encode(space + form(word))[0] for form in FORMS for space in ("", " ")} for word in ("yes", "no")]
    for text, verdicts in zip(("It is 58.", "58"), found, strict=False):
        for criterion in read_rubric(config.judge):
            asked = criterion.conversation(QUESTION[0]["content"], text)
            ids = policy.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
            with torch.no_grad():
                odds = policy.model(torch.tensor([ids])).logits[0, -1].double().exp()
            yes, no = (sum(odds[i].item() for i in one - other) for one, other in (first, first[::-1]))
            assert verdicts[criterion.name] == pytest.approx(yes / (yes + no), abs=1e-6)


def test_each_question_about_a_text_is_asked_once():
    calls = []
    judge = Rubric(
        [Criterion("a", 1.0, "{answer}?", [])], lambda asked: calls.append(len(asked)) or [(0.75, 0.25)] * len(asked)
    )
    assert judge.score(conversations("x", "y", "x")) == [{"a": 0.75}] * 3
    judge.score(conversations("y", "z"))
    assert calls == [2, 1]


def test_a_judge_that_says_neither_is_said_and_pays_nothing(capsys):
    criteria = [Criterion("good", 1.0, "{answer}?", []), Criterion("bad", -1.0, "{answer}??", [])]
    judge = Rubric(criteria, lambda asked: [(0.9, 0.0) if "a" in one[0]["content"] else (0.0, 0.0) for one in asked])
    assert judge.score(conversations("a", "b")) == [{"good": 1.0, "bad": 1.0}, {"good": 0.0, "bad": 1.0}]
    assert "begins 2 of 4 answers with neither yes nor no" in capsys.readouterr().out
    with pytest.raises(UserError, match="does it think first"):
        Rubric(criteria, lambda asked: [(0.0, 0.0)] * len(asked)).score(conversations("c", "d"))


@pytest.fixture
def serve(monkeypatch):
    """A server whose judge likes some texts, by their length; `answers` come first, `left` says when it dies."""
    state = SimpleNamespace(left=10**6, answers=[], calls=Counter(), asked=set(), seconds=0.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, {"version": "0.32.0"} if self.path == "/version" else {"data": [{"id": "judge"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.calls[body["model"], body["max_tokens"], body["logprobs"], body["top_logprobs"]] += 1
            state.asked.add(json.dumps(body["messages"]))
            state.left -= 1
            time.sleep(state.seconds)
            if state.left < 0:
                self.close_connection = True
                return  # as a server that dies: no answer
            if state.answers:
                self.reply(*state.answers.pop(0))
                return
            share = len(body["messages"][-1]["content"]) % 10 / 10
            words = {
                "Yes": share * 0.5,
                " yes": share * 0.25,
                "No": (1 - share) * 0.75,
                "Maybe": 0.2,
                "yesterday": 0.05,
            }
            top = [{"token": word, "logprob": math.log(p)} for word, p in words.items() if p]
            self.reply(200, {"choices": [{"index": 0, "logprobs": {"content": [{"top_logprobs": top}]}}]})

        def reply(self, status: int, content: dict) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with suppress(BrokenPipeError):  # nobody waits any longer
                self.wfile.write(text)

        def log_message(self, *_) -> None:
            pass

    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 128)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield state
        server.shutdown()


def test_a_server_that_is_busy_is_asked_again_and_any_other_failure_is_said(write, serve, monkeypatch):
    monkeypatch.setattr(chat_server, "PAUSES", (0.01, 0.01))
    config = RunConfig(judge=write(POLITE), judge_url=serve.url)
    (judge,) = load_judges(config)
    serve.answers = [(429, {"error": "busy"}), (503, {})]
    content = read_rubric(config.judge)[0].conversation("", "58")[-1]["content"]
    assert judge.score([QUESTION], ["58"]) == [{"polite": pytest.approx(len(content) % 10 / 10)}]
    assert serve.calls == {("judge", 1, True, 20): 3}
    serve.answers = [(429, {"error": "busy"})] * 3
    with pytest.raises(EngineError, match="status 429: busy"):
        judge.score([QUESTION], ["59"])
    for answer in (
        {},
        {"choices": []},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": {"content": []}}]},
        {"choices": [{"logprobs": {"content": [{"top_logprobs": []}]}}] * 2},  # to which question?
    ):
        serve.answers = [(200, answer)]
        with pytest.raises(EngineError, match=r"without log-probs \(logprobs, top_logprobs\)"):
            judge.score([QUESTION], ["60"])
    serve.left = 0
    with pytest.raises(EngineError, match="has not answered POST /v1/chat/completions"):
        judge.score([QUESTION], ["61"])


def test_a_server_that_is_too_slow_is_said(serve):
    server = chat_server.ChatServer(serve.url, seconds=0.3)
    assert server.submit(server.first_token(QUESTION)).result()
    serve.seconds = 1.0
    with pytest.raises(EngineError, match=r"has not answered /v1/chat/completions for 0\.3 seconds"):
        server.submit(server.first_token(QUESTION)).result()


def test_a_judge_needs_a_model_and_a_model_a_rubric(write):
    with pytest.raises(UserError, match="--judge is asked of a model: give --judge-model"):
        load_judges(RunConfig(judge=write(POLITE)))
    with pytest.raises(UserError, match="--judge-url answers a rubric: give --judge FILE"):
        load_judges(RunConfig(judge_url="http://127.0.0.1:1"))


@pytest.mark.slow
def test_a_policy_is_trained_against_a_server_that_dies(write, serve, load_script, tmp_path):
    """Each question is a component with its weight; the run goes on, bit for bit, where it was."""
    script = load_script("experiment_base/train.py")
    flags = (
        "--steps 2 --prompts-per-step 2 --group-size 4 --max-new-tokens 24 --eval-prompts 1 --device cpu --kl-weight 0"
    )
    flags += f" --checkpoint-every 1 --judge {write(POLITE, LONG)} --judge-url {serve.url} --runs-dir {tmp_path}"
    script.main([*flags.split(), "--name", "whole"])
    whole, calls = tmp_path / "experiment_base" / "whole", serve.calls.total()
    for row in rows_of(whole, "samples"):
        assert all(0 <= row["rewards"][name] <= 1 for name in ("polite", "long"))
    for row in (row for row in metrics_of(whole) if "reward/total" in row):
        parts = row["reward/correct"] + row["reward/polite"] - 0.5 * row["reward/long"]
        assert row["reward/total"] == pytest.approx(parts)
    serve.left = calls - 20
    with pytest.raises(UserError, match="resume"):
        script.main([*flags.split(), "--name", "cut"])
    serve.left = 10**6
    script.main(["--resume", str(whole.with_name("cut"))])

    def found(run):
        return [(row["step"], row["text"], row["rewards"]) for row in rows_of(run, "samples")]

    assert found(whole.with_name("cut")) == found(whole)


# An evaluation with a judge -------------------------------------------------------------------------------------------


@pytest.fixture
def evaluate(load_script, tmp_path, monkeypatch):
    """Call main() of evaluate.py in an empty directory; a completion is often a text that an earlier batch has."""
    monkeypatch.chdir(tmp_path)
    flags = "--device cpu --limit 6 --num-samples 4 --max-new-tokens 8 --generation-batch-size 6"
    return lambda *argv: load_script("evaluate.py").main([*flags.split(), *argv])


def asked_about(path, rubric: str) -> list[set[str]]:
    """What the judge has to be asked about each completion of an evaluation."""
    rows = read_lines(TINY_POLICY.parents[1] / "math_tasks_heldout.jsonl")
    return [
        {json.dumps(one.conversation(rows[line["question"]]["question"], line["text"])) for one in read_rubric(rubric)}
        for line in read_lines(path)
    ]


def test_verdicts_are_figures_and_a_resumed_evaluation_asks_only_what_is_new(evaluate, write, serve, capsys, tmp_path):
    rubric = write(POLITE, LONG)
    flags = ("--judge", rubric, "--judge-url", serve.url)
    evaluate(*flags, "--output", "whole")
    whole, results = tmp_path / "whole/completions.jsonl", json_of(tmp_path / "whole/results.json")
    printed, lines = capsys.readouterr().out, read_lines(whole)
    for name in ("polite", "long"):
        values = [line["rewards"][name] for line in lines]
        means = [sum(values[start : start + 4]) / 4 for start in range(6, 30, 4)]
        assert results["greedy"]["judged"][name] == pytest.approx(mean_with_interval(values[:6]))
        assert results["sampled"]["judged"][name] == pytest.approx(mean_with_interval(means, 4))
        assert [row["judged"][f"greedy {name}"] for row in results["questions"]] == values[:6]
        assert [row["judged"][f"sampled {name}"] for row in results["questions"]] == pytest.approx(means)
        assert "{value:.3f} [{low:.3f}-{high:.3f}]".format(**results["greedy"]["judged"][name]) in printed
    asked = asked_about(whole, rubric)
    assert serve.asked == set().union(*asked)
    assert serve.calls.total() == len(serve.asked)

    serve.left = serve.calls.total() - 4
    with pytest.raises(EngineError, match=r"has not answered .*; continue with: python .* --output out"):
        evaluate(*flags, "--output", "out")
    kept = len(read_lines(tmp_path / "out/completions.jsonl"))
    before, after = set().union(*asked[:kept]), set().union(*asked[kept:])
    assert before & after
    assert after - before
    serve.left, serve.asked = 10**6, set()
    evaluate(*flags, "--output", "out")
    assert serve.asked == after - before
    assert (tmp_path / "out/completions.jsonl").read_bytes() == whole.read_bytes()

    # without a server, a complete evaluation is shown again
    evaluate(*flags[:2], "--judge-url", "http://127.0.0.1:9", "--output", "out")
    write(POLITE)
    with pytest.raises(UserError, match=r"--judge .* has changed since out began"):
        evaluate(*flags, "--output", "out")


def test_verdicts_of_the_same_rubric_are_compared(evaluate, write, serve, capsys):
    flags = ("--num-samples", "0", "--judge-url", serve.url, "--judge")
    evaluate(*flags, write(POLITE), "--output", "before")
    evaluate(*flags, write(POLITE), "--output", "after", "--completion-prefix", "58 ", "--compare", "before")
    greedy = [
        json_of(Path(name, "results.json"))["greedy"]["judged"]["polite"]["value"] for name in ("before", "after")
    ]
    assert greedy[0] != greedy[1]
    assert f"  greedy polite                {greedy[1] - greedy[0]:+.3f} [" in capsys.readouterr().out
    evaluate(*flags, write(POLITE | {"question": "Good?"}), "--output", "other", "--compare", "before")
    printed = capsys.readouterr().out
    assert "greedy polite" not in printed
    assert "another setting: --judge " in printed


def test_prompts_without_right_answers_have_verdicts_alone(evaluate, write, serve, capsys, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Write a poem."}\n{"prompt": "What is 1+1?"}\n')
    flags = ("--task", "prompts", "--data", "prompts.jsonl", "--judge", write(POLITE), "--judge-url", serve.url)
    evaluate(*flags, "--output", "before")
    evaluate(*flags, "--output", "after", "--temperature", "2", "--compare", "before")
    results, printed = json_of(tmp_path / "after/results.json"), capsys.readouterr().out
    assert results["sampled"].keys() == {"n", "judged", "means", "accuracy_if", "length", "cut_off"}
    assert results["comparison"]["differences"].keys() == {"greedy polite", "sampled polite"}
    assert "polite " in printed
    assert not any(word in printed for word in ("accuracy", "@", "if right", "became", "no answer", "failures"))
    assert not (tmp_path / "after/failures.txt").exists()


def test_an_evaluation_has_the_verdicts_of_training(evaluate, write, monkeypatch, tmp_path):
    """Of a judge in this process, which sees no thoughts."""
    monkeypatch.setattr(rubric, "UNREAD", 0.0)
    flags = {"judge": write(POLITE, LONG), "judge_model": "tiny", "answer_begins": "</think>", "strict": True}
    (judge,) = load_judges(RunConfig(device="cpu", **flags))
    words = ("--judge", flags["judge"], "--judge-model", "tiny", "--answer-begins", "</think>", "--strict")
    evaluate(*words, "--completion-prefix", "<think>", "--max-new-tokens", "24", "--output", "out")
    rows = read_lines(TINY_POLICY.parents[1] / "math_tasks_heldout.jsonl")
    lines = read_lines(tmp_path / "out/completions.jsonl")
    asked = [[{"role": "user", "content": rows[line["question"]]["question"]}] for line in lines]
    expected = judge.score(asked, [line["text"] for line in lines])
    worst = [verdicts == {"polite": 0.0, "long": 1.0} for verdicts in expected]
    assert any(worst)
    assert not all(worst)
    for line, verdicts in zip(lines, expected, strict=True):
        assert {name: line["rewards"][name] for name in verdicts} == pytest.approx(verdicts, abs=1e-6)
    assert "judge_model" in json_of(tmp_path / "out/config.json")["sources"]
