"""How a program ends: on Ctrl-C or SIGTERM, and which of several processes reports the reason."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from common.parallel import rank

from harness.base.ranks import num_launched

HEAD_START = 3.0  # seconds for the main process, which often finds the same error and reports it best
LONGEST_END = 20.0  # seconds for a main process with an error: it may have files to close
# A new key after torchrun restarted the processes: its store is still the same
SAID = f"said {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
LOST = "the connection to another process was lost: its own message, or the launcher's, says why it ended"


@contextmanager
def signals_to(handler: Callable[..., None]) -> Iterator[None]:
    """Let `handler` receive Ctrl-C and SIGTERM within the block, in the main thread, where Python allows it."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main_thread else ()
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def may_say_why(otherwise: bool = True) -> bool:
    """Whether this process reports why the launch ends: the main one, else the first to know; `otherwise` if alone."""
    with suppress(distributed.DistError):  # the process with the store is gone
        if (store := _find_store()) is not None:
            return not (rank() > 0 and _is_said(store, HEAD_START)) and store.add(SAID, 1) == 1
    return otherwise or num_launched() == 1


def wait_until_said() -> None:
    """Wait for the main process to report its error, which this process only heard of."""
    with suppress(distributed.DistError):
        if (store := _find_store()) is not None:
            _is_said(store, LONGEST_END)


def _find_store() -> distributed.Store | None:
    """The store that processes can agree through: their process group's or, before they connect, torchrun's."""
    if distributed.is_initialized():
        return _get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return distributed.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))


def _is_said(store: distributed.Store, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not store.check([SAID]):  # its `wait` would print that nothing came
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def tell_launcher(sentence: str) -> None:
    """Let torchrun end its own report with the sentence that gives the reason."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": sentence, "extraInfo": {"py_callstack": sentence, "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": about}), encoding="utf-8")


def ignore_further_signals() -> None:
    """Let a process that is ending report it: the terminal and then torchrun signal each process, twice in all."""
    if num_launched() > 1:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def leave(status: int) -> NoReturn:
    """End one of several processes at once: the threads of a process group can abort an ordinary exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
