"""Reads rows: a local JSONL with errors that name file and line, or a dataset of the hub; filters, splits, order."""

import json
from pathlib import Path

from common.errors import UserError
from common.keyed import keyed_generator

from common.plumbing.checks import local_path, parse_numbers
from common.plumbing.config import RunConfig, is_hub_id, shown
from common.plumbing.hub import must_be_cached
from common.plumbing.ranks import together
from common.plumbing.solutions import try_solutions
from common.plumbing.task import Row, Task
from common.plumbing.task_file import import_task
from common.plumbing.terminal import printable, say


@together()
def load_task(config: RunConfig, more_weights: dict[str, float] | None = None, tools: list[dict] | None = None) -> Task:
    """The task that `--task` names, with its training and evaluation rows, filtered alike.

    Without `--eval-data`, a task with files of its own is evaluated on its held-out file. A user's `--data` is divided:
    `--eval-prompts` rows, chosen by `--seed`, are held out.

    Args:
        more_weights: of reward components that the experiment gives, next to those of the task.
        tools: JSON schemas of the tools that the policy may call.

    Raises:
        UserError: the task, a file or a row cannot be used, or too few rows are left.
    """
    task = import_task(config, more_weights)
    task.tools = tools
    source = config.data if config.data is not None else task.train_data
    if source is None:
        raise UserError(f"{task} has no data of its own: give --data")
    train_rows = filter_rows(read_rows(source, task.fields), config, task, source)
    eval_source = task.eval_data if config.data is None and config.eval_data is None else config.eval_data
    if eval_source is not None:
        eval_rows = filter_rows(read_rows(eval_source, task.fields), config, task, eval_source)[: config.eval_prompts]
    elif len(train_rows) <= config.eval_prompts:
        raise UserError(
            f"{shown(source)} has {len(train_rows)} rows, of which --eval-prompts takes {config.eval_prompts}, so none "
            "is left to train on: lower --eval-prompts or give --eval-data"
        )
    else:
        order = keyed_generator("split", config.seed).permutation(len(train_rows))
        rows = [train_rows[index] for index in order]
        train_rows, eval_rows = rows[config.eval_prompts :], rows[: config.eval_prompts]
    prompts_per_step = getattr(config, "prompts_per_step", 1)
    if len(train_rows) < prompts_per_step:
        raise UserError(f"--prompts-per-step {prompts_per_step} exceeds the {len(train_rows)} training rows")
    asked = {row.question for row in train_rows}
    if known := sum(row.question in asked for row in eval_rows):
        say(f"{known} of the {len(eval_rows)} held-out questions are training questions as well: they test no learning")
    try_solutions(task, [*train_rows, *eval_rows])  # before a model is loaded
    task.try_out(train_rows[0])
    task.data, task.held_out_data = source, eval_source
    task.train_rows, task.eval_rows = train_rows, eval_rows
    return task


def read_rows(source: str, fields: dict[str, type | tuple[type, ...]]) -> list[Row]:
    """The rows of a JSONL file, or of the train split of a hub dataset `owner/name[:subset]`.

    Args:
        fields: the fields that every row must have, and their types.

    Raises:
        UserError: naming file, line and what is wrong.
    """
    path = local_path(source, "the data file")
    looks_local = path.exists() or source[:1] in ("", ".", "/", "~") or path.suffix in (".json", ".jsonl")
    is_remote = not looks_local and is_hub_id(source.partition(":")[0])
    rows = _read_hub(source) if is_remote else _read_jsonl(path)
    for row in rows:
        for field, wanted in fields.items():
            if field not in row:
                raise UserError(f"{row.place}: the field {field!r} is missing (there are: {', '.join(row)})")
            if not _is_usable(row[field], wanted):
                value = printable(json.dumps(row[field], default=str), 80)
                raise UserError(f"{row.place}: the field {field!r} cannot be {value}")
    if not rows:
        raise UserError(f"{shown(source)} has no rows")
    return rows


def _is_usable(value: object, wanted: type | tuple[type, ...]) -> bool:
    """Whether a value is of a wanted type, and JSON: without NaN, infinities, and halves of a surrogate pair."""
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False, default=str).encode()
    except ValueError:
        return False
    if isinstance(value, bool):  # which Python counts among the integers
        return bool in wanted
    return isinstance(value, wanted) or (isinstance(value, int) and float in wanted)


def _read_jsonl(path: Path) -> list[Row]:
    if not path.is_file():
        raise UserError(f"{shown(path)}: there is no such file (a hub dataset is owner/name)")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be read ({error.strerror})") from error
    rows: list[Row] = []
    file = shown(path)  # once: for every row it would take longer than reading them
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8 text ({error.reason})") from error
        except RecursionError as error:
            raise UserError(f"{place}: lists or objects are nested too deeply to be read") from error
        except ValueError as error:  # of Python, whose integers are read up to some thousand digits
            raise UserError(f"{place}: an integer has too many digits to be read") from error
        if not isinstance(row, dict):
            raise UserError(f"{place}: a row must be a JSON object, not {type(row).__name__}")
        rows.append(_placed(row, place))
    return rows


def _read_hub(source: str) -> list[Row]:
    from datasets import load_dataset

    name, _, subset = source.partition(":")
    must_be_cached("dataset", name)
    try:
        rows = load_dataset(name, subset or None, split="train", trust_remote_code=False).to_list()
    except Exception as error:  # the hub client raises many kinds, which make no difference to a user
        raise UserError(f"the dataset {source} could not be loaded: {' '.join(str(error).split())}") from error
    return [_placed(row, f"{source}, row {number}") for number, row in enumerate(rows, start=1)]


def _placed(fields: dict, place: str) -> Row:
    row = Row(fields)
    row.place = place
    return row


def filter_rows(rows: list[Row], config: RunConfig, task: Task, source: str) -> list[Row]:
    """Those that `--at-most` and `--max-question-length` keep, with the question that the task asks."""
    kept = rows
    for field, most in parse_numbers("--at-most", config.at_most).items():
        for row in kept:
            if isinstance(row.get(field), bool) or not isinstance(row.get(field), int | float):
                raise UserError(f"--at-most {field}: {row.place} has no number in a field {field!r}")
        kept = [row for row in kept if row[field] <= most]
    for row in kept:  # all of them, also to see that each can be asked
        row.question = task.question(row)
    if config.max_question_length is not None:
        kept = [row for row in kept if len(row.question) <= config.max_question_length]
    if not kept:
        raise UserError(
            f"none of the {len(rows)} rows of {shown(source)} passes the filters (--at-most, --max-question-length)"
        )
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
