"""experiment_multiturn_tool_calling against TRL's GRPOTrainer with `tools=`, and against the same tokens in one turn.

    pip install -r requirements-bench.txt
    OMP_NUM_THREADS=1 python benchmarks/trl_tools.py        # ten minutes on one core

Three kinds of runs take turns, each in a process of its own with one thread. All have the same checkpoint, questions in
the same order, group size, budget, temperature, KL weight, learning rate and AdamW, one update per step, float32:

- `ours`: experiment_multiturn_tool_calling/train.py, unchanged.
- `trl`: GRPOTrainer with `tools=[calculator]`. TRL finds calls only if it knows the chat template, or if the tokenizer
  has a `response_template`: here TRL's own for Qwen3, which describes the Hermes form. `max_tool_calling_iterations`
  is one less than our `--max-turns`: as with ours, a call in the last turn is not executed. The reward is the task's.
- `one_turn`: `ours` once more, but each row gets all its tokens in one turn. It begins with its prompt, and samples
  exactly as many tokens as that row of that step did in the run before, in all turns together; nothing else ends it.
  It has that row's rewards. So advantages, skipped groups, reference and update are those of a step of experiment_base
  with completions of these lengths. It lacks what several turns cost: reading what the calculator answers, parsing and
  executing calls, and sampling with few rows in several rounds.

What differs between ours and TRL: our budget counts what the policy samples, TRL's also what tools answer, and TRL
samples up to the whole budget in every turn and cuts afterwards. TRL takes a malformed call for an answer, which ends
the conversation; with ours the policy reads an error. Therefore tokens, calls, turns and accuracy are reported, too.
Tokens are those with mask 1, divided by the time of complete steps.

Writes the entry trl_tools of benchmarks/results/measurements.json.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path

import tyro
from vs_trl import ROOT, WARM_UP, Clock, Job, describe, measure, print_table, start, summarise, train_ours, train_trl

from viewer.results import write_json

RESULTS = ROOT / "benchmarks" / "results" / "measurements.json"
COUNTS = ("correct", "calls", "turns", "truncated")  # per row
COUNTS_OF_STEP = ("tokens", "tool_tokens")


@dataclass(frozen=True)
class ToolsJob(Job):
    """The same, with calls of a calculator."""

    max_turns: int = 3
    rollouts: str = ""  # where a run of ours writes the lengths and rewards of its rows, for the run in one turn


@dataclass(frozen=True, kw_only=True)
class Config:
    repetitions: int = 3  # of each of the three, interleaved, each with a seed of its own
    betas: tuple[float, ...] = (0.02,)  # weights of the KL penalty
    steps: int = 24  # of each repetition; the first three do not count
    max_new_tokens: int = 96  # budget of all turns together
    max_turns: int = 3
    lr: float = 5e-5
    model: str = "tiny_tools"  # or a directory
    output: Path = RESULTS
    job: str | None = None  # used by the program itself, for its processes


def main(arguments: Sequence[str] | None = None) -> None:
    from common.plumbing.config import BUNDLED

    config = tyro.cli(Config, args=arguments, description=__doc__)
    if config.job is not None:
        job = ToolsJob(**json.loads(config.job))
        measure(job, train_tools_trl if job.trainer == "trl" else train_tools_ours)
        return
    policy = str(BUNDLED.get(config.model, config.model))
    result = {"model": config.model, "settings": {}}
    for beta in config.betas:
        job = ToolsJob(
            "ours", policy, beta=beta, max_new_tokens=config.max_new_tokens, steps=config.steps, lr=config.lr,
            max_turns=config.max_turns,
        )  # fmt: skip
        name = f"calculator, beta {beta}, budget {config.max_new_tokens}, 1 thread"
        result["settings"][name] = compare(job, config.repetitions) | {"beta": beta} | describe()
        write_json(config.output, result, entry="trl_tools")
    print_table(result["settings"])
    print_rows(result["settings"])


def compare(job: ToolsJob, repetitions: int) -> dict:
    """Medians over the counted steps of all repetitions, in CPU seconds; wall-clock seconds are in the data, too."""
    runs: dict[str, list[dict]] = {"trl": [], "ours": [], "one_turn": []}
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(repetitions):
            for trainer, finished in runs.items():
                own = replace(job, trainer=trainer, seed=seed, rollouts=f"{directory}/{seed}.json")
                finished.append(start(own, __file__))
                print(f"beta {job.beta}, {trainer}, seed {seed}: {count(finished[-1:])}", flush=True)
    result = summarise(runs, "cpu")
    result["ratio_to_one_turn"] = result["ours_tokens_per_second"] / result["one_turn_tokens_per_second"]
    result["wall_ratio"] = summarise(runs, "wall")["ratio"]
    return result | {"counts": {trainer: count(finished) for trainer, finished in runs.items()}}


def count(runs: list[dict]) -> dict[str, float]:
    """Means over the counted steps, and how much was learned."""
    steps = [step for run in runs for step in run["steps"][WARM_UP:]]
    means = {name: statistics.mean(step.get(name, 0.0) for step in steps) for name in (*COUNTS_OF_STEP, *COUNTS)}
    means["tokens_per_cpu_second"] = sum(step["tokens"] for step in steps) / sum(step["cpu/step"] for step in steps)
    for name, part in (("correct_first", slice(0, 3)), ("correct_last", slice(-3, None))):
        means[name] = statistics.mean(step["correct"] for run in runs for step in run["steps"][part])
    return means | {"moved": statistics.mean(run["moved"] for run in runs)}


def print_rows(settings: dict[str, dict]) -> None:
    """The rows of the tables in README.md."""
    names = {"trl": "TRL, `tools=`", "ours": "ours", "one_turn": "ours, in one turn"}
    for setting, result in settings.items():
        print(f"\n{setting}: {result['ratio']:.2f} times TRL's tokens per second {result['ratio_of_pairs']}, ", end="")
        print(f"{result['wall_ratio']:.2f} in wall-clock seconds; {result['ratio_to_one_turn']:.2f} times one turn's")
        for trainer, name in names.items():
            parts = " | ".join(
                f"{result[f'{trainer}_{part}']:.2f}" for part in ("step", "sampling", "log_probs", "update")
            )
            peak = result[f"{trainer}_peak_bytes"] / 1e9
            rate = f"**{result[f'{trainer}_tokens_per_second']:,.0f}**"
            print(f"| {result['beta']:g} | {name} | {rate} | {parts} | {peak:.2f} |")
        for trainer, name in names.items():
            counts = result["counts"][trainer]
            first, last = counts["correct_first"], counts["correct_last"]
            each = " | ".join(f"{counts[count]:.2f}" for count in ("calls", "turns", "truncated"))
            print(
                f"| {result['beta']:g} | {name} | {counts['tokens']:,.0f} | {counts['tool_tokens']:,.0f} | {each} | ",
                end="",
            )
            print(f"{first:.2f} to {last:.2f} | {counts['moved']:.2f} |")


# One process ---------------------------------------------------------------------------------------------------------


def counted(clock: Clock, job: Job) -> Callable[[str], str]:
    """The calculator; how often it is called is counted, per row of the step."""
    from common.calculator import calculator

    @wraps(calculator)
    def call(expression: str) -> str:
        clock.counts["calls"] = clock.counts.get("calls", 0.0) + 1 / (job.prompts * job.group_size)
        return calculator(expression)

    return call


def train_tools_ours(job: ToolsJob, clock: Clock, directory: str) -> None:
    """Several turns, whose lengths and rewards are written; or, as `one_turn`, one turn with those that were."""
    rollouts: list[list[list]] = json.loads(Path(job.rollouts).read_text()) if job.trainer == "one_turn" else []

    def change(train) -> None:
        converse = train.converse

        def note(*arguments, **settings):
            rows = converse(*arguments, **settings)
            task, questions = arguments[1], arguments[4]
            if questions is task.train_rows:  # otherwise it is an evaluation
                rollouts.append([[row.num_action_tokens, row.rewards, row.description] for row in rows])
                clock.counts["turns"] = statistics.mean(row.num_turns for row in rows)
                num_ids = sum(len(row.ids) - row.prompt_length for row in rows)
                clock.counts["tool_tokens"] = num_ids - sum(row.num_action_tokens for row in rows)
                clock.counts["truncated"] = statistics.mean(row.finish_reason == "length" for row in rows)
            return rows

        def one_turn(*arguments, **settings):
            task, questions = arguments[1], arguments[4]
            if questions is not task.train_rows:
                return converse(*arguments, **settings)
            clock.counts["turns"] = 1.0
            return sample_lengths(*arguments[:8], rollouts.pop(0))

        train.calculator = counted(clock, job)
        train.converse = one_turn if job.trainer == "one_turn" else note

    train_ours(
        job, clock, directory, "experiment_multiturn_tool_calling", "converse", change, **{"max-turns": job.max_turns}
    )
    if job.trainer == "ours":
        Path(job.rollouts).write_text(json.dumps(rollouts))


def sample_lengths(config, task, tools, policy, questions, prompt_index, group_size, key, rows_before) -> list:
    """In one turn, as many tokens for every row as it had before."""
    import torch

    from common import sampling
    from common.chat import encode_prompt

    conversations = [task.messages(questions[index], config.system_prompt) for index in prompt_index]
    prompts = [encode_prompt(policy.tokenizer, messages, task.tools) for messages in conversations]
    rows = sampling.begin_rows(prompts, group_size, prompt_index)
    lengths = [length for length, _, _ in rows_before]
    ends, policy.end_of_turn_ids = policy.end_of_turn_ids, []  # nothing ends a row but its length
    policy.eval()
    with torch.inference_mode(), policy.autocast():
        draws = sampling._uniforms(rows, max(lengths), key).to(policy.device)
        sampling._complete(policy, rows, lengths, 1.0, draws, bool)
    policy.end_of_turn_ids = ends
    for row, (length, rewards, description) in zip(rows, rows_before, strict=True):
        assert row.num_action_tokens == length
        row.rewards, row.description = rewards, description
    return rows


def train_tools_trl(job: ToolsJob, clock: Clock, directory: str) -> None:
    from trl.chat_template_utils import qwen3_template

    from common.tasks import calculator as task

    def read_calls(tokenizer) -> None:
        tokenizer.response_template = qwen3_template

    tools, rounds = [counted(clock, job)], job.max_turns - 1
    train_trl(job, clock, directory, task, tools, read_calls, max_tool_calling_iterations=rounds)


if __name__ == "__main__":
    sys.exit(main())
