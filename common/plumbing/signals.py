"""Ctrl-C and SIGTERM: in a step they wait for its end, elsewhere they end the program at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def signals_to(handler: Callable[..., None]) -> Iterator[None]:
    """Let `handler` receive Ctrl-C and SIGTERM, where Python allows that: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
