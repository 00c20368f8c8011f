"""When Ctrl-C ends a run: after the step that it interrupts, or at once."""

from harness.base.interrupt import PROGRAMS
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

import harness.run.stopping
from harness.base.config import RunConfig
from harness.models.loading import load_policy
from harness.run.start import start_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def events(load_script, tmp_path):
    """Run three steps, with some Ctrl-Cs at a given moment; returns the events, and the remaining checkpoints."""
    config_class = load_script("experiment_base/train.py").Config
    policy = load_policy(RunConfig(device="cpu"))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)

    def run(moment: str, times: int) -> list[str]:
        seen = []

        def reach(name: str) -> None:
            seen.append(name)
            if name == moment:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

        def train() -> None:
            config = config_class(runs_dir=str(tmp_path), name="mine", threads=1, checkpoint_every=0)
            with start_run(config) as run:
                reach("evaluation before")
                for step in run.steps(3):
                    reach(f"step {step}")
                    seen.append(f"end of step {step}")
                    run.checkpoint(step, policy, optimizer)
                reach("evaluation after")
                seen.append("end of evaluation")

        with pytest.raises(KeyboardInterrupt, match=r"^interrupted; resume with: "):
            train()
        directory = tmp_path / "experiment_base" / "mine"
        found = seen + sorted(path.name for path in directory.glob("checkpoints/*"))
        shutil.rmtree(directory)
        return found

    return run


@pytest.mark.parametrize(("moment", "times", "last"), [
    ("step 1", 1, ["step 1", "end of step 1", "step_1"]),
    ("step 3", 1, ["step 3", "end of step 3", "step_3"]),
    ("step 2", 2, ["end of step 1", "step 2"]),  # a second one ends the step at once
    ("evaluation before", 1, ["evaluation before"]),
    ("evaluation after", 1, ["end of step 3", "evaluation after"]),
])  # fmt: skip
def test_a_step_is_finished_and_all_else_ends_at_once(events, moment, times, last):
    assert events(moment, times)[-len(last) :] == last


def test_a_ctrl_c_that_comes_while_a_sentence_is_printed_is_not_lost(load_script, tmp_path, monkeypatch):
    config = load_script("experiment_base/train.py").Config(runs_dir=str(tmp_path), name="mine", threads=1)
    say = harness.run.stopping.say_above_progress

    def say_and_interrupt(sentence: str) -> bool:
        if sentence == "an example":
            signal.raise_signal(signal.SIGINT)
        return say(sentence)

    monkeypatch.setattr(harness.run.stopping, "say_above_progress", say_and_interrupt)

    def train() -> None:
        with start_run(config) as run:
            for _ in run.steps(3):
                run.stopping.request.tell("an example")
                assert run.stopping.request.agree()

    with pytest.raises(KeyboardInterrupt):
        train()


def test_every_program_that_ends_at_once_is_known():
    imports_it = re.compile("^(import|from) harness.base.interrupt", re.MULTILINE)
    files = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
    programs = [path for path in files if imports_it.search(path.read_text(encoding="utf-8"))]
    assert len(programs) > 10
    assert [path for path in programs if not path.name.startswith(PROGRAMS)] == []
