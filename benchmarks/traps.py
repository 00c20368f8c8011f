"""The effect of each trap of docs/traps.md on training: an experiment with the planted mistake, next to correct runs.

    python benchmarks/traps.py --jobs 2                      # all runs, three seeds; the page says how long they took
    python benchmarks/traps.py --only off_by_one             # only this trap, and its correct runs
    python benchmarks/traps.py --draw-only                   # the figure and the table again, from the committed data

Runs that already exist are not repeated, and results of missing runs are kept. Writes benchmarks/results/traps/
(metrics.csv and runs.json) and docs/traps.png, and prints the table of docs/traps.md. The mistakes are in planted.py.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
import tyro
from planted import SETTINGS, TRAPS, Setting, planted

from viewer.groups import read_run
from viewer.results import MACHINE, KeptRun, keep_runs, read_runs
from viewer.runs import Run
from viewer.save_figure import save_figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "traps"
PICTURE = ROOT / "docs" / "traps.png"
FLAGS = ("--eval-every", "20", "--eval-prompts", "128", "--samples-every", "0", "--checkpoint-every", "0")
COLUMNS = (
    "reward/correct", "eval/greedy/accuracy", "eval/sampled/accuracy", "completion/length", "completion/stopped",
    "loss/kl", "loss/grad_norm", "policy/entropy", "policy/sampling_log_prob_difference", "group/zero_reward_variance",
)  # fmt: skip
WINDOW = 5  # steps over which every curve is averaged
LAST = 10  # last steps, averaged for the table


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2)  # of the runs
    steps: int = 60  # of each run
    jobs: int = 1  # runs at the same time, each with one thread
    runs_dir: str = "runs/traps"  # where the runs are written
    only: tuple[str, ...] = ()  # traps: make only their runs, and the correct ones beside them; none: all
    train: bool = True  # --no-train: collect the runs that are there
    draw_only: bool = False  # draw and print from the committed data
    here: str | None = None  # train this trap or setting with the first seed, in this process; results stay as they are


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if unknown := set(config.only) - TRAPS.keys():
        sys.exit(f"error: --only: there is no trap {', '.join(unknown)}; there are {', '.join(TRAPS)}")
    if config.here is not None:
        return train_here(config, config.here, config.seeds[0])
    if not config.draw_only:
        traps = config.only or tuple(TRAPS)
        names = [*dict.fromkeys(TRAPS[trap].setting for trap in traps), *traps]
        wanted = [(name, seed) for seed in config.seeds for name in names] if config.train else []
        with ThreadPoolExecutor(config.jobs) as pool:
            list(pool.map(lambda run: train(config, *run), wanted))
        write_results(config)
    curves, runs = read_results()
    check_planted(curves)
    draw(curves, runs)
    print(table(curves, runs))


def setting_of(name: str) -> Setting:
    """The setting of a trap or of the correct runs with this name."""
    return SETTINGS[TRAPS[name].setting if name in TRAPS else name]


def place_of(config: Config, name: str, seed: int) -> Path:
    return Path(config.runs_dir) / setting_of(name).experiment / f"{name}-{seed}"


def find_run(config: Config, name: str, seed: int) -> Run | None:
    """A finished run; a correct one without other flags can come from the experiment's own results."""
    place, setting = place_of(config, name, seed), setting_of(name)
    if (place / "summary.json").exists():
        return read_run(place)
    has_results = name in SETTINGS and not setting.flags
    return read_runs(ROOT / setting.experiment / "results").get(f"seed{seed}") if has_results else None


def train(config: Config, name: str, seed: int) -> None:
    """One run, in a separate process with one thread."""
    if (place_of(config, name, seed) / "summary.json").exists():
        return
    command = [sys.executable, __file__, "--here", name, "--seeds", str(seed)]
    command += ["--steps", str(config.steps), "--runs-dir", config.runs_dir]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {name} with seed {seed} failed:\n{done.stderr[-3000:]}")
    print(f"{name}-{seed}", flush=True)


def train_here(config: Config, name: str, seed: int) -> None:
    """The experiment's own `main`, with the mistake in it."""
    from harness.run.start import run_main

    setting = setting_of(name)
    spec = importlib.util.spec_from_file_location("train", ROOT / setting.experiment / "train.py")
    module = sys.modules["train"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flags = [*FLAGS, *setting.flags, "--steps", str(config.steps), "--seed", str(seed)]
    torch.manual_seed(seed)  # for dropout in one of them; the experiments do not use it
    with planted(name, module):
        run_main(lambda: module.main([*flags, "--runs-dir", config.runs_dir, "--name", f"{name}-{seed}"]))


def write_results(config: Config) -> None:
    """Collect the values for the figure and the table from the runs; other results are kept."""
    runs = []
    for name in (*SETTINGS, *TRAPS):
        for seed in config.seeds:
            run = find_run(config, name, seed)
            if run is not None:
                rows = [{"step": step} | entry for step, entry in curve_of(run, config.steps).items()]
                runs.append(KeptRun(RESULTS / f"{name}-{seed}", *describe_run(run, config, name, seed), rows))
    keep_runs(RESULTS, runs)


Curve = dict[int, dict[str, float]]  # by step


def curve_of(run: Run, steps: int) -> Curve:
    curve: Curve = {}
    for row in run.metrics.rows:
        if row["step"] <= steps:
            curve.setdefault(row["step"], {}).update({key: row[key] for key in COLUMNS if key in row})
    return curve


def describe_run(run: Run, config: Config, name: str, seed: int) -> tuple[dict, dict]:
    """Flags, commit and machine; then duration and the run's messages about itself."""
    setting = setting_of(name)
    if isinstance(run, KeptRun):
        source = {"copied_from": run.directory.relative_to(ROOT).as_posix()}
    else:
        source = {"flags": [*FLAGS, *setting.flags, "--steps", str(config.steps), "--seed", str(seed)]}
    findings: dict[str, dict] = {}
    for entry in run.diagnosis.rows:
        first = {"first_step": entry["step"], "steps": 0, "sentence": entry["sentence"]}
        findings.setdefault(entry["finding"], first)["steps"] += 1
    machine = {key: run.config[key] for key in MACHINE if key in run.config}
    summary = {"seconds": run.summary["seconds"], "findings": findings}
    if name in TRAPS and TRAPS[name].in_evaluation:
        summary |= evaluate_correctly(run.directory)
    return {"experiment": setting.experiment} | source | machine, summary


def evaluate_correctly(place: Path) -> dict[str, float]:
    """The accuracy of a trained policy of experiment_base with the correct sampler, on the run's questions."""
    from common.evaluate import evaluate
    from tasks import arithmetic as task

    from harness.base.config import RunConfig
    from harness.data.data import read_rows
    from harness.models.loading import load_policy

    exact = {"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa"}
    policy = load_policy(RunConfig(model=str(place / "final"), **exact))
    rows = read_rows(str(task.EVAL_DATA), task.FIELDS)[: int(FLAGS[FLAGS.index("--eval-prompts") + 1])]
    metrics = evaluate(policy, rows, task, max_new_tokens=96, num_samples=8).metrics
    return {f"correctly/{name}": metrics[name] for name in ("greedy/accuracy", "sampled/accuracy")}


Curves = dict[str, dict[int, Curve]]  # by trap or setting, and by seed


def read_results() -> tuple[Curves, dict[str, dict]]:
    """The curves, and the runs by name and seed, as far as they exist."""
    runs = read_runs(RESULTS)
    curves: Curves = {}
    for each, run in runs.items():
        name, _, seed = each.rpartition("-")
        curves.setdefault(name, {})[int(seed)] = {row["step"]: row for row in run.metrics.rows}
    return curves, {name: run.config | run.summary for name, run in runs.items()}


def check_planted(curves: Curves) -> None:
    """Check that every run with a mistake differs from the correct run with the same seed."""
    for name in TRAPS.keys() & curves.keys():
        for seed, curve in curves[name].items():
            if curve == curves[TRAPS[name].setting].get(seed):
                sys.exit(f"error: {name} with seed {seed} is the same run as the correct one: nothing was planted")


def smooth(curve: Curve) -> list[float]:
    """The sampled accuracy as a running mean over the last steps."""
    values = [entry["reward/correct"] for entry in curve.values() if "reward/correct" in entry]
    return [mean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]


def draw(curves: Curves, runs: dict[str, dict]) -> None:
    """One panel per trap: sampled accuracy over steps, mean and range of the seeds, and accuracy on other questions."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    traps = [name for name in TRAPS if name in curves]
    num_columns = 3
    num_rows = -(-len(traps) // num_columns)
    figure, places = plt.subplots(num_rows, num_columns, figsize=(13, 3.1 * num_rows), sharex=True, squeeze=False)
    for name, axes in zip(traps, places.flat, strict=False):
        setting = TRAPS[name].setting
        for which, color, label in ((setting, "0.45", "correct"), (name, "tab:red", "with the mistake")):
            seeds = [smooth(curve) for curve in curves[which].values()]
            means, lowest, highest = ([f(step) for step in zip(*seeds, strict=True)] for f in (mean, min, max))
            held_out = mean(last_ones(curves, which, "eval/greedy/accuracy", 1, curves[which]))
            axes.plot(range(1, len(means) + 1), means, color=color, label=f"{label}; held out {held_out:.2f}")
            axes.fill_between(range(1, len(means) + 1), lowest, highest, color=color, alpha=0.25, linewidth=0)
        also = "" if setting == "default" else f"\n{SETTINGS[setting].label}"
        axes.set_title(TRAPS[name].title, fontsize=11, pad=16 if also else None)
        axes.text(0.5, 1.02, also.strip(), transform=axes.transAxes, ha="center", fontsize=8.5, color="0.3")
        axes.legend(frameon=False, fontsize=9, loc="lower right")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in places[:, 0]:
        axes.set_ylabel("sampled accuracy, training questions", fontsize=9)
    for axes in places.flat[len(traps) :]:
        axes.set_axis_off()
    for axes in places[-1]:
        axes.set_xlabel("step")
    figure.tight_layout()
    save_figure(figure, PICTURE, dpi=100)


def last_ones(curves: Curves, name: str, key: str, count: int, seeds: Iterable[int]) -> list[float]:
    """The mean of the last `count` values, for each of these seeds."""
    series = [[entry[key] for entry in curves[name][seed].values() if key in entry] for seed in seeds]
    return [mean(values[-count:]) for values in series]


def table(curves: Curves, runs: dict[str, dict]) -> str:
    """The first table of docs/traps.md: each trap next to the correct runs with the same seeds."""
    lines = [
        "| trap | sampled accuracy: correct | with the mistake | held out, greedy | KL | the run says | test |",
        "|---|---|---|---|---|---|---|",
    ]

    def cell(name: str, key: str, seeds: Iterable[int]) -> str:
        values = last_ones(curves, name, key, LAST, seeds)
        return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    def both(trap: str, key: str, count: int) -> str:
        pair = (TRAPS[trap].setting, trap)
        return ", ".join(f"{mean(last_ones(curves, name, key, count, curves[trap])):.3f}" for name in pair)

    for name, trap in TRAPS.items():
        if name in curves:
            found = [runs[f"{name}-{seed}"]["findings"] for seed in curves[name]]
            counts = {finding: sum(finding in each for each in found) for each in found for finding in each}
            said = [f"{finding}" + f" ({n} of {len(found)})" * (n < len(found)) for finding, n in counts.items()]
            cells = [
                f"[{trap.title}](#{name})",
                cell(trap.setting, "reward/correct", curves[name]),
                cell(name, "reward/correct", curves[name]),
                both(name, "eval/greedy/accuracy", 1),
                both(name, "loss/kl", LAST),
                "; ".join(said) or "nothing",
                f"`{trap.test}`",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
