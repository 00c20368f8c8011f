"""The files, lines, keys, flags and tests that the documentation names exist."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from common.plumbing.checks import flag
from common.plumbing.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in ROOT.glob("**/*.md") if "runs" not in path.parts and ".venv" not in path.parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", sorted(ROOT.glob("experiment_*/README.md")), ids=lambda page: page.parent.name)
def test_numbered_steps_point_at_the_numbered_comments(page):
    """The README of an experiment without a parent links all of them, a sibling's README those that it changes."""
    lines = (page.parent / "train.py").read_text(encoding="utf-8").splitlines()
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"^(\d)\. .*\[line (\d+)\]\(train\.py#L(\d+)\)", text, re.MULTILINE)
    numbered = [line for line in lines if re.match(r" +# \d ", line)]
    assert len(links) == len(numbered) or "Parent: none" not in text
    for number, shown, target in links:
        assert shown == target
        assert lines[int(target) - 1].strip().startswith(f"# {number} ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_in_commands_exist(page):
    for command in re.findall(r"(experiment_\w+/train\.py [^`\n]*)", page.read_text(encoding="utf-8")):
        script, *arguments = command.split("#")[0].split()
        own = re.findall(r"^    (\w+): ", (ROOT / script).read_text(encoding="utf-8"), re.MULTILINE)
        known = {flag(name) for name in (*own, *(field.name for field in dataclasses.fields(RunConfig)))}
        assert {argument for argument in arguments if argument.startswith("--")} <= known, command


def test_every_logged_key_is_explained():
    explained = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    keys = set()
    for path in ROOT.glob("experiment_base/results/seed*/metrics.jsonl"):
        keys |= {key for line in path.read_text(encoding="utf-8").splitlines() for key in json.loads(line)}
    assert len(keys) > 20
    for key in keys - {"step"}:
        family, *middle, name = key.split("/")
        places = [f"`{key}`", f"`{family}/*/{name}`"] if middle else [f"`{key}`"]
        assert any(place in explained for place in places), key


@pytest.mark.parametrize("patch", sorted(ROOT.glob("experiment_*/*.patch")), ids=lambda path: path.parent.name)
def test_the_broken_variant_applies_to_the_file_as_it_is(tmp_path, patch):
    script = f"{patch.parent.name}/train.py"
    (tmp_path / script).parent.mkdir()
    shutil.copy(ROOT / script, tmp_path / script)
    result = subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / script).read_bytes() != (ROOT / script).read_bytes()
    compile((tmp_path / script).read_bytes(), script, "exec")


def test_the_table_of_hyperparameters_matches_its_data(load_script):
    """The table in docs/hyperparameters.md is the one made from the committed results."""
    benchmark = load_script("benchmarks/hyperparameters.py")
    assert benchmark.table(*benchmark.read_results()) in (ROOT / "docs" / "hyperparameters.md").read_text("utf-8")


def test_the_index_of_tests_names_tests_that_exist():
    """And every test file, and no test's name is longer than 60 characters."""
    tests = {
        path.relative_to(ROOT).as_posix(): re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
        for path in ROOT.glob("tests/**/test_*.py")
    }
    index = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    mentioned = set()
    for file, name in re.findall(r"((?:\w+/)*test_\w+\.py)(?:::(\w+))?", index):
        found = [path for path in tests if f"/{path}".endswith(f"/{file}")]
        assert len(found) == 1, file
        assert not name or name in tests[found[0]], f"{file}::{name}"
        mentioned |= {found[0]}
    assert mentioned == tests.keys()
    assert [name for names in tests.values() for name in names if len(name) > 60] == []
