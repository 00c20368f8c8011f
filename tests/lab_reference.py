"""What the experiments' own `train` computes, step by step, for comparison with the laboratory of viewer/lab."""

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import common.sampling
from common.experience import Experience
from common.keyed import keyed_generator
from common.logprobs import token_log_probs
from common.loss import probability_ratio
from viewer.lab.data import lab_data, worker_script

HERE = Path(__file__).resolve().parent
IMPORTANCE_CAP = 2


@dataclass
class Step:
    metrics: dict[str, float]
    trajectories: list
    experience: Experience
    statistics: object
    weights: dict[str, torch.Tensor]  # after it


@dataclass
class Recorder:
    """A run that keeps everything in memory: what `train` of a train.py calls."""

    newest: dict[str, float] = field(default_factory=dict)
    recorded: list[Step] = field(default_factory=list)

    def prepare(self, policy, optimizer):
        return policy, optimizer

    def restore(self, policy, optimizer):
        pass

    def steps(self, number):
        return range(1, number + 1)

    def lap(self, name):
        pass

    def costs(self, num_tokens):
        return {}

    def log(self, step, metrics):
        self.newest = metrics

    def log_samples(self, step, trajectories, experience, statistics):
        self.recorded.append(Step(self.newest, trajectories, experience, statistics, {}))

    def checkpoint(self, step, policy, optimizer):
        self.recorded[-1].weights = copy_of(policy)


def copy_of(policy) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in policy.named_parameters()}


def record(train: ModuleType, flags: dict, lag: int = 0, correction: str = "none") -> tuple[object, list[Step]]:
    """The task and the steps of a run. No train.py has a lag: its `sample` gets the weights of so many steps ago."""
    argv = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    config = train.parse_config(train.Config, [*argv, "--device", "cpu", "--eval-every", "0"], description="")
    task, policy = train.load_task(config), train.load_policy(config, config.temperature)
    kl_weight = getattr(config, "kl_weight", None)
    reference = {} if kl_weight is None else {"reference": train.make_reference(policy) if kl_weight else None}
    run, earlier = Recorder(), [copy_of(policy)]

    def sample_with_lag(policy, *arguments, **options):
        now = copy_of(policy)
        load(policy, earlier[max(0, len(run.recorded) - lag)])
        trajectories = common.sampling.sample(policy, *arguments, **options)
        load(policy, now)
        return trajectories

    def old_log_probs(config, policy, experience):
        if correction == "none":
            return experience.sampler_log_probs
        old = token_log_probs(policy, experience, config.micro_batch)
        weights = probability_ratio(old, experience.sampler_log_probs, experience.action_mask)
        if correction == "mask":
            weights = torch.where((weights > IMPORTANCE_CAP) | (weights < 1 / IMPORTANCE_CAP), 0.0, weights)
        experience.advantages = weights.clamp(max=IMPORTANCE_CAP) * experience.advantages
        return old

    def checkpoint(step, policy, optimizer):
        Recorder.checkpoint(run, step, policy, optimizer)
        earlier.append(run.recorded[-1].weights)

    run.checkpoint = checkpoint
    with pytest.MonkeyPatch.context() as patch:
        if lag:
            patch.setattr(train, "sample", sample_with_lag)
            patch.setattr(train, "old_log_probs", old_log_probs, raising=False)
        train.train(config, run, task, policy, **reference)
    return SimpleNamespace(config=config, task=task, policy=policy, before=earlier[0]), run.recorded


def load(policy, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            weight.copy_(weights[name])


def flat(weights: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([weight.flatten() for weight in weights.values()]).numpy()


def run_lab(cases: list[dict], folder: Path) -> list[list[dict]]:
    """The steps of each case {settings, questions, given} in node, each with its `weights`."""
    scripts, given = folder / "lab.mjs", folder / "input.json"
    scripts.write_text(worker_script(is_module=True), encoding="utf-8")
    given.write_text(json.dumps({"loaded": lab_data(), "cases": cases}), encoding="utf-8")
    subprocess.run(["node", HERE / "lab_steps.mjs", scripts, given, folder], check=True)
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    for number, steps in enumerate(found):
        for index, step in enumerate(steps):
            step["weights"] = np.fromfile(folder / f"{number}-{index}.f32", dtype="<f4")
    return found


def case_of(settings: dict, setup, steps: list[Step]) -> dict:
    given = [
        [
            {
                "ids": row.completion_ids,
                "sampler_log_probs": row.sampler_log_probs[row.prompt_length :],
                "finish_reason": row.finish_reason,
            }
            for row in step.trajectories
        ]
        for step in steps
    ]
    questions = [{name: row[name] for name in ("question", "answer")} for row in setup.task.train_rows]
    return {"settings": settings, "questions": questions, "given": given}


def distance_of_draw(setup, weights, trajectory, own_ids: list[int], key: tuple[int, int]) -> float:
    """How far the uniform number of the first other token is from the boundary beyond which it would be that token."""
    pairs = zip(trajectory.completion_ids, own_ids, strict=False)
    place = next(t for t, (a, b) in enumerate(pairs) if a != b)
    name = (*key, trajectory.prompt_index, trajectory.completion_index)
    uniform = keyed_generator("tokens", *name).random(place + 1)[-1]
    load(setup.policy, weights)
    with torch.no_grad():
        ids = torch.tensor([trajectory.ids[: trajectory.prompt_length + place]])
        logits = setup.policy.model(input_ids=ids).logits[0, -1].double() / setup.policy.temperature
    ends = logits.softmax(dim=-1).cumsum(dim=0)
    low, high = sorted((trajectory.completion_ids[place], own_ids[place]))
    return max(abs(ends[low].item() - uniform), abs(ends[high - 1].item() - uniform))
