"""Every flag of experiment_base does something: a run with it differs from the run without it as the flag promises."""

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import common.sampling
from common.config import TINY_POLICY, UserError
from common.logprobs import Policy

# A learning rate and two epochs which make every update visible in the next one.
BASE = (
    *("--steps", "2", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "16", "--eval-prompts", "2"),
    *("--lr", "1e-3", "--epochs-per-step", "2", "--name", "x"),
)
LORA = ("--lora-rank", "2")


@dataclasses.dataclass
class Outcome:
    """What a run leaves behind, and what its code was seen doing."""

    directory: Path
    output: str  # what it printed
    policy: Policy  # as it was at the end
    training_rows: list[int]  # of every forward pass with gradient
    scoring_rows: list[int]  # of every one without
    sampling_rows: list[int]  # completions that were sampled at once
    mlp_passes: int  # of one layer, while training
    num_threads: int

    @property
    def metrics(self) -> list[dict]:
        """One entry a step; before and after them the evaluations."""
        return read_lines(self.directory / "metrics.jsonl")

    @property
    def samples(self) -> list[dict]:
        return read_lines(self.directory / "samples.jsonl")

    def all_values(self, name: str) -> list[float]:
        """A metric's value at every step that has it."""
        return [entry[name] for entry in self.metrics if name in entry]

    def has(self, *names: str) -> bool:
        return all((self.directory / name).exists() for name in names)

    def settings(self, name: str) -> dict:
        return json.loads((self.directory / name).read_text())

    def checkpoints(self) -> set[str]:
        return {path.name for path in self.directory.glob("checkpoints/*")}

    def weights(self) -> torch.Tensor:
        return torch.cat([x.flatten() for x in load_file(self.directory / "final" / "model.safetensors").values()])


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def reproducible(outcome: Outcome) -> list[dict]:
    """The metrics without what is never twice the same."""
    return [
        {name: value for name, value in entry.items() if not name.startswith(("time/", "memory/"))}
        for entry in outcome.metrics
    ]


def agree(one: Outcome, other: Outcome, tolerance: float = 1e-4) -> bool:
    first, second = reproducible(one), reproducible(other)
    return len(first) == len(second) and all(
        a == pytest.approx(b, abs=tolerance, rel=tolerance) for a, b in zip(first, second, strict=True)
    )


def watched(train: ModuleType, argv: tuple[str, ...], directory: Path, patch: pytest.MonkeyPatch, capture) -> Outcome:
    """Run train.py in `directory`, and look over the shoulder of what it calls."""
    seen = SimpleNamespace(policy=None, training=[], scoring=[], sampling=[], mlp_passes=0)
    load_policy, forward, complete = train.load_policy, Policy.forward, common.sampling._complete

    def load_and_keep(*arguments):
        seen.policy = load_policy(*arguments)
        layer = next(module for name, module in seen.policy.named_modules() if name.endswith("layers.0.mlp"))
        layer.register_forward_hook(lambda *_: count_mlp() if torch.is_grad_enabled() else None)
        return seen.policy

    def count_mlp() -> None:
        seen.mlp_passes += 1

    def forward_and_count(policy, sequences, *arguments, **options):
        (seen.training if torch.is_grad_enabled() else seen.scoring).append(len(sequences))
        return forward(policy, sequences, *arguments, **options)

    def complete_and_count(policy, prompts, rows, *arguments):
        seen.sampling.append(len(rows))
        return complete(policy, prompts, rows, *arguments)

    patch.setattr(train, "load_policy", load_and_keep)
    patch.setattr(Policy, "forward", forward_and_count)
    patch.setattr(common.sampling, "_complete", complete_and_count)
    patch.setattr("viewer.curve.draw_curve", lambda _: None)  # half of such a run's time, and no flag is about it
    patch.setenv("WANDB_MODE", "offline")
    patch.chdir(directory)
    try:
        train.main([*BASE, *argv])
        num_threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(1)
    (directory,) = directory.glob("*/experiment_base/*")
    return Outcome(
        directory=directory,
        output=capture.readouterr().out,
        policy=seen.policy,
        training_rows=seen.training,
        scoring_rows=seen.scoring,
        sampling_rows=seen.sampling,
        mlp_passes=seen.mlp_passes,
        num_threads=num_threads,
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """What flags name: data, a model whose head is not the bundled one's."""
    place = tmp_path_factory.mktemp("files")
    for name, word in (("mine", "plus"), ("held", "and")):
        rows = [{"question": f"What is {n} {word} {n}?", "answer": str(2 * n)} for n in range(8)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(TINY_POLICY, place / "model")
    weights = load_file(place / "model" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 0.5
    save_file(weights, place / "model" / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, ...], Outcome]:
    """The runs that there have been, by their flags."""
    return {}


@pytest.fixture
def run(known, load_script, files, tmp_path_factory, capsys) -> Iterator[Callable[..., Outcome]]:
    """Run train.py with the given flags behind those of BASE; `files/` stands for the directory of that fixture."""

    def with_flags(*argv: str) -> Outcome:
        if argv not in known:
            given = tuple(word.replace("files/", f"{files}/") for word in argv)
            with pytest.MonkeyPatch.context() as patch:
                capsys.readouterr()
                train = load_script("experiment_base/train.py")
                known[argv] = watched(train, given, tmp_path_factory.mktemp("run"), patch, capsys)
        return known[argv]

    return with_flags


def bundled_rows() -> dict[str, dict]:
    from common.config import TRAIN_DATA

    return {row["question"]: row for row in read_lines(TRAIN_DATA)}


def kinds(outcome: Outcome, field: str) -> list[int]:
    """A field of the bundled file, for every question that was sampled."""
    rows = bundled_rows()
    return [rows[sample["question"]][field] for sample in outcome.samples]


def updates(outcome: Outcome, name: str) -> list[set[int]]:
    return [{update[name] for update in sample["updates"]} for sample in outcome.samples]


def rows_of_steps(outcome: Outcome) -> list[int]:
    """How many completions each step sampled: its tokens by their mean number a completion."""
    steps = [entry for entry in outcome.metrics if "time/step" in entry]
    return [round(entry["time/tokens_per_second"] * entry["time/step"] / entry["completion/length"]) for entry in steps]


def first(outcome: Outcome, name: str) -> float:
    return outcome.all_values(name)[0]


def last(outcome: Outcome, name: str) -> float:
    return outcome.all_values(name)[-1]


def differs(name: str, at: Callable = last) -> Callable[[Outcome, Outcome], bool]:
    """A check that a metric is another one, by more than any rounding."""
    return lambda new, old: abs(at(new, name) - at(old, name)) > 1e-5


@dataclasses.dataclass
class Change:
    """What a flag is to change."""

    given: tuple[str, ...]
    check: Callable[[Outcome, Outcome], bool]  # of the run with `given`, and the run with `also` alone
    also: tuple[str, ...] = ()  # what the flag needs beside it
    needs: str | None = None  # a package


CHANGES = {
    "model": Change(
        ("--model", "files/model"), lambda new, old: first(new, "policy/entropy") > 1.5 * first(old, "policy/entropy")
    ),
    "seed": Change(("--seed", "1"), lambda new, old: new.samples[0]["question"] != old.samples[0]["question"]),
    "threads": Change(
        ("--threads", "2"),
        lambda new, old: (
            (new.num_threads, old.num_threads) == (2, 1)
            and "2 thread" in new.settings("config.json")["machine"]
            and agree(new, old)
        ),
    ),
    "device": Change(
        ("--device", "cpu"), lambda new, old: new.policy.device.type == "cpu" and (torch.cuda.is_available() or agree(new, old))
    ),
    "dtype": Change(
        ("--dtype", "bfloat16"),
        lambda new, old: (
            first(new, "policy/sampler_gap") > 1e-4 > first(old, "policy/sampler_gap")
            and {weight.dtype for weight in new.policy.parameters()} == {torch.float32}
        ),
    ),
    "attn_implementation": Change(
        ("--attn-implementation", "eager"),
        lambda new, old: (
            new.policy.model.config._attn_implementation == "eager"
            and old.policy.model.config._attn_implementation == "sdpa"
            and agree(new, old)
        ),
    ),
    "gradient_checkpointing": Change(
        ("--gradient-checkpointing",),
        lambda new, old: new.mlp_passes == 2 * old.mlp_passes > 0 and agree(new, old),
    ),
    "lora_rank": Change(
        LORA,
        lambda new, old: (
            new.settings("final/adapter_config.json")["r"] == 2
            and not new.has("final/model.safetensors")
            and sum(x.numel() for x in new.policy.parameters() if x.requires_grad) < 20_000
        ),
    ),
    "lora_alpha": Change(("--lora-alpha", "40"), differs("policy/ratio_max", first), also=LORA),
    "load_in": Change(
        ("--load-in", "4bit"),
        lambda new, old: (
            any(type(module).__name__ == "Linear4bit" for module in new.policy.modules())
            and differs("policy/entropy", first)(new, old)
        ),
        also=LORA,
        needs="bitsandbytes",
    ),
    "save_merged": Change(
        ("--save-merged",),
        lambda new, old: new.has("final_merged/model.safetensors") and not old.has("final_merged"),
        also=LORA,
    ),
    "eval_prompts": Change(
        ("--eval-prompts", "3"),
        lambda new, old: [len(x.settings("before.json")[1]) for x in (new, old)] == [3, 2],
    ),
    "checkpoint_every": Change(
        ("--checkpoint-every", "1"),
        lambda new, old: (new.checkpoints(), old.checkpoints()) == ({"step_1", "step_2"}, {"step_2"}),
    ),
    "keep_checkpoints": Change(
        ("--keep-checkpoints", "1"),
        lambda new, old: (new.checkpoints(), old.checkpoints()) == ({"step_2"}, {"step_1", "step_2"}),
        also=("--checkpoint-every", "1"),
    ),
    "wandb": Change(
        ("--wandb",),
        lambda new, old: any(new.directory.glob("wandb/offline-run-*/*.wandb")) and not old.has("wandb"),
        needs="wandb",
    ),
    "name": Change(("--name", "y"), lambda new, old: (new.directory.name, old.directory.name) == ("y", "x")),
    "runs_dir": Change(
        ("--runs-dir", "elsewhere"),
        lambda new, old: [x.directory.parent.parent.name for x in (new, old)] == ["elsewhere", "runs"],
    ),
    "data": Change(("--data", "files/mine.jsonl"), lambda new, old: all("plus" in x["question"] for x in new.samples)),
    "eval_data": Change(
        ("--eval-data", "files/held.jsonl"), lambda new, old: "0 and 0" in new.output and "0 and 0" not in old.output
    ),
    "max_terms": Change(
        ("--max-terms", "2"), lambda new, old: max(kinds(new, "num_terms")) == 2 < max(kinds(old, "num_terms"))
    ),
    "max_digits": Change(
        ("--max-digits", "1"), lambda new, old: max(kinds(new, "num_digits")) == 1 < max(kinds(old, "num_digits"))
    ),
    "max_question_length": Change(
        ("--max-question-length", "12"),
        lambda new, old: max(len(x["question"]) for x in new.samples) <= 12 < max(len(x["question"]) for x in old.samples),
    ),
    "system_prompt": Change(
        ("--system-prompt", "Be brief."),
        lambda new, old: new.samples[0]["prompt_length"] > old.samples[0]["prompt_length"]
        and new.samples[0]["question"] == old.samples[0]["question"],
    ),
    "eval_every": Change(
        ("--eval-every", "1"),
        lambda new, old: [len(x.all_values("eval/greedy/accuracy")) for x in (new, old)] == [4, 2],
    ),
    "samples_every": Change(
        ("--samples-every", "2"),
        lambda new, old: [{entry["step"] for entry in x.samples} for x in (new, old)] == [{2}, {1, 2}],
    ),
    "sampling_rows": Change(
        ("--sampling-rows", "8"),
        lambda new, old: max(new.sampling_rows) == 8 < max(old.sampling_rows) and agree(new, old),
    ),
    "steps": Change(("--steps", "1"), lambda new, old: [x.metrics[-1]["step"] for x in (new, old)] == [1, 2]),
    "prompts_per_step": Change(
        ("--prompts-per-step", "3"), lambda new, old: (rows_of_steps(new), rows_of_steps(old)) == ([12, 12], [16, 16])
    ),
    "group_size": Change(
        ("--group-size", "2"),
        lambda new, old: [max(entry["completion_index"] for entry in x.samples) for x in (new, old)] == [1, 3],
    ),
    "max_new_tokens": Change(
        ("--max-new-tokens", "6"),
        lambda new, old: [max(sum(entry["action_mask"]) for entry in x.samples) for x in (new, old)] == [6, 16],
    ),
    "temperature": Change(
        ("--temperature", "2"),
        lambda new, old: (
            first(new, "policy/entropy") > 1.5 * first(old, "policy/entropy") and first(new, "policy/sampler_gap") < 1e-4
        ),
    ),
    "top_p": Change(
        ("--top-p", "0.3"),
        lambda new, old: (
            "biased" in new.output
            and "biased" not in old.output
            and min(min(entry["sampler_log_probs"]) for entry in new.samples) > -2.5
            > min(min(entry["sampler_log_probs"]) for entry in old.samples)
        ),
    ),
    "epochs_per_step": Change(
        ("--epochs-per-step", "3"),
        lambda new, old: set.union(*updates(new, "epoch")) == {0, 1, 2} and set.union(*updates(old, "epoch")) == {0, 1},
    ),
    "minibatch_size": Change(
        ("--minibatch-size", "8"),
        lambda new, old: (
            (set.union(*updates(new, "minibatch")), set.union(*updates(old, "minibatch"))) == ({0, 1}, {0})
            and set(new.training_rows) == {8}
            and differs("policy/ratio_max", first)(new, old)
        ),
    ),
    "micro_batch_size": Change(
        ("--micro-batch-size", "5"),
        lambda new, old: (
            max(new.training_rows) == max(new.scoring_rows) == 5
            and max(old.training_rows) == max(old.scoring_rows) == 16
            and agree(new, old)
        ),
    ),
    "lr": Change(("--lr", "1e-5"), lambda new, old: last(new, "loss/kl") < 0.01 * last(old, "loss/kl")),
    "weight_decay": Change(
        ("--weight-decay", "10"), lambda new, old: new.weights().norm() < 0.99 * old.weights().norm()
    ),
    "clip_eps": Change(
        ("--clip-eps", "0.001"),
        lambda new, old: first(new, "policy/clipped") > first(old, "policy/clipped") and differs("loss/kl")(new, old),
    ),
    "kl_weight": Change(
        ("--kl-weight", "0"),
        lambda new, old: (
            not new.all_values("loss/kl")
            and len(old.all_values("loss/kl")) == 2
            and differs("policy/ratio_max")(new, old)
            and not new.scoring_rows
        ),
    ),
    # far below AdamW's epsilon, so that the step is shorter and not only the number
    "max_grad_norm": Change(
        ("--max-grad-norm", "1e-9"), lambda new, old: first(new, "policy/ratio_max") - 1 < 0.5 * (first(old, "policy/ratio_max") - 1)
    ),
    "format_weight": Change(
        ("--format-weight", "0.5"),
        lambda new, old: (
            first(new, "reward/total") == pytest.approx(first(new, "reward/correct") + 0.5 * first(new, "reward/format"))
            and first(old, "reward/total") == pytest.approx(first(old, "reward/correct"))
            and differs("policy/ratio_max", first)(new, old)
        ),
    ),
}  # fmt: skip

# Flags whose effect begins with what they refuse.
REFUSED = {
    "resume": (("--resume", "nowhere"), "no config.json of a run can be read there"),
    "model": (("--model", "./nowhere"), "there is no such directory"),
    "device": (("--device", "cuda:99"), "this machine has"),
}


def test_every_flag_is_in_the_table(load_script):
    fields = {field.name for field in dataclasses.fields(load_script("experiment_base/train.py").Config)}
    assert CHANGES.keys() | REFUSED.keys() == fields


def test_the_same_flags_give_the_same_figures(run):
    """Without this no difference below would mean anything."""
    again = run("--runs-dir", "again")
    assert reproducible(again) == reproducible(run())
    assert first(again, "loss/grad_norm") > 0
    assert first(again, "group/without_signal") < 1


@pytest.mark.parametrize("name", CHANGES)
def test_a_flag_changes_what_it_promises(run, name):
    change = CHANGES[name]
    if change.needs is not None:
        pytest.importorskip(change.needs)
    assert change.check(run(*change.also, *change.given), run(*change.also))


@pytest.mark.parametrize("name", REFUSED)
def test_a_flag_refuses_what_does_not_exist(tmp_path, monkeypatch, load_script, name):
    argv, sentence = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        load_script("experiment_base/train.py").main(list(argv))
    assert not list(tmp_path.iterdir())
