"""What reinforcement learning teaches the bundled policies: pass@k before and after, and what changed in the answers.

    python benchmarks/what_rl_teaches.py --run               # everything: two hours on one core
    python benchmarks/what_rl_teaches.py --run --only long_sums     # one case
    python benchmarks/what_rl_teaches.py                     # figure and tables from the committed data

Trains what is not in the directory of runs yet, asks every policy each question once greedily and 256 times by sampling,
and writes benchmarks/results/what_rl_teaches/<case>/: a file for each policy with counts per question, curves.csv,
runs.json and samples.jsonl. All completions are kept in the directory of runs. Then it draws docs/what_rl_teaches.png
and prints the tables of docs/what_rl_teaches.md. The steps of thoughts are read in thoughts.py.
"""

import csv
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from thoughts import MISTAKES, STYLES, first_mistake, steps_of, style_of, terms_of

from common.chat import decode, encode_prompt
from common.evaluate import EVALUATION
from common.sampling import sample
from common.tasks import arithmetic as task

from common.plumbing.config import RunConfig
from common.plumbing.data import read_rows
from common.plumbing.loading import load_policy

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "what_rl_teaches"
NUM_SAMPLES = 256
SEEDS = (0, 1, 2)
LONG = ("--data", "data/long_sums.jsonl", "--eval-data", "data/long_sums_heldout.jsonl", "--completion-prefix", "<think>",
        "--lr", "1e-4", "--kl-weight", "0", "--eval-prompts", "96", "--eval-every", "20", "--checkpoint-every", "0",
        "--samples-every", "0")  # fmt: skip
AGAIN = ("--model", "tiny", "--num-copying", "0", "--num-answering", "0", "--checkpoint-every", "0")


@dataclass(frozen=True)
class Asked:
    """A policy, and how it is asked."""

    case: str  # directory of the results
    name: str
    train: tuple[str, ...] = ()  # script and flags that make it; none: the bundled policy as it is
    data: str = "data/long_sums_heldout.jsonl"
    num_questions: int = 192
    prefix: str = "<think>"  # what every completion is made to begin with
    max_new_tokens: int = 224

    def place(self, runs_dir: str) -> Path:
        return Path(runs_dir) / self.train[0].partition("/")[0] / f"{self.case}-{self.name}"


BUNDLED = {"case": "bundled", "data": "data/math_tasks_heldout.jsonl", "num_questions": 128, "max_new_tokens": 96}
POLICIES = (
    Asked(name="before", prefix="", **BUNDLED),
    Asked(name="before, made to think", **BUNDLED),
    *(
        Asked(name=f"after-{s}", prefix="", train=("experiment_base/train.py", "--seed", f"{s}"), **BUNDLED)
        for s in SEEDS
    ),
    Asked("long_sums", "before"),
    *(
        Asked("long_sums", f"after-{s}",
              ("experiment_base/train.py", *LONG, "--at-most", "num_terms=7", "--max-new-tokens", "160", "--seed", f"{s}"))
        for s in SEEDS
    ),
    *(
        Asked("longer_sums", f"after-{s}",
              ("experiment_base/train.py", *LONG, "--max-new-tokens", "224", "--seed", f"{s}"))
        for s in SEEDS
    ),
    # lesson 2 of the warm start again, with supervision: as many rows and updates as reinforcement learning had, or more
    Asked("long_sums", "lesson-again", ("experiment_sft/train.py", *AGAIN, "--num-reasoning", "10240", "--lr", "1e-4",
                                        "--tokens-per-batch", "12288", "--warmup-steps", "5")),
    Asked("long_sums", "lesson-again-longer", ("experiment_sft/train.py", *AGAIN, "--num-reasoning", "30720")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config:
    run: bool = False  # train and sample what is not there yet; otherwise only draw and print
    only: tuple[str, ...] = ()  # with --run: cases, or case/policy; none: all
    runs_dir: str = "runs/what_rl_teaches"  # where runs and completions are kept


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    for asked in POLICIES:
        if config.run and (not config.only or {asked.case, f"{asked.case}/{asked.name}"} & set(config.only)):
            train(config, asked)
            ask(config, asked)


def train(config: Config, asked: Asked) -> None:
    """In a process of its own with one thread; a run that is there already is kept."""
    if not asked.train or (asked.place(config.runs_dir) / "summary.json").exists():
        return
    place = asked.place(config.runs_dir)
    command = [sys.executable, *asked.train, "--runs-dir", config.runs_dir, "--name", place.name]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def completions_path(config: Config, asked: Asked) -> Path:
    return Path(config.runs_dir) / "completions" / asked.case / f"{asked.name}.jsonl.gz"


def ask(config: Config, asked: Asked) -> None:
    """Keep all completions of a policy: of each question the greedy one, as sample -1, and those that are sampled."""
    path = completions_path(config, asked)
    if path.exists():
        return
    torch.set_num_threads(1)
    model = str(asked.place(config.runs_dir) / "final") if asked.train else "tiny"
    exact = {"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa"}
    policy = load_policy(RunConfig(model=model, completion_prefix=asked.prefix or None, **exact))
    rows = read_rows(str(ROOT / asked.data), task.FIELDS)[: asked.num_questions]
    prompts = [encode_prompt(policy.tokenizer, task.messages(row)) for row in rows]
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


if __name__ == "__main__":
    main()
