r"""Competition mathematics, with answers that are expressions: MATH and the benchmarks that papers report.

A row is `{"problem": "What is $1/2 + 1/3$?", "answer": "\\frac{5}{6}"}`. `answer` is text, a number, or a list of
spellings that all count (Minerva and OlympiadBench have lists). Without `answer`, the gold answer is the content
of the last `\boxed{}` of `solution`, as in the MATH dataset. The policy should end with `\boxed{\frac{5}{6}}`, or with
`<answer>\frac{5}{6}</answer>`.

The answer of a completion:

| in the completion | its answer |
|---|---|
| one `<answer>` outside the thought | its text, or the last `\boxed{}` in it; a `\boxed{}` elsewhere is ignored |
| several `<answer>` outside the thought | none |
| no closed `<answer>`, any number of `\boxed{}` | the last complete `\boxed{}` (or `\fbox{}`); of nested, the inner |
| only in the thought, or a thought that does not end | none |
| `</think>` without `<think>` | the text after the tag: the prompt has begun the thought |

An answer equals the gold answer by the first of these rules that can decide:

1. They are equal as text in one spelling (`verdicts/answer_text.py`): no spacing, sizes, dollar signs or final full
   stop; `\frac12`, `\dfrac{1}{2}` alike; `\text{(C)}`, `(C)` and `C` alike; words in capital or small letters; without
   bold, colour, underlining, and "The answer is", `=` or `\approx` in front of it.
2. Both are exact numbers: integers, decimals (repeating ones, too), fractions, mixed numbers, `8.7 \times 10^{8}` and
   `8.7e8`, with thousands commas or thin spaces, a currency sign, a unit, degrees, a percent sign or a name (`x = 5`).
   They are compared exactly. Words that change the number are no unit: a thousand, million or dozen multiplies it, and
   with any other such word it is no number. Letters outside `\text` and `\mathrm` are symbols, but for `5 m`, `5 N·m`.
3. math-verify says so (`verdicts/expressions.py`), within a limit of time. Without it, the answer is wrong. It is not
   asked if an answer contains dots, or words that are no unit: it would leave them out.

Before, a choice with its value is read as one of the two (`verdicts/readings.py`): its letter if the other one has a
letter, else its value. An inequality and an interval are equal if their ends are, and the same ends belong to them.

| gold answer | right | wrong |
|---|---|---|
| `72` | `72\%`, `72.0` | `0.72` |
| `62.5\%` | `62.5`, `0.625` | `6.25` |
| `\frac{1}{3}` | `1/3`, `0.333333` (six decimals) | `0.33` |
| `1\frac{4}{5}` | `9/5`, `1.8` | `4/5` |
| `8.7 \times 10^{8}` | `8.7e8`, `870000000` | `8.7 \times 10^{7}` |
| `10,\!080` | `10,080`, `10080` | `10.08` |
| `\$18.90` | `18.9`, `18.90 \text{ dollars}` | `1890` |
| `5.4 \text{ cents}` | `5.4`, `5.4 \text{ euros}`: a unit is not compared | `54` |
| `2000000` | `2\text{ million}`, `2 \times 10^6` | `2` |
| `3` | `3\text{ cm}`, `\mathbf{3}` | `3\text{ million}`, `3\mathrm{i}`, `3\text{ or more}`, `3\text{.5}`, `3\ldots` |
| `932` | `= 932`, `\approx 932`, `**932**`, `\textcolor{blue}{932}`, `The answer is 932.` | `\approx 931` |
| `36` | `36\,\mathrm{m/s^2}`, `36\ \text{N}\cdot\text{m}`, `36\text{ J·s}` | `36\text{ m}/2\text{ s}`, `36\text{ k}m` |
| `36` | `36 kg m^{-3}`, `36 N·m`, `36 km/h`, `36km`, `36 °C`, `36^\circ\text{C}` | `36m`, `36x`, `36 x/y` |
| `12345` | `12\,345`, `12{,}345`, `12\ 345` | `12 345`, `12\,34` |
| `\frac{1}{6}` | `0.1\overline{6}`, `0.1\dot{6}`, `0.1(6)` | `0.16`, `0.\overline{16}` |
| `90^\circ` | `90`, `90 degrees` | `\frac{\pi}{2}` |
| `x=5` | `5`, `x = 5.0` | `y=5` |
| `5` | `x=5`, `2+3=5`: the last value counts | `5 \text{ or } 6`, `5, 6` |
| `52_8` | `52`: the base is not compared | `42` |
| `\text{(C)}` | `C`, `(C)` | `D` |
| `E` | `\textbf{(E)}\ 12`, `(E) 12`, `E. 12`: its value is not compared | `\textbf{(D)}\ 12`, `(E) or (D)`, `12` |
| `\textbf{(E)}\ 12` | `E`, `12`, `(E) 12.0` | `D`, `13`, `(E) 13` |
| `\text{even}` | `Even` | `odd` |
| `(3,4]` | `\left(3, 4\right]` | `[3,4]` |
| `[-2,7]` | `-2 \le x \le 7`, `7 \ge x \ge -2`, `x \in [-2,7]` | `-2 < x \le 7`, `x \le 7` |
| `x<2\text{ or }x \ge 3` | `(-\infty,2)\cup[3,\infty)` | `x<2\text{ and }x \ge 3`, `(2,3]` |
| `2<x<4` | `(2,4)`, `4>x>2` | `2,4`, `[2,4]`, `2<y<4` |
| `(2,4)` (a point or an interval) | `(2.0, 4)`, `2, 4` | `(4,2)` |
| `1,-2` | `-2, 1`, `\{-2, 1\}`: a list has no order | `1`, `1, -2, 3` |
| `1 \pm \sqrt{19}` | `1+\sqrt{19}, 1-\sqrt{19}` | `1+\sqrt{19}` |
| `\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}` | `\begin{bmatrix} 0.5 \\ 2 \end{bmatrix}` | `(1/2, 2)` |
| `(a+5)(b+2)` | `ab+2a+5b+10` | `ab+10` |
| `x^2` | `x \cdot x` | `x^2+C`: a constant is a symbol |
| `2k+2` | `2(k+1)` | `2n+2` |

math-verify ignores case; it is not asked if a gold answer contains a letter in both cases.
"""

import re

from tasks import arithmetic
from tasks.verdicts.answer_text import as_number, normalize, same_number
from tasks.verdicts.judge import NOTE, Judge, has_library

FIELDS = {"problem": str}  # every row must have this, besides `answer` or `solution`
KIND_FIELDS = ("level",)  # of MATH; other files have none
REWARD_WEIGHTS = {"correct": 1.0, "format": 0.0, "boxed": 0.0}
MAX_LENGTH = 2000  # characters that are searched for a number
SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."

_JUDGE = Judge()  # keeps the verdicts; its processes start when a verdict is needed, or with `note`
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*+\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"(?:(?<![\w)}])-)?(?:\\[dt]?frac\{\d+\}\{\d+\}|\d[\d,]*(?:\.\d+)?)")  # of 2-1: 1
_BARE_BOX = re.compile(r"\\boxed\s++([^\s${}]++)")


def messages(row: dict, system_prompt: str = "") -> list[dict]:
    """The conversation that asks `row["problem"]`, with a system turn unless `system_prompt` is empty.

    Raises:
        ValueError: the row has neither `answer` nor `solution`.
    """
    if row.get("answer") is None and row.get("solution") is None:
        raise ValueError("a row needs a field 'answer', or a 'solution' that ends in \\boxed{}")
    return arithmetic.messages({"question": row["problem"]}, system_prompt)


def prepare(rows: list[dict], texts: list[str]) -> None:
    """Optional: judge all completions of a rollout together, in several processes; `reward` then looks it up."""
    answers = [given_answer(text) for text in texts]
    _JUDGE.prepare((golds(row), answer) for row, answer in zip(rows, answers, strict=True) if answer is not None)


def reward(row: dict, text: str) -> dict[str, float]:
    r"""Reward one completion, by named components.

    `correct` is 1 if the answer equals a gold answer. At weight 0: `format` is 1 if all thoughts are closed and one
    answer, in one `<answer>` or one `\boxed{}`, is outside them; `boxed` is 1 if a `\boxed{}` is outside them.

    >>> row = {"problem": "What is $1 - 1/4$?", "answer": "\\frac{3}{4}"}
    >>> reward(row, r"That is $\boxed{0.75}$.")
    {'correct': 1.0, 'format': 1.0, 'boxed': 1.0}
    >>> reward(row, r"<think>\boxed{3/4}</think><answer>4/3</answer>")
    {'correct': 0.0, 'format': 1.0, 'boxed': 0.0}
    """
    answer, outside = given_answer(text), outside_thought(text)
    num_tags, num_boxes = outside.count("<answer>"), len(boxes(outside))
    is_closed = text.count("<think>") <= text.count("</think>")
    return {
        "correct": float(answer is not None and _JUDGE.verdict(golds(row), answer) is True),
        "format": float(is_closed and answer is not None and (num_tags == 1 or (num_tags == 0 and num_boxes == 1))),
        "boxed": float(num_boxes > 0),
    }


def describe(row: dict, text: str) -> dict[str, float]:
    r"""More values to log.

    - `answered`: there is an answer;
    - `undecided`: it counts as wrong because judging took too long;
    - `right_elsewhere`: `correct` is 0, but the gold answer is a number, and it is the first or last number in the
      answer, or without an answer the last of the text. If this is frequent, read such answers: the reward may miss a
      form that a person would accept.

    >>> describe({"answer": "36"}, r"\boxed{36\text{ parsecs at most}}")
    {'answered': 1.0, 'undecided': 0.0, 'right_elsewhere': 1.0}
    """
    answer, wanted = given_answer(text), golds(row)
    verdict = answer is not None and _JUDGE.verdict(wanted, answer)
    found = _NUMBER.findall(text[-MAX_LENGTH:])[-1:] if answer is None else _NUMBER.findall(answer[:MAX_LENGTH])
    pairs = [
        (as_number(gold), as_number(number.rstrip(","))) for gold in wanted for number in {*found[:1], *found[-1:]}
    ]
    return {
        "answered": float(answer is not None),
        "undecided": float(verdict is None),
        "right_elsewhere": float(verdict is not True and any(all(pair) and same_number(*pair) for pair in pairs)),
    }


def solution(row: dict) -> str:
    r"""Optional: a completion that earns `correct` = 1.

    >>> solution({"answer": [" 9.6\n"]}), solution({"solution": r"So $x=\boxed{\sqrt{2}}$."})
    ('<answer>9.6</answer>', '<answer>\\sqrt{2}</answer>')
    """
    return f"<answer>{(golds(row) or [''])[0]}</answer>"


def vote(row: dict, text: str) -> str | None:
    r"""Optional: the answer of a completion, in one spelling; `0.5` and `\frac12` remain two, unlike in `reward`.

    >>> vote({}, r"\boxed{\left( 3, \dfrac\pi 2 \right)}")
    '(3,\\frac\\pi2)'
    """
    answer = given_answer(text)
    return None if answer is None else normalize(answer)


def note() -> str | None:
    """Optional: a message to the user, if math-verify is not installed. The processes start here, to be ready soon."""
    _JUDGE.start()
    return None if has_library() else NOTE


def golds(row: dict) -> list[str]:
    r"""The gold answers of a row, which are all right; empty if no answer is text or a number.

    >>> golds({"answer": 142.0}), golds({"answer": ["0.01\n", "$\\frac{1}{100}$"]}), golds({"answer": " "})
    (['142'], ['0.01', '$\\frac{1}{100}$'], [])
    """
    found = row["answer"] if row.get("answer") is not None else boxes(str(row.get("solution")))[-1:]
    texts = []
    for gold in found if isinstance(found, list) else [found]:
        if isinstance(gold, str | int | float) and not isinstance(gold, bool) and gold == gold:
            texts.append(str(int(gold) if isinstance(gold, float) and gold.is_integer() else gold).strip())
    return [text for text in dict.fromkeys(texts) if text]


def given_answer(text: str) -> str | None:
    r"""The answer of a completion, by the rules above; None if it has none.

    >>> [given_answer(text) for text in (r"\boxed{1} or \boxed{\frac{1}{2}}", "<answer>3", "<think><answer>5</answer>")]
    ['\\frac{1}{2}', None, None]
    """
    outside = outside_thought(text)
    tagged = re.findall(r"<answer>((?:[^<]|<(?!/?answer>))*+)</answer>", outside)
    if len(tagged) > 1:
        return None
    boxed = boxes(tagged[0] if tagged else outside)
    answer = boxed[-1].strip() if boxed else tagged[0].strip() if tagged else None
    return None if answer is not None and "<think>" in answer else answer  # it contains a thought: not one answer


def outside_thought(text: str) -> str:
    """A completion with `<think>` in place of each thought; an unclosed thought never ends."""
    head, *thoughts = text.split("<think>")
    return "<think>".join([head.rpartition("</think>")[2], *(thought.partition("</think>")[2] for thought in thoughts)])


def boxes(text: str) -> list[str]:
    r"""The contents of all `\boxed{}` in a text, in the order of their beginnings, in time linear in the text's length.

    >>> boxes(r"\boxed{\left\{1\right.} \boxed{a \boxed{b}} \boxed{c"), boxes(r"$\boxed 5$")
    (['\\left\\{1\\right.', 'a \\boxed{b}', 'b'], ['5'])
    """
    open_braces: list[int | None] = []  # for boxes, where the content begins
    found: list[tuple[int, int]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None:
                found.append((begin, brace.start()))
        elif brace[0] == "{" or len(brace[0]) > 2:
            open_braces.append(None if brace[0] == "{" else brace.end())
    complete = [text[begin:end] for begin, end in sorted(found)[-3:]]
    return complete or _BARE_BOX.findall(text)[-1:]
