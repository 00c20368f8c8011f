"""Ctrl-C while a program is still importing what it needs: it ends at once, without a traceback.

A program imports this first: `run_main` can only act after the imports, which take seconds. `parse_config` ends this
early phase. What PyTorch reads when it is imported is set here, too.
"""

import os
import signal
import sys
from pathlib import Path

# Times round a loop that a thread of PyTorch (GNU OpenMP) waits actively; GNU's 300,000 are slow on busy cores
SPINS = "1000"
# How the names of programs begin
PROGRAMS = ("train", "build_index", "serve_index", "make_questions", "evaluate", "export", "math_levels")


def end_at_once(*_) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # of several processes one speaks
        os.write(2, b"\ninterrupted\n")
    os._exit(130)  # nothing has been started that would have to be ended


def handle_as_usual() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt, as usual."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# only in the program itself, and not where somebody else receives the signal, or has switched it off (nohup)
if Path(sys.argv[0]).name.startswith(PROGRAMS) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_at_once)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
