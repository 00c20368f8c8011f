"""The verdict of math-verify on two expressions. `judge.py` runs this file in separate processes.

It imports nothing from this project. The library's own time limits are off: they count whole seconds of wall-clock
time, which also passes while other programs run. Here processor time counts, so a verdict does not depend on how busy
the machine is.
"""

import functools
import logging
import signal
import warnings
from collections.abc import Callable

SECONDS = 1.0  # of processor time, for one verdict
WARM_UP = (  # the parser is several times as fast on texts that are like texts that it has already read
    "(1,2)", r"\left(x+1\right)^{2}-\frac{\pi}{3}", r"\frac{1}{2}+\sqrt{3}x", r"\left(\frac{1}{2}, -\sqrt{3}\right)",
    "1,-2,3", r"\frac{x^{2}+1}{2(x-1)}", r"3 \cdot 2^{n-1}", "x=2y+3", r"f(x)=\frac{x}{2}", r"x \in [1,2]",
    r"a_{1} e^{-2t}\cos(\omega t)", r"\log_{2} x", r"\begin{pmatrix} 1 & x \\ 2 & 3 \end{pmatrix}", r"45^\circ",
)  # fmt: skip


class OutOfTimeError(BaseException):
    """Not an `Exception`, because the library catches those."""


def warm_up() -> None:
    """Import the library, and let it read typical answers."""
    for text in WARM_UP:
        _compare(text, f"{text}+1")


def equal(gold: str, answer: str) -> bool | None:
    """Whether the answer equals the gold answer; None if time or memory did not suffice.

    A computation that Python cannot interrupt ends the process at twice the limit.
    """
    try:
        try:
            signal.signal(signal.SIGPROF, _interrupt)
            signal.setitimer(signal.ITIMER_PROF, SECONDS, SECONDS / 5)  # repeats, if it was caught
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * SECONDS)
            return _compare(gold, answer)
        finally:
            _stop_timers()
    except (OutOfTimeError, MemoryError):
        _stop_timers()  # the signal may come while they are being stopped
        from sympy.core.cache import clear_cache

        clear_cache()  # a computation that was cut off may have left half a result
        _library()[0].cache_clear()
        return None
    except Exception:  # the library's, on texts of any kind
        return False


def _stop_timers() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _interrupt(*_) -> None:
    raise OutOfTimeError


def _compare(gold: str, answer: str) -> bool:
    read, verify = _library()
    return bool(verify(read(gold), read(answer), timeout_seconds=None))


@functools.cache
def _library() -> tuple[Callable, Callable]:
    """The functions that read an expression and compare two. Readings are cached, as reading takes longer."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    config = math_verify.LatexExtractionConfig(
        try_extract_without_anchor=False,  # only the content of the box, not a number found within it
        boxed_match_priority=0,
        # no units are left out here, where `2c` and `2d` would be `2`
        normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="all"),
    )

    def read(text: str) -> list:
        boxed = "\\boxed{" + text + "}"
        return math_verify.parse(boxed, (config,), extraction_mode="first_match", parsing_timeout=None)

    return functools.lru_cache(maxsize=4096)(read), math_verify.verify
