"""GRPO on a mesh of ranks: tensor parallelism within groups, and FSDP2 across them, with the same update as on one.

    the ranks form a mesh, data x tensor; --tensor-parallel is the number of ranks in a tensor group
    within a tensor group every rank has the same rows, and a part of every layer and of the vocabulary:
        sample: each rank draws the same token, from the same logits and the same random number
        log-probs: a maximum and three sums over the ranks; the logits (N, V) are never gathered
    across groups every rank has other rows, and a shard of its weights, gradients and optimizer state:
        a layer is gathered before it is used; gradients are averaged as they are sharded
    --replicas divides data into replicate x shard (HSDP): a layer is gathered within a copy of the model, and only
        gradients are sent from copy to copy

    python scale/mesh/train.py                                               # one process: experiment_base
    torchrun --nproc-per-node 4 scale/mesh/train.py --tensor-parallel 2      # 2 x 2 processes of a CPU
    python -m viewer.diff scale/mesh

Parent: experiment_base; experiment_accelerate explains ranks; mesh.py, beside this file, divides the model.

Shapes: Q prompts per step of this rank's tensor group, its part of --prompts-per-step; G completions per prompt,
B = Q*G rows, T tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about token t+1.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass, replace

import torch
from mesh import DistributedCheckpoint, Sampler, distribute, sampler_of, start_mesh

from common.advantages import STD_EPS, group_advantages, group_std
from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, is_clipped, probability_ratio
from common.parallel import clip_grad_norm_
from common.policy import Policy
from common.trajectory import Trajectory

from harness.base.config import Count, GroupSize, NotNegative, Positive, RunConfig, Share
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
    tensor_parallel: Count = 1  # ranks that compute each layer together; a divisor of the number of processes
    replicas: Count = 1  # complete copies of the model, one after the other in the ranks; each is sharded by itself
    engine: str | None = None  # address of a vLLM server that samples, see scale/engine; None: the ranks do
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
    config, mesh = start_mesh(parse_config(Config, argv, description=__doc__))  # connects the processes
    task = load_task(config)  # the questions, their rewards, and the rows of data
    with start_run(config, task) as run:
        policy = load_policy(replace(config, device="cpu"), config.temperature)  # no device needs room for all of it
        reference = make_reference(policy) if config.kl_weight > 0 else None
        distribute(mesh, policy, reference)
        sample = sampler_of(config, run)
        if not run.has_before:
            run.log_before(evaluate_held_out(config, task, policy, num_samples=8, sampler=sample))
        train(config, run, task, policy, reference, sample)
        run.save_final(policy)
        run.finish(evaluate_held_out(config, task, policy, num_samples=8, sampler=sample))


def train(config: Config, run: Run, task: Task, policy: Policy, reference: Policy | None, sample: Sampler) -> None:
    """Run all steps, or the steps that a resumed run has left."""
    # one weight after the other (foreach=False): not all of them are divided along the same dimensions
    optimizer = torch.optim.AdamW(policy.parameters(), config.lr, weight_decay=config.weight_decay, foreach=False)
    run.restore(policy, optimizer, DistributedCheckpoint(policy, optimizer))
    for step in run.steps(config.steps):
        # 1 sample: G completions of each of Q prompts
        trajectories = sample_completions(config, task, policy, step, sample)
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

        # 4 log-probs to compare with: from the old policy, which sampled the tokens, and from the reference
        experience.old_log_probs = old_log_probs(config, policy, experience)
        if reference is not None:
            experience.log_probs_ref = token_log_probs(reference, experience, config.micro_batch)
        run.lap("log_probs")

        # 5 update: one or more optimizer steps on this rollout
        statistics = update(config, policy, optimizer, experience, step)
        run.lap("update")

        # 6 log, evaluate, checkpoint
        metrics = statistics.metrics() | rollout_metrics(trajectories, returns)
        metrics |= run.costs(num_tokens=sum(completion.num_action_tokens for completion in trajectories))
        if config.eval_every and step % config.eval_every == 0:
            evaluation = evaluate_held_out(config, task, policy, sampler=sample)
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        run.log(step, metrics)
        run.log_samples(step, trajectories, experience, statistics)
        run.checkpoint(step, policy, optimizer)


def sample_completions(config: Config, task: Task, policy: Policy, step: int, sample: Sampler) -> list[Trajectory]:
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
