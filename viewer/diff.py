"""Show the lesson of an experiment: the lines of its train.py that are not its parent's, without the module docstring.

    python -m viewer.diff policy_gradients/rloo                         # against the parent that its docstring names
    python -m viewer.diff policy_gradients/gspo policy_gradients/cispo  # from the first to the second

The blocks are those of `diff -U0`, with the line numbers of both files. The last line counts: a changed line once, a
block as the larger number of its removed and its added lines.
"""

import ast
import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from viewer.runs import RunError

ROOT = Path(__file__).resolve().parents[1]
Hunk = tuple[int, list[str], int, list[str]]  # first line and removed lines of the old file, the same of the new one


@dataclass(frozen=True)
class Config:
    experiment: tyro.conf.Positional[Path]  # a directory with a train.py
    other: tyro.conf.Positional[Path | None] = None  # another one, which is compared with the first instead of a parent


def parent_of(experiment: Path) -> Path | None:
    """The experiment that the docstring of train.py names as its parent."""
    docstring = ast.get_docstring(ast.parse(_text(experiment))) or ""
    name = re.search(r"^Parent: ([\w/]+)", docstring, re.MULTILINE)
    return ROOT / name[1] if name and name[1] != "none" else None


def hunks(old: Path, new: Path) -> list[Hunk]:
    """The blocks of lines that differ between two experiments' train.py, without their module docstrings."""
    (skip, before), (skip_new, after) = _body(old), _body(new)
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(skip + a + 1, before[a:b], skip_new + c + 1, after[c:d]) for tag, a, b, c, d in blocks if tag != "equal"]


def num_changed_lines(blocks: list[Hunk]) -> int:
    """A changed line counts once: the larger number of removed and added lines, block by block."""
    return sum(max(len(removed), len(added)) for _, removed, _, added in blocks)


def _body(experiment: Path) -> tuple[int, list[str]]:
    """Number of lines up to the end of the module docstring, and the lines after it."""
    text = _text(experiment)
    tree = ast.parse(text)
    end = tree.body[0].end_lineno if ast.get_docstring(tree) else 0
    return end, text.splitlines()[end:]


def _text(experiment: Path) -> str:
    if not _file(experiment).is_file():
        raise RunError(
            f"there is no {_file(experiment)}: name a directory with a train.py, such as policy_gradients/rloo"
        )
    return _file(experiment).read_text(encoding="utf-8")


def _file(experiment: Path) -> Path:
    """The directory's train.py, or the file that was named itself."""
    path = experiment if experiment.suffix == ".py" else experiment / "train.py"
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) and Path.cwd() == ROOT else path


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(
        Config, args=arguments, description=__doc__, prog="python -m viewer.diff", config=(tyro.conf.DisallowNone,)
    )
    try:
        old, new = (config.experiment, config.other) if config.other else (None, config.experiment)
        old = old or parent_of(new)
        if old is None:
            raise RunError(f"{new} has no parent: name two experiments, the older first")
        blocks = hunks(old, new)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for start, removed, start_new, added in blocks:
        print(f"@@ -{start},{len(removed)} +{start_new},{len(added)} @@")
        print("".join(f"-{line}\n" for line in removed) + "".join(f"+{line}\n" for line in added), end="")
    print(f"{num_changed_lines(blocks)} changed lines from {_file(old)} to {_file(new)}, not counting the docstrings")


if __name__ == "__main__":
    main()
