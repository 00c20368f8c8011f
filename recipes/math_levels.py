"""Write the questions of MATH at levels 3 to 5 as JSONL, for recipes/math_qwen2.5_math_1.5b_drgrpo.sh.

    python recipes/math_levels.py --output math_levels_3_to_5.jsonl                       # from the hub
    python recipes/math_levels.py --output math_levels_3_to_5.jsonl --data my_math.jsonl  # from files

The hub's EleutherAI/hendrycks_math has a subset for each of the seven subjects. Only the training questions are used,
because MATH-500 belongs to the others. A row has `problem`, `level` ("Level 3", or 3) and `solution` or `answer`, and
is written unchanged. Rows whose level is not a number ("Level ?") are left out.

Not tried with the hub, which was out of reach when this was written.
"""

from harness.base.interrupt import handle_as_usual  # first: no traceback of Ctrl-C during the imports
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError

from harness.base.terminal import say
from harness.data.data import read_rows
from harness.run.start import run_main

SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


@dataclass(frozen=True, kw_only=True)
class Command:
    output: str  # the file to write, which must not exist
    # files, or datasets of the hub as owner/name[:subset[:split]]
    data: tuple[str, ...] = tuple(f"EleutherAI/hendrycks_math:{subject}" for subject in SUBJECTS)
    levels: tuple[int, ...] = (3, 4, 5)  # levels of difficulty, 1 to 5


def level_of(row: dict) -> int | None:
    """The level of a question; None if it has none.

    >>> [level_of({"level": level}) for level in ("Level 5", 3, "4", "Level ?", None, True)]
    [5, 3, 4, None, None, None]
    """
    match = re.fullmatch(r"(?:Level )?([1-5])", str(row["level"]))
    return int(match[1]) if match else None


def main(argv: list[str] | None = None) -> None:
    import tyro

    command = tyro.cli(Command, args=argv, description=__doc__, config=(tyro.conf.DisallowNone,))
    handle_as_usual()
    path = Path(command.output).expanduser()
    if path.exists():
        raise UserError(f"--output {path} exists: delete it, or give another name")
    rows = [row for source in command.data for row in read_rows(source, {"problem": str, "level": (str, int)})]
    chosen = [row for row in rows if level_of(row) in command.levels]
    if not chosen:
        raise UserError(
            f"--levels {' '.join(map(str, command.levels))}: none of the {len(rows)} rows is of these levels"
        )
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
        unfinished.rename(path)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written ({error.strerror})") from error
    finally:
        unfinished.unlink(missing_ok=True)
    say(f"{path}: {len(chosen)} of {len(rows)} questions")


if __name__ == "__main__":
    run_main(main)
