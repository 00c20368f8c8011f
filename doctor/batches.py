"""Small batches from fixed seeds, with the situations that make losses go wrong.

Shapes: B rows, W = T-1 columns; entry `[:, t]` is about token t+1. Every row is a prompt, the policy's tokens (in some
rows two turns with tool output in between) and padding. All columns have values, as in training, where a model also
scores the tokens of prompt, tool and padding.
"""

from dataclasses import dataclass, replace

import torch

PROMPT, ACTION, TOOL, PADDING = range(4)
PROMPT_COLUMNS = 3
MAX_NEW_TOKENS = 40
# (first turn, tool output, second turn) of each row: a single token, several lengths, holes in the mask
ROWS = ((5, 0, 0), (3, 2, 3), (1, 0, 0), (9, 0, 0), (4, 3, 2), (2, 0, 0))
OTHER_ROWS = ((2, 1, 2), (7, 0, 0), (3, 0, 0), (1, 0, 0))


@dataclass(frozen=True)
class Batch:
    """The rows of a loss. A micro-batch keeps the values that belong to the whole minibatch."""

    kinds: torch.Tensor  # (B, W) PROMPT, ACTION, TOOL or PADDING
    log_probs: torch.Tensor  # (B, W) float32
    old_log_probs: torch.Tensor | None  # (B, W)
    log_probs_ref: torch.Tensor  # (B, W)
    advantages: torch.Tensor  # (B,)
    num_rows: int  # of the minibatch
    num_tokens: int  # of the minibatch: the policy's tokens
    num_parts: int = 1  # micro-batches of the minibatch
    clip_eps: float = 0.2  # for functions with one range
    clip_low: float = 0.2
    clip_high: float = 0.28  # a different value, so that a mix-up shows
    kl_weight: float = 0.3
    max_new_tokens: int = MAX_NEW_TOKENS
    prompt_length: int = PROMPT_COLUMNS

    @property
    def mask(self) -> torch.Tensor:
        """(B, W) bool."""
        return self.kinds == ACTION

    def on_policy(self) -> "Batch":
        """The same batch with one policy in all roles: every ratio is 1 and every KL 0."""
        return replace(self, old_log_probs=self.log_probs.clone(), log_probs_ref=self.log_probs.clone())

    def rows(self, rows: slice, num_parts: int) -> "Batch":
        """A micro-batch."""
        names = ("kinds", "log_probs", "old_log_probs", "log_probs_ref", "advantages")
        return replace(self, num_parts=num_parts, **{name: getattr(self, name)[rows] for name in names})

    def padded(self, columns: int) -> "Batch":
        """The same rows with more padding, which has its own log-probs."""
        generator = torch.Generator().manual_seed(columns)
        shape = (len(self.kinds), columns)
        kinds = torch.cat([self.kinds, torch.full(shape, PADDING)], dim=1)
        names = ("log_probs", "old_log_probs", "log_probs_ref")
        wider = {name: torch.cat([getattr(self, name), _log_probs(shape, generator)], dim=1) for name in names}
        return replace(self, kinds=kinds, **wider)


def make_batch(rows: tuple[tuple[int, int, int], ...] = ROWS, seed: int = 0, extra_padding: int = 2) -> Batch:
    """A batch with old and reference log-probs that differ from the policy's, and advantages of both signs."""
    width = PROMPT_COLUMNS + max(map(sum, rows)) + extra_padding
    kinds = torch.full((len(rows), width), PADDING)
    for row, (first, tool, second) in zip(kinds, rows, strict=True):
        line = PROMPT_COLUMNS * [PROMPT] + first * [ACTION] + tool * [TOOL] + second * [ACTION]
        row[: len(line)] = torch.tensor(line)
    generator = torch.Generator().manual_seed(seed)
    log_probs = _log_probs(kinds.shape, generator)
    advantages = 0.5 + torch.rand(len(rows), generator=generator)
    advantages[::2] *= -1
    return Batch(
        kinds=kinds,
        log_probs=log_probs,
        old_log_probs=log_probs + 0.3 * torch.randn(kinds.shape, generator=generator),
        log_probs_ref=log_probs + 0.5 * torch.randn(kinds.shape, generator=generator),
        advantages=advantages,
        num_rows=len(rows),
        num_tokens=int((kinds == ACTION).sum()),
    )


def _log_probs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return -0.2 - 2.3 * torch.rand(shape, generator=generator)
