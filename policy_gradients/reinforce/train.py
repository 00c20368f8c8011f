"""REINFORCE in one file: a language model learns from rewards, with the oldest and shortest method.

    for every step:
        sample one completion of each of Q questions from the policy
        R = reward of the completion, from its text
        A = R - baseline                         baseline: 0, or a running mean of earlier rewards
        loss = mean over completions of the sum over tokens of -A log p(token)
        take one optimizer step down the gradient of the loss

The gradient of this loss is an unbiased estimate of the gradient of minus the expected reward: a completion that earned
more than the baseline becomes more probable, one that earned less becomes less probable. Any baseline that does not
depend on the completion leaves the mean of the estimate as it is, and changes its variance: a good baseline makes the
variance small. Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
learning", equation 6.

    python policy_gradients/reinforce/train.py                   # the bundled tiny policy and task: minutes on a laptop
    python policy_gradients/reinforce/train.py --baseline none   # the same with more noise

Left out: groups of completions as baselines, several updates per rollout, a reference. Read next: experiment_base.

Shapes: Q questions per step (of several processes, each has its part), G completions of each (here 1), B = Q*G rows, T
tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which the logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import math
from dataclasses import dataclass
from typing import Literal

import torch

from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.parallel import clip_grad_norm_
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

SMOOTHING = 0.1  # weight of the newest step in the running mean


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: Count = 80  # training steps: each samples completions, rewards them, and trains on them
    prompts_per_step: Count = 128  # Q: questions per step
    group_size: Count = 1  # G: completions per question, independent of each other
    max_new_tokens: Count | None = None  # completion budget in tokens; None: 96 for the bundled policy, else 512
    temperature: Positive = 1.0  # logits are divided by it, in sampling and in training alike; higher is more varied
    # below 1: draw only from the most probable tokens that together have this much probability; biases the gradient
    top_p: Share = 1.0
    # rows per pass: changes memory and time, never the update; None: 128 for the bundled policy, else 4
    micro_batch_size: Count | None = None
    # learning rate of AdamW; None: 5e-5 for the bundled policy, else 1e-6, and ten times that with --lora-rank
    lr: Positive | None = None
    weight_decay: NotNegative = 0.0  # weight decay of AdamW
    baseline: Literal["mean", "none"] = "mean"  # mean: a running mean of earlier steps' rewards; none: 0


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
        # 1 sample: one completion of each of Q questions
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

        # 3 advantage: better or worse than what earlier steps earned on average
        baseline = run.newest.get("reward/baseline", 0.0)
        experience = collate(trajectories, policy.pad_id, policy.device)  # ragged lists become padded tensors
        experience.advantages = (returns.view(-1, 1) - baseline).to(policy.device)  # (B, 1): one for a row's tokens
        run.lap("reward")

        # 4 update: one optimizer step on this rollout
        statistics = update(config, model, optimizer, experience)
        run.lap("update")

        # 5 log, evaluate, checkpoint
        metrics = statistics.metrics() | rollout_metrics(trajectories, returns)
        if config.baseline == "mean":
            baseline += SMOOTHING * (metrics["reward/total"] - baseline)
        metrics["reward/baseline"] = baseline
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


def policy_loss(
    config: Config, log_probs: torch.Tensor, micro: Experience, num_rows: float
) -> tuple[torch.Tensor, dict]:
    """Each token's term, (b, T-1): -A log p(token) / num_rows."""
    return -micro.advantages * torch.where(micro.action_mask.bool(), log_probs, 0.0) / num_rows, {}


def update(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer, experience: Experience
) -> UpdateStatistics:
    """One optimizer step on one rollout, whose micro-batches add up."""
    statistics = UpdateStatistics(max_grad_norm=math.inf)
    optimizer.zero_grad()
    for micro in experience.split(config.micro_batch, skip_zero_advantages=True):
        log_probs, entropy = model(micro.sequences, micro.action_mask)  # (b, T-1) each, of the given tokens
        log_probs.retain_grad()  # a token's push is minus its gradient
        terms, diagnostics = policy_loss(config, log_probs, micro, experience.num_rows)
        terms.sum().backward()
        statistics.add(0, 0, micro, log_probs, terms, entropy=entropy, **diagnostics)
    grad_norm = clip_grad_norm_(model.parameters(), math.inf)  # measured, not clipped
    if torch.isfinite(grad_norm):  # otherwise this update is skipped, and counted
        optimizer.step()
    statistics.end_update(grad_norm)
    return statistics


if __name__ == "__main__":
    run_main(main)
