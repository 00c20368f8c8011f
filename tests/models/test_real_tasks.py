"""The tasks that others publish figures for, on real rows where those are at hand: trained, evaluated, resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
TASKS = ("gsm8k", "math", "countdown")
# Two steps of the bundled policy
SHORT = (
    *("--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "8", "--eval-prompts", "2"),
    *("--device", "cpu", "--checkpoint-every", "0", "--name", "x"),
)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the published files of GSM8K are not here")
def test_a_small_qwen2_trains_on_gsm8k_and_resumes(save_checkpoint, tmp_path):
    """As a user starts it: five steps on the published training file, evaluated on its test file, two resumed."""
    model = save_checkpoint("qwen2", tmp_path / "model", max_position_embeddings=2048)
    program = (sys.executable, str(ROOT / "experiment_base" / "train.py"))
    settings = (
        *("--task", "gsm8k", "--data", str(GSM8K / "train.jsonl"), "--model", str(model), "--name", "x"),
        *("--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "12", "--eval-prompts", "8"),
        *("--eval-every", "5", "--device", "cpu", "--lr", "1e-3"),
    )

    def run(*arguments: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.run([*program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)

    first = run(*settings, "--steps", "3")
    assert first.returncode == 0, first.stderr
    directory = tmp_path / "runs" / "experiment_base" / "x"
    second = run("--resume", str(directory), "--steps", "5")
    assert second.returncode == 0, second.stderr
    metrics = read_lines(directory / "metrics.jsonl")
    assert {entry["step"] for entry in metrics} == {0, 1, 2, 3, 4, 5}
    assert "eval/greedy/accuracy" in metrics[-1]
    assert {"reward/correct", "reward/strict_format", "reward/integer_answer"} <= metrics[5].keys()
    assert str(GSM8K / "test.jsonl") in (directory / "config.json").read_text()
    questions = {row["question"] for row in read_lines(GSM8K / "train.jsonl")}
    assert {entry["question"] for entry in read_lines(directory / "samples.jsonl")} <= questions


@pytest.mark.parametrize("task", TASKS)
def test_dr_grpo_takes_every_task(task, load_script, tmp_path):
    train = load_script("experiment_drgrpo/train.py")
    train.main(["--task", task, "--data", str(ROOT / f"tests/data/{task}.jsonl"), *SHORT, "--runs-dir", str(tmp_path)])
    metrics = read_lines(tmp_path / "experiment_drgrpo" / "x" / "metrics.jsonl")
    assert {entry["step"] for entry in metrics} == {0, 1, 2}
    assert all("reward/correct" in entry for entry in metrics if "loss/total" in entry)


PREPARED = """
REWARD_WEIGHTS = {"correct": 1.0}
prepared = []
def messages(row, system_prompt):
    return [{"role": "user", "content": row["question"]}]
def prepare(rows, texts):
    prepared.append([(row["question"], text) for row, text in zip(rows, texts, strict=True)])
def reward(row, text):
    if text:  # an empty one is tried before any model is loaded
        prepared[-1].remove((row["question"], text))
    return {"correct": float(len(text) % 2)}
"""


def test_a_task_is_told_of_every_completion_it_rewards(load_script, tmp_path):
    """In training and in evaluations, each with its own row, before the first of them is rewarded."""
    (tmp_path / "task.py").write_text(PREPARED)
    rows = [json.dumps({"question": f"What is {number}+{number}?", "answer": "?"}) for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    files = ("--task", str(tmp_path / "task.py"), "--data", str(tmp_path / "rows.jsonl"))
    train = load_script("experiment_base/train.py")
    train.main([*files, *SHORT, "--steps", "1", "--runs-dir", str(tmp_path)])
    assert {entry["step"] for entry in read_lines(tmp_path / "experiment_base" / "x" / "metrics.jsonl")} == {0, 1}
