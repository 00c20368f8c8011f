"""Ctrl-C and SIGTERM for a run, and an alarm for what takes too long, where Python allows them: in the main thread."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def signals_to(handler: Callable[..., None]) -> Iterator[None]:
    """Let `handler` receive Ctrl-C and SIGTERM within the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextmanager
def call_after(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    """Call `function` if the block takes longer than `seconds`; never on Windows, which has no such alarm."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, lambda *_: function())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
