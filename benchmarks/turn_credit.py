"""Which turn earned the reward? Each `--credit` of agents/world beside the exact advantages, and in training.

    python benchmarks/turn_credit.py                               # every missing measurement, on one core
    python benchmarks/turn_credit.py --part gradients --maps far   # only some of them
    python benchmarks/turn_credit.py --draw                        # the figure and the tables, from the committed data

`gradients` plays 256 episodes for each seed with the policy before training. Turn by turn, it compares the advantages
with the exact ones; step by step, it compares the gradients of 64 episodes with the policy gradient: exact advantages
of 2,048 other episodes. `training` trains on all maps, and on those whose shortest way takes 7 to 9 turns. A finished
measurement is one line of benchmarks/results/turn_credit/*.jsonl, and is not made again, so the command can be stopped
at any time. Draws docs/turn_credit.png, and prints the tables of docs/turn_credit.md.
"""

import io
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import correlation, mean, stdev
from types import ModuleType
from typing import Literal

import torch
import tyro
from load_file import load_file

from common.experience import collate
from common.policy import Policy
from common.trajectory import Trajectory
from viewer.runs import rolling_means
from viewer.save_figure import save_figure

from harness.base.config import ROOT
from harness.base.machine import describe_machine
from harness.models.loading import load_policy
from harness.task.task import Task, load_task

RESULTS = ROOT / "benchmarks" / "results" / "turn_credit"
PICTURE = ROOT / "docs" / "turn_credit.png"
MAPS = {"all": (2, 9, 3), "far": (7, 9, 3), "tight": (2, 9, 0), "loose": (2, 9, 12)}  # shortest ways; turns beyond them
NAMES = {
    "episode": "GRPO",
    "reward_to_go": "reward to go",
    "gigpo": "GiGPO",
    "gigpo_code": "GiGPO, as its code",
    "action_mean": "mean by action",
    "walked_graph": "walked graph",
    "progress": "process reward",
    "potential": "potential",
    "exact": "exact",
}
ECHO = {"echo": 0.1, "echo_little": 0.01, "echo_least": 0.001}  # GRPO, and this weight of what the world shows
TRAINED = {name: title for name, title in NAMES.items() if name != "gigpo_code"}
TRAINED |= {name: f"GRPO and ECHO, {weight}" for name, weight in ECHO.items()}
FLAGS = {"steps": 80, "eval-every": 0, "samples-every": 0, "checkpoint-every": 0}
GROUPS, STEPS, TARGET_STEPS = 8, 4, 32  # groups of a step; steps for each seed; steps of the policy gradient
CLEAR = 0.02  # a smaller exact advantage has no sign that matters, in units of reward
LAST = 10  # steps: the final success is their mean
Turns = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Config:
    part: tuple[Literal["gradients", "training"], ...] = ("gradients", "training")
    maps: tuple[Literal["all", "far", "tight", "loose"], ...] = ("all", "far")
    credit: tuple[str, ...] = tuple(TRAINED)  # of the training runs
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    draw: bool = False  # draw and print without any measurement


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if config.draw:
        draw()
        print(f"{gradient_table()}\n\n{training_table()}")
        return
    torch.set_num_threads(1)
    machine = {key: describe_machine()[key] for key in ("commit", "machine")}  # now: the results change the checkout
    for seed in config.seeds:
        for maps in config.maps:
            if "gradients" in config.part:
                add("gradients", {"maps": maps, "seed": seed}, machine, lambda s=seed, m=maps: compare(m, s))
            for credit in config.credit if "training" in config.part else ():
                setting = {"maps": maps, "credit": credit, "seed": seed}
                add("training", setting, machine, lambda setting=setting: train(**setting))


def add(part: str, setting: dict, machine: dict, measure: Callable[[], dict]) -> None:
    """Measure, and write a line, unless there is one with this setting."""
    if any(row | setting == row for row in read(part)):
        return
    row = setting | machine | measure()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{part}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(*setting.values(), row["seconds"], "s", flush=True)


def read(part: str) -> list[dict]:
    path = RESULTS / f"{part}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# Beside the exact advantages ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """What `compare` plays with."""

    program: ModuleType  # agents/world/train.py
    config: object
    task: Task
    policy: Policy
    credit: ModuleType
    exact: ModuleType

    def play(self, seed: int, step: int) -> list[Trajectory]:
        """A step's episodes, of other maps than those of other steps and seeds as far as there are enough."""
        number, count = seed * STEPS + step, len(self.task.train_rows)
        maps = [(number * GROUPS + index) % count for index in range(GROUPS)]
        settings = (self.task.train_rows, maps, self.config.group_size)
        return self.program.converse(self.config, self.task, self.policy, *settings, key=(seed, step))

    def advantages(self, name: str, played: list[Trajectory]) -> Turns:
        if name == "exact":
            return self.exact.exact_advantages(self.policy, played)
        if name == "gigpo_code":
            episodes, size = [row.episode for row in played], self.config.group_size
            groups = [episodes[start : start + size] for start in range(0, len(episodes), size)]
            return [row for group in groups for row in self.gigpo_code(group)]
        return self.credit.turn_advantages(replace(self.config, credit=name), self.policy, played)

    def gigpo_code(self, group: list) -> Turns:
        """The default of GiGPO's reference code: the mean return over all turns, and no standard deviations."""
        to_go = self.credit.rewards_to_go(group, self.config.turn_discount)
        center = mean(sum(one.rewards) for one in group for _ in one.rewards)
        found = [[sum(one.rewards) - center] * len(one.rewards) for one in group]
        visits = defaultdict(list)
        for i, one in enumerate(group):
            for k, state in enumerate(one.states):
                visits[state].append((i, k))
        for places in visits.values():
            baseline = mean(to_go[i][k] for i, k in places)
            for i, k in places:
                found[i][k] += to_go[i][k] - baseline
        return found

    def gradient(self, played: list[Trajectory], advantages: Turns, per_row: bool) -> torch.Tensor:
        """Of sum A log p over all action tokens; `per_row`: divided by the number of the row's tokens, as in GRPO."""
        experience = collate(played, self.policy.pad_id, self.policy.device)
        weights = self.program.spread(advantages, experience.action_mask)  # (B, T-1)
        experience.advantages = weights / experience.action_mask.sum(dim=1, keepdim=True) if per_row else weights
        self.policy.zero_grad()
        for micro in experience.split(64, skip_zero_advantages=True):
            log_probs, _ = self.policy(micro.sequences, micro.action_mask)
            (log_probs * micro.advantages * micro.action_mask).sum().backward()
        return torch.cat([weight.grad.flatten() for weight in self.policy.parameters()])


@cache
def load_world(maps: str) -> World:
    program, credit, exact = load_program()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        flags = ["--data", str(write_maps(folder, maps)), "--eval-prompts", "1"]
        config = program.parse_config(program.Config, flags, "", program.RESOLVED)
        return World(program, config, load_task(config), load_policy(config, config.temperature), credit, exact)


@cache
def policy_gradient(maps: str) -> torch.Tensor:
    """The gradient of the expected return, from exact advantages."""
    world, total = load_world(maps), torch.zeros(())
    for step in range(TARGET_STEPS):
        played = world.play(10, step)  # after the maps of five seeds
        total = total + world.gradient(played, world.advantages("exact", played), per_row=False)
    return total


def compare(maps: str, seed: int) -> dict:
    """For each method: the correlation of its turn advantages with the exact ones, right signs, and cosines."""
    target, began = policy_gradient(maps), time.time()
    world = load_world(maps)
    turns: dict[str, list[float]] = {name: [] for name in NAMES}
    cosines: dict[str, dict[str, list[float]]] = {name: {"grpo": [], "drgrpo": []} for name in NAMES}
    lived, success = [], []
    for step in range(STEPS):
        played = world.play(seed, step)
        returns = [sum(row.episode.rewards) for row in played]
        success += returns
        for start in range(0, len(played), world.config.group_size):
            group = played[start : start + world.config.group_size]
            is_mixed = len({sum(row.episode.rewards) for row in group}) > 1
            lived += [is_mixed for row in group for _ in row.episode.rewards]
        for name in NAMES:
            advantages = world.advantages(name, played)
            turns[name] += [value for row in advantages for value in row]
            for form, found in cosines[name].items():
                if any(map(any, advantages)):
                    own = world.gradient(played, advantages, per_row=form == "grpo")
                    found.append(torch.cosine_similarity(own.double(), target.double(), dim=0).item())
    found = {}
    for name in NAMES:
        pairs = list(zip(turns[name], turns["exact"], lived, strict=True))
        clear = [(own > 0) == (true > 0) for own, true, _ in pairs if abs(true) > CLEAR and own]
        mixed = [(own, true) for own, true, is_mixed in pairs if is_mixed]
        found[name] = {
            "correlation": correlation(turns[name], turns["exact"]),
            "correlation_mixed": correlation(*zip(*mixed, strict=True)),  # in groups with different returns
            "right_sign": mean(map(float, clear)),
            "not_zero": mean(float(own != 0) for own, *_ in pairs),
        }
        found[name] |= {f"cosine_{form}": mean(values) for form, values in cosines[name].items()}
    rounded = {name: {key: round(value, 4) for key, value in one.items()} for name, one in found.items()}
    sizes = {"turns": len(lived), "mixed": round(mean(map(float, lived)), 4), "success": round(mean(success), 4)}
    return {"seconds": round(time.time() - began)} | sizes | rounded


# Training -------------------------------------------------------------------------------------------------------------


def train(maps: str, credit: str, seed: int) -> dict:
    """One run: the success of each step's episodes, and on held-out maps before and after."""
    program, began = load_program()[0], time.time()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        flags = FLAGS | {"seed": seed, "runs-dir": folder, "name": "run"}
        flags |= {"observation-weight": ECHO[credit]} if credit in ECHO else {"credit": credit}
        if maps != "all":  # held-out maps always have the usual budget
            flags |= {"data": write_maps(folder, maps), "eval-data": write_maps(folder, maps, "_heldout")}
        program.main([word for flag, value in flags.items() for word in (f"--{flag}", str(value))])
        (metrics,) = Path(folder).glob("*/run/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "reward/correct" in row]
    series = {"correct": "reward/correct", "entropy": "policy/entropy", "flat": "group/zero_reward_variance"}
    series |= {"turns": "completion/turns", "surprise": "policy/surprise"}
    kept = {name: [round(row[key], 4) for row in steps] for name, key in series.items() if key in steps[0]}
    for when, row in (("before", rows[0]), ("after", rows[-1])):
        kept[when] = {key.removeprefix("eval/"): round(row[key], 4) for key in row if key.startswith("eval/")}
    return {"seconds": round(time.time() - began)} | kept


@cache
def load_program() -> tuple[ModuleType, ModuleType, ModuleType]:
    """agents/world/train.py, and the two files beside it, which it imports by their names."""
    exact, credit = (load_file(f"agents/world/{name}.py", name) for name in ("exact_advantages", "turn_credit"))
    return load_file("agents/world/train.py"), credit, exact


def write_maps(folder: str, maps: str, suffix: str = "") -> Path:
    """The bundled maps with these shortest ways, as a file; for training, with this budget."""
    low, high, slack = MAPS[maps]
    lines = (ROOT / "data" / f"thin_ice{suffix}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if low <= row["optimal"] <= high]
    rows = rows if suffix else [row | {"max_turns": row["optimal"] + slack} for row in rows]
    path = Path(folder) / f"{maps}{suffix}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# Figure and tables ----------------------------------------------------------------------------------------------------


def final(row: dict) -> float:
    return mean(row["correct"][-LAST:])


def draw() -> None:
    """Cosines with the policy gradient, and the success of training: a small point is a seed, a large one the mean."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(1, 3, figsize=(9, 3.2), width_ratios=(1, 1, 1.25))
    names = list(NAMES)[::-1]
    for axes, maps in zip(places, ("all", "far"), strict=False):
        rows = [row for row in read("gradients") if row["maps"] == maps]
        for form, color, shift in (("drgrpo", "#0072b2", 0.12), ("grpo", "#d55e00", -0.12)):
            label = {"drgrpo": "every token counts the same", "grpo": "every episode counts the same"}[form]
            for y, name in enumerate(names if rows else ()):
                values = [row[name][f"cosine_{form}"] for row in rows]
                axes.plot(values, [y + shift] * len(values), ".", color=color, markersize=3, alpha=0.6)
                axes.plot(mean(values), y + shift, "o", color=color, markersize=5, label=label if not y else None)
        axes.set_yticks(range(len(names)), [NAMES[name] for name in names] if maps == "all" else [], fontsize=8)
        axes.set_xlim(0, 1)
        axes.set_xlabel(f"cosine, maps of {MAPS[maps][0]} to {MAPS[maps][1]} turns", fontsize=8)
    handles = places[0].get_legend_handles_labels()
    figure.legend(*handles, fontsize=7, loc="upper left", ncols=2, frameon=False)
    for credit, color in zip(NAMES, plt.get_cmap("tab10").colors, strict=False):
        runs = [row["correct"] for row in read("training") if (row["maps"], row["credit"]) == ("far", credit)]
        if runs:
            smooth = rolling_means([mean(values) for values in zip(*runs, strict=True)], 5)
            style = {"linewidth": 2.2 if credit in ("episode", "exact") else 1.1, "color": color}
            places[2].plot(range(1, len(smooth) + 1), smooth, label=NAMES[credit], **style)
    places[2].set_xlabel("step, maps of 7 to 9 turns", fontsize=8)
    places[2].set_ylabel("success", fontsize=8)
    places[2].set_ylim(bottom=0)
    places[2].legend(fontsize=6)
    for axes in places:
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(pad=0.5, rect=(0, 0, 1, 0.94))
    save_figure(figure, PICTURE, dpi=160)


def gradient_table() -> str:
    """Means over the seeds; in brackets the standard error of the mean."""
    heads = {"correlation": "correlation", "correlation_mixed": "in mixed groups", "right_sign": "right sign"}
    heads |= {"not_zero": "turns with credit", "cosine_drgrpo": "cosine", "cosine_grpo": "cosine, a mean per row"}
    lines = [f"| maps | credit | {' | '.join(heads.values())} |", "|---" * (len(heads) + 2) + "|"]
    for maps in MAPS:
        rows = [row for row in read("gradients") if row["maps"] == maps]
        for name, title in NAMES.items() if rows else ():
            cells = [spread_of([row[name][key] for row in rows]) for key in heads]
            lines.append(f"| {title_of(maps)} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def training_table() -> str:
    heads = f"success of the last {LAST} steps, each seed", "mean", "minus GRPO, paired"
    heads += "steps 11 to 20", "turns", "held-out, greedy", "sunk", "held-out, sampled"
    lines = [f"| maps | credit | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    runs = {(row["maps"], row["credit"], row["seed"]): row for row in read("training")}
    for maps in MAPS:
        for credit, title in TRAINED.items():
            own = {key[2]: row for key, row in sorted(runs.items()) if key[:2] == (maps, credit)}
            if own:
                ends, others = {seed: final(row) for seed, row in own.items()}, {key: final(runs[key]) for key in runs}
                gaps = [end - others[maps, "episode", s] for s, end in ends.items() if (maps, "episode", s) in runs]
                cells = [" ".join(f"{end:.2f}" for end in ends.values()), *map(spread_of, (list(ends.values()), gaps))]
                cells.append(f"{mean(mean(row['correct'][10:20]) for row in own.values()):.2f}")
                turns = [mean(row["turns"][-LAST:]) for row in own.values() if "turns" in row]  # older lines have none
                cells.append(f"{mean(turns):.1f}" if turns else "")
                after = [row["after"] for row in own.values()]
                names = "greedy/accuracy", "greedy/sunk", "sampled/accuracy"
                cells += [f"{mean(row[name] for row in after):.2f}" for name in names]
                lines.append(f"| {title_of(maps)} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def title_of(maps: str) -> str:
    low, high, slack = MAPS[maps]
    return f"{low} to {high} turns" + (f", {slack} more" if maps in ("tight", "loose") else "")


def spread_of(values: list[float]) -> str:
    error = f" ({stdev(values) / len(values) ** 0.5:.2f})" if len(values) > 1 else ""
    return f"{mean(values):.2f}{error}" if values else ""


if __name__ == "__main__":
    main()
