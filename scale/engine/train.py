"""GRPO with samples from an inference engine: vLLM holds a copy of the policy, and draws every token.

    for every step:
        push the policy's weights to the engine
        let the engine sample G completions of each of Q prompts, with their log-probs, log p_engine
        compute the log-probs of the same tokens, log p, under the policy
        w = min(p(token) / p_engine(token), cap), a constant                        for every token that was sampled
        loss = as in experiment_base, with w A in place of A

The two log-probs differ: by rounding, if the engine computes in bfloat16; by a step, if it samples while the policy is
trained (--steps-ahead 1); without bound, if pushing weights has failed. w makes samples of another distribution count
as the policy's own: importance sampling, truncated because a rare w can be huge.

    python scale/engine/train.py --engine-start /opt/vllm/bin/python         # a Python that has vLLM
    python scale/engine/train.py --engine-url http://127.0.0.1:8000          # a server that runs
    python -m viewer.diff scale/engine

Parent: experiment_base, which explains everything else. Its shapes hold here, too.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass

import torch

from common.advantages import STD_EPS, group_advantages, group_std
from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, is_clipped, probability_ratio
from common.parallel import clip_grad_norm_
from common.policy import Policy

from harness.base.config import Count, GroupSize, NotNegative, Positive, Share, ZeroOrOne
from harness.cli.parse import parse_config
from harness.data.order import prompts_of_step
from harness.engines.engine import Engine, Sampling
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.statistics import UpdateStatistics, rollout_metrics
from harness.models.loading import load_policy, make_reference
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.run.start_engine import EngineConfig, compare_with_engine, start_engine
from harness.task.task import Task, load_task


@dataclass(frozen=True, kw_only=True)
class Config(EngineConfig):
    steps: Count = 80  # training steps: each samples completions, rewards them, and trains on them
    prompts_per_step: Count = 16  # Q: questions per step
    group_size: GroupSize = 8  # G: completions per question, which are compared with one another
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
    kl_weight: NotNegative = 0.02  # beta: weight of the KL penalty for leaving the reference; 0 needs no reference
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm
    importance_cap: NotNegative = 2.0  # the largest importance weight; 0: no weights, as if the engine were exact
    push_every: Count = 1  # steps between pushes of weights (evaluations push, too); above 1 samples are of older ones
    steps_ahead: ZeroOrOne = 0  # 1: the engine samples the next step during the update, with weights a step old


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    task = load_task(config)  # the questions, their rewards, and the rows of data
    with start_run(config, task) as run:
        policy = load_policy(config, config.temperature)
        reference = make_reference(policy) if config.kl_weight > 0 else None
        engine = start_engine(config, run, task, policy)
        if not run.has_before:
            run.log_before(evaluate_held_out(config, task, policy, num_samples=8, sampler=engine.sample))
        train(config, run, task, policy, reference, engine)
        run.save_final(policy)
        run.finish(evaluate_held_out(config, task, policy, num_samples=8, sampler=engine.sample))


def train(config: Config, run: Run, task: Task, policy: Policy, reference: Policy | None, engine: Engine) -> None:
    """Run all steps, or the steps that a resumed run has left."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    model, optimizer = run.prepare(policy, optimizer)  # one process: unchanged; several: gradients are averaged
    run.restore(policy, optimizer)
    ahead = None  # samples of the next step, which the engine works on
    for step in run.steps(config.steps):
        # 1 sample: G completions of each of Q prompts, by the engine, which can then begin the next step
        trajectories = (ahead or begin_sampling(config, task, policy, engine, step)).result()
        if config.steps_ahead and step < config.steps:
            ahead = begin_sampling(config, task, policy, engine, step + 1)
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

        # 3 advantage: better or worse than the group, in units of the group's standard deviation
        advantages = group_advantages(returns) / (group_std(returns) + STD_EPS)  # (Q, G)
        experience = collate(trajectories, policy.pad_id, policy.device)  # ragged lists become padded tensors
        experience.advantages = advantages.view(-1, 1).float().to(policy.device)  # (B, 1): one for all tokens of a row
        run.lap("reward")

        # 4 log-probs to compare with: of the policy before the update, never those of the engine, and of the reference
        experience.old_log_probs = token_log_probs(policy, experience, config.micro_batch)
        experience.importance_weights = importance_weights(config, experience)
        comparison = compare_with_engine(config, experience)  # ends the run if the engine is not the policy
        if reference is not None:
            experience.log_probs_ref = token_log_probs(reference, experience, config.micro_batch)
        run.lap("log_probs")

        # 5 update: one or more optimizer steps on this rollout
        statistics = update(config, model, optimizer, experience, step)
        run.lap("update")

        # 6 log, evaluate, checkpoint
        metrics = statistics.metrics() | rollout_metrics(trajectories, returns)
        metrics |= comparison | engine.costs()
        metrics |= run.costs(num_tokens=sum(completion.num_action_tokens for completion in trajectories))
        if config.eval_every and step % config.eval_every == 0:
            evaluation = evaluate_held_out(config, task, policy, sampler=engine.sample)
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        run.log(step, metrics)
        run.log_samples(step, trajectories, experience, statistics)
        run.checkpoint(step, policy, optimizer)


def begin_sampling(config: Config, task: Task, policy: Policy, engine: Engine, step: int) -> Sampling:
    """G completions of each of the step's Q questions, of the policy as it is now."""
    prompt_index = prompts_of_step(len(task.train_rows), config.prompts_per_step, step, config.seed)
    conversations = [task.messages(task.train_rows[index], config.system_prompt) for index in prompt_index]
    return engine.begin(
        policy,
        [encode_prompt(policy.tokenizer, messages) for messages in conversations],
        config.group_size,
        max_new_tokens=config.max_new_tokens,
        key=(config.seed, step),  # decides the random numbers of this step
        prompt_index=prompt_index,
        top_p=config.top_p,
        push=(step - 1) % config.push_every == 0,
    )


def importance_weights(config: Config, experience: Experience) -> torch.Tensor:
    """Truncated importance sampling: min(p / p_engine, cap) for every action token, 1 elsewhere: (B, T-1)."""
    mask = experience.action_mask
    weights = probability_ratio(experience.old_log_probs, experience.sampler_log_probs, mask)
    return weights.clamp(max=config.importance_cap) if config.importance_cap else torch.ones_like(weights)


def policy_loss(
    config: Config, log_probs: torch.Tensor, micro: Experience, num_rows: float
) -> tuple[torch.Tensor, dict]:
    """Each token's term, (b, T-1): (-min(ratio w A, clip(ratio) w A) + beta KL) / tokens of its row / num_rows."""
    mask = micro.action_mask
    ratio = probability_ratio(log_probs, micro.old_log_probs, mask)  # (b, T-1)
    token_loss = clipped_surrogate(ratio, micro.importance_weights * micro.advantages, config.clip_eps)  # (b, T-1)
    diagnostics = {"ratio": ratio, "clipped": is_clipped(ratio, micro.advantages, config.clip_eps)}
    diagnostics["importance_weight"] = micro.importance_weights
    if config.kl_weight > 0:
        diagnostics["kl"] = approx_kl_divergence(log_probs, micro.log_probs_ref, mask)
        token_loss = token_loss + config.kl_weight * diagnostics["kl"]
    return token_loss * mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / num_rows, diagnostics


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
                terms, diagnostics = policy_loss(config, log_probs, micro, minibatch.num_rows)
                terms.sum().backward()
                statistics.add(epoch, index, micro, log_probs, terms, entropy=entropy, **diagnostics)
            grad_norm = clip_grad_norm_(model.parameters(), config.max_grad_norm)
            if torch.isfinite(grad_norm):  # otherwise this update is skipped, and counted
                optimizer.step()
            statistics.end_update(grad_norm)
    return statistics


if __name__ == "__main__":
    run_main(main)
