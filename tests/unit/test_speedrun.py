"""The speedrun: what an entry may not do, what its seconds are, and the page's table."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import psutil
import pytest
from run_files import ROOT
from safetensors.torch import load_file, save_file

from harness.base.config import TINY_POLICY

HELD_OUT = ROOT / "data" / "math_tasks_heldout.jsonl"
WEIGHTS = TINY_POLICY / "model.safetensors"
SUBMIT = """
import os, shutil, time
os.makedirs("runs/mine/one/checkpoints/step_1.partial")
shutil.copy("data/policies/tiny_policy/model.safetensors", "runs/mine/one/checkpoints/step_1.partial")
os.rename("runs/mine/one/checkpoints/step_1.partial", "runs/mine/one/checkpoints/step_1")
"""
CHEAT = f"""
import os, socket, subprocess, sys, urllib.request
from pathlib import Path
assert not Path("data/math_tasks_heldout.jsonl").exists() and os.listdir("data/policies") == ["tiny_policy"]
tries = [
    lambda: open({str(HELD_OUT)!r}),
    lambda: Path({str(HELD_OUT)!r}).read_bytes(),
    lambda: os.open({str(HELD_OUT)!r}, os.O_RDONLY),
    lambda: os.link({str(HELD_OUT)!r}, "mine"),
    lambda: os.symlink({str(HELD_OUT)!r}, "/tmp/mine"),
    lambda: __import__("torch").load({str(ROOT / "data" / "policies" / "tiny_teacher" / "x.pt")!r}),
    lambda: __import__("transformers").AutoConfig.from_pretrained({str(TINY_POLICY)!r}),
    lambda: open("../for_the_next_seed", "w"),
    lambda: os.mkdir("../for_the_next_seed"),
    lambda: socket.create_connection(("127.0.0.1", 9)),
    lambda: urllib.request.urlopen("http://127.0.0.1:9"),
    lambda: subprocess.run(["true"]),
    lambda: os.system("true"),
    lambda: os.fork(),
]
refused = 0
for attempt in tries:
    try:
        attempt()
    except Exception as error:
        refused += "an entry " in str(error)
sys.exit(f"refused {{refused}} of {{len(tries)}}")
"""


@pytest.fixture(scope="module")
def speedrun(load_script):
    return load_script("benchmarks/speedrun.py")


@pytest.fixture
def guard(load_script, tmp_path):
    return load_script("benchmarks/speedrun_child.py").make_guard(str(tmp_path), (sys.prefix, "/usr"), str(ROOT))


def test_an_entry_reads_and_writes_in_its_folder(guard, tmp_path):
    for path in (tmp_path / "a", f"{tmp_path}/b/../a", os.fsencode(tmp_path / "a"), 3):
        guard("open", (path, "w", os.O_WRONLY | os.O_CREAT))
    guard("open", (f"{sys.prefix}/pyvenv.cfg", "r", os.O_RDONLY))
    guard("os.rename", (str(tmp_path / "a"), str(tmp_path / "b"), -1, -1))
    guard("import", ("torch",))


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("open", (str(HELD_OUT), "r", os.O_RDONLY)),
        ("open", (os.fsencode(WEIGHTS), None, os.O_RDONLY)),
        ("open", (f"{sys.prefix}/cache", "w", os.O_WRONLY | os.O_CREAT)),
        ("open", ("/home/somebody/weights.pt", "rb", os.O_RDONLY)),
        ("os.rename", ("a", "/tmp/a", -1, -1)),
        ("os.symlink", (str(HELD_OUT), "a", -1)),
        ("os.link", (str(HELD_OUT), "a", -1, -1)),
        ("socket.connect", (None, ("127.0.0.1", 80))),
        ("subprocess.Popen", ("true", ["true"], None, None)),
        ("os.fork", ()),
    ],
)
def test_other_files_processes_and_the_network_are_closed(guard, tmp_path, monkeypatch, event, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PermissionError, match="an entry "):
        guard(event, arguments)


def test_a_link_to_a_closed_file_is_closed(guard, tmp_path):
    (tmp_path / "link").symlink_to(HELD_OUT)
    with pytest.raises(PermissionError, match="heldout"):
        guard("open", (str(tmp_path / "link"), "r", os.O_RDONLY))


def test_the_start_and_the_questions_are_those_of_the_table(speedrun):
    assert {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in speedrun.FILES} == speedrun.FILES


@pytest.mark.parametrize("kind", ["missing", "link", "other shape", "no weights", "not finite"])
def test_weights_that_are_not_the_entry_s_own_are_refused(speedrun, tmp_path, kind):
    folder, contest = tmp_path / "own", speedrun.Contest(questions=2, samples=1)
    weights = folder / "step_1" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    if kind == "link":
        weights.symlink_to(WEIGHTS)
    elif kind == "other shape":
        shutil.copy(ROOT / "data" / "policies" / "tiny_teacher" / "adapter_model.safetensors", weights)
    elif kind == "no weights":
        weights.write_bytes(b"12345678")
    elif kind == "not finite":
        save_file({name: x * float("nan") for name, x in load_file(WEIGHTS).items()}, weights, {"format": "pt"})
    with pytest.raises(speedrun.RefusedError, match="step_1"):
        speedrun.accuracy_of(weights, folder, 0, contest)


def test_the_table_of_the_page_is_that_of_the_data(speedrun):
    assert speedrun.table() in (ROOT / "docs" / "speedrun.md").read_text(encoding="utf-8")
    for title, kept in speedrun.read_results().items():
        assert len({run["seed"] for run in kept["runs"]}) == 5, title
        for run in kept["runs"]:
            *before, (_, seconds, accuracy) = run["tried"]
            assert run["seconds"] == seconds <= 300, title
            assert accuracy >= 0.9 > max([x[2] for x in before], default=0), title


# With its process: each takes some seconds for imports ----------------------------------------------------------------


def enter(speedrun, folder: Path, text: str, **contest) -> dict:
    entry = folder / "entry.py"
    entry.write_text(text, encoding="utf-8")
    return speedrun.race(entry, (), 0, speedrun.Contest(questions=8, samples=1, **contest))


@pytest.mark.slow
def test_what_an_entry_may_not_do_fails_in_it(speedrun, tmp_path):
    with pytest.raises(speedrun.RefusedError, match="refused 14 of 14"):
        enter(speedrun, tmp_path, CHEAT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import ctypes, time\nctypes.CDLL(None).fork()\ntime.sleep(60)", "it started another process"),
        ("while True: pass", "it used up its time without any checkpoint"),
        (SUBMIT + "while True: pass", r"it used up its time, with an accuracy of 0.\d+ at step_1"),
        ("import time\ntime.sleep(60)", "it used up its time"),
        ("raise SystemExit('no time for this')", "no time for this"),
        ("import sums", "No module named 'sums'"),
    ],
    ids=["fork", "endless", "not good enough", "asleep", "ends", "fails"],
)
def test_an_entry_without_a_score_says_why(speedrun, tmp_path, text, why):
    with pytest.raises(speedrun.RefusedError, match=why):
        enter(speedrun, tmp_path, text, seconds=1.5, accuracy=1.0)
    assert not any(map(is_child, psutil.process_iter()))


def is_child(process: psutil.Process) -> bool:
    try:
        return any("speedrun_child.py" in word for word in process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.slow
def test_seconds_are_those_of_all_threads_before_the_checkpoint(speedrun, tmp_path):
    """Two threads compute for one second each."""
    threads = """
import hashlib, threading, time
def work():
    while time.thread_time() < 1:
        hashlib.sha256(bytes(2**22))
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    run = enter(speedrun, tmp_path, threads + SUBMIT + "while True: pass", accuracy=0.0)
    assert 1.9 < run["seconds"] < 3  # the system counts in hundredths
    contest = speedrun.Contest(questions=8, samples=1)
    assert run["tried"] == [["step_1", run["seconds"], speedrun.accuracy_of(WEIGHTS, TINY_POLICY, 0, contest)]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experiment_base", "experiment_drgrpo", "policy_gradients/rloo"])
def test_an_experiment_is_an_entry_as_it_is(speedrun, name):
    flags = ["--prompts-per-step", "2", "--group-size", "2", "--checkpoint-every", "1"]
    contest = speedrun.Contest(accuracy=0.05, questions=32, samples=2)
    run = speedrun.race(ROOT / name / "train.py", flags, 1, contest)
    assert run["tried"][-1][2] >= 0.05
    assert 0 < run["seconds"] < 60
