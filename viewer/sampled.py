"""A step of samples.jsonl for the page: its rows by prompt, and small.

A log-prob or an entropy is a whole number of millionths of a nat, which is what samples.jsonl holds, and only sampled
tokens have one. Log-probs under other policies are differences from the sampler's: they are near 0 and compress well.
Terms, pushes and the diagnostics of a loss are as samples.jsonl has them.
"""

import base64
import gzip
import json

from viewer.runs import clean, number

LARGEST = 1e9  # nats; what is larger is no log-prob, and its millionths are not exact in JavaScript
NOT_BY_TOKEN = ("epoch", "minibatch", "log_probs")  # of an update; everything else has a number for each token


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
    text = json.dumps(chunk, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("ascii"), 7, mtime=0)).decode()


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
                "tokens": {
                    name: _numbers(values, sampled) for name, values in update.items() if name not in NOT_BY_TOKEN
                },
            }
            for update in updates
            if isinstance(update, dict) and _is_integers([update.get("epoch"), update.get("minibatch")])
        ],
    }


def _numbers(values: object, places: list[int]) -> list[float | None]:
    """The entries at `places`; None where there is no finite number."""
    if not isinstance(values, list):
        return [None] * len(places)
    chosen = (values[place] if place < len(values) else None for place in places)
    known = (x if type(x) in (float, int) and -LARGEST < x < LARGEST else None for x in chosen)
    return [int(x) if x is not None and x == int(x) else x for x in known]


def _units(values: object, places: list[int]) -> list[int | None]:
    """The same in millionths."""
    return [None if x is None else round(x * 1e6) for x in _numbers(values, places)]


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
