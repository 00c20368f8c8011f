"""With `--critic-type grpo` experiment_drgrpo equals experiment_base; without it, two divisions are left out."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

QUICK = (
    *("--steps", "3", "--prompts-per-step", "3", "--group-size", "4", "--max-new-tokens", "16", "--eval-prompts", "2"),
    *("--epochs-per-step", "2", "--minibatch-size", "4", "--lr", "1e-4", "--device", "cpu", "--name", "x"),
)
FILES = ("final/model.safetensors", "samples.jsonl")


@pytest.fixture
def run(load_script, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Run an experiment with some flags; returns the directory of the run."""
    monkeypatch.chdir(tmp_path)

    def run(experiment: str, *flags: str) -> Path:
        place = flags[-1] if flags else "as_it_is"
        load_script(f"{experiment}/train.py").main([*QUICK, "--runs-dir", place, *flags])
        return tmp_path / place / experiment / "x"

    return run


def read_metrics(directory: Path) -> list[dict]:
    """The metrics without time and memory, which differ from run to run."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if not name.startswith(("time/", "memory/"))} for row in rows]


def test_with_grpo_it_is_experiment_base_bit_for_bit(run):
    base, other = run("experiment_base"), run("experiment_drgrpo")
    same = run("experiment_drgrpo", "--critic-type", "grpo")
    assert read_metrics(same) == read_metrics(base) != read_metrics(other)
    for name in FILES:
        digests = [hashlib.sha256((directory / name).read_bytes()).digest() for directory in (base, same, other)]
        assert digests[0] == digests[1] != digests[2], name


def test_the_advantage_is_the_return_minus_the_groups_mean(run):
    """In the first step, where both have sampled the same completions."""

    def first_step(critic_type: str) -> list[dict]:
        directory = run("experiment_drgrpo", "--critic-type", critic_type)
        rows = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
        return [row for row in rows if row["step"] == 1]

    grpo, drgrpo = first_step("grpo"), first_step("drgrpo")
    assert [row["ids"] for row in grpo] == [row["ids"] for row in drgrpo]
    returns = torch.tensor([row["rewards"]["correct"] for row in grpo]).view(-1, 4)  # complete groups are kept
    centered = returns - returns.mean(dim=1, keepdim=True)
    std = returns.std(dim=1, keepdim=True)
    assert (std > 0).any()
    assert [row["advantage"] for row in drgrpo] == pytest.approx(centered.flatten().tolist(), abs=1e-6)
    expected = torch.where(std > 0, centered / (std + 1e-4), 0.0)
    assert [row["advantage"] for row in grpo] == pytest.approx(expected.flatten().tolist(), abs=1e-5)


def test_the_gradient_is_shorter_by_the_completion_budget(run):
    """Doubling `--max-new-tokens` where no completion is cut off halves the first gradient and changes nothing else."""
    one_update = ("--steps", "1", "--epochs-per-step", "1", "--minibatch-size", "12")
    first = {}
    for budget in ("96", "192"):
        first[budget] = read_metrics(run("experiment_drgrpo", *one_update, "--max-new-tokens", budget))[1]
    assert first["96"]["completion/truncated"] == first["192"]["completion/truncated"] == 0
    assert first["192"]["loss/grad_norm"] == pytest.approx(first["96"]["loss/grad_norm"] / 2, rel=1e-4)
    assert first["192"]["policy/entropy"] == first["96"]["policy/entropy"]


def test_an_unknown_critic_type_is_refused(run):
    with pytest.raises(SystemExit):
        run("experiment_drgrpo", "--critic-type", "ppo")
