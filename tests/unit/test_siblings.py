"""Siblings: an experiment differs little from its parent, and its README states and shows the difference.

The structure of the repository: allowed imports.
"""

import ast
import functools
import re
import textwrap
from pathlib import Path

import pytest

from viewer.diff import Hunk, hunks, num_changed_lines, parent_of

from harness.base.places import CHAPTERS, in_experiments

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(path.parent for path in in_experiments("train.py"))
README = "README.md"


SIBLINGS = [experiment for experiment in EXPERIMENTS if parent_of(experiment)]


@functools.cache
def blocks_of(experiment: Path) -> list[Hunk]:
    return hunks(parent_of(experiment), experiment)


def name_of(experiment: Path) -> str:
    return experiment.relative_to(ROOT).as_posix()


def text_of(experiment: Path) -> str:
    return (experiment / README).read_text(encoding="utf-8")


def table_rows(page: Path) -> dict[str, list[str]]:
    """A table of the curriculum: the cells of each experiment's row, by its name."""
    pattern = r"^\| \d+ \| \[([\w/]+)\]\((?:\.\./)?\1/README\.md\) \|(.*)\|$"
    rows = re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


@pytest.mark.parametrize("experiment", SIBLINGS, ids=lambda path: path.name)
def test_the_readme_shows_the_diff(experiment):
    """The lines after + and - in its diff blocks match the diff, in order, shown without indentation.

    Up to 40 changed lines all of them are shown, above that complete hunks.
    """
    blocks = re.findall(r"^```diff\n(.*?)^```$", text_of(experiment), re.MULTILINE | re.DOTALL)
    shown = [line[0] + line[1:].strip() for block in blocks for line in block.splitlines() if line[0] in "+-"]
    position = 0
    for _, removed, _, added in blocks_of(experiment):
        hunk = [f"-{line.strip()}" for line in removed] + [f"+{line.strip()}" for line in added]
        is_shown = shown[position : position + len(hunk)] == hunk
        assert is_shown or num_changed_lines(blocks_of(experiment)) > 40, hunk
        position += len(hunk) if is_shown else 0
    assert shown[position:] == []
    assert shown


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.name)
def test_code_that_a_readme_quotes_is_code_of_the_project(experiment):
    sources = [*ROOT.glob("common/**/*.py"), *ROOT.glob("fast/*.py"), *ROOT.glob("docs/*.py"), *experiment.glob("*.py")]
    texts = [re.sub(r"^ +", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE) for path in sources]
    for block in re.findall(r"^```python\n(.*?)^```$", text_of(experiment), re.MULTILINE | re.DOTALL):
        quoted = re.sub(r"^ +", "", textwrap.dedent(block), flags=re.MULTILINE)
        assert any(quoted in text for text in texts), block


def test_the_curriculum_table_is_true():
    """Every experiment has a row with its parent and the size of its diff, and the main README has the same rows."""
    rows = table_rows(ROOT / "docs" / "curriculum.md")
    assert list(rows) == list(table_rows(ROOT / README))
    assert sorted(rows) == sorted(map(name_of, EXPERIMENTS))
    for experiment in EXPERIMENTS:
        _, parent, size, *_ = rows[name_of(experiment)]
        if experiment in SIBLINGS:
            assert (parent, size) == (
                name_of(parent_of(experiment)),
                f"{num_changed_lines(blocks_of(experiment))} lines",
            )
        else:
            assert (parent, size) == ("none", f"{len((experiment / 'train.py').read_text().splitlines())} lines in all")


# Allowed imports ------------------------------------------------------------------------------------------------------

ROOMS = ("common", "doctor", "fast", "harness", "tasks", "viewer")


def imports_of(path: Path) -> set[str]:
    """The full names of all modules that a file imports, and of all names from modules, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(("room", "forbidden"), [
    ("common", {"harness", "tasks", "viewer"}),
    ("fast", {"harness", "tasks", "viewer"}),
    ("harness", {"tasks"}),
    ("viewer", {"common"}),
    ("doctor", {"common"}),  # it has its own slow loops; only the adapter for our own files imports others
])  # fmt: skip
def test_a_room_imports_nothing_of_the_rooms_above(room, forbidden):
    paths = [path for path in sorted((ROOT / room).rglob("*.py")) if path != ROOT / "doctor" / "textbook.py"]
    assert len(paths) > 5
    assert [path for path in paths if {name.partition(".")[0] for name in imports_of(path)} & forbidden] == []


def test_no_two_files_have_the_same_name():
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if not path.name.startswith("__")]
    beside = [path for path in in_experiments("*.py") if path.name != "train.py"]
    for names in ([path.name for path in paths], [path.name for path in beside]):
        assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_no_program_changes_where_modules_are_found():
    """`-e .` in requirements.txt does that. Only a user's tool processes get the search path of the run's process."""
    changes = re.compile(r"sys\.path(\[.*\])? *\+?=|sys\.path\.(insert|append|extend)|site\.addsitedir")
    folders = (*ROOMS, "benchmarks", "data", "docs", "experiment_*", *CHAPTERS)
    folders += ("tests/engine/stand_in",)  # also a program
    paths = [path for folder in folders for kind in ("py", "ipynb") for path in ROOT.glob(f"{folder}/**/*.{kind}")]
    found = [path.relative_to(ROOT).as_posix() for path in paths if changes.search(path.read_text(encoding="utf-8"))]
    assert len(paths) > 100
    assert found == ["harness/workers/tool_worker.py"]
