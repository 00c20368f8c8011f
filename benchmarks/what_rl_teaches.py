"""What reinforcement learning teaches the bundled policies: pass@k before and after, and what changed in the answers.

    python benchmarks/what_rl_teaches.py --run               # everything: two hours on one core
    python benchmarks/what_rl_teaches.py --run --only long_sums     # one case
    python benchmarks/what_rl_teaches.py                     # figure and tables from the committed data

Trains what is not in the directory of runs yet, asks every policy each question once greedily and 256 times by
sampling, and keeps all completions in the directory of runs. Writes counts per question (counts.json), some of the
completions (samples.jsonl) and the runs (metrics.csv and runs.json; Countdown's, with all of their metrics, in
countdown/) into benchmarks/results/what_rl_teaches/. teaches_page.py draws the figure and makes the tables of
docs/what_rl_teaches.md; the steps of thoughts are read in thoughts.py.
"""

import gzip
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import tyro
from teaches_page import COUNTS, RESULTS, draw, read_results, tables
from thoughts import first_mistake, keeps_order, steps_of, style_of, terms_of

from common.chat import decode, encode_prompt
from common.evaluate import EVALUATION
from common.sampling import sample
from viewer.groups import read_run
from viewer.results import keep_runs, write_json

from harness.base.config import RunConfig
from harness.data.data import read_rows
from harness.models.loading import load_policy

ROOT = Path(__file__).resolve().parent.parent
NUM_SAMPLES = 256
KEPT_QUESTIONS = 6  # whose answers are shown in samples.jsonl: one of each length
SEEDS = (0, 1, 2)
COLUMNS = ("reward/correct", "completion/length", "policy/entropy", "loss/grad_norm", "group/zero_reward_variance",
           "eval/greedy/accuracy", "loss/total")  # fmt: skip
LONG = ("--data", "data/long_sums.jsonl", "--eval-data", "data/long_sums_heldout.jsonl", "--completion-prefix",
        "<think>", "--lr", "1e-4", "--kl-weight", "0", "--eval-prompts", "96", "--eval-every", "20",
        "--checkpoint-every", "0", "--samples-every", "0")  # fmt: skip
UP_TO_7 = ("--at-most", "num_terms=7", "--max-new-tokens", "160")
UP_TO_10 = ("--max-new-tokens", "224")
COUNTDOWN = ("--model", "tiny_countdown", "--task", "countdown", "--steps", "100", "--prompts-per-step", "32",
             "--group-size", "16", "--lr", "3e-4", "--kl-weight", "0", "--max-new-tokens", "56")  # fmt: skip
AGAIN = ("--model", "tiny", "--num-copying", "0", "--num-answering", "0", "--checkpoint-every", "0")


@dataclass(frozen=True)
class Asked:
    """A policy, and how it is asked."""

    case: str  # questions, and what is trained on
    name: str
    train: tuple[str, ...] = ()  # script and flags that make it; none: the bundled policy as it is
    data: str = "data/long_sums_heldout.jsonl"
    num_questions: int = 192  # the first ones of the file
    prefix: str = "<think>"  # what every completion is made to begin with
    max_new_tokens: int = 224
    task: str = "arithmetic"  # a file of tasks
    model: str = "tiny"  # without `train`
    run: str | None = None  # name of the run; None: <case>-<name>

    def place(self, runs_dir: str) -> Path:
        return Path(runs_dir) / self.train[0].partition("/")[0] / (self.run or f"{self.case}-{self.name}")

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"tasks.{self.task}")

    def rows(self) -> list[dict]:
        return read_rows(str(ROOT / self.data), self.module.FIELDS)[: self.num_questions]


def policies() -> Iterator[Asked]:
    short = {"data": "data/math_tasks_heldout.jsonl", "num_questions": 128, "max_new_tokens": 96}
    base = "experiment_base/train.py"
    yield Asked("bundled", "before", prefix="", **short)
    yield Asked("bundled", "made-to-think", **short)
    for seed in SEEDS:
        yield Asked("bundled", f"after-{seed}", (base, "--seed", f"{seed}"), prefix="", **short)
    yield Asked("long_sums", "before")
    for seed in SEEDS:
        yield Asked("long_sums", f"after-{seed}", (base, *LONG, *UP_TO_7, "--seed", f"{seed}"))
    for seed in SEEDS:
        yield Asked("longer_sums", f"after-{seed}", (base, *LONG, *UP_TO_10, "--seed", f"{seed}"))
    # Lesson 2 of the warm start again: as many rows as reinforcement learning has completions, in 66 updates
    matched = ("--num-reasoning", "10240", "--lr", "1e-4", "--tokens-per-batch", "12288", "--warmup-steps", "5")
    yield Asked("long_sums", "lesson-again", ("experiment_sft/train.py", *AGAIN, *matched))
    relearned = ("--model", "{runs}/experiment_sft/long_sums-lesson-again/final")
    yield Asked("longer_sums", "lesson-again-then-0", (base, *relearned, *LONG, *UP_TO_10, "--seed", "0"))
    search = {"data": "data/countdown_tasks_heldout.jsonl", "num_questions": 128, "prefix": "", "max_new_tokens": 56}
    search |= {"model": "tiny_countdown", "task": "countdown"}
    yield Asked("countdown_56", "before", **search)
    for seed in SEEDS:
        run = f"countdown-after-{seed}"
        yield Asked("countdown_56", f"after-{seed}", (base, *COUNTDOWN, "--seed", f"{seed}"), run=run, **search)


@dataclass(frozen=True, kw_only=True)
class Config:
    run: bool = False  # train and sample what is not there yet; otherwise only draw and print
    only: tuple[str, ...] = ()  # with --run: cases, or case/policy; none: all
    runs_dir: str = "runs/what_rl_teaches"  # where runs and completions are kept


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    for asked in policies():
        if config.run and (not config.only or {asked.case, f"{asked.case}/{asked.name}"} & set(config.only)):
            train(config, asked)
            ask(config, asked)
            collect(config, asked)
    results = read_results()
    draw(results)
    for name, lines in tables(results).items():
        print(f"{name}\n\n{lines}\n")


def train(config: Config, asked: Asked) -> None:
    """In a process of its own with one thread; a run that is there already is kept."""
    place = asked.place(config.runs_dir) if asked.train else None
    if place is None or (place / "summary.json").exists():
        return
    script, *flags = (part.replace("{runs}", config.runs_dir) for part in asked.train)
    command = [sys.executable, script, *flags, "--runs-dir", config.runs_dir, "--name", place.name]
    print(shlex.join(command[1:]), flush=True)
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def completions_path(config: Config, asked: Asked) -> Path:
    return Path(config.runs_dir) / "completions" / asked.case / f"{asked.name}.jsonl.gz"


def ask(config: Config, asked: Asked) -> None:
    """Keep all completions of a policy: of each question the greedy one, as sample -1, and those that are sampled."""
    path = completions_path(config, asked)
    if path.exists():
        return
    torch.set_num_threads(1)
    model = str(asked.place(config.runs_dir) / "final") if asked.train else asked.model
    exact = {"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa"}
    policy = load_policy(RunConfig(model=model, completion_prefix=asked.prefix or None, **exact))
    prompts = [encode_prompt(policy.tokenizer, asked.module.messages(row)) for row in asked.rows()]
    started = time.perf_counter()
    settings = {"max_new_tokens": asked.max_new_tokens, "key": (0, EVALUATION), "generation_batch_size": NUM_SAMPLES}
    drawn = [(-1, x) for x in sample(policy, prompts, 1, greedy=True, **settings)]
    drawn += [(x.completion_index, x) for x in sample(policy, prompts, NUM_SAMPLES, **settings)]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with gzip.open(new, "wt", encoding="utf-8", compresslevel=4) as file:
        for index, x in drawn:
            text = decode(policy.tokenizer, x.completion_ids)  # with the prefix
            entry = [x.prompt_index, index, text, x.num_action_tokens, x.finish_reason == "stop"]
            file.write(json.dumps(entry) + "\n")
    new.rename(path)
    print(f"{asked.case}/{asked.name}: {len(drawn)} completions in {time.perf_counter() - started:.0f} s", flush=True)


def collect(config: Config, asked: Asked) -> None:
    """Write the counts per question, the curve of the run, and some of the completions."""
    rows, task = asked.rows(), asked.module
    with gzip.open(completions_path(config, asked), "rt", encoding="utf-8") as file:
        completions = [json.loads(line) for line in file]
    kind = "num_numbers" if asked.task == "countdown" else "num_terms"
    counts: dict[str, list[int]] = {"num_terms": [row[kind] for row in rows]}

    def count(name: str, question: int, number: int = 1) -> None:
        counts.setdefault(name, [0] * len(rows))[question] += number

    for question, index, text, length, has_stopped in completions:
        right = int(task.reward(rows[question], text)["correct"])
        is_sum = asked.task == "arithmetic"
        found = describe(rows[question], text, right) if is_sum else task.describe(rows[question], text)
        if index < 0:
            count("greedy/right", question, right)
            continue
        count("right", question, right)
        count("length", question, length)
        count("cut_off", question, not has_stopped)
        for name, number in found.items():
            count(name, question, int(number))
    about = {name: getattr(asked, name) for name in ("data", "prefix", "max_new_tokens")}
    about |= {"samples": NUM_SAMPLES} | describe_run(config, asked)
    write_json(COUNTS, {"about": about, **counts}, entry=f"{asked.case}/{asked.name}")
    keep_samples(RESULTS / "samples.jsonl", asked, rows, completions)


def describe(row: dict, text: str, right: int) -> dict[str, int]:
    """What to count in one completion, by name."""
    steps = steps_of(text)
    work = [step for step in steps if not step.is_check]
    numbers = {"steps": len(work), "steps/wrong": sum(step.is_wrong for step in work)}
    wrong_checks = sum(step.is_wrong for step in steps if step.is_check)
    numbers |= {"checks": len(steps) - len(work), "checks/wrong": wrong_checks}
    terms = [] if re.search(r"\*|times|Multiply|product", row["question"]) else terms_of(row["question"])
    style = style_of(steps, terms) if steps else "direct"
    numbers |= {f"style/{style}": 1, f"style/{style}/right": right}
    if row["num_terms"] > 4:
        mistake = first_mistake(text, terms)
        numbers |= {f"mistake/{mistake}": 1, "right/with mistake": right * (mistake != "none")}
        numbers["another order"] = int(mistake == "none" and not keeps_order(text, terms))
    return numbers


def describe_run(config: Config, asked: Asked) -> dict:
    """How the policy was made: command, commit, machine, seconds; its run is kept."""
    if not asked.train:
        return {"policy": f"the bundled policy {asked.model} as it is"}
    place = asked.place(config.runs_dir)
    run = read_run(place)
    if asked.case == "countdown_56":
        keep_runs(RESULTS / "countdown", [run])
    else:
        keep_runs(RESULTS, [run], COLUMNS)
    command = shlex.join(asked.train).replace("{runs}", Config.runs_dir)
    about = run.config | (run.summary or {"seconds": None})  # None: interrupted after its policy was saved
    return {"command": command} | {key: about[key] for key in ("commit", "machine", "seconds")}


def keep_samples(path: Path, asked: Asked, rows: list[dict], completions: list[list]) -> None:
    """The greedy answer and two sampled ones to each of the first questions, as they are."""
    old = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    kept = [line for line in old if (line["case"], line["policy"]) != (asked.case, asked.name)]
    for question, index, text, *_ in completions:
        if question < KEPT_QUESTIONS and index < 2:
            asked_for = asked.module.messages(rows[question])[-1]["content"]
            what = {"case": asked.case, "policy": asked.name, "question": asked_for, "sample": index}
            kept.append(what | {"correct": asked.module.reward(rows[question], text)["correct"], "text": text})
    path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


if __name__ == "__main__":
    main()
