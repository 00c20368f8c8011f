"""Trajectories of different lengths become padded tensors; a rollout is divided into minibatches and micro-batches.

Shapes: Q prompts, G completions per prompt, B = Q*G rows with a group's rows adjacent, T tokens. Entry `[:, t]` of a
(B, T-1) tensor is about token t+1, which the logits at position t predict.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch

from common.keyed import keyed_generator
from common.parallel import data_rank, data_size, gather, gather_rows, in_step
from common.trajectory import Trajectory


class MicroBatchSize(NamedTuple):
    """The largest micro-batch, in rows and, where rows are packed, in tokens; a longer row is one by itself."""

    rows: int
    num_tokens: int | None = None


_ABOUT_TOKEN_T = ("sequences", "attention_mask")  # entry t is about token t; in all other fields, about token t+1


@dataclass
class Experience:
    """B rows, right-padded to T tokens. A field that is None has not been computed yet, or is not needed."""

    sequences: torch.Tensor  # (B, T) long
    attention_mask: torch.Tensor  # (B, T) long; 1 on every real token, known from its length, never from its id
    action_mask: torch.Tensor  # (B, T-1) long; 1 where token t+1 was sampled by the policy
    sampler_log_probs: torch.Tensor  # (B, T-1) as the sampler recorded them
    prompt_index: torch.Tensor  # (B,) long
    prompt_lengths: torch.Tensor  # (B,) long
    completion_index: torch.Tensor  # (B,) long; 0..G-1 within the group
    old_log_probs: torch.Tensor | None = None  # (B, T-1) of the policy that sampled; None: the current policy's own
    log_probs_ref: torch.Tensor | None = None  # (B, T-1) of the reference
    advantages: torch.Tensor | None = None  # (B, 1) or (B, T-1)
    values: torch.Tensor | None = None  # (B, T-1) a critic's prediction of the return, before the token was sampled
    value_targets: torch.Tensor | None = None  # (B, T-1) what the critic learns to predict
    importance_weights: torch.Tensor | None = None  # (B, T-1) min(p_trainer / p_engine, cap), times the advantages
    staleness: torch.Tensor | None = None  # (B, T-1) long; how many steps old the weights were that drew the token

    def __len__(self) -> int:
        return self.sequences.shape[0]

    @cached_property
    def num_rows(self) -> float:
        """The denominator of a mean over rows: the rows of all ranks / the number of ranks. All ranks call it together.

        Each rank backpropagates sum(its rows) / num_rows, and gradients are averaged over the ranks. With W ranks and N
        rows in all, 1/W sum(all rows) / (N/W) is the mean over all rows.
        """
        return sum(gather(len(self))) / data_size()

    @cached_property
    def num_tokens(self) -> float:
        """The denominator of a mean over action tokens: those of all ranks / the number of ranks, as `num_rows`."""
        return sum(gather(int(self.action_mask.sum()))) / data_size()

    @property
    def observation_mask(self) -> torch.Tensor:
        """(B, T-1) long; 1 where token t+1 came after the prompt and not from the policy: an environment showed it."""
        positions = torch.arange(1, self.sequences.shape[1], device=self.sequences.device)
        return self.attention_mask[:, 1:] * (positions >= self.prompt_lengths[:, None]) * (1 - self.action_mask)

    def select(self, rows: torch.Tensor) -> "Experience":
        """The given rows, in the given order, padded only to the longest of them."""
        width = int(self.attention_mask[rows].sum(dim=1).max()) if len(rows) else 1

        def take(name: str, x: torch.Tensor | None) -> torch.Tensor | None:
            if x is None or x.dim() == 1:
                return None if x is None else x[rows]
            return x[rows, : width if name in _ABOUT_TOKEN_T else width - 1]

        return Experience(**{field.name: take(field.name, getattr(self, field.name)) for field in fields(self)})

    def minibatches(self, minibatch_size: int | None, group_size: int, key: tuple[int, ...]) -> Iterator["Experience"]:
        """Every row once, in shuffled minibatches of complete groups, so that a group's prompt can be encoded once.

        The rows of all ranks, in the order of the ranks, are one rollout, and its minibatches are the same for any
        number of ranks. From each minibatch a rank gets only its own rows, possibly none.

        Args:
            minibatch_size: rows per minibatch (the last one can be smaller), of all ranks; None: all rows in one.
            group_size: G.
            key: fixes the shuffle, e.g. (seed, step, epoch).

        Raises:
            ValueError: the rows, or the rows of a minibatch, are not complete groups.
        """
        counts = gather(len(self))
        first, num_rows = sum(counts[: data_rank()]), sum(counts)
        minibatch_size = num_rows if minibatch_size is None else minibatch_size
        for rows in (num_rows, minibatch_size):
            if rows % group_size:
                raise ValueError(f"{rows} rows are not complete groups of {group_size}")
        order = torch.from_numpy(keyed_generator("minibatches", *key).permutation(num_rows // group_size))
        for groups in order.split(minibatch_size // group_size):
            rows = (groups[:, None] * group_size + torch.arange(group_size)).flatten() - first
            yield self.select(rows[(rows >= 0) & (rows < len(self))].to(self.sequences.device))

    def split(
        self, micro_batch_size: int | MicroBatchSize, *, skip_zero_advantages: bool = False
    ) -> Iterator["Experience"]:
        """Micro-batches of at most `micro_batch_size`, as many on every rank: a pass is a message to the other ranks.

        Rows of one prompt are adjacent, so that the prompt is encoded once. Prompts whose longest rows have similar
        lengths are adjacent too, to save padding. `skip_zero_advantages` leaves out rows whose advantages are all 0,
        which have no gradient without a KL penalty. If no rank has any other rows, one row is kept, and its entropy is
        logged. A rank with fewer micro-batches than another one adds a `filler`, perhaps several.
        """
        experience = self
        if skip_zero_advantages:
            rows = self.advantages.any(dim=1).nonzero()[:, 0]
            if not any(gather(len(rows))):
                names = list(zip(self.prompt_index.tolist(), self.completion_index.tolist(), strict=True))
                first = min(gather_rows(names))
                rows = torch.tensor([index for index, name in enumerate(names) if name == first], dtype=torch.long)
            experience = self.select(rows)
        parts = experience.micro_batch_rows(micro_batch_size) if len(experience) else ()
        for rows in in_step(parts, None):
            yield self.filler() if rows is None else experience.select(rows)

    def filler(self) -> "Experience":
        """A micro-batch of one row whose tokens do not count: its loss is 0, and so is each parameter's gradient."""
        row, column = self.sequences.new_zeros(1), self.sampler_log_probs.new_zeros(1, 1)
        return Experience(
            sequences=row.expand(1, 2),
            attention_mask=torch.ones_like(row.expand(1, 2)),
            action_mask=row[None],
            sampler_log_probs=column,
            prompt_index=row,
            prompt_lengths=row + 2,  # nothing follows the prompt
            completion_index=row,
            log_probs_ref=column,
            advantages=column,
            values=column,
            value_targets=column,
            importance_weights=column,
            staleness=column,
        )

    def micro_batch_rows(self, micro_batch_size: int | MicroBatchSize) -> tuple[torch.Tensor, ...]:
        """The rows of each micro-batch of `split`."""
        size = micro_batch_size if isinstance(micro_batch_size, MicroBatchSize) else MicroBatchSize(micro_batch_size)
        lengths = self.attention_mask.sum(dim=1)
        _, group = self.prompt_index.unique(return_inverse=True)
        longest = torch.zeros_like(group).scatter_reduce(0, group, lengths, "amax")[group]
        order = lengths.argsort(stable=True)
        for key in (group, longest):  # the last key is the primary one
            order = order[key[order].argsort(stable=True)]
        if size.num_tokens is None:
            return order.split(size.rows)
        parts, prompts, num_tokens = [[]], set(), 0
        for row in order.tolist():
            prompt, length = int(group[row]), int(lengths[row])
            new = length - (int(self.prompt_lengths[row]) - 1 if prompt in prompts else 0)  # a prompt is there once
            if parts[-1] and (num_tokens + new > size.num_tokens or len(parts[-1]) == size.rows):
                parts.append([])
                prompts, num_tokens, new = set(), 0, length
            parts[-1].append(row)
            prompts.add(prompt)
            num_tokens += new
        return tuple(torch.tensor(part, device=order.device) for part in parts)


def collate(trajectories: list[Trajectory], pad_id: int, device: str | torch.device = "cpu") -> Experience:
    """Right-pad trajectories into one `Experience`; the masks are copied, not derived from ids.

    >>> row = Trajectory([5, 6, 7, 2], 2, [0, 0, 1, 1], [0.0, 0.0, -0.7, -0.1])
    >>> collate([row], pad_id=2).action_mask
    tensor([[0, 1, 1]])

    Raises:
        ValueError: there is no trajectory, or the lists of a trajectory differ in length.
    """
    if not trajectories:
        raise ValueError("collate needs at least one trajectory")
    for row in trajectories:
        if not len(row.ids) == len(row.action_mask) == len(row.sampler_log_probs):
            raise ValueError(
                f"prompt {row.prompt_index}, completion {row.completion_index}: {len(row.ids)} ids, but "
                f"{len(row.action_mask)} mask entries and {len(row.sampler_log_probs)} log-probs"
            )
    width = max(len(row.ids) for row in trajectories)

    def pad(lists: list[list], value: float) -> torch.Tensor:
        return torch.tensor([entries + [value] * (width - len(entries)) for entries in lists], device=device)

    return Experience(
        sequences=pad([row.ids for row in trajectories], pad_id),
        attention_mask=pad([[1] * len(row.ids) for row in trajectories], 0),
        action_mask=pad([row.action_mask for row in trajectories], 0)[:, 1:],
        sampler_log_probs=pad([row.sampler_log_probs for row in trajectories], 0.0)[:, 1:],
        prompt_index=torch.tensor([row.prompt_index for row in trajectories], device=device),
        prompt_lengths=torch.tensor([row.prompt_length for row in trajectories], device=device),
        completion_index=torch.tensor([row.completion_index for row in trajectories], device=device),
    )
