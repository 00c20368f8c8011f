"""All output goes through one place, and cannot control a terminal."""

import ast
import io
import logging
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.evaluate import Evaluation, Greedy
from common.trajectory import Trajectory
from tasks import arithmetic

from harness.base.config import TINY_POLICY, RunConfig
from harness.base.places import CHAPTERS
from harness.base.terminal import POLICY, REWARD, TOOL, say, say_above_progress, visible
from harness.data.rows import Row
from harness.logs.samples import describe_best
from harness.logs.summary import show_gain
from harness.models.loading import load_policy
from harness.run.start import run_main
from harness.task.scorer import Scorer
from harness.task.task import Task
from harness.task.task_file import TaskFile

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "\x1b]0;mine\x07 \x1b[2J \x9b31m \u202e \u2066 \r \x08 \x00 \x7f [red] :smile: [/]"
UNWANTED = re.compile(r"[^\n -~─-╿�→…é]")


def test_conversations_are_colored_on_terminals_that_show_it(monkeypatch, capsys):
    text = f"question\n{POLICY} a\x1b[2J\n{TOOL} b\n{REWARD} 1"
    plain = f"question\n{POLICY} a\ufffd[2J\n{TOOL} b\n{REWARD} 1\n"
    for is_terminal, wish in ((False, ""), (True, "1"), (True, "")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setenv("NO_COLOR", wish)
        assert say_above_progress(text)
        printed = capsys.readouterr().out
        assert re.sub(r"\x1b\[\d+m", "", printed) == plain
        assert len(re.findall(r"(?m)^\x1b\[3[236]m .*\x1b\[0m$", printed)) == (3 if is_terminal and not wish else 0)


def test_there_is_one_place_that_prints():
    """Except the tables of summary.py, whose cells come from `printable`, and which are tested below."""
    prints = ("print", "tqdm.write", "sys.stdout.write", "sys.stderr.write", "console.print", "warnings.warn")
    found = set()
    folders = ("common", "fast", "harness", "tasks", "experiment_*", *CHAPTERS)
    paths = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    for path in (path for path in paths if "tiny_policy" not in path.parts):  # scripts that make data
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in prints:
                found.add((path.relative_to(ROOT).as_posix(), ast.unparse(node.func)))
    allowed = ("harness/base/terminal.py", "harness/logs/summary.py")
    assert found == {(allowed[0], "print"), (allowed[0], "tqdm.write"), (allowed[1], "console.print")}


def test_all_control_and_bidi_characters_are_replaced(capsys):
    characters = [chr(code) for code in range(sys.maxunicode + 1)]
    controls = [c for c in characters if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c != "\n"]
    assert set(visible("".join(controls))) == {"\ufffd"}
    assert visible("é ≤ 😀\nb") == "é ≤ 😀\nb"
    say(HOSTILE)
    assert not UNWANTED.search(capsys.readouterr().out)


@pytest.mark.parametrize(("error", "status", "expected"), [
    (UserError(f"a\nb {HOSTILE}"), 2, "error: a b \ufffd]0;mine"),
    (KeyboardInterrupt(f"interrupted {HOSTILE}"), 130, "\ninterrupted \ufffd]0;mine"),
    (ValueError(HOSTILE), None, "Traceback (most recent call last)"),
])  # fmt: skip
def test_what_ends_a_program_cannot_control_the_terminal(capsys, monkeypatch, error, status, expected):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def main() -> None:
        raise error

    with pytest.raises(SystemExit if status else ValueError) as ended:
        run_main(main)
    if status is None:
        sys.excepthook(ended.type, ended.value, ended.tb)
    else:
        assert ended.value.code == status
    printed = capsys.readouterr().err
    assert printed.startswith(expected)
    assert "\ufffd]0;mine" in printed
    assert status is None or printed.count("\n") == 1 + expected.count("\n")
    assert not UNWANTED.search(printed)


def test_neither_texts_nor_names_can_control_the_terminal(capsys):
    task = Task(Scorer(TaskFile(arithmetic, "arithmetic")))
    task.train_rows = task.eval_rows = [Row(question=HOSTILE + "?", answer=HOSTILE)]
    trajectory = Trajectory([1], 0, [1], [0.0], text=HOSTILE, rewards={"correct": 0.0, "format": 0.0})
    say(describe_best(task, [trajectory]))
    answers = (
        Greedy(HOSTILE, [], {"correct": 0.5}),
        Greedy("", [("assistant", HOSTILE), ("tool", HOSTILE)], {"correct": 1}),
    )
    metrics = {f"sampled/{HOSTILE}": 0.5, "greedy/accuracy": 0.5}, {f"sampled/{HOSTILE}": 1.0, "greedy/accuracy": 0.5}
    sides = (Evaluation(values, [answer], []) for values, answer in zip(metrics, answers, strict=True))
    show_gain(Path("runs") / HOSTILE.replace("/", ""), task, *sides, {HOSTILE: 0.0})
    printed = capsys.readouterr().out
    assert not UNWANTED.search(printed)
    assert printed.count("]0;mine") >= 9
    assert "[red] :smile: [/]" in printed  # no markup either
    assert re.findall("(before|after) .* (right|wrong):", printed) == [("before", "wrong"), ("after", "right")]
    assert printed.count(TOOL.strip()) == 1


def test_what_transformers_logs_cannot_control_the_terminal(tmp_path, monkeypatch):
    """It reports the names of unexpected weights, in colors."""
    shutil.copytree(TINY_POLICY, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors") | {HOSTILE: torch.zeros(1)}
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    log = transformers.utils.logging.get_logger()
    handler = next(handler for handler in log.handlers if type(handler) is logging.StreamHandler)
    monkeypatch.setattr(handler, "stream", io.StringIO())
    load_policy(RunConfig(model=str(tmp_path / "model"), device="cpu"))
    printed = handler.stream.getvalue()
    assert "]0;mine" in printed
    assert printed == visible(printed)


@pytest.mark.slow
def test_bitsandbytes_says_nothing_where_it_is_not_used():
    """Importing peft imports it, and on some CPUs it then reports that a kernel is missing."""
    pytest.importorskip("bitsandbytes")
    code = "from harness.base.terminal import prepare_output; prepare_output(); import peft"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")
