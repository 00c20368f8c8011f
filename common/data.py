"""Rows in: a local JSONL with errors that name file and line, or a dataset of the hub; filters, splits, order."""

import json
from collections.abc import Sequence
from pathlib import Path

from common.config import HELDOUT_DATA, TRAIN_DATA, RunConfig, UserError, flag
from common.hub import must_be_cached
from common.keyed import keyed_generator

FIELD_TYPES: dict[str, tuple[type, ...]] = {"question": (str,), "answer": (str, int, float), "messages": (list,)}


def load_task(config: RunConfig) -> tuple[list[dict], list[dict]]:
    """The training and the evaluation rows of a run, with `question` and `answer`, filtered alike.

    Without `--eval-data`, the bundled task is evaluated on its held-out file, and a user's `--data` gives up
    `--eval-prompts` rows, chosen by `--seed`, before training.

    Raises:
        UserError: a file or row cannot be used, or too few rows are left.
    """
    source = str(TRAIN_DATA) if config.data is None else config.data
    train_rows = _filter(read_rows(source, ("question", "answer")), config, source)
    eval_source = str(HELDOUT_DATA) if config.data is None and config.eval_data is None else config.eval_data
    if eval_source is not None:
        eval_rows = _filter(read_rows(eval_source, ("question", "answer")), config, eval_source)
        return train_rows, eval_rows[: config.eval_prompts]
    if len(train_rows) <= config.eval_prompts:
        raise UserError(
            f"{source} has {len(train_rows)} rows, of which --eval-prompts takes {config.eval_prompts}, so none is "
            "left to train on: lower --eval-prompts or give --eval-data"
        )
    order = keyed_generator("split", config.seed).permutation(len(train_rows))
    rows = [train_rows[index] for index in order]
    return rows[config.eval_prompts :], rows[: config.eval_prompts]


def read_rows(source: str, required: Sequence[str]) -> list[dict]:
    """The rows of a JSONL file, or of the train split of a hub dataset `owner/name[:subset]`.

    Raises:
        UserError: naming file, line and what is wrong.
    """
    path = Path(source).expanduser()
    looks_local = path.exists() or source[:1] in ("", ".", "/", "~") or path.suffix in (".json", ".jsonl")
    is_hub_id = not looks_local and source.count("/") == 1
    rows = _read_hub(source) if is_hub_id else _read_jsonl(path)  # by place: the row, and where it stands
    for place, row in rows.items():
        for field in required:
            if field not in row:
                raise UserError(f"{place}: the field {field!r} is missing (there are: {', '.join(row)})")
            if not _is_usable(row[field], FIELD_TYPES[field]):
                raise UserError(f"{place}: the field {field!r} cannot be {json.dumps(row[field], default=str)}")
    if not rows:
        raise UserError(f"{source} has no rows")
    return list(rows.values())


def _is_usable(value: object, wanted: tuple[type, ...]) -> bool:
    """Whether a value is of a wanted type, and neither NaN nor text with half a surrogate pair, which has no UTF-8."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return isinstance(value, wanted) and not isinstance(value, bool) and value == value


def _read_jsonl(path: Path) -> dict[str, dict]:
    if not path.is_file():
        raise UserError(f"{path}: there is no such file (a hub dataset is owner/name)")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    rows: dict[str, dict] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: not UTF-8 text ({error.reason})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: a row must be a JSON object, not {type(row).__name__}")
        rows[f"{path}:{number}"] = row
    return rows


def _read_hub(source: str) -> dict[str, dict]:
    from datasets import load_dataset

    name, _, subset = source.partition(":")
    must_be_cached("dataset", name)
    try:
        rows = load_dataset(name, subset or None, split="train").to_list()
    except Exception as error:  # the hub client raises many kinds, none of which a user can tell apart
        raise UserError(f"the dataset {source} could not be loaded: {' '.join(str(error).split())}") from error
    return {f"{source}, row {number}": row for number, row in enumerate(rows, start=1)}


def _filter(rows: list[dict], config: RunConfig, source: str) -> list[dict]:
    kept = rows
    for limit, field in (("max_terms", "num_terms"), ("max_digits", "num_digits")):
        most = getattr(config, limit)
        if most is None:
            continue
        if not all(isinstance(row.get(field), int) for row in kept):
            raise UserError(
                f"{flag(limit)} needs {field!r} in every row, as a whole number; {source} has rows without it"
            )
        kept = [row for row in kept if row[field] <= most]
    if config.max_question_length is not None:
        kept = [row for row in kept if len(row["question"]) <= config.max_question_length]
    if not kept:
        filters = ", ".join(flag(name) for name in ("max_terms", "max_digits", "max_question_length"))
        raise UserError(f"none of the {len(rows)} rows of {source} passes the filters ({filters})")
    return kept


def prompts_of_step(num_rows: int, prompts_per_step: int, step: int, seed: int) -> list[int]:
    """Which rows step 1, 2, ... trains on: a new permutation of all rows every epoch, keyed by (seed, epoch).

    An epoch ends before a step that it could not fill, so that no step holds a prompt twice.

    >>> first, second = (set(prompts_of_step(5, 2, step, seed=0)) for step in (1, 2))
    >>> len(first), len(second), first & second
    (2, 2, set())
    """
    steps_per_epoch = num_rows // prompts_per_step
    epoch, position = divmod(step - 1, steps_per_epoch)
    order = keyed_generator("data order", seed, epoch).permutation(num_rows)
    return order[position * prompts_per_step : (position + 1) * prompts_per_step].tolist()
