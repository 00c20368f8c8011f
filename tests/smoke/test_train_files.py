"""Every train.py as users run it: in its own process, for two steps, on a CPU."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.tasks.arithmetic import EVAL_DATA, TRAIN_DATA

from common.plumbing.config import RESOLVED

ROOT = Path(__file__).resolve().parents[2]
TRAIN_FILES = sorted(ROOT.glob("experiment_*/train.py"))
WITH_REWARDS = [path for path in TRAIN_FILES if "\n    group_size: int" in path.read_text()]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """Start `python <arguments>` in `cwd`, as from a user's shell."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=ONE_THREAD, capture_output=True, text=True, timeout=110
    )


def read_metrics(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@functools.cache
def help_of(path: Path) -> str:
    result = run(str(path), "--help", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("path", TRAIN_FILES, ids=lambda path: path.parent.name)
def test_help_explains_every_option(path):
    options = re.split(r"\n│ (?=--)", help_of(path))[1:]
    assert {re.match(r"--[a-z-]+", option)[0] for option in options} >= {"--model", "--seed", "--lr", "--runs-dir"}
    for option in options:
        words = re.sub(r"\(default:.*|[│╭╮╰╯─]|^--\S+( \S+)?", " ", option, flags=re.DOTALL).split()
        assert len(words) >= 2, option


@pytest.mark.parametrize("path", WITH_REWARDS, ids=lambda path: path.parent.name)
def test_two_steps_leave_a_complete_run(tmp_path, path):
    result = run(
        str(path),
        *("--steps", "2", "--prompts-per-step", "4", "--group-size", "4", "--eval-prompts", "4", "--name", "smoke"),
        *("--epochs-per-step", "2", "--minibatch-size", "8", "--checkpoint-every", "1"),
        cwd=tmp_path,  # not the repository: nothing may depend on the working directory
    )
    assert result.returncode == 0, result.stderr
    directory = tmp_path / "runs" / path.parent.name / "smoke"
    for name in ("config.json", "samples.jsonl", "curve.png", "final/model.safetensors", "checkpoints/step_1"):
        assert (directory / name).exists(), name
    assert list(directory.glob("events.out.tfevents.*"))

    metrics = read_metrics(directory)
    assert [entry["step"] for entry in metrics] == [0, 1, 2, 2]
    assert metrics[1]["policy/first_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics[1]["policy/sampling_log_prob_difference"] < 1e-4
    assert metrics[1]["loss/grad_norm"] > 0
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["peak_memory_bytes"] > 1e8
    config = json.loads((directory / "config.json").read_text())
    assert config["max_new_tokens"] is not None  # as resolved
    assert "held-out questions" in result.stdout
    assert "tensorboard --logdir" in result.stdout


@pytest.mark.parametrize("path", WITH_REWARDS, ids=lambda path: path.parent.name)
def test_a_copy_of_the_template_is_trained_and_evaluated(tmp_path, monkeypatch, load_script, path):
    """As the README's section "Your own task" says, with a changed weight."""
    shutil.copy(ROOT / "docs" / "task_template.py", tmp_path / "my_task.py")
    monkeypatch.chdir(tmp_path)
    load_script(f"{path.parent.name}/train.py").main(
        [
            *("--task", "my_task.py", "--data", str(TRAIN_DATA), "--eval-data", str(EVAL_DATA)),
            *("--reward-weight", "short=0.3", "--steps", "2", "--prompts-per-step", "2", "--group-size", "4"),
            *("--max-new-tokens", "24", "--eval-prompts", "4", "--name", "mine"),
        ]
    )
    directory = tmp_path / "runs" / path.parent.name / "mine"
    before, *steps, after = read_metrics(directory)
    for entry in (before, after):
        assert {"eval/sampled/accuracy", "eval/sampled/reward_short", "eval/sampled/thinks"} <= entry.keys()
    for entry in steps:
        expected = entry["reward/correct"] + 0.3 * entry["reward/short"]
        assert entry["reward/total"] == pytest.approx(expected)
        assert 0 <= entry["completion/thinks"] <= 1
    summary = json.loads((directory / "summary.json").read_text())
    assert list(summary["gain"]) == ["choice of style", "better if thinks", "better if answers_directly"]
    gain = summary["after"]["sampled/accuracy"] - summary["before"]["sampled/accuracy"]
    assert sum(summary["gain"].values()) == pytest.approx(gain)
    assert (directory / "curve.png").stat().st_size > 1000


def test_a_task_without_correct_is_trained_and_drawn(tmp_path, monkeypatch, load_script):
    text = (ROOT / "docs" / "task_template.py").read_text()
    text = text.replace('"correct": 1.0, ', "").replace('"correct": float(is_correct), ', "")
    (tmp_path / "my_task.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    load_script("experiment_base/train.py").main(
        [
            *("--task", "my_task.py", "--data", str(TRAIN_DATA), "--steps", "1", "--prompts-per-step", "2"),
            *("--group-size", "2", "--max-new-tokens", "8", "--eval-prompts", "2", "--name", "mine"),
        ]
    )
    directory = tmp_path / "runs" / "experiment_base" / "mine"
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (None, None)
    assert "sampled/reward_short" in summary["after"]
    assert (directory / "curve.png").stat().st_size > 1000


def test_experiment_base_trains_a_policy_of_experiment_sft(tmp_path, load_script):
    """The policy is loaded from the directory final/."""
    lessons = ("--num-copying", "60", "--num-reasoning", "30", "--num-answering", "30")
    result = run(
        str(ROOT / "experiment_sft" / "train.py"),
        *(*lessons, "--eval-prompts", "1", "--name", "smoke", "--save-dtype", "bfloat16"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    policy = tmp_path / "runs" / "experiment_sft" / "smoke" / "final"
    load_script("experiment_base/train.py").main(
        [
            *("--model", str(policy), "--steps", "1", "--prompts-per-step", "2", "--group-size", "2"),
            *("--max-new-tokens", "8", "--eval-prompts", "1", "--name", "smoke", "--runs-dir", str(tmp_path)),
        ]
    )
    assert (tmp_path / "experiment_base" / "smoke" / "summary.json").exists()


def test_experiment_sft_lowers_the_loss_on_a_users_data(tmp_path, monkeypatch, load_script):
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": str(n)}]}
        for n in range(200)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "experiment_sft")
    load_script("experiment_sft/train.py").main(
        ["--model", "tiny", "--data", "chats.jsonl", "--epochs", "4", "--name", "smoke", "--warmup-steps", "2"]
    )
    metrics = read_metrics(tmp_path / "runs" / "experiment_sft" / "smoke")
    assert metrics[-1]["loss/total"] < 0.5 * metrics[0]["loss/total"]


def test_experiment_sft_only_examines_a_model_without_lessons(tmp_path, monkeypatch, load_script):
    """As its README says; there is no step, and so no curve."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "experiment_sft")
    lessons = ("--num-copying", "0", "--num-reasoning", "0", "--num-answering", "0")
    load_script("experiment_sft/train.py").main(["--model", "tiny", *lessons, "--eval-prompts", "2", "--name", "smoke"])
    directory = tmp_path / "runs" / "experiment_sft" / "smoke"
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == 0
    assert {"eval/greedy/accuracy", "eval_forced/greedy/accuracy"} <= summary.keys()
    assert (directory / "final" / "model.safetensors").exists()


def test_help_states_the_defaults_that_the_table_resolves():
    help_text = help_of(ROOT / "experiment_base" / "train.py")
    for value in (RESOLVED["tiny"]["lr"], RESOLVED["full"]["lr"]):
        assert f"{value:.0e}".replace("e-0", "e-") in help_text
    for value in (RESOLVED["tiny"]["max_new_tokens"], RESOLVED["full"]["max_new_tokens"]):
        assert str(value) in help_text
