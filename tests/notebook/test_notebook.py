"""Running docs/notebooks/one_grpo_step.ipynb reproduces its outputs, and its sentences agree with them.

gsm8k_smollm2.ipynb takes twenty minutes: tests/models/test_smollm2.py runs a short form of it.
"""

import base64
import copy
import doctest
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

reason = "needs the extra notebook"
nbformat, _, _ = (pytest.importorskip(package, reason=reason) for package in ("nbformat", "nbclient", "ipykernel"))

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "one_grpo_step.ipynb"
LONG = ROOT / "docs" / "notebooks" / "gsm8k_smollm2.ipynb"
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\d)")
SOLUTION = re.compile(r"```python\n(.*?)```\s+```\n(.*?)```", re.DOTALL)  # its code, and the output


@pytest.fixture(scope="module")
def committed() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(committed, load_script) -> nbformat.NotebookNode:
    """The notebook after a run from top to bottom, followed by the solutions of the exercises."""
    notebook = copy.deepcopy(committed)
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    notebook.cells += [nbformat.v4.new_code_cell(code) for code, _ in solutions(committed)]
    return load_script("docs/notebooks/execute.py").execute(notebook, NOTEBOOK.parent)


def solutions(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [found for cell in notebook.cells if cell.cell_type == "markdown" for found in SOLUTION.findall(cell.source)]


def prose(notebook: nbformat.NotebookNode) -> str:
    return "\n".join(SOLUTION.sub("", cell.source) for cell in notebook.cells if cell.cell_type == "markdown")


def contents(cell: nbformat.NotebookNode) -> dict[tuple[int, str], str]:
    """Every output of a cell, by its place and kind, including a picture's description for people who cannot see it."""
    found = {}
    for place, output in enumerate(cell.get("outputs", [])):
        if output.output_type == "stream":
            found[place, output.name] = output.text
        elif output.output_type == "error":
            found[place, "error"] = output.evalue
        else:
            found |= {(place, kind): str(data) for kind, data in output.data.items()}
            found |= {(place, f"alt of {kind}"): data["alt"] for kind, data in output.metadata.items() if "alt" in data}
    return found


def same_text(was: str, now: str) -> bool:
    """Equal except for spaces and the last digit of numbers, which other processors may round differently."""
    if NUMBER.sub("#", was).split() != NUMBER.sub("#", now).split():
        return False
    return all(map(nearly_equal, NUMBER.findall(was), NUMBER.findall(now)))


def nearly_equal(was: str, now: str) -> bool:
    """Whether two numbers differ by at most one in the last digit of the longer one; integers must be equal."""
    steps = []
    for digits, _, exponent in (number.partition("e") for number in (was, now)):
        if "." in digits:
            steps.append(10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))
    return abs(float(was) - float(now)) <= 1.01 * min(steps, default=0.0)


def same_picture(was: str, now: str) -> bool:
    """Same size, and nearly the same color in all but a few pixels (the last digit of a label, say)."""
    pixels = [np.asarray(Image.open(io.BytesIO(base64.b64decode(x))).convert("RGB"), dtype=int) for x in (was, now)]
    if pixels[0].shape != pixels[1].shape:
        return False
    return (np.abs(pixels[0] - pixels[1]).max(axis=-1) > 32).mean() < 5e-4


@pytest.mark.slow
def test_committed_outputs_are_what_running_gives(committed, executed):
    assert any(cell.get("outputs") for cell in committed.cells)
    for number, (cell, again) in enumerate(zip(committed.cells, executed.cells, strict=False)):
        was, now = contents(cell), contents(again)
        assert was.keys() == now.keys(), number
        for key in was:
            same = same_picture if key[1] == "image/png" else same_text
            assert same(was[key], now[key]), f"cell {number}: was {was[key][:2000]}\nand is {now[key][:2000]}"


@pytest.mark.slow
def test_solutions_print_what_they_say(committed, executed):
    expected = [printed for _, printed in solutions(committed)]
    outputs = ["".join(contents(cell).values()) for cell in executed.cells[len(committed.cells) :]]
    assert len(expected) == 3
    assert all(same_text(*pair) for pair in zip(expected, outputs, strict=True)), outputs


def test_the_picture_beside_it_is_that_of_the_notebook(committed, load_script):
    execute = load_script("docs/notebooks/execute.py")
    assert execute.PICTURE.read_bytes() == execute.picture(committed)


def test_examples_of_the_pictures(load_script):
    result = doctest.testmod(load_script("docs/notebooks/pictures.py"))
    assert result.attempted >= 3
    assert result.failed == 0


def test_the_long_notebook_keeps_the_outputs_of_its_cells_and_quotes_them():
    notebook = nbformat.read(LONG, as_version=4)
    outputs = [contents(cell) for cell in notebook.cells if cell.cell_type == "code"]
    printed = "\n".join(text for output in outputs for text in output.values())
    assert sum(map(bool, outputs)) >= 10
    assert not any(kind == "error" for output in outputs for _, kind in output)
    assert str(ROOT.parent) + "/" not in printed  # no path of the machine that ran it
    shown = set(NUMBER.findall(printed))
    quoted = [number for number in NUMBER.findall(prose(notebook)) if re.fullmatch(r"0\.\d{2,}|\d+\.\d", number)]
    assert len(quoted) > 4
    for number in quoted:
        assert number in shown, number


@pytest.mark.parametrize("path", [NOTEBOOK, LONG], ids=lambda path: path.stem)
def test_links_of_the_notebook_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)", prose(nbformat.read(path, as_version=4)))
    assert len(links) > 4
    for target, anchor in links:
        page = (NOTEBOOK.parent / target).resolve()
        assert page.exists(), target
        text = page.read_text(encoding="utf-8") if anchor else ""
        headings = re.findall(r"^#+ ([\w ]+)\??$", text, re.MULTILINE)
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings], anchor


def test_the_first_cell_finds_the_repository_or_says_what_to_do(committed, tmp_path):
    """In a directory inside it or, if it is installed, anywhere; -S: without site-packages."""
    source = next(cell.source for cell in committed.cells if cell.cell_type == "code") + "\nprint(os.getcwd())"

    def run(directory: Path, *options: str, **more: str) -> tuple[str, str]:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
        command = [sys.executable, *options, "-c", source]
        result = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, timeout=60)
        return result.stdout.strip(), result.stderr.strip()

    assert run(ROOT / "tests/notebook")[0] == run(tmp_path, PYTHONPATH=str(ROOT))[0] == str(ROOT)
    assert run(tmp_path, "-S")[1].endswith("set REPOSITORY above to its address")
