"""The process that asks math-verify whether two expressions are equal. It imports nothing of this project.

`workers.py` starts it by its path, with the seconds of processor time that a verdict may take. It reads a line of JSON,
[gold, answer], and writes one, [verdict, seconds]: whether they are equal, or null if that could not be decided in that
time, and the processor time that it took. It ends with its stdin, so with the process that started it, even if that is
killed.

The library's own time limits are off: they count whole seconds of a clock that also runs while other programs do. Here
processor time counts, so that a verdict does not depend on how busy the machine is.
"""

import gc
import json
import logging
import os
import select
import signal
import sys
import time
from contextlib import suppress
from functools import lru_cache
from typing import BinaryIO

MEMORY = 2 << 30  # bytes of address space
WARM_UP = (  # the parser reads what is like something that it has read several times as fast; the last one first
    "x'-2x=0", "52_8", r"45^\circ", r"20\%", r"\frac{dx}{dt}=kx", r"\lfloor x \rfloor", r"\log_{2} x", r"\arcsin(x/2)",
    r"x \le 4", r"(-\infty,2] \cup (3,5)", r"\begin{pmatrix} 1 & x \\ 2 & 3 \end{pmatrix}", r"5 \text{ cm}^2", "n!",
    r"\sin^2 x+\ln 2", r"a_{1} e^{-2t}\cos(\omega t)", r"x \in [1,2]", r"\left[ 0, \frac{\pi^2}{8} \right]",
    r"f(x)=\frac{x}{2}", "3x-y+4z-1=0", "x=2y+3", r"\text{even}", r"1 \pm \sqrt{5}", r"\{1,2\}", "(1,2),(3,4)",
    "1,-2,3", r"\frac{-1+\sqrt{5}}{2}", r"2 \times 10^{-3}", r"3 \cdot 2^{n-1}", r"\frac{x^{2}+1}{2(x-1)}",
    "2n^{2}-n", "[1,2)",
    r"\left(\frac{1}{2}, -\sqrt{3}\right)", "(1,2)", r"\left(x+1\right)^{2}-\frac{\pi}{3}", r"\frac{1}{2}+\sqrt{3}x",
)  # fmt: skip


class OutOfTimeError(BaseException):
    """Not an Exception, all of which the library catches."""


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # whatever a library prints
    os.dup2(nowhere, 2)
    _limit()
    try:
        judge = Judge(seconds=float(sys.argv[1]))
    except Exception as error:  # of the import
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}).encode() + b"\n")
        return
    answers.write(b'{"ready": true}\n')
    while line := _next_request(requests, judge):
        gold, answer = json.loads(line)
        began = time.process_time()
        verdict = judge.verdict(gold, answer)
        answers.write(json.dumps([verdict, round(time.process_time() - began, 6)]).encode() + b"\n")


def _next_request(requests: BinaryIO, judge: "Judge") -> bytes:
    """The next line; while none has come, the parser is warmed up."""
    while judge.is_cold and not select.select([requests], [], [], 0)[0]:
        judge.warm_up()
    return requests.readline()


def _limit() -> None:
    import resource

    with suppress(ValueError, OSError):  # the user's own limit is lower
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)  # ends the process, also within a computation in C


class Judge:
    """The library, with what it has read. What is read once is kept: reading takes longer than comparing."""

    def __init__(self, seconds: float):
        self._seconds = seconds  # of processor time, for one verdict
        logging.disable(logging.CRITICAL)
        import math_verify
        from sympy.core.cache import clear_cache

        self._verify, self._clear_cache = math_verify.verify, clear_cache
        # only what is in the box, and not a number that is found within it
        config = (math_verify.LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0),)

        def read(text: str) -> list:
            boxed = "\\boxed{" + text.replace("\\$", "").replace("$", "") + "}"
            return math_verify.parse(boxed, config, extraction_mode="first_match", parsing_timeout=None)

        self._read = lru_cache(maxsize=4096)(read)
        self._is_timed = False
        signal.signal(signal.SIGPROF, self._interrupt)
        self._to_warm_up = list(WARM_UP)
        gc.collect()
        gc.freeze()

    @property
    def is_cold(self) -> bool:
        return bool(self._to_warm_up)

    def warm_up(self) -> None:
        """Read and compare another one of the texts that most others are like."""
        text = self._to_warm_up.pop()
        self._are_equal(text, f"{text}+1")

    def verdict(self, gold: str, answer: str) -> bool | None:
        """Whether the answer equals the gold answer; None if time or memory did not suffice."""
        self._is_timed = True
        try:
            try:
                signal.setitimer(signal.ITIMER_PROF, self._seconds, self._seconds / 5)  # again, if it was caught
                signal.setitimer(signal.ITIMER_VIRTUAL, 2 * self._seconds)
                return self._are_equal(gold, answer)
            finally:
                self._is_timed = False
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except (OutOfTimeError, MemoryError):
            self._clear_cache()  # a computation that was cut off may have left half a result
            self._read.cache_clear()
            return None
        except Exception:  # of the library, on texts of any kind
            return False

    def _interrupt(self, *_) -> None:
        if self._is_timed:
            raise OutOfTimeError

    def _are_equal(self, gold: str, answer: str) -> bool:
        wanted, given = self._read(gold), self._read(answer)
        return bool(self._verify(wanted, given, timeout_seconds=None))


if __name__ == "__main__":
    main()
