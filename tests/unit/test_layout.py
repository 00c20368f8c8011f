"""The root is a table of contents: where experiments are listed, and that nothing names a place that is gone."""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.base.places import CHAPTERS, in_experiments

ROOT = Path(__file__).resolve().parents[2]
NAMES = [path.parent.relative_to(ROOT).as_posix() for path in in_experiments("train.py")]
CURRICULUM = re.findall(r"^\| \d+ \| \[([\w/]+)\]", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
IN_CHAPTERS = {name.partition("/")[2]: name for name in NAMES if "/" in name}
GONE = rf"experiment_({'|'.join(IN_CHAPTERS)})\b|\bassets/tiny|common[/.]fast\b"
GONE += r"|(?<![/\w])accelerate_configs/|\bfrom notebooks\b|(?<!docs/)notebooks/\w+\.(py|ipynb)"
GONE += r"|\bmkdocs (serve|build)(?! -f)"
# About older runs and versions; links in docs/ begin with notebooks/
OLD = {
    "CHANGELOG.md",
    "harness/base/places.py",
    "tests/data/run_of_experiment_rloo.json",
    "tests/golden/test_interrupted.py",
}
# Folders of the harness, from low to high: each imports only those of earlier lines
LAYERS = ("base", "workers processes", "data", "models", "engines", "environments", "task", "logs", "run")
LAYERS += ("cli evaluation exporting search teachers tools",)
LEVELS = {folder: level for level, folders in enumerate(LAYERS) for folder in folders.split()}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is no checkout, or there is no git")
    return subprocess.check_output(["git", "-C", str(ROOT), "ls-files"], text=True).splitlines()


def test_the_root_has_at_most_30_entries(tracked):
    """And agents/, a chapter that begins with its first experiment; dojo/, for python -m dojo; pages for machines."""
    others = {"agents", "dojo", "AGENTS.md", "llms.txt"}
    assert len({name.partition("/")[0] for name in tracked if name[0] != "."} - others) <= 30


@pytest.mark.slow
# looking for pip would switch off the distutils of setuptools in this process, which torch's compiler needs
@pytest.mark.skipif(find_spec("setuptools") is None, reason="needs setuptools")
def test_pip_builds_no_wheel(tmp_path):
    """It would lack the policies. That pip install -e . works is shown by the environment of these tests."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", str(ROOT)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "not a library: clone it, and run `pip install -e .` there" in result.stderr


def test_no_file_names_what_has_moved(tracked):
    found, read = [], 0
    for name in tracked:
        if name in OLD or "/results/" in name or name == "tests/unit/test_layout.py":
            continue
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        read += 1
        text = re.sub(r"\]\(notebooks/", "](", text) if name.startswith("docs/") else text
        found += [f"{name}: {match[0]}" for match in re.finditer(GONE, text)]
    assert found == []
    assert read > 300


@pytest.mark.parametrize("chapter", [chapter for chapter in CHAPTERS if (ROOT / chapter).is_dir()])
def test_a_chapter_lists_its_experiments_in_the_order_of_the_curriculum(chapter):
    page = (ROOT / chapter / "README.md").read_text(encoding="utf-8")
    assert sorted(CURRICULUM) == sorted(NAMES)
    listed = [f"{chapter}/{name}" for name in re.findall(r"^\| \[(\w+)\]\(\1/README\.md\) \|", page, re.MULTILINE)]
    assert listed == [name for name in CURRICULUM if name.startswith(f"{chapter}/")]
    assert len(page.splitlines()) <= 30  # one screen


def test_each_experiment_ends_with_a_link_to_the_next_one():
    for name, following in itertools.pairwise([*CURRICULUM, "your own algorithm"]):
        page = f"{following}/README.md" if following in NAMES else "docs/your_algorithm.md"
        link = f"Next: [{following}]({os.path.relpath(page, name)})."
        assert (ROOT / name / "README.md").read_text(encoding="utf-8").splitlines()[-1] == link, name


def test_names_of_experiments_are_unique():
    """Runs are stored by them."""
    assert len({Path(name).name for name in NAMES}) == len(NAMES) >= 19


def test_the_reading_order_has_every_file_of_common():
    page = (ROOT / "docs" / "reading_order.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[\w+\.py\]\(\.\./common/(\w+)\.py\) \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(path.stem for path in ROOT.glob("common/*.py") if path.stem != "__init__")


def test_a_folder_of_the_harness_imports_only_lower_ones():
    """Also within functions, and for types; and no files import each other in a circle."""
    files = {path: f"harness.{path.parent.name}.{path.stem}" for path in (ROOT / "harness").glob("*/*.py")}
    upward, imports = set(), {name: set() for name in files.values()}
    for path, name in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            if isinstance(node, ast.ImportFrom):
                names = {node.module, *(f"{node.module}.{imported}" for imported in names)}
            for module in names & imports.keys():
                imports[name].add(module)
                folder, own = module.split(".")[1], path.parent.name
                if folder != own and LEVELS[folder] >= LEVELS[own]:
                    upward.add(f"{path.relative_to(ROOT)}: {module}")
    assert upward == set()
    assert sum(map(len, imports.values())) > 200
    TopologicalSorter(imports).prepare()  # raises an error with the circle, if there is one
