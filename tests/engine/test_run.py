"""scale/engine as users start it: its own flags, runs that lose their engine, and runs that are stopped."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from common.errors import UserError
from common.experience import collate
from common.logprobs import token_log_probs
from common.trajectory import Trajectory
from tasks.arithmetic import EVAL_DATA

from harness.base.config import RunConfig
from harness.engines.engine import Engine
from harness.models.loading import load_policy
from harness.run.start import run_main
from harness.run.stopping import StopRequest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scale/engine" / "train.py"
FLAGS = (
    *("--prompts-per-step", "2", "--group-size", "4", "--eval-prompts", "1", "--max-new-tokens", "12"),
    *("--data", str(EVAL_DATA), "--eval-data", str(EVAL_DATA), "--device", "cpu", "--lr", "1e-4", "--name", "x"),
)
START = ("--engine-start", sys.executable)
PATIENCE = 120  # seconds after which something counts as hung
COMPLETIONS, RELOAD = "/v1/completions", "/collective_rpc"
posix = pytest.mark.skipif(os.name != "posix", reason="a run starts a server on Linux and macOS only")


@pytest.fixture(autouse=True)
def with_stand_in(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "tests" / "engine" / "stand_in"), str(ROOT))))


@pytest.fixture
def script(load_script):
    return load_script("scale/engine/train.py")


@pytest.fixture
def train(script, tmp_path) -> Callable[..., Path]:
    """Make a run in this process; returns its directory."""

    def train(place: str, *arguments: str) -> Path:
        script.main([*FLAGS, "--runs-dir", str(tmp_path / place), *arguments])
        return tmp_path / place / "engine" / "x"

    return train


@pytest.fixture
def at_step(script, monkeypatch) -> Callable:
    """at_step(3, function): call it, once, before the run asks the engine for the samples of step 3."""
    begin = script.begin_sampling

    def set_up(number: int, function: Callable[[], object]) -> None:
        called = []

        def begin_sampling(config, task, policy, engine, step):
            if step == number and not called:
                called.append(number)
                function()
            return begin(config, task, policy, engine, step)

        monkeypatch.setattr(script, "begin_sampling", begin_sampling)

    return set_up


def rows_of(directory: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def differences(directory: Path) -> list[float]:
    """The differences between the log-probs of engine and trainer, by step."""
    return [x["policy/sampling_log_prob_difference"] for x in rows_of(directory) if "loss/total" in x]


def test_a_server_that_does_not_fit_the_run_is_refused(stand_in, train):
    """Before the first sample: a prompt that is too long for the server, and a dtype that differs from the flags."""
    with pytest.raises(UserError, match=r"exceed the engine's context of 24 tokens: .* a longer --max-model-len"):
        train("short", "--steps", "1", "--engine-url", stand_in(max_model_len=24).url)
    server = stand_in(dtype="bfloat16")
    with pytest.raises(UserError, match=r"computes in torch\.bfloat16, not in torch\.float32: give --engine-dtype"):
        train("type", "--steps", "1", "--engine-url", server.url)
    assert not server.calls[COMPLETIONS] + server.calls[RELOAD]


@pytest.mark.slow
@pytest.mark.parametrize(("every", "pushes", "is_close"), [("1", 3, [True] * 4), ("2", 1, [True, False] * 2)])
def test_weights_are_pushed_every_so_many_steps(stand_in, train, every, pushes, is_close):
    """In a run of four steps; also before each of the two evaluations."""
    server = stand_in()
    flags = ("--steps", "4", "--eval-every", "0", "--push-every", every)
    found = differences(train("each", *flags, "--engine-url", server.url))
    assert [value < 1e-4 for value in found] == is_close
    assert server.calls[RELOAD] == 1 + pushes + 1  # in step 1 the engine already has the weights


@pytest.mark.slow
def test_one_step_ahead_samples_with_the_weights_before(stand_in, train):
    """Step t is sampled with the weights before the update of step t-1. The last step starts no further sampling."""
    server = stand_in()
    flags = ("--steps", "3", "--eval-every", "0", "--temperature", "0.9")
    flags += ("--checkpoint-every", "1", "--keep-checkpoints", "3")
    directory = train("ahead", *flags, "--engine-url", server.url, "--steps-ahead", "1")
    assert sum(request["n"] == 4 for request in server.requests) == 3 * 2
    assert server.calls[RELOAD] == 1 + 1 + 1  # for evaluation and the first two steps; for the third; for evaluation
    places = {0: "tiny"} | {step: directory / "checkpoints" / f"step_{step}" for step in (1, 2)}
    policies = {step: load_policy(RunConfig(device="cpu", model=str(at)), 0.9) for step, at in places.items()}
    for step, before in ((1, 0), (2, 0), (3, 1)):
        rows = [
            Trajectory(row["ids"], row["prompt_length"], row["action_mask"], row["sampler_log_probs"])
            for row in rows_of(directory, "samples")
            if row["step"] == step
        ]
        experience = collate(rows, pad_id=0)
        found = {}
        for number, policy in policies.items():
            gap = token_log_probs(policy, experience, 8) - experience.sampler_log_probs
            found[number] = gap[experience.action_mask.bool()].abs().mean().item()
        assert found.pop(before) < 1e-4
        assert min(found.values()) > 1e-3
    assert differences(directory)[0] < 1e-4 < min(differences(directory)[1:])


@pytest.mark.slow
def test_one_step_ahead_asks_for_the_questions_of_the_next_step(stand_in, train, monkeypatch):
    """Each step has the same questions and seeds as in the run that waits, although its samples come a step earlier."""
    asked = {}
    begin = Engine.begin

    def note(engine, *arguments, **settings):
        asked.setdefault(engine.folder, []).append((settings["key"], settings["prompt_index"]))
        return begin(engine, *arguments, **settings)

    monkeypatch.setattr(Engine, "begin", note)
    for ahead in ("0", "1"):
        train(ahead, "--steps", "3", "--eval-every", "0", "--engine-url", stand_in().url, "--steps-ahead", ahead)
    waits, is_ahead = ([(key, index) for key, index in steps if key[-1] < 10] for steps in asked.values())
    assert waits == is_ahead
    assert [key for key, _ in waits] == [(0, 1), (0, 2), (0, 3)]


def test_a_push_without_effect_ends_the_run_before_an_update(stand_in, train, tmp_path, at_step):
    """The server claims to have loaded the weights of step 1, but keeps the old ones."""
    server = stand_in()
    at_step(2, lambda: setattr(server.engine, "reload", lambda folder: None))
    with pytest.raises(UserError, match=r"log-probs of the engine differ .* no update was made.* --resume"):
        train("stale", "--steps", "3", "--engine-url", server.url)
    directory = tmp_path / "stale" / "engine" / "x"
    assert [row["step"] for row in rows_of(directory)] == [0, 1]
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_1"]


def test_a_run_whose_engine_sleeps_is_the_run_whose_engine_does_not(stand_in, train, at_step, tmp_path):
    """With evaluations between, and after a resumption that finds the engine asleep."""
    server = stand_in(enable_sleep_mode=True)
    flags = ("--steps", "3", "--eval-every", "2", "--checkpoint-every", "1", "--engine-url", server.url)
    awake = train("awake", *flags)
    assert not server.calls["/sleep"]
    at_step(1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train("asleep", *flags, "--engine-sleep")
    assert server.engine.asleep
    asleep = train("asleep", "--resume", str(tmp_path / "asleep" / "engine" / "x"))
    assert server.calls["/sleep"] == 3
    assert not server.engine.asleep
    for new, old in zip(rows_of(asleep), rows_of(awake), strict=True):
        assert new.keys() == old.keys()
        for name in new.keys() - {name for name in new if name.startswith(("time/", "memory/"))}:
            assert new[name] == pytest.approx(old[name], rel=1e-4, abs=1e-5), name  # batches round differently


def test_a_server_that_cannot_sleep_is_refused(stand_in, train):
    with pytest.raises(UserError, match=r"cannot sleep: start vLLM with --enable-sleep-mode$"):
        train("cannot", "--steps", "1", "--engine-url", stand_in().url, "--engine-sleep")


@pytest.mark.slow
@posix
def test_a_server_that_the_run_starts_can_sleep(train):
    assert len(differences(train("started", "--steps", "2", *START, "--engine-sleep"))) == 2


# Engines that are lost


@pytest.mark.parametrize(
    ("start", "kept"),
    [
        ("/usr/bin/env A=b/c nice -n 5 an-env/bin/python", "/usr/bin/env A=b/c nice -n 5 {place}/an-env/bin/python"),
        ("~/my\\ env/bin/python", "'{place}/my env/bin/python'"),
        ("python --chat-template an-env/bin/python", "python --chat-template {place}/an-env/bin/python"),
    ],
)
def test_the_path_of_an_engine_is_kept_absolute(script, tmp_path, monkeypatch, start, kept):
    """The path may be a link, like the Python of an environment."""
    for name in ("an-env", "my env"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = script.parse_config(script.Config, ["--engine-start", start.format()], "")
    assert config.engine_start == kept.format(place=tmp_path)


def servers_of(process: psutil.Process) -> list[psutil.Process]:
    """The servers that a run started, without their guards."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.cmdline()[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
                found.append(child)
    return found


@pytest.mark.slow
@posix
def test_a_run_whose_server_is_killed_resumes(script, stand_in, tmp_path, at_step, capsys):
    """At step 3 the server hangs, and is killed with SIGKILL; then a server of another run takes its place, for good.

    golden/ compares a resumed run with an uninterrupted one.
    """

    def kill() -> None:
        (server,) = servers_of(psutil.Process())
        words = server.cmdline()
        url = f"http://127.0.0.1:{words[words.index('--port') + 1]}/stand_in"
        httpx2.post(url, json={"fault": "hang", "path": COMPLETIONS}, trust_env=False)
        threading.Timer(0.5, server.kill).start()

    at_step(3, kill)
    with pytest.raises(SystemExit, match="2"):
        run_main(lambda: script.main([*FLAGS, "--steps", "4", *START, "--runs-dir", str(tmp_path)]))
    errors = capsys.readouterr().err
    (sentence,) = [line for line in errors.splitlines() if "error" in line]
    assert "its process was killed (SIGKILL)" in sentence
    assert "; when the engine can be used again, resume with: python " in sentence
    assert "Traceback" not in errors
    directory = tmp_path / "engine" / "x"
    assert {path.name for path in directory.iterdir()} >= {"engine.log", "metrics.jsonl", "config.json"}
    assert not list(directory.glob("engine*/"))
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step_2"]
    assert not servers_of(psutil.Process())
    settings = script.parse_config(script.Config, ["--resume", str(directory)], "")
    assert (settings.engine_url, settings.engine_start) == (None, sys.executable)
    server = stand_in()
    with pytest.raises(UserError, match="a resumed run keeps its settings"):
        script.main(["--resume", str(directory), "--engine-url", server.url, "--push-every", "2"])
    script.main(["--resume", str(directory), "--engine-url", server.url])
    assert json.loads((directory / "config.json").read_text())["engine_url"] == server.url
    assert {row["step"] for row in rows_of(directory)} == {0, 1, 2, 3, 4}
    assert server.calls[RELOAD] == 3


# Runs that are stopped


@posix
def test_ctrl_c_ends_the_step_and_the_second_one_ends_it_now(script, stand_in, tmp_path, at_step, monkeypatch):
    server, before = stand_in(), threading.enumerate()
    flags = (*FLAGS, "--steps", "4", "--engine-url", server.url, "--runs-dir")
    at_step(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"interrupted; resume with: python .* --resume"):
        script.main([*flags, str(tmp_path / "once")])
    assert (tmp_path / "once" / "engine" / "x" / "checkpoints" / "step_2").exists()

    noticed, receive = threading.Event(), StopRequest.receive

    def notice(request: StopRequest, is_in_step: bool) -> None:
        noticed.set()
        receive(request, is_in_step)

    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        noticed.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGINT)

    def hang() -> None:
        monkeypatch.setattr(StopRequest, "receive", notice)
        server.fault("hang")
        threading.Timer(0.2, interrupt_twice).start()

    at_step(3, hang)
    with pytest.raises(KeyboardInterrupt, match=r"interrupted; resume with: python .* --resume"):
        script.main([*flags, str(tmp_path / "twice")])
    directory = tmp_path / "twice" / "engine" / "x"
    assert [row["step"] for row in rows_of(directory)] == [0, 1, 2]
    assert not list(directory.glob("engine*/"))
    assert not [thread for thread in threading.enumerate() if thread.name == "engine" and thread not in before]


@pytest.fixture
def started(tmp_path) -> Iterator[subprocess.Popen]:
    """A run as from a user's shell, which starts a server."""
    command = [sys.executable, str(TRAIN), *FLAGS, "--steps", "400", *START, "--runs-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
@posix
def test_a_run_that_is_killed_leaves_no_server(started):
    """While its server starts, which takes longest with a real one."""
    run, deadline = psutil.Process(started.pid), time.monotonic() + PATIENCE
    while not (found := servers_of(run)):
        assert started.poll() is None, started.communicate()[1]
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.02)
    processes = run.children(recursive=True)
    assert len(processes) >= 2
    started.kill()
    gone, left = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not left
    assert set(found) <= set(gone)
