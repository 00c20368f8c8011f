"""The commands of the dojo, as a reader and a teacher use them, and what an answer may not do while it is judged."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from dojo.__main__ import main
from dojo.exercise import all_exercises, find_exercise
from dojo.judge import Call, call_apart, judge

ANSWERS = Path(__file__).parent / "answers"
GROUP, LATE = find_exercise(5), find_exercise(25)


@pytest.fixture
def dojo(tmp_path, capsys):
    """Run a command in a directory of its own: the exit status, and what it prints."""

    def run(command: str) -> tuple[int, str]:
        status = main([*command.split(), "--work", str(tmp_path / "work")])
        printed = capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())

    return run


def test_a_reader_solves_an_exercise(dojo, tmp_path):
    assert "there is no" in dojo("5 --check")[1]
    status, shown = dojo("5")
    assert status == 0
    assert "Check it: python -m dojo 5 --check" in shown
    answer = tmp_path / "work" / "05_group_advantages" / "group_advantages.py"
    status, shown = dojo("5 --check")
    assert status == 1
    assert "group_advantages is not written yet" in shown
    shutil.copy(ANSWERS / GROUP.name / "wrong_1.py", answer)
    status, shown = dojo("5 --check")
    assert status == 1
    assert "divides by G, and not by G - 1" in shown
    hints = [dojo("5 --hint")[1] for _ in range(4)]
    assert [hint.count("of 3.") for hint in hints] == [1, 2, 3, 3]
    dojo("5")  # the reader's own file stays
    assert answer.read_text() == (ANSWERS / GROUP.name / "wrong_1.py").read_text()
    shutil.copy(ANSWERS / GROUP.name / "right_1.py", answer)
    status, shown = dojo("5 --check")
    assert status == 0
    assert "right" in shown
    assert "x 5 Compare a completion with its group" in dojo("")[1]
    assert f"1 of {len(all_exercises())} solved" in dojo("")[1]
    assert json.loads((tmp_path / "work" / "progress.json").read_text()) == {GROUP.name: {"hints": 3, "solved": True}}


def test_a_solution_shows_its_lines_and_a_bug_does_not_give_its_name_away(dojo, tmp_path):
    assert "+ centered = returns - returns.mean" in dojo("5 --solution")[1]
    dojo("22")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["22_find_the_bug"]
    assert "dropout" not in (tmp_path / "work" / "22_find_the_bug" / "README.md").read_text().lower()


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("77", "there is no exercise 77"),
        ("--check", "name an exercise"),
        ("--grade nowhere", "has no folder of a student"),
    ],
)
def test_a_wrong_command_gets_a_sentence(dojo, command, sentence):
    status, shown = dojo(command)
    assert status == 2
    assert sentence in shown


def test_a_damaged_progress_file_is_named(dojo, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "progress.json").write_text("{")
    status, shown = dojo("")
    assert status == 2
    assert "progress.json is damaged" in shown


def test_a_class_is_exported_and_graded(dojo, tmp_path):
    for student in ("ada", "bob"):
        assert dojo(f"--export {tmp_path / 'class' / student}")[0] == 0
    files = [path.name for path in (tmp_path / "class" / "ada").rglob("*.*")]
    assert len(files) == 2 * len(all_exercises())
    assert not {"solution.py", "check.py", "hints.md", "reason.md"} & {*files}
    ada, bob = (tmp_path / "class" / name for name in ("ada", "bob"))
    shutil.copy(ANSWERS / GROUP.name / "right_2.py", ada / GROUP.place / GROUP.answer)
    (ada / LATE.place / LATE.answer).write_text("c\n")
    (bob / GROUP.place / GROUP.answer).write_text("import os\nopen('results.pt', 'w').write('x')\nos._exit(0)\n")
    (bob / LATE.place / LATE.answer).write_bytes(b"\xff\xfe")
    assert dojo(f"--grade {tmp_path / 'class'}")[0] == 0
    with (tmp_path / "class" / "grades.csv").open(newline="") as file:
        grades = {row["student"]: row for row in csv.DictReader(file)}
    assert [grades[name]["right"] for name in ("ada", "bob")] == ["2", "0"]
    assert [grades[name][number] for name in ("ada", "bob") for number in ("5", "25", "6")] == [
        "x",
        "x",
        "",
        "-",
        "-",
        "",
    ]


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        ("open(FOLDER / '05_group_advantages' / 'solution.py').read()", "the exercises are closed"),
        ("os.symlink(FOLDER / '05_group_advantages', 'here'); open('here/solution.py')", "the exercises are closed"),
        ("os.link(FOLDER / '05_group_advantages' / 'solution.py', 'here')", "may not start programs"),
        ("os.system('true')", "may not start programs"),
        ("socket.create_connection(('127.0.0.1', 9))", "may not start programs or use the network"),
    ],
)
def test_an_answer_may_not(code, refusal, tmp_path):
    answer = tmp_path / "answer.py"
    answer.write_text(f"import os, socket\nfrom dojo.exercise import FOLDER\ndef f():\n    {code}\n")
    (result,) = call_apart(answer, [Call("f")])
    assert refusal in result["error"]


def test_files_of_other_editors_are_read(tmp_path):
    """A byte order mark and the line ends of Windows."""
    answer, letter = tmp_path / "answer.py", tmp_path / "answer.txt"
    answer.write_bytes(b"\xef\xbb\xbfdef f():\r\n    return 1.0\r\n")
    letter.write_bytes(b"\xef\xbb\xbfC\r\n")
    assert call_apart(answer, [Call("f")]) == [1.0]
    assert judge(LATE, letter).is_right


@pytest.mark.slow
def test_an_answer_that_never_returns_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("dojo.judge.SECONDS", 4.0)
    answer = tmp_path / "answer.py"
    answer.write_text("while True:\n    pass\n")
    assert call_apart(answer, [Call("f")]) == "answer.py did not return within 4 seconds"
