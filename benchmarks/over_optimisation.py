"""What happens to the true accuracy while a policy is optimised against a reward model: docs/reward_models.md.

    python benchmarks/over_optimisation.py --jobs 2              # all runs; the page says how long they took
    python benchmarks/over_optimisation.py --seeds 0 --only grpo # a part of them
    python benchmarks/over_optimisation.py --draw-only           # the figure and the tables, from the committed data

Reward models learn from 300, 1,000 or 3,000 of the bundled pairs; policies are trained against them. The score is the
*proxy*, the verifier's accuracy, which no policy is rewarded for, is the *gold*. Runs that already exist are not
repeated, and results of missing ones are kept. Writes benchmarks/results/over_optimisation.json and
docs/reward_models.png, and prints the tables of the page.
"""

import functools
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import tyro

from common.chat import decode, encode_conversation, encode_prompt
from common.experience import collate
from common.logprobs import token_log_probs
from common.reward_model import score_rows
from common.sampling import sample
from tasks import arithmetic
from viewer.save_figure import save_figure

from harness.base.config import ROOT, ModelConfig
from harness.data.data import read_rows
from harness.models.loading import load_policy
from harness.models.reward_loading import load_reward_model
from harness.task.pairs import PAIRS

RESULTS = ROOT / "benchmarks" / "results" / "over_optimisation.json"
PICTURE = ROOT / "docs" / "reward_models.png"
JUDGES = {"pairs3000": {}, "pairs1000": {"max-pairs": 1000}, "pairs300": {"max-pairs": 300}}
JUDGES |= {"hidden": {"answer-begins": "</think>"}}
AGAINST = {"reward-weight": "correct=0", "lr": 1e-4, "steps": 120, "samples-every": 10}
NO_PENALTY = 1e-9  # loads the reference, so that the distance to it is measured
# name: experiment, judge, and flags; the first four kinds are curves, all are methods
POLICIES = {
    "rm3000": ("experiment_base", "pairs3000", AGAINST | {"kl-weight": NO_PENALTY}),
    "rm1000": ("experiment_base", "pairs1000", AGAINST | {"kl-weight": NO_PENALTY}),
    "rm300": ("experiment_base", "pairs300", AGAINST | {"kl-weight": NO_PENALTY}),
    "rm3000-kl": ("experiment_base", "pairs3000", AGAINST | {"kl-weight": 0.1}),
    "hidden": ("experiment_base", "hidden", AGAINST | {"kl-weight": NO_PENALTY, "answer-begins": "</think>"}),
    "ppo": ("policy_gradients/ppo", "pairs3000", AGAINST | {"kl-weight": NO_PENALTY}),
    "dpo": ("rewards/dpo", None, {}),
    "sft": ("imitation/sft", None, {"model": "tiny"}),
}
LABELS = {
    "rm3000": "GRPO, 3,000 pairs", "rm1000": "GRPO, 1,000 pairs", "rm300": "GRPO, 300 pairs",
    "rm3000-kl": "GRPO, 3,000 pairs, --kl-weight 0.1", "hidden": "GRPO, 3,000 pairs, thought hidden",
    "ppo": "PPO, 3,000 pairs", "dpo": "DPO, 3,000 pairs", "sft": "SFT on the chosen answers",
}  # fmt: skip
BEST_OF = 64  # responses per held-out question
NUMBERS = [2**power for power in range(7)]  # n of best-of-n
NUM_QUESTIONS = 256
BEST_QUESTIONS = 128  # the first of them


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    only: tuple[str, ...] = tuple(POLICIES)  # policies
    jobs: int = 1  # runs at the same time, each with one thread
    runs_dir: str = "runs/over_optimisation"
    draw_only: bool = False  # draw and print without training


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if not config.draw_only:
        Path(config.runs_dir).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(config.jobs) as pool:
            list(pool.map(lambda seed: train_all(config, seed), config.seeds))
        torch.set_num_threads(1)
        write_results(config)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    draw(results)
    print_tables(results)


# Runs


def place_of(config: Config, experiment: str, name: str, seed: int) -> Path:
    return Path(config.runs_dir) / Path(experiment).name / f"{name}-s{seed}"


def train_all(config: Config, seed: int) -> None:
    for name in config.only:
        experiment, judge, flags = POLICIES[name]
        if judge is not None:
            train(config, "rewards/reward_model", judge, seed, JUDGES[judge])
            model = place_of(config, "rewards/reward_model", judge, seed) / "final"
            flags = flags | {"reward-model": model.resolve()}
        if experiment == "imitation/sft":
            flags = flags | {"data": chosen_answers(config)}
        train(config, experiment, name, seed, flags)


def train(config: Config, experiment: str, name: str, seed: int, flags: dict) -> None:
    place = place_of(config, experiment, name, seed)
    if (place / "summary.json").exists():
        return
    flags = flags | {"seed": seed, "name": place.name, "runs-dir": config.runs_dir}
    command = [sys.executable, str(ROOT / experiment / "train.py")]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {place} failed:\n{done.stderr[-3000:]}")
    print(place, flush=True)


def chosen_answers(config: Config) -> Path:
    """The chosen answers of the bundled pairs, as conversations."""
    path = Path(config.runs_dir).resolve() / "chosen.jsonl"
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    turns = [[("user", row["prompt"]), ("assistant", row["chosen"])] for row in rows]
    messages = [[{"role": role, "content": text} for role, text in row] for row in turns]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in messages), encoding="utf-8")
    return path


# Measurements


def write_results(config: Config) -> None:
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results = {name: kept.get(name, {}) for name in ("judges", "curves", "methods", "best_of")}
    for seed in config.seeds:
        for judge in JUDGES:
            place = place_of(config, "rewards/reward_model", judge, seed)
            if not (place / "summary.json").exists():
                continue
            summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
            names = ("seconds", "machine", "commit")
            results["judges"][place.name] = {
                key: value for key, value in summary.items() if key.startswith("eval/") or key in names
            }
            if judge != "hidden":
                results["best_of"][place.name] = best_of(str(place / "final"))
        for name, (experiment, _, _) in POLICIES.items():
            place = place_of(config, experiment, name, seed)
            if not (place / "summary.json").exists():
                continue
            if (place / "samples.jsonl").exists() and experiment in ("experiment_base", "policy_gradients/ppo"):
                results["curves"][place.name] = curve_of(place)
            judge = place_of(config, "rewards/reward_model", "pairs3000", seed) / "final"
            if name in ("rm3000", "rm3000-kl", "ppo", "dpo", "sft") and judge.exists():
                results["methods"][place.name] = measure(place, str(judge))
    RESULTS.write_text(json.dumps(results, indent=0) + "\n", encoding="utf-8")


def curve_of(place: Path) -> list[dict[str, float]]:
    """Of every tenth step: the proxy, the gold, and the KL to the policy at the start, in nats per completion.

    KL = mean over the step's completions of sum over their tokens of log p(token) - log p_ref(token)
    """
    steps = defaultdict(list)
    for line in (place / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps[row["step"]].append(row)
    curve = []
    for step, rows in sorted(steps.items()):
        pairs = [zip(row["old_log_probs"], row["log_probs_ref"], row["action_mask"], strict=True) for row in rows]
        kl = fmean(sum(new - ref for new, ref, is_action in of if is_action) for of in pairs)
        proxy, gold = (fmean(row["rewards"][name] for row in rows) for name in ("preference", "correct"))
        curve.append({"step": step, "kl": round(kl, 4), "proxy": round(proxy, 4), "gold": round(gold, 4)})
    return curve


@functools.cache
def start_policy():
    return load_policy(ModelConfig(model="tiny", threads=1))


def questions() -> list[dict]:
    return read_rows(str(arithmetic.EVAL_DATA), arithmetic.FIELDS)[:NUM_QUESTIONS]


@functools.cache
def responses_of_the_start() -> list[list[tuple[list[dict], float]]]:
    """For each held-out question the conversations with 64 answers, and whether they are right."""
    policy, rows = start_policy(), questions()[:BEST_QUESTIONS]
    prompts = [encode_prompt(policy.tokenizer, arithmetic.messages(row)) for row in rows]
    found = sample(policy, prompts, BEST_OF, max_new_tokens=96, key=(0,), generation_batch_size=512)
    answered = [(rows[x.prompt_index], decode(policy.tokenizer, x.completion_ids)) for x in found]
    scored = [(conversation(row, text), arithmetic.reward(row, text)["correct"]) for row, text in answered]
    return [scored[start : start + BEST_OF] for start in range(0, len(scored), BEST_OF)]


def conversation(row: dict, text: str) -> list[dict]:
    return [*arithmetic.messages(row), {"role": "assistant", "content": text}]


def best_of(judge: str) -> list[dict[str, float]]:
    """Proxy and gold of the answer with the highest score among n, expected over all choices of n from 64.

    KL of best-of-n = log n - (n - 1) / n        (Gao et al., arXiv 2210.10760, section 2)
    """
    model = load_reward_model(judge, "cpu", torch.float32)
    ranked = []
    for answers in responses_of_the_start():
        rows = [encode_conversation(model.tokenizer, messages) for messages, _ in answers]
        scores = score_rows(model, rows, 128)
        ranked.append(sorted(zip(scores, (correct for _, correct in answers), strict=True)))
    curve = []
    for n in NUMBERS:
        # the answer of rank i, from the lowest, is the best of C(i, n-1) of the C(64, n) choices
        weights = [math.comb(i, n - 1) / math.comb(BEST_OF, n) for i in range(BEST_OF)]
        proxy, gold = (
            fmean(sum(w * entry[part] for w, entry in zip(weights, entries, strict=True)) for entries in ranked)
            for part in (0, 1)
        )
        kl = math.log(n) - (n - 1) / n
        curve.append({"n": n, "kl": round(kl, 4), "proxy": round(proxy, 4), "gold": round(gold, 4)})
    return curve


def measure(place: Path, judge: str) -> dict[str, float]:
    """A trained policy on the held-out questions, eight samples each: gold, proxy, KL, length; and its minutes."""
    policy, reference, rows = (
        load_policy(ModelConfig(model=str(place / "final"), threads=1)),
        start_policy(),
        questions(),
    )
    model = load_reward_model(judge, "cpu", torch.float32)
    prompts = [encode_prompt(policy.tokenizer, arithmetic.messages(row)) for row in rows]
    found = sample(policy, prompts, 8, max_new_tokens=96, key=(0,), generation_batch_size=512)
    answered = [(rows[x.prompt_index], decode(policy.tokenizer, x.completion_ids)) for x in found]
    ids = [encode_conversation(model.tokenizer, conversation(row, text)) for row, text in answered]
    experience = collate(found, policy.pad_id)
    distance = token_log_probs(policy, experience, 64) - token_log_probs(reference, experience, 64)
    return {
        "gold": fmean(arithmetic.reward(row, text)["correct"] for row, text in answered),
        "proxy": fmean(score_rows(model, ids, 128)),
        "kl": (distance * experience.action_mask).sum(dim=1).mean().item(),
        "length": fmean(x.num_action_tokens for x in found),
        "reasoned": fmean(arithmetic.describe(row, text)["reasoned"] for row, text in answered),
        "minutes": json.loads((place / "summary.json").read_text(encoding="utf-8"))["seconds"] / 60,
    }


# The page


def runs_named(results: dict, part: str, name: str) -> list:
    return [value for key, value in sorted(results[part].items()) if key.rpartition("-s")[0] == name]


def fit(points: list[tuple[float, float]], of: str) -> tuple[float, float, float]:
    """alpha, beta and R^2 of R(d) = d (alpha - beta d) or d (alpha - beta log d), d = sqrt(KL); least squares.

    Gao et al., arXiv 2210.10760, section 3.1: the first form is for best-of-n, the second for RL; R is the gain.
    """
    d, gain = (np.array(values) for values in zip(*points, strict=True))
    columns = np.stack([d, -d * (d if of == "best_of" else np.log(d))], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, gain, rcond=None)
    rest = gain - columns @ [alpha, beta]
    return alpha, beta, 1 - (rest**2).sum() / ((gain - gain.mean()) ** 2).sum()


def draw(results: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    panels = [
        ("GRPO: gold (accuracy)", "curves", "gold", ("rm300", "rm1000", "rm3000", "rm3000-kl")),
        ("GRPO: proxy (score of its own reward model)", "curves", "proxy", ("rm300", "rm1000", "rm3000", "rm3000-kl")),
        ("thought shown or hidden: gold", "curves", "gold", ("rm3000", "hidden", "ppo")),
        ("best of n: gold", "best_of", "gold", ("pairs300", "pairs1000", "pairs3000")),
    ]
    colors = {"300": "C0", "1000": "C1", "3000": "C2", "rm3000-kl": "C4", "hidden": "C3", "ppo": "C5"}
    for axes, (title, part, value, names) in zip(grid.flat, panels, strict=True):
        for name in names:
            color = colors.get(name) or colors[name.removeprefix("rm").removeprefix("pairs")]
            label = LABELS.get(name, f"{name.removeprefix('pairs')} pairs")
            for number, curve in enumerate(runs_named(results, part, name)):
                points = [(max(point["kl"], 0) ** 0.5, point[value]) for point in curve]
                axes.plot(*zip(*points, strict=True), color=color, alpha=0.75, marker=".", linewidth=1,
                          label=label if number == 0 else None)  # fmt: skip
        axes.set(title=title, xlabel="square root of KL (nats per completion)")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
        if value == "gold":
            axes.set_ylim(0, 1.02)
    save_figure(figure, PICTURE)


def spread(values: list[float], form: str = ".3f") -> str:
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})" if values else "-"


def show(head: str, rows: dict[str, list[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n| {head} |\n|{'---|' * (head.count('|') + 1)}")
    for name, cells in rows.items():
        print(f"| {' | '.join([name, *cells])} |")


def print_tables(results: dict) -> None:
    keys = ("accuracy", "accuracy_same_style", "accuracy_same_length", "calibration_error", "length_correlation")
    judges = {judge: runs_named(results, "judges", judge) for judge in JUDGES}
    show(
        "reward model | accuracy | equal style | equal length | calibration error | score and length",
        {
            judge: [spread([run[f"eval/{key}"] for run in runs], ".2f") for key in keys]
            for judge, runs in judges.items()
        },
    )
    rows = {}
    for name in ("rm300", "rm1000", "rm3000", "rm3000-kl", "hidden", "ppo"):
        curves = runs_named(results, "curves", name)
        best, last = [max(curve, key=lambda p: p["gold"]) for curve in curves], [curve[-1] for curve in curves]
        rows[LABELS[name]] = [
            spread([p["gold"] for p in best], ".2f"),
            spread([p["step"] for p in best], ".0f"),
            spread([max(p["kl"], 0) ** 0.5 for p in best], ".1f"),
            spread([p["gold"] for p in last], ".2f"),
            spread([p["proxy"] for p in best], ".2f"),
            spread([p["proxy"] for p in last], ".2f"),
        ]
    show("policy | gold, highest | at step | at sqrt(KL) | gold, last | proxy then | proxy, last", rows)
    keys = {"gold": ".3f", "proxy": ".2f", "kl": ".1f", "length": ".1f", "reasoned": ".2f", "minutes": ".1f"}
    methods = {name: runs_named(results, "methods", name) for name in ("sft", "dpo", "rm3000", "rm3000-kl", "ppo")}
    rows = {
        LABELS[name]: [spread([run[key] for run in runs], form) for key, form in keys.items()]
        for name, runs in methods.items()
    }
    for n in (16, 64):
        points = [next(p for p in curve if p["n"] == n) for curve in runs_named(results, "best_of", "pairs3000")]
        rows[f"best of {n}"] = [spread([p[key] for p in points], keys[key]) for key in ("gold", "proxy", "kl")]
        rows[f"best of {n}"] += [""] * 3  # it is no separate policy
    show("with the same 3,000 pairs | " + " | ".join(keys), rows)
    rows = {}
    start = results["best_of"]["pairs3000-s0"][0]["gold"]
    for part, kind in (("curves", "rm"), ("best_of", "pairs")):
        for number in (300, 1000, 3000):
            curves = runs_named(results, part, f"{kind}{number}")
            points = [(p["kl"] ** 0.5, p["gold"] - start) for curve in curves for p in curve if p["kl"] > 0.01]
            name = f"{'GRPO' if part == 'curves' else 'best of n'}, {number} pairs"
            rows[name] = [f"{value:.3f}" for value in fit(points, part)] if points else []
    show("gain of gold over sqrt(KL) | alpha | beta | R^2", rows)


if __name__ == "__main__":
    main()
