"""The verdicts on answers, kept: quick ones at once, and the others from math-verify where it is installed."""

import os
import threading
from collections.abc import Iterable
from importlib.util import find_spec

from common.tasks.verdicts.quick import is_too_large, quick_verdict
from common.tasks.verdicts.workers import Pair, Workers

MOST_KEPT = 100_000  # verdicts

NOTE = (
    "math-verify is not installed, so that answers are compared as text and as numbers only: sqrt(8) is not 2 sqrt(2). "
    "Install it with: pip install 'math-verify[antlr4_13_2]==0.9.0'"
)


def has_library() -> bool:
    """Whether math-verify and what it needs can be found; its processes need a POSIX system."""
    return os.name == "posix" and all(find_spec(name) for name in ("math_verify", "latex2sympy2_extended", "antlr4"))


class Judge:
    """Decides whether answers equal gold answers, and keeps the verdicts. Safe to be used by several threads."""

    def __init__(self, uses_library: bool | None = None, number_of_workers: int | None = None):
        self._uses_library = has_library() if uses_library is None else uses_library
        self._number = number_of_workers
        self._workers: Workers | None = None
        self._kept: dict[Pair, bool | None] = {}
        self._left: set[Pair] = set()  # what the allowance of the latest rollout left undecided
        self._lock = threading.Lock()
        self.seconds, self.num_asked = 0.0, 0  # of the workers' processor time, and pairs: the latest that they got

    def start(self) -> None:
        """Start the workers, without waiting for them."""
        if self._uses_library and (self._workers is None or not self._workers.belongs_here()):
            self._workers = Workers(self._number)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def prepare(self, cases: Iterable[tuple[list[str], str]]) -> None:
        """Decide all cases, each of gold answers and an answer, together: the workers share them."""
        with self._lock:
            self._left = set()
            asked = dict.fromkeys(pair for golds, answer in cases for pair in self._open_pairs(golds, answer))
            self._ask(list(asked))

    def verdict(self, golds: list[str], answer: str) -> bool | None:
        """Whether the answer equals one of the gold answers; None if that could not be decided in time."""
        with self._lock:
            self._ask([pair for pair in self._open_pairs(golds, answer) if pair not in self._left])
            verdicts = [self._kept.get((gold, answer)) for gold in golds]
        return True if True in verdicts else None if None in verdicts else False

    def _open_pairs(self, golds: list[str], answer: str) -> list[Pair]:
        """The pairs that the library has to be asked about; none if one of the golds is known to be equal."""
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
        if not pairs:
            return
        self.start()
        verdicts, self.seconds = self._workers.judge(pairs)
        self.num_asked = len(pairs)
        for pair in pairs:
            if pair in verdicts:
                self._keep(pair, verdicts[pair])
            else:
                self._left.add(pair)

    def _keep(self, pair: Pair, verdict: bool | None) -> None:
        if len(self._kept) >= MOST_KEPT:
            for oldest in list(self._kept)[: MOST_KEPT // 2]:
                del self._kept[oldest]
        self._kept[pair] = verdict
