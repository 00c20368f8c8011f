"""Rejection sampling: keep the completions that earned a reward, and imitate them (expert iteration, RAFT, STaR).

    for every step:
        sample G completions of each of Q questions from the policy
        keep those that earned a reward, at most N of each question if --keep-per-question N is given
        for every epoch, and every batch of kept completions:
            loss = mean over kept completions of the sum over tokens of -log p(token)
            take one optimizer step down the gradient of the loss

The loss is that of supervised fine-tuning. With one update per step its gradient is also that of REINFORCE with rewards
of 0 and 1 and no baseline, times (sampled completions / kept completions). Several updates per step delay the sampling:
with --steps 1, everything is sampled once, before training. Sources: STaR (Zelikman et al. 2022, arXiv 2203.14465,
section 3.1) and RAFT (Dong et al. 2023, arXiv 2304.06767, algorithm 1).

    python imitation/rejection/train.py
    python imitation/rejection/train.py --keep-per-question 1          # RAFT: the best completion of each question
    python imitation/rejection/train.py --steps 1 --prompts-per-step 384 --group-size 20 --sft-batch-size 48
    python -m viewer.diff imitation/rejection

Parent: policy_gradients/reinforce, which explains everything else.

Shapes: Q questions per step (of several processes, each has its part), G completions of each, B = Q*G rows with a
question's rows adjacent, K kept rows, T tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about
token t+1, which the logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import math
from dataclasses import dataclass

import torch

from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.parallel import clip_grad_norm_, gather
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

from harness.base.config import Count, NotNegative, Positive, RunConfig, Share
from harness.cli.parse import parse_config
from harness.data.order import prompts_of_step
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.statistics import UpdateStatistics, rollout_metrics
from harness.models.loading import load_policy
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.task import Task, load_task

EASY = 0.75  # a question is easy if at least this share of its completions earned a reward


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: Count = 60  # training steps: each samples completions, rewards them, and trains on them
    prompts_per_step: Count = 16  # Q: questions per step
    group_size: Count = 8  # G: completions per question, independent of each other
    keep_above: NotNegative = 0.0  # a completion is kept if its reward is higher than this
    keep_per_question: Count | None = None  # keep at most so many of each question, the best; None: all that qualify
    max_new_tokens: Count | None = None  # completion budget in tokens; None: 96 for the bundled policy, else 512
    temperature: Positive = 1.0  # logits are divided by it, in sampling and in training alike; higher is more varied
    # below 1: draw only from the most probable tokens that together have this much probability; biases the gradient
    top_p: Share = 1.0
    epochs_per_step: Count = 1  # passes over the kept completions of a step
    sft_batch_size: Count | None = None  # kept completions per optimizer step; None: all that a step has kept
    # rows per pass: changes memory and time, never the update; None: 128 for the bundled policy, else 4
    micro_batch_size: Count | None = None
    # learning rate of AdamW; None: 5e-5 for the bundled policy, else 1e-6, and ten times that with --lora-rank
    lr: Positive | None = None
    weight_decay: NotNegative = 0.0  # weight decay of AdamW


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    task = load_task(config)  # the questions, their rewards, and the rows of data
    with start_run(config, task) as run:
        policy = load_policy(config, config.temperature)
        if not run.has_before:
            run.log_before(evaluate_held_out(config, task, policy, num_samples=8))
        train(config, run, task, policy)
        run.save_final(policy)
        run.finish(evaluate_held_out(config, task, policy, num_samples=8))


def train(config: Config, run: Run, task: Task, policy: Policy) -> None:
    """Run all steps, or the steps that a resumed run has left."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    model, optimizer = run.prepare(policy, optimizer)  # one process: unchanged; several: gradients are averaged
    run.restore(policy, optimizer)
    for step in run.steps(config.steps):
        # 1 sample: G completions of each of Q questions
        trajectories = sample_completions(config, task, policy, step)
        run.lap("sample")

        # 2 reward: each completion by itself, from its text; its return is the weighted sum of the components
        rows = [task.train_rows[completion.prompt_index] for completion in trajectories]
        texts = [decode(policy.tokenizer, completion.completion_ids) for completion in trajectories]
        rewards = task.reward_all(rows, texts, trajectories)  # one dictionary per completion, by component
        for completion, row, text, earned in zip(trajectories, rows, texts, rewards, strict=True):
            completion.text = text
            completion.rewards = earned
            completion.description = task.describe(row, text)  # only logged
        totals = [task.total_reward(completion.rewards) for completion in trajectories]
        returns = torch.tensor(totals).view(-1, config.group_size)  # (Q, G)

        # 3 keep: the completions that earned a reward; their advantage is 1
        is_kept = choose(config, returns)  # (Q, G)
        experience = collate(trajectories, policy.pad_id, policy.device)  # ragged lists become padded tensors
        experience.advantages = is_kept.view(-1, 1).float().to(policy.device)  # (B, 1): one for a row's tokens
        experience.old_log_probs = experience.sampler_log_probs  # only logged
        kept = experience.select(experience.advantages[:, 0].nonzero()[:, 0])  # K rows
        run.lap("reward")

        # 4 update: one or more optimizer steps on the kept rows
        statistics = update(config, model, optimizer, kept, step)
        run.lap("update")

        # 5 log, evaluate, checkpoint
        metrics = statistics.metrics() | rollout_metrics(trajectories, returns) | kept_metrics(config, returns, is_kept)
        metrics |= run.costs(num_tokens=sum(completion.num_action_tokens for completion in trajectories))
        if config.eval_every and step % config.eval_every == 0:
            evaluation = evaluate_held_out(config, task, policy)
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        run.log(step, metrics)
        run.log_samples(step, trajectories, experience, statistics)
        run.checkpoint(step, policy, optimizer)


def sample_completions(config: Config, task: Task, policy: Policy, step: int) -> list[Trajectory]:
    """G completions of each of the step's Q questions: B trajectories."""
    prompt_index = prompts_of_step(len(task.train_rows), config.prompts_per_step, step, config.seed)
    conversations = [task.messages(task.train_rows[index], config.system_prompt) for index in prompt_index]
    return sample(
        policy,
        [encode_prompt(policy.tokenizer, messages) for messages in conversations],
        config.group_size,
        max_new_tokens=config.max_new_tokens,
        key=(config.seed, step),  # decides the random numbers of this step
        prompt_index=prompt_index,
        top_p=config.top_p,
        generation_batch_size=config.generation_batch_size,
    )


def choose(config: Config, returns: torch.Tensor) -> torch.Tensor:
    """Which completions to imitate: (Q, G) returns in, (Q, G) bool out; of equally good ones the first.

    >>> choose(Config(keep_per_question=1), torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.2, 0.1, 1.0]]))
    tensor([[False,  True, False],
            [False, False, False],
            [False, False,  True]])
    """
    best_first = returns.argsort(dim=1, descending=True, stable=True)
    rank = best_first.argsort(dim=1)  # (Q, G), 0 is the best of a question
    return (returns > config.keep_above) & (rank < (config.keep_per_question or config.group_size))


def kept_metrics(config: Config, returns: torch.Tensor, is_kept: torch.Tensor) -> dict[str, float]:
    """The share of all completions that is kept, and of the kept ones that is from easy questions: (Q, G) each."""
    returns, is_kept = torch.cat(gather(returns)), torch.cat(gather(is_kept))
    is_easy = ((returns > config.keep_above).float().mean(dim=1, keepdim=True) >= EASY).expand_as(is_kept)
    metrics = {"kept/share": is_kept.float().mean().item()}
    return metrics | ({"kept/easy": is_easy[is_kept].float().mean().item()} if is_kept.any() else {})


def policy_loss(
    config: Config, log_probs: torch.Tensor, micro: Experience, num_rows: float
) -> tuple[torch.Tensor, dict]:
    """Each token's term, (b, T-1): -A log p(token) / num_rows."""
    return -micro.advantages * torch.where(micro.action_mask.bool(), log_probs, 0.0) / num_rows, {}


def update(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer, kept: Experience, step: int
) -> UpdateStatistics:
    """Supervised fine-tuning on the kept rows: some epochs over shuffled batches, one optimizer step each."""
    statistics = UpdateStatistics(max_grad_norm=math.inf)
    for epoch in range(config.epochs_per_step):
        key = (config.seed, step, epoch)  # decides the shuffle
        for index, batch in enumerate(kept.minibatches(config.sft_batch_size, 1, key)):  # nothing kept: one, empty
            optimizer.zero_grad()
            for micro in batch.split(config.micro_batch):
                log_probs, entropy = model(micro.sequences, micro.action_mask)  # (b, T-1) each, of the given tokens
                log_probs.retain_grad()  # a token's push is minus its gradient
                terms, diagnostics = policy_loss(config, log_probs, micro, batch.num_rows)
                terms.sum().backward()
                statistics.add(epoch, index, micro, log_probs, terms, entropy=entropy, **diagnostics)
            grad_norm = clip_grad_norm_(model.parameters(), math.inf)  # measured, not clipped
            if torch.isfinite(grad_norm):  # otherwise this update is skipped, and counted
                optimizer.step()
            statistics.end_update(grad_norm)
    return statistics


if __name__ == "__main__":
    run_main(main)
