"""Who earned the reward? Each `--credit` of agents/world against the exact advantages, and the training with each.

    python benchmarks/turn_credit.py                               # every missing measurement; the page says how long
    python benchmarks/turn_credit.py --part train --seeds 0        # only some of them
    python benchmarks/turn_credit.py --draw-only                   # figure and tables again, from the committed data

A finished measurement is one line of benchmarks/results/turn_credit/*.jsonl, and is not made again, so that the command
can be stopped at any time. `agree`: the turn advantages of the policy at the start, and the gradients that they make,
beside the exact ones. `train`: runs on all maps, and on those whose shortest way takes 7 to 9 turns. Draws
docs/turn_credit.png and prints the tables of docs/turn_credit.md.
"""

import io
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import correlation, mean
from typing import Literal, NamedTuple, get_args

import torch
import tyro
from load_file import load_file

from common.experience import collate
from viewer.runs import rolling_means
from viewer.save_figure import save_figure

from harness.base.config import ROOT
from harness.base.files import read_lines
from harness.base.machine import describe_machine
from harness.models.loading import load_policy
from harness.task.task import load_task

RESULTS = ROOT / "benchmarks" / "results" / "turn_credit"
PICTURE = ROOT / "docs" / "turn_credit.png"
MAPS = {"all": (2, 9), "far": (7, 9)}  # turns of the shortest way
NAMES = {"episode": "GRPO", "reward_to_go": "reward to go", "gigpo": "GiGPO", "action_mean": "mean by action"}
NAMES |= {"walked_graph": "walked graph", "progress": "process reward", "potential": "potential", "exact": "exact"}
FLAGS = {"steps": 80, "eval-every": 0, "samples-every": 0, "checkpoint-every": 0}
GROUPS, BATCH = 128, 8  # of the measured gradients: groups of 8 in all, and in a step
CLEAR = 0.02  # as in turn_credit.py
LAST = 10  # steps: the final success is their mean


@dataclass(frozen=True, kw_only=True)
class Config:
    part: tuple[Literal["agree", "train"], ...] = ("agree", "train")
    maps: tuple[Literal["all", "far"], ...] = ("all", "far")
    credit: tuple[str, ...] = tuple(NAMES)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of the runs, and of the measured batches
    draw_only: bool = False  # draw and print without any measurement


class Setting(NamedTuple):
    """Of a training run."""

    maps: str
    credit: str
    seed: int


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    for name in ("exact_advantages", "turn_credit"):  # which train.py imports
        load_file(f"agents/world/{name}.py", name)
    train = load_file("agents/world/train.py")
    machine = {key: describe_machine()[key] for key in ("commit", "machine")}  # now: the results change the checkout
    assert set(get_args(train.Credit)) == NAMES.keys()
    for seed in () if config.draw_only else config.seeds:
        for maps in config.maps:
            if "agree" in config.part and not any((row["maps"], row["seed"]) == (maps, seed) for row in read("agree")):
                write("agree", {"maps": maps, "seed": seed} | machine | agreement(train, maps, seed))
            for credit in config.credit if "train" in config.part else ():
                if (setting := Setting(maps, credit, seed)) not in runs():
                    write("train", setting._asdict() | machine | run(train, setting))
                    print(*setting, final(runs()[setting]), flush=True)
    draw()
    print(f"{agreement_table()}\n\n{training_table()}")


# ---- beside the exact advantages


def agreement(train, maps: str, seed: int) -> dict:
    """Of every credit: the correlation with the exact advantages, the share of right signs, the cosine of gradients.

    The gradient of a step of 8 groups is compared with the exact one of all 128 groups, once where a row's tokens share
    its weight, as in GRPO, and once where each token has the same, as in Dr. GRPO.
    """
    began, found = time.time(), {}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        flags = ["--data", str(write_maps(folder, maps)), "--eval-prompts", "1", "--seed", str(seed)]
        config = train.parse_config(train.Config, flags, "", train.RESOLVED)
        task, policy = load_task(config), load_policy(config, config.temperature)
    prompts = [number % len(task.train_rows) for number in range(seed * GROUPS, (seed + 1) * GROUPS)]
    played = train.converse(config, task, policy, task.train_rows, prompts, config.group_size, key=(seed, 1))
    exact = load_file("agents/world/exact_advantages.py", "exact_advantages").exact_advantages(policy, played)
    flat = [value for row in exact for value in row]
    targets = {form: gradient(train, config, policy, played, exact, form) for form in ("row", "token")}
    size = BATCH * config.group_size
    for credit in NAMES:
        settings = config.__class__(**vars(config) | {"credit": credit})
        given = train.turn_advantages(settings, policy, played)
        values = [value for row in given for value in row]
        clear = [(value > 0) == (true > 0) for value, true in zip(values, flat, strict=True) if abs(true) >= CLEAR]
        cosines = {form: [] for form in targets}
        for start in range(0, len(played), size):
            part = slice(start, start + size)
            for form, target in targets.items():
                own = gradient(train, config, policy, played[part], given[part], form)
                cosines[form].append(torch.nn.functional.cosine_similarity(own, target, dim=0).item())
        found[credit] = {"correlation": correlation(values, flat), "right_sign": mean(map(float, clear))}
        found[credit] |= {f"cosine_{form}": mean(some) for form, some in cosines.items()}
    success = mean(sum(row.episode.rewards) for row in played)
    rounded = {name: {key: round(value, 4) for key, value in one.items()} for name, one in found.items()}
    return {"seconds": round(time.time() - began), "success": round(success, 4), "turns": len(flat), **rounded}


def gradient(train, config, policy, played: list, advantages: list[list[float]], form: str) -> torch.Tensor:
    """The policy gradient of some rows with these turn advantages, as one vector."""
    experience = collate(played, policy.pad_id, policy.device)
    experience.advantages = train.spread(advantages, experience.action_mask)
    if form == "token":  # policy_loss divides a row by its number of tokens
        experience.advantages = experience.advantages * experience.action_mask.sum(dim=1, keepdim=True)
    policy.zero_grad()
    for micro in experience.split(config.micro_batch):
        log_probs, _ = policy(micro.sequences, micro.action_mask)
        train.policy_loss(config, log_probs, micro, len(played))[0].sum().backward()
    return torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None]).double()


# ---- training


def run(train, setting: Setting) -> dict:
    """One run in this process: the success of every step, of the held-out maps, and the seconds."""
    began = time.time()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        flags = FLAGS | {"credit": setting.credit, "seed": setting.seed, "runs-dir": folder, "name": "run"}
        if setting.maps != "all":
            flags |= {
                "data": write_maps(folder, setting.maps),
                "eval-data": write_maps(folder, setting.maps, "_heldout"),
            }
        train.main([word for flag, value in flags.items() for word in (f"--{flag}", str(value))])
        (metrics,) = Path(folder).glob("*/run/metrics.jsonl")
        rows = read_lines(metrics)
    steps = [row for row in rows if "reward/correct" in row]
    kept = {"correct": [round(row["reward/correct"], 4) for row in steps]}
    kept |= {"flat": [round(row["group/zero_reward_variance"], 3) for row in steps]}
    kept |= {"entropy": [round(row["policy/entropy"], 4) for row in steps]}
    for number, when in ((0, "before"), (-1, "after")):
        names = [name for name in rows[number] if name.startswith("eval/") and "reward" not in name]
        kept[when] = {name.removeprefix("eval/"): round(rows[number][name], 4) for name in names}
    return {"seconds": round(time.time() - began), "training": round(sum(row["time/step"] for row in steps)), **kept}


def write_maps(folder: str, maps: str, suffix: str = "") -> Path:
    """A file with the maps of these lengths."""
    low, high = MAPS[maps]
    lines = (ROOT / "data" / f"thin_ice{suffix}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path = Path(folder) / f"{maps}{suffix}.jsonl"
    path.write_text("".join(line for line in lines if low <= json.loads(line)["optimal"] <= high), encoding="utf-8")
    return path


# ---- results


def read(name: str) -> list[dict]:
    path = RESULTS / f"{name}.jsonl"
    return read_lines(path) if path.exists() else []


def write(name: str, row: dict) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def runs() -> dict[Setting, dict]:
    return {Setting(row["maps"], row["credit"], row["seed"]): row for row in read("train")}


def final(row: dict) -> float:
    return mean(row["correct"][-LAST:])


def draw() -> None:
    """Success over the steps, a panel for each method on each set of maps, with GRPO's mean behind."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    found = runs()
    figure, places = plt.subplots(2, len(NAMES), figsize=(11, 3.6), sharex=True, sharey=True)
    for line, maps in zip(places, MAPS, strict=True):
        for axes, (credit, name) in zip(line, NAMES.items(), strict=True):
            for of, color, width in (("episode", "#999999", 0.9), (credit, "#0072b2", 0.9)):
                for row in [row for setting, row in found.items() if setting[:2] == (maps, of)]:
                    smooth = rolling_means(row["correct"], LAST)
                    axes.plot(range(1, len(smooth) + 1), smooth, color=color, linewidth=width, alpha=0.8)
            axes.set_title(name if maps == "all" else "", fontsize=9)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel("all maps" if maps == "all" else "7 to 9 turns", fontsize=9)
    places[0, 0].set_ylim(0, 1)
    figure.supxlabel("step", fontsize=9)
    figure.tight_layout(pad=0.5)
    save_figure(figure, PICTURE, dpi=160)


def agreement_table() -> str:
    """Means over the seeds."""
    heads = ("correlation", "right sign", "cosine, a row's tokens share", "cosine, each token the same")
    lines = ["| maps | credit | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for maps, (low, high) in MAPS.items():
        rows = [row for row in read("agree") if row["maps"] == maps]
        for credit, name in NAMES.items() if rows else ():
            keys = ("correlation", "right_sign", "cosine_row", "cosine_token")
            cells = [f"{mean(row[credit][key] for row in rows):.2f}" for key in keys]
            lines.append(f"| {low} to {high} turns | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def training_table() -> str:
    """Success of the last steps for each seed, and of held-out maps, greedily, after training."""
    lines = ["| maps | credit | success at the end, each seed | mean | held-out, greedy | sunk |", "|---" * 6 + "|"]
    for maps, (low, high) in MAPS.items():
        for credit, name in NAMES.items():
            rows = [row for setting, row in sorted(runs().items()) if setting[:2] == (maps, credit)]
            if rows:
                seeds = " ".join(f"{final(row):.2f}" for row in rows)
                greedy, sunk = (mean(row["after"][f"greedy/{key}"] for row in rows) for key in ("accuracy", "sunk"))
                mid = mean(map(final, rows))
                lines.append(f"| {low} to {high} turns | {name} | {seeds} | {mid:.2f} | {greedy:.2f} | {sunk:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
