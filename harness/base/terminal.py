"""All printing: no text from a model, a data set or a user's file can control the terminal."""

import errno
import io
import logging
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

from harness.base.ranks import is_speaker

if TYPE_CHECKING:
    from tqdm import tqdm

# How the lines of a printed conversation begin, and their colors: cyan, yellow, green
POLICY, TOOL, WORLD, REWARD = "  policy", "  tool", "  world", "  reward"
_COLORS = {POLICY: 36, TOOL: 33, WORLD: 33, REWARD: 32}


def say(text: str, stream: TextIO | None = None, anyway: bool = False) -> None:
    """Print the printable characters of a text: only on the main process, or with `anyway` on every process."""
    if anyway or is_speaker():
        print(visible(text), file=stream, flush=anyway)


def say_above_progress(text: str) -> bool:
    """Print above a progress bar; returns whether anybody can read it."""
    from tqdm import tqdm

    if is_speaker():
        try:
            tqdm.write(_colored(visible(text)))
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # a pipe without a reader, or a closed terminal
                raise
            return False
    return True


def progress_bar(done: int, total: int, is_shown: bool) -> "tqdm":
    """A line that counts the remaining steps, from `done + 1` to `total`."""
    from tqdm import tqdm

    return tqdm(
        range(done + 1, total + 1),
        initial=done,
        total=total,
        bar_format="{desc} [{elapsed}<{remaining}]",
        dynamic_ncols=True,
        mininterval=0.1 if sys.stderr.isatty() else 10,  # a log file needs no line per step
        disable=not is_shown,
    )


def completions_bar(done: int, total: int, is_shown: bool = True) -> "tqdm":
    """A line that counts completions; a log file needs few lines, and gets them only after a minute."""
    from tqdm import tqdm

    style = {"leave": False} if sys.stderr.isatty() else {"mininterval": 60.0, "delay": 60.0}  # seconds
    style |= {"bar_format": "completions: {n_fmt}/{total_fmt} |{bar}| [{elapsed}<{remaining}]", "dynamic_ncols": True}
    return tqdm(total=total, initial=done, disable=not is_shown, **style)


def _colored(text: str) -> str:
    """The lines of a conversation, in colors if stdout is a terminal that wants them (https://no-color.org)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    pattern = re.compile(f"^({'|'.join(_COLORS)}).*", re.MULTILINE)
    return pattern.sub(lambda line: f"\x1b[{_COLORS[line[1]]}m{line[0]}\x1b[0m", text)


def visible(text: str) -> str:
    """Replace every character that is not printable (control and bidi characters), except line breaks.

    >>> visible("a title: \\x1b]0;mine\\x07\\n\\u202enext line")
    'a title: \\ufffd]0;mine\\ufffd\\n\\ufffdnext line'
    """
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)


def printable(text: str, width: int, end: int = 0) -> str:
    """One line of at most `width` characters; a longer text keeps its last `end` characters.

    >>> printable("red: \\x1b[31m\\n  next line", width=40)
    'red: \\ufffd[31m next line'
    >>> printable("12+30=42, and 42+9=51. <answer>51</answer>", width=32, end=19)
    '12+30=42 ... <answer>51</answer>'
    """
    most = 20 * width  # characters: anything between them would not be shown
    line = " ".join((text if len(text) <= 2 * most else text[:most] + text[-most:] * (end > 0)).split())
    tail = f" {line[-end:].lstrip()}" if end else ""
    return visible(line if len(line) <= width else f"{line[: width - 4 - len(tail)].rstrip()} ...{tail}")


def short(value: object) -> str:
    """A value from a user's code, for an error message."""
    return printable(repr(value), 80)


def describe_error(error: BaseException, module: ModuleType) -> str:
    """An error in one line, with the line of the task's file that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__]
    text = str(error)
    if isinstance(error, SyntaxError):
        text, lines = error.msg, [error.lineno]
    place = f" (line {lines[-1]} of {Path(module.__file__).name})" if lines else ""
    return f"{type(error).__name__}: {printable(text, 200)}{place}"


def clean_log(library: str) -> None:
    """Pass a library's log through `visible`, without the library's colors: it names files and weights."""
    for handler in logging.getLogger(library).handlers:
        handler.addFilter(_make_visible)


def _make_visible(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage())), ()
    return True


def silence_bitsandbytes() -> None:
    """Hide its notes on speed and casts: peft imports an installed bitsandbytes even if nobody uses it."""
    for name in ("backends.cpu.ops", "autograd._functions"):
        logging.getLogger(f"bitsandbytes.{name}").setLevel(logging.ERROR)


def prepare_output() -> None:
    """Make printing possible whatever stdout and stderr are, and pass tracebacks through `say`."""
    silence_bitsandbytes()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # None: closed by the shell; the next file to be opened would take its number
        if stream is None or (name == "stdout" and not is_speaker()):
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):  # PYTHONIOENCODING=ascii cannot encode every question
            stream.reconfigure(errors="backslashreplace", line_buffering=True)  # a pipe shows each line at once
    sys.excepthook = lambda *error: say("".join(traceback.format_exception(*error)).rstrip("\n"), sys.stderr)


def discard_output() -> None:
    """Discard all further output, because nobody reads stdout any more; flushing it when Python exits would raise."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
