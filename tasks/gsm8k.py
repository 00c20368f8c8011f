r"""GSM8K: word problems of a few steps, whose answers are numbers (Cobbe et al. 2021, arXiv 2110.14168).

A row is as published: `question`, and an `answer` that ends in `#### 1,080`, or is only the number, as text or as a
JSON number. The policy should end with `<answer>1080</answer>`. The two are compared as numbers, exactly. The table
shows how answers are judged; texts without tags stand for one `<answer>`:

| gold | right | wrong | because |
|---|---|---|---|
| `18` | `18`, `18.00`, `18.`, `018`, `+18` | `81`, `18.5` | the end of a sentence may be there |
| `1,080` | `1,080`, `1080` | `10,80`, `1 080` | commas separate thousands, and nothing else |
| `1080` | `1,080` | | |
| `1.08` | | `1,08` | |
| `0.1` | | `0.10000000000000001` | no rounding |
| `-10` | `-10`, `- 10`, `−10` | `10` | a minus sign is as good as a hyphen |
| `0` | `-0` | | |
| `-10` | `-$10`, `$-10` | | a currency sign |
| `18` | `$18`, `$ 18.00`, `€18`, `18€`, `\$18`, `$18$` | `\(18\)` | LaTeX's dollar signs, and no other LaTeX |
| `18` | | `\boxed{18}`, `**18**` | the tags have said that it is the answer |
| `18` | `18 dollars`, `18 miles per hour.`, `18 km/h` | | a unit, which is not compared |
| `18` | `18 cents` | | not even where it matters |
| `25` | `25%`, `25 \%` | `0.25` | percent is a unit: GSM8K's golds are without |
| `2,000` | | `2 thousand` | what changes the number is no unit |
| `2` | | `2 thousand`, `2 millions`, `2 bn` | numerals and multiples |
| `2` | | `2만` | a unit is written in Latin letters |
| `2` | | `2 quarters`, `2 hundredths`, `2 ½`, `2 and a half` | fractions, even if coins are called so |
| `2` | | `2 squared`, `2 times two` | operations |
| `2` | `2 more eggs` | `2 more than twelve`, `2 at least`, `2 maybe twenty` | a difference is a number of eggs, too |
| `18` | | `18k`, `18 m2` | a unit has no digits |
| `18` | | `18 eggs which she sells later`, `18 eggs, not counting` | at most four words, and no comma |
| `0.5` | `.50`, `1/2` | `\frac{1}{2}` | a fraction in lowest terms |
| `18` | | `36/2`, `9*2` | a division left to the reader |
| `1.5` | | `1 1/2` | |
| `1000` | | `1e3` | |
| `18` | | `0x12`, `１８` | digits are those of ASCII |
| `18` | | `18, 20`, `18 or 20`, `18 or twenty` | several answers |
| `18` | | `18-20`, `18 to 20` | a range |
| `8` | | `8:30` | |
| `18` | | `about 18`, `= 18`, `x = 18`, `The answer is 18` | nothing is in front of the number but its sign |
| `18` | | `eighteen`, `<answer></answer>` | |
| `18` | `<think>9 * 2</think> <answer>18</answer>`, `It is <answer>18</answer>, I think.` | | |
| `18` | | `<think>It is <answer>18</answer>.</think>` | an answer inside the thought |
| `18` | | `<think><answer>9</answer></think><answer>18</answer>`, `<answer>18</answer> <answer>18</answer>` | two |
| `18` | | `<answer>17</answer> No: <answer>18</answer>`, `<answer><answer>18</answer></answer>` | |
| `18` | | `<think>9 * 2 = 18</think>` | no answer |
| `18` | | `<answer>18` | the answer never ends |
| `18` | | `<answer>18<think>20</answer></think></answer>` | a thought inside the answer |
| `18` | | `<answer><b>18</b></answer>` | |
| `18` | | `<think></think> #### 18`, `<think></think> \boxed{18}` | `describe` logs how often such forms occur |
| `18` | | `<think></think> The answer is 18.` | |
"""  # noqa: RUF002

import json
import re
from decimal import Decimal
from fractions import Fraction

from tasks.arithmetic import given_answer, messages  # noqa: F401  # the question
from tasks.verdicts.answer_text import MOST_UNIT_WORDS, changes_number

TRAIN_DATA, EVAL_DATA = "openai/gsm8k:main", "openai/gsm8k:main:test"
FIELDS = {"question": str, "answer": (str, int, float)}  # every row must have these
REWARD_WEIGHTS = {"correct": 1.0, "strict_format": 0.0, "soft_format": 0.0, "integer_answer": 0.0, "length": 0.0}
REWARD_WEIGHTS |= {"strict": 0.0, "flexible": 0.0}
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # the prompt names them, and the rewards read them
SYSTEM_PROMPT = (
    "Think step by step inside {} and {}, then give only the final answer, a number without unit, inside {} and {}."
).format(*TAGS)
MAX_LENGTH = 2000  # characters; from there on `length` is 0
MAX_ANSWER = 100  # characters; a longer text is not read as a number

_STRICT = re.compile(r"<think>\s*+(?:[^<]|<(?!/?think>|/?answer>))++</think>\s*+<answer>[^<>]*+</answer>")
_SIGN, _CURRENCY = r"(?:[-+\u2212] ?)?", r"(?:\\?\$ ?|[€£¥₹] ?)?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN}){_CURRENCY}(?P<inner>{_SIGN})"
    r"(?:(?P<over>[0-9]+) ?/ ?(?P<under>[0-9]+)|(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?P<decimals>\.[0-9]+)?)"
    r" ?[$€£¥₹]?(?P<unit>(?: ?\\?%)?(?: ?[^\W\d_][^\d,;:=+*<>\\\n]*)?)\.?"
)


def reward(row: dict, text: str) -> dict[str, float]:
    r"""Reward one completion, by named components; only `correct` has a weight unless `--reward-weight` gives more.

    - `correct`: the only `<answer>` outside `<think>` is the gold number, by the table above;
    - `strict_format`: the text is one thought, not empty, then one answer, with only spaces and line ends around them;
    - `soft_format`: the share of the four tags that the text has exactly once, wherever they are;
    - `integer_answer`: the only `<answer>` outside `<think>` is a whole number by the table, right or wrong;
    - `length`: max(0, 1 - characters / 2000), which is larger for shorter texts;
    - `strict`, `flexible`: what verl's two verifiers give, to compare curves: in the last 300 characters, the last
      number after `#### `, or the last number of all, is as text the gold one. Only `strict` removes commas.

    All but `correct`, `strict` and `flexible` can be earned without solving anything, so their weights should be small.

    >>> row = {"question": "What do 9 eggs cost, at $2 each?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"}
    >>> list(reward(row, "<think>9 * 2 = 18</think>\n<answer>$18.00</answer>").values())  # in this order
    [1.0, 1.0, 1.0, 1.0, 0.9755, 0.0, 0.0]
    >>> list(reward(row, "<think>9 * 2 = 18</think> #### 18").values())
    [0.0, 0.0, 0.5, 0.0, 0.9835, 1.0, 1.0]
    """
    number, wanted = read_number(given_answer(text) or ""), gold(row)
    return {
        "correct": float(number is not None and number == wanted),
        "strict_format": float(_STRICT.fullmatch(text.strip()) is not None),
        "soft_format": sum(text.count(tag) == 1 for tag in TAGS) / len(TAGS),
        "integer_answer": float(number is not None and number.denominator == 1),
        "length": max(0.0, 1 - len(text) / MAX_LENGTH),
        **_as_in_verl(text, _gold_text(row).replace(",", "")),
    }


def _as_in_verl(text: str, wanted: str) -> dict[str, float]:
    """The scores of verl's utils/reward_score/gsm8k.py, by its two methods."""
    end = text[-300:]
    strict = [found.replace(",", "") for found in re.findall(r"#### (-?[0-9.,]+)", end)]
    flexible = [found for found in re.findall(r"-?[0-9.,]+", end) if found not in ("", ".")]
    return {
        "strict": float(strict[-1:] == [wanted]),
        "flexible": float(flexible[-1:] == [wanted]),
    }


def describe(row: dict, text: str) -> dict[str, float]:
    r"""More values to log: how often an answer loses its reward because of its form.

    - `unread`: there is an answer between tags, but it is no number by the table;
    - `boxed`, `hashes`, `sentence`: there is no such answer, but a `\boxed{`, a `####`, or "answer is", in this order;
    - `right_elsewhere`: `correct` is 0, but the last number of the text is the gold one. If this is frequent, the
      policy solves more questions than the reward shows.

    >>> describe({"answer": "#### 18"}, "<think>9 * 2</think> The answer is 18.")
    {'unread': 0.0, 'boxed': 0.0, 'hashes': 0.0, 'sentence': 1.0, 'right_elsewhere': 1.0}
    """
    answer = given_answer(text)
    number = read_number(answer or "")
    forms = {"boxed": "\\boxed{" in text, "hashes": "####" in text, "sentence": "answer is" in text}
    form = next((name for name, is_used in forms.items() if is_used and answer is None), None)
    numbers = re.findall(r"(?:(?<![0-9)])-)?[0-9][0-9,]*(?:\.[0-9]+)?", text[-MAX_LENGTH:])  # of 2-1: 1
    last = read_number(numbers[-1].rstrip(",")) if numbers else None
    is_correct = number is not None and number == gold(row)
    return {
        "unread": float(answer is not None and number is None),
        **{name: float(name == form) for name in forms},
        "right_elsewhere": float(last is not None and last == gold(row) and not is_correct),
    }


def solution(row: dict) -> str:
    """A completion that earns `correct` = 1, unless the gold answer of the row is no number.

    >>> solution({"answer": "She sold 48+24 = <<48+24=72>>72 clips.\\n#### 72"})
    '<answer>72</answer>'
    """
    return f"<answer>{_gold_text(row)}</answer>"


def vote(row: dict, text: str) -> str | None:
    """Optional: the answer of a completion, in one spelling; None if it is no number.

    >>> [vote({}, f"<answer>{answer}</answer>") for answer in ("$1,080.00", "1080 clips", "1/3", "blue")]
    ['1080', '1080', '1/3', None]
    """
    number = read_number(given_answer(text) or "")
    return None if number is None else str(number)


def gold(row: dict) -> Fraction | None:
    """The number of a row's answer; None if it has no readable number.

    >>> [gold({"answer": answer}) for answer in ("so 540 * 2 = 1,080\\n#### 1,080", "$1,080", 0.1, 1e22, "blue")]
    [Fraction(1080, 1), Fraction(1080, 1), Fraction(1, 10), Fraction(10000000000000000000000, 1), None]
    """
    return read_number(_gold_text(row))


def read_number(text: str) -> Fraction | None:
    r"""The number that a text states, by the table of this file; None if it states none, or more than one.

    >>> [read_number(text) for text in ("$1,080.50", "1/2", "18 dollars", "18 or 20", "eighteen")]
    [Fraction(2161, 2), Fraction(1, 2), Fraction(18, 1), None, None]
    """
    text = text.strip()
    if len(text) > MAX_ANSWER:
        return None
    if len(text) > 2 and text[0] == text[-1] == "$":  # LaTeX's $18$
        text = text[1:-1].strip()
    match = _NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["inner"]):
        return None
    if len(re.findall(r"\w+", match["unit"])) > MOST_UNIT_WORDS or changes_number(match["unit"]):
        return None
    if match["over"]:
        over, under = int(match["over"]), int(match["under"])
        number = Fraction(over, under or 1)
        if under < 2 or number.denominator != under:  # not in lowest terms
            return None
    elif match["whole"] or match["decimals"]:
        number = Fraction((match["whole"].replace(",", "") or "0") + (match["decimals"] or ""))
    else:
        return None
    is_negative = (match["sign"] or match["inner"])[:1] in ("-", "\u2212")
    return -number if is_negative else number


def _gold_text(row: dict) -> str:
    answer = row["answer"]
    if isinstance(answer, str):
        return answer.rpartition("####")[2].strip()  # all of it without ####
    return format(Decimal(json.dumps(answer)), "f")  # 0.1 is exactly 0.1, not the nearest binary fraction
