"""Supervised fine-tuning in one file: how the tiny policy is made, and how any policy is warm-started.

The policy reads conversations and learns to say what the assistant says in them, token by token: the loss is minus the
log-probability of every assistant token, including the end-of-turn token, averaged over all of them in an optimizer
batch. The policy reads the user's words and the tokens of the template, but does not learn to say them.

    python experiment_sft/train.py --dtype bfloat16 --save-dtype bfloat16 --threads 2      # the bundled tiny policy
    python experiment_sft/train.py --model Qwen/Qwen2.5-0.5B-Instruct --data chats.jsonl     # rows: {"messages": [...]}

Without --data the rows are the three lessons of warm_start.py, in order, because the later lessons build on the earlier
ones. At the end the policy is examined twice: as it answers by itself, and forced to reason before it answers. The
second accuracy shows how much experiment_base can bring out. With every --num-... at 0 a --model is only examined.
--lessons tools takes its rows from tool_lessons.py, and examines the policy with its tools as well; --lessons countdown
takes them from countdown_lessons.py, where some tokens weigh more, and examines the policy in Countdown.

Rows of --data may have "tools", a list of JSON schemas, with calls and turns of tools among their messages; a turn of
the assistant with "weight": 0 is read and not learned.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from countdown_lessons import EMPHASIS, countdown_conversations, renew_symbols
from emphasis import WeightedRow, collate_weighted, token_weights
from tiny_policy import make_model, make_tokenizer
from tool_examination import examine_tools
from tool_lessons import renew_collapsed_embeddings, tool_conversations
from warm_start import conversations

from common.chat import encode_chat, with_remedy
from common.errors import UserError
from common.evaluate import evaluate
from common.experience import Experience, collate
from common.keyed import keyed_generator
from common.policy import Policy
from common.trajectory import Trajectory
from tasks import arithmetic, countdown

from harness.base.config import DTYPES, Count, CountOrZero, InputPath, NotNegative, PolicyConfig, Positive
from harness.base.terminal import say
from harness.cli.parse import parse_config
from harness.data.context import check_prompts, context_length
from harness.data.data import read_rows
from harness.data.thoughts import tell_of_openings
from harness.models.loading import load_policy, make_policy
from harness.run.run import Run
from harness.run.start import run_main, start_run

RESOLVED = {"new": {"lr": 1.5e-3}, "tiny": {"lr": 5e-4}, "full": {"lr": 1e-5}}
# The questions at the end, by lessons, and the budget of an answer in tokens
EXAMINED = {"arithmetic": (arithmetic, 96), "tools": (arithmetic, 96), "countdown": (countdown, 160)}
WINDOW = 3000  # rows to choose from when rows of similar length are batched together, which saves padding


@dataclass(frozen=True, kw_only=True)
class Config(PolicyConfig):
    model: str = "new"  # a fresh tiny policy "new", the bundled one "tiny", a hub id, or a directory
    data: InputPath | None = None  # a file or hub dataset (docs/data.md) with {"messages": [...]}, perhaps "tools"
    # without --data: the lessons of warm_start.py, tool_lessons.py, or countdown_lessons.py
    lessons: Literal["arithmetic", "tools", "countdown"] = "arithmetic"
    # with --lessons tools: embeddings of the syllables of names, unused until then: like those of digits, random, as is
    embeddings: Literal["like_digits", "random", "as_is"] = "like_digits"
    num_copying: CountOrZero = 38_000  # conversations of the first lesson
    num_reasoning: CountOrZero = 200_000  # conversations of the second lesson: all are reasoned, or call a tool
    num_answering: CountOrZero = 120_000  # conversations of the third lesson: some are reasoned, or call a tool
    epochs: Count = 1  # passes over the rows
    tokens_per_batch: Count = 3072  # tokens per optimizer step, including padding
    micro_batch_size: Count = 256  # rows per forward and backward pass: memory and time, never the update
    max_length: Count = 1024  # tokens; rows longer than this or than the model's context are left out, and counted
    lr: Positive | None = None  # peak learning rate of AdamW; None: 1.5e-3 for "new", 5e-4 for "tiny", else 1e-5
    warmup_steps: CountOrZero = 50  # steps over which the learning rate rises from 0
    final_lr: NotNegative = 0.1  # learning rate at the end, as a share of the peak; in between it falls like a cosine
    weight_decay: NotNegative = 0.0  # weight decay of AdamW
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm
    checkpoint_every: int = 500  # steps between checkpoints; 0: only on Ctrl-C
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the weights in final/, which are then examined


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__, resolved=RESOLVED)
    if config.data is not None and config.model == "new":
        raise UserError("--data teaches a policy that can already speak: give a --model")
    lesson_sizes = ("num_copying", "num_reasoning", "num_answering")
    if config.data is not None and any(getattr(config, name) != getattr(Config, name) for name in lesson_sizes):
        raise UserError("--num-copying, --num-reasoning and --num-answering size the lessons, which --data replaces")
    if config.lessons != "tools" and config.embeddings != Config.embeddings:
        raise UserError("--embeddings is about the names of --lessons tools")
    if config.lessons != "arithmetic" and (config.data is not None or config.model == "new"):
        raise UserError(f"--lessons {config.lessons} continues a policy that can reason: give a --model, and no --data")
    rows = lessons(config) if config.data is None else read_rows(config.data, {"messages": list})
    with start_run(config) as run:
        policy = new_policy(config) if config.model == "new" else load_policy(config)
        if config.data is None:  # the examination at the end would fail
            task, budget = EXAMINED[config.lessons]
            check_prompts(policy, read_rows(str(task.EVAL_DATA), task.FIELDS), task.messages, max_new_tokens=budget)
        if config.lessons == "tools" and config.embeddings != "as_is":
            cosines = renew_collapsed_embeddings(policy, config.seed, at_random=config.embeddings == "random")
            say("mean cosine between the syllables of names: {:.3f}, renewed {:.3f}".format(*cosines))
        if config.lessons == "countdown":
            renew_symbols(policy, config.seed)
        rows, eval_rows = hold_out(config, encode_rows(config, policy, rows))
        train(config, run, policy, rows)

        cast_weights(policy, DTYPES[config.save_dtype])
        run.save_final(policy)
        cast_weights(policy, torch.float32)  # rounded: the weights that are examined are the weights that were saved
        examination = examine(config, policy, eval_rows)
        run.write_summary(examination)
        for name, value in examination.items():
            say(f"{name:40} {value:.3f}")
        say(f"policy: {run.directory / 'final'}")


def new_policy(config: Config) -> Policy:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, config.seed)
    model.set_attn_implementation(config.attn_implementation)
    return make_policy(model, tokenizer, config)


def cast_weights(policy: Policy, dtype: torch.dtype) -> None:
    """Cast the trained weights only: `.to(dtype)` would also round the rotary embedding's frequencies, for good."""
    for weight in policy.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(dtype)


def lessons(config: Config) -> list[dict]:
    make = {"arithmetic": conversations, "tools": tool_conversations, "countdown": countdown_conversations}
    return list(make[config.lessons](config.num_copying, config.num_reasoning, config.num_answering, config.seed))


def hold_out(config: Config, rows: list[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """The rows to learn from, and the rows held out from --data for evaluation: a tenth, at most --eval-prompts."""
    if config.data is None:
        return rows, []
    num_eval = min(config.eval_prompts, len(rows) // 10)
    order = keyed_generator("split", config.seed).permutation(len(rows))
    return [rows[index] for index in order[num_eval:]], [rows[index] for index in order[:num_eval]]


def encode_rows(config: Config, policy: Policy, rows: list[dict]) -> list[Trajectory]:
    """Conversations as trajectories: the assistant's tokens are the actions."""
    encoded, source = [], config.data or f"--lessons {config.lessons}"
    emphasis = EMPHASIS if config.lessons == "countdown" else {}
    for index, row in enumerate(rows):
        try:
            ids, mask = encode_chat(policy.tokenizer, row["messages"], policy.end_of_turn_ids, row.get("tools"))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{source}, row {index + 1}: {with_remedy(error)}") from error
        if len(ids) <= min(config.max_length, context_length(policy)) and any(mask):
            weights = token_weights(policy.tokenizer, ids, mask, emphasis) if emphasis else []
            encoded.append(WeightedRow(ids, mask.index(1), mask, [0.0] * len(ids), index, weights=weights))
    if len(encoded) < len(rows):
        say(f"{len(rows) - len(encoded)} of {len(rows)} rows left out: too long, or without an assistant turn")
    if rows and not encoded:
        raise UserError(f"{source}: no row is left to learn from")
    tell_of_openings(policy.tokenizer, encoded)
    return encoded


def train(config: Config, run: Run, policy: Policy, rows: list[Trajectory]) -> None:
    """Go through all batches once."""
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay
    )
    all_batches = list(batches(config, rows))
    run.restore(policy, optimizer)
    for step in run.steps(len(all_batches)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, len(all_batches))
        batch = collate_weighted(all_batches[step - 1], policy.pad_id, policy.device)
        metrics = update(config, policy, optimizer, batch) | {"lr": optimizer.param_groups[0]["lr"]}
        run.log(step, metrics | run.costs(num_tokens=int(batch.action_mask.sum())))
        run.checkpoint(step, policy, optimizer)


def policy_loss(log_probs: torch.Tensor, micro: Experience, total_weight: torch.Tensor) -> torch.Tensor:
    """Each token's term, (b, T-1): -weight log p(token) / the weights of all tokens of the batch."""
    return -log_probs * micro.advantages / total_weight


def update(config: Config, policy: Policy, optimizer: torch.optim.Optimizer, batch: Experience) -> dict[str, float]:
    """One optimizer step: minus the mean log-probability of the batch's assistant tokens."""
    optimizer.zero_grad()
    total_weight = batch.advantages.sum()  # of the full batch, so that micro-batches add up to its mean
    total = 0.0
    for micro in batch.split(config.micro_batch_size):
        log_probs = policy(micro.sequences, micro.action_mask).log_probs  # (b, T-1)
        terms = policy_loss(log_probs, micro, total_weight)  # (b, T-1)
        terms.sum().backward()
        total += terms.sum().item()
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
    if torch.isfinite(grad_norm):  # otherwise this update is skipped, and counted
        optimizer.step()
    return {"loss/total": total, "loss/grad_norm": grad_norm.item(), "loss/skipped": float(not grad_norm.isfinite())}


def learning_rate(config: Config, step: int, num_steps: int) -> float:
    """Up from 0 in `warmup_steps` steps, then down a cosine to `final_lr` of the peak at the last step."""
    warmup = min(1.0, step / max(config.warmup_steps, 1))
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return config.lr * warmup * (config.final_lr + (1 - config.final_lr) * cosine)


def batches(config: Config, rows: list[Trajectory]) -> Iterator[list[Trajectory]]:
    """Batches of at most `tokens_per_batch` tokens, rows of similar length together; user data is shuffled first."""
    for epoch in range(config.epochs):
        order = range(len(rows))
        if config.data is not None:
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


@torch.no_grad()
def examine(config: Config, policy: Policy, eval_rows: list[Trajectory]) -> dict[str, float]:
    """With --data the loss on the held-out rows; otherwise held-out answers, by itself and forced to reason first."""
    if config.data is not None:
        log_prob_sum = num_tokens = 0.0
        for row in eval_rows:
            batch = collate([row], policy.pad_id, policy.device)
            log_prob_sum += policy(batch.sequences, batch.action_mask).log_probs.sum().item()
            num_tokens += batch.action_mask.sum().item()
        return {"eval/loss": -log_prob_sum / num_tokens} if num_tokens else {}
    task, budget = EXAMINED[config.lessons]
    questions = read_rows(str(task.EVAL_DATA), task.FIELDS)[: config.eval_prompts]
    examination = {}
    ways = {"eval": "", "eval_forced": "<think>"} if task is arithmetic else {"eval": ""}
    for name, prefix in ways.items():
        metrics = evaluate(
            policy, questions, task, max_new_tokens=budget, num_samples=8, seed=config.seed, prefix=prefix
        ).metrics
        examination |= {f"{name}/{key}": value for key, value in metrics.items()}
    return examination | (examine_tools(policy, config.eval_prompts, config.seed) if config.lessons == "tools" else {})


if __name__ == "__main__":
    run_main(main)
