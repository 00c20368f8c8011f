"""benchmarks/gpu on a CPU: each part notes what it found. The tests that it starts are in tests/gpu."""

import os
import subprocess
import sys

import pytest
from run_files import ROOT, read_lines

pytestmark = pytest.mark.slow


def test_run_sh_notes_each_result(tmp_path):
    """The command of docs/gpu.md, with one part; late, and with a wrong one."""
    command = ["bash", ROOT / "benchmarks/gpu/run.sh", "--cpu", "--output", tmp_path, "--parts", "resume"]
    environment = os.environ | {"PYTHON": sys.executable, "KEEP": str(tmp_path / "keep")}
    subprocess.run(command, check=True, env=environment)
    machine, found = read_lines(tmp_path / "results.jsonl")
    assert machine["versions"].keys() >= {"torch", "transformers"}
    assert machine["gpu"] is None
    assert found["is_equal"]
    assert found["has_trained"]
    (tmp_path / "results.jsonl").unlink()
    late = subprocess.run([*command, "--minutes", "0"], env=environment, capture_output=True, text=True)
    assert late.returncode == 0
    assert not read_lines(tmp_path / "results.jsonl")[1]["has_trained"]
    wrong = subprocess.run([*command, "nonsense"], env=environment, capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "there is no part nonsense, but tests, learn" in wrong.stderr


def test_runs_are_measured_beside_the_estimate_and_the_cpu(tmp_path, load_script, monkeypatch):
    measure = load_script("benchmarks/gpu/measure.py")
    monkeypatch.setattr(measure, "SIZES", {"Qwen/Qwen2.5-0.5B-Instruct": {"packed": ""}})
    monkeypatch.setattr(measure, "LEARN", {"rewards/dpo": measure.LEARN["rewards/dpo"]})
    bench = measure.Bench(measure.Config(output=tmp_path, cpu=True))
    measure.sizes(bench)
    measure.learn(bench)
    size, dpo = read_lines(tmp_path / "results.jsonl")
    assert size["status"] in (0, "done")  # the run may end by itself before it is ended
    assert size["completions"] == 4
    assert size["tokens_each"] == 16
    assert size["time/tokens_per_second"] > 0
    assert 0.1 < size["memory/peak_bytes"] / size["estimated_bytes"] < 3
    assert dpo["equals_the_cpu"]
    assert dpo["first_step"].keys() == {"loss/grad_norm", "policy/entropy", "loss/total"}
