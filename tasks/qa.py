"""Questions about documents that the policy has to find by searching.

A row is `{"question": "When was the ship Fardil built?", "answer": "1846", "supporting": ["Fardil"], ...}`: the policy
should end with `<answer>1846</answer>`. `answer` can be a list of spellings that all count; `supporting` names
the documents that contain the answer, if they are known. The bundled rows also say how many documents the policy has to
read, one after the other (`difficulty`: "one hop" or "two hops"), and whether training asks about them (`documents`:
"seen" or "new"). Any rows with `question` and `answer` can be used.
"""

import re
import string
from collections import Counter
from fractions import Fraction
from pathlib import Path

from tasks.arithmetic import given_answer, is_answer, messages  # noqa: F401  # the question
from tasks.calculator import is_well_formed

_DATA = Path(__file__).resolve().parents[1] / "data"
TRAIN_DATA = _DATA / "qa_tasks.jsonl"
EVAL_DATA = _DATA / "qa_tasks_heldout.jsonl"
FIELDS = {"question": str, "answer": (str, int, float, list)}  # every row must have these
KIND_FIELDS = ("difficulty", "documents")  # questions that agree in these are of one kind
REWARD_WEIGHTS = {"correct": 1.0, "f1": 0.0, "format": 0.0}
SYSTEM_PROMPT = (
    "Find the answer in the documents: search for a name or a few words, read what comes back, and search again if "
    "something is missing. At the end give only the answer, as short as possible, inside <answer> and </answer>."
)

_NUMBER = re.compile(r"[-\u2212]?\d+(?:,\d{3})*(?:\.\d+)?")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def reward(row: dict, text: str) -> dict[str, float]:
    """Reward the policy's text in all of its turns, joined by newlines and without its tool calls.

    `correct` is the exact match and `f1` the F1 of SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1): the
    given answer against the best-fitting spelling of the row. The given answer is the text in the only `<answer>`
    outside `<think>`; without it, both are 0. `format` is 1 if there are any number of thoughts, then one answer, and
    nothing else.

    >>> row = {"question": "Who built the ship?", "answer": ["Jarce of Waplem", "Jarce"]}
    >>> reward(row, "<answer>jarce!</answer>")
    {'correct': 1.0, 'f1': 1.0, 'format': 1.0}
    >>> reward(row, "It was <answer>Mabto of Waplem</answer>")["f1"]  # "of" and "Waplem", of three words each
    0.6666666666666666
    """
    answer = given_answer(text)
    wanted = [] if answer is None else [spelling for spelling in answers(row) if is_answer(spelling)]
    return {
        "correct": float(any(exact_match(answer, spelling) for spelling in wanted)),
        "f1": max((f1(answer, spelling) for spelling in wanted), default=0.0),
        "format": float(is_well_formed(text)),
    }


def solution(row: dict) -> str:
    """A completion that earns `correct` = 1."""
    return f"<answer>{(answers(row) or [''])[0]}</answer>"


def describe(row: dict, text: str) -> dict[str, float]:
    """More values to log: the kind of question, which gives an accuracy for each kind; all 0 if it is unknown."""
    kind = (row.get("difficulty"), row.get("documents"))
    kinds = {"one_hop": ("one hop", "seen"), "two_hops": ("two hops", "seen")}
    kinds |= {"new_one_hop": ("one hop", "new"), "new_two_hops": ("two hops", "new")}
    return {name: float(kind == wanted) for name, wanted in kinds.items()}


def answers(row: dict) -> list[str]:
    """The spellings of the right answer; values that are neither text nor a number are ignored."""
    given = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    return [str(answer) for answer in given if isinstance(answer, str | int | float) and not isinstance(answer, bool)]


def exact_match(answer: str, wanted: str) -> bool:
    """SQuAD's exact match, but for numbers also the sign and decimal point count, which SQuAD ignores.

    >>> [exact_match(answer, "15") for answer in ("15.", "the 15", "-15", "1.5")]
    [True, True, False, False]
    """
    is_number = _NUMBER.fullmatch(wanted.strip()) is not None
    has_same_numbers = not is_number or [*map(_value, _NUMBER.findall(answer))] == [_value(wanted)]
    return has_same_numbers and normalize(answer) == normalize(wanted)


def _value(number: str) -> Fraction:
    return Fraction(number.strip().replace(",", "").replace("\u2212", "-"))


def f1(answer: str, wanted: str) -> float:
    """The harmonic mean of precision and recall of the answer's words, as a bag.

        F1 = 2 n / (words of the answer + words wanted),    n: the words in common

    >>> f1("the town of Waplem", "Waplem"), f1("-15", "15")  # town, of, Waplem; Waplem
    (0.5, 0.0)
    """
    if normalize(answer) == normalize(wanted) and not exact_match(answer, wanted):  # another number
        return 0.0
    given, gold = normalize(answer).split(), normalize(wanted).split()
    in_both = (Counter(given) & Counter(gold)).total()
    return 2 * in_both / (len(given) + len(gold)) if in_both else 0.0


def normalize(text: str) -> str:
    """SQuAD's normalisation: lower case, without ASCII punctuation and articles, single spaces.

    A text that would become empty is only brought to lower case, with single spaces.

    >>> normalize(" The U.S.  Navy's"), normalize("1,846."), normalize("a/the"), normalize("The")
    ('us navys', '1846', 'athe', 'the')
    """
    bare = " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())
    return bare or " ".join(text.lower().split())
