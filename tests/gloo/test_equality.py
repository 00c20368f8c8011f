"""One, two and three processes make the same updates, for rows that differ between ranks as much as possible.

Every number of processes is started once, for all scenarios of the experiments; the tests compare the results with
experiment_base's update of all rows in this process. Whole runs: test_runs.py.
"""

import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from run_files import ROOT, launch
from torch import distributed

from common.experience import collate
from common.logprobs import token_log_probs
from common.parallel import gather, part_of, rank
from common.policy import Policy
from common.trajectory import Trajectory

from harness.logs.statistics import UpdateStatistics
from harness.processes.training import DataParallel

VOCAB, ROWS, STEPS = 24, 24, 2
# Groups of 6 are split by ranks of 8 rows
GROUP_SIZES = {"experiment_base": 4, "experiment_accelerate": 4, "experiment_accelerate_ddp": 6}
SCENARIOS = ("ragged", "no_signal", "none_at_all", "longest", "minibatches", "constant", "adamw", "lora", "skipped")
WRITTEN_OUT = ("ragged", "minibatches")  # of experiment_accelerate, which writes out what experiment_base leaves
FOUR_BIT = "lora_4bit"  # with three processes only: it loads the bundled policy


# Run by every process


def load(experiment: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(experiment, ROOT / experiment / "train.py")
    module = sys.modules[experiment] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_policy(scenario: str) -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.base.config import PolicyConfig
    from harness.models.adapters import add_adapter
    from harness.models.loading import exclude_frozen, load_policy

    if scenario == FOUR_BIT:
        policy = load_policy(PolicyConfig(device="cpu", lora_rank=4, load_in="4bit"))
        train_adapter(policy)
        return policy
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, initializer_range=0.3, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    policy = Policy(add_adapter(model, rank=4) if scenario == "lora" else model, None, [2], pad_id=0)
    if scenario == "lora":
        train_adapter(policy)
    exclude_frozen(policy)
    return policy


@torch.no_grad()
def train_adapter(policy: Policy) -> None:
    """Make B nonzero: while it is 0, A has no gradient."""
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 10)


def make_rows(group_size: int, scenario: str) -> tuple[list[Trajectory], torch.Tensor]:
    """All rows of a rollout and their advantages (B, 1)."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    rows = []
    for prompt_index in range(ROWS // group_size):
        prompt = ids(2 + prompt_index)
        for completion in range(group_size):
            longest = 40 if scenario in ("longest", "no_signal") and prompt_index >= 3 else 6
            count = 1 + int(torch.randint(longest, (), generator=generator))
            row = Trajectory(prompt + ids(count), len(prompt), [0] * len(prompt) + [1] * count, [], prompt_index)
            row.sampler_log_probs = [-1.0] * len(row.ids)
            row.completion_index = completion
            rows.append(row)
    advantages = torch.randn(ROWS, 1, generator=generator)
    if scenario == "no_signal":
        advantages[: ROWS // 2] = 0.0  # the first of two ranks, and more than the first of three, has nothing to learn
    if scenario == "none_at_all":
        advantages[:] = 0.0
    if scenario == "skipped":
        advantages[-1] = torch.nan  # in the last rank only
    return rows, advantages


def run_scenario(train: ModuleType, scenario: str, wrap: Callable, group_size: int) -> dict:
    """The updates of several rollouts: the parameters after each, the metrics, and each token's part of the loss."""
    policy = make_policy(scenario)
    reference = make_policy(scenario)
    rows, advantages = make_rows(group_size, scenario)
    own = part_of(ROWS)
    experience = collate(rows[own.start : own.stop], policy.pad_id)
    experience.advantages = advantages[own.start : own.stop]
    with torch.no_grad():
        experience.old_log_probs = token_log_probs(policy, experience, 8) + 0.01  # ratios are not 1
        experience.log_probs_ref = token_log_probs(reference, experience, 8) - 0.1
    config = train.Config(
        group_size=group_size, prompts_per_step=ROWS // group_size, micro_batch_size=3, max_new_tokens=40,
        tokens_per_micro_batch=40 if scenario == "ragged" else None,
        minibatch_size=12 if scenario == "minibatches" else None, epochs_per_step=2 if scenario == "minibatches" else 1,
        kl_weight=0.0 if scenario in ("no_signal", "none_at_all") else 0.1,
        max_grad_norm=1.0 if scenario == "adamw" else 1e9,
    )  # fmt: skip
    if scenario == "adamw":
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    arguments = wrap(policy, optimizer)
    parameters, metrics, tokens = [], [], []
    for step in range(1, STEPS + 1):
        statistics = train.update(config, *arguments, experience, step)
        metrics.append(statistics.metrics())
        tokens.append(tokens_of_all_ranks(statistics, rows))
        parameters.append(torch.cat([weight.detach().flatten() for weight in policy.parameters()]))
    assert all(torch.equal(parameters[-1], other) for other in gather(parameters[-1]))
    return {"parameters": parameters, "metrics": metrics, "tokens": tokens}


def tokens_of_all_ranks(statistics: UpdateStatistics, rows: list[Trajectory]) -> dict[str, torch.Tensor]:
    """Terms and pushes of all rows, one row and update after the other."""
    lengths = {(row.prompt_index, row.completion_index): len(row.ids) - 1 for row in rows}
    seen = {key: updates for part in gather(statistics.rows) for key, updates in part.items()}
    order = [(update.measurements, lengths[key]) for key in sorted(seen) for update in seen[key]]
    return {name: torch.cat([tokens[name][:length] for tokens, length in order]) for name in ("terms", "push")}


def run_scenarios(experiment: str, wrap: Callable, group_size: int, scenarios: tuple[str, ...]) -> dict:
    train, results = load(experiment), {}
    loss, drgrpo = train.policy_loss, load("experiment_drgrpo")

    def divided_by_a_constant(config, *arguments, **options):
        return drgrpo.policy_loss(drgrpo.Config(**dataclasses.asdict(config)), *arguments, **options)

    for scenario in scenarios:
        train.policy_loss = divided_by_a_constant if scenario == "constant" else loss
        results[scenario] = run_scenario(train, scenario, wrap, group_size)
    train.policy_loss = loss
    return results


class PastTheWrapper(torch.nn.Module):
    """A planted fault: DistributedDataParallel never sees the forward pass, so it synchronises nothing."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *arguments):
        return self.model.module(*arguments)

    def no_sync(self):
        return nullcontext()


def gradients_differ(wrap: Callable) -> bool:
    """Whether gradients differ between the ranks after an update."""
    train, policy = load("experiment_accelerate_ddp"), make_policy("ragged")
    rows, advantages = make_rows(6, "ragged")
    own = part_of(ROWS)
    experience = collate(rows[own.start : own.stop], policy.pad_id)
    experience.advantages = advantages[own.start : own.stop]
    config = train.Config(group_size=6, prompts_per_step=4, micro_batch_size=3, kl_weight=0.0)
    train.update(config, *wrap(policy, torch.optim.SGD(policy.parameters(), lr=0.0)), experience, step=1)
    gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
    return any(not torch.equal(gradient, other) for other in gather(gradient))


def is_frozen_base_left_alone() -> bool:
    """Whether a frozen weight that differs between the ranks still differs after wrapping, and the adapters do not."""
    policy = make_policy("lora")
    with torch.no_grad():
        for weight in policy.parameters():
            weight += rank()
    frozen, trained = ([w for w in policy.parameters() if w.requires_grad == flag] for flag in (False, True))
    torch.nn.parallel.DistributedDataParallel(policy)
    first, *others = gather(([w.sum().item() for w in frozen], [w.sum().item() for w in trained]))
    return all(other[0] != first[0] and other[1] == first[1] for other in others)


def main(path: str) -> None:
    """One rank: all scenarios of the experiments."""
    from accelerate import Accelerator
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)

    def by_the_run(policy: Policy, optimizer: torch.optim.Optimizer) -> tuple:
        return DataParallel("adamw").prepare(policy, optimizer)

    def by_accelerate(policy: Policy, optimizer: torch.optim.Optimizer) -> tuple:
        return accelerator, *accelerator.prepare(policy, optimizer)

    def by_hand(policy: Policy, optimizer: torch.optim.Optimizer) -> tuple:
        return DistributedDataParallel(policy), optimizer

    def past_the_wrapper(policy: Policy, optimizer: torch.optim.Optimizer) -> tuple:
        return PastTheWrapper(DistributedDataParallel(policy)), optimizer

    has_4_bit = int(os.environ["WORLD_SIZE"]) == 3 and importlib.util.find_spec("bitsandbytes") is not None
    scenarios = (*SCENARIOS, *((FOUR_BIT,) if has_4_bit else ()))
    results = {
        name: run_scenarios(name, wrap, GROUP_SIZES[name], of)
        for name, wrap, of in (
            ("experiment_base", by_the_run, scenarios),
            ("experiment_accelerate", by_accelerate, WRITTEN_OUT),
            ("experiment_accelerate_ddp", by_hand, scenarios),
        )
    }
    results["gradients differ"] = (gradients_differ(by_hand), gradients_differ(past_the_wrapper))
    results["frozen base left alone"] = is_frozen_base_left_alone()
    if rank() == 0:
        torch.save(results, path)
    distributed.destroy_process_group()


# The tests


@pytest.fixture(scope="module")
def results_of(tmp_path_factory) -> Callable[[int], dict]:
    @functools.cache
    def start(num_processes: int) -> dict:
        path = tmp_path_factory.mktemp("results") / f"{num_processes}.pt"
        launch(num_processes, __file__, path)
        return torch.load(path)

    return start


@pytest.fixture(scope="module")
def alone() -> Callable[[str, str], dict]:
    """The results of experiment_base in one process, with the groups of an experiment."""

    @functools.cache
    def start(experiment: str, scenario: str) -> dict:
        return run_scenarios("experiment_base", lambda *both: both, GROUP_SIZES[experiment], (scenario,))[scenario]

    return start


each_number = pytest.mark.parametrize("num_processes", [2, pytest.param(3, marks=pytest.mark.slow)])


@each_number
@pytest.mark.parametrize("experiment", GROUP_SIZES)
@pytest.mark.parametrize("scenario", [*SCENARIOS, pytest.param(FOUR_BIT, marks=pytest.mark.slow)])
def test_the_update_is_that_of_one_process(results_of, alone, num_processes, experiment, scenario):
    """Parameters after each of two updates, and everything that is logged about them."""
    if experiment == "experiment_accelerate" and scenario not in WRITTEN_OUT:
        pytest.skip("as in experiment_base")
    if scenario == FOUR_BIT and (num_processes == 2 or importlib.util.find_spec("bitsandbytes") is None):
        pytest.skip("in three processes, with bitsandbytes")
    found, expected = results_of(num_processes)[experiment][scenario], alone(experiment, scenario)
    for update, (new, old) in enumerate(zip(found["parameters"], expected["parameters"], strict=True)):
        before = expected["parameters"][update - 1] if update else None
        assert (new - old).abs().max() <= 1e-5
        if before is not None and scenario not in ("skipped", "none_at_all"):
            assert (new - old).norm() <= 1e-3 * (old - before).norm()  # small compared with the update's effect
            assert (old - before).norm() > 1e-3
    for new, old in zip(found["metrics"], expected["metrics"], strict=True):
        assert new.keys() == old.keys()
        for name in old:
            assert new[name] == pytest.approx(old[name], rel=1e-4, abs=1e-5, nan_ok=True), name
    for new, old in zip(found["tokens"], expected["tokens"], strict=True):
        for name in ("terms", "push"):  # for the minibatch of all ranks, whichever rank has the row
            torch.testing.assert_close(new[name], old[name], atol=1e-6, rtol=1e-4, equal_nan=True)


@each_number
@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_accelerate_ddp"])
def test_one_rank_that_is_not_finite_makes_all_skip(results_of, num_processes, experiment):
    """The last row has a NaN as its advantage: no rank takes a step, and each step is counted once."""
    result = results_of(num_processes)[experiment]["skipped"]
    assert [metrics["loss/skipped"] for metrics in result["metrics"]] == [1] * STEPS
    start = torch.cat([weight.detach().flatten() for weight in make_policy("skipped").parameters()])
    assert all(torch.equal(parameters, start) for parameters in result["parameters"])


@each_number
def test_gradients_are_equal_on_all_ranks_unless_ddp_is_bypassed(results_of, num_processes):
    assert results_of(num_processes)["gradients differ"] == (False, True)


@each_number
def test_the_frozen_base_of_an_adapter_is_not_synchronised(results_of, num_processes):
    assert results_of(num_processes)["frozen base left alone"]


if __name__ == "__main__":
    main(sys.argv[1])
