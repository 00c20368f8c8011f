"""The calculator's task: arithmetic that a small policy cannot do in its head, so it may call a tool.

A row is `{"question": "What is 347 times 58 plus 1204?", "answer": "21330", "kind": "chain", "num_digits": 4}`. The
policy should end with `<answer>21330</answer>`, in its first turn or after the tool has answered. A quarter of the
questions are easy and need no call. Any rows with `question`, `answer` and `kind` can be used.
"""

import re
from pathlib import Path

from tasks import arithmetic
from tasks.arithmetic import messages, solution  # noqa: F401  # the question, and a right answer

_DATA = Path(__file__).resolve().parents[1] / "data"
TRAIN_DATA = _DATA / "calculator_tasks.jsonl"
EVAL_DATA = _DATA / "calculator_tasks_heldout.jsonl"
FIELDS = {"question": str, "answer": (str, int, float), "kind": str}  # every row must have these
KIND_FIELDS = ("kind",)  # questions that agree in these are of one kind
REWARD_WEIGHTS = {"correct": 1.0, "format": 0.0}
SYSTEM_PROMPT = (
    "Use the calculator for arithmetic that you cannot do reliably in your head: call it with the complete expression, "
    "and wait for its result. At the end give only the final answer inside <answer> and </answer>."
)

_THOUGHT = r"<think>(?:[^<]|<(?!/?think>|/?answer>))*+</think>\s*+"
_WELL_FORMED = re.compile(rf"(?:{_THOUGHT})*+<answer>[^<>]*+</answer>")


def reward(row: dict, text: str) -> dict[str, float]:
    """Reward the policy's text in all of its turns, joined by newlines and without its tool calls.

    `correct` is the same as in the arithmetic task: exactly one answer outside `<think>`, and the right one. `format`
    is 1 if there are any number of thoughts, then one answer, and nothing else; its weight is 0, so it is only logged.

    >>> row = {"question": "What is 347 times 58 plus 1204?", "answer": "21330"}
    >>> reward(row, "<think>too large</think>\\n<answer>21330</answer>")
    {'correct': 1.0, 'format': 1.0}
    >>> reward(row, "<answer>21330</answer>\\nLet me check.")
    {'correct': 1.0, 'format': 0.0}
    """
    correct = arithmetic.reward(row, text)["correct"]
    return {"correct": correct, "format": float(is_well_formed(text))}


def is_well_formed(text: str) -> bool:
    """Whether the text is any number of thoughts, then one answer, and nothing else."""
    return _WELL_FORMED.fullmatch(text.strip()) is not None


def describe(row: dict, text: str) -> dict[str, float]:
    """More values to log: whether the policy reasons in symbols before it answers."""
    return {"reasoned": arithmetic.describe(row, text)["reasoned"]}
