"""PPO (Proximal Policy Optimization) with a critic: every token has its own advantage.

    for every step:
        sample G completions of Q questions; the reward of a completion r arrives with its last token
        V_t = the critic's prediction of the return, before token t is sampled
        delta_t = r_t + gamma V_t+1 - V_t                   over the tokens of the policy, not of tools
        A_t = delta_t + gamma lambda A_t+1                  GAE, whitened over the step's tokens
        policy loss = -min(ratio_t A_t, clip(ratio_t, 1 - eps, 1 + eps) A_t)
        critic loss = 1/2 max((V_t - target)^2, (clip(V_t) - target)^2),      target = A_t + V_t

A group is no longer its own baseline: completions of other questions teach the critic what to expect of this one.

*Proximal Policy Optimization Algorithms* (Schulman et al. 2017, arXiv 1707.06347); GAE is arXiv 1506.02438.

    python policy_gradients/ppo/train.py
    python policy_gradients/ppo/train.py --gae-lambda 0.95 --critic-warmup 10
    torchrun --nproc-per-node 2 policy_gradients/ppo/train.py
    python -m viewer.diff policy_gradients/ppo

Parent: experiment_base, which explains everything else.

Shapes: Q prompts per step (of several processes, each has its part), G completions per prompt, B = Q*G rows with a
group's rows adjacent, T tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which
the logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass

import torch

from common.advantages import explained_variance, final_rewards, generalized_advantages, whiten
from common.chat import decode, encode_prompt
from common.critic import ActorCritic, token_values
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, clipped_value_loss, is_clipped, probability_ratio
from common.parallel import clip_grad_norm_
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

from harness.base.config import Count, CountOrZero, NotNegative, Positive, RunConfig, Share, ZeroToOne
from harness.cli.parse import parse_config
from harness.data.order import prompts_of_step
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.statistics import UpdateStatistics, rollout_metrics
from harness.models.loading import load_policy, make_reference
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.task import Task, load_task


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: Count = 80  # training steps: each samples completions, rewards them, and trains on them
    prompts_per_step: Count = 16  # Q: questions per step
    group_size: Count = 8  # G: completions per question
    max_new_tokens: Count | None = None  # completion budget in tokens; None: 96 for the bundled policy, else 512
    temperature: Positive = 1.0  # logits are divided by it, in sampling and in training alike; higher is more varied
    # below 1: draw only from the most probable tokens that together have this much probability; biases the gradient
    top_p: Share = 1.0
    epochs_per_step: Count = 1  # passes over a rollout; with more than one, the clip limits how far the policy moves
    minibatch_size: Count | None = None  # rows per optimizer step, a multiple of --group-size; None: the full rollout
    # rows per pass: changes memory and time, never the update; None: 128 for the bundled policy, else 4
    micro_batch_size: Count | None = None
    # learning rate of AdamW; None: 5e-5 for the bundled policy, else 1e-6, and ten times that with --lora-rank
    lr: Positive | None = None
    weight_decay: NotNegative = 0.0  # weight decay of AdamW
    # a token has no gradient once its ratio has moved by this much in the direction of its advantage
    clip_eps: Positive = 0.2
    gamma: Share = 1.0  # discount: a reward that is n tokens away counts gamma^n times
    gae_lambda: ZeroToOne = 1.0  # 1: advantages are returns minus values; lower: trusts the critic more, varies less
    critic_lr_factor: Positive = 10.0  # the critic's learning rate in units of --lr
    critic_warmup: CountOrZero = 0  # number of first steps that train only the critic
    value_clip: Positive = 0.2  # a value has no gradient once it has moved by this much, in units of reward
    kl_weight: NotNegative = 0.0  # beta: weight of the KL penalty for leaving the reference; 0 needs no reference
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    task = load_task(config)  # the questions, their rewards, and the rows of data
    with start_run(config, task) as run:
        policy = load_policy(config, config.temperature)
        reference = make_reference(policy) if config.kl_weight > 0 else None
        policy = ActorCritic(policy)  # with a critic that predicts 0 at first
        if not run.has_before:
            run.log_before(evaluate_held_out(config, task, policy, num_samples=8))
        train(config, run, task, policy, reference)
        run.save_final(policy)
        run.finish(evaluate_held_out(config, task, policy, num_samples=8))


def train(config: Config, run: Run, task: Task, policy: ActorCritic, reference: Policy | None) -> None:
    """Run all steps, or the steps that a resumed run has left."""
    critic = {"params": policy.critic.parameters(), "lr": config.critic_lr_factor * config.lr}
    actor = {"params": policy.model.parameters()}
    optimizer = torch.optim.AdamW([actor, critic], lr=config.lr, weight_decay=config.weight_decay)
    model, optimizer = run.prepare(policy, optimizer)  # one process: unchanged; several: gradients are averaged
    run.restore(policy, optimizer)
    for step in run.steps(config.steps):
        # 1 sample: G completions of each of Q prompts
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

        # 3 advantage of each token: how much better it went on than the critic had expected
        experience = collate(trajectories, policy.pad_id, policy.device)  # ragged lists become padded tensors
        run.lap("reward")
        mask, values = experience.action_mask, token_values(policy, experience, config.micro_batch)  # (B, T-1)
        rewards = final_rewards(returns.view(-1).to(policy.device), mask)  # (B, T-1): at the last action token
        advantages = generalized_advantages(rewards, values, mask, config.gamma, config.gae_lambda)  # (B, T-1)
        experience.values, experience.value_targets = values, advantages + values
        experience.advantages = whiten(advantages, mask)

        # 4 log-probs to compare with: from the old policy, which sampled the tokens, and from the reference
        experience.old_log_probs = old_log_probs(config, policy, experience)
        if reference is not None:
            experience.log_probs_ref = token_log_probs(reference, experience, config.micro_batch)
        run.lap("log_probs")

        # 5 update: one or more optimizer steps on this rollout
        statistics = update(config, model, optimizer, experience, step)
        run.lap("update")

        # 6 log, evaluate, checkpoint
        metrics = statistics.metrics() | rollout_metrics(trajectories, returns)
        to_go = generalized_advantages(rewards, torch.zeros_like(values), mask, config.gamma, 1.0)  # (B, T-1)
        metrics["critic/explained_variance"] = explained_variance(values, to_go, mask)
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


def old_log_probs(config: Config, policy: Policy, experience: Experience) -> torch.Tensor | None:
    """The log-probs (B, T-1) of the policy that sampled the tokens: the denominators of the ratios."""
    if config.epochs_per_step == 1 and config.minibatch_size in (None, config.prompts_per_step * config.group_size):
        return None  # only one update: that policy is still the current one, and the ratio is 1
    if policy.compute_dtype == torch.float32:
        return experience.sampler_log_probs
    return token_log_probs(policy, experience, config.micro_batch)  # in bfloat16 the sampler rounds differently


def policy_loss(
    config: Config, log_probs: torch.Tensor, micro: Experience, num_rows: float
) -> tuple[torch.Tensor, dict]:
    """Each token's term, (b, T-1): (-min(ratio A, clip(ratio) A) + beta KL) / tokens of its row / num_rows."""
    mask = micro.action_mask
    ratio = probability_ratio(log_probs, micro.old_log_probs, mask)  # (b, T-1)
    token_loss = clipped_surrogate(ratio, micro.advantages, config.clip_eps)  # (b, T-1)
    diagnostics = {"ratio": ratio, "clipped": is_clipped(ratio, micro.advantages, config.clip_eps)}
    if config.kl_weight > 0:
        diagnostics["kl"] = approx_kl_divergence(log_probs, micro.log_probs_ref, mask)
        token_loss = token_loss + config.kl_weight * diagnostics["kl"]
    return token_loss * mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / num_rows, diagnostics


def value_loss(config: Config, values: torch.Tensor, micro: Experience, num_rows: float) -> tuple[torch.Tensor, dict]:
    """Each token's term, (b, T-1): clipped squared error / tokens of its row / num_rows."""
    mask = micro.action_mask
    token_loss = clipped_value_loss(values, micro.values, micro.value_targets, config.value_clip)  # (b, T-1)
    terms = token_loss * mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / num_rows
    return terms, {"critic/value": values, "critic/loss": token_loss, "token_advantage": micro.advantages}


def update(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer, experience: Experience, step: int
) -> UpdateStatistics:
    """Train on one rollout: some epochs over shuffled minibatches, one optimizer step each."""
    statistics = UpdateStatistics(config.max_grad_norm)
    for epoch in range(config.epochs_per_step):
        key = (config.seed, step, epoch)  # decides the shuffle
        for index, minibatch in enumerate(experience.minibatches(config.minibatch_size, config.group_size, key)):
            optimizer.zero_grad()
            for micro in minibatch.split(config.micro_batch):  # the critic learns from every row
                log_probs, entropy, values = model(micro.sequences, micro.action_mask)  # (b, T-1) each
                log_probs.retain_grad()  # a token's push is minus its gradient
                terms, diagnostics = policy_loss(config, log_probs, micro, minibatch.num_rows)
                terms = terms * (step > config.critic_warmup)  # the policy waits for a critic that knows something
                value_terms, of_values = value_loss(config, values, micro, minibatch.num_rows)
                (terms.sum() + value_terms.sum()).backward()
                statistics.add(epoch, index, micro, log_probs, terms, entropy=entropy, **diagnostics, **of_values)
            grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm)
            if torch.isfinite(grad_norm):  # otherwise this update is skipped, and counted
                optimizer.step()
            statistics.end_update(grad_norm)
    return statistics


if __name__ == "__main__":
    run_main(main)
