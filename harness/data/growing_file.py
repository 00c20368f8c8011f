"""A JSONL file that grows batch by batch: it can be killed and continued, and made in parts (`--shard 1/4`).

Every row has an `index`, the number of the prompt or row that it was made from; rows are in that order. Batches
depend only on the settings, never on the shard or on an interruption, so the rows are the same to the last digit.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from common.errors import EngineError, UserError

from harness.base.checks import flag, local_path
from harness.base.config import shown
from harness.base.files import finite, replace_file
from harness.base.machine import is_out_of_memory, out_of_memory
from harness.base.terminal import completions_bar, printable, say

# Settings that can differ when a file is continued; the last one only if there is one shard, because shards are batches
FREE = {"output", "threads", "url", "request_seconds"}
FREE_IF_WHOLE = {"generation_batch_size"}


class Indexed(Protocol):
    index: int


ItemT = TypeVar("ItemT", bound=Indexed)


class Growing(Protocol):
    """The settings that are used here; a dataclass."""

    output: str
    shard: str


def grow(config: Growing, items: Sequence[ItemT], size: int, make: Callable[[list[ItemT]], list[dict]]) -> Path:
    """Append the rows that `make` returns for each batch of `size` items, from where the file ends; returns its path.

    `make` may return fewer rows than items. The settings are kept beside the file, in FILE.settings.json, and a file is
    continued only with the same settings.
    """
    path = local_path(config.output, "--output")
    begin, end = shard_range(config.shard, -(-len(items) // size))
    free = FREE | (FREE_IF_WHOLE if config.shard == "1/1" else set())
    last = _open(path, {name: value for name, value in dataclasses.asdict(config).items() if name not in FREE}, free)
    batches = [list(items[number * size : (number + 1) * size]) for number in range(begin, end)]
    left = [batch for batch in batches if batch[-1].index > last]
    total, done = (sum(map(len, some)) for some in (batches, batches[: len(batches) - len(left)]))
    if done:
        say(f"{shown(path)}: {done} of {total} prompts are done already")
    try:
        with completions_bar(done, total) as progress:
            for batch in left:
                rows = [row for row in make(batch) if row["index"] > last]
                _append(path, rows)
                progress.update(len(batch))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the same command continues {shown(path)}") from None
    except EngineError as error:
        raise UserError(f"{error}; {shown(path)} keeps the finished rows, and the same command continues it") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(config, error, None) from error
        raise
    return path


def shard_range(shard: str, count: int) -> tuple[int, int]:
    """Part `1/4` of `count` things that are divided in order.

    >>> [shard_range(f"{number}/3", 10) for number in (1, 2, 3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", shard)
    number, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= parts:
        raise UserError(f"--shard {printable(shard, 20)}: give part and number of parts, 1/4 for example")
    return count * (number - 1) // parts, count * number // parts


def _open(path: Path, settings: dict, free: set[str]) -> int:
    """The index of the last row in the file, -1 if there is none; a last line that a kill has cut off is removed."""
    beside = path.with_name(path.name + ".settings.json")
    settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
    try:
        if not beside.exists():
            if path.exists():
                raise UserError(
                    f"--output {shown(path)} exists, and no {beside.name} says how it was made: choose another"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(beside, json.dumps(settings, indent=1).encode() + b"\n")
        before = json.loads(beside.read_text(encoding="utf-8"))
        before = {name: [] for name in ("stop",) if name in settings} | before  # older versions had no --stop
        for name in sorted((settings.keys() | before.keys()) - free):
            if settings.get(name) != before.get(name):
                values = [printable(json.dumps(some.get(name)), 60) for some in (settings, before)]
                raise UserError(
                    f"{flag(name)} {values[0]} differs from {values[1]} in {shown(beside)}: repeat that setting, or "
                    "choose another --output"
                )
        with path.open("a+b") as file:
            file.seek(0)
            complete, new_line, cut = file.read().rpartition(b"\n")
            file.truncate(len(complete + new_line))
            if cut:
                say(f"{shown(path)}: the last line was incomplete, and is made again")
        return json.loads(complete.splitlines()[-1])["index"] if complete else -1
    except OSError as error:
        raise UserError(f"--output {shown(path)} cannot be written ({error.strerror})") from error
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"--output {shown(path)} or {beside.name} holds something else: choose another name") from error


def _append(path: Path, rows: list[dict]) -> None:
    with path.open("ab") as file:
        file.write("".join(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows).encode(errors="replace"))
        file.flush()
        os.fsync(file.fileno())
