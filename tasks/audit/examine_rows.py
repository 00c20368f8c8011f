"""The audit itself: it reads files as training would, and finds all faulty rows, not only the first."""

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

from common.chat import encode_prompt
from common.errors import UserError
from tasks.countdown import read_expression
from tasks.math import boxes
from tasks.verdicts.answer_text import is_balanced

from harness.base.config import RunConfig, shown
from harness.base.hub import must_be_cached
from harness.data.data import scan_rows
from harness.data.order import hold_out
from harness.data.rows import FieldsError, Row
from harness.models.context import context_of
from harness.models.pretrained import read_config, tokenizer_of
from harness.task.questions import filter_rows, find_sources
from harness.task.row_checks import empty_golds, normalise, shared_questions, solution_fault, suggest_task, tell_unpaid
from harness.task.scorer import Scorer
from harness.task.task import load_scorer
from harness.task.task_file import TaskFile

FINDINGS = {  # of a file: the title shown, and whether it is a problem
    "unusable": ("rows that cannot be used", True),
    "empty_golds": ("empty gold answers", True),
    "refused_golds": ("gold answers that are not accepted as their own", True),
    "ill_formed_golds": ("gold answers that do not parse", True),
    "conflicts": ("same question, different gold answers", True),
    "repeated": ("same question again, same gold answer", False),
    "13_words": ("13 words in a row in common with an earlier one", False),
    "long_prompts": ("prompts without room for a completion", True),
    "control_characters": ("control or replacement characters", True),
    "boxed_in_question": ("gold answer is in a box in the question", True),
    "answer_in_question": ("gold answer is in the question", False),
    "wrong_calculations": ("a calculation of the worked solution is wrong", False),
}
SHARED_FINDINGS = {
    "exactly": ("evaluation questions that are training questions", True),
    "normalised": ("evaluation questions that are training questions but for case, spaces and punctuation", True),
    "13_words": ("other evaluation questions with 13 words in a row in common with a training question", False),
}
RUN = 13  # words in a row that two questions hardly ever share by chance (GPT-3, arXiv 2005.14165, appendix C)
MOST_WITH_A_RUN = 10  # training questions; a run that occurs in more of them is an instruction
MOST_BOXES = 3  # of a question that are tried as its answer
EXAMPLES = 10  # rows of a finding whose text is in the report; for all others only the place
CHUNK = 1000  # rows that a task judges at once

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w]|[.,]\d)")
_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")  # of a calculation in GSM8K's worked solutions
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)")
# Characters that no question needs: direction marks, and traces of a wrong decoding
_NO_TEXT = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufffd")
Found = Iterator[tuple[str, Row, str]]  # a finding's name, the row, and the text to show


def examine(config: RunConfig, max_new_tokens: int) -> dict:
    """Audit the data of a task; the report can be written as JSON."""
    scorer = load_scorer(config)
    file = scorer.file
    prompt = config.system_prompt
    if prompt is None:
        prompt = "" if config.kind == "tiny" else file.system_prompt
    is_here = config.base_path is not None or must_be_cached("model", config.base)
    tokenizer = tokenizer_of(config, is_here)
    context = context_of(read_config(config.base, is_here))
    room = context - max_new_tokens
    source, eval_source = find_sources(file, config.data, config.eval_data)
    if source is None:
        raise UserError(f"{file} makes its own rows, and a data file is audited: give --data")
    sources = {"training": source} | ({"evaluation": eval_source} if eval_source is not None else {})
    findings, lengths, num_rows, kept = [], [], {}, {}
    for of, name in sources.items():
        rows, unusable = _read(file, name)
        num_rows[of] = len(rows)
        rows = kept[of] = filter_rows(rows, name, file, config.at_most, config.max_question_length)
        tell_unpaid(file, rows)
        prompts = [len(encode_prompt(tokenizer, file.messages(row, prompt))) for row in rows]
        found = defaultdict(list, unusable=unusable)
        for kind, row, text in (*_gold_faults(scorer, rows), *_repeated(file, rows), *_suspicious(file, rows)):
            found[kind].append((row.place, text))
        for length, row in zip(prompts, rows, strict=True):
            if length > room:
                found["long_prompts"].append((row.place, f"{length} tokens: {row.question}"))
        for kind, (title, is_problem) in FINDINGS.items():
            # a run with a lower --eval-prompts holds out some of the rows, and trains on their copies
            is_problem |= kind == "repeated" and eval_source is None and len(rows) <= config.eval_prompts
            num_read = len(rows) if kind != "unusable" else num_rows[of] + len(unusable)
            findings.append(_finding(f"{of}_{kind}", f"{of}: {title}", is_problem, found[kind], num_read))
        texts = [text for text in map(worked_solution, rows) if text is not None]
        solutions = list(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"])) if texts else []
        lengths += _lengths(f"{of}_prompts", f"{of}: prompts", prompts, room)
        lengths += _lengths(f"{of}_solutions", f"{of}: worked solutions in the rows", solutions, max_new_tokens)
    num_kept, held_out = {of: len(rows) for of, rows in kept.items()}, None
    if eval_source is None and len(kept["training"]) > config.eval_prompts:
        held_out = config.eval_prompts
        kept["training"], kept["evaluation"] = hold_out(kept["training"], held_out, config.seed)
    if "evaluation" in kept:
        findings += _shared_findings(kept["training"], kept["evaluation"], of_one_file=held_out is not None)
    return {
        "task": shown(config.task),
        "sources": {of: shown(name) for of, name in sources.items()},
        "rows": num_rows,
        "rows_after_filters": num_kept,
        "held_out": held_out,
        "model": shown(config.model),
        "context": None if context == math.inf else int(context),
        "max_new_tokens": max_new_tokens,
        "findings": findings,
        "tokens": lengths,
    }


def _finding(name: str, title: str, is_problem: bool, found: list[tuple[str, str]], num_examined: int) -> dict:
    """One kind of problem, and the rows that have it."""
    return {
        "name": name,
        "what": title,
        "is_problem": is_problem,
        "rows": len(found),
        "of": num_examined,
        "examples": [{"place": place, "text": text} for place, text in found[:EXAMPLES]],
        "places": [place for place, _ in found],
    }


def _lengths(name: str, title: str, counts: list[int], limit: float) -> list[dict]:
    """The lengths of some texts; a percentile is the smallest length that this share of the texts does not exceed."""
    ordered = sorted(counts)
    shares = {"median": 50, "90%": 90, "99%": 99, "longest": 100}
    return counts and [
        {"name": name, "what": title, "texts": len(counts)}
        | {share: ordered[max(0, -(-percent * len(counts) // 100) - 1)] for share, percent in shares.items()}
        | {"limit": None if limit == math.inf else int(limit), "beyond_limit": sum(n > limit for n in counts)}
    ]


def _read(file: TaskFile, source: str) -> tuple[list[Row], list[tuple[str, str]]]:
    """The rows that can be read and asked, and the places and problems of the other rows."""
    usable, unusable, first = [], [], None
    for row in scan_rows(source, file.fields, not file.is_bundled):
        try:
            if isinstance(row, UserError):
                raise row
            row.question = file.question(row)
            usable.append(row)
        except UserError as error:
            first = first or error
            place, _, problem = str(error).partition(": ")
            unusable.append((row.place, _problem(error, row)) if isinstance(row, Row) else (place, problem))
    if not usable:
        hint = suggest_task(first.row, file) if isinstance(first, FieldsError) else ""
        reason = f"can be used: {first}{hint}" if first else "is there"
        raise UserError(f"no row of {shown(source)} {reason}")
    return usable, unusable


def _problem(error: UserError, row: Row) -> str:
    return str(error).partition(f"{row.place} ")[2] or str(error)


def _gold_faults(scorer: Scorer, rows: list[Row]) -> Found:
    """Rows without a gold answer, and rows with a solution that is not rewarded as right, or is not one answer."""
    file = scorer.file
    for start in range(0, len(rows), CHUNK):
        solutions = [(row, _solution(file, row)) for row in rows[start : start + CHUNK]]
        _prepare(file, [(row, found) for row, found in solutions if isinstance(found, str)])
        for row, found in solutions:
            try:
                if isinstance(found, UserError):
                    raise found
                fault = None if found is None else solution_fault(scorer, row, found)
            except UserError as error:
                fault = _problem(error, row)
            if empty_golds(file, row):
                yield "empty_golds", row, row.question
            elif fault is not None:
                yield "refused_golds", row, fault
            elif found is not None and (fault := latex_fault(given(found))):
                yield "ill_formed_golds", row, f"{fault}: {given(found)}"


def _prepare(file: TaskFile, cases: list[tuple[Row, str]]) -> None:
    """Let the task judge completions together."""
    file.prepare([row for row, _ in cases], [text for _, text in cases])


def _solution(file: TaskFile, row: Row) -> str | UserError | None:
    """The solution of a row, or the problem with it; None: the task has no solutions."""
    try:
        return file.solution(row)
    except UserError as error:
        return error


def _repeated(file: TaskFile, rows: list[Row]) -> Found:
    """Questions that repeat an earlier one, with the same or another gold answer, or share a run of words with one.

    Two gold answers are the same if the reward accepts one of them for the row of the other.
    """
    first: dict[str, Row] = {}
    for row in rows:
        before = first.setdefault(normalise(row.question), row)
        if before is row:
            continue
        text, other = file.solution(row), file.solution(before)
        if text is None:
            is_same = row.get("answer") == before.get("answer")
        else:
            is_same = text == other or file.reward(before, text).get("correct") == 1
        if is_same:
            yield "repeated", row, f"as {before.place}: {row.question}"
        else:
            golds = [given(x or str(y.get("answer", ""))) for x, y in ((text, row), (other, before))]
            yield "conflicts", row, f"as {before.place}, answers {' and '.join(golds)}: {row.question}"
    for row, other, run in _share_a_run(list(first.values())):
        yield "13_words", row, f"as {other.place}: {run}"


def _shared_findings(train_rows: list[Row], eval_rows: list[Row], of_one_file: bool) -> list[dict]:
    """Evaluation questions that training asks as well; without runs of words if both are from one file."""
    exactly, nearly = shared_questions(train_rows, eval_rows)
    shared = {id(row) for row, _ in (*exactly, *nearly)}
    others = [row for row in eval_rows if id(row) not in shared]
    found = {
        "exactly": [(row, other, row.question) for row, other in exactly],
        "normalised": [(row, other, row.question) for row, other in nearly],
    } | ({} if of_one_file else {"13_words": _share_a_run(others, train_rows)})
    return [
        _finding(
            f"shared_{kind}",
            *SHARED_FINDINGS[kind],
            [(row.place, f"as {other.place}: {text}") for row, other, text in found[kind]],
            len(eval_rows),
        )
        for kind in found
    ]


def _share_a_run(rows: list[Row], earlier: list[Row] | None = None) -> Iterator[tuple[Row, Row, str]]:
    """Rows that share a run of `RUN` words with an earlier row (of `earlier`, if given), that row, and the run."""
    wanted = {run for row in rows for run in _runs(row.question)}
    having: dict[str, list[int]] = defaultdict(list)  # by run, the first rows that have it
    others = rows if earlier is None else earlier
    for index, row in enumerate(others):
        for run in wanted.intersection(_runs(row.question)):
            if len(having[run]) <= MOST_WITH_A_RUN:
                having[run].append(index)
    for index, row in enumerate(rows):
        shared = [(having[run][0], run) for run in _runs(row.question) if 0 < len(having[run]) <= MOST_WITH_A_RUN]
        if before := [pair for pair in shared if earlier is not None or pair[0] < index]:
            first, run = min(before, key=lambda pair: pair[0])
            yield row, others[first], run


def _runs(question: str) -> list[str]:
    words = re.findall(r"\w+", normalise(question))
    return [" ".join(words[start : start + RUN]) for start in range(len(words) - RUN + 1)]


def _suspicious(file: TaskFile, rows: list[Row]) -> Found:
    r"""Characters that are not text, answers that could be copied from the question, wrong calculations.

    For example, if the reward accepts a `\boxed{}` in a question, it is the solution of an earlier part.
    """
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        tried = [(row, box, f"<answer>{box}</answer>") for row in chunk for box in boxes(row.question)[:MOST_BOXES]]
        _prepare(file, [(row, text) for row, _, text in tried])
        accepted = {}
        for row, box, text in tried:
            if id(row) not in accepted and file.reward(row, text).get("correct") == 1:
                accepted[id(row)] = box
        for row in chunk:
            if codes := sorted({f"U+{ord(sign):04X}" for text in _texts(row) for sign in text if _is_no_text(sign)}):
                yield "control_characters", row, f"{' '.join(codes)}: {row.question}"
            if id(row) in accepted:
                yield "boxed_in_question", row, f"{accepted[id(row)]}: ...{row.question[-200:]}"
            solution, answer = _solution(file, row), row.get("answer")
            gold = given(solution) if isinstance(solution, str) else ""
            if gold and holds(row.question, gold):
                yield "answer_in_question", row, f"{gold}: {row.question}"
            calculations = _ANNOTATION.findall(answer) if isinstance(answer, str) else []
            if wrong := [f"{left}={right}" for left, right in calculations if is_wrong(left, right)]:
                yield "wrong_calculations", row, wrong[0]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts(entry)


def _is_no_text(letter: str) -> bool:
    return letter not in "\n\t\r" and (letter in _NO_TEXT or unicodedata.category(letter) == "Cc")


def given(solution: str) -> str:
    r"""The answer in a solution: in `<answer>`, or in `\boxed{}`, or the whole text.

    >>> given("<think>1+1=2</think><answer> 2 </answer>"), given("So \\boxed{\\frac{1}{2}}"), given("2")
    ('2', '\\frac{1}{2}', '2')
    """
    patterns = (r"<answer>(.*)</answer>", r"\\boxed\{(.*)\}")
    found = next(filter(None, (re.search(pattern, solution, re.DOTALL) for pattern in patterns)), None)
    return (found[1] if found else solution).strip()


def latex_fault(gold: str) -> str | None:
    r"""Why a gold answer is not one answer in LaTeX or plain text; None if it is.

    >>> [latex_fault(gold) for gold in ("\\frac{1}{2}", "[0, 1)", "\\frac{1}{2", "$x", "['9.6']", "18", "\\$5")]
    [None, None, 'braces do not match', 'an odd number of $', 'a list written as text', None, None]
    """
    bare = re.sub(r"\\\\|\\[{}$]", "", gold)
    if not is_balanced(bare):
        return "braces do not match"
    if bare.count("$") % 2:
        return "an odd number of $"
    return "a list written as text" if re.fullmatch(r"\[(['\"]).*\1\]", gold, re.DOTALL) else None


def holds(question: str, gold: str) -> bool:
    """Whether a text contains an answer as a whole number or a whole word.

    >>> holds("Of 1,080 eggs 3.5 break.", "1080"), holds("Of 1,080 eggs", "80"), holds("5.0 or 6?", "5")
    (True, False, True)
    >>> holds("Is a or b larger?", "b"), holds("Is aab larger?", "b")
    (True, False)
    """
    if _NUMBER.fullmatch(gold):
        return any(Fraction(n.replace(",", "")) == Fraction(gold.replace(",", "")) for n in _NUMBER.findall(question))
    return re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", question) is not None


def is_wrong(left: str, right: str) -> bool:
    """Whether both sides are numbers, and differ by more than a unit in the last digit of the right side.

    >>> is_wrong("48/2", "24"), is_wrong("2/3", ".67"), is_wrong("10*.5", "5.0"), is_wrong("9*2", "16")
    (False, False, False, True)
    """
    value, result = _value(left), _value(right)
    digits = len(right.partition(".")[2].strip())
    return value is not None and result is not None and abs(value - result) >= Fraction(1, 10**digits)


def _value(text: str) -> Fraction | None:
    """The exact value of an expression that may contain decimals, thousands commas, percent and currency signs."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))|[$ ]", "", text)
    text = re.sub(r"([\d.]+)%", r"(\1/100)", text)
    text = _DECIMAL.sub(lambda found: f"({int(found[1] + found[2])}/1{'0' * len(found[2])})", text)
    found = read_expression(re.sub(r"(?<!\d)0+(?=\d)", "", text))
    return found and found[0]


def worked_solution(row: Row) -> str | None:
    """The worked solution of a row: MATH's `solution`, or the text of GSM8K's `answer` before its `####`; None if none.

    >>> worked_solution({"answer": "48/2=<<48/2=24>>24 clips\\n#### 24"}), worked_solution({"answer": "24"})
    ('48/2=24 clips\\n#### 24', None)
    """
    answer, solution = row.get("answer"), row.get("solution")
    if isinstance(solution, str) and solution.strip():
        return solution
    # without GSM8K's calculator annotations, which nobody is asked to write
    return re.sub(r"<<[^<>]*>>", "", answer) if isinstance(answer, str) and "\n####" in answer else None
