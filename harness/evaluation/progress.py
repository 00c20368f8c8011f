"""Progress with the time left: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from harness.base.terminal import say

PAUSE = 60.0  # seconds between lines


@contextmanager
def progress(total: int, done: int, what: str) -> Iterator:
    """Gives a function that is told of every number of things that are done.

    Args:
        total, done: of all, and of those before this block.
    """
    if sys.stderr.isatty():
        from tqdm import tqdm

        form = "{desc}: {n_fmt}/{total_fmt} |{bar}| [{elapsed}<{remaining}]"
        with tqdm(total=total, initial=done, desc=what, bar_format=form, dynamic_ncols=True, leave=False) as bar:
            yield bar.update
        return
    began = told = time.monotonic()
    count = done

    def update(number: int) -> None:
        nonlocal count, told
        count += number
        now = time.monotonic()
        if now - told >= PAUSE and count < total:
            told = now
            left = (now - began) / (count - done) * (total - count)
            say(f"{what}: {count} of {total}, about {left / 60:.0f} min left", sys.stderr)

    yield update
