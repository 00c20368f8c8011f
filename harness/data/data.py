"""Reads rows of a local file, with errors that name file and row, or of the hub; orders them by step."""

import re
from collections import Counter
from collections.abc import Iterator

from common.errors import UserError
from common.keyed import keyed_generator
from common.parallel import own_part

from harness.base.checks import local_path
from harness.base.config import RunConfig, shown
from harness.base.hub import find_test_split, is_hub_source, read_split
from harness.base.terminal import say
from harness.data.rows import Fields, FieldsError, Row, placed, read_file
from harness.data.schemas import read_as


def read_rows(source: str, fields: Fields, is_own: bool = False) -> list[Row]:
    """The rows of a local file, or of a hub dataset `owner/name[:subset[:split]]`; each gets `fields` by `read_as`."""
    rows = []
    for row in scan_rows(source, fields, is_own):
        if isinstance(row, UserError):
            raise row
        rows.append(row)
    if not rows:
        raise UserError(f"{shown(source)} has no rows")
    return rows


def scan_rows(source: str, fields: Fields, is_own: bool = False) -> Iterator[Row | UserError]:
    """The same, but an unusable row yields its error."""
    path = local_path(source, "the data file")
    if is_hub_source(source):
        rows = (placed(row, f"{source}, row {number}") for number, row in enumerate(read_split(source), start=1))
    else:
        rows = read_file(path)
    notes = Counter()
    for row in rows:
        problem, note = (None, "") if isinstance(row, UserError) else read_as(row, fields, is_own)
        notes[note] += 1
        yield row if problem is None else FieldsError(row, problem)
    for note, count in notes.items():
        if note:
            say(f"{shown(source)}: {count} of {notes.total()} rows by another schema (docs/data.md): {note}")


def find_test_data(source: str) -> str | None:
    """`test.*` next to a file `train.*`, or the split "test" of a hub dataset given without a split."""
    if is_hub_source(source):
        found = find_test_split(source)
    else:
        path = local_path(source, "the data file")
        of_train = re.fullmatch(r"train((?:-00000-of-00001)?\.\w+)", path.name)  # also as the hub names it
        beside = path.with_name(f"test{of_train[1]}") if of_train else path
        found = str(beside) if of_train and beside.is_file() else None
    if found is not None:
        say(f"evaluated on {shown(found)}, which comes with {shown(source)} (--eval-data names another)")
    return found


def prompts_of_step(num_rows: int, prompts_per_step: int, step: int, seed: int) -> list[int]:
    """This process's part of the step's rows, see `all_prompts_of_step`; alone, all of them."""
    return own_part(all_prompts_of_step(num_rows, prompts_per_step, step, seed))


def all_prompts_of_step(num_rows: int, prompts_per_step: int, step: int, seed: int) -> list[int]:
    """The rows that step 1, 2, ... trains on: a new permutation of all rows every epoch, keyed by (seed, epoch).

    An epoch ends before a step that it could not fill, so that no step holds a prompt twice.

    >>> first, second = (set(all_prompts_of_step(5, 2, step, seed=0)) for step in (1, 2))
    >>> len(first), len(second), first & second
    (2, 2, set())
    """
    steps_per_epoch = num_rows // prompts_per_step
    epoch, position = divmod(step - 1, steps_per_epoch)
    order = keyed_generator("data order", seed, epoch).permutation(num_rows)
    return order[position * prompts_per_step : (position + 1) * prompts_per_step].tolist()


def num_steps(config: RunConfig, num_rows: int) -> int:
    """The steps of a run: `--steps`, or `--epochs` passes over the training rows."""
    if getattr(config, "epochs", None) is None:
        return getattr(config, "steps", 1)
    return config.epochs * (num_rows // config.prompts_per_step)
