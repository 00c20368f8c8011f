"""Likelihood as the reward: a thought is worth how probable it makes the reference answer. No verifier reads an answer.

    z ~ pi(. | x)                                 a thought, up to the text that begins the answer
    R = pi(y* | x, z)                             the product over the tokens of the reference answer y*; or their mean
    A_i = R_i - mean of the others' R             for completion i of a group of G, as in RLOO
    loss = mean over completions of -(A log pi(z | x) + R log pi(y* | x, z)), A and R constant; / completion budget

If an answer has one form, E[R] is the expected accuracy of an exact verifier. So this is the same objective, and only
the noise of drawing the answer is gone. R depends on the policy, too: the second part of the loss is its own gradient.
VeriFree (Zhou et al. 2025, arXiv 2505.21493) has both parts. RLPR (Yu et al. 2025, arXiv 2506.18254) takes the mean of
the tokens' probabilities, and treats it as a constant, as any reward (`--likelihood mean --gradient thought`).

    python rewards/likelihood/train.py
    python rewards/likelihood/train.py --likelihood mean --gradient thought
    python -m viewer.diff rewards/likelihood

Parent: policy_gradients/rloo. reference_answers.py puts the reference in the place of the sampled answer.

Shapes: Q prompts per step (of several processes, each has its part), G completions per prompt, B = Q*G rows with a
group's rows adjacent, T tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which
the logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass
from typing import Literal

import torch
from reference_answers import load_answered_task, with_references

from common.advantages import group_advantages
from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, is_clipped, probability_ratio
from common.parallel import clip_grad_norm_
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

from harness.base.config import Count, GroupSize, NotNegative, Positive, RunConfig, Share
from harness.cli.parse import parse_config
from harness.data.order import prompts_of_step
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.statistics import UpdateStatistics, rollout_metrics
from harness.models.loading import load_policy, make_reference
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.task import Task


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: Count = 60  # training steps: each samples completions, rewards them, and trains on them
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
    likelihood: Literal["product", "mean"] = "product"  # of the probabilities of the reference answer's tokens
    # both: the reference answer becomes more probable, too, as R depends on the policy; thought: R is a constant
    gradient: Literal["both", "thought"] = "both"
    before_answer: str = "<answer>"  # the text that ends a thought and begins the answer
    after_answer: str = "</answer>"  # the text that ends the answer, which the reference has as well
    kl_weight: NotNegative = 0.0  # beta: weight of the KL penalty for leaving the reference; 0 needs no reference
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    task = load_answered_task(config)  # its own rewards are only logged: their weights are 0
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
        # 1 sample: G completions of each of Q prompts
        trajectories = sample_completions(config, task, policy, step)
        run.lap("sample")

        # 2 reward: each thought by itself, by the likelihood of the reference answer; the sampled answer is only logged
        rows = [task.train_rows[completion.prompt_index] for completion in trajectories]
        texts = [decode(policy.tokenizer, completion.completion_ids) for completion in trajectories]
        rewards = task.reward_all(rows, texts, trajectories)  # one dictionary per completion, by component
        for completion, row, text, earned in zip(trajectories, rows, texts, rewards, strict=True):
            completion.text = text
            completion.rewards = earned
            completion.description = task.describe(row, text)  # only logged
        sampled = trajectories  # they share their rewards with the rows that are trained on
        trajectories, is_answer = with_references(config, task, policy, sampled)
        experience = collate(trajectories, policy.pad_id, policy.device)  # ragged lists become padded tensors
        likelihoods, slopes = likelihood(config, experience.sampler_log_probs, is_answer)  # (B,), (B, T-1)
        for completion, value in zip(trajectories, likelihoods.tolist(), strict=True):
            completion.rewards["likelihood"] = value
        totals = [task.total_reward(completion.rewards) for completion in trajectories]
        returns = torch.tensor(totals).view(-1, config.group_size)  # (Q, G)

        # 3 advantage: better or worse than the mean of the *other* completions of the group
        advantages = group_advantages(returns) * config.group_size / (config.group_size - 1)  # (Q, G)
        of_thought = advantages.view(-1, 1).float().to(policy.device)  # (B, 1)
        of_answer = slopes * task.scorer.weights["likelihood"] * (config.gradient == "both")  # (B, T-1): no baseline
        experience.advantages = torch.where(is_answer, of_answer, of_thought)  # (B, T-1)
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
        metrics = statistics.metrics() | rollout_metrics(sampled, returns)
        metrics |= run.costs(num_tokens=sum(completion.num_action_tokens for completion in sampled))
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


def likelihood(config: Config, log_probs: torch.Tensor, is_answer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """R (B,), the product of the reference's probabilities p_t or their mean, and dR / d log p_t (B, T-1).

    Of the product it is R, for each token; of the mean of n tokens p_t / n. A completion without an answer has R = 0.
    """
    p = torch.where(is_answer, log_probs.exp(), 0.0)  # (B, T-1)
    if config.likelihood == "mean":
        slopes = p / is_answer.sum(dim=1, keepdim=True).clamp(min=1)
        return slopes.sum(dim=1), slopes
    product = torch.where(is_answer, log_probs, 0.0).sum(dim=1).exp() * is_answer.any(dim=1)  # (B,)
    return product, product[:, None] * is_answer


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
    """Each token's term, (b, T-1): (-min(ratio A, clip(ratio) A) + beta KL) / max_new_tokens / num_rows."""
    mask = micro.action_mask
    ratio = probability_ratio(log_probs, micro.old_log_probs, mask)  # (b, T-1)
    token_loss = clipped_surrogate(ratio, micro.advantages, config.clip_eps)  # (b, T-1)
    diagnostics = {"ratio": ratio, "clipped": is_clipped(ratio, micro.advantages, config.clip_eps)}
    if config.kl_weight > 0:
        diagnostics["kl"] = approx_kl_divergence(log_probs, micro.log_probs_ref, mask)
        token_loss = token_loss + config.kl_weight * diagnostics["kl"]
    return token_loss * mask / config.max_new_tokens / num_rows, diagnostics  # a row's sum / a constant


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
