"""Examine a file in a separate process, because the file may end it or never return."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from doctor.findings import Report

LOADING_LIMIT = 120.0  # seconds for running the file, including its imports
CALL_LIMIT = 30.0  # seconds for one call of a function


def examine_apart(path: Path) -> Report:
    """The report of `examine` on the file."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_examine_and_tell, args=(path, writer))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # in the child: Ctrl-C is for this process
    child.start()
    signal.signal(signal.SIGINT, before)
    writer.close()
    running, report = str(path), Report(path)
    try:
        while running:
            limit = CALL_LIMIT if report.functions else LOADING_LIMIT
            if not reader.poll(limit):
                report.errors.append(f"{running} did not return within {limit:g} seconds")
                break
            running, report = reader.recv()
    except EOFError:
        child.join()
        report.errors.append(f"{running} ended the process, with exit status {child.exitcode}")
    finally:
        child.kill()
        child.join()
    return report


def _examine_and_tell(path: Path, writer: Connection) -> None:
    """Send the next call with the findings so far before each call; at the end, nothing with all findings."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # suppress what the file prints
    from doctor.examine import examine  # only here: torch takes seconds

    writer.send(("", examine(path, lambda running, report: writer.send((running, report)))))
