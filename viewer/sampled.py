"""samples.jsonl for the page: a step's rows by prompt, small, and of so many steps as a page can hold.

A log-prob or an entropy is a whole number of millionths of a nat, which is what samples.jsonl holds, and only sampled
tokens have one. Log-probs under other policies are differences from the sampler's: they are near 0 and compress well.
"""

import base64
import gzip
import json
from dataclasses import dataclass, field

from viewer.runs import StepIndex, clean, number, ranges

# Of all steps together, in the page: with the curves, the library that draws them, and the rest it stays below 2 MB.
PAGE_BUDGET = 1_200_000  # characters
STEP_BUDGET = 400_000  # of one step, so that the first, the last and one more have room
LARGEST = 1e9  # nats; what is larger is no log-prob, and its millionths are not exact in JavaScript


@dataclass
class Kept:
    """The steps that a page holds."""

    chunks: dict[int, str] = field(default_factory=dict)  # base64 of gzip of JSON, by step
    num_rows: dict[int, int] = field(default_factory=dict)
    shortened: list[int] = field(default_factory=list)  # steps of which only some groups are there
    token_ids: set[int] = field(default_factory=set)
    damaged: int = 0  # rows
    has_returns: bool = True  # False: an older version wrote them


def encode_step(rows: list[dict]) -> dict:
    """The rows of a step as the page reads them; those that cannot be used are left out.

    A row is known by its prompt and its index: of two, as a resumed run can leave them, the later one counts.
    """
    groups: dict[tuple, dict] = {}
    for row in rows:
        ids, mask, start = row.get("ids"), row.get("action_mask"), row.get("prompt_length")
        if not (_is_integers(ids) and _is_integers(mask) and len(ids) == len(mask)):
            continue
        if type(start) is not int or not 0 <= start <= len(ids):
            continue
        prompt_index, prompt = _integer(row.get("prompt_index")), ids[:start]
        new = {
            "prompt_index": prompt_index,
            "question": _text(row.get("question")) or "",
            "answer": _text(row.get("answer")),
            "prompt": prompt,
            "rows": {},
        }
        group = groups.setdefault((prompt_index, *prompt), new)
        completion_index = _integer(row.get("completion_index"))
        key = len(group["rows"]) + 0.5 if completion_index is None else completion_index
        group["rows"][key] = {"completion_index": completion_index} | _encode_row(row, start)
    return {"groups": [group | {"rows": list(group["rows"].values())} for group in groups.values()]}


def count_rows(chunk: dict) -> int:
    return sum(len(group["rows"]) for group in chunk["groups"])


def pack(chunk: dict) -> str:
    """base64 of gzip of JSON: the same text for the same chunk."""
    return base64.b64encode(gzip.compress(_json(chunk), 7, mtime=0)).decode()


def keep_steps(
    index: StepIndex, rows_per_step: int | None, page_budget: int = PAGE_BUDGET, step_budget: int = STEP_BUDGET
) -> Kept:
    """Encode the steps that a page can hold: the first and the last, then complete ones, spread evenly, then others.

    Args:
        rows_per_step: of a complete step; None: not known.
    """
    kept, used, read = Kept(), 0, 0
    for step in _in_order(index, rows_per_step):
        expected = index.num_bytes(step) * used / read if read else 0
        if 0.7 * expected > page_budget - used and len(kept.chunks) > 2:
            continue  # reading it would take its time for nothing
        rows = index.read(step)
        chunk = encode_step(rows)
        packed, num_all = pack(chunk), count_rows(chunk)
        if len(packed) > step_budget:
            chunk = _shorten(chunk, step_budget)
            packed = pack(chunk)
        if not chunk["groups"] or len(packed) > page_budget - used:
            continue
        used, read = used + len(packed), read + index.num_bytes(step)
        kept.chunks[step], kept.num_rows[step] = packed, count_rows(chunk)
        kept.shortened += [step] if count_rows(chunk) < num_all else []
        kept.damaged += index.num_rows(step) - num_all
        kept.has_returns &= any("return" in row for row in rows)
        kept.token_ids.update(*(group["prompt"] for group in chunk["groups"]))
        kept.token_ids.update(*(row["ids"] for group in chunk["groups"] for row in group["rows"]))
    return kept


def describe_kept(kept: Kept, index: StepIndex, rows_per_step: int | None, command: str) -> dict:
    """What the page says about its samples; `command` shows all of them."""
    steps = sorted(kept.chunks)
    missing = [step for step in index.steps if step not in kept.chunks]
    sentences = [f"samples.jsonl has {in_bytes(index.size)}"]
    size = in_bytes(sum(map(len, kept.chunks.values())))
    if not index.steps:
        sentences = ["There are no samples"]
    elif missing:
        sentences[0] += f"; {len(steps)} of its {len(index.steps)} steps are in this page, in {size}"
        sentences.append(f"The others are left out to keep it small: {command} shows all")
    else:
        sentences[0] += f"; all of its {len(steps)} steps are in this page, in {size}"
    if kept.shortened:
        numbers = ", ".join(map(str, sorted(kept.shortened)))
        sentences.append(f"Only the first groups are here of what is very long: step {numbers}")
    described = [_describe_step(step, kept.num_rows[step], len(kept.chunks[step]), rows_per_step) for step in steps]
    return {
        "steps": described,
        "left_out": ranges(missing, among=index.steps),
        "note": _note(sentences, index, kept.damaged, kept.has_returns),
        "bytes": index.size,
    }


def describe_all(index: StepIndex, rows_per_step: int | None) -> dict:
    """The same of a page that asks for every step by itself."""
    steps = [_describe_step(step, index.num_rows(step), index.num_bytes(step), rows_per_step) for step in index.steps]
    sentence = f"samples.jsonl has {in_bytes(index.size)}, in {len(steps)} steps" if steps else "There are no samples"
    return {"steps": steps, "left_out": [], "note": _note([sentence], index), "bytes": index.size}


def in_bytes(number: int) -> str:
    """
    >>> in_bytes(999), in_bytes(20_480), in_bytes(1_234_567)
    ('999 bytes', '20 KB', '1.2 MB')
    """
    if number < 1000:
        return f"{number} bytes"
    return f"{number / 1000:.0f} KB" if number < 1_000_000 else f"{number / 1_000_000:.1f} MB"


def _note(sentences: list[str], index: StepIndex, damaged: int = 0, has_returns: bool = True) -> str:
    damaged += index.damaged
    if damaged:
        sentences.append(f"{damaged} damaged line{'s are' if damaged > 1 else ' is'} left out")
    if index.torn:
        sentences.append("The last line is not complete")
    if not has_returns:
        sentences.append("An older version wrote them, without the total reward of a row")
    return ". ".join(sentences) + "."


def _describe_step(step: int, num_rows: int, num_bytes: int, rows_per_step: int | None) -> dict:
    return {"step": step, "rows": num_rows, "complete": num_rows == rows_per_step, "bytes": num_bytes}


def _in_order(index: StepIndex, rows_per_step: int | None) -> list[int]:
    """All steps, so that any first ones of them are spread over the run."""
    steps = index.steps
    complete = [step for step in steps if index.num_rows(step) == rows_per_step]
    others = [step for step in steps if index.num_rows(step) != rows_per_step]
    return list(dict.fromkeys([*steps[:1], *steps[-1:], *_spread(complete), *_spread(others)]))


def _spread(steps: list[int]) -> list[int]:
    """
    >>> _spread([0, 1, 2, 3, 4, 5, 6, 7])
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    width = max(1, (len(steps) - 1).bit_length())
    order = sorted(range(len(steps)), key=lambda number: f"{number:0{width}b}"[::-1])  # the bits of a number reversed
    return [steps[number] for number in order]


def _shorten(chunk: dict, budget: int) -> dict:
    """So many of the first groups as fit."""
    groups: list[dict] = []
    for group in chunk["groups"]:
        if len(pack({"groups": [*groups, group]})) > budget:
            break
        groups.append(group)
    return {"groups": groups}


def _encode_row(row: dict, start: int) -> dict:
    mask = [int(entry == 1) for entry in row["action_mask"][start:]]
    sampled = [start + place for place, entry in enumerate(mask) if entry]
    sampler = _units(row.get("sampler_log_probs"), sampled)
    rewards = row.get("rewards") if isinstance(row.get("rewards"), dict) else {}
    old = _minus(_units(row.get("old_log_probs"), sampled), sampler)
    updates = row.get("updates") if isinstance(row.get("updates"), list) else []
    return {
        "text": _text(row.get("text")) or "",
        "turns": _turns(row.get("turns")),
        "ids": row["ids"][start:],
        "mask": mask,
        "rewards": {name: number(value) for name, value in rewards.items()},
        "return": number(row.get("return")),
        "advantage": number(row.get("advantage")),
        "finish_reason": _text(row.get("finish_reason")),
        "sampler": sampler,
        "old": old if any(difference != 0 for difference in old) else None,
        "ref": _optional(row.get("log_probs_ref"), sampled, sampler),
        "entropy": _optional(row.get("entropy"), sampled),
        "updates": [
            {
                "epoch": update["epoch"],
                "minibatch": update["minibatch"],
                "log_probs": _minus(_units(update.get("log_probs"), sampled), sampler),
            }
            for update in updates
            if isinstance(update, dict) and _is_integers([update.get("epoch"), update.get("minibatch")])
        ],
    }


def _units(values: object, places: list[int]) -> list[int | None]:
    """The entries at `places` in millionths; None where there is no finite number."""
    if not isinstance(values, list):
        return [None] * len(places)
    chosen = [values[place] if place < len(values) else None for place in places]
    return [round(x * 1e6) if type(x) in (float, int) and -LARGEST < x < LARGEST else None for x in chosen]


def _minus(values: list[int | None], others: list[int | None]) -> list[int | None]:
    return [None if a is None or b is None else a - b for a, b in zip(values, others, strict=True)]


def _optional(values: object, places: list[int], minus: list[int | None] | None = None) -> list[int | None] | None:
    if not isinstance(values, list):
        return None
    units = _units(values, places)
    return units if minus is None else _minus(units, minus)


def _turns(turns: object) -> list[list[str]] | None:
    if not isinstance(turns, list):
        return None
    pairs = [turn for turn in turns if isinstance(turn, list) and len(turn) == 2]
    return [[_text(role) or "", _text(text) or ""] for role, text in pairs]


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(clean(value))


def _integer(value: object) -> int | None:
    return value if type(value) is int and abs(value) < 10**15 else None


def _is_integers(values: object) -> bool:
    return isinstance(values, list) and {*map(type, values)} <= {int} and all(abs(value) < 10**15 for value in values)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
