"""What an estimator of the policy gradient gives for every group of completions that can be drawn.

Shapes: M groups of G completions of one question, T tokens; P weights of the policy.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from doctor.yardstick.world import LENGTH, QUESTIONS, Exact, completions

MOST_GROUPS = 400_000  # all of them are taken up to here, for G up to 8; otherwise a sample
SAMPLED_GROUPS = 100_000
CHUNK = 50_000  # groups at a time


@dataclass(frozen=True)
class Groups:
    """Groups of one question; the order of the completions in a group does not matter."""

    exact: Exact
    rows: torch.Tensor  # (M, G) completions, as rows of the tables of `Exact`
    chances: torch.Tensor  # (M,), which add up to 1

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def returns(self) -> torch.Tensor:
        """(M, G)."""
        return self.exact.rewards[self.rows].double()

    @property
    def mask(self) -> torch.Tensor:
        """(M, G, T)."""
        return self.exact.mask[self.rows]

    @property
    def log_probs(self) -> torch.Tensor:
        """(M, G, T), of the policy that draws."""
        return self.exact.log_probs[self.rows]

    def part(self, some: slice | torch.Tensor) -> "Groups":
        return Groups(self.exact, self.rows[some], self.chances[some])


Weights = Callable[[Groups], torch.Tensor]
"""An estimator: how much a group's gradient has of the gradient of each token's log-prob, (M, G, T).

Minus the derivative of the loss of a minibatch that is this group.
"""


@cache
def _multisets(size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """All groups as (M, G) indices of completions, and in how many orders each can be drawn (M,); None: too many."""
    count = len(completions())
    if math.comb(count + size - 1, size) > MOST_GROUPS:
        return None
    rows = torch.tensor(list(itertools.combinations_with_replacement(range(count), size)))
    same = torch.stack([(rows == index).sum(dim=1) for index in range(count)])  # (count, M)
    orders = math.lgamma(size + 1) - torch.lgamma(same.double() + 1).sum(dim=0)
    return rows, orders.exp().round()


def draw_groups(exact: Exact, question: int, size: int, seed: int = 0) -> Groups:
    """All groups with their probabilities, or a sample of `SAMPLED_GROUPS` if there are more than `MOST_GROUPS`."""
    first, found = question * len(completions()), _multisets(size)
    if found is None:
        generator = torch.Generator().manual_seed(seed)
        chances = exact.probabilities[first : first + len(completions())].expand(SAMPLED_GROUPS, -1)
        rows = torch.multinomial(chances, size, replacement=True, generator=generator) + first
        return Groups(exact, rows, torch.full((SAMPLED_GROUPS,), 1 / SAMPLED_GROUPS, dtype=torch.float64))
    rows, orders = found[0] + first, found[1]
    return Groups(exact, rows, orders * exact.probabilities[rows].prod(dim=1))


@dataclass(frozen=True)
class Moments:
    """The mean and the variance of an estimator's gradient, over the groups that can be drawn."""

    mean: torch.Tensor  # (P,)
    variance: float  # the sum over the weights
    rows: float  # completions of one such gradient

    @classmethod
    def of(cls, weights: Weights, groups: Groups, scored_by: Exact | None = None) -> "Moments":
        """Of one question; the gradient is that of `scored_by`, if it is not the policy that draws."""
        scores = (scored_by or groups.exact).scores.flatten(0, 1)  # (N T, P)
        inner, total, second = scores @ scores.T, torch.zeros(len(scores), dtype=torch.float64), 0.0
        for start in range(0, len(groups), CHUNK):
            part = groups.part(slice(start, start + CHUNK))
            places = (part.rows[..., None] * LENGTH + torch.arange(LENGTH)).flatten(1)  # (M, G T)
            own = torch.zeros(len(part), len(scores), dtype=torch.float64)
            own.scatter_add_(1, places, (weights(part).double() * part.mask).flatten(1))  # (M, N T)
            total += part.chances @ own
            second += float(part.chances @ ((own @ inner) * own).sum(dim=1))
        mean = total @ scores
        return cls(mean, second - float(mean @ mean), groups.rows.shape[1])

    def compare(self, target: torch.Tensor) -> dict[str, float]:
        """Against the gradient that is meant.

        `angle` is that of the mean to the target, in degrees: the bias that no learning rate repairs. `scale` is the
        length of the mean along the target, in units of the target. `noise` is the variance for one completion, in
        units of the mean's square: so many completions have as much noise as signal.
        """
        length = float(self.mean.norm())
        cosine = float(self.mean @ target / self.mean.norm() / target.norm()) if length > 1e-12 else 0.0
        return {
            "angle": math.degrees(math.acos(max(-1.0, min(1.0, cosine)))) if cosine < 1 - 1e-12 else 0.0,
            "scale": float(self.mean @ target / target.norm() ** 2),
            "noise": self.variance * self.rows / length**2 if length > 1e-12 else math.inf,
        }


def over_questions(moments: list[Moments], chances: list[float] | None = None) -> Moments:
    """Of a group of a question that is drawn with these chances; None: all questions alike."""
    chances = [1 / len(moments)] * len(moments) if chances is None else chances
    pairs = list(zip(chances, moments, strict=True))
    mean = sum(chance * each.mean for chance, each in pairs)
    second = sum(chance * (each.variance + float(each.mean @ each.mean)) for chance, each in pairs)
    return Moments(mean, second - float(mean @ mean), sum(chance * each.rows for chance, each in pairs))


def measure(weights: Weights, exact: Exact, size: int) -> Moments:
    """Of a group of either question."""
    return over_questions([Moments.of(weights, draw_groups(exact, q, size)) for q in range(len(QUESTIONS))])
