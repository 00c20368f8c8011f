"""Ctrl-C and SIGTERM for a run, where Python allows it: in the main thread; a call when something takes too long."""

import functools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


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
def call_after_signal(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    """Call `function`, in another thread, if the block has not ended so many seconds after a signal.

    A handler could not do it: Python calls one when the main thread comes back from the library that it is in, and that
    may be waiting for another process for good.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers, sender = socket.socketpair()
    sender.setblocking(False)

    def watch() -> None:
        number = numbers.recv(1)  # of a signal; nothing at the end of the block
        numbers.settimeout(seconds)
        try:
            while number:
                number = numbers.recv(1)
        except TimeoutError:
            function()

    threading.Thread(target=watch, daemon=True).start()
    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        sender.close()


@contextmanager
def call_after(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    """Call `function`, in another thread, if the block takes longer than `seconds`.

    Not by SIGALRM: that is for the code in the block, which may limit its own time with it.
    """
    _start_watching()
    call = (time.monotonic() + seconds, function)
    _pending.append(call)
    try:
        yield
    finally:
        with suppress(ValueError):  # it has been called
            _pending.remove(call)


_pending: list[tuple[float, Callable[[], None]]] = []


@functools.cache
def _start_watching() -> None:
    """One thread for all calls: there are thousands, and hardly one is slow."""
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(0.05)
        for call in [call for call in _pending if call[0] < time.monotonic()]:
            with suppress(ValueError):  # the block has just ended
                _pending.remove(call)
                call[1]()
