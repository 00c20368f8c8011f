"""Calls of the user's code: its errors become one sentence, it has a time limit, and what it prints is left out."""

import contextlib
import io
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from doctor.findings import UnusableError

T = TypeVar("T")
TIME_LIMIT = 30.0  # seconds that one call may take


class TooSlowError(UnusableError):
    """One call took longer than the limit: it is not worth another one."""


class TimeLimitError(BaseException):
    """Raised by the alarm. No Exception, as the user's code may catch those."""


def call(what: str, path: Path, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call the user's `function`; `what` names it and what for.

    Raises:
        UnusableError: it raised or exited.
        TooSlowError: it took longer than the limit.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()), _time_limit():
            return function(*args, **kwargs)
    except TimeLimitError:
        raise TooSlowError(f"{what} did not return within {TIME_LIMIT:g} seconds") from None
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise UnusableError(f"{what} raised {describe_error(error, path)}") from error


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """An alarm that ends what takes too long, where there are alarms: on POSIX, in the main thread."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _raise_time_limit)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise_time_limit(*_) -> None:
    raise TimeLimitError


def describe_error(error: BaseException, path: Path) -> str:
    """An error in one line, with the line of the user's file that it comes from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.lineno:
        lines = [error.lineno]
    place = f" (line {lines[-1]} of {path.name})" if lines else ""
    text = printable(str(error.msg if isinstance(error, SyntaxError) else error))
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def printable(text: str, width: int = 200) -> str:
    """One line of at most `width` characters, with a replacement character for what is not printable.

    >>> printable("red: \\x1b[31m\\n  next line")
    'red: \\ufffd[31m next line'
    """
    line = " ".join(text[: 20 * width].split())
    line = line if len(line) <= width else line[: width - 4].rstrip() + " ..."
    return "".join(character if character.isprintable() else "\ufffd" for character in line)
