"""The runs of imitation/distill/README.md: five seeds of each, some with a part of train.py replaced.

    python benchmarks/distillation.py                                # all runs: about two hours of one core
    python benchmarks/distillation.py --only distill grpo --seeds 0  # a part of them
    python benchmarks/distillation.py --table-only                   # the tables, from the committed data

The student of `half` is smaller: half of the layers of the bundled policy, taught again by make_policy.py. Runs that
already exist are not repeated, and results of missing ones are kept. Writes imitation/distill/results/, and prints the
tables of the README.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import ModuleType
from unittest.mock import patch

import torch
import tyro
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.advantages import generalized_advantages
from common.experience import Experience
from common.logprobs import MAX_LOGITS
from common.policy import Policy
from viewer.groups import read_run
from viewer.results import KeptRun, keep_runs, read_runs

from harness.base.config import TINY_POLICY

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = ROOT / "imitation/distill"
RESULTS = EXPERIMENT / "results"
COLUMNS = (
    "reward/correct", "completion/reasoned", "completion/length", "teacher/kl", "loss/grad_norm", "policy/entropy",
    "policy/token_advantage", "eval/greedy/accuracy", "eval/sampled/accuracy", "eval/sampled/reasoned", "time/step",
)  # fmt: skip
FIGURES = ("sampled/accuracy", "sampled/reasoned", "sampled/length", "greedy/accuracy")  # of an evaluation
DISTILL, GRPO, SFT = "imitation/distill", "experiment_accelerate", "imitation/sft"
MAKE, MADE = "imitation/tiny_policy/make_policy.py", "tiny_policy"  # where its runs go
EXAMINED = tuple(
    f"tools/{what}" for what in ("calculator/sampled/called", "calculator/forced_sampled/accuracy",
                                 "one_hop/sampled/called", "one_hop/forced_sampled/accuracy")
)  # fmt: skip
STEPS, WINDOW, REACHED = 40, 3, 0.9  # of a run; over which a curve is averaged; the accuracy to reach
ROWS = 128  # completions of a step


# Variants of train.py -------------------------------------------------------------------------------------------------


def reverse_kl(
    policy: Policy, teacher: Policy, sequences: torch.Tensor, action_mask: torch.Tensor, max_logits: int = MAX_LOGITS
) -> torch.Tensor:
    """KL(student || teacher) of the distributions that action tokens are drawn from, over the complete vocabulary.

        KL_t = sum_v p(v) (log p(v) - log q(v)),   p the student's and q the teacher's, given the tokens before t

    (B, T-1) in nats, with gradient; 0 where the mask is 0. Logits are computed in chunks, and once more in the backward
    pass, so that at most `max_logits` of either model exist at the same time.
    """
    hidden, positions = policy._hidden_states(sequences, action_mask)  # (N, H), (N,)
    with torch.no_grad():
        of_teacher, _ = teacher._hidden_states(sequences, action_mask)  # in the same order
    heads = policy.model.get_output_embeddings(), teacher.model.get_output_embeddings()

    def of_chunk(own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        states = zip((own, others), heads, (policy, teacher), strict=True)
        log_p, log_q = ((head(x).float() / model.temperature).log_softmax(dim=-1) for x, head, model in states)
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)

    size = max(1, max_logits // heads[0].out_features)
    chunks = zip(hidden.split(size), of_teacher.split(size), strict=True)
    values = torch.cat([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])
    zeros, width = torch.zeros(action_mask.shape, device=sequences.device), action_mask.shape[1]
    return zeros.index_put((positions // width, positions % width), values)


Plant = Callable[[ModuleType], AbstractContextManager]  # takes the train.py


def with_models(change: Callable[[ModuleType, list[Policy]], dict[str, object]]) -> Plant:
    """Replace the functions of train.py that `change` returns; it gets the policy and the teacher, once loaded."""

    def plant(train: ModuleType) -> AbstractContextManager:
        models: list[Policy] = []
        load_policy, load_teacher = train.load_policy, train.load_teacher

        def remember_policy(*arguments) -> Policy:
            models.append(load_policy(*arguments))
            return models[0]

        def remember_teacher(*arguments) -> Callable:
            teacher = load_teacher(*arguments)
            models.extend(teacher.args)  # a partial of `token_log_probs`
            return teacher

        replaced = {"load_policy": remember_policy, "load_teacher": remember_teacher}
        return patch.multiple(train, **replaced, **change(train, models))

    return plant


def full(train: ModuleType, models: list[Policy]) -> dict[str, object]:
    """The loss is the divergence itself, over the vocabulary, instead of an estimate from one token."""
    sampled = train.policy_loss

    def policy_loss(config, log_probs: torch.Tensor, micro: Experience, num_tokens: float) -> tuple:
        terms, diagnostics = sampled(config, log_probs, micro, num_tokens)
        exact = reverse_kl(*models, micro.sequences, micro.action_mask) / num_tokens
        return exact + 0.0 * terms, diagnostics  # so that log_probs still has a gradient: pushes of 0

    return {"policy_loss": policy_loss}


def row_mean(train: ModuleType, _: list[Policy]) -> dict[str, object]:
    """The mean over the tokens of a row, and then over rows, as in GRPO."""
    over_all = train.policy_loss

    def policy_loss(config, log_probs: torch.Tensor, micro: Experience, num_tokens: float) -> tuple:
        terms, diagnostics = over_all(config, log_probs, micro, num_tokens)
        return terms * num_tokens / micro.action_mask.sum(dim=1, keepdim=True) / ROWS, diagnostics

    return {"policy_loss": policy_loss}


def with_advantages(change: Callable[[list[Policy], Experience], torch.Tensor], loss: Callable | None = None) -> Plant:
    """Other advantages (B, T-1), and possibly another loss."""

    def replace(train: ModuleType, models: list[Policy]) -> dict[str, object]:
        update = train.update

        def update_otherwise(config, model, optimizer, experience: Experience, step: int):
            experience.advantages = change(models, experience) * experience.action_mask
            return update(config, model, optimizer, experience, step)

        return {"update": update_otherwise} | (loss(train, models) if loss else {})

    return with_models(replace)


def return_to_go(_: list[Policy], experience: Experience) -> torch.Tensor:
    """The sum of the advantages from each token on: the gradient of the divergence of complete answers (MiniLLM)."""
    own = experience.advantages
    return generalized_advantages(own, torch.zeros_like(own), experience.action_mask, gamma=1.0, gae_lambda=1.0)


@torch.no_grad()
def kl_as_reward(models: list[Policy], experience: Experience) -> torch.Tensor:
    """Minus the divergence at each position, whatever token was drawn there: no gradient on average."""
    return -reverse_kl(*models, experience.sequences, experience.action_mask)


def with_baseline(models: list[Policy], experience: Experience) -> torch.Tensor:
    """The advantages plus the divergence at each position: minus their mean over all tokens, which changes no mean."""
    return experience.advantages - kl_as_reward(models, experience)


@torch.no_grad()
def top_tokens(models: list[Policy], experience: Experience, k: int = 1) -> torch.Tensor:
    """The advantages of tokens that are among the teacher's k most probable ones; the others are not scored."""
    teacher = models[1]
    logits = teacher.model(experience.sequences, use_cache=False).logits[:, :-1]  # (B, T-1, V): the model is tiny
    is_top = (logits.topk(k).indices == experience.sequences[:, 1:, None]).any(dim=-1)
    return experience.advantages * is_top


PLANTS: dict[str, Plant] = {
    "full": with_models(full),
    "return-to-go": with_advantages(return_to_go),
    "row-mean": with_models(row_mean),
    "kl-as-reward": with_advantages(kl_as_reward),
    "kl-as-reward-row-mean": with_advantages(kl_as_reward, row_mean),
    "baseline": with_advantages(with_baseline),
    "top-1": with_advantages(top_tokens),
}

# Runs -----------------------------------------------------------------------------------------------------------------

FAST = {"lr": 1e-4}
NO_KL = {"kl-weight": 0}
RUNS: dict[str, tuple[str, dict]] = {  # the experiment, and flags
    "distill": (DISTILL, {}),
    "grpo": (GRPO, NO_KL),
    "distill-fast": (DISTILL, FAST),
    "grpo-fast": (GRPO, NO_KL | FAST),
    "full": (DISTILL, {}),
    "return-to-go": (DISTILL, {}),
    "row-mean": (DISTILL, {}),
    "kl-as-reward": (DISTILL, {}),
    "kl-as-reward-row-mean": (DISTILL, {}),
    "baseline": (DISTILL, {}),
    "top-1": (DISTILL, {}),
    "ignorant": (DISTILL, {"teacher": "tiny_countdown"}),
    "worse": (DISTILL, {"teacher": "tiny_tools"}),
    "tools": (DISTILL, {"model": "tiny_tools"}),
    "tools-grpo": (GRPO, NO_KL | {"model": "tiny_tools"}),
    "half": (DISTILL, FAST),
    "half-grpo": (GRPO, NO_KL | FAST),
}


CHATS = 4096  # of the teacher's completions that `sft` imitates
HALF_LESSONS = {"num-copying": 10_000, "num-reasoning": 120_000, "num-answering": 50_000, "lr": 1.5e-3}


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    only: tuple[str, ...] = ("sft", *RUNS)
    jobs: int = 1  # runs at the same time, each with one thread
    runs_dir: str = "runs/distillation"
    table_only: bool = False  # print without training
    here: str | None = None  # make this run with the first seed, in this process; results stay as they are


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if config.here is not None:
        return train_here(config, config.here, config.seeds[0])
    if not config.table_only:
        if any(name.startswith("half") for name in config.only):
            make_half(config)
        with ThreadPoolExecutor(config.jobs) as pool:
            list(pool.map(lambda run: train(config, *run), [(n, seed) for seed in config.seeds for n in config.only]))
        write_results(config)
    print(table(list(read_runs(RESULTS).values())))


def place_of(config: Config, name: str, seed: int) -> Path:
    return Path(config.runs_dir) / Path(RUNS[name][0] if name in RUNS else SFT).name / f"{name}-seed{seed}"


def half_of(config: Config) -> Path:
    return Path(config.runs_dir) / MADE / "half" / "final"


def make_half(config: Config) -> None:
    """The smaller student: the first and the last layer of the bundled policy, and then its lessons once more."""
    if half_of(config).exists():
        return
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32)
    model.model.layers = torch.nn.ModuleList([model.model.layers[0], model.model.layers[-1]])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers, model.config.layer_types = 2, None
    source = Path(config.runs_dir) / "half"
    model.save_pretrained(source)
    AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(source)
    flags = HALF_LESSONS | {"model": source, "dtype": "bfloat16", "checkpoint-every": 0}
    call(MAKE, flags | {"name": "half", "runs-dir": config.runs_dir})


def train(config: Config, name: str, seed: int) -> None:
    """One run, in separate processes with one thread; a student that knew tools is examined afterwards."""
    place = place_of(config, name, seed)
    if name == "sft":
        return imitate(config, place, seed)
    if not (place / "summary.json").exists():
        call("benchmarks/distillation.py", {"here": name, "seeds": seed, "runs-dir": config.runs_dir})
        print(place, flush=True)
    if name.startswith("tools") and not (examination := place.parent.parent / MADE / place.name).exists():
        flags = {"num-copying": 0, "num-reasoning": 0, "num-answering": 0, "lessons": "tools", "embeddings": "as_is"}
        call(MAKE, flags | {"model": place / "final", "name": examination.name, "runs-dir": config.runs_dir})


def imitate(config: Config, place: Path, seed: int) -> None:
    """Learn from the teacher's own completions: the forward KL divergence, one token at a time."""
    chats, results = place.with_name(f"{place.name}.jsonl"), place.with_name(f"{place.name}-evaluation")
    if results.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    given = {"model": "tiny_teacher", "limit": CHATS, "seed": seed, "output": chats}
    call("imitation/sft/make_chats.py", given)
    call(SFT, {"model": "tiny", "data": chats, "seed": seed, "name": place.name, "runs-dir": config.runs_dir})
    call("evaluate.py", {"model": place / "final", "limit": 256, "seed": seed, "output": results})
    print(place, flush=True)


def call(program: str, flags: dict[str, object]) -> None:
    """Run a program of this repository, or the train.py of an experiment."""
    path = ROOT / program / "train.py" if not program.endswith(".py") else ROOT / program
    command = [sys.executable, str(path), *words_of(flags)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} failed:\n{done.stderr[-3000:]}")


def train_here(config: Config, name: str, seed: int) -> None:
    """The experiment's own `main`, with the variant in it."""
    from harness.run.start import run_main

    experiment, flags = RUNS[name]
    flags = {"steps": STEPS, "seed": seed, "name": f"{name}-seed{seed}", "runs-dir": config.runs_dir} | flags
    flags |= {"samples-every": 0, "checkpoint-every": 0, "eval-every": 5}
    flags |= {"model": half_of(config)} if name.startswith("half") else {}
    spec = importlib.util.spec_from_file_location("train", ROOT / experiment / "train.py")
    module = sys.modules["train"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with PLANTS.get(name, lambda _: nullcontext())(module):
        run_main(lambda: module.main(words_of(flags)))


def words_of(flags: dict[str, object]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


# Results --------------------------------------------------------------------------------------------------------------


def write_results(config: Config) -> None:
    """Collect the values for the figures and tables from the runs; other results are kept."""
    runs = []
    for name in config.only:
        for seed in config.seeds:
            place = place_of(config, name, seed)
            if not (place / "summary.json").exists():
                continue
            run = read_run(place)
            about = {"run": name, "seed": seed} | {key: run.config[key] for key in ("machine", "commit", "lr")}
            summary = {key: run.summary[key] for key in ("seconds", "parameters")}
            if name == "sft":
                found = read_json(place.with_name(f"{place.name}-evaluation") / "results.json")
                summary["after"] = {f"{how}/accuracy": found[how]["accuracy"]["value"] for how in ("greedy", "sampled")}
            else:
                about["eval_prompts"] = run.config["eval_prompts"]
                for when in ("before", "after"):
                    summary[when] = {key: run.summary[when][key] for key in FIGURES}
            if name.startswith("tools"):
                found = read_json(place.parent.parent / MADE / place.name / "summary.json")
                summary["examination"] = {key: found[key] for key in EXAMINED}
            runs.append(KeptRun(RESULTS / place.name, about, summary, [] if name == "sft" else run.metrics.rows))
    keep_runs(RESULTS, runs, COLUMNS)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def reached(run: KeptRun, accuracy: float) -> tuple[int, float] | None:
    """The first step at which the training accuracy, averaged over `WINDOW` steps, is this high; sampled tokens."""
    steps, tokens = [row for row in run.metrics.rows if "reward/correct" in row], 0.0
    for index, row in enumerate(steps):
        tokens += ROWS * row["completion/length"]
        last = steps[max(0, index + 1 - WINDOW) : index + 1]
        if len(last) == WINDOW and mean(row["reward/correct"] for row in last) >= accuracy:
            return row["step"], tokens
    return None


def table(runs: list[KeptRun]) -> str:
    """Mean (lowest to highest) over the seeds of every run."""
    heads = ("run", "step of 0.8", f"step of {REACHED}", "thousand tokens", "sampled", "greedy", "KL at the end")
    lines = [heads, ("---",) * len(heads)]
    for name in dict.fromkeys(run.config["run"] for run in runs):
        group = [run for run in runs if run.config["run"] == name]
        found = {accuracy: [reached(run, accuracy) for run in group] for accuracy in (0.8, REACHED)}
        cells = [", ".join(str(x[0]) if x else "-" for x in found[accuracy]) for accuracy in found]
        cells.append(spread([x[1] / 1000 for x in found[REACHED] if x], 0))
        for key in ("sampled/accuracy", "greedy/accuracy"):
            cells.append(spread([run.summary["after"][key] for run in group]))
        last = [[row["teacher/kl"] for row in run.metrics.rows if "teacher/kl" in row][-1:] for run in group]
        lines.append((name, *cells, spread([kl for kls in last for kl in kls])))
        for key in EXAMINED if name.startswith("tools") else ():
            lines.append((key, spread([run.summary["examination"][key] for run in group])))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: list[float], digits: int = 3) -> str:
    if not values:
        return "-"
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
