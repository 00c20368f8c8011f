"""The GRPO objective: a clipped surrogate plus a penalty for leaving the reference.

Each docstring says what is averaged over what.

Shapes: B rows, T tokens; entry `[:, t]` of a (B, T-1) tensor is about token t+1.
"""

import torch

from common.experience import Experience


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of `x` where `mask` is 1. What stands elsewhere is never read, not even an infinity.

    >>> masked_sum(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([1, 1, 0]))
    tensor(3.)
    """
    return torch.where(mask.bool(), x, 0.0).sum(dim=dim)


def masked_mean(
    x: torch.Tensor, mask: torch.Tensor, dim: int | None = None, denominator: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Sum of `x` where `mask` is 1, divided by the count of the mask's ones, or by `denominator` where that is given.

    A denominator counted over the whole optimizer batch makes the means of micro-batches and ranks add up to the mean.
    Where the mask is empty the mean is 0.

    >>> x, mask = torch.tensor([[1.0, 2.0], [5.0, 9.0]]), torch.tensor([[1, 1], [0, 0]])
    >>> masked_mean(x, mask, dim=-1), masked_mean(x, mask, denominator=4)
    (tensor([1.5000, 0.0000]), tensor(0.7500))
    """
    if denominator is None:
        denominator = mask.sum(dim=dim).clamp(min=1)
    return masked_sum(x, mask, dim) / denominator


def approx_kl_divergence(log_probs: torch.Tensor, log_probs_ref: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(policy || reference) from one sampled token: never negative, and 0 where the two agree.

        k3 = r - log r - 1,   r = p_ref(token) / p(token)     (Schulman 2020, "Approximating KL divergence";
                                                               DeepSeekMath, arXiv 2402.03300, equation 4)

    Its mean over tokens drawn from the policy is the KL divergence, in nats. Its gradient is not exactly that of the
    divergence (that of k2 = (log r)^2 / 2 is), but points nearly the same way while the two policies are close.

    Args:
        log_probs, log_probs_ref: log-probabilities of the same tokens, of equal shape, in nats.

    >>> approx_kl_divergence(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0]))
    tensor([0.0000, 0.3679])
    """
    log_r = log_probs_ref - log_probs
    return log_r.expm1() - log_r  # expm1: exp(x) - 1 would round to less than x where the two nearly agree


class GRPOLoss:
    """The loss of one (micro-)batch of rows, to be minimised.

        ratio_t = p(token_t) / p_old(token_t)
        l_t     = -min(ratio_t A, clip(ratio_t, 1 - clip_eps, 1 + clip_eps) A) + kl_weight k3_t

        grpo:    loss = mean over rows of (mean of l_t over the row's action tokens)    (arXiv 2402.03300, equation 3)
        drgrpo:  loss = mean over rows of (sum of l_t over the row's action tokens / generate_max_length)
                                                                                        (arXiv 2503.20783, section 3.2)

    The mean is over the rows that it is given. To spread one optimizer batch over micro-batches, multiply each loss by
    its rows over the rows of the whole batch; then the split changes memory and time, never the update. A row without
    action tokens contributes 0 and still counts as a row.

    Args:
        clip_eps: how far the ratio may move, in either direction, before a token stops being pushed on.
        kl_weight: weight of the KL penalty, in units of advantage per nat; 0 needs no reference.
        critic_type: which formula stands in for a critic, "grpo" or "drgrpo".
        generate_max_length: for "drgrpo", the completion budget in tokens: a constant, not a length of the batch.

    Raises:
        ValueError: `critic_type` is unknown, or "drgrpo" comes without a positive `generate_max_length`.
    """

    def __init__(
        self, clip_eps: float, kl_weight: float, critic_type: str = "grpo", generate_max_length: int | None = None
    ):
        if critic_type not in ("grpo", "drgrpo"):
            raise ValueError(f'critic_type must be "grpo" or "drgrpo", not {critic_type!r}')
        if critic_type == "drgrpo" and not (generate_max_length and generate_max_length > 0):
            raise ValueError('critic_type "drgrpo" divides by generate_max_length, which must be a positive count')
        self.clip_eps, self.kl_weight = clip_eps, kl_weight
        self.critic_type, self.generate_max_length = critic_type, generate_max_length

    def __call__(self, log_probs: torch.Tensor, experience: Experience) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss of `experience` under a policy that gives its tokens `log_probs`.

        Args:
            log_probs: (B, T-1), with gradient.
            experience: B rows with `action_mask` and `advantages`; `action_log_probs`, or None for "the current ones";
                `log_probs_ref` where `kl_weight` is not 0.

        Returns:
            The loss, and without gradient the KL estimate in nats per token, whatever the `critic_type`: mean over a
            row's action tokens, then mean over rows (0 without a reference).
        """
        mask = experience.action_mask
        ratio = probability_ratio(log_probs, experience)  # (B, T-1)
        clipped = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps)
        token_loss = -torch.minimum(ratio * experience.advantages, clipped * experience.advantages)
        kl = torch.zeros_like(token_loss)
        if self.kl_weight:
            # masked before exp: an infinity at an ignored token would turn its zero gradient into NaN
            kl = approx_kl_divergence(
                torch.where(mask.bool(), log_probs, 0.0), torch.where(mask.bool(), experience.log_probs_ref, 0.0)
            )
        return self._reduce(token_loss + self.kl_weight * kl, mask), masked_mean(kl.detach(), mask, dim=-1).mean()

    def _reduce(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.critic_type == "grpo":
            return masked_mean(x, mask, dim=-1).mean()  # divided by the row's own length
        return masked_mean(x, mask, dim=-1, denominator=self.generate_max_length).mean()  # by a constant


def probability_ratio(log_probs: torch.Tensor, experience: Experience) -> torch.Tensor:
    """p(token) / p_old(token) for every action token, 1 elsewhere: (B, T-1).

    Where `experience.action_log_probs` is None the tokens come from the current policy, and the ratio is exactly 1; its
    gradient is that of the log-probabilities all the same, which makes the update a policy gradient.
    """
    old = log_probs.detach() if experience.action_log_probs is None else experience.action_log_probs
    return torch.where(experience.action_mask.bool(), log_probs - old, 0.0).exp()


def is_clipped(ratio: torch.Tensor, advantages: torch.Tensor, clip_eps: float) -> torch.Tensor:
    """Which tokens the clip has silenced.

    Their ratio has already moved past the range in the direction in which the advantage pushes, so that no gradient
    flows.

    Args:
        ratio: (B, T-1).
        advantages: (B, 1) or (B, T-1).

    >>> is_clipped(torch.tensor([[1.3, 0.7], [1.3, 0.7]]), torch.tensor([[1.0], [-1.0]]), clip_eps=0.2)
    tensor([[ True, False],
            [False,  True]])
    """
    return ((ratio > 1 + clip_eps) & (advantages > 0)) | ((ratio < 1 - clip_eps) & (advantages < 0))
