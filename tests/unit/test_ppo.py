"""PPO: advantages by GAE against slow loops over the tokens of the policy alone, the critic, its loss, and warm-up."""

import math

import pytest
import torch
from run_files import metrics_of

from common.advantages import STD_EPS, explained_variance, final_rewards, generalized_advantages, whiten
from common.critic import ActorCritic, token_values
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.policy import Policy
from common.sampling import sample

from harness.models.loading import check_computation

MASK = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 1, 1],  # cut off at the budget
        [0, 1, 1, 0, 0, 1, 1, 0],  # two turns, with a tool's answer between them
        [0, 1, 0, 1, 0, 0, 1, 1],  # three turns
        [0, 0, 0, 0, 0, 0, 0, 0],  # nothing was sampled
        [1, 0, 0, 0, 0, 0, 0, 0],  # a single token
    ]
)
DISCOUNTS = [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.99, 0.0)]


def random_values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


REWARDS, VALUES = random_values(*MASK.shape, seed=0), random_values(*MASK.shape, seed=1)


def slow_advantages(rewards: list, values: list, mask: list, gamma: float, gae_lambda: float) -> list[float]:
    """Equation 16 of arXiv 1506.02438 as a sum, over the action tokens of one row as if nothing were between them."""
    places = [t for t, is_action in enumerate(mask) if is_action]
    rewards, values = [rewards[t] for t in places], [*(values[t] for t in places), 0.0]
    deltas = [reward + gamma * values[k + 1] - values[k] for k, reward in enumerate(rewards)]
    advantages = [0.0] * len(mask)
    for k, place in enumerate(places):
        advantages[place] = sum((gamma * gae_lambda) ** (j - k) * deltas[j] for j in range(k, len(deltas)))
    return advantages


def naive_advantages(rewards, values, mask, gamma: float, gae_lambda: float) -> torch.Tensor:
    """The mistake: every position is a step, and the mask is applied to the result."""
    return generalized_advantages(rewards, values, torch.ones_like(mask), gamma, gae_lambda) * mask


# Advantages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "gae_lambda"), DISCOUNTS)
def test_gae_equals_a_slow_sum_over_action_tokens(gamma, gae_lambda):
    found = generalized_advantages(REWARDS, VALUES, MASK, gamma, gae_lambda)
    rows = zip(REWARDS.tolist(), VALUES.tolist(), MASK.tolist(), strict=True)
    expected = torch.tensor([slow_advantages(*row, gamma, gae_lambda) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    naive = naive_advantages(REWARDS, VALUES, MASK, gamma, gae_lambda)
    assert ((naive - expected).abs().amax(dim=1) > 0.01).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(("gamma", "gae_lambda"), DISCOUNTS)
@pytest.mark.parametrize("garbage", [7.0, math.nan, math.inf])
def test_values_and_rewards_at_tools_and_padding_are_never_read(gamma, gae_lambda, garbage):
    is_action = MASK.bool()
    expected = generalized_advantages(REWARDS, VALUES, MASK, gamma, gae_lambda)
    others = (torch.where(is_action, x, garbage) for x in (REWARDS, VALUES))
    assert torch.equal(generalized_advantages(*others, MASK, gamma, gae_lambda), expected)
    assert (expected[~is_action] == 0).all()


def test_whitened_advantages_ignore_padding(monkeypatch):
    """Over the action tokens of all ranks: halves of the rows on two ranks get what one rank gives them."""
    advantages = torch.where(MASK.bool(), 3 + 5 * VALUES, math.nan)
    found = whiten(advantages, MASK)
    tokens = found[MASK.bool()]
    assert tokens.mean().item() == pytest.approx(0, abs=1e-12)
    assert tokens.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert (found[MASK == 0] == 0).all()

    inputs = [(advantages[rows], MASK[rows]) for rows in (slice(0, 2), slice(2, 5))]
    count, sums = MASK.sum().item(), []
    for rows, mask in inputs:
        own = advantages[MASK.bool()].mean()
        kept = rows[mask.bool()]
        sums.append([int(mask.sum()), kept.sum().item(), ((kept - own) ** 2).sum().item()])
    assert sum(part[0] for part in sums) == count
    parts = []
    for rows, mask in inputs:
        answers = iter(zip(*sums, strict=True))  # what each call of `gather` returns
        monkeypatch.setattr("common.advantages.gather", lambda _, answers=answers: list(next(answers)))
        parts.append(whiten(rows, mask))
    torch.testing.assert_close(torch.cat(parts), found, atol=1e-12, rtol=0)


def test_equal_advantages_are_whitened_to_nothing():
    assert whiten(torch.full((2, 3), 0.7), torch.ones(2, 3)).abs().max() < 1e-10 / STD_EPS


def test_explained_variance_is_about_action_tokens():
    returns = random_values(len(MASK), 1, seed=4)
    pairs = [(returns[i, 0].item(), VALUES[i, t].item()) for i, t in MASK.nonzero().tolist()]
    mean = sum(r for r, _ in pairs) / len(pairs)
    bias = sum(r - v for r, v in pairs) / len(pairs)
    expected = 1 - sum((r - v - bias) ** 2 for r, v in pairs) / sum((r - mean) ** 2 for r, _ in pairs)
    garbage = torch.where(MASK.bool(), VALUES, math.nan)
    assert explained_variance(garbage, returns, MASK) == pytest.approx(expected)
    assert explained_variance(returns.expand_as(VALUES), returns, MASK) == 1
    assert explained_variance(VALUES, torch.ones(len(MASK), 1), MASK) == 0


def test_a_run_with_a_perfect_critic_explains_everything(train, tmp_path, monkeypatch):
    """Whose values are the discounted return that is left, here of rewards of 0, 1, ... for the rows."""
    gamma, gae_lambda = 0.9, 0.7

    def perfect(policy, experience, micro_batch_size):
        left = experience.action_mask.flip(1).cumsum(dim=1).flip(1) - 1  # action tokens that follow
        return gamma ** left.clamp(min=0) * torch.arange(len(left))[:, None] * experience.action_mask

    monkeypatch.setattr(train, "token_values", perfect)
    monkeypatch.setattr(train, "final_rewards", lambda _, mask: final_rewards(torch.arange(len(mask)) + 0.0, mask))
    flags = f"--steps 1 --prompts-per-step 2 --group-size 4 --max-new-tokens 12 --eval-prompts 1 --gamma {gamma}"
    train.main([*flags.split(), "--gae-lambda", f"{gae_lambda}", "--runs-dir", str(tmp_path), "--name", "x"])
    step = metrics_of(tmp_path / "ppo" / "x")[1]
    assert step["critic/explained_variance"] == pytest.approx(1, abs=1e-6)


# The critic -----------------------------------------------------------------------------------------------------------


def rows_of(policy, prompts=((5, 6, 7), (8, 9)), group_size=4) -> Experience:
    return collate(sample(policy, [*map(list, prompts)], group_size, max_new_tokens=6, key=(0,)), policy.pad_id)


def with_values(policy: ActorCritic, experience: Experience) -> Experience:
    """As after phase 4 of a step, with several updates to follow."""
    mask, generator = experience.action_mask, torch.Generator().manual_seed(0)
    experience.values = token_values(policy, experience, 3)
    rewards = final_rewards(torch.rand(len(mask), generator=generator), mask)
    advantages = generalized_advantages(rewards, experience.values, mask, 1.0, 0.95)
    experience.value_targets, experience.advantages = advantages + experience.values, whiten(advantages, mask)
    experience.old_log_probs = token_log_probs(policy, experience, 3)
    return experience


@torch.no_grad()
def teach(policy: ActorCritic) -> ActorCritic:
    """A critic whose values are not all 0."""
    head = policy.critic["head"]
    head.weight.copy_(0.2 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(3)))
    return policy


def test_a_value_has_not_seen_the_token_that_it_is_about(make_policy):
    """Nor later ones, nor the padding, nor other rows; it depends on the token before."""
    policy = teach(ActorCritic(make_policy()))
    sequences = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    values = policy.values(sequences, mask)
    changed = sequences.clone()
    changed[0, 4] = 20  # entry 3 is about it
    others = policy.values(changed, mask)
    assert torch.equal(values[0, :4], others[0, :4])
    assert (values[0, 4:] - others[0, 4:]).abs().min() > 1e-4
    padded = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 0, 0], [3, 4, 0, 0, 0, 0, 0, 0, 0]])
    longer = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(policy.values(padded, longer)[:1, :6], values, atol=1e-5, rtol=0)


def test_a_model_that_must_be_padded_is_padded_in_both_parts(train, update, capsys):
    """StableLM's attention does not know the borders of packed rows: packed, every gradient was NaN."""
    from transformers import StableLmConfig, StableLmForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = StableLmForCausalLM(
            StableLmConfig(vocab_size=24, intermediate_size=64, initializer_range=0.3, eos_token_id=2, **sizes)
        )
    plain = Policy(model, None, [2], pad_id=0)
    check_computation(plain)
    assert "rows are padded, not packed" in capsys.readouterr().out
    policy = teach(ActorCritic(plain))
    experience = with_values(policy, rows_of(plain))
    sequences, mask = experience.sequences, experience.action_mask
    with torch.no_grad():
        scores = model(sequences).logits[:, :-1].log_softmax(dim=-1).gather(-1, sequences[:, 1:, None])[..., 0]
        values = policy.critic["head"](model.model(sequences).last_hidden_state[:, :-1])[..., 0]
        found = policy(sequences, mask)
    torch.testing.assert_close(found.log_probs, scores * mask, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.values, values * mask, atol=1e-5, rtol=0)
    gradient = gradient_of_update(train, update, policy, experience)
    assert gradient.isfinite().all()
    assert gradient.norm() > 0.01


# Its loss -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train(load_script):
    return load_script("policy_gradients/ppo/train.py")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_loss_equals_a_slow_loop(train, make_experience, dtype):
    """Terms and gradients, with the denominators; the data trigger the clip on both sides."""
    values, targets = VALUES.to(dtype, copy=True).requires_grad_(), random_values(*MASK.shape, seed=5)
    old, eps = VALUES + 0.3 * random_values(*MASK.shape, seed=6), 0.2
    micro = make_experience(MASK, values=old.to(dtype), value_targets=targets.to(dtype))
    terms, _ = train.value_loss(train.Config(value_clip=eps), values, micro, num_rows=10)
    terms.sum().backward()

    expected, slopes, sides = torch.zeros_like(VALUES), torch.zeros_like(VALUES), set()
    for i, t in MASK.nonzero().tolist():
        now, before, target = VALUES[i, t].item(), old[i, t].item(), targets[i, t].item()
        limited = min(max(now, before - eps), before + eps)
        is_stopped = limited != now and (limited - target) ** 2 > (now - target) ** 2
        sides |= {(is_stopped, now > before)}
        divisor = 10 * MASK[i].sum().item()
        expected[i, t] = 0.5 * max((now - target) ** 2, (limited - target) ** 2) / divisor
        slopes[i, t] = 0.0 if is_stopped else (now - target) / divisor
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(terms.detach().double(), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(values.grad.double(), slopes, atol=tolerance, rtol=0)
    assert len(sides) == 4


def gradient_of_update(train, update, policy: ActorCritic, experience: Experience, **others) -> torch.Tensor:
    policy.zero_grad()
    settings = {"prompts_per_step": 2, "group_size": 4, "critic_warmup": 0, "max_grad_norm": 1e9, "kl_weight": 0.0}
    config = train.Config(**settings | {"micro_batch_size": 8} | others)
    update(train, config, policy, torch.optim.SGD(policy.parameters(), lr=0.0), experience, 1)
    return torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])


@pytest.mark.parametrize("step", [1, 2])
def test_the_policy_waits_until_the_critic_is_warm(train, update, make_policy, step):
    policy = teach(ActorCritic(make_policy()))
    experience = with_values(policy, rows_of(policy))
    config = train.Config(prompts_per_step=2, group_size=4, critic_warmup=1, micro_batch_size=8, lr=1e-3)
    before = [[weight.detach().clone() for weight in part.parameters()] for part in (policy.model, policy.critic)]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    statistics = update(train, config, policy, optimizer, experience, step)
    moved = [
        any(not torch.equal(old, new) for old, new in zip(olds, part.parameters(), strict=True))
        for olds, part in zip(before, (policy.model, policy.critic), strict=True)
    ]
    assert moved == [step > 1, True]
    pushes = torch.cat([row.measurements["push"] for rows in statistics.rows.values() for row in rows])
    assert bool(pushes.any()) == (step > 1)
    metrics = statistics.metrics()
    assert metrics["critic/loss"] > 0
    own = experience.values[experience.action_mask.bool()].mean().item()
    assert metrics["critic/value"] == pytest.approx(own, abs=1e-6)
