"""Dr. GRPO (GRPO done right) in one file: experiment_base without two biases of GRPO.

*Understanding R1-Zero-Like Training* (Liu et al. 2025, arXiv 2503.20783, section 3) takes two divisions out of GRPO:

- *Length bias.* GRPO divides a completion's loss by its own number of tokens, so that a long wrong answer is punished
  less, token by token, than a short one. Here it is divided by a constant, the completion budget.
- *Difficulty bias.* GRPO divides a group's advantages by their standard deviation, which is small where nearly all
  completions are right or nearly all are wrong, so that these questions count more. Here it is left out.

    python experiment_drgrpo/train.py                        # as long as experiment_base
    python experiment_drgrpo/train.py --critic-type grpo     # experiment_base again, bit for bit
    diff experiment_base/train.py experiment_drgrpo/train.py

Parent: experiment_base, which explains everything else.

Shapes: Q prompts per step, G completions per prompt, B = Q*G rows with a group's rows adjacent, T tokens; entry
`[:, t]` of a (B, T-1) tensor is about token t+1, which the logits at t predict.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from common.advantages import group_advantages, has_signal
from common.chat import encode_prompt
from common.config import RunConfig, UserError, check_ranges, parse_config, run_main
from common.data import load_task, prompts_of_step
from common.diagnosis import UpdateStatistics
from common.evaluate import Evaluation, decode, evaluate
from common.experience import Experience, ReplayBuffer, collate
from common.logprobs import Policy, score
from common.loss import GRPOLoss
from common.policy import load_policy, make_reference
from common.report import peak_memory_bytes
from common.runs import Run, start_run
from common.sampling import sample
from common.tasks import arithmetic as task
from common.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int = 80  # each samples completions, rewards them and trains on them
    prompts_per_step: int = 16  # Q: questions per step
    group_size: int = 8  # G: completions of each question, which are compared with one another
    max_new_tokens: int | None = None  # completion budget in tokens; None: 96 for the bundled policy, else 512
    temperature: float = 1.0  # logits are divided by it, in sampling and in training alike; higher is more varied
    # below 1: draw only from the most probable tokens, which together hold this much probability; biases the gradient
    top_p: float = 1.0
    epochs_per_step: int = 1  # passes over a rollout; more reuse it, and the clipped ratio bounds how far
    minibatch_size: int | None = None  # rows per optimizer step, a multiple of --group-size; None: the whole rollout
    # rows per forward and backward pass: memory and time, never the update; None: 128 for the bundled policy, else 4
    micro_batch_size: int | None = None
    # learning rate of AdamW; None: 5e-5 for the bundled policy, else 1e-6, and ten times that with --lora-rank
    lr: float | None = None
    weight_decay: float = 0.0  # of AdamW
    # a token is pushed no further once its probability has moved by this share, in the direction of the push
    clip_eps: float = 0.2
    kl_weight: float = 0.02  # beta: weight of the penalty for leaving the policy at the start; 0 needs no reference
    critic_type: Literal["grpo", "drgrpo"] = "drgrpo"  # "grpo" puts both biases back: experiment_base
    max_grad_norm: float = 1.0  # the gradient is scaled down to this norm where it is longer
    format_weight: float = 0.0  # reward added for a well-formed answer; a correct one earns 1


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    check(config)
    train_rows, eval_rows = load_task(config)
    if len(train_rows) < config.prompts_per_step:
        raise UserError(f"--prompts-per-step {config.prompts_per_step} exceeds the {len(train_rows)} training rows")
    with start_run("experiment_drgrpo", config) as run:
        policy = load_policy(config, config.temperature)  # which scales the logits of sampling and of training
        reference = make_reference(policy) if config.kl_weight > 0 else None
        # a resumed run reads this back
        before = run.before(lambda: evaluate_policy(policy, eval_rows, config, num_samples=8))
        train(config, run, policy, reference, train_rows, eval_rows)
        run.save_final(policy)
        after = evaluate_policy(policy, eval_rows, config, num_samples=8)
        run.finish(before, after, eval_rows)


def check(config: Config) -> None:
    """Refuse what cannot work, before anything is loaded."""
    check_ranges(
        config,
        positive=("steps", "prompts_per_step", "max_new_tokens", "temperature", "epochs_per_step", "minibatch_size",
                  "micro_batch_size", "lr", "clip_eps", "max_grad_norm"),
        not_negative=("weight_decay", "kl_weight", "format_weight"),
    )  # fmt: skip
    if config.group_size < 2:
        raise UserError(f"--group-size must be 2 or more, not {config.group_size}: a group is its own baseline")
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, not {config.top_p}")
    minibatch_size, rollout = config.minibatch_size, config.prompts_per_step * config.group_size
    if minibatch_size is not None and minibatch_size % config.group_size:
        raise UserError(f"--minibatch-size {minibatch_size} is not whole groups of --group-size {config.group_size}")
    if minibatch_size is not None and minibatch_size > rollout:
        raise UserError(f"--minibatch-size {minibatch_size} exceeds the {rollout} rows of a rollout")
    if config.top_p < 1:
        print(
            "--top-p below 1: tokens are drawn from the most probable ones only, but trained under the whole "
            "distribution: the gradient is biased towards what was likely anyway"
        )


def train(
    config: Config, run: Run, policy: Policy, reference: Policy | None, train_rows: list[dict], eval_rows: list[dict]
) -> None:
    """Run all steps, or those that a resumed run has left."""
    # no length bias: a row's sum over its action tokens is divided by generate_max_length, the completion budget
    objective = GRPOLoss(config.clip_eps, config.kl_weight, config.critic_type, config.max_new_tokens)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    run.restore(policy, optimizer)
    for step in run.steps(config.steps):
        start = time.perf_counter()

        # 1 sample: G completions of each of Q prompts
        trajectories = sample_completions(config, policy, train_rows, step)

        # 2 reward: each completion by itself, from its text
        texts = [decode(policy, trajectory.completion_ids) for trajectory in trajectories]
        for trajectory, text in zip(trajectories, texts, strict=True):
            trajectory.rewards = task.reward(train_rows[trajectory.prompt_index], text)
        returns = torch.tensor([total_reward(config, trajectory) for trajectory in trajectories])  # (B,)
        returns = returns.view(-1, config.group_size)  # (Q, G)

        # 3 advantage: better or worse than the group; no difficulty bias: returns minus mean, no standard deviation
        advantages = group_advantages(returns, config.critic_type)  # (Q, G)
        experience = collate(trajectories, policy.pad_id, policy.device)  # ragged lists become padded tensors
        experience.returns = returns.view(-1, 1).to(policy.device)  # (B, 1)
        experience.advantages = advantages.view(-1, 1).to(policy.device)  # (B, 1): one for all tokens of a row

        # 4 log-probs to compare with: of the old policy, which sampled (None: the current one), and of the reference
        experience.action_log_probs = old_log_probs(config, policy, experience)
        if reference is not None:
            experience.log_probs_ref = score(reference, experience, config.micro_batch_size).log_probs

        # 5 update: one or more optimizer steps on this rollout
        statistics = update(config, policy, objective, optimizer, experience, step)

        # 6 log, evaluate, checkpoint
        metrics = statistics.metrics() | describe_rollout(trajectories, texts, returns)
        metrics |= {"time/step": time.perf_counter() - start, "memory/peak_bytes": peak_memory_bytes(config.device)}
        metrics["time/tokens_per_second"] = metrics["completion/length"] * len(trajectories) / metrics["time/step"]
        if config.eval_every and step % config.eval_every == 0:
            evaluation = evaluate_policy(policy, eval_rows, config)
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        run.log(step, metrics, line=progress_line(step, metrics))
        run.log_samples(step, train_rows, trajectories, texts, experience, statistics)
        run.checkpoint(step, policy, optimizer)


def sample_completions(config: Config, policy: Policy, train_rows: list[dict], step: int) -> list[Trajectory]:
    """G completions of each of the step's Q questions."""
    prompt_index = prompts_of_step(len(train_rows), config.prompts_per_step, step, config.seed)
    questions = [task.messages(train_rows[index], config.system_prompt) for index in prompt_index]
    return sample(
        policy,
        [encode_prompt(policy.tokenizer, question) for question in questions],
        config.group_size,
        max_new_tokens=config.max_new_tokens,
        key=(config.seed, step),  # names the random numbers of this step
        prompt_index=prompt_index,
        top_p=config.top_p,
        rows_at_once=config.sampling_rows,
    )


def total_reward(config: Config, trajectory: Trajectory) -> float:
    """What is maximised: the weighted sum of a completion's rewards."""
    return trajectory.rewards["correct"] + config.format_weight * trajectory.rewards["format"]


def old_log_probs(config: Config, policy: Policy, experience: Experience) -> torch.Tensor | None:
    """The log-probs (B, T-1) that ratios are taken against: those of the policy that sampled the tokens."""
    if config.epochs_per_step == 1 and config.minibatch_size in (None, len(experience)):
        return None  # only one update: that policy is still the current one, and GRPOLoss takes the ratio as 1
    if policy.compute_dtype == torch.float32:
        return experience.sampler_log_probs
    # In bfloat16 the sampler's numbers differ from the training forward's; the ratio must not see that difference.
    return score(policy, experience, config.micro_batch_size).log_probs


def update(
    config: Config,
    policy: Policy,
    objective: GRPOLoss,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    step: int,
) -> UpdateStatistics:
    """Train on one rollout: some epochs over shuffled minibatches, one optimizer step each."""
    buffer = ReplayBuffer(config.group_size)  # of this rollout only: what older policies sampled is not used again
    buffer.append(experience)
    statistics = UpdateStatistics(config.clip_eps, config.max_grad_norm)
    for epoch in range(config.epochs_per_step):
        minibatches = buffer.minibatches(config.minibatch_size or len(experience), key=(config.seed, step, epoch))
        for index, minibatch in enumerate(minibatches):
            optimizer.zero_grad()
            for micro in minibatch.split(config.micro_batch_size, skip_zero_advantages=config.kl_weight == 0):
                log_probs, entropy = policy(micro.sequences, micro.action_mask)  # (b, T-1) each, of the given tokens
                loss, kl = objective(log_probs=log_probs, experience=micro)
                share = len(micro) / len(minibatch)  # micro-batches add up to the mean over the minibatch's rows
                (loss * share).backward()
                statistics.add(epoch, index, micro, log_probs, entropy, loss * share, kl * share)
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            if torch.isfinite(grad_norm):  # else this update is skipped, and counted
                optimizer.step()
            statistics.end_update(grad_norm)
    return statistics


def describe_rollout(trajectories: list[Trajectory], texts: list[str], returns: torch.Tensor) -> dict[str, float]:
    """What was sampled: rewards, lengths, how many think first, how many groups can teach anything."""

    def per_row(values) -> float:
        return sum(values) / len(trajectories)

    rewards = {name: per_row(row.rewards[name] for row in trajectories) for name in trajectories[0].rewards}
    right = [sum(row.action_mask) for row in trajectories if row.rewards["correct"]]
    wrong = [sum(row.action_mask) for row in trajectories if not row.rewards["correct"]]
    return {
        "reward/total": returns.mean().item(),
        **{f"reward/{name}": value for name, value in rewards.items()},
        "completion/length": (sum(right) + sum(wrong)) / len(trajectories),
        **({"completion/length_right": sum(right) / len(right)} if right else {}),
        **({"completion/length_wrong": sum(wrong) / len(wrong)} if wrong else {}),
        "completion/worked": per_row(task.is_worked(text) for text in texts),
        "completion/stopped": per_row(row.finish_reason == "stop" for row in trajectories),
        "completion/truncated": per_row(row.finish_reason == "length" for row in trajectories),
        "group/without_signal": 1 - has_signal(returns).float().mean().item(),
    }


def evaluate_policy(policy: Policy, rows: list[dict], config: Config, num_samples: int = 0) -> Evaluation:
    """Ask the held-out questions, greedily and `num_samples` times each by sampling."""
    return evaluate(
        policy,
        rows,
        task,
        system_prompt=config.system_prompt,
        max_new_tokens=config.max_new_tokens,
        num_samples=num_samples,
        seed=config.seed,
        rows_at_once=config.sampling_rows,
    )


def progress_line(step: int, metrics: dict[str, float]) -> str:
    kl = f"KL {metrics['loss/kl']:.3f}  " if "loss/kl" in metrics else ""
    return (
        f"step {step}  reward {metrics['reward/total']:.2f}  correct {metrics['reward/correct']:.2f}  "
        f"length {metrics['completion/length']:.1f}  {kl}{metrics['time/tokens_per_second']:,.0f} tokens/s"
    )


if __name__ == "__main__":
    run_main(main)
