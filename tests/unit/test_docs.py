"""The files, lines, keys, flags and tests that the documentation names exist."""

import dataclasses
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import tyro

from viewer.results import read_runs

from common.plumbing.checks import flag

ROOT = Path(__file__).resolve().parents[2]
# Not what runs write, nor what environments install
NOT_OURS = {"runs", "exports", *(path.parent.name for path in ROOT.glob("*/pyvenv.cfg"))}
PAGES = sorted(
    path
    for path in ROOT.glob("**/*.md")
    if not any(part in NOT_OURS or part.startswith(".") for part in path.relative_to(ROOT).parts)
)
# They take directories, or nothing
PLAIN_SCRIPTS = {"viewer/curve.py", "data/make_math_tasks.py", "benchmarks/calls_by_kind.py"}


@pytest.fixture(autouse=True)
def beside_scripts(monkeypatch):
    """Some scripts import what is beside them."""
    for folder in ("experiment_sft", "benchmarks"):
        monkeypatch.syspath_prepend(ROOT / folder)


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
def test_flags_in_commands_exist(page, load_script):
    for command in re.findall(r"(experiment_\w+/train\.py [^`\n]*)", page.read_text(encoding="utf-8")):
        script, *arguments = shlex.split(command.split("#")[0].rstrip(" \\"))
        config_class = load_script(script).Config
        names = [field.name for field in dataclasses.fields(config_class)]
        known = (
            {flag(name) for name in names} | {flag(f"no_{name}") for name in names} | aliases_of(config_class).keys()
        )
        assert {argument for argument in arguments if argument.startswith("--")} <= known, command


def aliases_of(config_class) -> dict[str, str]:
    """Other names of flags, and the flags that they are."""
    return {alias: flag(name) for name, aliases in getattr(config_class, "ALIASES", {}).items() for alias in aliases}


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """The commands `python <script> <arguments>` on a page: script and arguments of each."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    found = re.findall(r"python (?:-m (viewer)\.(\w+)|(\w+/\w+\.py|evaluate\.py|export\.py))((?: [^`\n&#)]*)?)", text)
    return [(file or f"{package}/{module}.py", shlex.split(arguments)) for package, module, file, arguments in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_understood_by_their_scripts(page, load_script):
    """Flags and their values, as the script itself reads them; nothing is run."""
    for script, arguments in commands_of(page):
        assert (ROOT / script).is_file(), script
        if script in PLAIN_SCRIPTS or arguments in ([], ["--help"]):
            continue
        module = load_script(script)
        config_class = getattr(module, "Config", None) or module.Command
        arguments = [*map(flag, getattr(config_class, "POSITIONAL", ())), *arguments]  # as a flag: tyro's own view
        try:
            tyro.cli(config_class, args=[aliases_of(config_class).get(word, word) for word in arguments])
        except SystemExit:
            pytest.fail(f"{script} {shlex.join(arguments)}")


def test_every_logged_key_is_explained():
    explained = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    keys = set()
    for folder in ROOT.glob("experiment_[bm]*/results"):
        runs = [run for name, run in read_runs(folder).items() if name.startswith("seed")]
        keys |= {key for run in runs for row in run.metrics.rows for key in row}
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
