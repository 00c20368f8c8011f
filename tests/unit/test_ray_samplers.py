"""scale/asynchronous --samplers: what Ray's processes draw, and that a run survives the death of one."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from policies import read_plain
from run_files import ROOT, rows_of

from harness.base.config import TINY_POLICY, RunConfig

pytest.importorskip("ray")
SCRIPT = "scale/asynchronous/train.py"
FLAGS = "--prompts-per-step 2 --group-size 4 --max-new-tokens 24 --eval-prompts 1"


def start(directory, flags: str, script: str = SCRIPT) -> subprocess.Popen:
    command = [sys.executable, script, *FLAGS.split(), "--runs-dir", directory, *flags.split()]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_of(directory) -> list[dict]:
    return [row for row in rows_of(directory) if "time/step" in row] if (directory / "metrics.jsonl").exists() else []


def wait_for(condition, process: subprocess.Popen, seconds: float = 120):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)
    return found


@torch.no_grad()
def test_each_token_is_drawn_with_the_newest_weights_that_have_arrived(load_script, monkeypatch):
    """Weights arrive in mid-completion: after every second token those of a later update. Older ones are not taken."""
    samplers = load_script("scale/asynchronous/ray_samplers.py")
    config = RunConfig(model="tiny", device="cpu", dtype="float32", attn_implementation="sdpa", threads=1)
    sampler = samplers.SamplerProcess(config, 1.0, swap_every=2, dtype=None)
    models = [read_plain(TINY_POLICY) for _ in range(4)]
    for version, model in enumerate(models):
        noise = torch.Generator().manual_seed(version)
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=noise))
    weights = [[weight.clone() for weight in model.parameters()] for model in models]
    arriving = iter([0, 2, 1, 3])  # from the second chunk on; those of update 1 come too late

    def continue_rows(*arguments, _real=samplers.continue_rows, **settings):
        _real(*arguments, **settings)
        if (version := next(arriving, None)) is not None:
            sampler.take(version, weights[version])

    monkeypatch.setattr(samplers, "continue_rows", continue_rows)
    settings = {"max_new_tokens": 12, "prompt_index": [5, 6], "key": (0, 1)}
    part = sampler.sample(0, weights[0], [[5, 6, 7], [8, 9]], 2, range(1, 4), **settings)
    assert part.versions == [0, 0, 2, 2, 3, 3][: len(part.versions)]
    assert len(part.versions) > 4
    assert [(row.prompt_index, row.completion_index) for row in part.rows] == [(5, 1), (6, 0), (6, 1)]
    for row in part.rows:
        scores = [model(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(dim=-1) for model in models]
        for number, t in enumerate(range(row.prompt_length, len(row.ids))):
            found = [score[t - 1, row.ids[t]].item() for score in scores]
            own = found[part.versions[number // 2]]
            assert row.sampler_log_probs[t] == pytest.approx(own, abs=1e-4)


@pytest.mark.slow
def test_without_staleness_the_samplers_change_nothing(tmp_path):
    """Two samplers, each with half of the questions, and the weights of the last update: experiment_base's run."""
    flags = "--steps 3 --name x --checkpoint-every 0"
    runs = [start(tmp_path / "ray", f"{flags} --samplers 2 --max-staleness 0"), start(tmp_path, f"{flags} --lag 0")]
    for run in runs:
        assert run.wait(timeout=240) == 0, run.communicate()[0]
    found, expected = (rows_of(place / "asynchronous" / "x", "samples") for place in (tmp_path / "ray", tmp_path))
    assert len(found) == 3 * 8
    assert [row["ids"] for row in found] == [row["ids"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row["sampler_log_probs"] == pytest.approx(other["sampler_log_probs"], abs=1e-4)


@pytest.mark.slow
def test_a_run_survives_the_death_of_a_sampler_and_ctrl_c(tmp_path):
    """Each step is trained on once, with all its questions; no sample is older than allowed."""
    directory = tmp_path / "asynchronous" / "x"
    flags = "--samplers 2 --max-staleness 2 --steps 40 --name x --checkpoint-every 1"
    run = start(tmp_path, flags)
    wait_for(lambda: len(steps_of(directory)) > 2, run)
    actors = [child for child in psutil.Process(run.pid).children(recursive=True) if "SamplerProcess" in child.name()]
    assert len(actors) == 2
    actors[0].kill()
    num_steps = len(steps_of(directory))
    wait_for(lambda: len(steps_of(directory)) > num_steps + 4, run)
    os.kill(run.pid, signal.SIGINT)
    output = run.communicate(timeout=120)[0]
    assert "--resume" in output, output
    assert all(not actor.is_running() for actor in actors)
    assert len(steps_of(directory)) < 40
    command = [sys.executable, SCRIPT, "--resume", directory]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = rows_of(directory, "samples")
    assert [row["step"] for row in steps_of(directory)] == list(range(1, 41))
    for step in range(1, 41):
        of_step = [row for row in rows if row["step"] == step]
        assert len({(row["prompt_index"], row["completion_index"]) for row in of_step}) == len(of_step) == 8
        assert all(0 <= age <= min(2, step - 1) for row in of_step for age in row["updates"][0]["staleness"])
    lanes = [json.loads(line) for line in (directory / "lanes.jsonl").read_text("utf-8").splitlines()]
    assert {lane["lane"] for lane in lanes} == {"trainer", "sampler 0", "sampler 1"}
