"""The helpers of a loss, and each experiment's `policy_loss` against a slow loop written from the papers."""

import importlib.util
import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from oracle import FORMULAS, ONE_LINE, TOKEN_MEAN, clips_of, slow_row

from common.loss import (
    approx_kl_divergence,
    clipped_surrogate,
    is_clipped,
    masked_mean,
    masked_sum,
    probability_ratio,
)

from harness.base.places import in_experiments

ROOT = Path(__file__).resolve().parents[2]
ROWS, TOKENS, BUDGET, CLIP_EPS = 5, 7, 20, 0.2
MASK = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 1],
        [0, 1, 1, 0, 0, 1, 1],  # a hole: tool output
        [0, 0, 0, 0, 0, 0, 0],  # no action token at all
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 1, 0],
    ]
)
ALL_LOSSES = [(formula, name, flags) for name, cases in FORMULAS.items() for formula, flags in cases]


def random_values(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOG_PROBS = random_values(ROWS, TOKENS, seed=0)
OLD = LOG_PROBS + random_values(ROWS, TOKENS, seed=1, scale=0.4)
REF = LOG_PROBS + random_values(ROWS, TOKENS, seed=2)
ADVANTAGES = random_values(ROWS, 1, seed=3)


def terms_and_gradient(policy_loss, log_probs, experience, **settings) -> list[torch.Tensor]:
    leaf = log_probs.clone().requires_grad_()
    terms = policy_loss(leaf, experience, **settings)
    terms.sum().backward()
    return [terms.detach(), leaf.grad]


@pytest.fixture(params=ALL_LOSSES, ids=lambda case: f"{case[1]}-{case[0]}")
def formula_and_loss(request, load_script):
    """The name of a formula, and a `policy_loss` that claims to compute it: (log_probs, experience, ...) -> terms."""
    formula, experiment, flags = request.param
    train = load_script(f"{experiment}/train.py")

    def terms_of(log_probs, experience, kl_weight=0.0, whole=None):
        config = train.Config(kl_weight=kl_weight, max_new_tokens=BUDGET, **clips_of(formula), **flags)
        whole = experience.action_mask if whole is None else whole  # the mask of the minibatch
        by_tokens = "num_tokens" in inspect.signature(train.policy_loss).parameters
        assert by_tokens == (formula in TOKEN_MEAN)
        count = int(whole.sum()) if by_tokens else len(whole)
        terms, diagnostics = train.policy_loss(config, log_probs, experience, count)
        assert all(values.shape == terms.shape == log_probs.shape for values in diagnostics.values())
        return terms

    return formula, terms_of


def test_every_experiment_has_an_oracle():
    experiments = {path.parent.relative_to(ROOT).as_posix() for path in in_experiments("train.py")}
    assert FORMULAS.keys() | ONE_LINE == experiments


# policy_loss of each experiment -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
@pytest.mark.parametrize("advantage_width", [1, TOKENS])
@pytest.mark.parametrize("on_policy", [True, False])
def test_terms_and_pushes_equal_a_slow_loop(
    make_experience, formula_and_loss, dtype, kl_weight, advantage_width, on_policy
):
    formula, policy_loss = formula_and_loss
    old, ref = None if on_policy else OLD, REF if kl_weight else None
    advantages = random_values(ROWS, advantage_width, seed=3)
    given = {"advantages": advantages, "old_log_probs": old, "log_probs_ref": ref}
    given = {name: x if x is None else x.to(dtype) for name, x in given.items()}
    found = terms_and_gradient(policy_loss, LOG_PROBS.to(dtype), make_experience(MASK, **given), kl_weight=kl_weight)

    settings = {"num_rows": ROWS, "num_tokens": int(MASK.sum()), "kl_weight": kl_weight, "budget": BUDGET}
    settings |= clips_of(formula)
    others = (x if x is not None else [None] * ROWS for x in (old, ref))
    rows = zip(MASK, LOG_PROBS, advantages.expand(ROWS, TOKENS), *others, strict=True)
    slow = [slow_row(formula, *(x if x is None else x.tolist() for x in row), **settings) for row in rows]
    expected, pushes = (torch.tensor(x, dtype=torch.float64) for x in zip(*slow, strict=True))
    tolerance = 1e-9 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close([x.double() for x in found], [expected, -pushes], atol=tolerance, rtol=0)
    if not on_policy:
        silenced = (pushes == 0) & MASK.bool()
        never = formula == "cispo" or (formula == "gspo" and advantage_width > 1)  # a row is clipped as one
        assert silenced.any() == (kl_weight == 0 and not never)  # the data trigger the clip; it never clips the KL


@pytest.mark.parametrize("field", ["log_probs", "old_log_probs", "log_probs_ref"])
@pytest.mark.parametrize("garbage", [5.0, float("nan"), float("inf"), float("-inf")])
def test_ignored_tokens_change_nothing(make_experience, formula_and_loss, field, garbage):
    _, policy_loss = formula_and_loss
    clean = {"log_probs": LOG_PROBS, "old_log_probs": OLD, "log_probs_ref": REF}
    altered = clean | {field: torch.where(MASK.bool(), clean[field], garbage)}
    expected, found = (
        terms_and_gradient(
            policy_loss,
            values["log_probs"],
            make_experience(MASK, advantages=ADVANTAGES, **{name: values[name] for name in [*clean][1:]}),
            kl_weight=0.3,
        )
        for values in (clean, altered)
    )
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert all((values[MASK == 0] == 0).all() for values in found)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_losses_of_micro_batches_add_up(make_experience, formula_and_loss, micro_batch_size):
    """Without a further factor, so a row's share does not depend on the micro-batch that it is in."""
    _, policy_loss = formula_and_loss

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        experience = make_experience(MASK[rows], advantages=ADVANTAGES[rows], log_probs_ref=REF[rows])
        return policy_loss(LOG_PROBS[rows], experience, kl_weight=0.3, whole=MASK).sum()

    parts = [loss_of(rows) for rows in torch.arange(ROWS).split(micro_batch_size)]
    torch.testing.assert_close(sum(parts), loss_of(torch.arange(ROWS)), atol=1e-12, rtol=0)


# One update per rollout ----------------------------------------------------------------------------------------------

RATIO_LOSSES = ("experiment_base", "policy_gradients/gspo", "policy_gradients/cispo", "policy_gradients/dapo")


def gradients(load_script, make_experience, old: torch.Tensor | None) -> list[torch.Tensor]:
    """Of losses that differ in ratio and clip, on rows of equal length, where their averages are the same."""
    mask, found = torch.ones(3, 4, dtype=torch.long), []
    for name in RATIO_LOSSES:
        train, formula = load_script(f"{name}/train.py"), FORMULAS[name][0][0]
        config = train.Config(kl_weight=0.0, max_new_tokens=BUDGET, **clips_of(formula))
        experience = make_experience(mask, advantages=ADVANTAGES[:3], old_log_probs=old)
        leaf = LOG_PROBS[:3, :4].clone().requires_grad_()
        terms, _ = train.policy_loss(config, leaf, experience, 12 if formula in TOKEN_MEAN else 3)
        terms.sum().backward()
        found.append(leaf.grad)
    return found


@pytest.mark.parametrize("is_given", [False, True])
def test_at_a_ratio_of_1_ratio_and_clip_change_no_gradient(load_script, make_experience, is_given):
    """With one update per rollout GRPO, GSPO, CISPO and DAPO's clip are REINFORCE: -A / number of tokens."""
    reinforce = (-ADVANTAGES[:3] / 12).expand(3, 4)
    for gradient in gradients(load_script, make_experience, old=LOG_PROBS[:3, :4] if is_given else None):
        assert (gradient - reinforce).abs().max() < 1e-12


def test_after_the_first_update_they_differ(load_script, make_experience):
    old = OLD[:3, :4].clone()
    old[:, 0] = LOG_PROBS[:3, 0] - math.log(1.25)  # between 1 + 0.2 and 1 + 0.28
    found = gradients(load_script, make_experience, old=old)
    for index, gradient in enumerate(found):
        assert all((gradient - other).abs().max() > 1e-3 for other in found[:index])


# TRL -----------------------------------------------------------------------------------------------------------------

IN_TRL = {  # loss_type, level of the ratio, and the clip as TRL has it
    "experiment_base": ("grpo", "token", {}),
    "experiment_drgrpo": ("dr_grpo", "token", {}),
    "policy_gradients/rloo": ("dr_grpo", "token", {}),
    "policy_gradients/dapo": ("dapo", "token", {}),
    "policy_gradients/gspo": ("grpo", "sequence", {}),
    "policy_gradients/cispo": ("cispo", "token", {"clip_high": 1.28}),  # TRL's epsilon_high is the cap itself
}


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")
@pytest.mark.parametrize("is_on_policy", [True, False])
@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
@pytest.mark.parametrize("name", IN_TRL)
def test_loss_and_gradient_equal_trl(load_script, make_experience, name, kl_weight, is_on_policy):
    """On ragged rows with tool output; a row without any token is left out, which TRL does not count."""
    loss_type, level, given = IN_TRL[name]
    text = (ROOT / "docs" / "loss_trl.py").read_text(encoding="utf-8")
    module: dict = {}
    for constant, value in (("LOSS_TYPE", loss_type), ("LEVEL", level), ("BIAS_CORRECTION_KL", False)):
        text = re.sub(rf"^{constant} = [^ ]+", f"{constant} = {value!r}", text, flags=re.MULTILINE)
    exec(compile(text, "loss_trl.py", "exec"), module)
    train, formula = load_script(f"{name}/train.py"), FORMULAS[name][0][0]
    kept = MASK.any(dim=1)
    mask, log_probs, old, ref = MASK[kept], LOG_PROBS[kept].float(), OLD[kept].float(), REF[kept].float()
    advantages, num_rows, num_tokens = ADVANTAGES[kept].float(), int(kept.sum()), int(MASK.sum())
    old = log_probs if is_on_policy else old
    clips = clips_of(formula)
    config = train.Config(kl_weight=kl_weight, max_new_tokens=BUDGET, **clips)
    experience = make_experience(mask, advantages=advantages, old_log_probs=old, log_probs_ref=ref)
    count = num_tokens if formula in TOKEN_MEAN else num_rows
    ours, theirs = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    value = train.policy_loss(config, ours, experience, count)[0].sum()
    low = clips.get("clip_eps", 0.0)
    ends = {"clip_low": low, "clip_high": clips.get("clip_eps_high", low)} | given
    expected = module["policy_loss"](
        theirs, old, ref, advantages, torch.ones_like(mask), mask, kl_weight=kl_weight, max_new_tokens=BUDGET,
        num_tokens=num_tokens, num_parts=1, prompt_length=0, **ends,
    )  # fmt: skip
    value.backward()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    assert (ours.grad - theirs.grad).abs().max() < 1e-6


# helpers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "low", "high"), [(1.5, 0.0, 1.2), (-1.5, 0.8, 9.0), (0.0, 0.0, 9.0)], ids=["up", "down", "none"]
)
def test_the_clip_stops_the_gradient_on_one_side_only(advantage, low, high):
    ratios = torch.tensor([[0.3, 0.79, 0.81, 0.999, 1.001, 1.19, 1.21, 3.0]], dtype=torch.float64).requires_grad_()
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    token_loss = clipped_surrogate(ratios, advantages, CLIP_EPS)
    token_loss.sum().backward()
    values = ratios.detach()
    silent = (values < low) | (values > high)
    torch.testing.assert_close(token_loss.detach(), -values.clamp(low, high) * advantage)
    torch.testing.assert_close(ratios.grad, torch.where(silent, 0.0, -advantages))
    assert torch.equal(is_clipped(values, advantages, CLIP_EPS), silent)


def test_the_ratio_is_exactly_1_without_old_log_probs():
    log_probs = random_values(2, 3, seed=0).float().requires_grad_()
    ratio = probability_ratio(log_probs, None, torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert torch.equal(ratio, torch.ones(2, 3))
    ratio.sum().backward()
    assert log_probs.grad.tolist() == [[1, 1, 0], [1, 0, 0]]


def test_kl_estimate_is_unbiased_and_never_negative():
    log_probs, log_probs_ref = (random_values(9, seed=seed).log_softmax(dim=-1) for seed in (0, 1))
    everywhere = torch.ones(9)
    k3 = approx_kl_divergence(log_probs, log_probs_ref, everywhere)
    exact = (log_probs.exp() * (log_probs - log_probs_ref)).sum()
    assert (k3 >= 0).all()
    assert (log_probs.exp() * k3).sum().item() == pytest.approx(exact.item(), abs=1e-12)
    assert not approx_kl_divergence(log_probs, log_probs, everywhere).any()


def test_kl_penalty_has_nearly_the_gradient_of_the_divergence():
    """The expected gradient of k3 is the gradient of KL(reference || policy), which is similar for similar policies."""
    logits = random_values(9, seed=0).requires_grad_()
    log_probs = logits.log_softmax(dim=-1)
    log_probs_ref = (logits.detach() + random_values(9, seed=1, scale=0.3)).log_softmax(dim=-1)
    probs = log_probs.detach().exp()
    penalty = (probs * approx_kl_divergence(log_probs, log_probs_ref, torch.ones(9))).sum()
    exact = (log_probs.exp() * (log_probs - log_probs_ref)).sum()
    pulls = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (penalty, exact)]
    assert torch.cosine_similarity(*pulls, dim=0) > 0.95


def test_masked_sums_and_means_never_read_what_is_ignored():
    x = torch.tensor([[1.0, float("nan"), 3.0], [float("inf"), float("-inf"), float("nan")]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert masked_sum(x, mask).item() == 4.0
    assert masked_mean(x, mask).item() == 2.0
    assert masked_mean(x, mask, dim=1).tolist() == [2.0, 0.0]  # an empty row is 0, not 0 / 0
    masked_mean(x, mask, dim=1).sum().backward()
    assert x.grad.tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]


def test_an_entropy_bonus_from_sampled_tokens():
    """Its expectation over all tokens has the gradient of minus the entropy (docs/hyperparameters.md)."""
    logits = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(dim=0)
    (exact,) = torch.autograd.grad((log_probs.exp() * log_probs).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((log_probs.exp().detach() * log_probs.detach() * log_probs).sum(), logits)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)
    assert exact.norm() > 0.1


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "ratio", "loss", "gradient", "is_silent"),
    [
        (1e4, 1.0, math.inf, -1.2, math.nan, True),  # the clip's 0 times the inf of exp
        (1e4, -1.0, math.inf, math.inf, math.inf, False),
        (1e4, 0.0, math.inf, math.nan, math.nan, False),
        (-1e4, 1.0, 0.0, 0.0, 0.0, False),
        (-1e4, -1.0, 0.0, 0.8, 0.0, True),
    ],
)
def test_a_log_ratio_that_overflows_gives_no_finite_gradient(log_ratio, advantage, ratio, loss, gradient, is_silent):
    """In float32, where exp overflows above 88.7; the update is skipped (docs/metrics.md)."""
    log_probs, advantages = torch.full((1, 1), log_ratio).requires_grad_(), torch.tensor([[advantage]])
    found = probability_ratio(log_probs, torch.zeros(1, 1), torch.ones(1, 1))
    token_loss = clipped_surrogate(found, advantages, CLIP_EPS)
    token_loss.sum().backward()
    values = [found.item(), token_loss.item(), log_probs.grad.item()]
    assert values == pytest.approx([ratio, loss, gradient], nan_ok=True)
    assert is_clipped(found, advantages, CLIP_EPS).item() == is_silent


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_a_log_ratio_that_overflows_is_not_read_outside_the_mask(log_ratio):
    log_probs = torch.tensor([[0.1, log_ratio]]).requires_grad_()
    ratio = probability_ratio(log_probs, torch.zeros(1, 2), torch.tensor([[1, 0]]))
    clipped_surrogate(ratio, torch.tensor([[-1.0]]), CLIP_EPS).sum().backward()
    assert ratio[0, 1] == 1
    assert log_probs.grad.tolist() == [[pytest.approx(math.exp(0.1)), 0.0]]


@pytest.mark.parametrize(("advantage", "loss"), [(1.0, -1.2), (-1.0, math.exp(20))])
def test_a_log_ratio_clamped_to_20_has_no_gradient_of_either_sign(advantage, loss):
    log_probs = torch.full((1, 1), 1e4).requires_grad_()
    ratio = probability_ratio(log_probs.clamp(-20, 20), torch.zeros(1, 1), torch.ones(1, 1))
    token_loss = clipped_surrogate(ratio, torch.tensor([[advantage]]), CLIP_EPS)
    token_loss.sum().backward()
    assert token_loss.item() == pytest.approx(loss, rel=1e-5)
    assert log_probs.grad.item() == 0


def test_a_clamped_log_ratio_loses_the_gradient_that_the_clip_keeps():
    """Of a token with a negative advantage whose ratio is 10 (an exercise of experiment_base)."""
    old, mask = torch.zeros(1, 1), torch.ones(1, 1)
    gradients = []
    for guard in (10.0, 2.0):
        log_probs = torch.full((1, 1), 10.0).log().requires_grad_()
        ratio = probability_ratio(log_probs.clamp(-guard, guard), old, mask)
        clipped_surrogate(ratio, torch.tensor([[-1.0]]), 0.2).sum().backward()
        assert not is_clipped(ratio, torch.tensor([[-1.0]]), 0.2)
        gradients.append(log_probs.grad.item())
    assert gradients == pytest.approx([10.0, 0.0])
