"""scale/asynchronous: every correction against a slow loop and TRL, and each token against the weights that drew it."""

import importlib.util
import math
import re
from types import SimpleNamespace

import pytest
import torch
from policies import load, read_plain
from run_files import ROOT, rows_of

from common.errors import UserError

from harness.base.config import TINY_POLICY
from harness.logs.statistics import UpdateStatistics

SCRIPT = "scale/asynchronous/train.py"
TO_SAMPLER = ("clip", "dppo", "sequence_mask")  # their ratio is to the sampler
CORRECTIONS = ("none", "decoupled", "tis", "icepop", *TO_SAMPLER)
CAP, DELTA, CLIP_EPS = 1.5, 0.1, 0.2
MASK = torch.tensor(
    [[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 1]]
)
GENERATOR = torch.Generator().manual_seed(0)
NOW, BEFORE, SAMPLER = (
    -torch.rand(MASK.shape, generator=GENERATOR, dtype=torch.float64) * 4 for _ in range(3)
)  # the policy that is trained, the one before the update, and the one that sampled
ADVANTAGES = torch.tensor([[1.0], [-0.7], [-1.3], [0.5], [0.0]], dtype=torch.float64)


def slow_terms(correction: str, b: int, before: torch.Tensor | None) -> tuple[list[float], list[float]]:
    """The terms and pushes of a row, one token at a time; `before` None: one update, so it is the policy itself."""
    now, sampler, advantage = NOW[b].tolist(), SAMPLER[b].tolist(), ADVANTAGES[b].item()
    before = now if before is None else before[b].tolist()
    places = [t for t in range(MASK.shape[1]) if MASK[b, t]]
    log_ratio = sum(sampler[t] - now[t] for t in places) / max(1, len(places))
    terms, pushes = [0.0] * MASK.shape[1], [0.0] * MASK.shape[1]
    for t in places:
        ratio = math.exp(now[t] - (sampler if correction in TO_SAMPLER else before)[t])
        weight, shift = math.exp(before[t] - sampler[t]), math.exp(now[t]) - math.exp(sampler[t])
        is_moved = shift > DELTA if advantage > 0 else -shift > DELTA
        m = {
            "decoupled": weight,
            "tis": min(weight, CAP),
            "icepop": weight if 1 / CAP <= weight <= CAP else 0.0,
            "dppo": 0.0 if advantage and is_moved else 1.0,
            "sequence_mask": 0.0 if advantage < 0 and log_ratio > DELTA else 1.0,
        }.get(correction, 1.0)
        limited = ratio if correction == "dppo" else min(max(ratio, 1 - CLIP_EPS), 1 + CLIP_EPS)
        divisor = len(places) * len(MASK)
        terms[t] = -m * min(ratio * advantage, limited * advantage) / divisor
        pushes[t] = m * ratio * advantage / divisor if ratio * advantage <= limited * advantage else 0.0
    return terms, pushes


@pytest.fixture(scope="module")
def train(load_script):
    return load_script(SCRIPT)


def given(make_experience, correction: str, before: torch.Tensor | None):
    experience = make_experience(MASK, advantages=ADVANTAGES)
    experience.sampler_log_probs = SAMPLER
    experience.old_log_probs = SAMPLER if correction in TO_SAMPLER else before
    return experience


@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])  # at tokens that do not count
@pytest.mark.parametrize("has_one_update", [True, False])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_terms_and_pushes_equal_a_slow_loop(train, make_experience, correction, has_one_update, garbage):
    before = None if has_one_update else BEFORE
    config = train.Config(correction=correction, importance_cap=CAP, delta=DELTA, kl_weight=0.0)
    experience = given(make_experience, correction, before)
    experience.sampler_log_probs = torch.where(MASK.bool(), SAMPLER, garbage)
    leaf = NOW.clone().requires_grad_()
    terms, diagnostics = train.policy_loss(config, leaf, experience, len(MASK))
    terms.sum().backward()
    slow = [slow_terms(correction, b, before) for b in range(len(MASK))]
    expected, pushes = torch.tensor(slow, dtype=torch.float64).unbind(dim=1)
    torch.testing.assert_close([terms.detach(), -leaf.grad], [expected, pushes], atol=0, rtol=1e-6)
    torch.testing.assert_close(diagnostics["importance_weight"][MASK.bool()], (NOW - SAMPLER).exp()[MASK.bool()])
    masked = (expected == 0) & MASK.bool() & (ADVANTAGES != 0)
    assert (diagnostics["masked"] & MASK.bool() & (ADVANTAGES != 0) == masked).all()
    assert masked.any() == (correction in ("icepop", "dppo", "sequence_mask"))
    assert all(values.shape == terms.shape for values in diagnostics.values())


IN_TRL = {"clip": {}, "sequence_mask": {"off_policy_mask_threshold": DELTA}}
IN_TRL |= {"tis": {"use_vllm": True, "vllm_importance_sampling_correction": True}}


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")
@pytest.mark.parametrize("correction", IN_TRL)
def test_loss_and_gradient_equal_trl(train, make_experience, correction):
    """A row without any token is left out, which TRL does not count. TRL truncates the weight outside of its loss."""
    text = (
        (ROOT / "docs" / "loss_trl.py").read_text(encoding="utf-8").replace('LOSS_TYPE = "dapo"', 'LOSS_TYPE = "grpo"')
    )
    for name, value in IN_TRL[correction].items():
        text, count = re.subn(rf'"{name}": \w+', f'"{name}": {value}', text)
        assert count == 1
    weights = (NOW - SAMPLER).exp().clamp(max=CAP)
    kept, module = MASK.any(dim=1), {"weights": weights[MASK.any(dim=1)].float()}
    text = text.replace("    trainer = GRPO", '    inputs["importance_sampling_ratio"] = weights\n    trainer = GRPO')
    exec(compile(text, "loss_trl.py", "exec"), module)
    experience = given(make_experience, correction, None).select(kept.nonzero()[:, 0])
    config = train.Config(correction=correction, importance_cap=CAP, delta=DELTA, kl_weight=0.0)
    ours, theirs = (NOW[kept].float().requires_grad_() for _ in range(2))
    value = train.policy_loss(config, ours, experience, int(kept.sum()))[0].sum()
    old, mask = experience.old_log_probs, MASK[kept]
    expected = module["policy_loss"](
        theirs, old if old is None else old.float(), torch.zeros(mask.shape), ADVANTAGES[kept].float(),
        torch.ones_like(mask), mask, kl_weight=0.0, max_new_tokens=9, num_tokens=int(mask.sum()), num_parts=1,
        prompt_length=0, clip_low=CLIP_EPS, clip_high=CLIP_EPS,
    )  # fmt: skip
    value.backward()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    assert (ours.grad - theirs.grad).abs().max() < 1e-6


@torch.no_grad()
def log_probs_of(model: torch.nn.Module, ids: list[int]) -> list[float]:
    scores = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    return scores[range(len(ids) - 1), ids[1:]].tolist()


def test_each_token_has_the_log_prob_of_the_weights_that_drew_it(train, tmp_path):
    """Also where they change in mid-completion. Those of another step give others."""
    command = (
        "--lag 2 --swap-every 2 --steps 4 --prompts-per-step 2 --group-size 2 --max-new-tokens 14 --lr 3e-4 --name x"
    )
    command += f" --checkpoint-every 1 --keep-checkpoints 9 --eval-prompts 1 --runs-dir {tmp_path}"
    train.main(command.split())
    directory = tmp_path / "asynchronous" / "x"
    paths = [TINY_POLICY, *(directory / "checkpoints" / f"step_{step}" for step in (1, 2, 3))]  # by steps done
    models, found = [*map(read_plain, paths)], {0: [], 1: [], 2: []}
    for row in rows_of(directory, "samples"):
        log_probs = [log_probs_of(model, row["ids"]) for model in models[: row["step"]]]
        ages, numbers = row["updates"][0]["staleness"], iter(range(99))
        for t, is_action in enumerate(row["action_mask"]):
            if is_action:
                age = max(0, min(2, row["step"] - 1) - next(numbers) // 2)
                assert ages[t] == age
                own, *others = (
                    log_probs[row["step"] - 1 - k][t - 1] for k in {age: 0, **dict.fromkeys(range(row["step"]))}
                )
                assert row["sampler_log_probs"][t] == pytest.approx(own, abs=1e-4)
                found[age].append(max(abs(other - own) for other in (own, *others)))
    assert all(max(differences) > 1e-2 for differences in found.values())
    metrics = {row["step"]: row["policy/staleness"] for row in rows_of(directory) if "policy/staleness" in row}
    assert metrics[1] == 0 < metrics[2] <= 1 < metrics[3] <= 2


def test_a_sampler_gives_the_policy_back_as_it_was(train):
    """Also if Ctrl-C ends the sampling; a rounded sampler differs from the policy, which computes as before."""
    policy = load()
    sampler = train.LaggingSampler(policy, lag=2, dtype="bfloat16")
    before = [weight.detach().clone() for weight in policy.parameters()]
    sampler.keep()
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    settings = {"max_new_tokens": 6, "prompt_index": [0], "key": (0,)}
    (row,) = sampler.sample([[5, 6, 7]], 1, **settings)
    changed = next(policy.parameters()).detach().clone()
    settings["key"] = None  # not iterable
    with pytest.raises(TypeError):
        sampler.sample([[5, 6, 7]], 1, **settings)
    assert policy.compute_dtype == torch.float32
    assert (next(policy.parameters()) == changed).all()
    assert not (changed == before[0]).any()
    with torch.no_grad():
        next(policy.parameters()).copy_(before[0])
    exact = policy(torch.tensor([row.ids]), torch.tensor([row.action_mask[1:]])).log_probs[0].tolist()
    gap = max(abs(a - b) for a, b in zip(exact, row.sampler_log_probs[1:], strict=True))
    assert 1e-6 < gap < 0.2


def test_a_sharded_launch_is_refused(train, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="without FSDP and DeepSpeed"):
        train.LaggingSampler(SimpleNamespace(), lag=1)


def test_the_ratio_is_never_to_a_sampler_that_is_another_policy(train, make_experience):
    """Unless the correction asks for that; with one policy and one arithmetic, recorded log-probs are the policy's."""
    policy = SimpleNamespace(compute_dtype=torch.float32)
    experience, several = make_experience(MASK), {"epochs_per_step": 2, "micro_batch_size": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "token_log_probs", lambda *_: "recomputed")

        def old(**settings):
            return train.old_log_probs(train.Config(**settings), policy, experience)

        recorded = experience.sampler_log_probs
        assert old(lag=0, **several) is old(lag=3, correction="clip") is recorded
        assert old(lag=3) is None
        others = {"lag": 3}, {"lag": 0, "sampler_dtype": "bfloat16"}, {"lag": 0, "samplers": 1}
        assert [old(**settings, **several) for settings in others] == ["recomputed"] * 3


def test_the_effective_sample_size_is_the_share_of_tokens_of_equal_weight_with_this_variance(make_experience):
    weights = torch.tensor([[1.0, 1.0, 4.0, 9.0]])
    statistics, log_probs = UpdateStatistics(1.0), torch.zeros(1, 4, requires_grad=True)
    experience = make_experience(torch.tensor([[1, 1, 1, 0]]))
    log_probs.retain_grad()
    (log_probs * 1).sum().backward()
    statistics.add(0, 0, experience, log_probs, torch.zeros(1, 4), importance_weight=weights)
    statistics.end_update(torch.tensor(1.0))
    metrics = statistics.metrics()
    assert metrics["policy/importance_weight"] == 2
    assert metrics["policy/effective_sample_size"] == pytest.approx(6**2 / 18 / 3)
    assert not any("squared" in name for name in metrics)


def test_the_benchmark_samples_late_in_any_experiment(train, load_script, tmp_path, monkeypatch):
    """Also where a step samples several times."""
    benchmark, base = load_script("benchmarks/asynchronous.py"), load_script("experiment_base/train.py")
    command = (
        "--steps 4 --prompts-per-step 2 --group-size 2 --max-new-tokens 14 --lr 3e-4 --kl-weight 0 --eval-prompts 1"
    )
    command = f"{command} --runs-dir {tmp_path} --name x".split()
    train.main([*command, "--lag", "2"])
    late = benchmark.late(2)
    monkeypatch.setattr(base, "sample", lambda *arguments, **settings: [late(*arguments, **settings) for _ in "ab"][1])
    base.main(command)
    drawn = [
        [(row["ids"], row["sampler_log_probs"]) for row in rows_of(tmp_path / name / "x", "samples")]
        for name in ("asynchronous", "experiment_base")
    ]
    assert drawn[0] == drawn[1]
