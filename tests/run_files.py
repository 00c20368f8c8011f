"""Helpers for tests of whole runs: reading a run's files, and starting programs and waiting for them."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 300  # seconds after which a program counts as hung; on busy cores a start alone takes a minute


def read_lines(path: Path) -> list[dict]:
    """The rows of a JSONL file, by a parser that refuses NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{path} holds {constant}, which is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def rows_of(directory: Path, name: str = "metrics") -> list[dict]:
    return read_lines(directory / f"{name}.jsonl")


def metrics_of(directory: Path) -> list[dict]:
    """Without time and memory, which vary from run to run."""
    return [{key: row[key] for key in row if not key.startswith(("time/", "memory/"))} for row in rows_of(directory)]


def json_of(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def write_rows(path: str | Path, rows: list) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(directory: Path) -> dict[str, object]:
    """All that a run has written: by file weights, states and rows, without what differs from run to run."""
    measured = {"seconds", "tokens_per_second", "peak_memory_bytes", "processes", "script", "commit"}
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    kept = (".safetensors", ".pt", ".bin", ".distcp", "before.json", "tokens.jsonl", "diagnosis.jsonl")
    found: dict[str, object] = {name: digest(path) for name, path in files.items() if name.endswith(kept)}
    found["metrics"] = metrics_of(directory)
    found["samples"] = rows_of(directory, "samples") if "samples.jsonl" in files else []
    found["summary"] = {key: x for key, x in json_of(directory / "summary.json").items() if key not in measured}
    found["events"] = {key: x for key, x in events_of(directory).items() if not key.startswith(("time/", "memory/"))}
    return found


def events_of(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of all points that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def finished(*arguments: str | Path, **settings) -> subprocess.CompletedProcess:
    """`python <arguments>`, after it has ended."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, **{"capture_output": True, "text": True, "timeout": PATIENCE} | settings)


def launch(num_processes: int, *arguments: str | Path, **environment: str) -> None:
    """`torchrun <arguments>`, which must succeed; its processes can import the same modules as tests."""
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes))
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    result = finished(*command, *arguments, cwd=ROOT, env=os.environ | paths | environment)
    assert result.returncode == 0, result.stderr[-3000:]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, f"it ended too early: {process.communicate()}"
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.01)
