"""The runs to export: trained once, for one step."""

import shutil

import pytest

SHORT = (
    *("--steps", "1", "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "12", "--eval-prompts", "4"),
    *("--checkpoint-every", "1", "--device", "cpu"),
)


@pytest.fixture(scope="session")
def runs(load_script, tmp_path_factory):
    """The runs "full" and "lora" of experiment_base, with learning rates that change answers."""
    parent = tmp_path_factory.mktemp("runs")
    main = load_script("experiment_base/train.py").main
    main([*SHORT, "--runs-dir", str(parent), "--name", "full", "--lr", "1e-3"])
    main([*SHORT, "--runs-dir", str(parent), "--name", "lora", "--lr", "1e-2", "--lora-rank", "2"])
    return parent / "experiment_base"


@pytest.fixture
def copied(runs, tmp_path):
    """A copy of a run that a test can damage: copied("full")."""
    return lambda name: shutil.copytree(runs / name, tmp_path / name)


@pytest.fixture
def export(load_script, tmp_path, monkeypatch):
    """Call main() of export.py in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *argv: load_script("export.py").main([*map(str, argv), "--device", "cpu", "--questions", "4"])
