"""Questions about documents that the policy has to find by searching.

A row is `{"question": "When was the ship Fardil built?", "answer": "1846", "supporting": ["Fardil"], ...}`: the policy
should end with `<answer>1846</answer>`. `answer` can be a list of spellings that all count; `supporting` names
the documents that contain the answer, if they are known. The bundled rows also say how many documents the policy has to
read, one after the other (`difficulty`: "one hop" or "two hops"), and whether training asks about them (`documents`:
"seen" or "new"). Any rows with `question` and `answer` can be used.
"""

import re
import string
import unicodedata
from collections import Counter
from pathlib import Path

from tasks.arithmetic import given_answer, is_answer, messages  # noqa: F401  # the question
from tasks.calculator import is_well_formed

_DATA = Path(__file__).resolve().parents[1] / "data"
TRAIN_DATA = _DATA / "qa_tasks.jsonl"
EVAL_DATA = _DATA / "qa_tasks_heldout.jsonl"
FIELDS = {"question": str, "answer": (str, int, float, list)}  # every row must have these
KIND_FIELDS = ("difficulty", "documents")  # questions that agree in these are of one kind
REWARD_WEIGHTS = {"correct": 1.0, "squad": 0.0, "f1": 0.0, "format": 0.0}
SYSTEM_PROMPT = (
    "Find the answer in the documents: search for a name or a few words, read what comes back, and search again if "
    "something is missing. At the end give only the answer, as short as possible, inside <answer> and </answer>."
)

_LOOK_ALIKE = dict.fromkeys([0xB4, 0x2BC, 0x2032, *range(0x2018, 0x201C)], "'")  # quotes and primes
_LOOK_ALIKE |= dict.fromkeys([0xAB, 0xBB, 0x2033, *range(0x201C, 0x2020)], '"')
_LOOK_ALIKE |= dict.fromkeys([*range(0x2010, 0x2016), 0x2212], "-")  # dashes and minus
_LOOK_ALIKE |= {0x2044: "/", 0x2215: "/", 0x2236: ":", 0x2026: "..."}
_LOOK_ALIKE |= dict.fromkeys([0xAD, 0x200B, 0x2060, 0xFEFF])  # invisible
_FIGURE = re.compile(  # digits, what is between them, a sign or decimal point in front, a plus behind: -1.5, 3-2, 1e-6
    r"(?:[<>]=?|(?<![\w)\]}%.-])-[$€£¥]?|^\s*-\s+)?(?:(?<![\w.])\.)?"
    r"\d(?:(?:[eE](?=-))?(?:[^\w\s]|_)*\d)*+(?:\+(?!\w))?"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_KEPT = {ord(mark): ord(mark) + 0xFEE0 for mark in string.punctuation}  # full width: SQuAD removes only ASCII


def reward(row: dict, text: str) -> dict[str, float]:
    """Reward the policy's text in all of its turns, joined by newlines and without its tool calls.

    `squad` is the exact match of SQuAD as published (Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1), to compare
    figures. It removes punctuation within numbers, too: $15 million is $1.5 million. `correct` is the exact match, and
    `f1` its F1, of words in which numbers are kept (`normalize`). The given answer is compared with the best-fitting
    spelling of the row. It is the text in the only `<answer>` outside `<think>`; without it, all three are 0. `format`
    is 1 if there are any number of thoughts, then one answer, and nothing else.

    >>> row = {"question": "Who built the ship?", "answer": ["Jarce of Waplem", "Jarce"]}
    >>> reward(row, "<answer>jarce!</answer>")
    {'correct': 1.0, 'squad': 1.0, 'f1': 1.0, 'format': 1.0}
    >>> reward(row, "It was <answer>Mabto of Waplem</answer>")["f1"]  # "of" and "Waplem", of three words each
    0.6666666666666666
    """
    answer = given_answer(text)
    wanted = [] if answer is None else [spelling for spelling in answers(row) if is_answer(spelling)]
    return {
        "correct": float(any(exact_match(answer, spelling) for spelling in wanted)),
        "squad": float(any(squad(answer) == squad(spelling) for spelling in wanted)),
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
    """Whether two texts are equal after `normalize`.

    >>> [exact_match(answer, "15") for answer in ("15.", "the 15", "-15", "1.5")]
    [True, True, False, False]
    """
    return normalize(answer) == normalize(wanted)


def f1(answer: str, wanted: str) -> float:
    """The harmonic mean of precision and recall of the answer's words, as a bag.

        F1 = 2 n / (words of the answer + words wanted),    n: the words in common

    >>> f1("the town of Waplem", "Waplem"), f1("$15 million", "$1.5 million"), f1("-15", "15")  # town, of, Waplem
    (0.5, 0.5, 0.0)
    """
    given, gold = normalize(answer).split(), normalize(wanted).split()
    in_both = (Counter(given) & Counter(gold)).total()
    return 2 * in_both / (len(given) + len(gold)) if in_both else 0.0


def normalize(text: str) -> str:
    """SQuAD's normalisation, but numbers keep their signs and all punctuation between digits, in full width.

    Only thousands commas are removed. Before, Unicode is brought to one form: NFC, with ASCII quotes, dashes and minus
    signs. A text that would become empty is only in lower case, with single spaces.

    >>> [normalize(text) for text in ("a $1.5 million", "1,846.", "12/25/2020", "O\u2019Brien", "The")]
    ['1\uff0e5 million', '1846', '12\uff0f25\uff0f2020', 'obrien', 'the']
    """
    text = unicodedata.normalize("NFC", text).translate(_LOOK_ALIKE)
    text = re.sub(r"(?<=\d)\s([-/:])\s(?=\d)", r"\1", text)  # 3 - 2
    return squad(_FIGURE.sub(_kept, text)) or " ".join(text.lower().split())


def _kept(figure: re.Match) -> str:
    text = re.sub(r"\s|(?<!\d)\$", "", figure[0])
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text).translate(_KEPT)


def squad(text: str) -> str:
    """SQuAD's normalisation as published: lower case, without ASCII punctuation and articles, single spaces.

    >>> squad(" The U.S.  Navy's"), squad("1,846."), squad("-1.5"), squad("a/the"), squad("The")
    ('us navys', '1846', '15', 'athe', '')
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())
