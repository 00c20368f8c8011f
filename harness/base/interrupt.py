"""Ctrl-C while a program is still importing: it ends at once, without a traceback.

A program imports this module first: `run_main` can only act after the imports, which take seconds. `parse_config` ends
this early phase. This module also sets the environment variables that PyTorch reads when it is imported.
"""

import os
import signal
import sys
from pathlib import Path

# How many times a thread of PyTorch (GNU OpenMP) loops while it waits; GNU's 300,000 are slow on busy cores
SPINS = "1000"
# How the names of programs begin
PROGRAMS = (
    *("train", "build_index", "serve_index", "make_questions"),
    *("sample_responses", "score_responses", "make_pairs", "make_chats", "format_chats", "make_policy"),
    *("evaluate", "export", "chat", "math_levels", "smollm2"),
)


def end_at_once(*_) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # only one of several processes prints
        os.write(2, b"\ninterrupted\n")
    os._exit(130)  # there is nothing yet to shut down


def handle_as_usual() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as usual."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# only in the program itself, and not if somebody else handles the signal or has switched it off (nohup)
if Path(sys.argv[0]).name.startswith(PROGRAMS) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_at_once)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
