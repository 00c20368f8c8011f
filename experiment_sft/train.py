"""Supervised fine-tuning: learn to say what the assistant says in given conversations, token by token.

    repeat
        take some conversations
        the loss is -log p of every token of the assistant, with the token that ends its turn, mean over these tokens
        take an optimizer step
    measure the loss on held-out conversations, before and after

    python experiment_sft/train.py                                        # 1,200 sums with their reasoning
    python experiment_sft/train.py --model Qwen/Qwen2.5-0.5B-Instruct --data chats.jsonl   # rows: {"messages": [...]}
    torchrun --nproc-per-node 2 experiment_sft/train.py                   # the same update

The policy reads the user's words and the tokens of the template, but does not learn to say them. Rows may have "tools",
a list of JSON schemas, with calls and turns of tools among their messages; a turn of the assistant with "weight": 0 is
read and not learned.

Parent: none; experiment_reward_model has the order of this file.

Shapes: B rows of a step, b rows per micro-batch, T tokens.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from common.chat import encode_chat, with_remedy
from common.errors import UserError
from common.experience import Experience, collate
from common.keyed import keyed_generator
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.config import ROOT, Count, CountOrZero, InputPath, NotNegative, PolicyConfig, Positive
from harness.base.terminal import say
from harness.cli.parse import parse_config
from harness.data.context import context_length
from harness.data.data import read_rows
from harness.data.thoughts import tell_of_openings
from harness.models.loading import load_policy
from harness.run.run import Run
from harness.run.start import run_main, start_run

RESOLVED = {"tiny": {"lr": 5e-4}, "full": {"lr": 1e-5}}
WINDOW = 3000  # rows to choose from when rows of similar length are batched together, which saves padding


@dataclass(frozen=True, kw_only=True)
class Config(PolicyConfig):
    # a file or hub dataset (docs/data.md) with {"messages": [...]}, perhaps "tools"; a tenth of it is held out
    data: InputPath = str(ROOT / "data" / "reasoned_sums.jsonl")
    epochs: Count = 1  # passes over the rows
    tokens_per_batch: Count = 3072  # tokens per optimizer step, including padding, of all processes together
    micro_batch_size: Count = 256  # rows per forward and backward pass: memory and time, never the update
    max_length: Count = 1024  # tokens; rows longer than this or than the model's context are left out, and counted
    lr: Positive | None = None  # peak learning rate of AdamW; None: 5e-4 for the bundled policy, else 1e-5
    warmup_steps: CountOrZero = 50  # steps over which the learning rate rises from 0
    final_lr: NotNegative = 0.1  # learning rate at the end, as a share of the peak; in between it falls like a cosine
    weight_decay: NotNegative = 0.0  # weight decay of AdamW
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm
    eval_every: CountOrZero = 50  # steps between evaluations on the held-out rows; 0: only before and after
    checkpoint_every: int = 500  # steps between checkpoints; 0: only on Ctrl-C


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__, resolved=RESOLVED)
    rows = read_rows(config.data, {"messages": list})  # before a model is loaded
    with start_run(config) as run:
        policy = load_policy(config)
        rows, eval_rows = hold_out(config, encode_rows(config, policy, rows, config.data))
        train(config, run, policy, list(batches(config, rows)), eval_rows)
        run.save_final(policy)
        examination = examine(policy, eval_rows)
        run.write_summary(examination)
        for name, value in examination.items():
            say(f"{name:30} {value:.3f}")
        say(f"policy: {run.directory / 'final'}")


def encode_rows(config: Config, policy: Policy, rows: list[dict], source: str) -> list[Trajectory]:
    """Conversations as trajectories: the assistant's tokens are the actions."""
    encoded = []
    for index, row in enumerate(rows):
        try:
            ids, mask = encode_chat(policy.tokenizer, row["messages"], policy.end_of_turn_ids, row.get("tools"))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{source}, row {index + 1}: {with_remedy(error)}") from error
        if len(ids) <= min(config.max_length, context_length(policy)) and any(mask):
            encoded.append(Trajectory(ids, mask.index(1), mask, [0.0] * len(ids), index))
    if len(encoded) < len(rows):
        say(f"{len(rows) - len(encoded)} of {len(rows)} rows left out: too long, or without an assistant turn")
    if rows and not encoded:
        raise UserError(f"{source}: no row is left to learn from")
    tell_of_openings(policy.tokenizer, encoded)
    return encoded


def hold_out(config: Config, rows: list[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """The rows to learn from, and the rows held out for evaluation: a tenth, at most --eval-prompts."""
    num_eval = min(config.eval_prompts, len(rows) // 10)
    order = keyed_generator("split", config.seed).permutation(len(rows))
    return [rows[index] for index in order[num_eval:]], [rows[index] for index in order[:num_eval]]


def batches(config: Config, rows: list[Trajectory], shuffle: bool = True) -> Iterator[list[Trajectory]]:
    """The rows of each step: at most `tokens_per_batch` tokens, rows of similar length together."""
    for epoch in range(config.epochs):
        order = range(len(rows))
        if shuffle:
            order = keyed_generator("data order", config.seed, epoch).permutation(len(rows))
        for start in range(0, len(rows), WINDOW):
            window = [rows[index] for index in order[start : start + WINDOW]]
            window_batches = list(batches_of_similar_length(window, config.tokens_per_batch))
            for index in keyed_generator("minibatches", config.seed, epoch, start).permutation(len(window_batches)):
                yield window_batches[index]


def batches_of_similar_length(rows: list[Trajectory], tokens_per_batch: int) -> Iterator[list[Trajectory]]:
    batch: list[Trajectory] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):  # so that the newest row is the widest
        if batch and len(row.ids) * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def read(policy: Policy, rows: list[Trajectory]) -> Experience:
    """The rows as tensors: a policy gradient whose actions are given, each with an advantage of 1."""
    batch = collate(rows, policy.pad_id, policy.device)
    batch.advantages = batch.action_mask.float()  # (B, T-1)
    return batch


def train(
    config: Config,
    run: Run,
    policy: Policy,
    steps: list[list[Trajectory]],
    eval_rows: list[Trajectory],
    read: Callable[[Policy, list[Trajectory]], Experience] = read,
) -> None:
    """Take one step with the rows of each batch, or the steps that a resumed run has left."""
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay
    )
    run.restore(policy, optimizer)
    for step in run.steps(len(steps)):
        if step == 1 and eval_rows:
            run.log(0, examine(policy, eval_rows))
        # 1 read: the rows of the step, and its learning rate
        batch = read(policy, steps[step - 1])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, len(steps))
        run.lap("read")

        # 5 update: one optimizer step
        metrics = update(config, policy, optimizer, batch) | {"lr": optimizer.param_groups[0]["lr"]}
        run.lap("update")

        # 6 log, evaluate, checkpoint
        metrics |= run.costs(num_tokens=int(batch.action_mask.sum()))
        if config.eval_every and step % config.eval_every == 0:
            metrics |= examine(policy, eval_rows)
        run.log(step, metrics)
        run.checkpoint(step, policy, optimizer)


def learning_rate(config: Config, step: int, num_steps: int) -> float:
    """Up from 0 in `warmup_steps` steps, then down a cosine to `final_lr` of the peak at the last step."""
    warmup = min(1.0, step / max(config.warmup_steps, 1))
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return config.lr * warmup * (config.final_lr + (1 - config.final_lr) * cosine)


def policy_loss(log_probs: torch.Tensor, micro: Experience, num_tokens: torch.Tensor) -> torch.Tensor:
    """Each token's term, (b, T-1): -log p(token) / the assistant's tokens of the batch."""
    return -log_probs * micro.advantages / num_tokens


def update(config: Config, policy: Policy, optimizer: torch.optim.Optimizer, batch: Experience) -> dict[str, float]:
    """One optimizer step: minus the mean log-probability of the batch's assistant tokens."""
    optimizer.zero_grad()
    num_tokens = batch.advantages.sum()  # of the full batch, so that micro-batches add up to its mean
    total = 0.0
    for micro in batch.split(config.micro_batch_size):
        log_probs = policy(micro.sequences, micro.action_mask).log_probs  # (b, T-1)
        terms = policy_loss(log_probs, micro, num_tokens)  # (b, T-1)
        terms.sum().backward()
        total += terms.sum().item()
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
    if torch.isfinite(grad_norm):  # otherwise this update is skipped, and counted
        optimizer.step()
    return {"loss/total": total, "loss/grad_norm": grad_norm.item(), "loss/skipped": float(not grad_norm.isfinite())}


@torch.no_grad()
def examine(policy: Policy, rows: list[Trajectory]) -> dict[str, float]:
    """The mean loss of the assistant's tokens in held-out rows, in nats."""
    log_prob_sum = num_tokens = 0.0
    for row in rows:
        batch = collate([row], policy.pad_id, policy.device)
        log_prob_sum += policy(batch.sequences, batch.action_mask).log_probs.sum().item()
        num_tokens += batch.action_mask.sum().item()
    return {"eval/loss": -log_prob_sum / num_tokens} if num_tokens else {}


if __name__ == "__main__":
    run_main(main)
