r"""What the bundled policy has forgotten of lesson 2: its loss on rows of that lesson, beside the loss at that time.

The weights at the end of lesson 2 were not kept, but the loss of every step was (seed0 of experiment_sft/results). Each
row was seen once, so that this was the loss on new rows. Here the batches of the last steps of lesson 2 are made again,
and other policies are evaluated on them, without the first token: whether to think is no matter of skill.

    PYTHONPATH=experiment_sft python benchmarks/forgotten.py \
        runs/what_rl_teaches/experiment_sft/long_sums-lesson-again/final     # five minutes

Writes the entry forgotten of benchmarks/results/what_rl_teaches/counts.json. Losses are in nats per token, separately
for batches of long sums (at least nine of ten rows are sums of five to seven numbers) and for the others.
"""

import importlib.util
import itertools
import json
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import tyro

from common.experience import collate
from common.policy import Policy
from common.trajectory import Trajectory
from viewer.results import read_json, read_runs, write_json

from harness.base.config import RunConfig
from harness.models.loading import load_policy

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "benchmarks" / "results" / "what_rl_teaches" / "counts.json"
RUN = read_runs(ROOT / "experiment_sft" / "results")["seed0"]
NUM_WINDOWS = 3  # of experiment_sft, the last ones that are wholly in lesson 2


@dataclass(frozen=True, kw_only=True)
class Config:
    policies: tyro.conf.Positional[tuple[str, ...]] = ()  # others than the bundled one
    threads: int = 1  # CPU threads


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(config.threads)
    sft = load_sft()
    exact = {"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa"}
    policies = {name: load_policy(RunConfig(model=name, **exact)) for name in ("tiny", *config.policies)}
    steps = last_steps(sft, policies["tiny"])
    logged = RUN.metrics.rows
    losses = {"at the end of lesson 2": [logged[step - 1]["loss/total"] for step in steps]}
    for name, policy in policies.items():
        label = "bundled" if name == "tiny" else Path(name).parent.name
        losses[label] = [loss(policy, batch) for batch, _ in steps.values()]
    is_long = [share >= 0.9 for _, share in steps.values()]
    found = {
        label: {
            kind: sum(x for x, long in zip(values, is_long, strict=True) if long == which) / is_long.count(which)
            for kind, which in (("long sums", True), ("others", False))
        }
        for label, values in losses.items()
    }
    correlation = torch.corrcoef(torch.tensor([losses["at the end of lesson 2"], losses["bundled"]]))[0, 1].item()
    about = {
        "steps": [min(steps), max(steps)],
        "batches of long sums": is_long.count(True),
        "others": is_long.count(False),
    }
    about["correlation of the logged losses with those of the bundled policy, over batches"] = correlation
    write_json(OUTPUT, {"about": about, "loss": found}, entry="forgotten")
    print(json.dumps(read_json(OUTPUT, "forgotten"), indent=1))


def load_sft() -> ModuleType:
    """experiment_sft/train.py, which imports what is beside it."""
    if importlib.util.find_spec("warm_start") is None:
        sys.exit("error: the lessons are in experiment_sft: start this with PYTHONPATH=experiment_sft")
    spec = importlib.util.spec_from_file_location("train", ROOT / "experiment_sft" / "train.py")
    module = sys.modules["train"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def last_steps(sft: ModuleType, policy: Policy) -> dict[int, tuple[list[Trajectory], float]]:
    """By step of the run: its batch, and the share of long sums in it."""
    settings = RUN.config
    sizes = [settings[name] for name in ("num_copying", "num_reasoning", "num_answering")]
    config = sft.Config(**{name: settings[name] for name in ("seed", "tokens_per_batch", "max_length")})
    last = sum(sizes[:2]) // sft.WINDOW * sft.WINDOW  # where the last window of lesson 2 ends
    made = list(itertools.islice(sft.conversations(*sizes, config.seed), last))
    rows = sft.encode_rows(config, policy, made)
    length_of = {row.prompt_index: row for row in rows}
    assert len(length_of) == len(made), "a row was left out"
    found, step = {}, 0
    for start in range(0, last, sft.WINDOW):
        window = list(sft.batches_of_similar_length(rows[start : start + sft.WINDOW], config.tokens_per_batch))
        for index in shuffle(config.seed, start).permutation(len(window)):
            step, batch = step + 1, window[index]
            if start >= last - NUM_WINDOWS * sft.WINDOW:
                questions = [made[row.prompt_index]["messages"][0]["content"] for row in batch]
                found[step] = batch, sum(is_long(question) for question in questions) / len(batch)
    return found


def shuffle(seed: int, start: int) -> np.random.Generator:
    """That of a window's batches in the run, whose commit did not yet give the number of keys to the generator."""
    key = [zlib.crc32(b"minibatches"), seed, 0, start]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def is_long(question: str) -> bool:
    return sum(word.isdigit() for word in "".join(c if c.isdigit() else " " for c in question).split()) > 4


@torch.no_grad()
def loss(policy: Policy, rows: list[Trajectory]) -> float:
    """Mean over the assistant's tokens, of which the first one of each row counts as certain."""
    batch = collate(rows, policy.pad_id, policy.device)
    log_probs = policy(batch.sequences, batch.action_mask).log_probs  # (B, T-1), 0 where the mask is 0
    for row, start in enumerate(batch.prompt_lengths.tolist()):
        log_probs[row, start - 1] = 0.0
    return (-log_probs.sum() / batch.action_mask.sum()).item()


if __name__ == "__main__":
    main()
