"""The runs of imitation/self_distill/README.md, and whether a policy understands hints at all.

    python benchmarks/self_distill.py                                # the bundled policy: an hour of one core
    python benchmarks/self_distill.py --only reverse --seeds 0       # a part of it
    python benchmarks/self_distill.py --only smollm2-feedback --seeds 0    # a real model (docs/smollm2.md)
    python benchmarks/self_distill.py --hints tiny tiny_reader       # no training: what hints change
    python benchmarks/self_distill.py --table-only                   # the tables, from the committed data

Runs that already exist are not repeated, and results of missing ones are kept. Writes imitation/self_distill/results/,
and prints the tables of the README.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import torch
import tyro
from load_file import load_file

from common.chat import decode, encode_prompt
from common.experience import collate
from common.logprobs import token_log_probs
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory
from viewer.groups import read_run
from viewer.results import KeptRun, keep_runs, read_runs, write_json

from harness.base.config import BUNDLED, ModelConfig
from harness.base.machine import describe_machine
from harness.data.data import read_rows
from harness.models.loading import load_policy
from harness.task.named_task import task_of

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = ROOT / "imitation/self_distill"
RESULTS = EXPERIMENT / "results"
SMOLLM2 = {  # as the run `lora` of docs/smollm2.md, but shorter
    "model": "smollm2", "task": "instructions", "data": str(ROOT / "data/instructions_short.jsonl"),
    "eval-data": str(ROOT / "data/instructions_short_heldout.jsonl"), "steps": 16, "prompts-per-step": 8,
    "max-new-tokens": 48, "micro-batch-size": 8, "lora-rank": 16, "lr": 2e-4, "eval-prompts": 16,
}  # fmt: skip
RUNS = {  # flags
    "reverse": {},
    "forward": {"divergence": "forward"},
    "current": {"teacher-update-rate": 1},
    "frozen": {"teacher-update-rate": 0},
    "unread": {"model": "tiny"},  # cannot read hints
    "grpo": {"model": "tiny_reader", "kl-weight": 0, "steps": 40},
    "smollm2-feedback": SMOLLM2 | {"hint": "feedback"},
    "smollm2-feedback-forward": SMOLLM2 | {"hint": "feedback", "divergence": "forward"},
    "smollm2-demonstration": SMOLLM2 | {"hint": "demonstration"},
    "smollm2-both": SMOLLM2 | {"hint": "both"},
}
COLUMNS = (
    "reward/correct", "reward/on_topic", "completion/reasoned", "completion/length", "completion/hinted",
    "completion/demonstrated", "teacher/agreement", "teacher/weight_max", "teacher/kl", "policy/entropy",
    "loss/grad_norm", "eval/greedy/accuracy", "eval/sampled/accuracy", "time/step",
)  # fmt: skip
STEPS = 10  # the first and last so many are averaged


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    only: tuple[str, ...] = tuple(name for name in RUNS if not name.startswith("smollm2"))
    runs_dir: str = "runs"
    hints: tuple[str, ...] = ()  # measure what hints change for these models, and train nothing
    questions: int = 64  # for --hints
    table_only: bool = False  # print without training


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    for model in config.hints:
        for hint, found in what_hints_change(model, config.questions):
            write_json(RESULTS / "hints.json", found | describe_machine(), entry=f"{Path(model).name} {hint}")
            print(model, hint, found, flush=True)
    if not config.table_only and not config.hints:
        places = [train(config, name, seed) for name in config.only for seed in config.seeds]
        keep_runs(RESULTS, [result(place) for place in places], COLUMNS)
    print(table(list(read_runs(RESULTS).values())))


def train(config: Config, name: str, seed: int) -> Path:
    """One run, in a separate process with one thread."""
    place = Path(config.runs_dir) / "self_distill" / f"{name}-seed{seed}"
    experiment = "experiment_base" if name == "grpo" else "imitation/self_distill"
    flags = {"seed": seed, "name": place.name, "runs-dir": config.runs_dir, "checkpoint-every": 0, "eval-every": 0}
    words = [sys.executable, str(ROOT / experiment / "train.py")]
    for flag, value in (flags | RUNS[name]).items():
        words += [f"--{flag}", str(value)]
    found = Path(config.runs_dir) / Path(experiment).name / place.name
    if not (found / "summary.json").exists():
        subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
        print(found, flush=True)
    return found


def result(place: Path) -> KeptRun:
    run = read_run(place)
    about = {key: run.config[key] for key in ("seed", "command", "machine", "versions", "commit", "lr", "eval_prompts")}
    summary = {key: run.summary[key] for key in ("seconds", "peak_memory_bytes", "before", "after")}
    if place.name.startswith("smollm2"):
        summary["base_log_prob"] = base_log_prob(place, run.config["model"])
    return KeptRun(RESULTS / place.name, about | {"run": place.name.rpartition("-")[0]}, summary, run.metrics.rows)


def base_log_prob(place: Path, model: str) -> dict[str, float]:
    """By step, the mean log-prob of a token under the untrained SmolLM2, as in docs/smollm2.md."""
    page = load_file("benchmarks/smollm2.py")
    base, samples = page.load(model), page.read_samples(place / "samples.jsonl")
    return {str(step): page.base_log_prob(base, page.trajectories_of(rows)) for step, rows in samples.items()}


def what_hints_change(
    model: str, num_questions: int, size: int = 8, again: int = 4
) -> Iterator[tuple[str, dict[str, float]]]:
    """By hint: sampled accuracy without and with it, on the same questions, and the teacher's `agreement`.

    Each question is answered `size` times. Its first completion with a hint gives the hint, with feedback the first
    wrong one, and it is answered `again` times. The agreement is measured on the first half of the questions.
    """
    hinted_teacher = load_file("imitation/self_distill/hinted_teacher.py", "hinted_teacher")
    task = task_of("arithmetic" if model in BUNDLED else "instructions")
    budget, data = (96, task.eval_data) if model in BUNDLED else (48, SMOLLM2["data"])
    rows = read_rows(str(data), task.fields)[:num_questions]
    policy = load_policy(ModelConfig(model=model, device="cpu", dtype="float32", attn_implementation="sdpa"))
    plain = draw(policy, [encode_prompt(policy.tokenizer, task.messages(row)) for row in rows], size, budget)
    right = [task.reward(rows[row.prompt_index], row.text)["correct"] for row in plain]
    returns, half = torch.tensor(right).view(-1, size), num_questions // 2 * size
    experience = collate(plain[:half], policy.pad_id)
    experience.old_log_probs = token_log_probs(policy, experience, 8)

    given = SimpleNamespace(train_rows=rows, file=task, messages=task.messages, feedback=task.feedback)
    config = SimpleNamespace(group_size=size, success_threshold=1.0, teacher_update_rate=1, micro_batch=8)
    config.system_prompt = ""
    for config.hint in ("demonstration",) if model in BUNDLED else ("feedback", "demonstration", "both"):
        teacher = hinted_teacher.HintedTeacher(config, given, policy)
        prompts = teacher.hints(plain, returns)
        asked: dict[int, list[int]] = {}  # by question
        for index, prompt in enumerate(prompts):
            if prompt is not None and (config.hint == "demonstration" or not right[index]):
                asked.setdefault(index // size, prompt)
        hinted, questions = draw(policy, list(asked.values()), again, budget), list(asked)
        scores = [task.reward(rows[questions[row.prompt_index]], row.text)["correct"] for row in hinted]
        without = [right[index * size + other] for index in asked for other in range(size)]
        log_w = (teacher(experience, prompts[:half]) - experience.old_log_probs) * experience.action_mask
        found = {"questions": len(asked), "accuracy": fmean(right), "without": fmean(without), "with": fmean(scores)}
        yield config.hint, found | teacher.metrics(log_w, returns[: num_questions // 2])


def draw(policy: Policy, prompts: list[list[int]], size: int, budget: int) -> list[Trajectory]:
    drawn = []
    for start in range(0, len(prompts), 16):
        part = prompts[start : start + 16]
        index = list(range(start, start + len(part)))
        drawn += sample(policy, part, size, max_new_tokens=budget, key=(0, size, start), prompt_index=index)
    for row in drawn:
        row.text = decode(policy.tokenizer, row.completion_ids)
    return drawn


def table(runs: list[KeptRun]) -> str:
    """Mean (lowest to highest) over the seeds of every run."""
    heads = ("run", "seeds", "sampled before", "sampled", "greedy before", "greedy", "agreement, first steps",
             "agreement, last steps", "largest w", "on topic", "length", "minutes")  # fmt: skip
    lines = [heads, ("---",) * len(heads)]
    for name in dict.fromkeys(run.config["run"] for run in runs):
        group = [run for run in runs if run.config["run"] == name]
        cells = [spread([run.summary[when].get(key, 0.0) for run in group]) for key in
                 ("sampled/accuracy", "greedy/accuracy") for when in ("before", "after")]  # fmt: skip
        cells += [spread([mean_of(run, "teacher/agreement", part) for run in group]) for part in (1, -1)]
        largest = [max((row.get("teacher/weight_max", 0.0) for row in run.metrics.rows), default=0.0) for run in group]
        cells.append(spread(largest, 0))
        cells += [spread([run.summary["after"].get(key, 0.0) for run in group]) for key in
                  ("greedy/reward_on_topic", "sampled/length")]  # fmt: skip
        cells.append(spread([run.summary["seconds"] / 60 for run in group], 1))
        lines.append((name, str(len(group)), *cells))
    hints = RESULTS / "hints.json"
    for name, found in (json.loads(hints.read_text(encoding="utf-8")) if hints.exists() else {}).items():
        lines.append((name, *(f"{key} {value:.3f}" for key, value in found.items() if isinstance(value, float))))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean_of(run: KeptRun, key: str, end: int) -> float:
    """Over the first (1) or last (-1) steps that have a metric; 0 without any."""
    values = [row[key] for row in run.metrics.rows if key in row]
    return fmean((values[:STEPS] if end == 1 else values[-STEPS:]) or [0.0])


def spread(values: list[float], digits: int = 3) -> str:
    return f"{fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
