"""The speedrun: the processor seconds that a train.py needs until the bundled policy is right nine times in ten.

    python benchmarks/speedrun.py experiment_base/train.py                  # five seeds that nobody knew before
    python benchmarks/speedrun.py --seeds 0 -- my_train.py --lr 2e-4        # one of your own, to try a file and flags
    python benchmarks/speedrun.py --title "high rate" -- my_train.py --lr 2e-4    # and keep the result

docs/speedrun.md has the rules and the table. Each seed has its own folder, with a copy of the code, the training
questions and the first weights. There the entry trains in its own process (speedrun_child.py), on one core. It's
stopped while a checkpoint is evaluated here, on the held-out questions, which it doesn't have.
"""

import compileall
import hashlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil
import torch
import tyro

from common.errors import UserError
from common.evaluate import evaluate
from viewer.results import write_json

from harness.base.config import ROOT, TINY_POLICY, ModelConfig, RunConfig
from harness.base.machine import describe_machine
from harness.base.terminal import say
from harness.models.loading import load_policy
from harness.run.start import run_main
from harness.task.task import load_task

RESULTS = ROOT / "benchmarks" / "results" / "speedrun.json"
CHILD = ROOT / "benchmarks" / "speedrun_child.py"
QUESTIONS, WEIGHTS = "data/math_tasks.jsonl", "model.safetensors"
FILES = {  # SHA-256: scores are about the same start, the same questions and the same finish
    QUESTIONS: "77c4426450807ab07891a64fcc64b22543ceb8807bc8e6e6570bf7bc40164a0e",
    "data/math_tasks_heldout.jsonl": "c00d58637a58bf41aab71d2dea7903a52de9534fa43410322ec2a3ad650fc9d8",
    f"data/policies/tiny_policy/{WEIGHTS}": "c678932c6779a30160c45067fbe4f312bacc7333e87eac88110cae1d10c3a601",
    "data/policies/tiny_policy/tokenizer.json": "26b6a70ab2cea365f6585ec3b4f723e60a80e853d5372aef8926eca4b7b0af60",
}
PACKAGES = ("common", "fast", "harness", "tasks", "viewer")  # which an entry may use
# An entry's own flags follow, and may replace these; then come --seed and --runs-dir
FLAGS = f"--data {QUESTIONS} --eval-prompts 1 --eval-every 0 --checkpoint-every 10 --keep-checkpoints 10000"
POLL = 0.02  # seconds
FAR = 0.05  # three standard errors of 64 questions with 8 answers each


@dataclass(frozen=True)
class Contest:
    accuracy: float = 0.9  # sampled at temperature 1, on held-out questions
    seconds: float = 300.0  # of the processor, for each seed
    questions: int = 512  # held-out ones
    samples: int = 8  # of each


@dataclass(frozen=True, kw_only=True)
class Config:
    entry: tyro.conf.Positional[Path]  # a train.py; Python files beside it are copied with it
    flags: tyro.conf.Positional[tuple[str, ...]] = ()  # its flags, after --
    seeds: tuple[int, ...] = ()  # none: five, drawn now
    title: str | None = None  # keep the result under this name, in benchmarks/results/speedrun.json


class RefusedError(Exception):
    """Why an entry has no score, in one sentence."""


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if not config.entry.is_file():
        raise UserError(f"{config.entry} is no file: name the train.py of the entry")
    for name, wanted in FILES.items():
        if hashlib.sha256((ROOT / name).read_bytes()).hexdigest() != wanted:
            raise UserError(f"{name} is not the contest's: restore it, its SHA-256 must be {wanted}")
    torch.set_num_threads(1)
    machine = describe_machine()  # now: the results change the checkout
    runs = []
    for seed in config.seeds or [secrets.randbelow(2**32) for _ in range(5)]:
        try:
            runs.append({"seed": seed} | race(config.entry, config.flags, seed))
        except RefusedError as error:
            sys.exit(f"seed {seed}: no score: {error}")
        shown = ", ".join(f"{name}: {accuracy:.3f} at {seconds:.1f} s" for name, seconds, accuracy in runs[-1]["tried"])
        say(f"seed {seed}: {runs[-1]['seconds']:.1f} processor seconds ({shown})")
    say(f"score: {fmean(run['seconds'] for run in runs):.1f} processor seconds, mean of {len(runs)} seeds")
    if config.title:
        entry = os.path.relpath(config.entry.resolve(), ROOT)
        kept = {"entry": entry, "flags": shlex.join(config.flags), "runs": runs, **machine}
        write_json(RESULTS, kept, config.title)
        say(table())


def race(entry: Path, flags: Sequence[str], seed: int, contest: Contest = Contest()) -> dict:
    """Train with one seed, until a checkpoint is good enough.

    Returns:
        `seconds` of the processor until then, and `tried`: name, seconds and accuracy of every checkpoint.

    Raises:
        RefusedError: the entry ended before, used up its time, or broke a rule.
    """
    with tempfile.TemporaryDirectory(prefix="speedrun_") as name:
        folder = Path(name).resolve()
        script, log = make_folder(entry, folder), folder / "log.txt"
        words = [*FLAGS.split(), *flags, "--seed", str(seed), "--runs-dir", "runs"]
        places = {"HOME": name, "TMPDIR": name, "PYTHONPATH": f"{script.parent}{os.pathsep}{name}"}
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
        with log.open("wb") as output:
            process = psutil.Popen(
                [sys.executable, "-P", str(CHILD), name, str(script), *words],
                cwd=folder,
                env=os.environ | places | settings,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            return follow(process, folder, seed, contest)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def make_folder(entry: Path, folder: Path) -> Path:
    """The copy in which an entry trains; returns the path of its train.py there."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copytree(TINY_POLICY, folder / TINY_POLICY.relative_to(ROOT))
    shutil.copyfile(ROOT / QUESTIONS, folder / QUESTIONS)
    own = folder / "entry" / entry.resolve().parent.name
    own.mkdir(parents=True)
    for path in entry.parent.glob("*.py"):
        shutil.copyfile(path, own / path.name)
    compileall.compile_dir(folder, quiet=2)
    return own / entry.name


def follow(process: psutil.Popen, folder: Path, seed: int, contest: Contest) -> dict:
    """Watch an entry's process, and evaluate its checkpoints in their order; see `race`."""
    start, tried = None, {}  # the clock starts when the process has stopped itself
    for _ in range(int(10 * contest.seconds / POLL)):  # of waiting, in which an entry need not compute
        time.sleep(POLL)
        if process.poll() is not None:
            said = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RefusedError(f"it ended too early{best_of(tried)}; it said: {said[-1] if said else 'nothing'}")
        if start is None:
            if process.status() == psutil.STATUS_STOPPED:
                start = spent(process)
                process.resume()
            continue
        found = {path.name: path for path in folder.glob("runs/*/*/checkpoints/step_*") if path.suffix != ".partial"}
        new = sorted(found.keys() - tried.keys(), key=lambda name: (len(name), name))
        if new:
            process.suspend()
        seconds = spent(process) - start
        if process.children():
            raise RefusedError("it started another process")
        if seconds > contest.seconds:
            break
        for name in new:
            tried[name] = [seconds, accuracy_of(found[name] / WEIGHTS, folder, seed, contest)]
            if tried[name][1] >= contest.accuracy:
                return {"seconds": seconds, "tried": [[name, *values] for name, values in tried.items()]}
        if new:
            process.resume()
    raise RefusedError(f"it used up its time{best_of(tried)}")


def best_of(tried: dict[str, list[float]]) -> str:
    name = max(tried, key=lambda name: tried[name][1], default=None)
    return f", with an accuracy of {tried[name][1]:.3f} at {name}" if name else " without any checkpoint"


def spent(process: psutil.Popen) -> float:
    """Processor seconds of all its threads, and of its children that have ended."""
    return sum(process.cpu_times()[:4])


def accuracy_of(weights: Path, folder: Path, seed: int, contest: Contest) -> float:
    """Sampled accuracy of these weights in the bundled policy, whose configuration, tokenizer and template are ours.

    Weights that are worse by `FAR` on the first eighth of the questions aren't asked the others.
    """
    if not weights.resolve().is_relative_to(folder) or not weights.is_file():
        raise RefusedError(f"{weights.parent.name} has no {WEIGHTS} of its own; adapters aren't read")
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(TINY_POLICY, place, dirs_exist_ok=True)
        shutil.copyfile(weights, Path(place) / WEIGHTS)
        try:
            policy = load_policy(ModelConfig(model=place, device="cpu"))
            task = load_task(RunConfig(eval_prompts=contest.questions))
            settings = {"max_new_tokens": 96, "num_samples": contest.samples, "seed": seed}
            for rows in (task.eval_rows[: contest.questions // 8], task.eval_rows):
                accuracy = evaluate(policy, rows, task, **settings).metrics["sampled/accuracy"]
                if accuracy < contest.accuracy - FAR:
                    break
            return accuracy
        except (UserError, RuntimeError, ValueError) as error:
            raise RefusedError(f"the weights of {weights.parent.name} can't be used: {error}") from error


def read_results() -> dict:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def table() -> str:
    """All entries that are kept, the fastest first."""
    lines = ["| | entry | flags | score | each seed | commit |", "|---|---|---|---|---|---|"]
    entries = {title: [run["seconds"] for run in kept["runs"]] for title, kept in read_results().items()}
    for title in sorted(entries, key=lambda title: fmean(entries[title])):
        kept, seconds = read_results()[title], entries[title]
        each = ", ".join(f"{x:.1f}" for x in seconds)
        cells = [
            title,
            f"`{kept['entry']}`",
            f"`{kept['flags']}`" if kept["flags"] else "",
            f"**{fmean(seconds):.1f}**",
        ]
        lines.append(f"| {' | '.join([*cells, each, kept['commit']])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
