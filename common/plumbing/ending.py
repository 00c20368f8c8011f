"""How the processes of one launch end: one of them says why, and the others let it.

A launcher ends all processes as soon as one has ended, also one that is about to speak.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from torch import distributed

from common.parallel import rank

from common.plumbing.ranks import num_launched

HEAD_START = 3.0  # seconds for the main process, which often finds the same error, and says it best
LONGEST_END = 20.0  # seconds of a main process that has an error: it may have files to close
LOST = "the connection to another process was lost: its own message, or the launcher's, says why it ended"


def may_say_why(otherwise: bool = True) -> bool:
    """Whether this process is to say why the launch ends: the main one if it can, else the first that knows.

    Args:
        otherwise: what to do where processes cannot know of each other: each was started by hand, and they have not
            met, or the main one has gone.
    """
    if num_launched() == 1:
        return True
    store = _find_store()
    if store is None:
        return otherwise
    if rank() > 0 and _is_said(store, HEAD_START):
        return False
    with suppress(distributed.DistError):
        return store.add(_key(), 1) == 1
    return otherwise


def wait_until_said() -> None:
    """Wait for the main process, which has an error that this one only knows of."""
    store = _find_store()
    if store is not None:
        _is_said(store, LONGEST_END)


def ignore_further_signals() -> None:
    """Let a process that is ending say so: the terminal tells every one of Ctrl-C, and then torchrun does once more."""
    if num_launched() > 1:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def is_under_torchrun() -> bool:
    """Also under `accelerate launch` of several processes, which is torchrun."""
    return num_launched() > 1 and "TORCHELASTIC_RUN_ID" in os.environ


def leave(status: int) -> NoReturn:
    """End one of several processes at once: the threads of a process group can abort one that ends as usual."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _find_store() -> distributed.TCPStore | None:
    """What processes can agree through before they have met, or when one has gone: of torchrun, or the main process."""
    if not distributed.is_initialized() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    with suppress(KeyError, ValueError, distributed.DistError):  # the process that held it has gone
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return distributed.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
    return None


def _is_said(store: distributed.TCPStore, patience: float) -> bool:
    deadline = time.monotonic() + patience
    with suppress(distributed.DistError):
        while not store.check([_key()]):  # its `wait` would print that nothing came
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True
    return False


def _key() -> str:
    """Another one after torchrun has started the processes again: its store is still the same."""
    return f"said {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
