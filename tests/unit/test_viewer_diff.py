"""`python -m viewer.diff` prints the lesson of an experiment: no more and no less, with the lines' numbers."""

import subprocess
import sys
from pathlib import Path

import pytest

from viewer.diff import main

PARENT = '"""Two\n\nlines."""\n\nx = 1\ny = 2\nz = 3\n'


@pytest.fixture
def write(tmp_path):
    """Write a train.py, with its directory."""

    def write(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


@pytest.mark.parametrize(("text", "blocks", "count"), [
    ('"""Other."""\n\nx = 1\ny = 2\nz = 3\n', [], 0),  # a docstring is no lesson
    ('"""Other."""\n\nx = 1\ny = 7\n', ["@@ -6,2 +4,1 @@", "-y = 2", "-z = 3", "+y = 7"], 2),
    ("x = 1\nz = 3\n", ["@@ -4,1 +1,0 @@", "-", "@@ -6,1 +2,0 @@", "-y = 2"], 2),  # without a docstring
])  # fmt: skip
def test_two_files(write, capsys, text, blocks, count):
    old, new = write("old", PARENT), write("new", text)
    main([str(old), str(new)])
    *printed, last = capsys.readouterr().out.splitlines()
    assert printed == blocks
    assert last == f"{count} changed lines from {old / 'train.py'} to {new / 'train.py'}, not counting the docstrings"


def test_the_command_of_the_readme_prints_both_versions_of_a_changed_line():
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "viewer.diff", "policy_gradients/maxrl"]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert "\n-        advantages = group_advantages(returns) / (group_std(returns) + STD_EPS)  # (Q, G)\n" in printed
    assert "\n+        advantages = group_advantages(returns) / success_rate(returns)  # (Q, G)\n" in printed
    assert printed.endswith(
        "from experiment_base/train.py to policy_gradients/maxrl/train.py, not counting the docstrings\n"
    )
