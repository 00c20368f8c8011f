"""Supervised fine-tuning: learn to say what the assistant says in given conversations, token by token.

    repeat
        take some conversations
        the loss is -log p of every token of the assistant, with the token that ends its turn, mean over these tokens
        take an optimizer step
    measure the loss on held-out conversations, before and after

    python imitation/sft/train.py                                                  # 1,200 sums with their reasoning
    python imitation/sft/train.py --model Qwen/Qwen2.5-0.5B-Instruct --data chats.jsonl     # rows: {"messages": [...]}
    torchrun --nproc-per-node 2 imitation/sft/train.py                             # the same update

The policy reads the user's words and the tokens of the template, but does not learn to say them. Rows may have "tools",
a list of JSON schemas, with calls and turns of tools among their messages; a turn of the assistant with "weight": 0 is
read and not learned.

Parent: none.

Shapes: B rows (of several processes, each has its part), b rows per micro-batch, T tokens.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.experience import Experience, collate
from common.parallel import clip_grad_norm_, data_size, gather, own_part, part_of
from common.policy import Policy
from common.trajectory import Trajectory
from fast.sharded_weights import gathered_weights

from harness.base.config import ROOT, Count, CountOrZero, InputPath, NotNegative, PolicyConfig, Positive
from harness.base.ranks import on_main
from harness.base.terminal import say
from harness.cli.parse import parse_config
from harness.data.thoughts import write_longcot
from harness.models.loading import load_policy
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.conversations import batches, load_conversations, read_conversations

RESOLVED = {"tiny": {"lr": 5e-4}, "full": {"lr": 1e-5}}


@dataclass(frozen=True, kw_only=True)
class Config(PolicyConfig):
    # a file or hub dataset (docs/data.md) with {"messages": [...]}, perhaps "tools"; a tenth of it is held out
    data: InputPath = str(ROOT / "data" / "reasoned_sums.jsonl")
    epochs: Count = 1  # passes over the rows
    tokens_per_batch: Count = 3072  # tokens per optimizer step, of all processes together, including padding
    micro_batch_size: Count = 256  # rows per forward and backward pass: memory and time, never the update
    max_length: Count = 1024  # tokens; rows longer than this or than the model's context are left out, and counted
    lr: Positive | None = None  # peak learning rate of AdamW; None: 5e-4 for the bundled policy, else 1e-5
    warmup_steps: CountOrZero = 5  # steps over which the learning rate rises from 0
    final_lr: NotNegative = 0.1  # learning rate at the end, as a share of the peak; in between it falls like a cosine
    weight_decay: NotNegative = 0.0  # weight decay of AdamW
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm
    eval_every: CountOrZero = 50  # steps between evaluations on the held-out rows; 0: only before and after
    checkpoint_every: int = 500  # steps between checkpoints; 0: only on Ctrl-C


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__, resolved=RESOLVED)
    rows = read_conversations(config)  # before a model is loaded
    with start_run(config) as run:
        policy = load_policy(config)
        rows, eval_rows = load_conversations(config, policy, rows)
        train(config, run, policy, list(batches(config, rows)), eval_rows)
        run.save_final(policy)
        on_main(lambda: write_longcot(policy.tokenizer, rows, run.directory))
        examination = examine(policy, eval_rows)
        if eval_rows:
            run.log(run.step, examination)
        run.write_summary(examination)
        for name, value in examination.items():
            say(f"{name:30} {value:.3f}")
        say(f"policy: {run.directory / 'final'}")


def read(policy: Policy, rows: list[Trajectory]) -> Experience:
    """A step's rows as tensors: a policy gradient whose actions are given, each with an advantage of 1."""
    batch = collate(rows, policy.pad_id, policy.device)
    batch.advantages = batch.action_mask.float()  # (B, T-1)
    return batch.select(torch.tensor(part_of(len(rows)), dtype=torch.long, device=policy.device))


def train(
    config: Config,
    run: Run,
    policy: Policy,
    steps: list[list[Trajectory]],
    eval_rows: list[Trajectory],
    read: Callable[[Policy, list[Trajectory]], Experience] = read,
) -> None:
    """Run all steps, each with its rows, or the steps that a resumed run has left."""
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay
    )
    model, optimizer = run.prepare(policy, optimizer)  # one process: unchanged; several: gradients are averaged
    run.restore(policy, optimizer)
    if eval_rows and not run.resumed_at:
        run.log(0, examine(policy, eval_rows))
    for step in run.steps(len(steps)):
        # 1 read: the step's rows, and its learning rate
        batch = read(policy, steps[step - 1])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, len(steps))
        run.lap("read")

        # 2 update: one optimizer step
        metrics = update(config, model, optimizer, batch) | {"lr": optimizer.param_groups[0]["lr"]}
        run.lap("update")

        # 3 log, evaluate, checkpoint
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


def policy_loss(log_probs: torch.Tensor, micro: Experience, num_tokens: float) -> torch.Tensor:
    """Each token's term, (b, T-1): -A log p(token) / num_tokens, the assistant's tokens of the step; A is 1."""
    return -log_probs * micro.advantages / num_tokens


def update(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Experience
) -> dict[str, float]:
    """One optimizer step: the mean over the assistant's tokens."""
    optimizer.zero_grad()
    total = 0.0
    for micro in batch.split(config.micro_batch_size):
        log_probs = model(micro.sequences, micro.action_mask).log_probs  # (b, T-1)
        terms = policy_loss(log_probs, micro, batch.num_tokens)  # (b, T-1)
        terms.sum().backward()
        total += terms.sum().item()
    grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm)
    if torch.isfinite(grad_norm):  # otherwise this update is skipped, and counted
        optimizer.step()
    return {
        "loss/total": sum(gather(total)) / data_size(),
        "loss/grad_norm": grad_norm.item(),
        "loss/skipped": float(not grad_norm.isfinite()),
    }


@torch.no_grad()
def examine(policy: Policy, rows: list[Trajectory]) -> dict[str, float]:
    """The mean loss of the assistant's tokens in held-out rows, in nats."""
    log_prob_sum = num_tokens = 0.0
    with gathered_weights(policy):
        for row in own_part(rows):
            batch = collate([row], policy.pad_id, policy.device)
            log_prob_sum += policy(batch.sequences, batch.action_mask).log_probs.sum().item()
            num_tokens += row.num_action_tokens
    log_prob_sum, num_tokens = (sum(gather(value)) for value in (log_prob_sum, num_tokens))
    return {"eval/loss": -log_prob_sum / num_tokens} if num_tokens else {}


if __name__ == "__main__":
    run_main(main)
