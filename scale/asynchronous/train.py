"""GRPO while others sample: the completions are drawn with the weights of some steps ago, and the loss corrects for it.

    for every step:
        sample with the weights of `lag` steps ago; each token keeps its log-prob under them, log p_sampler
        rewards and advantages as in experiment_base
        loss = mean over completions of the mean over tokens of -m min(ratio A, clip(ratio) A) + beta KL

A system that trains and samples at the same time never trains on its own samples, but on those of an older policy. How
old may they be, what breaks, and what mends it? Here trainer and sampler take turns in one process, so that the lag is
exact, and a run can be repeated and resumed. `--correction` chooses the ratio and m, a constant for the gradient:

    ratio = p / p_old, where p_old is the policy before the update, and w = p_old / p_sampler:
        none           m = 1                           as if the samples were new
        decoupled      m = w                           AReaL, arXiv 2505.24298
        tis            m = min(w, C)                   truncated importance sampling: Yao et al. 2025
        icepop         m = w if 1/C <= w <= C else 0   arXiv 2510.18855
    ratio = p / p_sampler:
        clip           m = 1                           PPO, arXiv 1707.06347, equation 7
        dppo           m = 0 if (p - p_sampler) sign(A) > delta else 1, and no clip              arXiv 2602.04879
        sequence_mask  m = 0 if A < 0 and mean over the completion of log(p_sampler / p) > delta else 1
                                                       DeepSeek-V3.2, arXiv 2512.02556, equation 9

    python scale/asynchronous/train.py --lr 2e-4 --kl-weight 0                      # four steps late, uncorrected
    python scale/asynchronous/train.py --lr 2e-4 --kl-weight 0 --correction tis     # and corrected
    python -m viewer.diff scale/asynchronous

Parent: experiment_base, which it is with --lag 0; lagging_sampler.py, beside this file, samples with earlier weights.

Shapes: Q prompts per step (of several processes, each has its part), G completions per prompt, B = Q*G rows with a
group's rows adjacent, T tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which
the logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass
from typing import Literal

import torch
from lagging_sampler import LaggingSampler, make_sampler

from common.advantages import STD_EPS, group_advantages, group_std
from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, is_clipped, masked_mean, probability_ratio
from common.parallel import clip_grad_norm_
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.config import Count, CountOrZero, GroupSize, NotNegative, Positive, RunConfig, Share
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
    lag: CountOrZero = 4  # steps that the sampler is behind: it draws with the weights of so many steps ago
    # what corrects for older samples; the top of this file has the equations
    correction: Literal["none", "clip", "decoupled", "tis", "icepop", "dppo", "sequence_mask"] = "none"
    importance_cap: Positive = 2.0  # C: tis cuts larger weights to it, icepop drops tokens outside 1/C to C
    delta: Positive = 0.2  # dppo: in probability; sequence_mask: in nats per token
    swap_every: Count | None = None  # tokens after which a completion goes on with the next weights; None: never
    sampler_dtype: Literal["float32", "bfloat16"] | None = None  # the sampler's arithmetic; None: as --dtype
    samplers: CountOrZero = 0  # processes that sample while this one trains, with Ray; 0: it does both, with --lag
    max_staleness: CountOrZero = 1  # with --samplers: updates that the weights of a sample may be behind, at most
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


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    task = load_task(config)  # the questions, their rewards, and the rows of data
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
    sampler = make_sampler(config, run, task, policy)
    run.restore(policy, optimizer, kept=sampler)
    for step in run.steps(config.steps):
        # 1 sample: G completions of each of Q prompts
        trajectories = sample_completions(config, task, sampler, step)
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

        # 4 log-probs to compare with: from the policy before the update or from the sampler, and from the reference
        experience.old_log_probs = old_log_probs(config, policy, experience)
        if reference is not None:
            experience.log_probs_ref = token_log_probs(reference, experience, config.micro_batch)
        experience.staleness = sampler.staleness(experience.action_mask)
        run.lap("log_probs")
        sampler.keep()  # the weights of this step, for a later one

        # 5 update: one or more optimizer steps on this rollout
        statistics = update(config, model, optimizer, experience, step)
        run.lap("update")

        # 6 log, evaluate, checkpoint
        metrics = statistics.metrics() | rollout_metrics(trajectories, returns)
        metrics |= run.costs(num_tokens=sum(completion.num_action_tokens for completion in trajectories))
        if config.eval_every and step % config.eval_every == 0:
            evaluation = evaluate_held_out(config, task, policy)
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        run.log(step, metrics)
        run.log_samples(step, trajectories, experience, statistics)
        run.checkpoint(step, policy, optimizer)


def sample_completions(config: Config, task: Task, sampler: LaggingSampler, step: int) -> list[Trajectory]:
    """G completions of each of the step's Q questions: B trajectories."""
    prompt_index = prompts_of_step(len(task.train_rows), config.prompts_per_step, step, config.seed)
    conversations = [task.messages(task.train_rows[index], config.system_prompt) for index in prompt_index]
    return sampler.sample(
        [encode_prompt(sampler.tokenizer, messages) for messages in conversations],
        config.group_size,
        max_new_tokens=config.max_new_tokens,
        key=(config.seed, step),  # decides the random numbers of this step
        prompt_index=prompt_index,
        top_p=config.top_p,
        generation_batch_size=config.generation_batch_size,
    )


def old_log_probs(config: Config, policy: Policy, experience: Experience) -> torch.Tensor | None:
    """The log-probs (B, T-1) in the denominators of the ratios: the policy's before the update, or the sampler's."""
    if config.correction in ("clip", "dppo", "sequence_mask"):
        return experience.sampler_log_probs
    if config.epochs_per_step == 1 and config.minibatch_size in (None, config.prompts_per_step * config.group_size):
        return None  # only one update: that policy is still the current one, and the ratio is 1
    has_lag = config.lag or config.samplers
    if policy.compute_dtype == torch.float32 and not has_lag and config.sampler_dtype in (None, "float32"):
        return experience.sampler_log_probs
    return token_log_probs(policy, experience, config.micro_batch)  # in bfloat16 the sampler rounds differently


def policy_loss(
    config: Config, log_probs: torch.Tensor, micro: Experience, num_rows: float
) -> tuple[torch.Tensor, dict]:
    """Each token's term, (b, T-1): (-m min(ratio A, clip(ratio) A) + beta KL) / tokens of its row / num_rows."""
    mask = micro.action_mask
    ratio = probability_ratio(log_probs, micro.old_log_probs, mask)  # (b, T-1)
    drift = probability_ratio(log_probs, micro.sampler_log_probs, mask).detach()  # (b, T-1) p / p_sampler
    w = drift / ratio.detach()  # (b, T-1) p_old / p_sampler
    moved = torch.where(mask.bool(), log_probs.exp() - micro.sampler_log_probs.exp(), 0.0)  # (b, T-1) p - p_sampler
    lost = masked_mean(-drift.log(), mask, dim=1)[:, None].expand_as(w)  # (b, T-1) mean of log(p_sampler / p)
    m = {  # (b, T-1)
        "decoupled": w,
        "tis": w.clamp(max=config.importance_cap),
        "icepop": w * ((w >= 1 / config.importance_cap) & (w <= config.importance_cap)),
        "dppo": moved * micro.advantages.sign() <= config.delta,
        "sequence_mask": (micro.advantages >= 0) | (lost <= config.delta),
    }.get(config.correction, torch.ones_like(w))
    clip_eps = torch.inf if config.correction == "dppo" else config.clip_eps
    token_loss = m * clipped_surrogate(ratio, micro.advantages, clip_eps)  # (b, T-1)
    diagnostics = {"ratio": ratio, "clipped": is_clipped(ratio, micro.advantages, clip_eps)}
    diagnostics |= {"importance_weight": drift, "masked": m == 0, "staleness": micro.staleness}
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
