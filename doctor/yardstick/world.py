"""Two questions with 15 possible completions each: small enough to compute what is otherwise estimated.

A completion has one to three letters of `a`, `b` and `.`, which ends it. The easy question is answered by every
completion with an `a`, the hard one by `ab.` alone. Shapes: N = 30 completions, of both questions; T = 3 tokens; P
weights; V = 3 letters.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch

LETTERS = "ab."
LENGTH = 3
QUESTIONS: dict[str, Callable[[str], bool]] = {"easy": lambda text: "a" in text, "hard": lambda text: text == "ab."}
HIDDEN = 8  # of the transformer


def completions() -> list[str]:
    """All that the policy can say: it ends with the first `.`, or after three letters.

    >>> completions()[:5], len(completions())
    (['aaa', 'aab', 'aa.', 'aba', 'abb'], 15)
    """
    said = ("".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH))
    return list(dict.fromkeys(text[: text.find(".") + 1 or LENGTH] for text in said))


@cache
def _table() -> tuple[torch.Tensor, ...]:
    """Of all completions: question (N,), letters (N, T), mask (N, T), prefix (N, T) and reward (N,)."""
    texts, prefixes = completions(), ["", *LETTERS[:2], *map("".join, itertools.product(LETTERS[:2], repeat=2))]
    rows = [(number, text) for number in range(len(QUESTIONS)) for text in texts]
    letters = [[LETTERS.index(letter) for letter in text] + [0] * (LENGTH - len(text)) for _, text in rows]
    places = [[n * len(prefixes) + prefixes.index(x[:t]) if t < len(x) else 0 for t in range(LENGTH)] for n, x in rows]
    rewards = [float(list(QUESTIONS.values())[number](text)) for number, text in rows]
    mask = [[int(t < len(text)) for t in range(LENGTH)] for _, text in rows]
    return tuple(torch.tensor(x) for x in ([n for n, _ in rows], letters, mask, places, rewards))


class SoftmaxTable:
    """One logit for each letter after each prefix of each question: no two contexts share a weight."""

    def __init__(self, seed: int = 0, scale: float = 0.7):
        prefix = _table()[3]
        generator = torch.Generator().manual_seed(seed)
        self.prefix, self.shape = prefix, (int(prefix.max()) + 1, len(LETTERS))
        self.weights = scale * torch.randn(self.shape, generator=generator, dtype=torch.float64).flatten()

    def logits(self, weights: torch.Tensor) -> torch.Tensor:
        """(N, T, V)."""
        return weights.view(self.shape)[self.prefix]


class Transformer:
    """One layer of causal attention and one of a perceptron: everything shares its weights with everything."""

    def __init__(self, seed: int = 0, scale: float = 1.0):
        question, letters = _table()[:2]
        self.ids = torch.cat([len(LETTERS) + question[:, None], letters[:, :-1]], dim=1)  # (N, T) the question first
        size, vocabulary = HIDDEN, len(LETTERS) + len(QUESTIONS)
        self.shapes = [(vocabulary, size), (LENGTH, size), *[(size, size)] * 4, (size, 2 * size), (2 * size, size)]
        self.shapes.append((size, len(LETTERS)))
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]
        drawn[-1] *= 0.3  # letters about as probable as in the table
        self.weights = torch.cat([(scale * x / x.shape[0] ** (0.5 * (i > 1))).flatten() for i, x in enumerate(drawn)])

    def logits(self, weights: torch.Tensor) -> torch.Tensor:
        """(N, T, V)."""
        parts = [x.view(s) for x, s in zip(weights.split([a * b for a, b in self.shapes]), self.shapes, strict=True)]
        words, places, query, key, value, out, first, second, head = parts
        x = words[self.ids] + places  # (N, T, H)
        scores = (x @ query) @ (x @ key).transpose(1, 2) / HIDDEN**0.5
        future = torch.ones(LENGTH, LENGTH).triu(1).bool()
        x = x + scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ x @ value @ out
        return (x + (x @ first).relu() @ second) @ head


@dataclass(frozen=True)
class Exact:
    """Everything about one policy, computed and not sampled, in float64."""

    policy: SoftmaxTable | Transformer
    weights: torch.Tensor  # (P,)

    question, letters, mask, _, rewards = _table()

    @classmethod
    def of(cls, policy: SoftmaxTable | Transformer) -> "Exact":
        return cls(policy, policy.weights)

    def moved(self, step: torch.Tensor) -> "Exact":
        """The policy with weights that are further by `step`, (P,)."""
        return Exact(self.policy, self.weights + step)

    def log_distributions(self, weights: torch.Tensor) -> torch.Tensor:
        """Log-probs (N, T, V) of all letters after each prefix."""
        return self.policy.logits(weights).log_softmax(dim=-1)

    def token_log_probs(self, weights: torch.Tensor) -> torch.Tensor:
        """Log-probs (N, T) of the letters of each completion; 0 after its end."""
        return self.log_distributions(weights).gather(2, self.letters[..., None])[..., 0] * self.mask

    @cached_property
    def log_probs(self) -> torch.Tensor:
        return self.token_log_probs(self.weights)

    @cached_property
    def probabilities(self) -> torch.Tensor:
        """(N,) of each completion; those of a question add up to 1."""
        return self.log_probs.sum(dim=1).exp()

    @cached_property
    def scores(self) -> torch.Tensor:
        """(N, T, P): the gradient of each token's log-prob."""
        return torch.func.jacrev(self.token_log_probs)(self.weights)

    def accuracy(self, weights: torch.Tensor) -> torch.Tensor:
        """(Q,): each question's probability of a right answer, differentiable."""
        right = self.token_log_probs(weights).sum(dim=1).exp() * self.rewards.double()
        return torch.stack([right[self.question == number].sum() for number in range(len(QUESTIONS))])

    def objective(self, weights: torch.Tensor) -> torch.Tensor:
        """J: the expected reward, the mean over the questions."""
        return self.accuracy(weights).mean()

    def gradient(self, objective: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """(P,): of J, or of another function of the weights."""
        return torch.func.grad(objective or self.objective)(self.weights)

    def gradient_of(self, question: int) -> torch.Tensor:
        """(P,): of the expected reward of one question."""
        return self.gradient(lambda weights: self.accuracy(weights)[question])

    @cached_property
    def values(self) -> torch.Tensor:
        """(N, T): the expected reward after the letters before each token: what a perfect critic says."""
        found = torch.zeros_like(self.log_probs)
        for i, t in itertools.product(range(len(found)), range(LENGTH)):
            same = (self.question == self.question[i]) & (self.letters[:, :t] == self.letters[i, :t]).all(dim=1)
            same &= (self.mask[:, :t] == self.mask[i, :t]).all(dim=1)
            chance = self.probabilities[same]
            found[i, t] = (chance * self.rewards[same]).sum() / chance.sum()
        return found * self.mask
