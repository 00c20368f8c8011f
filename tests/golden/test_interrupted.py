"""Runs that are killed, interrupted, damaged or out of disk space, and what can be resumed; a run's lock and name."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_files import PATIENCE, ROOT, contents, digest, json_of, metrics_of, rows_of, wait_until

from common.errors import UserError
from tasks.arithmetic import EVAL_DATA
from viewer.groups import name_of
from viewer.runs import Run

from harness.base.config import TINY_POLICY, ModelConfig, RunConfig
from harness.base.hub import commit_of
from harness.exporting.card import public_command
from harness.run.checkpoints import newest_checkpoint
from harness.run.settings import describe_sources
from harness.run.start import run_main, start_run

resource = pytest.importorskip("resource", reason="Windows has neither these signals nor these limits")

TRAIN = ROOT / "experiment_base" / "train.py"
FLAGS = (
    *("--prompts-per-step", "2", "--group-size", "2", "--eval-prompts", "1", "--max-new-tokens", "6"),
    *("--eval-every", "3", "--epochs-per-step", "2", "--minibatch-size", "2"),
    *("--data", str(EVAL_DATA), "--eval-data", str(EVAL_DATA)),  # faster to read than all questions
)
SIX_STEPS = (*FLAGS, "--steps", "6")
CHECKPOINTS = ("--checkpoint-every", "2")
SHELL = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
# The unchanged program, on a disk that hangs at the second checkpoint.
ON_A_SLOW_DISK = """
import runpy, sys, time
from harness.run import checkpoints
flush_to_disk = checkpoints.flush_to_disk
def flush_slowly(path):
    if "step_4.partial" in str(path):
        time.sleep(600)
    flush_to_disk(path)
checkpoints.flush_to_disk = flush_slowly
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def train(load_script) -> Callable[..., str]:
    """Call experiment_base's `main` with some arguments, and return what it prints."""
    return lambda *arguments: printed_by(load_script("experiment_base/train.py").main, *arguments)


@pytest.fixture(scope="module")
def uninterrupted(train, tmp_path_factory) -> Path:
    """The directory of a run without interruption."""
    runs = tmp_path_factory.mktemp("runs")
    train(*SIX_STEPS, *CHECKPOINTS, "--runs-dir", str(runs), "--name", "uninterrupted")
    return runs / "experiment_base" / "uninterrupted"


def printed_by(main: Callable[[list[str]], None], *arguments: str) -> str:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()):
        main(list(arguments))
    return output.getvalue()


@contextmanager
def started(*command: str | Path, cwd: Path) -> Iterator[subprocess.Popen]:
    """A program started as from a user's shell; it ends with the block."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([str(part) for part in command], cwd=cwd, env=SHELL, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen) -> tuple[int, str]:
    """The exit status, and the output on stderr."""
    errors = process.communicate(timeout=PATIENCE)[1]
    return process.returncode, errors


def copy_of(directory: Path, tmp_path: Path, until: int | None = None) -> Path:
    """A copy of a run's directory, without its final files and without checkpoints of steps after `until`."""
    written_at_the_end = shutil.ignore_patterns("final", "summary.json", "curve.png")
    copy = Path(shutil.copytree(directory, tmp_path / "copy", ignore=written_at_the_end))
    for path in (copy / "checkpoints").iterdir():
        if until is not None and int(path.name.removeprefix("step_")) > until:
            shutil.rmtree(path)
    return copy


def checkpoints_of(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def last_step(directory: Path) -> int:
    """The last step with a complete line in metrics.jsonl; 0 if there is none."""
    path = directory / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


@pytest.mark.slow
def test_a_kill_during_a_checkpoint_changes_no_result(tmp_path, train, uninterrupted):
    """The unfinished checkpoint is ignored, and lines that only its logs have are written again."""
    directory = tmp_path / "runs" / "experiment_base" / "killed"
    program = (sys.executable, "-c", ON_A_SLOW_DISK, TRAIN)
    with started(*program, *SIX_STEPS, *CHECKPOINTS, "--name", "killed", cwd=tmp_path) as process:
        wait_until(lambda: (directory / "checkpoints" / "step_4.partial").exists(), process)
        process.kill()
        end(process)
    assert process.returncode == -signal.SIGKILL
    assert checkpoints_of(directory) == ["step_2", "step_4.partial"]
    for name in ("metrics.jsonl", "diagnosis.jsonl"):
        with (directory / name).open("a") as log:
            log.write('{"step": 7, ')  # as after a kill in the middle of a line
    output = train("--resume", str(directory))
    assert "step_4.partial was not finished when the run was stopped; it is ignored" in output
    assert "after step 2\n" in output
    assert contents(directory) == contents(uninterrupted)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = [
    ("checkpoints/step_6/model.safetensors", cut_off, "is not as it was written"),
    ("checkpoints/step_6/optimizer.pt", Path.unlink, "is not as it was written"),
    ("metrics.jsonl", cut_off, "is shorter than it was"),
    ("samples.jsonl", Path.unlink, "is shorter than it was"),
    ("before.json", cut_off, "is shorter than it was"),
]


def test_a_damaged_run_is_refused_and_left_as_it_is(tmp_path, train, uninterrupted):
    directory = copy_of(uninterrupted, tmp_path)
    for name, damage, fault in DAMAGES:
        path = directory / name
        content = path.read_bytes()
        damage(path)
        files = {path: digest(path) for path in directory.rglob("*") if path.is_file()}
        with pytest.raises(UserError, match=f"{path} {fault}.*: restore it"):
            train("--resume", str(directory))
        assert {path: digest(path) for path in directory.rglob("*") if path.is_file()} == files
        path.write_bytes(content)
    shutil.rmtree(directory / "checkpoints" / "step_6")  # as the refusal of a checkpoint suggests
    assert "after step 4\n" in train("--resume", str(directory))
    assert contents(directory) == contents(uninterrupted)


@pytest.mark.slow
def test_signals_end_a_run_with_the_command_that_resumes_it(tmp_path, train, cold):
    """SIGTERM while the policy is loaded, then Ctrl-C in a step; the test runs the printed command each time."""
    directory = tmp_path / "runs" / "experiment_base" / "my run"
    steps = (*FLAGS, "--steps", "16", "--checkpoint-every", "0")  # six would be over before the signal comes
    train(*steps, "--runs-dir", str(tmp_path), "--name", "uninterrupted")
    command = ["python", str(TRAIN), *steps, "--name", "my run"]
    for number, is_in_a_step in ((signal.SIGTERM, False), (signal.SIGINT, True)):
        step_before = last_step(directory)
        with started(*command, cwd=tmp_path) as process:
            if is_in_a_step:
                wait_until(lambda: last_step(directory) > step_before, process)  # noqa: B023
            else:
                wait_until((directory / "config.json").exists, process)
                time.sleep(0.3)
            process.send_signal(number)
            status, errors = end(process)
        assert status == 130, errors
        assert "Traceback" not in errors
        if is_in_a_step:
            assert step_before < last_step(directory) < 16
            assert newest_checkpoint(directory / "checkpoints")[0] == last_step(directory)
        else:
            assert not (directory / "metrics.jsonl").exists()
        command = shlex.split(re.search("^interrupted; resume with: (.*)$", errors, re.MULTILINE)[1])
        assert command == ["python", str(TRAIN), "--resume", "runs/experiment_base/my run"]
        assert ("python -m viewer 'runs/experiment_base/my run'" in errors) == is_in_a_step
    train("--resume", str(directory))
    found, expected = contents(directory), contents(tmp_path / "experiment_base" / "uninterrupted")
    assert {name: content for name, content in found.items() if not name.startswith("checkpoints/")} == expected


def test_an_interrupt_raised_as_another_error_is_recognised(tmp_path, load_script):
    """For example during an import: Python 3.11 turns whatever `__set_name__` raises into a RuntimeError."""
    config = load_script("experiment_base/train.py").Config(runs_dir=str(tmp_path), threads=1, name="mine")

    def run() -> None:
        with start_run(config):
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt as interrupt:
                raise RuntimeError("Error calling __set_name__") from interrupt

    with pytest.raises(KeyboardInterrupt, match=r"^interrupted; resume with: python .* --resume "):
        run()


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Within the block no file can become longer than `num_bytes`, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
@pytest.mark.slow
def test_a_run_stopped_by_a_full_disk_says_so_and_can_resume(tmp_path, train, uninterrupted):
    """Whichever file does not fit; the run resumes when there is space."""
    directory = copy_of(uninterrupted, tmp_path, until=4)
    size_of_weights = (uninterrupted / "final" / "model.safetensors").stat().st_size

    def refusal(num_bytes: int) -> str:
        """The error message of the resumed run if files can be `num_bytes` long."""
        errors = io.StringIO()
        with files_limited_to(num_bytes), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            run_main(lambda: train("--resume", str(directory)))
        assert ended.value.code == 2
        return errors.getvalue()

    no_room = f"error: {directory} could not be written .*; when there is space, resume with: python .* --resume "
    no_checkpoint = "error: the checkpoint of step 6 could not be written .* The last complete one is of step 4$"
    assert re.match(no_room, refusal((directory / "samples.jsonl").stat().st_size // 2 + 100))
    assert re.match(no_checkpoint, refusal(size_of_weights - 1))
    assert re.match(no_checkpoint, refusal(2 * size_of_weights - 1))  # optimizer.pt is longer
    assert checkpoints_of(directory) == ["step_4"]

    train("--resume", str(directory))
    assert contents(directory) == contents(uninterrupted)
    assert re.match(no_room, refusal(size_of_weights - 1))  # only final/ was left to write


def test_a_full_disk_at_the_start_leaves_no_directory(tmp_path, train):
    with files_limited_to(500), pytest.raises(UserError, match="cannot be written"):
        train(*SIX_STEPS, "--runs-dir", str(tmp_path), "--name", "mine")
    assert not list((tmp_path / "experiment_base").iterdir())


@pytest.mark.slow
def test_more_steps_stretch_a_schedule_and_the_run_says_so(tmp_path, train):
    flags = (*FLAGS, "--lr-schedule", "cosine", *CHECKPOINTS, "--runs-dir", str(tmp_path), "--name", "mine")
    train(*flags, "--steps", "4")
    resumed = copy_of(tmp_path / "experiment_base" / "mine", tmp_path, until=2)
    output = train("--resume", str(resumed), "--steps", "6")
    assert "the last step, now 6 instead of 4: the learning rate of step 3 is 3.75e-05 instead of 2.5e-05" in output
    assert metrics_of(resumed)[3]["lr"] == pytest.approx(3.75e-5)
    assert "instead of" not in train("--resume", str(resumed))
    output = train("--resume", str(resumed), "--steps", "7")  # a run that was over
    assert "now 7 instead of 6: the learning rate of step 7 is 2.48e-06 and that of step 6 was 3.35e-06" in output


def test_what_is_other_and_harmless_is_told(tmp_path, train, uninterrupted):
    """Git knows nothing of a file that a user has added and edits; a setting that was never changed is no more."""
    directory = copy_of(uninterrupted, tmp_path)
    settings = json_of(directory / "config.json")
    assert "with script" not in train("--resume", str(directory))
    changed = settings | {"script": "0" * 12, "format_weight": 0.5}
    (directory / "config.json").write_text(json.dumps(changed))
    expected = f"the run began with script {'0' * 12} and resumes with {settings['script']}: figures may differ"
    assert expected in train("--resume", str(directory))
    with pytest.raises(UserError, match=f"not a run's; it belongs to the run {directory}, which resumes"):
        train("--resume", str(directory / "checkpoints" / "step_6"))


def test_a_run_has_one_process(tmp_path, train):
    """While a process runs, no other process can resume the run or take its name; a kill leaves no lock behind."""
    directory = tmp_path / "runs" / "experiment_base" / "mine"
    with started(sys.executable, TRAIN, *FLAGS, "--steps", "999", "--name", "mine", cwd=tmp_path) as process:
        wait_until(lambda: last_step(directory) >= 1, process)
        for arguments, sentence in (
            (("--resume", str(directory)), "mine is in use: another process is running or resuming this run$"),
            (("--runs-dir", str(tmp_path / "runs"), "--name", "mine"), "mine exists already; choose another --name"),
        ):
            before = last_step(directory)
            with pytest.raises(UserError, match=sentence):
                train(*arguments)
        wait_until(lambda: last_step(directory) > before, process)
        process.kill()
        end(process)
    settings = json_of(directory / "config.json")
    (directory / "config.json").write_text(json.dumps(settings | {"steps": 1}))
    assert "resuming" in train("--resume", str(directory))
    assert [row["step"] for row in metrics_of(directory)] == [0, 1, 1]
    assert "after step 1, its last one: it is only evaluated again" in train("--resume", str(directory))


def test_runs_without_a_name_never_share_a_directory(tmp_path, load_script, monkeypatch):
    """Also if they start in the same second, as in a sweep."""
    second = datetime(2026, 1, 2, 3, 4, 5)
    monkeypatch.setattr("harness.run.directory.datetime", SimpleNamespace(now=lambda: second))
    config = load_script("experiment_base/train.py").Config(runs_dir=str(tmp_path), threads=1)
    with ExitStack() as runs:
        names = [runs.enter_context(start_run(config)).directory.name for _ in range(3)]
    assert names == [f"20260102-030405-seed0{number}" for number in ("", "-2", "-3")]


def test_an_unexpected_error_at_the_start_leaves_no_directory(tmp_path, load_script):
    config = load_script("experiment_base/train.py").Config(runs_dir=str(tmp_path), threads=1, name="mine")
    with pytest.raises(ZeroDivisionError), start_run(config):
        1 / 0  # noqa: B018
    assert not list((tmp_path / "experiment_base").iterdir())


A_TASK = """
REWARD_WEIGHTS = {"length": 1.0}
def messages(row, system_prompt):
    return [{"role": "user", "content": row["question"]}]
def reward(row, text):
    return {"length": len(text)}
"""


@pytest.fixture
def own_files(tmp_path, monkeypatch, train) -> Path:
    """The directory of a finished run of one step with a data file, a model and a task, all named by relative paths."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"question": "What is {n}?"}}\n' for n in range(9)))
    Path("task.py").write_text(A_TASK)
    shutil.copytree(TINY_POLICY, "model")
    named = ("--data", "rows.jsonl", "--task", "task.py", "--model", "model")
    train(*FLAGS, "--steps", "1", *named, "--name", "mine")
    return tmp_path / "runs" / "experiment_base" / "mine"


CHANGES = [
    ("rows.jsonl", lambda path: path.write_text(path.read_text().replace("What is 3?", "What is 33?")), "--data"),
    ("task.py", lambda path: path.write_text(path.read_text() + "# another version\n"), "--task"),
    ("model/model.safetensors", cut_off, "--model"),
    ("model/chat_template.jinja", lambda path: path.write_text(path.read_text() + " "), "--model"),
]


def test_a_run_is_not_resumed_with_other_contents(own_files, train, monkeypatch):
    """The refusal changes nothing of the run; with the same contents it resumes from any directory."""
    before = digest(own_files / "metrics.jsonl")
    for name, change, flag in CHANGES:
        content = Path(name).read_bytes()
        change(Path(name))
        with pytest.raises(UserError, match=f"^{flag} .* has changed since .*: restore it, or start a new run$"):
            train("--resume", str(own_files))
        Path(name).write_bytes(content)
    assert digest(own_files / "metrics.jsonl") == before
    shown = train("--resume", str(own_files), "--data", "rows.jsonl", "--model", "./model")
    assert "after step 1, its last one" in shown
    monkeypatch.chdir("runs")
    Path("rows.jsonl").write_text("not the data of the run")
    assert "after step 1, its last one" in train("--resume", str(own_files))
    with pytest.raises(UserError, match=f"^--data {Path('rows.jsonl').absolute()} differs from the run's"):
        train("--resume", str(own_files), "--data", "rows.jsonl")


def test_the_commit_of_what_comes_from_the_hub_is_kept(tmp_path, monkeypatch):
    """Without a network: the commit in this machine's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert commit_of("model", "owner/name") is None
    for what in ("model", "dataset"):
        cache = tmp_path / f"{what}s--owner--name"
        (cache / "refs").mkdir(parents=True)
        (cache / "refs/main").write_text(f"{what[:4]}1234")
        (cache / f"snapshots/{what[:4]}1234").mkdir(parents=True)
        assert commit_of(what, "owner/name") == f"{what[:4]}1234"
    config = RunConfig(model="owner/name", data="owner/name:subset")
    assert describe_sources(config, None) == {
        "model": {"source": "owner/name", "content": "mode1234"},
        "data": {"source": "owner/name:subset", "content": "data1234"},
    }


@pytest.mark.slow
def test_a_run_of_the_repository_without_chapters_is_resumed_and_read(tmp_path, load_script, monkeypatch):
    """Its name and its paths are those of commit f9554f3, which wrote this config.json, in a clone that is gone."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "tests/data/run_of_experiment_rloo.json").read_text(encoding="utf-8")
    settings = json.loads(text.replace("CLONE", "/home/ada/textbook"))
    main = load_script("policy_gradients/rloo/train.py").main
    main([word.replace("assets", f"{ROOT}/data/policies") for word in settings["command"][1:]])
    run = Path("runs/experiment_rloo/old")
    Path("runs/rloo").rename(run.parent)
    settings["sources"] = json_of(run / "config.json")["sources"]
    (run / "config.json").write_text(json.dumps(settings))
    for path in run.glob("checkpoints/*"):  # as Accelerate wrote it
        (path / "optimizer.pt").rename(path / "optimizer.bin")
        text = (path / "checkpoint.json").read_text(encoding="utf-8")
        (path / "checkpoint.json").write_text(text.replace("optimizer.pt", "optimizer.bin"), encoding="utf-8")
    adapter = run / "final/adapter_config.json"
    adapter.write_text(json.dumps(json_of(adapter) | {"base_model_name_or_path": settings["model"]}))
    assert ModelConfig(model=str(run / "final")).base_path == TINY_POLICY
    kept = shutil.copy(run / "config.json", "kept.json")
    main(["--config", str(kept), "--name", "again"])  # its chat template, too, is where it is today
    place = "experiment_rloo is now policy_gradients/rloo/train.py, and its new runs go to runs/rloo/"
    with pytest.raises(UserError, match="is a run of experiment_rloo, not of gspo"):
        load_script("policy_gradients/gspo/train.py").main(["--resume", str(run), "--steps", "2"])
    assert place in printed_by(main, "--resume", str(run), "--steps", "2")
    assert place not in printed_by(main, "--resume", str(run), "--steps", "3")  # it has the new name now
    assert len([row for row in rows_of(run) if "loss/total" in row]) == 3
    assert shlex.split(public_command(settings))[:2] == ["python", "policy_gradients/rloo/train.py"]
    assert name_of(Run(run)) == "rloo/old"
