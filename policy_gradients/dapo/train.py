"""DAPO (Decoupled Clip and Dynamic Sampling Policy Optimization): four changes to GRPO, each with a flag.

    for every step:
        sample G completions of Q questions; keep the groups that are neither all right nor all wrong; repeat with other
        questions until Q groups are kept                                           dynamic sampling
        R = reward - how far the completion goes into the last fifth of its budget  overlong punishment
        A = (R - mean of its group) / standard deviation of its group
        loss = sum over all tokens of -min(ratio A, clip(ratio, 1 - 0.2, 1 + 0.28) A) / number of all tokens
                                                                                    clip higher, token mean; no KL

*DAPO: An Open-Source LLM Reinforcement Learning System at Scale* (Yu et al. 2025, arXiv 2503.14476, section 3). The
clip matters only after the first update of a rollout: the default is sixteen.

    python policy_gradients/dapo/train.py
    python policy_gradients/dapo/train.py --max-rounds 1 --clip-eps-high 0.2 --reward-weight overlong=0  # token mean
    python -m viewer.diff policy_gradients/dapo

Parent: experiment_base, which explains everything else.

Shapes: Q prompts per step (of several processes, each has its part), G completions per prompt, B = Q*G rows with a
group's rows adjacent, T tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which
the logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass

import torch

from common.advantages import STD_EPS, group_advantages, group_std, has_reward_variance
from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, is_clipped, probability_ratio
from common.parallel import clip_grad_norm_, gather_rows, own_part
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

from harness.base.config import Count, GroupSize, NotNegative, Positive, RunConfig, Share
from harness.cli.parse import parse_config
from harness.data.order import all_prompts_of_step
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.statistics import UpdateStatistics, rollout_metrics
from harness.models.loading import load_policy, make_reference
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.task import Task, load_task


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: Count = 15  # training steps: each samples completions, rewards them, and trains on them
    prompts_per_step: Count = 16  # Q: questions per step
    group_size: GroupSize = 8  # G: completions per question, which are compared with one another
    max_new_tokens: Count | None = None  # completion budget in tokens; None: 96 for the bundled policy, else 512
    temperature: Positive = 1.0  # logits are divided by it, in sampling and in training alike; higher is more varied
    # below 1: draw only from the most probable tokens that together have this much probability; biases the gradient
    top_p: Share = 1.0
    epochs_per_step: Count = 4  # passes over a rollout; with more than one, the clip limits how far the policy moves
    minibatch_size: Count | None = 32  # rows per optimizer step, a multiple of --group-size; None: the full rollout
    # rows per pass: changes memory and time, never the update; None: 128 for the bundled policy, else 4
    micro_batch_size: Count | None = None
    # learning rate of AdamW; None: 5e-5 for the bundled policy, else 1e-6, and ten times that with --lora-rank
    lr: Positive | None = None
    weight_decay: NotNegative = 0.0  # weight decay of AdamW
    # a token has no gradient once its ratio has moved down or up by this much in the direction of its advantage
    clip_eps: Positive = 0.2
    clip_eps_high: Positive = 0.28  # higher, so that improbable tokens have room to rise
    max_rounds: Count = 4  # rounds of Q questions, until Q groups have completions of different rewards; 1: keep all
    overlong_buffer: Share = 0.2  # last part of the budget, where the punishment of a completion grows from 0 to 1
    kl_weight: NotNegative = 0.0  # beta: weight of the KL penalty for leaving the reference; 0 needs no reference
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    task = load_task(config, more_weights={"overlong": 1.0})  # the questions, their rewards, and the rows of data
    with start_run(config, task) as run:
        policy = load_policy(config, config.temperature)
        reference = make_reference(policy) if config.kl_weight > 0 else None
        if not run.has_before:
            run.log_before(evaluate_held_out(config, task, policy, num_samples=8))
        train(config, run, task, policy, reference)
        run.save_final(policy)
        run.finish(evaluate_held_out(config, task, policy, num_samples=8))


def train(config: Config, run: Run, task: Task, policy: Policy, reference: Policy | None) -> None:
    """Run all steps, or the steps that a resumed run has left."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    model, optimizer = run.prepare(policy, optimizer)  # one process: unchanged; several: gradients are averaged
    run.restore(policy, optimizer)
    for step in run.steps(config.steps):
        # 1, 2 sample and reward: rounds of Q questions, until Q groups have completions of different rewards
        max_rounds = min(config.max_rounds, len(task.train_rows) // config.prompts_per_step)  # no question twice
        questions = all_prompts_of_step(len(task.train_rows), max_rounds * config.prompts_per_step, step, config.seed)
        rows, has_signal = [], []  # of all processes, in the order of one; one flag for each group
        for start in range(0, len(questions), config.prompts_per_step):
            prompt_index = own_part(questions[start : start + config.prompts_per_step])
            trajectories = sample_completions(config, task, policy, prompt_index, key=(config.seed, step, start))
            run.lap("sample")
            has_signal += gather_rows(has_reward_variance(reward(config, task, policy, trajectories)).tolist())
            rows += gather_rows(trajectories)
            run.lap("reward")
            if sum(has_signal) >= config.prompts_per_step:
                break
        # the first Q groups with a signal; if there are fewer, others complete them
        kept = sorted(range(len(has_signal)), key=lambda group: not has_signal[group])[: config.prompts_per_step]
        first = [group * config.group_size for group in own_part(sorted(kept))]
        trajectories = [completion for row in first for completion in rows[row : row + config.group_size]]
        returns = returns_of(config, task, trajectories)  # (Q, G)

        # 3 advantage: better or worse than the group, in units of the group's standard deviation
        advantages = group_advantages(returns) / (group_std(returns) + STD_EPS)  # (Q, G)
        experience = collate(trajectories, policy.pad_id, policy.device)  # ragged lists become padded tensors
        experience.advantages = advantages.view(-1, 1).float().to(policy.device)  # (B, 1): one for all tokens of a row
        run.lap("reward")

        # 4 log-probs to compare with: from the old policy, which sampled the tokens, and from the reference
        experience.old_log_probs = old_log_probs(config, policy, experience)
        if reference is not None:
            experience.log_probs_ref = token_log_probs(reference, experience, config.micro_batch)
        run.lap("log_probs")

        # 5 update: one or more optimizer steps on this rollout
        statistics = update(config, model, optimizer, experience, step)
        run.lap("update")

        # 6 log, evaluate, checkpoint
        completions = own_part(rows)  # also those that are not kept
        metrics = statistics.metrics() | rollout_metrics(completions, returns_of(config, task, completions))
        metrics |= run.costs(num_tokens=sum(completion.num_action_tokens for completion in completions))
        metrics |= {"sampling/tokens": sum(row.num_action_tokens for row in rows), "sampling/groups": len(has_signal)}
        metrics["sampling/groups_without_signal"] = max(0, config.prompts_per_step - sum(has_signal))  # in the update
        if config.eval_every and step % config.eval_every == 0:
            evaluation = evaluate_held_out(config, task, policy)
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        run.log(step, metrics)
        run.log_samples(step, trajectories, experience, statistics)
        run.checkpoint(step, policy, optimizer)


def sample_completions(
    config: Config, task: Task, policy: Policy, prompt_index: list[int], key: tuple[int, ...]
) -> list[Trajectory]:
    """G completions of each of the round's Q questions: B trajectories."""
    conversations = [task.messages(task.train_rows[index], config.system_prompt) for index in prompt_index]
    return sample(
        policy,
        [encode_prompt(policy.tokenizer, messages) for messages in conversations],
        config.group_size,
        max_new_tokens=config.max_new_tokens,
        key=key,  # names the random numbers of this round
        prompt_index=prompt_index,
        top_p=config.top_p,
        generation_batch_size=config.generation_batch_size,
    )


def reward(config: Config, task: Task, policy: Policy, trajectories: list[Trajectory]) -> torch.Tensor:
    """Reward each completion by itself, from its text; returns the totals (Q, G) before any punishment."""
    rows = [task.train_rows[completion.prompt_index] for completion in trajectories]
    texts = [decode(policy.tokenizer, completion.completion_ids) for completion in trajectories]
    rewards = task.reward_all(rows, texts, trajectories)  # one dictionary per completion, by component
    for completion, row, text, earned in zip(trajectories, rows, texts, rewards, strict=True):
        completion.text = text
        completion.rewards = earned
        completion.description = task.describe(row, text)  # only logged
    totals = returns_of(config, task, trajectories)
    buffer = config.overlong_buffer * config.max_new_tokens
    for completion in trajectories:  # 0, and from the beginning of the buffer to the end of the budget down to -1
        excess = completion.num_action_tokens - (config.max_new_tokens - buffer)
        completion.rewards["overlong"] = min(0.0, -excess / buffer)
    return totals


def returns_of(config: Config, task: Task, trajectories: list[Trajectory]) -> torch.Tensor:
    """The weighted sum of each completion's reward components: (Q, G)."""
    totals = [task.total_reward(completion.rewards) for completion in trajectories]
    return torch.tensor(totals).view(-1, config.group_size)


def old_log_probs(config: Config, policy: Policy, experience: Experience) -> torch.Tensor | None:
    """The log-probs (B, T-1) of the policy that sampled the tokens: the denominators of the ratios."""
    if config.epochs_per_step == 1 and config.minibatch_size in (None, config.prompts_per_step * config.group_size):
        return None  # only one update: that policy is still the current one, and the ratio is 1
    if policy.compute_dtype == torch.float32:
        return experience.sampler_log_probs
    return token_log_probs(policy, experience, config.micro_batch)  # in bfloat16 the sampler rounds differently


def policy_loss(
    config: Config, log_probs: torch.Tensor, micro: Experience, num_tokens: float
) -> tuple[torch.Tensor, dict]:
    """Each token's term, (b, T-1): (-min(ratio A, clip(ratio) A) + beta KL) / num_tokens."""
    mask = micro.action_mask
    ratio = probability_ratio(log_probs, micro.old_log_probs, mask)  # (b, T-1)
    given = (ratio, micro.advantages, config.clip_eps, config.clip_eps_high)
    token_loss = clipped_surrogate(*given)  # (b, T-1)
    diagnostics = {"ratio": ratio, "clipped": is_clipped(*given)}
    if config.kl_weight > 0:
        diagnostics["kl"] = approx_kl_divergence(log_probs, micro.log_probs_ref, mask)
        token_loss = token_loss + config.kl_weight * diagnostics["kl"]
    return token_loss * mask / num_tokens, diagnostics


def update(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer, experience: Experience, step: int
) -> UpdateStatistics:
    """Train on one rollout: some epochs over shuffled minibatches, one optimizer step each."""
    statistics = UpdateStatistics(config.max_grad_norm)
    for epoch in range(config.epochs_per_step):
        key = (config.seed, step, epoch)  # decides the shuffle
        for index, minibatch in enumerate(experience.minibatches(config.minibatch_size, config.group_size, key)):
            optimizer.zero_grad()
            for micro in minibatch.split(config.micro_batch, skip_zero_advantages=config.kl_weight == 0):
                log_probs, entropy = model(micro.sequences, micro.action_mask)  # (b, T-1) each, of the given tokens
                log_probs.retain_grad()  # a token's push is minus its gradient
                terms, diagnostics = policy_loss(config, log_probs, micro, minibatch.num_tokens)
                terms.sum().backward()
                statistics.add(epoch, index, micro, log_probs, terms, entropy=entropy, **diagnostics)
            grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm)
            if torch.isfinite(grad_norm):  # otherwise this update is skipped, and counted
                optimizer.step()
            statistics.end_update(grad_norm)
    return statistics


if __name__ == "__main__":
    run_main(main)
