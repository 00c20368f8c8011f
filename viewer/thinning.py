"""The samples that a page holds: those of as many steps as it has room for, and what it says about the others."""

from dataclasses import dataclass, field

from viewer.growing import StepIndex
from viewer.runs import ranges
from viewer.sampled import count_rows, encode_step, pack

# Of all steps together, in the page: with the curves, the library that draws them, and the rest it stays below 2 MB.
PAGE_BUDGET = 1_200_000  # characters
STEP_BUDGET = 400_000  # of one step, so that the first, the last and one more have room


@dataclass
class Kept:
    """The steps that a page holds."""

    chunks: dict[int, str] = field(default_factory=dict)  # base64 of gzip of JSON, by step
    num_rows: dict[int, int] = field(default_factory=dict)
    shortened: list[int] = field(default_factory=list)  # steps of which only some groups are there
    token_ids: set[int] = field(default_factory=set)
    damaged: int = 0  # rows


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
        sentences[0] += f"; {_all_of(len(steps))} in this page, in {size}"
    if kept.shortened:
        numbers = ", ".join(map(str, sorted(kept.shortened)))
        sentences.append(f"Only the first groups are here of what is very long: step {numbers}")
    described = [_describe_step(step, kept.num_rows[step], len(kept.chunks[step]), rows_per_step) for step in steps]
    return {
        "steps": described,
        "left_out": ranges(missing, among=index.steps),
        "note": _note(sentences, index, kept.damaged),
        "bytes": index.size,
    }


def describe_all(index: StepIndex, rows_per_step: int | None) -> dict:
    """The same of a page that asks for every step by itself."""
    steps = [_describe_step(step, index.num_rows(step), index.num_bytes(step), rows_per_step) for step in index.steps]
    size = f"{in_bytes(index.size)}, in {len(steps)} step{'s' if len(steps) > 1 else ''}"
    sentence = f"samples.jsonl has {size}" if steps else "There are no samples"
    return {"steps": steps, "left_out": [], "note": _note([sentence], index), "bytes": index.size}


def in_bytes(number: int) -> str:
    """
    >>> in_bytes(999), in_bytes(20_480), in_bytes(1_234_567)
    ('999 bytes', '20 KB', '1.2 MB')
    """
    if number < 1000:
        return f"{number} bytes"
    return f"{number / 1000:.0f} KB" if number < 1_000_000 else f"{number / 1_000_000:.1f} MB"


def _all_of(num_steps: int) -> str:
    return f"all of its {num_steps} steps are" if num_steps > 1 else "its only step is"


def _note(sentences: list[str], index: StepIndex, damaged: int = 0) -> str:
    damaged += index.damaged
    if damaged:
        sentences.append(f"{damaged} damaged line{'s are' if damaged > 1 else ' is'} left out")
    if index.torn:
        sentences.append("The last line is not complete")
    return ". ".join(sentences) + "."


def _describe_step(step: int, num_rows: int, num_bytes: int, rows_per_step: int | None) -> dict:
    complete = num_rows == rows_per_step
    return {"step": step, "rows": num_rows, "of": rows_per_step, "complete": complete, "bytes": num_bytes}


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
    """The first group, and others up to a quarter of the budget: a part has no sum, and more steps have room so."""
    groups: list[dict] = []
    for group in chunk["groups"]:
        if len(pack({"groups": [*groups, group]})) > (budget // 4 if groups else budget):
            break
        groups.append(group)
    return {"groups": groups}
