"""`GRPOLoss` against a loop over rows and tokens, written from the papers with plain Python numbers."""

import math

import pytest
import torch

from common.loss import GRPOLoss, approx_kl_divergence, is_clipped, masked_mean, masked_sum, probability_ratio

ROWS, TOKENS = 5, 7
MASK = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 1],
        [0, 1, 1, 0, 0, 1, 1],  # a hole: a tool spoke in between
        [0, 0, 0, 0, 0, 0, 0],  # no action token at all
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 1, 0],
    ]
)


def random_values(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_by_hand(log_probs, mask, advantages, old, ref, clip_eps, kl_weight, critic_type, max_length):
    """The loss, the KL estimate, and the derivative of the loss by every log-prob, one token at a time."""
    num_rows, num_tokens = mask.shape
    loss = kl = 0.0
    gradient = [[0.0] * num_tokens for _ in range(num_rows)]
    for row in range(num_rows):
        count = int(mask[row].sum())
        divisor = (count if critic_type == "grpo" else max_length) * num_rows
        for t in range(num_tokens):
            if not mask[row, t]:
                continue
            advantage = float(advantages[row, t if advantages.shape[1] > 1 else 0])
            ratio = 1.0 if old is None else math.exp(log_probs[row, t] - old[row, t])
            clipped = min(max(ratio, 1 - clip_eps), 1 + clip_eps)
            token_loss, slope = -min(ratio * advantage, clipped * advantage), -ratio * advantage
            if (advantage > 0 and ratio > 1 + clip_eps) or (advantage < 0 and ratio < 1 - clip_eps):
                slope = 0.0
            k3 = 0.0
            if kl_weight:
                log_r = float(ref[row, t] - log_probs[row, t])
                k3 = math.exp(log_r) - log_r - 1
                slope += kl_weight * (1 - math.exp(log_r))
            loss += (token_loss + kl_weight * k3) / divisor
            kl += k3 / (count * num_rows)
            gradient[row][t] = slope / divisor
    return loss, kl, torch.tensor(gradient, dtype=torch.float64)


@pytest.mark.parametrize("critic_type", ["grpo", "drgrpo"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
@pytest.mark.parametrize("advantage_width", [1, TOKENS])
@pytest.mark.parametrize("on_policy", [True, False])
def test_value_and_gradient_agree_with_a_loop_over_rows_and_tokens(
    make_experience, critic_type, kl_weight, advantage_width, on_policy
):
    log_probs = random_values(ROWS, TOKENS, seed=0).requires_grad_()
    old = None if on_policy else log_probs.detach() + random_values(ROWS, TOKENS, seed=1, scale=0.4)
    ref = log_probs.detach() + random_values(ROWS, TOKENS, seed=2) if kl_weight else None
    advantages = random_values(ROWS, advantage_width, seed=3)
    experience = make_experience(MASK, advantages=advantages, old_log_probs=old, log_probs_ref=ref)
    objective = GRPOLoss(clip_eps=0.2, kl_weight=kl_weight, critic_type=critic_type, generate_max_length=20)

    loss, kl = objective(log_probs=log_probs, experience=experience)
    loss.backward()

    expected_loss, expected_kl, expected_gradient = loss_by_hand(
        log_probs.detach(), MASK, advantages, old, ref, 0.2, kl_weight, critic_type, max_length=20
    )
    assert loss.item() == pytest.approx(expected_loss, abs=1e-9)
    assert kl.item() == pytest.approx(expected_kl, abs=1e-9)
    assert not kl.requires_grad
    torch.testing.assert_close(log_probs.grad, expected_gradient, atol=1e-9, rtol=0)
    if not on_policy:
        silenced = (expected_gradient == 0) & MASK.bool()
        assert silenced.any() == (kl_weight == 0)  # the data reach the clip, and the KL penalty is never clipped


@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
def test_the_gradient_vanishes_only_where_the_ratio_has_left_the_range_on_the_good_side(make_experience, advantage):
    ratios = torch.tensor([0.3, 0.79, 0.81, 0.999, 1.001, 1.19, 1.21, 3.0], dtype=torch.float64)[:, None]
    log_probs = ratios.log().requires_grad_()
    experience = make_experience(
        torch.ones(8, 1, dtype=torch.long),
        advantages=torch.full((8, 1), advantage, dtype=torch.float64),
        old_log_probs=torch.zeros(8, 1, dtype=torch.float64),
    )
    loss, _ = GRPOLoss(clip_eps=0.2, kl_weight=0.0)(log_probs=log_probs, experience=experience)
    loss.backward()

    if advantage > 0:
        silent, objectives = ratios > 1.2, ratios.clamp(max=1.2) * advantage
    elif advantage < 0:
        silent, objectives = ratios < 0.8, ratios.clamp(min=0.8) * advantage
    else:
        silent, objectives = torch.zeros_like(ratios, dtype=torch.bool), torch.zeros_like(ratios)
    assert loss.item() == pytest.approx(-objectives.mean().item(), abs=1e-12)
    torch.testing.assert_close(log_probs.grad, torch.where(silent, 0.0, -ratios * advantage / 8))
    assert torch.equal(is_clipped(ratios, experience.advantages, 0.2), silent)


def test_without_old_log_probs_the_ratio_is_exactly_one_and_the_gradient_is_not_zero(make_experience):
    """The loss is then minus the mean advantage, which says nothing, and its gradient is the policy gradient."""
    log_probs = random_values(2, 3, seed=0).float().requires_grad_()
    advantages = torch.tensor([[2.0], [-1.0]])
    experience = make_experience(torch.ones(2, 3, dtype=torch.long), advantages=advantages)
    assert torch.equal(probability_ratio(log_probs, experience), torch.ones(2, 3))
    loss, kl = GRPOLoss(clip_eps=0.2, kl_weight=0.0)(log_probs=log_probs, experience=experience)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5)
    assert kl.item() == 0.0
    torch.testing.assert_close(log_probs.grad, (-advantages / 6).expand(2, 3))


@pytest.mark.parametrize("field", ["log_probs", "old_log_probs", "log_probs_ref", "advantages"])
@pytest.mark.parametrize("garbage", [5.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("critic_type", ["grpo", "drgrpo"])
def test_what_stands_at_ignored_tokens_changes_neither_value_nor_gradient(make_experience, field, garbage, critic_type):
    clean = {
        "log_probs": random_values(ROWS, TOKENS, seed=0),
        "old_log_probs": random_values(ROWS, TOKENS, seed=0) + random_values(ROWS, TOKENS, seed=1, scale=0.4),
        "log_probs_ref": random_values(ROWS, TOKENS, seed=2),
        "advantages": random_values(ROWS, TOKENS, seed=3),
    }
    soiled = clean | {field: torch.where(MASK.bool(), clean[field], garbage)}
    results = []
    for values in (clean, soiled):
        log_probs = values["log_probs"].clone().requires_grad_()
        experience = make_experience(MASK, **{name: x for name, x in values.items() if name != "log_probs"})
        objective = GRPOLoss(clip_eps=0.2, kl_weight=0.3, critic_type=critic_type, generate_max_length=20)
        loss, kl = objective(log_probs=log_probs, experience=experience)
        loss.backward()
        results.append((loss.detach(), kl, log_probs.grad))
    torch.testing.assert_close(results[1], results[0], atol=0, rtol=0)
    assert (results[1][2][MASK == 0] == 0).all()


@pytest.mark.parametrize("critic_type", ["grpo", "drgrpo"])
def test_a_row_without_action_tokens_adds_nothing_and_still_counts_as_a_row(make_experience, critic_type):
    log_probs = random_values(2, 3, seed=0)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    objective = GRPOLoss(clip_eps=0.2, kl_weight=0.1, critic_type=critic_type, generate_max_length=4)

    def loss_of(rows: slice) -> torch.Tensor:
        experience = make_experience(
            mask[rows], advantages=torch.ones(2, 1)[rows], log_probs_ref=random_values(2, 3, seed=1)[rows]
        )
        return objective(log_probs=log_probs[rows], experience=experience)[0]

    assert loss_of(slice(0, 2)).item() == pytest.approx(loss_of(slice(0, 1)).item() / 2)
    assert loss_of(slice(1, 2)).item() == 0.0


@pytest.mark.parametrize("critic_type", ["grpo", "drgrpo"])
def test_padding_changes_neither_loss_nor_kl(make_experience, critic_type):
    """Dr. GRPO divides by a constant: not by the padded width, and not by what other rows happen to need."""
    log_probs, ref = random_values(ROWS, TOKENS, seed=0), random_values(ROWS, TOKENS, seed=1)
    advantages = random_values(ROWS, 1, seed=2)
    objective = GRPOLoss(clip_eps=0.2, kl_weight=0.3, critic_type=critic_type, generate_max_length=20)
    plain = objective(log_probs=log_probs, experience=make_experience(MASK, advantages=advantages, log_probs_ref=ref))
    wide = [torch.nn.functional.pad(x, (0, 9)) for x in (log_probs, MASK, ref)]
    padded = objective(
        log_probs=wide[0], experience=make_experience(wide[1], advantages=advantages, log_probs_ref=wide[2])
    )
    torch.testing.assert_close(padded, plain, atol=1e-12, rtol=0)


@pytest.mark.parametrize("critic_type", ["grpo", "drgrpo"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4])
def test_micro_batches_weighted_by_their_rows_add_up_to_the_whole(make_experience, critic_type, micro_batch_size):
    """So a row's share does not depend on the lengths of the rows beside it."""
    log_probs, ref = random_values(ROWS, TOKENS, seed=0), random_values(ROWS, TOKENS, seed=1)
    advantages = random_values(ROWS, 1, seed=2)
    objective = GRPOLoss(clip_eps=0.2, kl_weight=0.3, critic_type=critic_type, generate_max_length=20)

    def loss_and_kl(rows: torch.Tensor) -> torch.Tensor:
        experience = make_experience(MASK[rows], advantages=advantages[rows], log_probs_ref=ref[rows])
        return torch.stack(objective(log_probs=log_probs[rows], experience=experience))

    parts = [loss_and_kl(rows) * len(rows) / ROWS for rows in torch.arange(ROWS).split(micro_batch_size)]
    torch.testing.assert_close(sum(parts), loss_and_kl(torch.arange(ROWS)), atol=1e-12, rtol=0)


def test_dr_grpo_weighs_every_token_alike_and_grpo_every_row(make_experience):
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])

    def gradient(**settings) -> list[list[float]]:
        log_probs = torch.zeros(2, 4, requires_grad=True)
        experience = make_experience(mask, advantages=torch.ones(2, 1))
        GRPOLoss(clip_eps=0.2, kl_weight=0.0, **settings)(log_probs=log_probs, experience=experience)[0].backward()
        return log_probs.grad.tolist()

    assert gradient() == [[-0.5, 0, 0, 0], [-0.125] * 4]
    assert gradient(critic_type="drgrpo", generate_max_length=8) == [[-0.0625, 0, 0, 0], [-0.0625] * 4]
    assert gradient(critic_type="drgrpo", generate_max_length=16) == [[-0.03125, 0, 0, 0], [-0.03125] * 4]


@pytest.mark.parametrize("factor", [0.25, 3.0, 64.0])
def test_scaling_the_completion_budget_scales_the_loss_and_nothing_else(make_experience, factor):
    """So under Adam, which divides by the gradient's size, it is no second learning rate."""

    def loss_gradient_and_kl(generate_max_length: int) -> list[torch.Tensor]:
        log_probs = random_values(ROWS, TOKENS, seed=0).requires_grad_()
        experience = make_experience(
            MASK,
            advantages=random_values(ROWS, 1, seed=1),
            old_log_probs=random_values(ROWS, TOKENS, seed=2),
            log_probs_ref=random_values(ROWS, TOKENS, seed=3),
        )
        objective = GRPOLoss(0.2, 0.3, critic_type="drgrpo", generate_max_length=generate_max_length)
        loss, kl = objective(log_probs=log_probs, experience=experience)
        loss.backward()
        return [loss.detach(), log_probs.grad, kl]

    loss, gradient, kl = loss_gradient_and_kl(64)
    scaled = loss_gradient_and_kl(round(64 * factor))
    torch.testing.assert_close(scaled, [loss / factor, gradient / factor, kl], atol=1e-12, rtol=1e-12)


def test_the_kl_estimate_is_unbiased_and_never_negative():
    log_probs, log_probs_ref = (random_values(9, seed=seed).log_softmax(dim=-1) for seed in (0, 1))
    k3 = approx_kl_divergence(log_probs, log_probs_ref)
    exact = (log_probs.exp() * (log_probs - log_probs_ref)).sum()
    assert (k3 >= 0).all()
    assert (log_probs.exp() * k3).sum().item() == pytest.approx(exact.item(), abs=1e-12)
    assert torch.equal(approx_kl_divergence(log_probs, log_probs), torch.zeros(9, dtype=torch.float64))


def test_the_kl_penalty_pulls_nearly_where_the_exact_divergence_does():
    """The expected gradient of k3 is that of KL(reference || policy), which is close where the two policies are."""
    logits = random_values(9, seed=0).requires_grad_()
    log_probs = logits.log_softmax(dim=-1)
    log_probs_ref = (logits.detach() + random_values(9, seed=1, scale=0.3)).log_softmax(dim=-1)
    probs = log_probs.detach().exp()
    penalty = (probs * approx_kl_divergence(log_probs, log_probs_ref)).sum()
    exact = (log_probs.exp() * (log_probs - log_probs_ref)).sum()
    pulls = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (penalty, exact)]
    assert torch.cosine_similarity(*pulls, dim=0) > 0.95


def test_masked_sums_and_means_never_read_what_is_ignored():
    x = torch.tensor([[1.0, float("nan"), 3.0], [float("inf"), float("-inf"), float("nan")]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert masked_sum(x, mask).item() == 4.0
    assert masked_mean(x, mask).item() == 2.0
    assert masked_mean(x, mask, dim=-1).tolist() == [2.0, 0.0]  # an empty row is 0, not 0 / 0
    assert masked_mean(x, mask, denominator=8).item() == 0.5
    masked_mean(x, mask, dim=-1).sum().backward()
    assert x.grad.tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"critic_type": "ppo"}, "'ppo'"),
        ({"critic_type": "drgrpo"}, "generate_max_length"),
        ({"critic_type": "drgrpo", "generate_max_length": 0}, "generate_max_length"),
        ({"critic_type": "drgrpo", "generate_max_length": -5}, "generate_max_length"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOLoss(clip_eps=0.2, kl_weight=0.0, **settings)
