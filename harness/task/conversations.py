"""Conversations to imitate: read, encoded, held out, and divided into optimizer steps."""

from collections.abc import Iterator

from common.chat import encode_chat, with_remedy
from common.errors import UserError
from common.keyed import keyed_generator
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.config import PolicyConfig
from harness.base.terminal import say
from harness.data.data import read_rows
from harness.data.thoughts import tell_of_openings
from harness.models.context import context_length
from harness.processes.processes import agreed

WINDOW = 3000  # rows to choose from when rows of similar length are batched together, which saves padding


@agreed
def read_conversations(config: PolicyConfig) -> list[dict]:
    """The rows of --data; no model is loaded for them."""
    return read_rows(config.data, {"messages": list})


def load_conversations(
    config: PolicyConfig, policy: Policy, rows: list[dict]
) -> tuple[list[Trajectory], list[Trajectory]]:
    """The rows to learn from, and the rows held out for evaluation: a tenth, at most --eval-prompts."""
    encoded = encode_rows(rows, config.data, policy, config.max_length)
    num_eval = min(config.eval_prompts, len(encoded) // 10)
    order = keyed_generator("split", config.seed).permutation(len(encoded))
    return [encoded[index] for index in order[num_eval:]], [encoded[index] for index in order[:num_eval]]


def encode_rows(rows: list[dict], source: str, policy: Policy, max_length: int) -> list[Trajectory]:
    """Conversations as trajectories: the assistant's tokens are the actions."""
    encoded = []
    for index, row in enumerate(rows):
        try:
            ids, mask = encode_chat(policy.tokenizer, row["messages"], policy.end_of_turn_ids, row.get("tools"))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{source}, row {index + 1}: {with_remedy(error)}") from error
        if len(ids) <= min(max_length, context_length(policy)) and any(mask):
            encoded.append(Trajectory(ids, mask.index(1), mask, [0.0] * len(ids), index))
    if len(encoded) < len(rows):
        say(f"{len(rows) - len(encoded)} of {len(rows)} rows left out: too long, or without an assistant turn")
    if rows and not encoded:
        raise UserError(f"{source}: no row is left to learn from")
    tell_of_openings(policy.tokenizer, encoded)
    return encoded


def batches(config: PolicyConfig, rows: list[Trajectory], shuffle: bool = True) -> Iterator[list[Trajectory]]:
    """The rows of each step: at most `tokens_per_batch` tokens, rows of similar length together."""
    for epoch in range(config.epochs):
        order = range(len(rows))
        if shuffle:
            order = keyed_generator("data order", config.seed, epoch).permutation(len(rows))
        for start in range(0, len(rows), WINDOW):
            window = [rows[index] for index in order[start : start + WINDOW]]
            window_batches = list(_batches_of_similar_length(window, config.tokens_per_batch))
            for index in keyed_generator("minibatches", config.seed, epoch, start).permutation(len(window_batches)):
                yield window_batches[index]


def _batches_of_similar_length(rows: list[Trajectory], tokens_per_batch: int) -> Iterator[list[Trajectory]]:
    batch: list[Trajectory] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):  # so that the newest row is the widest
        if batch and len(row.ids) * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(row)
    yield batch
