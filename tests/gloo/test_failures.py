"""A failure in one of several processes ends all of them, soon, with one sentence; and no progress is lost.

Every launch is real, started by `torchrun` or by hand, and ends with a timeout if a process waits in vain.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_files import ROOT, finished, metrics_of, wait_until

pytest.importorskip("resource", reason="Windows has not these signals")

pytestmark = [pytest.mark.all_questions, pytest.mark.slow]
BASE, DDP = "experiment_base", "experiment_accelerate_ddp"
PATIENCE = 100  # seconds after which a launch counts as hung; on busy cores a start alone takes a minute
SMALL = (
    *("--steps", "6", "--prompts-per-step", "6", "--group-size", "2", "--eval-prompts", "2", "--eval-every", "0"),
    *("--max-new-tokens", "12", "--checkpoint-every", "2"),
)
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
# arithmetic, but the rewards for the last prompt of step 2, on the last rank, are not numbers or raise an error
TASK = """
import os
from tasks.arithmetic import *
from tasks import arithmetic
del solution  # which is asked for once per row, before training
def reward(row, text):
    if row["question"] == {question!r} and "<answer>" in text and os.environ.get("FAULT") == "raise":
        raise ValueError("broken")
    rewards = arithmetic.reward(row, text)
    if row["question"] == {question!r} and os.environ.get("FAULT") == "nan":
        rewards["correct"] = float("nan")
    return rewards
"""
# The unchanged program; it writes its process id, and at its end all processes compare their policies.
OBSERVED = """
import os, runpy, sys
from pathlib import Path
from common.parallel import gather
from harness.run.run import Run
save_final = Run.save_final
def compare_and_save(run, policy):
    sums = gather([weight.double().sum().item() for weight in policy.parameters()])
    print(f"equal policies: {sums[0] == sums[-1]}, {len(sums)} processes", flush=True)
    return save_final(run, policy)
Run.save_final = compare_and_save
sys.argv = sys.argv[1:]
Path("rank" + os.environ["RANK"]).write_text(str(os.getpid()))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# The unchanged program, with a shorter wait for the others.
WITHOUT_PATIENCE = """
import runpy, sys
from harness.processes import processes
processes.TIME_TO_MEET = 3.0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# Launches


@contextmanager
def started(*command: str | Path, cwd: Path, **environment: str) -> Iterator[subprocess.Popen]:
    """A program started as from a user's shell, with its children; all of them end with the block."""
    process = subprocess.Popen(
        [str(part) for part in command], cwd=cwd, env=ENVIRONMENT | environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def torchrun(script: str, *flags: str | Path, options: tuple[str, ...] = ()) -> list[str]:
    options = ("--master-port", str(free_port()), "--nproc-per-node", "2", *options)
    return [str(part) for part in ("torchrun", *options, ROOT / script / "train.py", *flags)]


AS_OBSERVED = ("--no-python", sys.executable, "-c", OBSERVED)


def by_hand(rank: int, port: int) -> dict[str, str]:
    """The environment of one of two processes without a launcher."""
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def end(process: subprocess.Popen) -> str:
    """The output of the process and its children; no traceback may come from our code."""
    output = process.communicate(timeout=PATIENCE)[0]
    assert 'train.py", line' not in output, output
    assert "terminate called" not in output, output  # an abort at the very end
    return output


def refusal(process: subprocess.Popen) -> str:
    """The one sentence of a failed launch."""
    output = end(process)
    assert process.returncode != 0
    sentences = re.findall("^error: (.*)$", output, re.MULTILINE)
    assert len(sentences) == 1, output
    return sentences[0]


# Runs


def last_step(directory: Path) -> int:
    """The last step with a complete line in metrics.jsonl."""
    path = directory / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else -1


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The working directory of launches, with a task whose rewards fail when FAULT says so."""
    from harness.data.data import read_rows
    from harness.data.order import prompts_of_step

    place = tmp_path_factory.mktemp("place")
    rows = read_rows(str(ROOT / "data" / "math_tasks.jsonl"), {})
    question = rows[prompts_of_step(len(rows), 6, 2, seed=0)[-1]]["question"]
    (place / "task.py").write_text(TASK.format(question=question))
    return place


@pytest.fixture(scope="module")
def uninterrupted(place) -> tuple[Path, str]:
    """A run of two processes without interruption, and its output; it skips the update of step 2."""
    command = torchrun(DDP, *SMALL, "--task", "task.py", "--name", "uninterrupted", options=AS_OBSERVED)
    with started(*command, cwd=place, FAULT="nan") as process:
        output = end(process)
    assert process.returncode == 0, output
    return place / "runs" / DDP / "uninterrupted", output


# Mistakes


def test_a_wrong_command_line_is_explained_once(tmp_path):
    with started(*torchrun(DDP, "--nonsense"), cwd=tmp_path) as process:
        assert end(process).count("Unrecognized options: --nonsense") == 1
    assert process.returncode != 0
    with started(*torchrun(DDP, "--group-size", "1"), cwd=tmp_path) as process:
        output = end(process)
    sentences = re.findall("(?:error|traceback +): (--group-size must be at least 2, not 1)$", output, re.MULTILINE)
    assert len(sentences) == 2, output  # ours, and the end of torchrun's report
    assert not list(tmp_path.iterdir())


def test_processes_that_cannot_meet_say_so(tmp_path):
    """Two processes started by hand: the main one finds its port taken, and the other one is alone."""
    programs = [(sys.executable, "-c", WITHOUT_PATIENCE, ROOT / script / "train.py") for script in (BASE, DDP)]
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        with (
            started(*programs[0], cwd=tmp_path, **by_hand(0, stranger.getsockname()[1])) as main,
            started(*programs[1], cwd=tmp_path, **by_hand(0, free_port())) as lonely,
        ):
            for process, reason in ((main, "in use"), (lonely, "waited for 3 s")):
                sentence = refusal(process)
                assert sentence.startswith("the 2 processes could not meet at 127.0.0.1:")
                assert reason in sentence
    assert not list(tmp_path.iterdir())


DIFFERENCES = {  # experiment; first row of the second process's data, None: it has no data; the sentence
    "a missing file": (BASE, None, "process 1: /proc/self/cwd/data.jsonl: there is no such file"),
    "other rows": (DDP, 1, "the content of --data is [0-9a-f]+ in process 0, but [0-9a-f]+ in process 1$"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_processes_that_differ_are_refused(tmp_path, what):
    """The main process reports it; the other one adds nothing. Each has its own directory, as on two machines."""
    script, first, sentence = DIFFERENCES[what]
    rows = (ROOT / "data" / "math_tasks.jsonl").read_text().splitlines(keepends=True)
    for place, start in (("a", 0), ("b", first)):
        (tmp_path / place).mkdir()
        if start is not None:
            (tmp_path / place / "data.jsonl").write_text("".join(rows[start : start + 40]))
    program = (sys.executable, ROOT / script / "train.py", *SMALL, "--data", "/proc/self/cwd/data.jsonl")
    port = free_port()
    with (
        started(*program, cwd=tmp_path / "a", **by_hand(0, port)) as main,
        started(*program, cwd=tmp_path / "b", **by_hand(1, port)) as other,
    ):
        assert re.match(sentence, refusal(main))
        assert "error" not in end(other)
        assert other.returncode == 2
    assert not list(tmp_path.glob("*/runs"))


# Faults in a run


def test_an_update_is_skipped_by_all_together(uninterrupted):
    """One rank has a reward that is not a number; the policies of the ranks remain equal."""
    directory, output = uninterrupted
    assert "equal policies: True, 2 processes" in output
    assert [row["loss/skipped"] for row in metrics_of(directory)[1:-1]] == [0, 1, 0, 0, 0, 0]
    assert len(re.findall("step 2: the gradient was not finite", output)) == 1
    assert len(re.findall("an update with it is skipped", output)) == 1  # only the rank with the row prints it


def test_an_error_of_one_rank_ends_all(place):
    """The task raises it in a step; the directory stays, with the run's initial files."""
    flags = (*SMALL, "--task", "task.py", "--name", "broken")
    with started(*torchrun(BASE, *flags), cwd=place, FAULT="raise") as process:
        sentence = refusal(process)
    assert re.match("process 1: --task task.py: reward of .* raised ValueError: broken .line", sentence)
    command = f"torchrun --nproc-per-node 2 {ROOT}/{BASE}/train.py --resume runs/{BASE}/broken"
    assert sentence.endswith(f"When it is corrected, resume with: {command}")
    assert last_step(place / "runs" / BASE / "broken") == 1


def test_a_wrong_answer_of_an_engine_to_one_rank_ends_all(tmp_path, stand_in):
    server, damaged = stand_in(), []

    def damage_one(choices: list[dict]) -> None:
        if server.calls["/collective_rpc"] > 2 and not damaged:  # in a step
            damaged.append(choices[0]["logprobs"]["token_logprobs"].pop())

    server.damage = damage_one
    with started(*torchrun("scale/engine", *SMALL, "--engine-url", server.url), cwd=tmp_path) as process:
        assert re.match(r"(process 1: )?the engine at http://127\.0\.0\.1:\d+ .*log-probs for", refusal(process))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("model, optimizer = run.prepare(policy, optimizer)", "model = policy"),
        ("log_probs, entropy = model(", "log_probs, entropy = model.module("),
    ],
    ids=["an older train.py", "past the wrapper"],
)
def test_processes_that_train_apart_are_refused(tmp_path, line, fault):
    """A train.py of one's own, whose gradients are not averaged, would save the policy of one process."""
    script = tmp_path / "mine" / "train.py"
    script.parent.mkdir()
    program = (ROOT / BASE / "train.py").read_text(encoding="utf-8")
    assert program.count(line) == 1
    script.write_text(program.replace(line, fault), encoding="utf-8")
    with started(
        *torchrun(script.parent, *SMALL, "--group-size", "8", "--max-new-tokens", "32"), cwd=tmp_path
    ) as process:
        assert re.match(r"step \d: the processes have different gradients, so each would train a", refusal(process))
    assert not list(tmp_path.glob("runs/*/*/final"))


def test_a_killed_rank_ends_the_launch_and_it_resumes(place, uninterrupted, tmp_path):
    """kill -9 of the main process; after another kill torchrun restarts all. The result is the same bit for bit.

    Meanwhile no other launch can take the run.
    """
    directory = place / "runs" / DDP / "killed"
    flags = (*SMALL, "--task", "task.py", "--name", "killed")
    with started(*torchrun(DDP, *flags, options=AS_OBSERVED), cwd=place, FAULT="nan") as process:
        wait_until(lambda: last_step(directory) == 5, process)
        os.kill(int((place / "rank0").read_text()), signal.SIGKILL)
        killed = time.monotonic()
        sentence = refusal(process)
    assert time.monotonic() - killed < 60
    resume = f"torchrun --nproc-per-node 2 {ROOT}/{DDP}/train.py --resume runs/{DDP}/killed"
    assert sentence.startswith("process 1: the connection to another process was lost")
    assert sentence.endswith(f"; resume with: {resume}")

    command = torchrun(DDP, "--resume", directory, options=("--max-restarts", "1", *AS_OBSERVED))
    with started(*command, cwd=tmp_path, FAULT="nan") as process:
        log, before = directory / "metrics.jsonl", (directory / "metrics.jsonl").stat().st_mtime_ns
        wait_until(lambda: log.stat().st_mtime_ns > before and last_step(directory) == 5, process)
        os.kill(int((tmp_path / "rank1").read_text()), signal.SIGKILL)
        output = end(process)
    assert process.returncode == 0, output
    assert len(re.findall("resuming .* after step 4\n", output)) == 2, output
    expected = uninterrupted[0]
    assert metrics_of(directory) == metrics_of(expected)
    for name in ("samples.jsonl", "final/model.safetensors"):
        assert (directory / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.fixture(scope="module")
def interrupted(place) -> tuple[Path, str]:
    """A run of experiment_base that Ctrl-C in a terminal ended in a step, and its output."""
    directory = place / "runs" / BASE / "interrupted"
    flags = (*SMALL, "--checkpoint-every", "6", "--task", "task.py", "--name", "interrupted")
    with started(*torchrun(BASE, *flags), cwd=place, FAULT="nan") as process:
        wait_until(lambda: last_step(directory) >= 3, process)  # a skipped update writes no checkpoint
        os.killpg(process.pid, signal.SIGINT)
        output = end(process)
    assert process.returncode != 0
    return directory, output


def test_ctrl_c_ends_all_after_the_step_with_a_checkpoint(interrupted):
    directory, output = interrupted
    command = f"torchrun --nproc-per-node 2 {ROOT}/{BASE}/train.py --resume runs/{BASE}/interrupted"
    assert re.findall("^interrupted; resume with: (.*)$", output, re.MULTILINE) == [command]
    assert output.count("stopping: this step is finished first") == 1
    assert [path.name for path in (directory / "checkpoints").iterdir()] == [f"step_{last_step(directory)}"]


def test_a_run_is_not_resumed_in_another_arithmetic(interrupted):
    """Accelerate would otherwise restore the old arithmetic silently."""
    bf16 = ENVIRONMENT | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    result = finished(ROOT / BASE / "train.py", "--resume", interrupted[0], cwd=interrupted[0], env=bf16)
    assert result.returncode == 2
    assert " is a run in float32, and Accelerate is told to compute in bfloat16: set " in result.stderr


def test_a_run_resumes_with_another_number_of_processes(interrupted, uninterrupted, load_script, monkeypatch, capsys):
    """One process resumes a checkpoint of two, with a sentence, and gets the result of two."""
    directory = interrupted[0]
    monkeypatch.setenv("FAULT", "nan")
    load_script(f"{BASE}/train.py").main(["--resume", str(directory)])
    assert capsys.readouterr().out.count("the run began with processes 2 and resumes with 1: figures may differ") == 1
    for row, other in zip(metrics_of(directory), metrics_of(uninterrupted[0]), strict=True):
        assert row == pytest.approx(other, abs=1e-5, rel=1e-5)
