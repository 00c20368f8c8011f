"""A reward model is made, and policies are trained against it: by a directory or a server, thoughts shown or hidden."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_files import json_of, metrics_of, rows_of

from common.errors import UserError
from common.given_answers import encode_conversation
from common.reward_model import score_rows

from harness.base.config import RunConfig
from harness.logs.diagnosis import OVER_OPTIMISED, Diagnosis
from harness.models.reward_loading import load_reward_model

SHORT = "--steps 2 --prompts-per-step 2 --group-size 4 --max-new-tokens 24 --eval-prompts 1 --device cpu --kl-weight 0"
NUM_ASKED = 9  # completions of an evaluation
MIXED = ("--reward-weight", "preference=0.5", "--checkpoint-every", "1")


@pytest.fixture(scope="module")
def judge(load_script, tmp_path_factory):
    """The directory of a run that makes a reward model."""
    runs = tmp_path_factory.mktemp("runs")
    flags = "--max-pairs 96 --pairs-per-step 16 --eval-prompts 30 --eval-every 3 --checkpoint-every 0 --lr 1e-3 "
    flags += "--device cpu --name judge"
    load_script("rewards/reward_model/train.py").main([*flags.split(), "--runs-dir", str(runs)])
    return runs / "reward_model" / "judge"


@pytest.fixture
def run(load_script, tmp_path, capsys):
    """Two steps of experiment_base: the metrics, and the directory."""

    def call(name: str, *flags: str, experiment: str = "experiment_base") -> tuple[list[dict], object]:
        arguments = [*SHORT.split(), "--runs-dir", str(tmp_path), "--name", name, *flags]
        load_script(f"{experiment}/train.py").main(arguments)
        directory = tmp_path / Path(experiment).name / name
        return metrics_of(directory), directory

    return call


@pytest.fixture
def serve(judge, monkeypatch):
    """A server that scores conversations with the reward model, as vLLM's pooling interface does; `left`: how often."""
    model = load_reward_model(str(judge / "final"), "cpu", torch.float32)
    state = SimpleNamespace(left=10**6, answer=None, calls=Counter())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"version": "0.32.0"} if self.path == "/version" else {"data": [{"id": "judge"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.calls[body["model"], body["task"], body["use_activation"]] += 1
            state.left -= 1
            if state.left < 0:
                self.close_connection = True
                return  # as a server that dies: no answer
            ids = encode_conversation(model.tokenizer, body["messages"])
            self.reply(state.answer or {"data": [{"index": 0, "data": score_rows(model, [ids], 1)}]})

        def reply(self, content: dict) -> None:
            text = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_) -> None:
            pass

    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 128)  # all completions are sent at the same time
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield state
        server.shutdown()


@pytest.mark.slow
def test_a_reward_model_learns_which_answers_are_reasoned(judge):
    """Six steps are enough for that, and for nothing else."""
    summary, metrics = json_of(judge / "summary.json"), rows_of(judge)
    assert summary["eval/accuracy"] > 0.65 > summary["eval/accuracy_same_style"]
    assert [row["step"] for row in metrics if "eval/accuracy" in row] == [3, 6]
    assert metrics[-1]["loss/total"] < metrics[0]["loss/total"]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_multiturn_tool_calling"])
def test_its_score_is_a_component_of_the_reward(judge, run, serve, load_script, experiment):
    """A server trains the same policy; one that dies loses no step."""
    metrics, directory = run("here", "--reward-model", str(judge / "final"), *MIXED, experiment=experiment)
    rows = rows_of(directory, "samples")
    assert all("preference" in row["rewards"] for row in rows)
    assert len({row["rewards"]["preference"] for row in rows}) > 1
    assert {"reward/preference", "eval/greedy/reward_preference"} <= set().union(*metrics)
    if experiment != "experiment_base":
        return
    model = load_reward_model(str(judge / "final"), "cpu", torch.float32)
    for row in rows[:4]:
        question, answer = {"role": "user", "content": row["question"]}, {"role": "assistant"}
        ids = encode_conversation(model.tokenizer, [question, answer | {"content": row["text"]}])
        assert row["rewards"]["preference"] == pytest.approx(score_rows(model, [ids], 1)[0], abs=1e-5)
    for row in (row for row in metrics if "reward/total" in row):
        assert row["reward/total"] == pytest.approx(row["reward/correct"] + 0.5 * row["reward/preference"])

    serve.left = NUM_ASKED + 2 * 8 - 4  # it dies in the last step
    with pytest.raises(UserError, match=r"has not answered POST /pooling.*when the engine can be used again, resume"):
        run("there", "--reward-model-url", serve.url, *MIXED)
    serve.left = 10**6
    load_script("experiment_base/train.py").main(["--resume", str(directory.with_name("there"))])
    resumed = metrics_of(directory.with_name("there"))
    assert [row["step"] for row in resumed] == [0, 1, 2, 2]
    for row, other in zip(resumed, metrics, strict=True):
        assert row == {name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in other.items()}
    assert set(serve.calls) == {("judge", "classify", False)}


@pytest.mark.slow
def test_a_server_of_another_kind_is_refused(run, serve):
    for number, answer in enumerate(([{"data": [0.1, 0.2]}], [], [{"data": ["x"]}])):
        serve.answer = {"data": answer}
        with pytest.raises(UserError, match="other than one number"):
            run(f"wrong{number}", "--reward-model-url", serve.url)


@pytest.mark.slow
def test_a_hidden_thought_changes_no_score_and_a_malformed_one_gets_the_floor(judge, run):
    flags = ("--reward-model", str(judge / "final"), "--answer-begins", "</think>", "--no-answer-penalty", "3")
    _, lenient = run("lenient", *flags)
    _, strict = run("strict", *flags, "--strict")
    model = load_reward_model(str(judge / "final"), "cpu", torch.float32)
    rows = rows_of(lenient, "samples")
    assert {"</think>" in row["text"] for row in rows} == {True, False}
    for row in rows:
        answer = row["text"].rpartition("</think>")[2].partition("<think>")[0].strip()
        question = {"role": "user", "content": row["question"]}
        ids = encode_conversation(model.tokenizer, [question, {"role": "assistant", "content": answer}])
        expected = score_rows(model, [ids], 1)[0] if answer else -3.0
        assert row["rewards"]["preference"] == pytest.approx(expected, abs=1e-5)
    direct = [row for row in rows_of(strict, "samples") if "</think>" not in row["text"]]
    assert {row["rewards"]["preference"] for row in direct} == {-3.0}


# Over-optimisation


def evaluations(*pairs: tuple[float, float]) -> list[dict]:
    names = ("eval/greedy/reward_preference", "eval/greedy/accuracy")
    return [{"step": 10 * number, **dict(zip(names, pair, strict=True))} for number, pair in enumerate(pairs)]


@pytest.mark.parametrize(("pairs", "is_found"), [
    ([(0.0, 0.2), (2.0, 0.9), (2.5, 0.6)], True),
    ([(0.0, 0.2), (2.0, 0.9), (2.5, 0.88)], False),  # within the noise of 256 questions
    ([(0.0, 0.2), (2.0, 0.9), (1.0, 0.6)], False),  # both have fallen
    ([(0.0, 0.2), (2.0, 0.6), (2.5, 0.9)], False),
    ([(0.0, 0.2)], False),
])  # fmt: skip
def test_over_optimisation_is_told_once(pairs, is_found):
    diagnosis = Diagnosis(RunConfig(eval_prompts=256), ["correct", "preference"])
    said = [sentence for row in evaluations(*pairs) for sentence in diagnosis.check(row)]
    assert (OVER_OPTIMISED in diagnosis.findings) == is_found == any("over-optimised" in s for s in said)
    if is_found:
        assert "since step 10" in said[0]


@pytest.mark.slow
def test_a_run_ends_early_when_it_is_found(judge, run, monkeypatch):
    pairs = iter([(0.0, 0.2), (2.0, 0.9), (2.5, 0.1), *[(3.0, 0.1)] * 9])
    check = Diagnosis.check

    def check_other_values(self, metrics: dict) -> list[str]:
        other = evaluations(next(pairs))[0] if "eval/greedy/accuracy" in metrics else {}
        return check(self, metrics | other | {"step": metrics["step"]})

    monkeypatch.setattr(Diagnosis, "check", check_other_values)
    flags = ("--stop-when", "over-optimised", "--steps", "9", "--eval-every", "1", "--eval-prompts", "3")
    metrics, directory = run("early", "--reward-model", str(judge / "final"), *flags)
    assert max(row["step"] for row in metrics) == 2
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_2"]
    assert (directory / "summary.json").exists()
