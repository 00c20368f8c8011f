"""Text that a model, a data set or a user's code wrote, made safe for a terminal."""

from textwrap import shorten


def printable(text: str, width: int) -> str:
    """One line of at most `width` characters, with a replacement character for everything that is not printable.

    >>> printable("red: \\x1b[31m\\n  next line", width=40)
    'red: \\ufffd[31m next line'
    """
    line = shorten(text, width, placeholder=" ...")
    return "".join(character if character.isprintable() else "\ufffd" for character in line)
