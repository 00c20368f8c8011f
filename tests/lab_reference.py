"""The laboratory of viewer/lab beside the experiments' own `train`, step by step.

python tests/lab_reference.py FILE.csv        # the table of equality in docs/lab.md: four minutes on one core
python tests/lab_reference.py                 # the seconds of 20 default steps in node
"""

import csv
import importlib
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import torch

import common.sampling
from common.keyed import keyed_generator
from common.logprobs import token_log_probs
from common.loss import probability_ratio
from viewer.lab.build import ALGORITHMS
from viewer.lab.contents import lab_data, worker_script

IMPORTANCE_CAP = 2
LARGE = 1e-4  # a gradient's size, by their root mean square, above which it is more than rounding
FULL = {"prompts_per_step": 16, "group_size": 8, "max_new_tokens": 48, "steps": 5}
# Their 16 updates a step enlarge rounding. At GSPO's clip of 3e-4 it decides who is clipped, in Python too when only
# its micro-batches are others
FULL_OF = {"gspo": {"steps": 2, "clip_eps": 0.01, "clip_eps_high": 0.02}, "cispo": {"steps": 2}}


def in_node(folder: Path, expression: str, given: object) -> list:
    """The value of an expression of lab.mjs, which gets `given`."""
    (folder / "scripts.mjs").write_text(worker_script(is_module=True), encoding="utf-8")
    (folder / "input.json").write_text(json.dumps({"loaded": lab_data(), "given": given}), encoding="utf-8")
    program = Path(__file__).resolve().with_name("lab.mjs")
    subprocess.run(["node", "--expose-gc", program, expression], cwd=folder, check=True)
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def record(train: ModuleType, name: str, flags: dict, lag: int = 0, correction: str = "none", mistake=None):
    """A run's steps in Python, and the case in which JavaScript computes them again.

    No train.py has a lag: its `sample` gets the weights of so many steps ago.
    """
    baseline = {"baseline": "none" if name == "reinforce" else "mean"} if "reinforce" in name else {}
    argv = [part for key, value in (flags | baseline).items() for part in (f"--{key.replace('_', '-')}", str(value))]
    config = train.parse_config(train.Config, [*argv, "--device", "cpu", "--eval-every", "0"], description="")
    task, policy = train.load_task(config), train.load_policy(config, config.temperature)
    reference = {"reference": train.make_reference(policy)} if hasattr(config, "kl_weight") else {}
    run = Mock(newest={}, steps=lambda n: range(1, n + 1), costs=lambda num_tokens: {})
    run.log = lambda step, metrics: setattr(run, "newest", metrics)
    steps, weights = [], [weights_of(policy)]  # before each step
    least = np.full(flat(weights[0]).shape, np.inf, dtype="f4")  # each weight's smallest gradient, by their r.m.s.

    def prepare(policy, optimizer):
        optimizer.register_step_pre_hook(see_gradient)
        return policy, optimizer

    def see_gradient(*_):
        gradient = flat({name: weight.grad.abs() for name, weight in policy.named_parameters()})
        np.minimum(least, gradient / np.sqrt(np.mean(gradient**2)), out=least)

    def log_samples(step, trajectories, experience, statistics):
        own = {"experience": experience, "of_rows": statistics.rows, "sampler": weights[max(0, step - 1 - lag)]}
        weights.append(weights_of(policy))
        own |= {"weights": weights[-1], "is_large": least > LARGE}
        steps.append(SimpleNamespace(metrics=run.newest, rows=trajectories, **own))

    def sample(policy, *arguments, **options):
        load(policy, weights[max(0, len(steps) - lag)])
        trajectories = common.sampling.sample(policy, *arguments, **options)
        load(policy, weights[-1])
        return trajectories

    def old_log_probs(config, policy, experience):
        if correction == "none":
            return experience.sampler_log_probs
        old = token_log_probs(policy, experience, config.micro_batch)
        ratio = probability_ratio(old, experience.sampler_log_probs, experience.action_mask)
        if correction == "mask":
            ratio = ratio.where((ratio <= IMPORTANCE_CAP) & (ratio >= 1 / IMPORTANCE_CAP), 0.0)
        experience.advantages = ratio.clamp(max=IMPORTANCE_CAP) * experience.advantages
        return old

    run.prepare, run.log_samples = prepare, log_samples
    own = {"old_log_probs": old_log_probs} if lag else {}
    with patch.multiple(train, create=True, sample=sample, **own):
        train.train(config, run, task, policy, **reference)
    settings = {key: value for key, value in flags.items() if key != "steps"}
    settings |= {"algorithm": name, "lag": lag, "correction": correction, "mistake": mistake}
    questions = [{key: row[key] for key in ("question", "answer")} for row in task.train_rows]
    case = {"settings": settings, "questions": questions, "given": [[*map(row_of, step.rows)] for step in steps]}
    return SimpleNamespace(config=config, policy=policy, before=weights[0], steps=steps, case=case)


def row_of(row) -> dict:
    log_probs = row.sampler_log_probs[row.prompt_length :]
    return {"ids": row.completion_ids, "sampler_log_probs": log_probs, "finish_reason": row.finish_reason}


def weights_of(policy) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in policy.named_parameters()}


def load(policy, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            weight.copy_(weights[name])


def flat(weights: dict[str, torch.Tensor]) -> np.ndarray:
    """All weights in one array, in the order of the laboratory."""
    return torch.cat([weights[name].flatten() for name in sorted(weights)]).numpy()


def relative(value: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))


def compare(recorded: list, folder: Path) -> list[dict]:
    """For each recorded run: the rows, those with the same tokens, and the largest difference of each kind."""
    found = in_node(folder, "train(given)", [run.case for run in recorded])
    return [differences(run, its, f"{folder}/{i}") for i, (run, its) in enumerate(zip(recorded, found, strict=True))]


def differences(run, found: list[dict], path: str) -> dict:
    """The largest differences; `later`: of terms and pushes after the first update, as a share of the row's largest."""
    out = dict.fromkeys(("rows", "equal", "draw", "advantage", "terms", "push", "later", "weights", "large_weights"), 0)

    def see(name: str, error: float) -> None:
        out[name] = max(out.get(name, 0), float(error))

    for index, (step, other) in enumerate(zip(run.steps, found, strict=True)):
        for b, (row, own_ids, its) in enumerate(zip(step.rows, other["own_ids"], other["rows"], strict=True)):
            out["rows"] += 1
            out["equal"] += row.completion_ids == own_ids
            if row.completion_ids != own_ids:
                see("draw", distance_of_draw(run, step, row, own_ids, (run.config.seed, index + 1)))
            advantages = step.experience.advantages[b]
            see("advantage", abs(advantages[0].item() - its["advantage"]) if len(advantages) == 1 else 0)
            updates = step.of_rows.get((row.prompt_index, row.completion_index), [])
            assert [update[:2] for update in updates] == [(own["epoch"], own["minibatch"]) for own in its["updates"]]
            (places,) = step.experience.action_mask[b].nonzero(as_tuple=True)  # of tokens that count
            for number, (update, own) in enumerate(zip(updates, its["updates"], strict=True)):
                for key in {"terms", "push", "ratio", "clipped", "capped", "kl"} & {*own, *update.measurements}:
                    values = update.measurements[key][places].numpy()
                    its_values = np.array(own[key], dtype=float)[places - row.prompt_length + 1]
                    error, size = np.abs(its_values - values).max(), np.abs(values).max()
                    is_later = key in ("terms", "push") and (index or number)
                    see("later", error / max(size, 1e-9)) if is_later else see(key, error)
        for name in {*step.metrics} & {*other["metrics"]}:
            see("metrics", abs(other["metrics"][name] - step.metrics[name]) / max(1, abs(step.metrics[name])))
        before, large = flat(run.before), step.is_large
        change = flat(step.weights) - before
        its_change = np.fromfile(f"{path}-{index}.f32", dtype="<f4", count=len(change)) - before
        see("weights", relative(its_change, change))
        see("large_weights", relative(its_change[large], change[large]))
    return out | {"share": float(large.mean())}


def distance_of_draw(run, step, row, own_ids: list[int], key: tuple[int, int]) -> float:
    """How far the uniform number of the first other token is from the boundary beyond which it would be that token."""
    pairs = zip(row.completion_ids, own_ids, strict=False)
    place = next(t for t, (a, b) in enumerate(pairs) if a != b)
    uniform = keyed_generator("tokens", *key, row.prompt_index, row.completion_index).random(place + 1)[-1]
    load(run.policy, step.sampler)
    with torch.no_grad():
        logits = run.policy.model(input_ids=torch.tensor([row.ids[: row.prompt_length + place]])).logits[0, -1].double()
    ends = (logits / run.policy.temperature).softmax(dim=-1).cumsum(dim=0)
    low, high = sorted((row.completion_ids[place], own_ids[place]))
    return max(abs(ends[low].item() - uniform), abs(ends[high - 1].item() - uniform))


def write_table(path: str) -> None:
    names = ("algorithm", "lag", "rows", "equal", "draw", "terms", "push", "later", "large_weights", "share", "weights")
    with open(path, "w", encoding="utf-8", newline="") as file, TemporaryDirectory() as folder:
        table = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        for name, lag in [(name, 0) for name in ALGORITHMS] + [("grpo", 4)]:
            train = importlib.import_module(f"{ALGORITHMS[name].replace('/', '.')}.train")
            run = record(train, name, FULL | FULL_OF.get(name, {}) | ({"steps": 6} if lag else {}), lag=lag)
            (found,) = compare([run], Path(folder))
            found = {key: f"{value:.2g}" if isinstance(value, float) else value for key, value in found.items()}
            table.writerow({"algorithm": name, "lag": lag} | found)


def print_speed() -> None:
    with TemporaryDirectory() as folder:
        _, posted = in_node(Path(folder), "talk(given)", [("start", {"settings": {}}), ("run", {"until": 20})])
    seconds = [message["seconds"] for message in posted if message["type"] == "step"]
    print({part: round(sum(step[part] for step in seconds), 1) for part in ("sample", "update")})


if __name__ == "__main__":
    write_table(sys.argv[1]) if len(sys.argv) > 1 else print_speed()
