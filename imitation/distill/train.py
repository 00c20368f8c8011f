"""On-policy distillation: a teacher says how probable it finds every token that the student samples.

    for every step:
        sample completions of Q prompts from the student, the policy that is trained
        compute the log-probs of the same tokens under the teacher
        A_t = log p_teacher(token) - log p_student(token), a constant               for every token that was sampled
        loss = as in GRPO, with A_t in place of A, and the mean over all tokens

The mean of -A_t over the student's own tokens estimates its reverse KL divergence to the teacher. On average, the
gradient of the loss is the gradient of that divergence at every token. So each token has its own reward, and needs no
group to be compared with. The task's reward is only logged. Sources: GKD (Agarwal et al. 2023, arXiv 2306.13649,
section 3) and "On-Policy Distillation" (Thinking Machines Lab 2025).

    python imitation/distill/train.py                                                 # the teacher is tiny_teacher
    python imitation/distill/train.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B
    python -m viewer.diff imitation/distill

Parent: experiment_base, which explains everything else.

Shapes: Q prompts per step (of several processes, each has its part), G completions per prompt, B = Q*G rows with a
group's rows adjacent, T tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which
the logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass

import torch

from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, is_clipped, probability_ratio
from common.parallel import clip_grad_norm_
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

from harness.base.config import Count, NotNegative, Positive, Share
from harness.cli.parse import parse_config
from harness.data.order import prompts_of_step
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.statistics import UpdateStatistics, rollout_metrics
from harness.models.loading import load_policy
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.task import Task, load_task
from harness.teachers.teachers import Teacher, TeacherConfig, load_teacher


@dataclass(frozen=True, kw_only=True)
class Config(TeacherConfig):
    steps: Count = 40  # training steps: each samples completions, rewards them, and trains on them
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
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    task = load_task(config)  # the questions, their rewards, and the rows of data
    with start_run(config, task) as run:
        policy = load_policy(config, config.temperature)
        teacher = load_teacher(config, task, policy)
        if not run.has_before:
            run.log_before(evaluate_held_out(config, task, policy, num_samples=8))
        train(config, run, task, policy, teacher)
        run.save_final(policy)
        run.finish(evaluate_held_out(config, task, policy, num_samples=8))


def train(config: Config, run: Run, task: Task, policy: Policy, teacher: Teacher) -> None:
    """Run all steps, or the steps that a resumed run has left."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    model, optimizer = run.prepare(policy, optimizer)  # one process: unchanged; several: gradients are averaged
    run.restore(policy, optimizer)
    for step in run.steps(config.steps):
        # 1 sample: G completions of each of Q prompts
        trajectories = sample_completions(config, task, policy, step)
        run.lap("sample")

        # 2 reward: each completion by itself, from its text; only logged
        rows = [task.train_rows[completion.prompt_index] for completion in trajectories]
        texts = [decode(policy.tokenizer, completion.completion_ids) for completion in trajectories]
        rewards = task.reward_all(rows, texts, trajectories)  # one dictionary per completion, by component
        for completion, row, text, earned in zip(trajectories, rows, texts, rewards, strict=True):
            completion.text = text
            completion.rewards = earned
            completion.description = task.describe(row, text)  # only logged
        totals = [task.total_reward(completion.rewards) for completion in trajectories]
        returns = torch.tensor(totals).view(-1, config.group_size)  # (Q, G)

        # 3 advantage of each token: how much more probable it is to the teacher than to the student (after step 4)
        experience = collate(trajectories, policy.pad_id, policy.device)  # ragged lists become padded tensors
        run.lap("reward")

        # 4 log-probs (B, T-1) of the same tokens: of the student, which sampled them, and of the teacher
        experience.old_log_probs = old_log_probs(config, policy, experience)
        experience.log_probs_ref = teacher(experience)
        experience.advantages = (experience.log_probs_ref - experience.old_log_probs) * experience.action_mask
        run.lap("log_probs")

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


def old_log_probs(config: Config, policy: Policy, experience: Experience) -> torch.Tensor:
    """The log-probs (B, T-1) of the policy that sampled the tokens: the denominators of the ratios."""
    if policy.compute_dtype == torch.float32:
        return experience.sampler_log_probs
    return token_log_probs(policy, experience, config.micro_batch)  # in bfloat16 the sampler rounds differently


def policy_loss(
    config: Config, log_probs: torch.Tensor, micro: Experience, num_tokens: float
) -> tuple[torch.Tensor, dict]:
    """Each token's term, (b, T-1): -min(ratio A, clip(ratio) A) / num_tokens, the action tokens of all rows."""
    mask = micro.action_mask
    ratio = probability_ratio(log_probs, micro.old_log_probs, mask)  # (b, T-1)
    token_loss = clipped_surrogate(ratio, micro.advantages, config.clip_eps)  # (b, T-1)
    diagnostics = {"ratio": ratio, "clipped": is_clipped(ratio, micro.advantages, config.clip_eps)}
    diagnostics["token_advantage"] = micro.advantages
    diagnostics["teacher/kl"] = approx_kl_divergence(log_probs, micro.log_probs_ref, mask)  # only logged
    return token_loss * mask / num_tokens, diagnostics  # not by its row's length, which depends on the token


def update(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer, experience: Experience, step: int
) -> UpdateStatistics:
    """Train on one rollout: some epochs over shuffled minibatches, one optimizer step each."""
    statistics = UpdateStatistics(config.max_grad_norm)
    for epoch in range(config.epochs_per_step):
        key = (config.seed, step, epoch)  # decides the shuffle
        for index, minibatch in enumerate(experience.minibatches(config.minibatch_size, config.group_size, key)):
            optimizer.zero_grad()
            for micro in minibatch.split(config.micro_batch):
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
