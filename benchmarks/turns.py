"""Should later turns reuse the keys and values of earlier ones? Seconds and memory of steps of 2, 4 and 8 turns.

    python benchmarks/turns.py                    # 15 minutes, one thread; writes the entry turns of
                                                  # benchmarks/results/measurements.json

Two ways to continue rows take turns on the same work: each turn runs all ids of every row again, or only those that
the row has gained (common/fast/kept_rows.py). The conversations are forced, so that both ways sample the same tokens:
a prompt of 101 tokens as the calculator's is, then turns whose lengths are drawn from 8 to 40 tokens, each answered by
16 tokens (a calculator) or 100 (results of a search). A row's random numbers force the end-of-turn token, so that rows
leave the batch one after the other, as they do in training. No two rows have the same ids after the first turn, or, as
another extreme, all rows of a group do (a policy that has learned which call to make): they are then run once.

A step is sampling and what follows it, which is the same work for both ways and measured once for both: log-probs of
the reference, forward, backward, AdamW. Times are medians over the rounds, in CPU and in wall-clock seconds; a ratio is
the median of the rounds' ratios. Memory is the peak of a process that only samples once, beyond that of loading.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import torch
import tyro

from common.advantages import STD_EPS, group_advantages, group_std
from common.experience import Experience, collate
from common.fast.kept_rows import KeptRows
from common.fast.matmul import use_fast_products
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, masked_mean, probability_ratio
from common.policy import Policy
from common.sampling import begin_rows, continue_rows
from common.trajectory import Trajectory
from viewer.results import write_json

from harness.base.config import ROOT
from harness.run.machine import describe_machine, peak_memory_bytes

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
GROUP_SIZE, PROMPT_TOKENS = 8, 101
SHORTEST, LONGEST = 8, 40  # tokens of a turn
CONTEXT = 2048  # tokens
WAYS = {"run again": lambda: None, "kept": KeptRows}  # what continue_rows gets


@dataclass(frozen=True, kw_only=True)
class Work:
    """One workload."""

    model: str = "tiny"
    prompts: int = 16
    turns: int = 2
    observation: int = 16  # tokens
    same_calls: bool = False  # the rows of a group have the same ids in all turns


WORKLOADS = [
    *(Work(turns=turns) for turns in (2, 4, 8)),
    *(Work(turns=turns, same_calls=True) for turns in (2, 4)),
    *(Work(model="larger", prompts=2, turns=turns) for turns in (2, 4, 8)),
    *(Work(turns=turns, observation=100) for turns in (2, 4)),
]


@dataclass(frozen=True, kw_only=True)
class Config:
    rounds: int = 3  # each measures both ways, after one of warm-up with two turns
    only: str = ""  # measure, and print, the workloads of this model alone
    memory_of: str | None = None  # used by the program itself: a workload and a way as JSON, to sample it once


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    if config.memory_of:
        work, way = json.loads(config.memory_of)
        print(memory(Work(**work), way))
        return
    results = []
    for work in WORKLOADS:
        if config.only in ("", work.model):
            results.append(asdict(work) | measure(work, config.rounds) | {"memory_mb": memories(work)})
            print(json.dumps({name: value for name, value in results[-1].items() if name != "rounds"}), flush=True)
            if not config.only:
                write_json(RESULTS, {"workloads": results} | describe_machine(), entry="turns")


def measure(work: Work, num_rounds: int) -> dict:
    """Medians, and the seconds of every round: of sampling in each way, and of the rest of the step."""
    policy, reference = make_policy(work.model), make_policy(work.model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-8)
    rounds = []
    for way in WAYS:
        converse(policy, replace(work, turns=2, observation=16), 0, way)  # warm up
    for number in range(1, num_rounds + 1):
        ways = list(WAYS)[:: 1 if number % 2 else -1]  # each way comes first in turn
        seconds, rows = {}, {}
        for way in ways:
            seconds[way], rows[way] = timed(converse, policy, work, number, way)
        check_equal(*(rows[way] for way in WAYS))
        seconds["rest"], _ = timed(train, policy, reference, optimizer, rows["kept"])
        rounds.append(seconds)
    return summary(rounds) | {
        "sampled_tokens": sum(row.num_action_tokens for row in rows["kept"]),
        "tokens": sum(len(row.ids) for row in rows["kept"]),
        "largest_difference_of_log_probs": difference(*(rows[way] for way in WAYS)),
        "rounds": rounds,
    }


def summary(rounds: list[dict]) -> dict:
    found = {}
    for clock in ("cpu", "wall"):
        again, kept, rest = ([entry[part][clock] for entry in rounds] for part in ("run again", "kept", "rest"))
        steps = [(a + c, b + c) for a, b, c in zip(again, kept, rest, strict=True)]
        found[clock] = {
            "sampling, run again": round(median(again), 3),
            "sampling, kept": round(median(kept), 3),
            "rest of the step": round(median(rest), 3),
            "ratio of sampling": round(median(b / a for a, b in zip(again, kept, strict=True)), 3),
            "ratio of steps": round(median(b / a for a, b in steps), 3),
            "ratios of steps": [round(b / a, 3) for a, b in steps],
        }
    return found


def timed(function: Callable, *arguments) -> tuple[dict[str, float], object]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = function(*arguments)
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}, result


# The work ------------------------------------------------------------------------------------------------------------


def make_policy(name: str) -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "tiny":
        model = LlamaForCausalLM.from_pretrained(ROOT / "assets/tiny_policy", dtype=torch.float32)
    else:
        larger = LlamaConfig(
            vocab_size=8_192, hidden_size=512, intermediate_size=1_408, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
        )  # fmt: skip
        model = LlamaForCausalLM(larger)
    use_fast_products(model)
    return Policy(model, None, end_of_turn_ids=[model.config.vocab_size - 1], pad_id=0)


def converse(policy: Policy, work: Work, number: int, way: str) -> list[Trajectory]:
    """Conversations with a tool that answers every turn, without rewards."""
    random = np.random.default_rng(number)
    vocabulary = range(3, min(policy.end_of_turn_ids))  # of what is not sampled

    def some_ids(count: int) -> list[int]:
        return random.integers(vocabulary.start, vocabulary.stop, count).tolist()

    def for_rows(make: Callable[[], object]) -> list:
        """One value for every row, or the same for all rows of a group."""
        values = [make() for _ in rows]
        return [values[index - index % GROUP_SIZE if work.same_calls else index] for index in range(len(rows))]

    rows = begin_rows([some_ids(PROMPT_TOKENS) for _ in range(work.prompts)], GROUP_SIZE)
    kept = WAYS[way]()
    for turn in range(work.turns):
        uniforms = torch.tensor(np.stack(for_rows(lambda: forced(random))))
        with patch("common.sampling._uniforms", lambda *arguments, uniforms=uniforms: uniforms):
            continue_rows(policy, rows, max_new_tokens=10**6, max_length=CONTEXT, key=(), kept=kept)
        if turn < work.turns - 1:
            for row, ids in zip(rows, for_rows(lambda: some_ids(work.observation)), strict=True):
                row.observe(ids)
    return rows


def forced(random: np.random.Generator) -> np.ndarray:
    """Random numbers of one row, with which the last token of the vocabulary ends its turn after some tokens."""
    numbers = random.random(CONTEXT) * 0.999
    numbers[random.integers(SHORTEST, LONGEST + 1) - 1] = 1.0
    return numbers


def train(policy: Policy, reference: Policy, optimizer: torch.optim.Optimizer, rows: list[Trajectory]) -> None:
    """What follows sampling in a step, with random returns."""
    experience = collate(rows, policy.pad_id, policy.device)
    returns = torch.rand(len(rows) // GROUP_SIZE, GROUP_SIZE)
    experience.advantages = (group_advantages(returns) / (group_std(returns) + STD_EPS)).view(-1, 1).float()
    experience.log_probs_ref = token_log_probs(reference, experience, len(rows))
    optimizer.zero_grad()
    loss_of(policy, experience).backward()
    optimizer.step()


def loss_of(policy: Policy, experience: Experience) -> torch.Tensor:
    log_probs, _ = policy(experience.sequences, experience.action_mask)
    mask = experience.action_mask
    token_loss = clipped_surrogate(probability_ratio(log_probs, None, mask), experience.advantages, clip_eps=0.2)
    token_loss = token_loss + 0.02 * approx_kl_divergence(log_probs, experience.log_probs_ref, mask)
    return masked_mean(token_loss, mask, dim=1).mean()


def check_equal(some: list[Trajectory], others: list[Trajectory]) -> None:
    """Rounding may move a token across a boundary; then the row goes on differently, with the same lengths."""
    same = [one.ids == other.ids for one, other in zip(some, others, strict=True)]
    assert [len(row.ids) for row in some] == [len(row.ids) for row in others]
    assert sum(same) >= 0.95 * len(same), f"only {sum(same)} of {len(same)} rows are the same"


def difference(some: list[Trajectory], others: list[Trajectory]) -> float:
    """The largest one of recorded log-probs, among rows with the same ids."""
    pairs = [(one, other) for one, other in zip(some, others, strict=True) if one.ids == other.ids]
    return max(abs(a - b) for one, other in pairs for a, b in
               zip(one.sampler_log_probs, other.sampler_log_probs, strict=True))  # fmt: skip


# Memory --------------------------------------------------------------------------------------------------------------


def memories(work: Work) -> dict[str, float]:
    """By way, in MB; each in a process of its own."""
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--memory-of", json.dumps([asdict(work), way])]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[way] = round(int(output.split()[-1]) / 1e6, 1)
    return found


def memory(work: Work, way: str) -> int:
    policy = make_policy(work.model)
    before = peak_memory_bytes("cpu")
    converse(policy, work, 0, way)
    return peak_memory_bytes("cpu") - before


if __name__ == "__main__":
    main()
