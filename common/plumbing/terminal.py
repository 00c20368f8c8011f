"""Text that a model, a data set or a user's code wrote, made safe for a terminal."""

import traceback
from pathlib import Path
from types import ModuleType


def printable(text: str, width: int) -> str:
    """One line of at most `width` characters, with a replacement character for everything that is not printable.

    >>> printable("red: \\x1b[31m\\n  next line", width=40)
    'red: \\ufffd[31m next line'
    """
    line = " ".join(text[: 20 * width].split())  # what follows would not be shown
    line = line if len(line) <= width else line[: width - 4].rstrip() + " ..."
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def describe_error(error: BaseException, module: ModuleType) -> str:
    """An error in one line, with the line of the task's file that it comes from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__]
    if isinstance(error, SyntaxError) and error.lineno:
        lines = [error.lineno]
    place = f" (line {lines[-1]} of {Path(module.__file__).name})" if lines else ""
    text = printable(str(error.msg if isinstance(error, SyntaxError) else error), 200)
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
