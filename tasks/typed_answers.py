r"""Questions whose rows say how their answer is read: as a letter, a text or a JSON object.

`answer_type` is `choice`, `exact` or `json`. A row has `question`, `answer_type` and `answer`:

- `choice`: `answer` is a letter, and `choices` are the texts of A, B, C, ... in order;
- `exact`: `answer` is a text, a number or a list of spellings, compared as in `tasks/qa.py`;
- `json`: `answer` is the text of a JSON object. Its cells, which are not objects themselves, are compared one by one.

The policy should end with `<answer>B</answer>`, and likewise for the others. In the table the choices are `Lyon`,
`Paris`, `A lot`, `Lima`, `Lima` and `A`, and texts without tags stand for one `<answer>`:

| gold | right | wrong | because |
|---|---|---|---|
| `B` | `B`, `b`, `(B)`, `B.`, `B)`, `b:` | `A`, `G`, `BB` | |
| `B` | `B. Paris`, `(B) Paris`, `B Paris`, `B: paris.` | `B. Lyon`, `A. Paris` | letter and text must agree |
| `B` | `Paris`, `paris.` | `Lyon`, `Paris, France` | the text of one choice is as good as its letter |
| `D` | `D`, `D. Lima` | `E`, `Lima` | which of the two? |
| `A` | `A`, `a` | `F`, `F. A` | one letter is a letter, whatever the texts are |
| `C` | `A lot`, `C. A lot` | `A` | |
| `B` | | `A, B`, `A or B`, `B and C`, `A B`, `AB`, `B B` | several letters |
| `B` | | `The answer is B`, `Option B`, `I think Paris`, `B, because of Lyon` | prose |
| `B` | | `**B**`, `\boxed{B}`, `"B"` | the tags have said that it is the answer |
| `B` | `<think>A?</think> <answer>B</answer>` | `<think><answer>B</answer></think>`, `B<answer>` | |
| `B` | | `<answer>A</answer><answer>B</answer>` | two |
| `1846` | `1846`, `1,846`, `the 1846.` | `-1846`, `1846 or 1847`, `in 1846` | |
| `{"H": {"a": "Al", "b": 2}}` | `{"H":{"b":"2","a":" AL"}}` | `{"H": {"a": "Al"}}` | order and capitals do not count |
| `{"H": {"a": "Al"}}` | `{"H": {"a": "Al", "b": 9}, "I": {}}` | `{"H": {"A": "Al"}}` | more keys do not count |
| `{"H": {"a": "Al"}}` | `{"H": {"a": "Bo", "a": "Al"}}` | `{"H": {"a": "Al", "a": "Bo"}}` | the last of two counts |
| `{"H": {"a": "Al"}}` | | `{"H": {"a": ["Al"]}}`, `{"H": {"a": null}}`, `{"H": "Al"}`, `{"a": "Al"}`, `["Al"]` | |
| `{"H": {"a": "Al"}}` | | `{"H": {"a": "Al",}}`, `{'H': {'a': 'Al'}}`, `{"H": {"a": "Al"}} so` | not JSON |

A JSON object may be inside one Markdown fence.
"""

import json
import re
import string

from tasks.arithmetic import SYSTEM_PROMPT, given_answer, is_answer  # noqa: F401  # the first is this task's, too
from tasks.calculator import is_well_formed
from tasks.qa import answers, exact_match, normalize

FIELDS = {"question": str, "answer_type": str, "answer": (str, int, float, list)}  # every row must have these
KIND_FIELDS = ("answer_type",)  # questions that agree in these are of one kind
REWARD_WEIGHTS = {"correct": 1.0, "partial": 0.0, "format": 0.0}

_ASKED = {
    "choice": "{choices}\n\nAnswer with the letter of one choice.",
    "exact": "Answer with a name, a number or a few words.",
    "json": "Answer with a JSON object of this form:\n{blanks}",
}
_LETTER = re.compile(r"\(?([A-Za-z])(?:[.:)]++|(?=\s)|$)\s*+(.*)", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?+\s*+(.*)```", re.DOTALL)


def messages(row: dict, system_prompt: str = "") -> list[dict]:
    r"""The conversation that asks a question by its type, with a system turn unless `system_prompt` is empty.

    >>> row = {"question": "Capital of France?", "answer_type": "choice", "choices": ["Lyon", "Paris"], "answer": "B"}
    >>> messages(row)[0]["content"]
    'Capital of France?\n\nA. Lyon\nB. Paris\n\nAnswer with the letter of one choice.'

    Raises:
        ValueError: the row has another `answer_type`, or lacks what its own needs.
    """
    kind, choices, blanks = row["answer_type"], "", ""
    if kind not in _ASKED:
        raise ValueError(f"answer_type {kind!r} is none of {', '.join(_ASKED)}")
    if kind == "choice":
        if not isinstance(row.get("choices"), list):
            raise ValueError("answer_type 'choice' needs a list of texts in 'choices'")
        if row["answer"] not in [*_choices(row)]:
            raise ValueError(f"the answer {row['answer']!r} is the letter of none of the {len(row['choices'])} choices")
        choices = "\n".join(f"{letter}. {text}" for letter, text in _choices(row).items())
    elif kind == "json":
        if (gold := _object(str(row["answer"]))) is None:
            raise ValueError("answer_type 'json' needs the text of a JSON object in 'answer'")
        blanks = json.dumps(_blanks(gold), ensure_ascii=False)
    asked = _ASKED[kind].format(choices=choices, blanks=blanks)
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": f"{row['question']}\n\n{asked}"}]


def reward(row: dict, text: str) -> dict[str, float]:
    """Reward one completion, by named components; only `correct` has a weight unless `--reward-weight` gives more.

    - `correct`: the only `<answer>` outside `<think>` is right by the table above;
    - `partial`: the share of right cells of a JSON object; for the other types, `correct`;
    - `format`: any number of thoughts, then one answer, and nothing else.

    >>> row = {"answer_type": "json", "answer": '{"House 1": {"Name": "Al", "Pet": "cat"}}'}
    >>> reward(row, '<answer>{"House 1": {"Name": "Al", "Pet": "dog"}}</answer>')
    {'correct': 0.0, 'partial': 0.5, 'format': 1.0}
    """
    verdicts = _verdicts(row, given_answer(text))
    share = sum(verdicts) / max(len(verdicts), 1)  # a gold answer without cells is never right
    return {"correct": float(share == 1), "partial": share, "format": float(is_well_formed(text))}


def solution(row: dict) -> str:
    """A completion that earns `correct` = 1."""
    return f"<answer>{(answers(row) or [''])[0]}</answer>"


def vote(row: dict, text: str) -> str | None:
    """The answer in one spelling: its letter, its words as in `tasks/qa.py`, or the cells that are asked for.

    >>> row = {"answer_type": "choice", "choices": ["Lyon", "Paris"], "answer": "B"}
    >>> [vote(row, f"<answer>{answer}</answer>") for answer in ("(b) Paris", "Paris", "A or B")]
    ['B', 'B', None]
    """
    answer = given_answer(text)
    if answer is None:
        return None
    if row["answer_type"] == "json":
        given = _object(answer)
        return None if given is None else json.dumps([_cell(given, path) for path in _cells(json.loads(row["answer"]))])
    return _letter(row, answer) if row["answer_type"] == "choice" else normalize(answer)


def tally(row: dict, text: str) -> dict[str, list[bool]]:
    """The figures that are published for a type of answer.

    - `exact`: `contained`, PopQA's accuracy (Mallen et al. 2022, arXiv 2212.10511): the text outside thoughts has a
      spelling in it, as it is, in lower case or with one capital;
    - `json`: `puzzle_acc` and `cell_acc`, ZebraLogic's shares of puzzles and of cells (Lin et al. 2025, arXiv
      2502.01100).

    >>> row = {"answer_type": "exact", "answer": ["Rock Music", "rock"]}
    >>> [tally(row, text)["contained"] for text in ("It is rock music.", "<think>rock</think> Jazz.", "<think>rock")]
    [[True], [False], [False]]
    """
    if row["answer_type"] == "exact":
        said = text.rpartition("</think>")[2].partition("<think>")[0]
        forms = {form for spelling in answers(row) for form in (spelling, spelling.lower(), spelling.capitalize())}
        return {"contained": [any(form in said for form in forms - {""})]}
    if row["answer_type"] == "json":
        verdicts = _verdicts(row, given_answer(text))
        return {"puzzle_acc": [all(verdicts)], "cell_acc": verdicts}
    return {}


def _verdicts(row: dict, answer: str | None) -> list[bool]:
    """One verdict for each cell of a JSON object, else one; all false without an answer."""
    if row["answer_type"] == "json":
        given = None if answer is None else _object(answer)
        wanted = _cells(json.loads(row["answer"]))
        return [value is not None and _cell(given, path) == value for path, value in wanted.items()]
    if answer is None:
        return [False]
    if row["answer_type"] == "choice":
        return [_letter(row, answer) == row["answer"]]
    return [any(exact_match(answer, spelling) for spelling in answers(row) if is_answer(spelling))]


# Letters --------------------------------------------------------------------------------------------------------------


def _choices(row: dict) -> dict[str, str]:
    return dict(zip(string.ascii_uppercase, map(str, row["choices"]), strict=False))


def _letter(row: dict, answer: str) -> str | None:
    """The letter of the choice that an answer names by letter, by text or by both; None if it is not exactly one."""
    choices = {letter: _plain(text) for letter, text in _choices(row).items()}
    if (found := _LETTER.fullmatch(answer.strip())) is not None:
        letter, text = found[1].upper(), _plain(found[2])
        if letter in choices and text in ("", choices[letter]):
            return letter
    alike = [letter for letter, text in choices.items() if text == _plain(answer)]
    return alike[0] if len(alike) == 1 else None


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()


# JSON -----------------------------------------------------------------------------------------------------------------


def _object(answer: str) -> dict | None:
    fenced = _FENCE.fullmatch(answer.strip())
    try:
        found = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):  # a policy can nest anything
        return None
    return found if isinstance(found, dict) else None


def _cells(gold: dict, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str | None]:
    """The cells of a gold answer, by the keys that lead to them."""
    cells = {}
    for key, value in gold.items():
        here = (*path, key)
        cells |= _cells(value, here) if isinstance(value, dict) else {here: _cell(gold, (key,))}
    return cells


def _cell(given: object, path: tuple[str, ...]) -> str | None:
    """The value at the end of a path as plain text; None if there is none, or no text, number, true or false."""
    for key in path:
        given = given.get(key) if isinstance(given, dict) else None
    if isinstance(given, str):
        return _plain(given)
    return json.dumps(given) if isinstance(given, int | float) else None


def _blanks(gold: dict) -> dict:
    return {key: _blanks(value) if isinstance(value, dict) else "___" for key, value in gold.items()}
