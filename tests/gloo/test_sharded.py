"""With weights sharded over two processes, sampling, training and clipping give the same results as whole weights.

Both processes are started once. Each does everything with a sharded policy and with a whole one, and writes the results
to a file; the tests compare them. A rank that waits for the other in vain ends the start with a timeout.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from run_files import launch
from torch import distributed

from common.experience import Experience, collate
from common.logprobs import MAX_LOGITS, token_log_probs
from common.parallel import clip_grad_norm_, gather, in_step
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory
from fast.sharded_weights import gathered_weights

from harness.models.adapters import add_adapter
from harness.models.loading import exclude_frozen

RANKS, VOCAB, GROUP, BUDGET = 2, 24, 4, 12
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13], [14, 15]]
NEVER = 10_000  # a token that cannot be drawn


# Run by each process


def make_policy() -> Policy:
    """A random Llama with tied embeddings, which belong to the root module, and three layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, initializer_range=0.3, tie_word_embeddings=True, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    return Policy(LlamaForCausalLM(config), None, [2], pad_id=0)


def shard(policy: Policy) -> Policy:
    """Like Accelerate: the layers first, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for layer in policy.model.model.layers:
        fully_shard(layer)
    return fully_shard(policy)


def rollouts(policy: Policy, rank: int) -> dict:
    """Samples of parts of the rows that differ as much as possible between the ranks."""
    settings = {"max_new_tokens": BUDGET, "key": (0, 1)}
    unequal = [range(6), range(6, 16)][rank]  # a group is split, and one rank has two batches more
    results = {
        "unequal parts": sample(policy, PROMPTS, GROUP, rows=unequal, generation_batch_size=GROUP, **settings),
        "one rank without rows": sample(policy, PROMPTS, GROUP, rows=[range(0), range(16)][rank], **settings),
        "one rank without prompts": sample(policy, [[], PROMPTS][rank], GROUP, **settings),
    }
    policy.end_of_turn_ids = [list(range(VOCAB)), [NEVER]][rank]
    results["one rank ends at once"] = sample(policy, PROMPTS, GROUP, rows=unequal, **settings)
    policy.end_of_turn_ids = [[NEVER], list(range(VOCAB))][rank]
    results["the other one ends at once"] = sample(policy, PROMPTS, GROUP, rows=unequal, **settings)
    policy.end_of_turn_ids = [2]
    return {name: [(row.ids, row.action_mask, row.sampler_log_probs) for row in rows] for name, rows in results.items()}


def make_experience() -> Experience:
    """Three groups of four rows, with advantages; some completions are much longer than others."""
    rows = []
    for index, prompt in enumerate(PROMPTS[:3]):
        for completion in range(GROUP):
            ids = [3 + (7 * index + 5 * completion + k) % (VOCAB - 3) for k in range(1 + 4 * completion + index)]
            mask, zeros = [0] * len(prompt) + [1] * len(ids), [0.0] * (len(prompt) + len(ids))
            rows.append(Trajectory(prompt + ids, len(prompt), mask, zeros, index, completion))
    experience = collate(rows, pad_id=0)
    experience.advantages = torch.linspace(-1, 1, len(rows))[:, None]
    return experience


def backward(policy: Policy, micros: list[Experience], scale: float) -> None:
    for micro in micros:
        log_probs, _ = policy(micro.sequences, micro.action_mask)
        (-(log_probs * micro.advantages).sum() * scale).backward()


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: whole(weight.grad).clone() for name, weight in policy.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def train(policy: Policy, rank: int, is_whole: bool, max_logits: int = MAX_LOGITS) -> dict[str, torch.Tensor]:
    """The gradient of all rows. With a sharded policy rank 1 has all of them, and rank 0 only fillers."""
    experience = make_experience()
    micros = list(experience.split(5))
    if not is_whole:
        micros = in_step([] if rank == 0 else micros, experience.filler())
        assert len(micros) == 3
    policy.zero_grad()
    policy.max_logits = max_logits
    backward(policy, micros, scale=1.0 if is_whole else RANKS)  # FSDP takes the mean over the ranks
    return gradients(policy)


def is_frozen_base_left_alone(rank: int) -> bool:
    """Whether a frozen weight that differs between the ranks still differs after wrapping, and the adapters do not."""
    policy = make_policy()
    policy.model = add_adapter(policy.model, rank=4)
    exclude_frozen(policy)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += rank
    frozen, trained = ([w for w in policy.parameters() if w.requires_grad == flag] for flag in (False, True))
    torch.nn.parallel.DistributedDataParallel(policy)
    first, other = gather(([w.sum().item() for w in frozen], [w.sum().item() for w in trained]))
    return other[0] != first[0] and other[1] == first[1]


def work(rank: int) -> dict:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=40))
    plain, sharded = make_policy(), shard(make_policy())
    results: dict = {"plain": {}, "sharded": {}, "frozen base left alone": is_frozen_base_left_alone(rank)}

    # Sampling comes first, before any forward pass of the whole module; it must leave trainable weights.
    results["rollouts"] = {"plain": rollouts(plain, rank), "sharded": rollouts(sharded, rank)}
    context: dict = {"before": [is_sharded(weight) for weight in sharded.parameters()]}

    def states() -> list[bool]:
        return [is_sharded(weight) for weight in sharded.parameters()]

    experience = make_experience()
    with gathered_weights(sharded), torch.no_grad():
        context["inside"] = states()
        with gathered_weights(sharded):
            sharded.model(experience.sequences[:2], use_cache=False)
        context["after the inner one"] = states()
    context["after"] = states()
    with torch.no_grad():
        sharded(experience.sequences, experience.action_mask)
    context["layers after a forward pass"] = [
        is_sharded(weight) for weight in sharded.model.model.layers[1].parameters()
    ]
    results["context"] = context

    # log-probs, with a different number of rows, and therefore of calls, on each rank
    part = experience.select(torch.arange(2) if rank == 0 else torch.arange(2, 12))
    for name, policy in (("plain", plain), ("sharded", sharded)):
        results[name]["log-probs"] = token_log_probs(policy, part, micro_batch_size=3)

    # gradients, with the head in one piece and in chunks, and with checkpoints
    for name, policy in (("plain", plain), ("sharded", sharded)):
        is_whole = name == "plain"
        results[name]["gradients"] = train(policy, rank, is_whole)
        results[name]["gradients, head in chunks"] = train(policy, rank, is_whole, max_logits=5 * VOCAB)
        policy.gradient_checkpointing = True
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        results[name]["gradients, checkpoints"] = train(policy, rank, is_whole, max_logits=5 * VOCAB)
        policy.gradient_checkpointing = False
        policy.model.gradient_checkpointing_disable()

    # clipping: by each rank's shard, which is wrong; then correctly, followed by a step and another rollout
    by_shard = {name: weight.grad.to_local().clone() for name, weight in sharded.named_parameters()}
    norm_of_shard = torch.nn.utils.get_total_norm(by_shard.values())
    parts = gather({name: part / norm_of_shard for name, part in by_shard.items()})
    results["clipped by shard"] = {name: torch.cat([part[name] for part in parts]) for name in by_shard}
    for name, policy in (("plain", plain), ("sharded", sharded)):
        extra = torch.nn.Parameter(torch.ones(3))  # whole on every rank, in one list with sharded ones
        extra.grad = torch.tensor([3.0, 0.0, 4.0])
        results[name]["norm with a whole weight"] = clip_grad_norm_([extra, *policy.parameters()], 1e9)
        results[name]["norm"] = clip_grad_norm_(policy.parameters(), 1.0)
        results[name]["clipped"] = gradients(policy)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
        optimizer.step()
    results["rollouts after a step"] = {"plain": rollouts(plain, rank), "sharded": rollouts(sharded, rank)}
    distributed.barrier()
    distributed.destroy_process_group()
    return results


# The tests


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """The results of both processes."""
    folder = tmp_path_factory.mktemp("sharded")
    launch(RANKS, __file__, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def assert_equal_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert (found[name] - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
        assert expected[name].norm() > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("when", ["rollouts", "rollouts after a step"])
def test_sampling_is_that_of_whole_weights(ranks, when):
    """Also with ranks that end at once, have fewer batches, no rows or no prompts; before and after training."""
    for rollouts in (results[when] for results in ranks):
        assert rollouts["plain"].keys() == rollouts["sharded"].keys()
        for name, expected in rollouts["plain"].items():
            found = rollouts["sharded"][name]
            assert [row[:2] for row in found] == [row[:2] for row in expected], name
            for (*_, log_probs), (*_, expected_log_probs) in zip(found, expected, strict=True):
                assert log_probs == pytest.approx(expected_log_probs, abs=1e-5), name


@pytest.mark.slow
def test_the_ranks_sample_as_differently_as_they_should(ranks):
    """Check that the other tests show what their names say."""
    first, second = (results["rollouts"]["plain"] for results in ranks)
    assert [len(first[name]) for name in first] == [6, 0, 0, 6, 6]
    assert [len(second[name]) for name in second] == [10, 16, 16, 10, 10]
    assert {sum(mask) for _, mask, _ in first["one rank ends at once"]} == {1}
    assert {sum(mask) for _, mask, _ in second["one rank ends at once"]} == {BUDGET}
    assert {sum(mask) for _, mask, _ in first["the other one ends at once"]} == {BUDGET}
    after = ranks[0]["rollouts after a step"]["plain"]
    assert all(first[name] != after[name] or not first[name] for name in first)


@pytest.mark.slow
def test_gathered_weights_are_whole_inside_and_sharded_after(ranks):
    """Also after an inner context, which changes nothing."""
    for context in (results["context"] for results in ranks):
        assert all(context["before"])  # after a rollout that gathered them
        assert not any(context["inside"])
        assert not any(context["after the inner one"])
        assert all(context["after"])
        assert all(context["layers after a forward pass"])  # the context changed nothing for later passes


@pytest.mark.slow
def test_log_probs_are_those_of_whole_weights(ranks):
    for results in ranks:
        torch.testing.assert_close(results["sharded"]["log-probs"], results["plain"]["log-probs"], atol=1e-5, rtol=0)
    assert len(ranks[0]["plain"]["log-probs"]) < len(ranks[1]["plain"]["log-probs"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gradients", "gradients, head in chunks", "gradients, checkpoints"])
def test_gradients_are_those_of_whole_weights(ranks, how):
    """Rank 0 has only fillers."""
    for results in ranks:
        assert_equal_tensors(results["sharded"][how], results["plain"][how])


@pytest.mark.slow
def test_clipping_is_that_of_whole_gradients(ranks):
    """The norm is also the same, even with an unsharded weight in the list, whose gradient has norm 5."""
    for results in ranks:
        plain, sharded = results["plain"], results["sharded"]
        assert sharded["norm"].item() == ranks[0]["sharded"]["norm"].item()
        assert sharded["norm"].item() == pytest.approx(plain["norm"].item(), rel=1e-5)
        assert sharded["norm"].item() > 1
        with_whole = (plain["norm"].item() ** 2 + 25) ** 0.5
        assert sharded["norm with a whole weight"].item() == pytest.approx(with_whole, rel=1e-5)
        assert_equal_tensors(sharded["clipped"], plain["clipped"])


@pytest.mark.slow
def test_clipping_each_shard_by_its_own_norm_is_found(ranks):
    """The fault that the other tests exclude: a gradient of norm 1.41 instead of 1, in another direction."""
    wrong = torch.cat([part.flatten() for part in ranks[0]["clipped by shard"].values()])
    right = torch.cat([part.flatten() for part in ranks[0]["plain"]["clipped"].values()])
    assert wrong.norm() == pytest.approx(2**0.5, rel=1e-3)
    assert right.norm() == pytest.approx(1, rel=1e-3)
    assert torch.cosine_similarity(wrong, right, dim=0) < 0.9999


@pytest.mark.slow
def test_the_frozen_base_of_an_adapter_is_not_synchronised(ranks):
    assert all(results["frozen base left alone"] for results in ranks)


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_clipping_of_whole_gradients_is_that_of_torch(max_norm):
    """Bit for bit; a parameter without a gradient is skipped."""
    found, expected = ([torch.nn.Parameter(torch.zeros(5, 3)) for _ in range(3)] for _ in range(2))
    for index, pair in enumerate(zip(found[:2], expected[:2], strict=True)):
        for parameter in pair:
            parameter.grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(index))
    norm = clip_grad_norm_(iter(found), max_norm)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(expected, max_norm))
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(one.grad, other.grad)
    assert clip_grad_norm_(found[2:], max_norm) == 0


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.save(work(rank), Path(sys.argv[1]) / f"{rank}.pt")
