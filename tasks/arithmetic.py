"""The bundled task: arithmetic questions with one right answer.

A row is `{"question": "What is 47 plus 29 minus 18?", "answer": "58", "num_terms": 3, "num_digits": 2}`. The policy
should end with `<answer>58</answer>`. It can reason inside `<think>` first, and reinforcement learning finds out that
this pays. Any rows with `question` and `answer` can be used.
"""

import re
from pathlib import Path

_DATA = Path(__file__).resolve().parents[1] / "data"
TRAIN_DATA = _DATA / "math_tasks.jsonl"
EVAL_DATA = _DATA / "math_tasks_heldout.jsonl"
FIELDS = {"question": str, "answer": (str, int, float)}  # every row must have these
KIND_FIELDS = ("num_terms", "num_digits")  # questions that agree in these are of one kind
REWARD_WEIGHTS = {"correct": 1.0, "format": 0.0}
SYSTEM_PROMPT = (
    "Think step by step inside <think> and </think>, then give only the final answer inside <answer> and </answer>."
)

_WELL_FORMED = re.compile(r"(?:<think>(?:[^<]|<(?!/?think>|/?answer>))*+</think>\s*+)?+<answer>[^<>]*+</answer>")


def messages(row: dict, system_prompt: str = "") -> list[dict]:
    """The conversation that asks `row["question"]`, with a system turn unless `system_prompt` is empty."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": row["question"]}]


def reward(row: dict, text: str) -> dict[str, float]:
    """Reward one completion, by named components.

    `correct` is 1 if the text holds one closed `<answer>`, outside `<think>`, and it equals `row["answer"]` after
    `normalize_answer`, else 0: an answer inside the thought, or a second guess, earns nothing. `format` is 1 if the
    text is an optional thought followed by one answer, and nothing else; its weight is 0, so it is only logged. It
    takes time linear in the length of the text, whatever the policy writes.

    >>> row = {"question": "What is 20 plus 38?", "answer": "58"}
    >>> reward(row, "<think>20+38=58</think><answer>58</answer>")
    {'correct': 1.0, 'format': 1.0}
    >>> reward(row, "<answer>58</answer><answer>59</answer>")
    {'correct': 0.0, 'format': 0.0}
    """
    answer, wanted = given_answer(text), str(row["answer"])
    is_given = answer is not None and is_answer(wanted)
    is_correct = is_given and normalize_answer(answer) == normalize_answer(wanted)
    return {"correct": float(is_correct), "format": float(_WELL_FORMED.fullmatch(text.strip()) is not None)}


def solution(row: dict) -> str:
    """Optional: a completion that earns `correct` = 1. If it does not, no completion can answer the row.

    >>> [reward(row, solution(row))["correct"] for row in ({"answer": "58"}, {"answer": "20+38=58\\n#### 58"})]
    [1.0, 0.0]
    """
    return f"<answer>{row['answer']}</answer>"


def describe(row: dict, text: str) -> dict[str, float]:
    """More values to log: whether the answer is reasoned, after a `<think>` that is closed and not empty, or direct.

    >>> describe({}, "<think>20+38=58</think><answer>58</answer>")
    {'reasoned': 1.0, 'direct': 0.0}
    >>> describe({}, "<answer>58</answer><think>20+38=58</think>")
    {'reasoned': 0.0, 'direct': 1.0}
    """
    before = text.partition("<answer>")[0]
    thought = re.search(r"<think>\s*+[^<]", before)
    is_reasoned = thought is not None and before.find("</think>", thought.end()) >= 0
    return {"reasoned": float(is_reasoned), "direct": float(not is_reasoned)}


def given_answer(text: str) -> str | None:
    """The text in a completion's only `<answer>`. None if there is no answer, several, or one inside a thought.

    >>> [given_answer(text) for text in ("So <answer>58</answer>", "<think><answer>5</answer></think>", "58")]
    ['58', None, None]
    >>> given_answer("<answer>58<think>59</answer></think></answer>")  # which is not one answer
    """
    head, *thoughts = text.split("<think>")
    parts = [head, *(thought.partition("</think>")[2] for thought in thoughts)]  # an unclosed thought never ends
    answer = _only_answer("<think>".join(parts))
    has_thought = answer is not None and "<think>" in answer
    return answer if not has_thought and _only_answer(text) is not None else None


def normalize_answer(text: str) -> str:
    """Bring an answer to one spelling: no spaces, no thousands commas, no leading plus or zeros, no trailing `.0`.

    >>> [normalize_answer(text) for text in (" 1,234 ", "+58.0", "-0", "007", "- 12", "x + 1")]
    ['1234', '58', '0', '7', '-12', 'x+1']
    """
    text = "".join(text.split())
    match = re.fullmatch(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?", text)
    if match is None:
        return text
    number = match.group(2).replace(",", "").lstrip("0") or "0"
    return "-" + number if match.group(1) == "-" and number != "0" else number


def is_answer(text: str) -> bool:
    """Whether a row's answer can be given between tags: one line of text without tags or GSM8K's ####, and no NaN.

    >>> [is_answer(text) for text in ("58", "x + 1", " ", "5\\n8", "</answer>", "20+38=58 #### 58", "nan", "-Infinity")]
    [True, True, False, False, False, False, False, False]
    """
    lines = text.strip().splitlines()  # an empty text has none
    is_finite = text.strip().lstrip("+-").lower() not in ("nan", "inf", "infinity")  # as Python and JSON write them
    return len(lines) == 1 and is_finite and not any(mark in text for mark in ("<", ">", "####"))


def _only_answer(text: str) -> str | None:
    """The text in the only `<answer>`; None if there is none, or more than one."""
    answer, end, rest = text.partition("<answer>")[2].partition("</answer>")
    has_another = "</answer>" in rest.partition("<answer>")[2]
    return answer if end and not has_another else None
