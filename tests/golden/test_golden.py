"""Golden runs: every experiment gives the same numbers however its work is divided, and after a kill.

Each row of RUNS is trained once, for two or three steps; this run is complete and consistent. Then it is trained again
in the ways that the row names, each of which must give the same run. Runs of several processes share one launch, in
which each rank executes `main` below.
"""

import contextlib
import functools
import importlib.util
import io
import math
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from run_files import ROOT, contents, events_of, json_of, launch, metrics_of, read_lines, rows_of, write_rows
from safetensors.torch import load_file
from torch import distributed
from transformers import AutoTokenizer

import viewer
from common.errors import UserError
from common.parallel import call_once, is_main, rank
from tasks import arithmetic

from harness.base.places import in_experiments
from harness.base.signals import leave


class Row(NamedTuple):
    flags: str = ""
    ways: str = "killed divided two"
    quick: str = ""  # the ways of the first tier


WAYS = {  # and how equal the run is
    "killed": "bit for bit",  # resumed from the checkpoint of its first step, after a kill at a random moment
    "divided": "up to rounding",  # by DIVIDED
    "two": "up to rounding",  # in two processes
    "three": "up to rounding",
    "sharded": "up to rounding",  # over two processes, by Accelerate's FSDP2
}
# Other batches, of training and of sampling; rows padded instead of packed, with checkpoints of activations
DIVIDED = ("--micro-batch-size 2", "--generation-batch-size 4", "--no-pack", "--gradient-checkpointing")
# Flags of all runs, as far as an experiment has them. Two processes cannot share the three groups of a minibatch, and a
# micro-batch holds parts of groups.
FLAGS = {"prompts_per_step": 6, "group_size": 3, "max_new_tokens": 12, "minibatch_size": 9, "micro_batch_size": 5}
FLAGS |= {"steps": 2, "lr": 1e-5, "eval_prompts": 2, "eval_every": 0, "checkpoint_every": 1, "keep_checkpoints": 99}
FLAGS |= {"pairs_per_step": 4, "max_pairs": 8, "max_prompts": 48, "reward_functions": "rewards.py", "seed": 3}
FLAGS |= {"device": "cpu"}
WITHOUT_SCALE = ("difference", "correlation")  # only rounding, or enlarging it
SCHEDULE = "--lr-warmup-steps 2 --eval-every 1 --keep-best eval/greedy/length"
TOOLS = "--tools tools.py --max-new-tokens 40 --group-size 4 --minibatch-size 8"
RUNS = {  # by experiment, perhaps several with a word after its path
    "experiment_base": Row(
        f"{SCHEDULE} --epochs-per-step 2 --tokens-per-micro-batch 150",
        "killed divided two three sharded",
        quick="killed divided",
    ),
    "experiment_base no signal": Row("--kl-weight 0 --reward-weight varied=0 --max-new-tokens 2", "killed two"),
    "experiment_base not finite": Row("--reward-functions not_finite.py --minibatch-size 18", "killed two three"),
    "experiment_base adapter": Row("--kl-weight 0 --lora-rank 2 --save-merged", quick="killed"),
    "experiment_base given adapter": Row("--model tiny_teacher", "killed"),
    "experiment_base merged adapter": Row("--model tiny_teacher --lora-rank 2", "killed"),
    "experiment_base 4 bits": Row("--load-in 4bit --lora-rank 2", "killed divided"),
    "experiment_base 8-bit moments": Row("--optimizer adamw_8bit", "killed divided"),
    "experiment_drgrpo": Row("--kl-weight 0"),
    "experiment_accelerate": Row(SCHEDULE),
    # two processes split a group
    "experiment_accelerate_ddp": Row("--prompts-per-step 3 --group-size 6 --minibatch-size 6", quick="killed"),
    "experiment_multiturn_tool_calling": Row(TOOLS),
    "experiment_multiturn_qa": Row(TOOLS),
    "agents/world": Row("--credit gigpo --max-new-tokens 30 --max-turns 4", quick="killed"),
    "agents/world own": Row(
        "--environment world.py --data worlds.jsonl --credit walked_graph --max-turn-tokens 3 --observation-weight 0.1"
    ),
    "agents/critic": Row("--max-new-tokens 30 --critic-warmup 1 --gae-lambda 0.95 --gamma 0.9"),
    "policy_gradients/reinforce": Row("--prompts-per-step 12"),
    "policy_gradients/rloo": Row(),
    "policy_gradients/maxrl": Row(),
    "policy_gradients/gspo": Row(),
    "policy_gradients/cispo": Row(),
    # groups move to other processes than those that sampled them
    "policy_gradients/dapo": Row("--max-rounds 3 --prompts-per-step 4", quick="killed"),
    "policy_gradients/ppo": Row("--steps 3 --critic-warmup 1 --gae-lambda 0.95", "killed divided two three sharded"),
    "rewards/reward_model": Row(quick="killed"),
    "rewards/dpo": Row(),
    "rewards/majority": Row("--max-new-tokens 24"),
    "rewards/likelihood": Row("--max-new-tokens 30 --epochs-per-step 2"),
    "imitation/sft": Row(
        "--data chats.jsonl --model tiny --tokens-per-batch 130 --micro-batch-size 3",
        "killed divided two three sharded",
        quick="killed divided",
    ),
    # a process whose questions have no kept row trains with the rows of the others
    "imitation/rejection": Row(
        "--keep-above 0.6 --keep-per-question 2 --epochs-per-step 2 --sft-batch-size 4",
        "killed divided two three",
        quick="killed",
    ),
    "imitation/rejection nothing kept": Row("--keep-above 9", "killed two"),
    "imitation/distill": Row(),
    "imitation/self_distill": Row(
        "--steps 3 --success-threshold 0.3 --teacher-update-rate 0.25 --divergence forward",
        "killed divided two",
        "killed",
    ),
    "scale/engine": Row("--engine-url URL --engine-sleep"),
    "scale/mesh": Row("", "killed divided"),  # of several processes: see gloo/test_mesh.py
    "scale/asynchronous": Row("--steps 4 --lag 2 --swap-every 4 --correction tis", quick="killed"),
}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
# A group of one question in three has equal rewards, and no signal; the others depend on every letter
REWARDS = """
def varied(prompts, completions, **_):
    texts = [str(completion) for completion in completions]
    return [sum(map(ord, text)) % 7 / 7 * (len(str(asked)) % 3 > 0) for asked, text in zip(prompts, texts)]
"""
# Overflows for the last question of the second step, which only the last of several processes asks
NOT_FINITE = REWARDS.replace("(len(str(asked)) % 3 > 0)", "(1e300 if '82 plus 19' in str(asked) else 1)")
A_TOOL = '''def tripled(number: int) -> str:
    """Three times a number.

    Args:
        number: to be tripled.
    """
    return str(3 * number)
'''
A_WORLD = """
class Environment:
    def reset(self, row, seed):
        self.at, self.goal = row["at"], 1 + seed % 7
        return f"at {self.at}"

    def step(self, action):
        self.at = (self.at + len(action)) % 9
        return f"at {self.at}", 0.1 * (self.at % 3), self.at == self.goal

    def describe(self):
        return {"arrived": float(self.at == self.goal)}
"""


# Runs, in this process or in each rank


def write_files() -> None:
    """What the flags name, in the working directory."""
    for name, text in (
        ("rewards.py", REWARDS),
        ("not_finite.py", NOT_FINITE),
        ("tools.py", A_TOOL),
        ("world.py", A_WORLD),
    ):
        Path(name).write_text(text)
    write_rows("worlds.jsonl", [{"at": at, "max_turns": 2 + at % 3} for at in range(9)])
    asked = ({"role": "user", "content": f"Say {n}" + " please" * (n % 7)} for n in range(10))
    said = ({"role": "assistant", "content": f"{n} " * (1 + n % 5) ** 2} for n in range(10))
    write_rows("chats.jsonl", [{"messages": list(chat)} for chat in zip(asked, said, strict=True)])


def train(script, name: str, more: str, url: str) -> Path:
    """Train a row of RUNS, with more flags, in the working directory; returns the directory of the run."""
    own = f"{RUNS[name].flags} {more}".replace("URL", url).split()
    usual = [f"--{flag.replace('_', '-')}={value}" for flag, value in FLAGS.items() if hasattr(script.Config, flag)]
    script.main([*usual, *own, "--runs-dir", name.replace("/", " "), "--name", "x"])
    return directory_of(Path.cwd(), name)


def directory_of(place: Path, name: str) -> Path:
    return place / name.replace("/", " ") / Path(name.split()[0]).name / "x"


def killed(directory: Path, step: int) -> Path:
    """A copy of a run as after a kill, at a random moment between the checkpoint of a step (0: none) and its end."""
    copy = directory.with_name("killed")
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("final*", "summary.json"))
    for path in (copy / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    manifest = copy / "checkpoints" / f"step_{step}" / "checkpoint.json"
    sizes = json_of(manifest)["logs"] if step else {}
    for path in copy.glob("*.jsonl"):
        os.truncate(path, random.randint(sizes.get(path.name, 0), path.stat().st_size))
    return copy


def load(experiment: str):
    path = ROOT / experiment / "train.py"
    spec = importlib.util.spec_from_file_location(experiment.replace("/", "__"), path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_parts(make_reference: Callable) -> Callable:
    """It too, of which a process holds only a part."""

    def make(policy):
        reference = make_reference(policy)
        assert all(hasattr(weight, "full_tensor") for weight in reference.parameters())
        return reference

    return make


def main(place: str, url: str, *names: str) -> None:
    """One rank of several: all these runs. Those whose checkpoints are in parts are also resumed after a kill."""
    torch.set_num_threads(1)
    os.chdir(place)
    viewer.draw_run = lambda _: None  # a figure and a page take a second
    for name in names:
        script = load(name.split()[0])
        if "ACCELERATE_USE_FSDP" in os.environ and hasattr(script, "make_reference"):
            script.make_reference = in_parts(script.make_reference)
        directory = train(script, name, "", url)
        if "ACCELERATE_USE_FSDP" in os.environ:
            if is_main():
                killed(directory, step=1)
            distributed.barrier()
            script.main(["--resume", str(directory.with_name("killed"))])
    assert call_once(rank, for_all=True) == 0  # what costs money is paid once
    leave(0)  # the usual end of several processes: threads of a process group can abort an ordinary exit


@pytest.fixture(scope="module")
def server(api_server):
    flags = {"served_model_name": "policy", "max_model_len": 512, "logprobs_mode": "processed_logprobs"}
    flags |= {"no_enable_chunked_prefill": True, "enable_sleep_mode": True}
    stand_in = api_server.StandIn(ROOT / "data/policies/tiny_policy", **flags)
    yield stand_in.start()
    stand_in.stop()


@pytest.fixture(scope="module")
def alone(server, load_script, tmp_path_factory) -> Callable[..., Path]:
    """alone(name, more flags): the directory of a run in this process."""

    @functools.cache
    def start(name: str, more: str = "") -> Path:
        place = tmp_path_factory.mktemp("alone")
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
            patch.chdir(place)
            write_files()
            return train(load_script(f"{name.split()[0]}/train.py"), name, more, server.url)

    return start


@pytest.fixture(scope="module")
def together(server, tmp_path_factory) -> Callable[..., Path]:
    """together(way, *names): where one launch has trained these rows."""

    @functools.cache
    def start(way: str, *names: str) -> Path:
        place, is_sharded = tmp_path_factory.mktemp("together"), way == "sharded"
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            write_files()
        program = [ROOT / "tests/gloo/as_on_gpus.py", __file__] if is_sharded else [__file__]
        beside = [
            str(ROOT / folder)
            for folder in (
                "",
                "tests",
                "scale/mesh",
                "scale/asynchronous",
                "agents/world",
                "imitation/self_distill",
                "rewards/likelihood",
                "experiment_multiturn_qa",
            )
        ]
        environment = {"PYTHONPATH": os.pathsep.join(beside)} | (FSDP2 if is_sharded else {})
        before = server.calls["/collective_rpc"]
        launch(3 if way == "three" else 2, *program, place, server.url, *names, **environment)
        (place / "pushes").write_text(str(server.calls["/collective_rpc"] - before))
        return place

    return start


# What is compared


def weights_of(directory: Path, folder: str = "final") -> dict[str, torch.Tensor]:
    paths = sorted((directory / folder).glob("*.safetensors"))
    return {f"{path.stem} {name}": weight for path in paths for name, weight in load_file(path).items()}


def assert_alike(found: Path, expected: Path) -> None:
    """The same up to rounding, which AdamW enlarges after the first update where a gradient is near 0."""
    for row, other in zip(metrics_of(found), metrics_of(expected), strict=True):
        assert row.keys() == other.keys()
        for name, value in other.items():
            rel = 1e-5 if row["step"] == 0 else 3e-4 if name.endswith(("_max", "_min")) else 2e-4
            assert row[name] == pytest.approx(value, rel=rel, abs=1e-4 if name.endswith(WITHOUT_SCALE) else 1e-5), name
    for row, other in zip(samples_of(found), samples_of(expected), strict=True):
        assert_close(row, other)
    new, old, first = weights_of(found), weights_of(expected), weights_of(expected, "checkpoints/step_1")
    assert new.keys() == old.keys()
    errors = [(new[name] - old[name]).norm().item() for name in old]
    lr = json_of(expected / "config.json")["lr"]  # of checkpoints in parts the weights are not known
    moves = [(old[name] - first[name]).norm().item() if first else lr * old[name].numel() ** 0.5 for name in old]
    assert math.hypot(*errors) <= 0.02 * math.hypot(*moves) + 1e-5  # of the first update, which `moves` leave out


def assert_close(value: object, expected: object) -> None:
    if isinstance(expected, dict | list):
        assert len(value) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_close(value[key], expected[key])
    elif float in (type(value), type(expected)):  # samples.jsonl writes 1.0 as 1
        assert abs(value - expected) <= 5e-5 + 1e-3 * abs(expected)
    else:
        assert value == expected


def samples_of(directory: Path) -> list[dict]:
    return rows_of(directory, "samples") if (directory / "samples.jsonl").exists() else []


# The tests


def names_of(way: str) -> list[str]:
    return [name for name, row in RUNS.items() if way in row.ways.split()]


def skip_without_packages(name: str) -> None:
    if "bit" in name:
        pytest.importorskip("bitsandbytes")


def test_every_experiment_has_a_row():
    assert {ROOT / name.split()[0] / "train.py" for name in RUNS} == set(in_experiments("train.py"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if row.quick else pytest.mark.slow) for name, row in RUNS.items()]
)
def test_a_run_is_complete_and_consistent(alone, name):
    skip_without_packages(name)
    directory = alone(name)
    metrics, summary = rows_of(directory), json_of(directory / "summary.json")
    steps = [row["step"] for row in metrics if "time/step" in row]
    assert steps == [*range(1, summary["steps"] + 1)]
    skipped = {row["step"] for row in metrics if row.get("loss/skipped")}  # they have no checkpoint
    assert {f"step_{step}" for step in {*steps} - skipped} == {path.name for path in directory.glob("checkpoints/*")}
    assert bool(skipped) == ("not finite" in name)
    assert len(steps) >= 2
    assert all(isinstance(value, int | float) and math.isfinite(value) for row in metrics for value in row.values())
    assert metrics[0]["step"] == 0 or name == "rewards/reward_model"  # evaluated before training
    before, after = ({key for key in row if key.startswith("eval/")} for row in (metrics[0], metrics[-1]))
    assert before <= after
    assert after or "eval/accuracy" in summary
    assert metrics[-1]["step"] == steps[-1]
    first = metrics[[row["step"] for row in metrics].index(1)]
    assert first.get("policy/first_ratio", 1) == pytest.approx(1, abs=1e-4)
    assert first.get("policy/sampling_log_prob_difference", 0) < 1e-4
    written = {
        (key, row["step"], torch.tensor(value).float().item())  # TensorBoard has single precision
        for row in metrics
        for key, value in row.items()
        if key != "step"
    }
    assert written == {(key, *point) for key, points in events_of(directory).items() for point in points}
    if samples_of(directory):
        check_samples(directory)


def check_samples(directory: Path) -> None:
    """The sampled tokens, and what updates made of them, agree with one another."""
    texts = {row["id"]: row["text"] for row in read_lines(directory / "tokens.jsonl")}
    tokenizer, config = AutoTokenizer.from_pretrained(directory / "final"), json_of(directory / "config.json")
    weights = {"format": 0} | {
        name: float(x) for name, x in (pair.split("=") for pair in config.get("reward_weight", ()))
    }
    for row in samples_of(directory):
        mask, start, old, ref = (row[key] for key in ("action_mask", "prompt_length", "old_log_probs", "log_probs_ref"))
        lists = [(row, key) for key in ("ids", "sampler_log_probs", "old_log_probs", "log_probs_ref", "entropy")]
        lists += [(update, key) for update in row["updates"] for key in update if key not in ("epoch", "minibatch")]
        for of, key in lists:
            assert of[key] is None or len(of[key]) == len(mask), key
            assert key == "ids" or not of[key] or not any(x for x, bit in zip(of[key], mask, strict=True) if not bit)
        assert "".join(texts[i] for i in row["ids"]) == tokenizer.decode(row["ids"])
        spoken = [token for token, bit in zip(row["ids"], mask, strict=True) if bit]
        said = [text for role, text in row.get("turns", [("assistant", row["text"])]) if role == "assistant"]
        assert tokenizer.decode(spoken, skip_special_tokens=True) == "".join(said)
        assert not any(mask[:start])
        if is_sampled := row["finish_reason"] != "given":
            assert all(mask[start:]) or "turns" in row
            assert row["finish_reason"] == ("stop" if row["ids"][-1] == tokenizer.eos_token_id else "length")
        if is_sampled and config["task"] == "arithmetic":
            assert row["rewards"].items() >= arithmetic.reward(row, row["text"]).items()
            total = sum(weights.get(name, 1) * value for name, value in row["rewards"].items())
            assert row["return"] == pytest.approx(total, abs=1e-5)
        for update in row["updates"]:
            if update["epoch"] == update["minibatch"] == 0 and is_sampled:
                pairs = zip(update["log_probs"], row["sampler_log_probs"], strict=True)
                is_new = [not age for age in update.get("staleness", [0] * len(mask))]
                assert all(
                    new == pytest.approx(own, abs=1e-4) for (new, own), now in zip(pairs, is_new, strict=True) if now
                )
            for t in (t for t, bit in enumerate(mask) if bit):
                ratio, kl = (None if of is None else of[t] - update["log_probs"][t] for of in (old, ref))
                if "ratio" in update and "gspo" not in directory.parts:
                    assert update["ratio"][t] == pytest.approx(1 if ratio is None else math.exp(-ratio), abs=1e-4)
                if "kl" in update:
                    assert update["kl"][t] == pytest.approx(math.exp(kl) - kl - 1, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if way in row.quick.split() else pytest.mark.slow)
        for name, row in RUNS.items()
        for way in row.ways.split()
    ],
)
def test_every_way_gives_the_same_run(alone, together, load_script, monkeypatch, name, way):
    skip_without_packages(name)
    expected, config = alone(name), load_script(f"{name.split()[0]}/train.py").Config
    if way == "killed":
        monkeypatch.chdir(expected.parents[2])
        found = killed(expected, step=0 if name == "experiment_drgrpo" else 1)
        load_script(f"{name.split()[0]}/train.py").main(["--resume", str(found)])
        # an engine forms its batches as requests arrive, and they round differently
        (assert_alike if name == "scale/engine" else assert_equal)(found, expected)
    elif way == "divided":
        flags = [flag for flag in DIVIDED if hasattr(config, field_of(flag))]
        assert_alike(alone(name, " ".join(flags)), expected)
    else:
        found = directory_of(together(way, *names_of(way)), name)
        assert_alike(found, expected)
        if (found.with_name("killed")).exists():  # their checkpoints are in parts
            assert_equal(found.with_name("killed"), found)
        if name == "scale/engine":  # one process pushes weights for all: before training, after each step, and when
            assert (found.parents[2] / "pushes").read_text() == "4"  # DistributedDataParallel has written all of them
        if way == "sharded":
            assert len([*found.glob("checkpoints/step_1/pytorch_model_fsdp_0/*.distcp")]) == 2
            (part,) = sorted(found.with_name("killed").glob("checkpoints/step_*"))[-1:]
            data = json_of(found / "config.json")["sources"]["data"]["source"]  # not the few questions of this process
            monkeypatch.setattr(arithmetic, "TRAIN_DATA", Path(data))
            more = ["--steps", "9"] if hasattr(config, "steps") else []
            with pytest.raises(UserError, match="cannot be continued by these processes"):
                load_script(f"{name.split()[0]}/train.py").main(["--resume", str(part.parents[1]), *more])


def field_of(flag: str) -> str:
    return flag.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_")


def assert_equal(found: Path, expected: Path) -> None:
    """Bit for bit, except for time and memory."""
    new, old = contents(found), contents(expected)
    assert new.keys() == old.keys()
    for name, content in old.items():
        assert new[name] == content, name


if __name__ == "__main__":
    main(*sys.argv[1:])
