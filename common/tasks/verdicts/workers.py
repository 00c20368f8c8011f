"""Processes that ask math-verify, with a limit on what a verdict and what all of them together may take.

The library is not safe in threads, some inputs keep it busy for good, and a process that is forked from a run would
share its accelerator: so each process is a new Python that imports neither torch nor the program that runs.
"""

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from common.errors import UserError

MOST_WORKERS = 4
VERDICT_SECONDS = 0.5  # of a worker's processor time, for one verdict
SECONDS_PER_THOUSAND = 1.0  # of each worker's processor time: the allowance of a thousand pairs, and of fewer
START_SECONDS = 120.0  # for a process to import the library, on a busy machine
HUNG_SECONDS = 20.0  # of the clock, without a verdict; a worker limits its own processor time to far less
WORKER = Path(__file__).with_name("worker.py")

Pair = tuple[str, str]  # gold, answer


def num_workers() -> int:
    """One for each core that a process of the run has to itself: at least one, at most `MOST_WORKERS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return max(1, min(MOST_WORKERS, cores // max(1, int(processes) if processes.isdigit() else 1)))


class Worker:
    """A process, and the pair that it is asked about."""

    def __init__(self):
        # -P: no directory of this package is searched for modules, one of which is called math
        command = [sys.executable, "-P", str(WORKER), str(VERDICT_SECONDS)]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        # a session of its own: Ctrl-C in the terminal does not reach it
        self.process = subprocess.Popen(command, **streams, bufsize=0, start_new_session=True)
        self.is_ready = False
        self.pair: Pair | None = None
        self.last_gold = ""
        self.since = time.monotonic()
        self._received = b""

    def ask(self, pair: Pair) -> None:
        self.pair, self.last_gold, self.since = pair, pair[0], time.monotonic()
        with suppress(BrokenPipeError):  # it has ended, which is seen when its answer is read
            self.process.stdin.write(json.dumps(pair).encode() + b"\n")

    def receive(self) -> list | dict | None:
        """What it has written, if that is a whole line.

        Raises:
            EOFError: it has ended.
        """
        part = os.read(self.process.stdout.fileno(), 1 << 16)
        if not part:
            raise EOFError
        self._received += part
        if not self._received.endswith(b"\n"):
            return None
        line, self._received = self._received, b""
        return json.loads(line)

    def is_overdue(self) -> bool:
        waits_for_it = self.pair is not None or not self.is_ready
        return waits_for_it and time.monotonic() - self.since > (HUNG_SECONDS if self.is_ready else START_SECONDS)

    def end(self) -> int:
        """End it, whatever it does; its status."""
        with suppress(OSError):
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                stream.close()
        return self.process.wait()


class Workers:
    """Several workers, started at once and, if one ends, again."""

    def __init__(self, number: int | None = None):
        self._owner = os.getpid()
        self._workers = [Worker() for _ in range(number or num_workers())]
        self._failed_starts = 0
        self.num_replaced = 0
        atexit.register(self.close)

    def belongs_here(self) -> bool:
        """Whether this is the process that started them, and not a fork of it."""
        return self._owner == os.getpid()

    def close(self) -> None:
        if self.belongs_here():
            for worker in self._workers:
                worker.end()

    def judge(self, pairs: list[Pair]) -> tuple[dict[Pair, bool | None], float]:
        """The verdict on every pair, None where there is none, and the processor seconds that they took.

        When the allowance of all pairs is used up, the pairs that are left have no key in the result.
        """
        allowance = SECONDS_PER_THOUSAND * max(1.0, len(pairs) / 1000) * len(self._workers)
        waiting: dict[str, list[str]] = {}
        for gold, answer in sorted(pairs, key=_effort, reverse=True):  # the last of a list is taken first
            waiting.setdefault(gold, []).append(answer)
        verdicts: dict[Pair, bool | None] = {}
        losses: Counter[Pair] = Counter()
        spent = 0.0
        try:
            while True:
                is_open = spent < allowance
                for worker in self._workers:
                    if waiting and is_open and worker.is_ready and worker.pair is None:
                        worker.ask(_next(waiting, worker.last_gold))
                if not (waiting and is_open) and all(worker.pair is None for worker in self._workers):
                    return verdicts, spent
                spent += self._receive(verdicts, waiting, losses)
        except BaseException:  # Ctrl-C: what a worker still answers would be taken for another pair's verdict
            for index, worker in enumerate(self._workers):
                if worker.pair is not None:
                    worker.end()
                    self._workers[index] = Worker()
            raise

    def _receive(self, verdicts: dict, waiting: dict, losses: Counter) -> float:
        """Wait for whatever a worker says, and note it; the processor seconds that it tells of."""
        spent = 0.0
        with selectors.DefaultSelector() as selector:
            for index, worker in enumerate(self._workers):
                selector.register(worker.process.stdout, selectors.EVENT_READ, index)
            ready = {key.data for key, _ in selector.select(timeout=1.0)}
        for index, worker in enumerate(self._workers):
            try:
                message = worker.receive() if index in ready else None
                if index not in ready and worker.is_overdue():  # it may have answered while this process was away
                    raise EOFError
            except (EOFError, OSError, json.JSONDecodeError):
                spent += self._replace(index, verdicts, waiting, losses)
                continue
            if isinstance(message, dict):
                if "error" in message:
                    raise UserError(
                        f"math-verify is installed but cannot be imported ({message['error']}): reinstall it"
                    )
                worker.is_ready, self._failed_starts = True, 0
            elif message is not None and worker.pair is not None:
                verdicts[worker.pair], worker.pair = message[0], None
                spent += message[1]
        return spent

    def _replace(self, index: int, verdicts: dict, waiting: dict, losses: Counter) -> float:
        """Start another worker for one that has ended or has to be ended; its pair is tried once more, unless too long.

        Raises:
            UserError: workers end before they are ready, again and again.
        """
        worker, was_overdue = self._workers[index], self._workers[index].is_overdue()
        status = worker.end()
        self.num_replaced += 1
        self._failed_starts += not worker.is_ready
        if self._failed_starts > 2 * len(self._workers):
            raise UserError(f"the processes that compare answers end as soon as they are started (status {status})")
        took_too_long = was_overdue or status == -signal.SIGVTALRM
        self._workers[index] = Worker()
        if worker.pair is None:
            return 0.0
        losses[worker.pair] += 1
        if took_too_long or losses[worker.pair] > 1:
            verdicts[worker.pair] = None
        else:
            waiting.setdefault(worker.pair[0], []).append(worker.pair[1])
        return 2 * VERDICT_SECONDS if took_too_long else 0.0  # the processor time after which a worker ends itself


def _effort(pair: Pair) -> tuple[int, int]:
    """What is judged late: powers of powers and factorials may be huge numbers; long texts take long to read."""
    return pair[1].count("^") + pair[1].count("!"), len(pair[1])


def _next(waiting: dict[str, list[str]], last_gold: str) -> Pair:
    """A pair with the gold that the worker has read already, or else with another one; it waits no longer."""
    gold = last_gold if last_gold in waiting else next(iter(waiting))
    answer = waiting[gold].pop()
    if not waiting[gold]:
        del waiting[gold]
    return gold, answer
