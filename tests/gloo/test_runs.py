"""Runs of several processes equal runs of one: with split groups, tools, search, and an inference engine.

Every number of processes is started once, for runs of several experiments; each rank executes `main` below. The engine
is a stand-in for vLLM in the process of the tests.
"""

import functools
import importlib.util
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from run_files import ROOT, launch, metrics_of, rows_of, write_rows
from safetensors.torch import load_file
from torch import distributed

import viewer
from common.errors import UserError
from common.parallel import gather, is_main

from harness.base.ranks import EndedElsewhereError
from harness.base.signals import leave

pytestmark = [pytest.mark.slow, pytest.mark.all_questions]

ENGINE, TOOLS, SEARCH = "scale/engine", "experiment_multiturn_tool_calling", "experiment_multiturn_qa"
ACCELERATE, DDP, DAPO = "experiment_accelerate", "experiment_accelerate_ddp", "policy_gradients/dapo"
PPO, DISTILL, REINFORCE = "policy_gradients/ppo", "imitation/distill", "policy_gradients/reinforce"
SFT = "imitation/sft"
# With six prompts and groups of four, the conversations of the ranks differ in the number of turns and in length.
DESCENDANT = "--steps 2 --prompts-per-step 6 --group-size 4 --eval-prompts 5 --lr 1e-5 --micro-batch-size 4 --seed 1"
CALLS = f"{DESCENDANT} --max-new-tokens 64 --tools tools.py"
SAMPLED = f"{DESCENDANT} --max-new-tokens 20 --engine-url URL"
# With four prompts and groups of six, rank 0 of three samples the first group and two rows of the second.
SPLIT = (
    "--steps 2 --prompts-per-step 4 --group-size 6 --eval-prompts 5 --max-new-tokens 24 --micro-batch-size 3 --lr 1e-5"
)
# Three rounds at most, whose kept groups go to other ranks than those that sampled them
DYNAMIC = f"{DESCENDANT} --max-new-tokens 24 --max-rounds 3 --minibatch-size 8 --epochs-per-step 2"
FAMILY = (
    "experiment_base",
    "experiment_drgrpo",
    "policy_gradients/rloo",
    "policy_gradients/maxrl",
    "policy_gradients/gspo",
)
FAMILY += ("policy_gradients/cispo",)
OF_FAMILY = f"{DESCENDANT} --max-new-tokens 24 --minibatch-size 8 --epochs-per-step 2"
CRITIC = f"{OF_FAMILY} --critic-warmup 1 --gae-lambda 0.95"  # the second step also trains the policy
ONE_BY_ONE = "--steps 2 --prompts-per-step 12 --eval-prompts 5 --lr 1e-5 --micro-batch-size 2 --max-new-tokens 24"
# Steps of one to four rows: a rank can have none of them, or fewer micro-batches than another
GIVEN = "--data chats.jsonl --tokens-per-batch 100 --micro-batch-size 2 --lr 1e-5 --eval-prompts 3 --eval-every 2"
SHORT = "--steps 1 --prompts-per-step 2 --group-size 2 --eval-prompts 2 --max-new-tokens 4"
RUNS = {  # by the number of processes: experiments, and their flags
    2: {
        TOOLS: CALLS,
        SEARCH: CALLS,
        ENGINE: SAMPLED,
        DAPO: DYNAMIC,
        **dict.fromkeys(FAMILY, OF_FAMILY),
        REINFORCE: ONE_BY_ONE,
        SFT: GIVEN,
        PPO: CRITIC,
        DISTILL: OF_FAMILY,
        ACCELERATE: f"{SHORT} --task math --data {ROOT}/tests/data/math.jsonl",
    },
    3: {
        TOOLS: CALLS,
        SEARCH: CALLS,
        ENGINE: SAMPLED,
        DDP: f"{SPLIT} --reward-functions rewards.py",  # of complete groups, although these are on two ranks
        DAPO: DYNAMIC,
        **dict.fromkeys(FAMILY, OF_FAMILY),
        REINFORCE: ONE_BY_ONE,
        SFT: GIVEN,
        PPO: CRITIC,
        DISTILL: OF_FAMILY,
    },
}
PARENT = {DDP: "experiment_base", ACCELERATE: "experiment_base"}  # the experiment that equals these in one process
A_TOOL = '''def tripled(number: int) -> str:
    """Three times a number.

    Args:
        number: to be tripled.
    """
    return str(3 * number)
'''
A_REWARD = "def place(prompts, completion_ids): return [prompts[:at].count(asked) for at, asked in enumerate(prompts)]"


def train(script: ModuleType, flags: str, url: str) -> None:
    Path("tools.py").write_text(A_TOOL)
    Path("rewards.py").write_text(A_REWARD)
    asked = ({"role": "user", "content": f"Say {n}" + " please" * (n % 7)} for n in range(20))
    said = ({"role": "assistant", "content": f"{n} " * (1 + n % 5) ** 2} for n in range(20))
    write_rows("chats.jsonl", [{"messages": chat} for chat in zip(asked, said, strict=True)])
    script.main([*flags.replace("URL", url).split(), "--runs-dir", ".", "--name", "x"])


# Run by every process


def load(experiment: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(experiment, ROOT / experiment / "train.py")
    module = sys.modules[experiment] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(place: str, url: str) -> None:
    """One rank: all runs, and then one in which the engine answers a request of one rank wrongly."""
    torch.set_num_threads(1)
    os.chdir(place)
    viewer.draw_run = lambda _: None  # a figure and a page take a second
    runs = RUNS[int(os.environ["WORLD_SIZE"])]
    for experiment, flags in runs.items():
        train(load(experiment), flags, url)
    if len(gather(None)) == 2:
        train_with_a_fault(sys.modules[ENGINE], url)
    distributed.barrier()
    leave(0)  # the usual end of several processes: threads of a process group can abort an ordinary exit


def train_with_a_fault(script: ModuleType, url: str) -> None:
    begin = script.begin_sampling

    def begin_with_a_fault(*arguments):
        if is_main():
            fault = json.dumps({"fault": "fewer_log_probs", "times": 1}).encode()
            urllib.request.urlopen(f"{url}/stand_in", fault).read()
        distributed.barrier()
        return begin(*arguments)

    script.begin_sampling, ending = begin_with_a_fault, None
    try:
        script.main([*SHORT.split(), "--engine-url", url, "--name", "wrong"])
    except (UserError, EndedElsewhereError) as error:
        ending = f"{type(error).__name__}: {error}"
    endings = gather(ending)
    if is_main():
        Path("endings.json").write_text(json.dumps(endings))


# The tests


@pytest.fixture(scope="module")
def server(api_server) -> Iterator:
    stand_in = api_server.StandIn(
        ROOT / "data" / "policies" / "tiny_policy", served_model_name="policy", max_model_len=512,
        no_enable_chunked_prefill=True, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    yield stand_in.start()
    stand_in.stop()


@pytest.fixture(scope="module")
def together(server, tmp_path_factory) -> Callable[[int], tuple[Path, int]]:
    """The files of so many ranks, and how often they pushed weights to the engine."""

    @functools.cache
    def start(num_processes: int) -> tuple[Path, int]:
        place, before = tmp_path_factory.mktemp("together"), server.calls["/collective_rpc"]
        launch(num_processes, __file__, place, server.url)
        return place, server.calls["/collective_rpc"] - before

    return start


@pytest.fixture(scope="module")
def alone(server, tmp_path_factory, load_script) -> Callable[[str, str], tuple[Path, int]]:
    @functools.cache
    def start(experiment: str, flags: str) -> tuple[Path, int]:
        place, before = tmp_path_factory.mktemp("alone"), server.calls["/collective_rpc"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            train(load_script(f"{experiment}/train.py"), flags, server.url)
        return place / Path(experiment).name / "x", server.calls["/collective_rpc"] - before

    return start


@pytest.mark.parametrize(
    ("num_processes", "experiment"), [(number, name) for number, runs in RUNS.items() for name in runs]
)
def test_several_processes_train_as_one(together, alone, num_processes, experiment):
    flags = RUNS[num_processes][experiment]
    new, old = (
        together(num_processes)[0] / Path(experiment).name / "x",
        alone(PARENT.get(experiment, experiment), flags)[0],
    )
    # the first two groups of each step
    samples, expected = ([] if experiment == SFT else rows_of(directory, "samples") for directory in (new, old))
    for row, other in zip(samples, expected, strict=True):
        for name in ("step", "prompt_index", "completion_index", "ids", "rewards", "finish_reason", "turns"):
            assert row.get(name) == other.get(name)
        assert row["advantage"] == pytest.approx(other["advantage"], abs=1e-5)  # of a critic that was trained
    for metrics, others in zip(metrics_of(new), metrics_of(old), strict=True):
        assert metrics.keys() == others.keys()
        for name in others:
            rounding = 1e-4 if "difference" in name else 1e-5  # differences are only rounding here
            # After an update metrics feel the rounding of AdamW (below), the ratio of one token most: 1.0e-4 was seen,
            # and 3e-6 with a learning rate of nearly 0
            several = 2e-4 if "--epochs-per-step" in flags else 1e-4
            relative = 3e-4 if name.endswith(("_max", "_min")) else several
            assert metrics[name] == pytest.approx(others[name], rel=relative, abs=rounding), name
    assert (experiment == DDP) == ("time/waiting" in rows_of(new)[1])
    weights, others = (weights_in(directory / "final") for directory in (new, old))
    assert any(name.startswith("head.") for name in weights) == (experiment == PPO)  # the critic's
    assert weights.keys() == others.keys()
    # Where a gradient is near 0, AdamW turns its rounding into a part of the learning rate, in each of up to 12 updates
    rounding = 3e-5 if "--epochs-per-step" in flags else 1e-5
    assert all((weights[name] - others[name]).abs().max() <= rounding for name in weights)
    if experiment not in (SFT, ACCELERATE):  # the latter only has to judge a task's answers
        assert any(row["advantage"] for row in expected)
    if flags == CALLS:
        assert {len(row["turns"]) for row in expected} >= {1, 3}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}


def test_three_ranks_split_groups(alone):
    """Training uses rows of the second group on rank 0."""
    assert any(row["advantage"] for row in rows_of(alone("experiment_base", RUNS[3][DDP])[0], "samples")[6:8])


def test_one_rank_pushes_weights_for_all(together, alone):
    """Before training and after each of two steps. DistributedDataParallel writes all weights once: one more push."""
    assert alone(ENGINE, SAMPLED)[1] == 3
    assert together(2)[1] == 4 + 2  # the run with a fault has no update


def test_a_wrong_answer_to_one_rank_ends_all_with_its_sentence(together):
    ending, other = json.loads((together(2)[0] / "endings.json").read_text())
    assert "log-probs for" in ending
    assert ending.startswith("UserError: the engine at http://127.0.0.1:")
    assert other == ending  # one of them is printed, see test_failures.py


if __name__ == "__main__":
    main(*sys.argv[1:])
