"""Verdicts on answers, cached: from text and exact numbers, and from math-verify if it is installed."""

import os
import re
import threading
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from tasks.verdicts import answer_text as answers
from tasks.verdicts.answer_text import as_number, is_balanced, normalize, same_number
from tasks.verdicts.readings import comparable

from harness.workers.tool_processes import NoAnswerError, Workers, in_threads

MOST_KEPT = 100_000  # verdicts
MOST_WORKERS = 4
MEMORY = 2 << 30  # bytes of address space of a worker
HUNG_SECONDS = 30.0  # wall-clock time without a verdict; a worker limits its own processor time to far less
LONGEST = 300  # characters that the library gets
MOST_WORDS = 2  # of an answer if the gold has none; parsing prose as a product of letters takes long, and is wrong
COMPARE = Path(__file__).with_name("expressions.py")
NOTE = (
    "math-verify is not installed, so that answers are compared as text and as numbers only: sqrt(8) is not 2 sqrt(2). "
    "Install it with: pip install 'math-verify[antlr4_13_2]==0.9.0'"
)

_COMMAND = re.compile(r"\\(?:mathrm|operatorname)\{[^{}]*+\}|\\[A-Za-z]+|\\.")
_WORD = re.compile(r"[A-Za-z]{3,}")
_TOWER = re.compile(r"\^\{*\d+\^\{*\d+\^|\^\{*\d{2,}\^\{*\d|\^\{*\d{6,}|\d{4,}!|!!")  # too large to compute
_TEXT = rf"\\(?:{'|'.join(answers.TEXTS)})\s*\{{"
_AND = re.compile(rf",?\s*+{_TEXT}\s*+(?:and|or)\s*+\}}")
_LETTER = re.compile(rf"{_TEXT}\s*+([A-Za-z])\s*+\}}")
_LEFT_OUT = re.compile(rf"{_TEXT}|\\[lcv]?dots(?![a-z])|\.\.\.|\u2026")
Pair = tuple[str, str]  # gold, answer


def has_library() -> bool:
    """Whether math-verify and its dependencies can be found; its processes need a POSIX system."""
    return os.name == "posix" and all(find_spec(name) for name in ("math_verify", "latex2sympy2_extended", "antlr4"))


def quick_verdict(gold: str, answer: str) -> bool | None:
    r"""Whether an answer is right, as far as text and exact numbers tell; None: ask the library.

    >>> quick_verdict(r"\frac12", r"\dfrac{1}{2}"), quick_verdict("0.5", r"\frac12"), quick_verdict("0.5", "0.51")
    (True, True, False)
    >>> quick_verdict("(x+1)^2", "x^2+2x+1"), quick_verdict("3", r"3\text{ or 4}"), quick_verdict("", "")
    (None, False, False)
    """
    wanted, given = normalize(gold), normalize(answer)
    if not wanted or not given or wanted == given:
        return bool(wanted) and wanted == given
    pairs = comparable(gold, answer)
    if pairs != [(gold, answer)]:
        return False if pairs is None else _all(quick_verdict(*pair) for pair in pairs)
    numbers = as_number(gold), as_number(answer)
    verdict = same_number(*numbers) if all(numbers) else None
    if verdict is None and not _can_be_told(expression(gold), expression(answer)):
        return False
    return verdict


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    verdicts = list(verdicts)
    return False if False in verdicts else None if None in verdicts else True


def expression(text: str) -> str | None:
    r"""The text of an answer for the library: without units, and with commas for `\text{ or }`.

    None if it contains other text, or dots: the library would leave them out, although they change the answer.

    >>> [expression(x) for x in (r"$\pi\text{ cm}$", r"1\text{ or }2", r"3\mathrm{i}", r"3\text{ to 4}", r"3\ldots")]
    ['\\pi', '1,2', '3 i ', None, None]
    """
    if len(text) > answers.LONGEST:
        return None
    text = _AND.sub(",", answers.bare(text.replace("\\$", "").replace("$", "")))
    text, factor = answers.without_units(text)
    if factor != 1:
        return None
    text = _LETTER.sub(r" \1 ", text)  # of a symbol
    return None if _LEFT_OUT.search(text) or not is_balanced(text) or len(text) > LONGEST else text


def _can_be_told(gold: str | None, answer: str | None) -> bool:
    """Whether the library can tell two expressions apart: it ignores case, and reads prose as a product of letters."""
    if gold is None or answer is None:
        return False
    wanted, given = _COMMAND.sub(" ", gold), _COMMAND.sub(" ", answer)
    if not _WORD.search(wanted) and len(_WORD.findall(given)) > MOST_WORDS:
        return False
    letters = set(wanted)
    return not any(letter.isupper() and letter.lower() in letters for letter in letters)


def is_too_large(answer: str) -> bool:
    """Whether an answer contains a number that would take longer to compute than a verdict may.

    >>> [is_too_large(text) for text in ("9^9^9^9", "10^{10^{10}}", "2^{1009}", "x^{2^n}")]
    [True, True, False, False]
    """
    return _TOWER.search("".join(answer.split())) is not None


def num_workers() -> int:
    """One for each core that a process of the run has to itself: at least one, at most `MOST_WORKERS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return max(1, min(MOST_WORKERS, cores // max(1, int(processes) if processes.isdigit() else 1)))


class Judge:
    """Decides whether answers equal gold answers, and keeps the verdicts. Several threads can use it safely."""

    def __init__(self):
        self._uses_library = has_library()
        self._workers: Workers | None = None
        self._kept: dict[Pair, bool | None] = {}
        self._lock = threading.Lock()  # of the workers
        self.num_asked = 0  # pairs

    def start(self) -> None:
        """Start the workers, without waiting for them."""
        if self._uses_library and self._workers is None:
            settings = {"number": num_workers(), "memory": MEMORY, "first": "warm_up"}
            self._workers = Workers(str(COMPARE), COMPARE.read_bytes(), "math-verify", HUNG_SECONDS, **settings)
            self._workers.start()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def prepare(self, cases: Iterable[tuple[list[str], str]]) -> None:
        """Decide all cases, each of gold answers and an answer, together.

        Each case has its own time limit, so slow cases do not affect the others.
        """
        asked = dict.fromkeys(pair for golds, answer in cases for pair in self._open_pairs(golds, answer))
        self._ask(list(asked))

    def verdict(self, golds: list[str], answer: str) -> bool | None:
        """Whether the answer equals one of the gold answers; None if that could not be decided in time."""
        self._ask(self._open_pairs(golds, answer))
        verdicts = [self._kept.get((gold, answer)) for gold in golds]
        return True if True in verdicts else None if None in verdicts else False

    def _open_pairs(self, golds: list[str], answer: str) -> list[Pair]:
        """The pairs that only the library can decide; empty if one of the golds is known to be equal."""
        pairs = [(gold, answer) for gold in golds]
        for pair in pairs:
            if pair not in self._kept:
                verdict = quick_verdict(*pair)
                if verdict is not None or not self._uses_library:
                    self._keep(pair, bool(verdict))
                elif is_too_large(answer):
                    self._keep(pair, None)
        is_right = any(self._kept.get(pair) for pair in pairs)
        return [] if is_right else [pair for pair in pairs if pair not in self._kept]

    def _ask(self, pairs: list[Pair]) -> None:
        if pairs:
            with self._lock:
                self.start()
                self.num_asked += len(pairs)
                for pair, verdict in zip(pairs, in_threads(self._ask_once, pairs, parallel=True), strict=True):
                    self._keep(pair, verdict)

    def _ask_once(self, pair: Pair) -> bool | None:
        """The library's verdict; if somebody has killed the worker, it is replaced, and the new worker is asked."""
        undecided = [part for part in comparable(*pair) if quick_verdict(*part) is None]
        return _all(self._verdict_of_library(*part) for part in undecided)

    def _verdict_of_library(self, gold: str, answer: str) -> bool | None:
        arguments = {"gold": expression(gold), "answer": expression(answer)}
        for _ in range(2):
            try:
                return {"true": True, "false": False}.get(self._workers.ask("equal", arguments))
            except NoAnswerError as error:
                if error.is_slow:
                    break
        return None

    def _keep(self, pair: Pair, verdict: bool | None) -> None:
        if len(self._kept) >= MOST_KEPT:
            for oldest in list(self._kept)[: MOST_KEPT // 2]:
                self._kept.pop(oldest, None)
        self._kept[pair] = verdict
