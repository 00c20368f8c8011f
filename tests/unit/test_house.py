"""The structure of the repository: what may import what."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST_SHELF = [
    path
    for folder in ("common", "common/tasks", "common/fast", "common/engines")
    for path in sorted((ROOT / folder).glob("*.py"))
]
PLUMBING = sorted((ROOT / "common/plumbing").rglob("*.py"))


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


def test_algorithm_files_never_import_plumbing():
    assert len(FIRST_SHELF) > 12
    assert violations(FIRST_SHELF, "common.plumbing", "common.datagen", "viewer") == []


def test_plumbing_imports_no_particular_task():
    assert len(PLUMBING) > 15
    assert violations(PLUMBING, "common.tasks", "common.datagen") == []


def test_the_doctor_examines_without_common():
    """Its slow loops are its own; only the adapter for our own files imports what they are made of."""
    paths = [path for path in sorted((ROOT / "doctor").glob("*.py")) if path.name != "stand_ins.py"]
    assert len(paths) > 10
    assert violations(paths, "common") == []


def test_no_program_changes_where_modules_are_found():
    """`-e .` in requirements.txt does. Only the process of a user's tools gets the search path of the run's process."""
    changes = re.compile(r"sys\.path(\[.*\])? *\+?=|sys\.path\.(insert|append|extend)|site\.addsitedir")
    folders = ("benchmarks", "common", "data", "docs", "doctor", "evaluation", "experiment_*", "notebooks", "viewer")
    folders += ("tests/engine/stand_in",)  # a program, too
    paths = [path for folder in folders for kind in ("py", "ipynb") for path in ROOT.glob(f"{folder}/**/*.{kind}")]
    found = [path.relative_to(ROOT).as_posix() for path in paths if changes.search(path.read_text(encoding="utf-8"))]
    assert len(paths) > 100
    assert found == ["common/plumbing/tool_worker.py"]


def test_viewer_imports_nothing_of_common():
    assert violations(sorted((ROOT / "viewer").rglob("*.py")), "common") == []


@pytest.mark.parametrize(
    "line",
    [
        "import common.plumbing.run",
        "from common import plumbing",
        "def f():\n    from common.plumbing.run import Run",
    ],
)
def test_an_import_that_breaks_a_rule_is_found(tmp_path, monkeypatch, line):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "file.py"
    path.write_text(line + "\n")
    assert violations([path], "common.plumbing")


@pytest.mark.parametrize("path", sorted(ROOT.glob("experiment_*/train.py")), ids=lambda path: path.parent.name)
def test_imports_of_train_files_are_two_blocks(path):
    """First what a reader opens, then, after a blank line, what a reader may skip."""
    lines = path.read_text(encoding="utf-8").splitlines()
    common = [line.startswith("from common.plumbing.") for line in lines if line.startswith("from common.")]
    assert common == sorted(common)
    assert any(common)
    assert lines[lines.index(next(line for line in lines if line.startswith("from common.plumbing."))) - 1] == ""


def test_helpers_beside_train_files_have_unique_names():
    """All of them can be on sys.path at once in a test run."""
    names = [path.name for path in ROOT.glob("experiment_*/*.py") if path.name != "train.py"]
    assert len(names) == len(set(names))
    assert "common.py" not in names
