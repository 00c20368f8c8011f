"""The parts of a policy's loss. Each train.py composes its own loss, with every denominator in sight.

Shapes: B rows, T tokens; entry `[:, t]` of a (B, T-1) tensor is about token t+1. A mask is 1 on action tokens; values
at other tokens are never read, not even an infinity.
"""

import torch


def probability_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    """p(token) / p_old(token) for every action token, 1 elsewhere: (B, T-1).

    Args:
        log_probs: (B, T-1) of the policy that is trained, in nats, with gradient.
        old_log_probs: (B, T-1) of the policy that sampled. None: it is still the same policy. The ratio is then exactly
            1, and its gradient equals the gradient of the log-probs, which makes the update a policy gradient.

    >>> log_probs, old_log_probs = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -9.0]])
    >>> probability_ratio(log_probs, old_log_probs, mask=torch.tensor([[1, 0]]))
    tensor([[1.6487, 1.0000]])
    """
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    return torch.where(mask.bool(), log_probs - old, 0.0).exp()  # masked before exp: the gradient of an inf is NaN


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_eps: float, clip_eps_high: float | None = None
) -> torch.Tensor:
    """The loss of every token: minus the clipped surrogate objective of PPO (arXiv 1707.06347, equation 7).

        -min(ratio A, clip(ratio, 1 - clip_eps, 1 + clip_eps_high) A)

    A token whose probability has moved out of the range, in the direction that its advantage pushes, has no gradient.

    Args:
        ratio: (B, T-1).
        advantages: (B, 1) or (B, T-1).
        clip_eps_high: None: clip_eps, as in PPO. DAPO's is higher (arXiv 2503.14476, equation 10).

    >>> clipped_surrogate(torch.tensor([[1.0, 1.5]]), torch.tensor([[2.0]]), clip_eps=0.2)
    tensor([[-2.0000, -2.4000]])
    """
    high = clip_eps if clip_eps_high is None else clip_eps_high
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + high) * advantages)


def is_clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_eps: float, clip_eps_high: float | None = None
) -> torch.Tensor:
    """Which tokens have no gradient in `clipped_surrogate`.

    >>> is_clipped(torch.tensor([[1.3, 0.7], [1.3, 0.7]]), torch.tensor([[1.0], [-1.0]]), clip_eps=0.2)
    tensor([[ True, False],
            [False,  True]])
    """
    high = clip_eps if clip_eps_high is None else clip_eps_high
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - clip_eps) & (advantages < 0))


def approx_kl_divergence(log_probs: torch.Tensor, log_probs_ref: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(policy || reference) at every action token, in nats; 0 elsewhere: (B, T-1).

        k3 = r - log r - 1,   r = p_ref(token) / p(token)     (Schulman 2020, "Approximating KL divergence";
                                                               DeepSeekMath, arXiv 2402.03300, equation 4)

    It is never negative, and 0 where the two agree. Its mean over tokens drawn from the policy is the KL divergence.
    Its gradient is not exactly the gradient of the divergence, but points nearly the same way while the two policies
    are close. (k2 = (log r)^2 / 2 has the exact gradient.)

    >>> approx_kl_divergence(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]), mask=torch.tensor([1, 1]))
    tensor([0.0000, 0.3679])
    """
    log_r = torch.where(mask.bool(), log_probs_ref - log_probs, 0.0)
    return log_r.expm1() - log_r  # expm1: exp(x) - 1 would round to less than x where the two nearly agree


def bradley_terry_loss(margins: torch.Tensor) -> torch.Tensor:
    """Minus the log-probability that the chosen answer is preferred, in nats, for each pair.

        -log sigmoid(score_chosen - score_rejected)        (Bradley & Terry 1952; arXiv 2203.02155, equation 1)

    Args:
        margins: (pairs,), the score of the chosen answer minus the score of the rejected one.

    >>> bradley_terry_loss(torch.tensor([0.0, 2.0]))
    tensor([0.6931, 0.1269])
    """
    return -torch.nn.functional.logsigmoid(margins)


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, clip_eps: float
) -> torch.Tensor:
    """The critic's loss of every token, as in PPO's first implementation (OpenAI baselines, ppo2): (B, T-1).

        1/2 max((V - target)^2, (clip(V, V_old - clip_eps, V_old + clip_eps) - target)^2)

    A value that has moved towards its target by more than clip_eps within a rollout has no gradient. clip_eps is in
    units of reward, unlike the ratio's. The paper (arXiv 1707.06347, equation 9) has the plain square.

    >>> clipped_value_loss(torch.tensor([0.5, -0.5]), torch.zeros(2), torch.ones(2), clip_eps=0.2)
    tensor([0.3200, 1.1250])
    """
    clipped = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
    return 0.5 * torch.maximum((values - targets) ** 2, (clipped - targets) ** 2)


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of `x` where `mask` is 1.

    >>> masked_sum(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([1, 1, 0]))
    tensor(3.)
    """
    return torch.where(mask.bool(), x, 0.0).sum(dim=dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of `x` where `mask` is 1; 0 where the mask is empty.

    >>> masked_mean(torch.tensor([[1.0, 2.0], [5.0, 9.0]]), torch.tensor([[1, 1], [0, 0]]), dim=1)
    tensor([1.5000, 0.0000])
    """
    return masked_sum(x, mask, dim) / mask.sum(dim=dim).clamp(min=1)
