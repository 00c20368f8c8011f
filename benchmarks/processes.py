"""Several processes: whether they are the same training as one, what they gain, and what breaks it without an error.

    python benchmarks/processes.py                             # all parts, on two cores; about 45 minutes
    python benchmarks/processes.py --parts equality            # 25 steps, one process against 1, 2 and 3
    python benchmarks/processes.py --parts scaling             # seconds per step; needs a quiet machine
    python benchmarks/processes.py --parts broken              # the broken variants, beside correct runs
    python benchmarks/processes.py --draw-only                 # draws the figures again, from the committed data

Every variant runs in processes of its own; those whose times are compared take turns. Runs of the broken variants that
exist already in --runs-dir are not repeated. Writes the entry processes of benchmarks/results/measurements.json, the
runs of the broken variants into the results/ of the two experiments, and the figures equality.png, scaling.png and
broken*.png beside their train.py.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Literal

import torch
import tyro
from torch import distributed

from common import sampling
from common.parallel import gather as gather_from_ranks
from common.parallel import is_main, world_size
from viewer.bands import draw_comparison
from viewer.groups import read_run
from viewer.results import keep_runs, read_json, read_runs, write_json

from harness.logs.statistics import UpdateStatistics
from harness.run.machine import describe_machine, peak_memory_bytes
from harness.run.run import Run
from harness.run.start import run_main

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "measurements.json"
BASE, ACCELERATE, DDP = "experiment_base", "experiment_accelerate", "experiment_accelerate_ddp"
QUIET = "--samples-every 0 --checkpoint-every 0 --eval-every 0 --eval-prompts 4"

EQUALITY = "--seed 0 --steps 25 --prompts-per-step 12 --group-size 8"  # 12 prompts are divisible by 1, 2 and 3 ranks
EQUAL = {ACCELERATE: (2,), DDP: (1, 2, 3)}  # experiment: numbers of processes

POLICIES = {  # of the scaling part: name: flags, which fix the work of a step
    "bundled, 1.8 M": "--steps 6",
    "Llama, 24 M": "--steps 3 --prompts-per-step 8 --group-size 4 --max-new-tokens 48 --micro-batch-size 32",
}
LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": True}  # fmt: skip
ONE, TWO = "1 process", "2 processes"
VARIANTS = {  # of the scaling part: experiment, processes, threads of each
    f"base, {ONE}": (BASE, 1, 1),
    f"base, {ONE}, 2 threads": (BASE, 1, 2),
    f"accelerate, {ONE}": (ACCELERATE, 1, 1),
    f"accelerate, {TWO}": (ACCELERATE, 2, 1),
    f"ddp, {ONE}": (DDP, 1, 1),
    f"ddp, {TWO}": (DDP, 2, 1),
}


@dataclass(frozen=True)
class Broken:
    """A broken variant, and the correct runs that it is compared with."""

    experiment: str
    patch: str
    processes: int
    flags: str  # of the runs
    correct: str  # what the correct runs are called, without their seed
    broken: str
    label: str  # in the figure
    picture: str
    counts: tuple[int, ...]  # numbers of processes for which the first step is compared
    first_seed: int = 0  # whose first step is compared
    panels: tuple[str, ...] = ("reward/correct", "loss/grad_norm", "policy/entropy", "loss/kl")


BROKEN = (
    Broken(ACCELERATE, "broken.patch", 2, "--steps 40 --minibatch-size 32 --epochs-per-step 2", "minibatches_seed",
           "broken_mean_seed", "mean of the ranks' means", "broken.png", (1, 2, 4), 2,
           ("reward/correct", "completion/length", "policy/entropy", "loss/kl")),
    Broken(DDP, "broken.patch", 3, "--steps 60 --prompts-per-step 4 --group-size 6", "cut_groups_seed",
           "broken_groups_seed", "advantages within each rank's part", "broken.png", (1, 2, 3)),
    Broken(DDP, "broken_forward.patch", 2, "--steps 40", "two_processes_seed",
           "broken_forward_seed", "called past the wrapper", "broken_forward.png", (1, 2)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config:
    parts: tuple[Literal["equality", "scaling", "broken"], ...] = ("equality", "scaling", "broken")  # what is measured
    seeds: tuple[int, ...] = (0, 1)  # of the runs of the broken variants
    repetitions: int = 3  # of every variant of the scaling part
    port: int = 29690  # at which the processes of one machine meet
    runs_dir: str = "runs"  # where the runs of the broken variants are written
    draw_only: bool = False  # draw the figures without measuring
    worker: str | None = None  # used by the program itself: train in this process and measure it, given as JSON


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if config.worker:
        work(**json.loads(config.worker))
        return
    data = read_json(RESULTS, "processes")
    if not config.draw_only:
        torch.set_num_threads(1)
        measure = {"equality": measure_equality, "scaling": measure_scaling, "broken": measure_broken}
        for part in config.parts:
            began, load, machine = time.time(), os.getloadavg()[0], describe_machine()
            for measured in measure[part](config):  # also what an interrupted measurement has found so far
                loads = {"load_before": load, "load_after": os.getloadavg()[0], "seconds": time.time() - began}
                data[part] = {"measured": measured} | loads | machine
                data[part]["command"] = f"python benchmarks/processes.py --parts {part}"
                write_json(RESULTS, data, entry="processes")
    draw(data, config.seeds)
    print_tables(data)


# Start processes


def start(script: Path, processes: int, arguments: Sequence[str], port: int) -> None:
    """Run a script in several processes of this machine, or alone without a launcher; its output only if it fails."""
    launcher = ["-m", "torch.distributed.run", "--master-port", str(port), "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(script), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    if result.returncode:
        sys.exit(f"{shlex.join(command)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")


def train(script: Path, processes: int, flags: str, port: int, what: str = "") -> dict:
    """Train in processes of their own, in a temporary directory, and return what `work` has measured."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "measured.json"
        arguments = [*shlex.split(flags), "--runs-dir", directory, "--name", "run"]
        worker = {"script": str(script), "arguments": arguments, "out": str(out), "began": time.time(), "what": what}
        start(Path(__file__), processes, ["--worker", json.dumps(worker)], port)
        measured = json.loads(out.read_text(encoding="utf-8"))
        if what == "parameters":
            measured["gradient"] = torch.load(out.with_suffix(".pt"))
        lines = (Path(directory) / script.parent.name / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(line) for line in lines.splitlines()]
    print(script.parent.name, processes, flags, f"{time.time() - worker['began']:.0f} s", flush=True)
    return measured | {"metrics": [row for row in steps if "loss/total" in row]}


@contextmanager
def patched(experiment: str, patch: str | None):
    """A copy of an experiment's train.py with a patch applied to it, or the file itself."""
    name = f"{experiment}/train.py"
    if patch is None:
        yield ROOT / name
        return
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / name
        copy.parent.mkdir()
        shutil.copy(ROOT / name, copy)
        subprocess.run(["git", "apply", str(ROOT / experiment / patch)], cwd=directory, check=True)
        if copy.read_bytes() == (ROOT / name).read_bytes():
            sys.exit(f"{patch} has changed nothing: is {directory} inside of a git checkout?")
        yield copy


# In one of the processes


def work(script: str, arguments: list[str], out: str, began: float, what: str) -> None:
    """Call main() of a train.py, and write what was measured while it trained, rank by rank, into `out`.

    Args:
        began: when the command was given, as time.time().
        what: "parameters" compares the ranks' parameters after each step, notes how near to the boundary of a token's
            interval a number was drawn, and keeps the main process's first gradient in a file beside `out`;
            "all_reduce" trains nothing, and times the averaging of as many numbers as `arguments` says.
    """
    if what == "all_reduce":
        time_all_reduce(int(arguments[0]), out)
        return
    spec = importlib.util.spec_from_file_location("train", script)
    module = sys.modules["train"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    steps: list[dict] = []
    models: list[torch.nn.Module] = []
    waited = [0.0]  # in calls that wait for values of the other ranks

    def timed(name: str, part: str) -> None:
        """Count the seconds of a function of train.py, without those that it waited, as a part of the step."""
        function: Callable = getattr(module, name)

        def wrapped(*args, **keywords):
            if part == "sampling":
                steps.append({"at": time.time()})
            if part == "update" and not models:
                models.extend(argument for argument in args if isinstance(argument, torch.nn.Module))
            start, waited_before = time.perf_counter(), waited[0]
            result = function(*args, **keywords)
            steps[-1][part] = time.perf_counter() - start - (waited[0] - waited_before)
            return result

        setattr(module, name, wrapped)

    def waits(name: str) -> None:
        function: Callable = getattr(module, name)

        def wrapped(*args):
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                waited[0] += time.perf_counter() - start

        setattr(module, name, wrapped)

    timed("sample_completions", "sampling")
    timed("token_log_probs", "reference")
    timed("update", "update")
    for name in {"gather", "gather_rows"} & vars(module).keys():
        waits(name)
    rollout_metrics, checkpoint, end_update = module.rollout_metrics, Run.checkpoint, UpdateStatistics.end_update
    gradient = Path(out).with_suffix(".pt")

    def keep_gradient(statistics, norm):
        if what == "parameters" and is_main() and not gradient.exists():
            clipped = torch.cat([weight.grad.flatten() for weight in models[0].parameters()])
            torch.save(clipped * (norm / clipped.norm()), gradient)  # as it was before it was clipped
        return end_update(statistics, norm)

    def keep_ids(completions, returns):
        steps[-1]["ids"] = [zlib.crc32(json.dumps(row.ids).encode()) for row in completions]
        return rollout_metrics(completions, returns)

    def end_step(run, step, policy, *rest):
        steps[-1]["waiting"], waited[0] = waited[0], 0.0
        if what == "parameters":
            steps[-1]["parameter_difference"] = difference_between_ranks(policy)
        return checkpoint(run, step, policy, *rest)

    def end_run(run, after):
        ranks = gather_from_ranks({"steps": steps, "peak_bytes": peak_memory_bytes("cpu")})
        if is_main():
            Path(out).write_text(json.dumps({"ranks": ranks, "startup": steps[0]["at"] - began}), encoding="utf-8")

    draw_tokens = sampling._draw

    def draw_near(logits, temperature, top_p, uniforms):
        if what == "parameters" and steps and "sampling" not in steps[-1]:  # not in an evaluation
            cdf = (logits.float() / temperature).log_softmax(dim=-1).to(uniforms.dtype).exp().cumsum(dim=-1)
            nearest = (cdf - uniforms[:, None] * cdf[:, -1:]).abs().min().item()
            steps[-1]["nearest_boundary"] = min(nearest, steps[-1].get("nearest_boundary", 1.0))
        return draw_tokens(logits, temperature, top_p, uniforms)

    UpdateStatistics.end_update, sampling._draw = keep_gradient, draw_near
    module.rollout_metrics, Run.checkpoint, Run.finish = keep_ids, end_step, end_run  # without a summary and a figure
    run_main(lambda: module.main(arguments))


def difference_between_ranks(policy: torch.nn.Module) -> float:
    """The largest difference between two ranks' values of one parameter."""
    if world_size() == 1:
        return 0.0
    highest = torch.cat([weight.detach().flatten() for weight in policy.parameters()])
    lowest = highest.clone()
    distributed.all_reduce(highest, distributed.ReduceOp.MAX)
    distributed.all_reduce(lowest, distributed.ReduceOp.MIN)
    return (highest - lowest).max().item()


def time_all_reduce(count: int, out: str) -> None:
    """Seconds that an all-reduce of `count` float32 numbers takes in messages of 25 MiB, as DDP sends them."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    messages = torch.ones(count).split(25 * 2**20 // 4)
    seconds = []
    for _ in range(22):
        distributed.barrier()
        start = time.perf_counter()
        for message in messages:
            distributed.all_reduce(message)
            message /= world_size()
        seconds.append(time.perf_counter() - start)
    if is_main():
        Path(out).write_text(json.dumps(seconds[2:]), encoding="utf-8")
    distributed.destroy_process_group()


# Measure


def measure_equality(config: Config) -> Iterator[dict]:
    """Per step, how far several processes are from experiment_base in one."""
    flags = f"{EQUALITY} {QUIET}"
    base = train(ROOT / BASE / "train.py", 1, flags, config.port, "parameters")
    found = {}
    for experiment, counts in EQUAL.items():
        for count in counts:
            run = train(ROOT / experiment / "train.py", count, flags, config.port, "parameters")
            found[f"{experiment}, {count}"] = compare(base, run)
    yield {"flags": EQUALITY, "runs": found}


def compare(base: dict, run: dict) -> list[dict]:
    rows = []
    steps = zip(base["metrics"], run["metrics"], base["ranks"][0]["steps"], run["ranks"][0]["steps"], strict=True)
    for old, new, old_step, new_step in steps:
        equal = [a == b for a, b in zip(old_step["ids"], new_step["ids"], strict=True)]
        rows.append({
            "step": old["step"],
            "grad_norm": abs(new["loss/grad_norm"] / old["loss/grad_norm"] - 1),
            "entropy": abs(new["policy/entropy"] - old["policy/entropy"]),
            "equal_completions": sum(equal) / len(equal),
            "parameters_between_ranks": new_step["parameter_difference"],
            "nearest_boundary": old_step["nearest_boundary"],  # in the sampling of experiment_base
        })  # fmt: skip
    return rows


def measure_scaling(config: Config) -> Iterator[dict]:
    """Repetitions of each variant, in turns, and the averaging of as many numbers as there are parameters."""
    found: dict = {}
    with tempfile.TemporaryDirectory() as directory:
        models = {policy: make_policy(policy, Path(directory)) for policy in POLICIES}
        for policy, flags in POLICIES.items():
            runs: dict[str, list[dict]] = {name: [] for name in VARIANTS}
            found[policy] = {"flags": flags, "parameters": models[policy][1], "all_reduce_seconds": [], "runs": runs}
        for _ in range(config.repetitions):
            for policy, flags in POLICIES.items():
                model, parameters = models[policy]
                for name, (experiment, processes, threads) in VARIANTS.items():
                    load = os.getloadavg()[0]
                    flags_of_run = f"{flags} {QUIET} --model {model} --threads {threads} --system-prompt ''"
                    run = train(ROOT / experiment / "train.py", processes, flags_of_run, config.port)
                    found[policy]["runs"][name].append(summarise(run) | {"load_before": load})
                out = Path(directory) / "seconds.json"
                worker = {"script": "", "arguments": [str(parameters)], "out": str(out), "began": 0}
                start(Path(__file__), 2, ["--worker", json.dumps(worker | {"what": "all_reduce"})], config.port)
                found[policy]["all_reduce_seconds"] += json.loads(out.read_text(encoding="utf-8"))
            yield found


def make_policy(name: str, directory: Path) -> tuple[str, int]:
    """What to give to --model, and how many parameters it has."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tiny = ROOT / "assets" / "tiny_policy"
    if name.startswith("bundled"):
        return "tiny", sum(weight.numel() for weight in LlamaForCausalLM.from_pretrained(tiny).parameters())
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    settings = LlamaConfig.from_pretrained(tiny).to_dict() | LLAMA | {"head_dim": 64}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.save_pretrained(directory / "llama")
    tokenizer.save_pretrained(directory / "llama")
    return str(directory / "llama"), sum(weight.numel() for weight in model.parameters())


def summarise(run: dict) -> dict:
    """Medians over the steps after the first, means over ranks of the parts of a step, memory of the largest rank."""
    metrics = run["metrics"][1:]
    ranks = [rank["steps"][1:] for rank in run["ranks"]]
    parts = ("sampling", "reference", "update", "waiting")
    return {
        "seconds": median(row["time/step"] for row in metrics),
        "tokens_per_second": median(row["time/tokens_per_second"] for row in metrics),
        "tokens": mean(row["time/tokens_per_second"] * row["time/step"] for row in metrics),
        "logged_waiting": median(row.get("time/waiting", 0.0) for row in metrics),
        "peak_bytes": [rank["peak_bytes"] for rank in run["ranks"]],
        "startup": run["startup"],
        **{part: median(mean(step.get(part, 0.0) for step in steps) for steps in zip(*ranks, strict=True))
           for part in parts},
    }  # fmt: skip


def first_gradients(variant: Broken, port: int) -> dict[str, dict]:
    """The first gradient for several numbers of processes, against that of one process, and the ranks' parameters."""
    flags = shlex.join(shlex.split(variant.flags)[2:])  # without --steps
    flags = f"--steps {10 if 'forward' in variant.patch else 1} {flags} --seed {variant.first_seed} {QUIET}"
    found: dict[str, dict] = {"flags": flags, "correct": {}, "broken": {}}
    alone = None  # the gradient of one process, as it is
    for kind, patch in (("correct", None), ("broken", variant.patch)):
        with patched(variant.experiment, patch) as script:
            for count in variant.counts:
                run = train(script, count, flags, port, "parameters")
                alone = run["gradient"] if alone is None else alone
                found[kind][str(count)] = {
                    "gradient_norm": run["gradient"].norm().item(),
                    "gradient_difference": ((run["gradient"] - alone).norm() / alone.norm()).item(),
                    "parameters_between_ranks": [step["parameter_difference"] for step in run["ranks"][0]["steps"]],
                }
    return found


def measure_broken(config: Config) -> Iterator[dict]:
    """Train each broken variant and the correct one, and compare their first steps for several numbers of processes."""
    found = {f"{variant.experiment}/{variant.patch}": first_gradients(variant, config.port) for variant in BROKEN}
    kept = []
    for variant in BROKEN:
        for name, patch in ((variant.correct, None), (variant.broken, variant.patch)):
            with patched(variant.experiment, patch) as script:
                for seed in config.seeds:
                    kept.append(Path(config.runs_dir) / variant.experiment / f"{name}{seed}")
                    if not (kept[-1] / "summary.json").exists():
                        flags = f"{variant.flags} --eval-every 0 --checkpoint-every 0 --seed {seed}"
                        arguments = [*shlex.split(flags), "--name", kept[-1].name, "--runs-dir", config.runs_dir]
                        start(script, variant.processes, arguments, config.port)
                        print(variant.experiment, patch or "as it is", flags, flush=True)
    for experiment in EQUAL:  # only now: changed files here would mark the commit of later runs as changed
        runs = [read_run(place) for place in kept if place.parent.name == experiment]
        keep_runs(ROOT / experiment / "results", runs)
    yield found


# Draw


def draw(data: dict, seeds: Sequence[int]) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    if "equality" in data:
        for experiment in EQUAL:
            draw_equality(data["equality"]["measured"]["runs"], experiment)
    if "scaling" in data:
        draw_scaling(data["scaling"]["measured"])
    for variant in BROKEN if "broken" in data else ():
        runs = read_runs(ROOT / variant.experiment / "results")
        names = {f"as it is, {variant.processes} processes": variant.correct, variant.label: variant.broken}
        groups = {label: [runs[f"{name}{seed}"] for seed in seeds] for label, name in names.items()}
        draw_comparison(groups, ROOT / variant.experiment / variant.picture, variant.panels)


def draw_equality(runs: dict[str, list[dict]], experiment: str) -> None:
    """Differences to experiment_base in one process, by step."""
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(1, 3, figsize=(11, 3.6))
    headings = {
        "grad_norm": "gradient norm, relative difference",
        "entropy": "entropy, difference (nats)",
        "equal_completions": "share of completions with equal tokens",
    }
    for axes, (key, heading) in zip(places, headings.items(), strict=True):
        for count in EQUAL[experiment]:
            rows = runs[f"{experiment}, {count}"]
            label = f"{count} process{'es' if count > 1 else ''}"
            style = {"color": f"C{count - 1}", "markersize": 3, "label": label}
            axes.plot([row["step"] for row in rows], [row[key] for row in rows], "o-", **style)
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if key == "equal_completions":
            lowest = min(row[key] for count in EQUAL[experiment] for row in runs[f"{experiment}, {count}"])
            axes.set_ylim(min(0.9, lowest - 0.01), 1.003)
        else:
            axes.set_yscale("symlog", linthresh=1e-9)
            axes.set_yticks([0, 1e-9, 1e-7, 1e-5, 1e-3, 1e-1])
            axes.set_ylim(0, 1)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(labels), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(ROOT / experiment / "equality.png", dpi=110)
    plt.close(figure)


def draw_scaling(measured: dict[str, dict]) -> None:
    """One row per policy: seconds of a step with its parts, tokens per second, memory of a process.

    Bars are the fastest repetition, since other work on the machine only adds to a time; dots are the medians.
    """
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(len(measured), 3, figsize=(11, 5.5), width_ratios=(2, 1, 1), squeeze=False)
    parts = {"sampling": "C2", "reference": "C4", "update": "C0", "waiting": "C1"}
    for (policy, found), row in zip(measured.items(), places, strict=True):
        names = list(found["runs"])[::-1]  # the first at the top
        limit = 1.5 * max(min(run["seconds"] for run in runs) for runs in found["runs"].values())
        row[0].set_xlim(0, limit)
        for place, name in enumerate(names):
            runs = found["runs"][name]
            fastest = min(runs, key=lambda run: run["seconds"])
            left = 0.0
            for part, color in parts.items():
                row[0].barh(place, fastest[part], left=left, color=color, label=part if place == 0 else None)
                left += fastest[part]
            rest = max(0.0, fastest["seconds"] - left)
            row[0].barh(place, rest, left=left, color="0.7", label="rest" if place == 0 else None)
            middle = median(run["seconds"] for run in runs)
            if middle < limit:
                label = "median of the repetitions" if place == 0 else None
                row[0].plot(middle, place, "o", color="black", markersize=4, label=label)
            else:
                row[0].text(
                    limit, place, f"median {middle:.1f} \N{RIGHTWARDS ARROW}", ha="right", va="center", fontsize=8
                )
            row[1].barh(place, fastest["tokens_per_second"], color="C0")
            row[1].plot(median(run["tokens_per_second"] for run in runs), place, "o", color="black", markersize=4)
            row[2].barh(place, median(max(run["peak_bytes"]) for run in runs) / 1e9, color="C0")
        row[0].set_yticks(range(len(names)), names, fontsize=8)
        headings = (f"{policy}: seconds per step", "tokens per second", "peak memory of a process (GB)")
        for axes, heading in zip(row, headings, strict=True):
            axes.set_title(heading, fontsize=10)
            axes.grid(alpha=0.3, axis="x")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in row[1:]:
            axes.set_yticks([])
    handles, labels = places[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=len(labels), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(ROOT / DDP / "scaling.png", dpi=110)
    plt.close(figure)


# Tables


def print_tables(data: dict) -> None:
    """The tables of the READMEs."""
    if "equality" in data:
        print_equality(data["equality"]["measured"]["runs"])
    for policy, found in data.get("scaling", {}).get("measured", {}).items():
        print_scaling(policy, found)
    for name, found in data.get("broken", {}).get("measured", {}).items():
        print(f"\n{name}\n| | processes | norm | difference | parameters between ranks |\n|---|---|---|---|---|")
        for kind in ("correct", "broken"):
            for count, first in found[kind].items():
                apart = first["parameters_between_ranks"]
                print(f"| {kind} | {count} | {first['gradient_norm']:.5f} | {first['gradient_difference']:.1e} "
                      f"| {apart[0]:.1e} (step 1), {apart[-1]:.1e} (step {len(apart)}) |")  # fmt: skip


def print_equality(runs: dict[str, list[dict]]) -> None:
    """The largest differences over the steps before the first other token, and the step of that."""
    some = next(iter(runs.values()))
    print("\ndraws nearest to a boundary:", sorted((row["nearest_boundary"], row["step"]) for row in some)[:3])
    print("\n| | first other token | gradient norm | entropy | parameters between ranks |\n|---|---|---|---|---|")
    for name, rows in runs.items():
        first = next((row["step"] for row in rows if row["equal_completions"] < 1), None)
        equal = [row for row in rows if first is None or row["step"] < first]
        cells = (f"{max((row[key] for row in equal), default=0):.1e}" for key in ("grad_norm", "entropy"))
        apart = max(row["parameters_between_ranks"] for row in rows)
        print(f"| {name} | {f'step {first}' if first else 'none'} | {' | '.join(cells)} | {apart:g} |")


def print_scaling(policy: str, found: dict) -> None:
    """Medians over the repetitions, with the lowest and the highest."""
    reduce = found["all_reduce_seconds"]
    print(f"\n{policy}, {found['parameters']:,} parameters; {found['flags']}; all-reduce of the gradients alone: "
          f"{median(reduce):.4f} s ({min(reduce):.4f} to {max(reduce):.4f})")  # fmt: skip
    columns = (
        "seconds",
        "tokens_per_second",
        "sampling",
        "reference",
        "update",
        "waiting",
        "logged_waiting",
        "startup",
    )
    print(f"| | {' | '.join(columns)} | peak GB | load |\n|---{'|---' * (len(columns) + 2)}|")
    for name, runs in found["runs"].items():
        cells = []
        for key in columns:
            values = [run[key] for run in runs]
            digits = 0 if key == "tokens_per_second" else 2
            cells.append(f"{median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})")
        peak = "/".join(f"{median(run['peak_bytes'][rank] for run in runs) / 1e9:.2f}"
                        for rank in range(len(runs[0]["peak_bytes"])))  # fmt: skip
        loads = [run["load_before"] for run in runs]
        print(f"| {name} | {' | '.join(cells)} | {peak} | {min(loads):.1f}-{max(loads):.1f} |")


if __name__ == "__main__":
    main()
