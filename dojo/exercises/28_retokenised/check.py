"""The tokenizer, then the log, then rows that are built one token at a time."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dojo.judge import Call, perform

TOKENS = ["<end>", "<user>", "<bot>", "1", "2", "3", "12", "23", "31", "count"]
END, USER, BOT, ONE, TWO, THREE, TWELVE, TWENTY_THREE, _, COUNT = range(10)
LOG_ONLY = "the symptom is gone from the log and the cause is not: a row must have exactly the ids that were sampled"


def row(*turns: dict, about: str) -> Call:
    return Call("row_of", {"turns": [*turns]}, about=about)


ASK = {"text": "count"}
CALLS = [
    Call("encode", {"text": "123"}, about="the tokenizer belongs to the model"),
    Call("train", {"seed": 0, "steps": 1}, about="the first step"),
    row(ASK, {"ids": [TWELVE, THREE, END]}, about="the tokens that the tokenizer would choose, too"),
    row(ASK, {"ids": [ONE, TWO, THREE, END]}, about=LOG_ONLY),
    row(ASK, {"ids": [ONE, TWENTY_THREE, END]}, {"text": "count3"}, {"ids": [TWO, THREE]}, about="two questions"),
    row(ASK, {"ids": [ONE, TWO]}, ASK, {"ids": [END]}, about="the first answer has no end, the second is empty"),
    row(ASK, {"ids": [ONE, USER, TWO, END]}, about="the policy wrote a <user>, which is a token like any other"),
    row(ASK, {"ids": []}, about="nothing is written yet, as at the beginning of a turn"),
]


def ids_of(text: str) -> list[int]:
    ids = []
    while text:
        best = 0
        for i, token in enumerate(TOKENS):
            if text[: len(token)] == token and (not text.startswith(TOKENS[best]) or len(token) > len(TOKENS[best])):
                best = i
        ids.append(best)
        text = text[len(TOKENS[best]) :]
    return ids


def expected(call: Call) -> Any:
    if call.function == "encode":
        return ids_of(call.arguments["text"])
    if call.function == "train":
        return {"difference": [0.0]}
    return built(call, lambda ids: ids)


def built(call: Call, change: Callable[[list[int]], list[int]]) -> dict:
    found: dict = {"ids": [], "mask": []}
    for turn in call.arguments["turns"]:
        if "ids" in turn:
            written, number = change(turn["ids"]), 1
        else:
            written, number = [USER, *ids_of(turn["text"]), END, BOT], 0
        for token in written:
            found["ids"].append(token)
            found["mask"].append(number)
    return found


def accept(call: Call, result: Any) -> bool:
    """A difference of 0, up to the rounding of float32."""
    return call.function == "train" and isinstance(result, dict) and 0 <= result.get("difference", [1.0])[0] < 1e-4


def returned_by(name: str, function: str, *changes: tuple[str, str]) -> Callable[[Call], Any]:
    """What a function of one of the files here returns, with some changes."""

    def mistaken(call: Call) -> Any:
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        for old, new in changes:
            text = text.replace(old, new)
        module = ModuleType("run_28")
        exec(text, module.__dict__)
        return perform(module, call) if call.function == function else None

    return mistaken


AGAIN = ('turn["ids"] if "ids" in turn', 'encode(decode(turn["ids"])) if "ids" in turn')

MISTAKES = {
    "The tokenizer has changed, and the model was trained with the old one. No tokenizer can cure this: a text has "
    "several tokenisations, and a policy may sample each of them.": lambda call: [ONE, TWO, THREE],
    "As before: training does not see the tokens that were sampled. Compare them with those of the row.": returned_by(
        "start.py", "train"
    ),
    "Each turn is encoded alone now, but the policy's turns are still decoded and encoded again.": returned_by(
        "solution.py", "train", AGAIN
    ),
    "The log says that the difference is 0, because the same wrong row is compared with itself. The symptom is gone "
    "and the cause is not: the ids of a row are not those that were sampled.": returned_by("start.py", "row_of"),
}
