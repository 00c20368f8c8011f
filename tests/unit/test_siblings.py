"""Siblings: an experiment differs little from its parent, and its README states and shows the difference.

The structure of the repository: what may import what.
"""

import ast
import difflib
import hashlib
import re
import subprocess
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted(path.parent for path in ROOT.glob("experiment_*/train.py"))
README = "README.md"


def parent_of(experiment: Path) -> Path | None:
    """The experiment that the docstring of train.py names as its parent."""
    docstring = ast.get_docstring(ast.parse((experiment / "train.py").read_text(encoding="utf-8")))
    name = re.search(r"^Parent: (experiment_\w+)", docstring, re.MULTILINE)
    return ROOT / name[1] if name else None


SIBLINGS = [experiment for experiment in EXPERIMENTS if parent_of(experiment)]


def code_of(experiment: Path) -> list[str]:
    """The lines of train.py after the module docstring."""
    text = (experiment / "train.py").read_text(encoding="utf-8")
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def hunks(experiment: Path) -> list[tuple[list[str], list[str]]]:
    """What the sibling removes from its parent's train.py and adds to it, hunk by hunk, without the docstring."""
    old, new = code_of(parent_of(experiment)), code_of(experiment)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [(old[a:b], new[c:d]) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"]


def num_changed_lines(experiment: Path) -> int:
    """A changed line counts once: the larger number of removed and added lines, hunk by hunk."""
    return sum(max(len(removed), len(added)) for removed, added in hunks(experiment))


def text_of(experiment: Path) -> str:
    return (experiment / README).read_text(encoding="utf-8")


def table_rows() -> dict[str, list[str]]:
    """The curriculum table of the main README: the cells of each experiment's row, by its name."""
    rows = re.findall(r"^\| \d+ \| \[(experiment_\w+)\]\(\1/README\.md\) \|(.*)\|$", text_of(ROOT), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


@pytest.mark.parametrize("experiment", SIBLINGS, ids=lambda path: path.name)
def test_the_diff_is_within_the_budget_that_the_readme_states(experiment, capsys):
    size = num_changed_lines(experiment)
    budget = re.search(r"\*\*Diff budget:\*\* (\d+) changed lines", text_of(experiment))
    with capsys.disabled():
        print(f"\n{experiment.name} differs from {parent_of(experiment).name} by {size} changed lines")
    assert budget, "its README states no budget"
    assert 0 < size <= int(budget[1])


@pytest.mark.parametrize("experiment", SIBLINGS, ids=lambda path: path.name)
def test_the_readme_shows_the_diff(experiment):
    """The lines after + and - in its diff blocks are those of the diff, in order, shown without indentation.

    Up to 40 changed lines all of them are shown, above that complete hunks.
    """
    blocks = re.findall(r"^```diff\n(.*?)^```$", text_of(experiment), re.MULTILINE | re.DOTALL)
    shown = [line[0] + line[1:].strip() for block in blocks for line in block.splitlines() if line[0] in "+-"]
    position = 0
    for removed, added in hunks(experiment):
        hunk = [f"-{line.strip()}" for line in removed] + [f"+{line.strip()}" for line in added]
        is_shown = shown[position : position + len(hunk)] == hunk
        assert is_shown or num_changed_lines(experiment) > 40, hunk
        position += len(hunk) if is_shown else 0
    assert shown[position:] == []
    assert shown


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.name)
def test_code_that_a_readme_quotes_is_code_of_the_project(experiment):
    sources = [*ROOT.glob("common/**/*.py"), *ROOT.glob("docs/*.py"), *experiment.glob("*.py")]
    texts = [re.sub(r"^ +", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE) for path in sources]
    for block in re.findall(r"^```python\n(.*?)^```$", text_of(experiment), re.MULTILINE | re.DOTALL):
        quoted = re.sub(r"^ +", "", textwrap.dedent(block), flags=re.MULTILINE)
        assert any(quoted in text for text in texts), block


def test_the_curriculum_table_is_true():
    """Every experiment has a row with its parent and the size of its diff."""
    rows = table_rows()
    assert sorted(rows) == [path.name for path in EXPERIMENTS]
    for experiment in EXPERIMENTS:
        _, parent, size, *_ = rows[experiment.name]
        if experiment in SIBLINGS:
            assert (parent, size) == (parent_of(experiment).name, f"{num_changed_lines(experiment)} lines")
        else:
            assert (parent, size) == ("none", f"{len((experiment / 'train.py').read_text().splitlines())} lines in all")


@pytest.mark.parametrize(
    ("experiment", "name"),
    [
        ("experiment_accelerate", "train_accelerate.py"),
        ("experiment_accelerate_ddp", "train_accelerate_ddp.py"),
        ("experiment_multiturn_tool_calling", "train_multiturn_calc_tool_calling.py"),
        ("experiment_multiturn_qa", "train_multiturn_qa.py"),
    ],
)
def test_names_of_earlier_documents_are_links(experiment, name):
    link = ROOT / experiment / name
    assert link.is_symlink()
    assert link.readlink() == Path("train.py")


def test_no_two_python_files_are_equal():
    """Except symbolic links and empty files: what two experiments share belongs in common/."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout, which knows the project's files")
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    by_content = defaultdict(list)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.exists() and not path.is_symlink() and path.read_bytes().strip():
            by_content[hashlib.sha256(path.read_bytes()).digest()].append(name)
    assert len(by_content) > 20
    assert [names for names in by_content.values() if len(names) > 1] == []


# What may import what -------------------------------------------------------------------------------------------------

FIRST_SHELF = [*sorted((ROOT / "common").rglob("*.py"))]
TASKS = sorted((ROOT / "tasks").rglob("*.py"))
HARNESS = sorted((ROOT / "harness").rglob("*.py"))
ROOMS = ("common", "doctor", "harness", "tasks", "viewer")


def imports_of(path: Path) -> set[str]:
    """The full names of all modules, and of all names from modules, that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(paths: list[Path], *forbidden: str) -> list[tuple[str, str]]:
    """Every import of a module that begins with one of the forbidden names."""
    found = [(path, name) for path in paths for name in sorted(imports_of(path))]
    return [
        (str(path.relative_to(ROOT)), name)
        for path, name in found
        if any(f"{name}.".startswith(f"{start}.") for start in forbidden)
    ]


def test_common_imports_neither_tasks_nor_the_harness():
    assert len(FIRST_SHELF) > 20
    assert violations(FIRST_SHELF, "harness", "tasks", "viewer") == []


def test_the_harness_imports_no_particular_task():
    assert len(HARNESS) > 40
    assert violations(HARNESS, "tasks") == []


def test_no_two_files_have_the_same_name():
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if not path.name.startswith("__")]
    names = [path.name for path in paths]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_the_doctor_examines_without_common():
    """Its slow loops are its own; only the adapter for our own files imports what they are made of."""
    paths = [path for path in sorted((ROOT / "doctor").glob("*.py")) if path.name != "textbook.py"]
    assert len(paths) > 10
    assert violations(paths, "common") == []


def test_no_program_changes_where_modules_are_found():
    """`-e .` in requirements.txt does. Only the process of a user's tools gets the search path of the run's process."""
    changes = re.compile(r"sys\.path(\[.*\])? *\+?=|sys\.path\.(insert|append|extend)|site\.addsitedir")
    folders = (*ROOMS, "benchmarks", "data", "docs", "experiment_*", "notebooks")
    folders += ("tests/engine/stand_in",)  # a program, too
    paths = [path for folder in folders for kind in ("py", "ipynb") for path in ROOT.glob(f"{folder}/**/*.{kind}")]
    found = [path.relative_to(ROOT).as_posix() for path in paths if changes.search(path.read_text(encoding="utf-8"))]
    assert len(paths) > 100
    assert found == ["harness/tools/tool_worker.py"]


def test_viewer_imports_nothing_of_common():
    assert violations(sorted((ROOT / "viewer").rglob("*.py")), "common") == []


@pytest.mark.parametrize(
    "line",
    [
        "import harness.run.run",
        "from harness import run",
        "def f():\n    from harness.run.run import Run",
    ],
)
def test_an_import_that_breaks_a_rule_is_found(tmp_path, monkeypatch, line):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "file.py"
    path.write_text(line + "\n")
    assert violations([path], "harness")


@pytest.mark.parametrize("path", sorted(ROOT.glob("experiment_*/train.py")), ids=lambda path: path.parent.name)
def test_imports_of_train_files_are_two_blocks(path):
    """First what a reader opens, then, after a blank line, what a reader may skip."""
    lines = path.read_text(encoding="utf-8").splitlines()
    common = [line.startswith("from harness.") for line in lines if line.startswith(("from common.", "from harness."))]
    assert common == sorted(common)
    assert any(common)
    assert lines[lines.index(next(line for line in lines if line.startswith("from harness."))) - 1] == ""


def test_helpers_beside_train_files_have_unique_names():
    """All of them can be on sys.path at once in a test run."""
    names = [path.name for path in ROOT.glob("experiment_*/*.py") if path.name != "train.py"]
    assert len(names) == len(set(names))
    assert "common.py" not in names
