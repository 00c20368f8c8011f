"""The bundled task: arithmetic questions with one right answer.

A row is `{"question": "What is 47 plus 29 minus 18?", "answer": "58", "num_terms": 3, "num_digits": 2}`. The policy
should end with `<answer>58</answer>`. It may reason inside `<think>` first, and reinforcement learning finds out that
this pays. Any rows with `question` and `answer` can be used.
"""

import re
from pathlib import Path

_DATA = Path(__file__).resolve().parents[2] / "data"
TRAIN_DATA = _DATA / "math_tasks.jsonl"
EVAL_DATA = _DATA / "math_tasks_heldout.jsonl"
FIELDS = {"question": str, "answer": (str, int, float)}  # what every row must have
KIND_FIELDS = ("num_terms", "num_digits")  # questions that agree in these are of one kind
REWARD_WEIGHTS = {"correct": 1.0, "format": 0.0}
SYSTEM_PROMPT = (
    "Think step by step inside <think> and </think>, then give only the final answer inside <answer> and </answer>."
)

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)  # an unclosed thought extends to the end of the text
_WELL_FORMED = re.compile(r"(?:<think>(?:(?!</?think>|</?answer>).)*</think>\s*)?<answer>[^<>]*</answer>", re.DOTALL)


def messages(row: dict, system_prompt: str = "") -> list[dict]:
    """The conversation that asks `row["question"]`, with a system turn unless `system_prompt` is empty."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": row["question"]}]


def reward(row: dict, text: str) -> dict[str, float]:
    """Reward one completion, by named components.

    `correct` is 1 if the text outside `<think>` holds exactly one `<answer>` and it equals `row["answer"]` after
    `normalize_answer`, else 0: an answer inside the thought, or a second guess, earns nothing. `format` is 1 if the
    text is an optional thought followed by one answer, and nothing else; its weight is 0, so it is only logged.

    >>> row = {"question": "What is 20 plus 38?", "answer": "58"}
    >>> reward(row, "<think>20+38=58</think><answer>58</answer>")
    {'correct': 1.0, 'format': 1.0}
    >>> reward(row, "<answer>58</answer><answer>59</answer>")
    {'correct': 0.0, 'format': 0.0}
    """
    answers = _ANSWER.findall(text)
    outside = _ANSWER.findall(_THINK.sub("", text))
    wanted = normalize_answer(str(row["answer"]))
    is_correct = len(answers) == len(outside) == 1 and normalize_answer(outside[0]) == wanted
    return {"correct": float(is_correct), "format": float(_WELL_FORMED.fullmatch(text.strip()) is not None)}


def describe(row: dict, text: str) -> dict[str, float]:
    """What else to log: whether the answer is reasoned, after a `<think>` that is closed and not empty, or direct.

    >>> describe({}, "<think>20+38=58</think><answer>58</answer>")
    {'reasoned': 1.0, 'direct': 0.0}
    >>> describe({}, "<answer>58</answer><think>20+38=58</think>")
    {'reasoned': 0.0, 'direct': 1.0}
    """
    is_reasoned = re.search(r"<think>\s*[^\s<].*?</think>", text.split("<answer>")[0], re.DOTALL) is not None
    return {"reasoned": float(is_reasoned), "direct": float(not is_reasoned)}


def normalize_answer(text: str) -> str:
    """Bring an answer to one spelling: no spaces, no thousands commas, no leading plus or zeros, no trailing `.0`.

    >>> [normalize_answer(text) for text in (" 1,234 ", "+58.0", "-0", "007", "- 12", "x + 1")]
    ['1234', '58', '0', '7', '-12', 'x+1']
    """
    text = re.sub(r"\s+", "", text)
    match = re.fullmatch(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?", text)
    if match is None:
        return text
    number = match.group(2).replace(",", "").lstrip("0") or "0"
    return "-" + number if match.group(1) == "-" and number != "0" else number
