"""The samples in a page: rows of samples.jsonl by prompt, small, and of as many steps as the page has room for.

A log-prob or an entropy is a whole number of millionths of a nat, which is what samples.jsonl holds, and only sampled
tokens have one. Log-probs under other policies are differences from the sampler's: they are near 0 and compress well.
Terms, pushes and the diagnostics of a loss are as samples.jsonl has them.
"""

import base64
import gzip
import json
from dataclasses import dataclass, field

from viewer.runs import StepIndex, number

# Of all steps together, in the page: with the curves, the library that draws them, and the rest it stays below 2 MB.
PAGE_BUDGET = 1_200_000  # characters
STEP_BUDGET = 400_000  # of one step, so that the first, the last and one more have room
NOT_MEASUREMENTS = ("epoch", "minibatch", "log_probs")  # of an update; everything else has a number for each token


# ---- one step


def encode_step(rows: list[dict]) -> dict:
    """The rows of a step as the page reads them; those that cannot be used are left out.

    Prompt and index identify a row. If a resumed run has left two of them, the later one counts.
    """
    groups: dict[tuple, dict] = {}
    for row in rows:
        try:
            encoded = _encode_row(row)
            prompt = row["ids"][: row["prompt_length"]]
            key = (row["prompt_index"], *prompt)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            continue
        new = {
            "prompt_index": row["prompt_index"],
            "question": row.get("question", ""),
            "answer": row.get("answer"),
            "prompt": prompt,
            "rows": {},
        }
        groups.setdefault(key, new)["rows"][row["completion_index"]] = encoded
    return {"groups": [group | {"rows": list(group["rows"].values())} for group in groups.values()]}


def count_rows(chunk: dict) -> int:
    return sum(len(group["rows"]) for group in chunk["groups"])


def pack(chunk: dict) -> str:
    """base64 of gzip of JSON: the same text for the same chunk."""
    text = json.dumps(chunk, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("ascii"), 7, mtime=0)).decode()


def _encode_row(row: dict) -> dict:
    start, ids = row["prompt_length"], row["ids"]
    mask = [int(bit == 1) for bit in row["action_mask"]]
    if len(mask) != len(ids):
        raise ValueError("a mask of another length")
    sampled = [place for place in range(start, len(ids)) if mask[place]]
    sampler = _micro(row["sampler_log_probs"], sampled)
    old = _minus(_micro(row["old_log_probs"], sampled), sampler)
    reference, entropy = row.get("log_probs_ref"), row.get("entropy")
    return {
        "completion_index": row["completion_index"],
        "text": row.get("text", ""),
        "turns": row.get("turns"),
        "episode": _by_turn(row.get("episode")),
        "ids": ids[start:],
        "mask": mask[start:],
        "rewards": {name: number(value) for name, value in row.get("rewards", {}).items()},
        "return": number(row.get("return")),
        "advantage": number(row.get("advantage")),
        "finish_reason": row.get("finish_reason"),
        "sampler": sampler,
        "old": old if any(difference != 0 for difference in old) else None,
        "ref": reference and _minus(_micro(reference, sampled), sampler),
        "entropy": entropy and _micro(entropy, sampled),
        "updates": [
            {
                "epoch": update["epoch"],
                "minibatch": update["minibatch"],
                "log_probs": _minus(_micro(update["log_probs"], sampled), sampler),
                "measurements": {name: _at(sampled, update[name]) for name in update if name not in NOT_MEASUREMENTS},
            }
            for update in row.get("updates", [])
        ],
    }


def _by_turn(episode: object) -> list[dict] | None:
    """What is known of each turn in an environment: its state before the turn, and the turn's reward and advantages."""
    if not isinstance(episode, dict):
        return None
    names = {"states": "state", "rewards": "reward", "advantages": "advantage", "exact": "exact"}
    columns = {name: episode[plural] for plural, name in names.items() if isinstance(episode.get(plural), list)}
    turns = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=False)]
    return [{name: str(x) if name == "state" else number(x) for name, x in turn.items()} for turn in turns]


def _at(places: list[int], values: list) -> list[float | None]:
    """The entries at `places`, whole numbers as such; None where there is no finite number."""
    known = (number(values[place]) for place in places)
    return [int(value) if value is not None and value == int(value) else value for value in known]


def _micro(values: list, places: list[int]) -> list[int | None]:
    """The same in millionths."""
    return [None if value is None else round(value * 1e6) for value in _at(places, values)]


def _minus(values: list[int | None], others: list[int | None]) -> list[int | None]:
    return [None if a is None or b is None else a - b for a, b in zip(values, others, strict=True)]


# ---- as many steps as there is room for


@dataclass
class Kept:
    """The steps that a page shows."""

    num_rows: dict[int, int] = field(default_factory=dict)  # by step
    chunks: dict[int, str] = field(default_factory=dict)  # base64 of gzip of JSON, of steps that are inside the page
    shortened: list[int] = field(default_factory=list)  # steps with only some of their groups
    token_ids: set[int] = field(default_factory=set)
    prompts: dict[int, list[int]] = field(default_factory=dict)  # by step, to find those that ask the same question
    damaged: int = 0  # rows


def keep_steps(
    index: StepIndex, rows_per_step: int | None, page_budget: int = PAGE_BUDGET, step_budget: int = STEP_BUDGET
) -> Kept:
    """Encode the steps that a page can hold: the first and the last, then complete ones, spread evenly, then others."""
    kept, used, read = Kept(), 0, 0
    for step in _in_order(index, rows_per_step):
        expected = index.num_bytes(step) * used / read if read else 0
        if 0.7 * expected > page_budget - used and len(kept.chunks) > 2:
            continue  # reading it would take its time for nothing
        chunk = encode_step(index.read(step))
        packed, num_all = pack(chunk), count_rows(chunk)
        if len(packed) > step_budget:
            chunk = _shorten(chunk, step_budget)
            packed = pack(chunk)
        if not chunk["groups"] or len(packed) > page_budget - used:
            continue
        used, read = used + len(packed), read + index.num_bytes(step)
        kept.chunks[step], kept.num_rows[step] = packed, count_rows(chunk)
        kept.prompts[step] = [group["prompt_index"] for group in chunk["groups"]]
        kept.shortened += [step] if count_rows(chunk) < num_all else []
        kept.damaged += index.num_rows(step) - num_all
        for group in chunk["groups"]:
            kept.token_ids.update(group["prompt"], *(row["ids"] for row in group["rows"]))
    return kept


def _in_order(index: StepIndex, rows_per_step: int | None) -> list[int]:
    """All steps, in an order that begins with steps spread over the run."""
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
    """The first group, and others up to a quarter of the budget: a part has no sum, but leaves room for more steps."""
    groups: list[dict] = []
    for group in chunk["groups"]:
        if len(pack({"groups": [*groups, group]})) > (budget // 4 if groups else budget):
            break
        groups.append(group)
    return {"groups": groups}


# ---- what the page says about its samples


def describe(index: StepIndex, kept: Kept, command: str) -> str:
    """Sentences about the samples in the page, and the ones that it leaves out; `command` shows all."""
    if not index.steps:
        return "There are no samples."
    num_all, num_kept = len(index.steps), len(kept.num_rows)
    which = f"all of its {num_all} steps are" if num_all > 1 else "its only step is"
    which = f"{num_kept} of its {num_all} steps are" if num_kept < num_all else which
    where = f"in this page, in {in_bytes(sum(map(len, kept.chunks.values())))}" if kept.chunks else "to be chosen here"
    sentences = [f"samples.jsonl has {in_bytes(index.size)}; {which} {where}"]
    if num_kept < num_all:
        sentences.append(f"The others are left out to keep it small: {command} shows all")
    if kept.shortened:
        numbers = ", ".join(map(str, sorted(kept.shortened)))
        sentences.append(f"Very long steps show only their first groups: step {numbers}")
    if damaged := index.damaged + kept.damaged:
        sentences.append(f"{damaged} damaged line{'s are' if damaged > 1 else ' is'} left out")
    if index.is_cut_off:
        sentences.append("The last line is not complete")
    return ". ".join(sentences) + "."


def in_bytes(number: int) -> str:
    """
    >>> in_bytes(20_480), in_bytes(1_234_567)
    ('20 KB', '1.2 MB')
    """
    return f"{number / 1000:.0f} KB" if number < 1_000_000 else f"{number / 1_000_000:.1f} MB"
