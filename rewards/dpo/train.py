"""DPO, direct preference optimization: your language model is secretly a reward model.

    the score of an answer is beta times how much more probable the policy has made it than the reference, its start
    repeat
        take some pairs: one prompt, a chosen answer and a rejected one
        score both answers; the loss is -log sigmoid(score of the chosen - score of the rejected), mean over the pairs
        take an optimizer step
    measure on held-out pairs how often the chosen answer has the higher score, and ask the policy held-out questions

    python rewards/dpo/train.py                                            # the bundled pairs
    python rewards/dpo/train.py --data HuggingFaceH4/ultrafeedback_binarized:default:train_prefs \\
        --model Qwen/Qwen2.5-0.5B-Instruct
    torchrun --nproc-per-node 2 rewards/dpo/train.py                        # the same update
    python -m viewer.diff rewards/dpo

Parent: rewards/reward_model; here the policy itself is trained, without a score head.

Shapes: a pair is a group of two rows, the chosen answer and the rejected one: B = 2 * pairs rows (of several processes,
each has its part), b rows per micro-batch, T tokens; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which the
logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass

import torch

from common.evaluate import Evaluation
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.loss import bradley_terry_loss
from common.parallel import clip_grad_norm_, gather_rows, own_part
from common.policy import Policy
from common.preferences import mean_log_probs, preference_metrics

from harness.base.config import AskedConfig, Count, InputPath, NotNegative, Positive
from harness.cli.parse import parse_config
from harness.data.order import prompts_of_step
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.statistics import UpdateStatistics, pair_metrics
from harness.models.loading import load_policy
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.pairs import PAIRS, Pair, add_reference, load_pairs, read_pairs
from harness.task.task import Task, load_held_out_task


@dataclass(frozen=True, kw_only=True)
class Config(AskedConfig):
    beta: Positive = 0.1  # a score is beta times a log-ratio: the larger, the closer the policy stays to its start
    data: InputPath = str(PAIRS)  # file or hub dataset (docs/data.md): {"prompt": ..., "chosen": ..., "rejected": ...}
    eval_data: InputPath | None = None  # held-out pairs; None: found as in other experiments
    max_pairs: Count | None = None  # train on the first pairs only; None: on all
    epochs: Count = 1  # passes over the pairs
    pairs_per_step: Count = 32  # pairs per optimizer step, of all processes together
    # pairs per pass: memory and time, never the update; None: 128 for the bundled policy, else 4
    micro_batch_size: Count | None = None
    max_length: Count = 1024  # tokens of prompt and answer; longer pairs are left out, and counted
    max_new_tokens: Count | None = None  # of answers to held-out questions; None: 96 for the bundled policy, else 512
    lr: Positive | None = None  # learning rate of AdamW; None: 5e-5 for the bundled policy, else 1e-6
    weight_decay: NotNegative = 0.0  # weight decay of AdamW
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm
    eval_prompts: Count = 256  # held-out pairs, and held-out questions, per evaluation


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    task = load_held_out_task(config)  # questions to the policy before and after
    rows = read_pairs(config)  # before a model is loaded
    with start_run(config, task) as run:
        policy = load_policy(config)
        pairs, eval_pairs = load_pairs(config, policy, rows)
        for of_policy in (pairs, eval_pairs):  # the reference is the policy before training
            add_reference(policy, of_policy, 2 * config.micro_batch_size)
        if not run.has_before:
            run.log_before(examine(config, task, policy, eval_pairs, num_samples=8))
        train(config, run, task, policy, pairs, eval_pairs)
        run.save_final(policy)
        run.finish(examine(config, task, policy, eval_pairs, num_samples=8))


def train(config: Config, run: Run, task: Task, policy: Policy, pairs: list[Pair], eval_pairs: list[Pair]) -> None:
    """Run all steps, or the steps that a resumed run has left."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    model, optimizer = run.prepare(policy, optimizer)  # one process: unchanged; several: gradients are averaged
    run.restore(policy, optimizer)
    for step in run.steps(config.epochs * (len(pairs) // config.pairs_per_step)):
        # 1 read: the step's pairs, in another order every epoch
        pair_index = prompts_of_step(len(pairs), config.pairs_per_step, step, config.seed)
        rows = [row for index in pair_index for row in pairs[index].rows]
        batch = collate(rows, policy.pad_id, policy.device)
        run.lap("read")

        # 2 update: one optimizer step
        statistics = update(config, model, optimizer, batch)
        run.lap("update")

        # 3 log, evaluate, checkpoint
        metrics = pair_metrics(statistics) | run.costs(num_tokens=int(batch.attention_mask.sum()))
        if config.eval_every and step % config.eval_every == 0:
            found = examine(config, task, policy, eval_pairs)
            metrics |= {f"eval/{name}": value for name, value in found.metrics.items()}
        run.log(step, metrics)
        run.log_samples(step, rows, batch, statistics)
        run.checkpoint(step, policy, optimizer)


def token_scores(config: Config, log_probs: torch.Tensor, micro: Experience) -> torch.Tensor:
    """beta (log p - log p_reference) of each token, (b, T-1): their sum over an answer is its score."""
    return torch.where(micro.action_mask.bool(), config.beta * (log_probs - micro.sampler_log_probs), 0.0)


def pair_margins(scores: torch.Tensor, micro: Experience) -> torch.Tensor:
    """The score of the chosen answer minus the score of the rejected one: (b,) rows in, (b/2,) pairs out."""
    signs = 1 - 2 * micro.completion_index  # (b,): 1 for the chosen answer, -1 for the rejected one
    return (signs * scores).view(-1, 2).sum(dim=1)  # the rows of a pair are adjacent


def policy_loss(
    config: Config, log_probs: torch.Tensor, micro: Experience, num_pairs: float
) -> tuple[torch.Tensor, dict]:
    """Each token's term, (b, T-1): -log sigmoid(margin) / tokens of the pair's two answers / num_pairs.

    The loss belongs to the pair, not to a token: it is spread evenly over the action tokens of both answers.
    """
    scores = token_scores(config, log_probs, micro)  # (b, T-1)
    loss = bradley_terry_loss(pair_margins(scores.sum(dim=1), micro))  # (b/2,)
    loss = loss / micro.action_mask.sum(dim=1).view(-1, 2).sum(dim=1) / num_pairs  # of one token
    return loss.repeat_interleave(2)[:, None] * micro.action_mask, {"score": scores}


def update(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Experience
) -> UpdateStatistics:
    """One optimizer step: the mean over the pairs."""
    statistics = UpdateStatistics(config.max_grad_norm, is_sampled=False)
    optimizer.zero_grad()
    for micro in batch.split(2 * config.micro_batch_size):
        log_probs, entropy = model(micro.sequences, micro.action_mask)  # (b, T-1) each, of the given tokens
        log_probs.retain_grad()  # a token's push is minus its gradient
        terms, diagnostics = policy_loss(config, log_probs, micro, batch.num_rows / 2)
        terms.sum().backward()
        statistics.add(0, 0, micro, log_probs, terms, entropy=entropy, **diagnostics)
    grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm)
    if torch.isfinite(grad_norm):  # otherwise this update is skipped, and counted
        optimizer.step()
    statistics.end_update(grad_norm)
    return statistics


def examine(config: Config, task: Task, policy: Policy, pairs: list[Pair], num_samples: int = 0) -> Evaluation:
    """How the held-out pairs are judged, see `preference_metrics`, and how the policy answers held-out questions."""
    own = [row for pair in own_part(pairs) for row in pair.rows]
    batch = collate(own, policy.pad_id, policy.device)
    log_probs = token_log_probs(policy, batch, 2 * config.micro_batch_size)  # (B, T-1)
    scores = gather_rows(token_scores(config, log_probs, batch).sum(dim=1).tolist())
    scored = list(zip(scores[::2], scores[1::2], strict=True))
    lengths = [tuple(row.num_action_tokens for row in pair.rows) for pair in pairs]
    found = preference_metrics(scored, lengths, [pair.same_style for pair in pairs])
    found |= mean_log_probs(gather_rows(log_probs.sum(dim=1).tolist()))
    evaluation = evaluate_held_out(config, task, policy, num_samples=num_samples)
    return evaluation._replace(metrics=found | evaluation.metrics)


if __name__ == "__main__":
    run_main(main)
