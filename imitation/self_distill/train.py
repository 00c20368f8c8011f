"""Self-distillation: the teacher is the policy itself, shown a hint that the student does not get.

    for every step:
        sample completions of Q prompts from the student, the policy that is trained
        hint: what is wrong with each completion, or a right completion of the same question
        compute the log-probs of the same tokens under the teacher: question and hint, then the completion
        w = p_teacher(token) / p_student(token), a constant                         for every token that was sampled
        A_t = log w (reverse KL) or w - 1 (forward KL), and 0 without a hint
        loss = as in GRPO, with A_t in place of A, and the mean over all tokens

log w estimates minus the gradient of KL(student || teacher), and w - 1 that of KL(teacher || student), which needs no
samples of the teacher: w is their importance weight. The teacher's weights are a moving average of the policy's.
Sources: SDPO (arXiv 2601.20802, feedback and right completions of the group) and SDFT (arXiv 2601.19897,
demonstrations).

    python imitation/self_distill/train.py                      # tiny_reader, which is shown a right completion
    python imitation/self_distill/train.py --task instructions --model smollm2 --hint feedback   # docs/smollm2.md
    python -m viewer.diff imitation/self_distill

Parent: imitation/distill; hinted_teacher.py, beside this file, writes the hints.

Shapes: Q prompts per step (of several processes, each has its part), G completions per prompt, B = Q*G rows with a
group's rows adjacent, T tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which
the logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass
from typing import Literal

import torch
from hinted_teacher import HintedTeacher

from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, is_clipped, probability_ratio
from common.parallel import clip_grad_norm_
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

from harness.base.config import Count, NotNegative, Positive, RunConfig, Share, ZeroToOne
from harness.cli.parse import parse_config
from harness.data.order import prompts_of_step
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.statistics import UpdateStatistics, rollout_metrics
from harness.models.loading import load_policy
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.task import Task, load_task


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    # tiny_reader: the bundled policy after it has learned to read hints (make_hinted_chats.py)
    model: str = "tiny_reader"
    # what the teacher sees beside the question: words of the task's file about the completion, a right completion of
    # the same question (not the same text), or both
    hint: Literal["feedback", "demonstration", "both"] = "demonstration"
    success_threshold: Positive = 1.0  # a completion with at least this return is right, and a demonstration
    divergence: Literal["reverse", "forward"] = "reverse"  # KL(student || teacher), or KL(teacher || student)
    weight_cap: Positive = 10.0  # C: with the forward divergence, w is at most this
    # after each step, the teacher's weights move this share of the way to the policy's; 0: frozen, 1: no copy at all
    teacher_update_rate: ZeroToOne = 0.05
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
        teacher = HintedTeacher(config, task, policy)
        if not run.has_before:
            run.log_before(evaluate_held_out(config, task, policy, num_samples=8))
        train(config, run, task, policy, teacher)
        run.save_final(policy)
        run.finish(evaluate_held_out(config, task, policy, num_samples=8))


def train(config: Config, run: Run, task: Task, policy: Policy, teacher: HintedTeacher) -> None:
    """Run all steps, or the steps that a resumed run has left."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    model, optimizer = run.prepare(policy, optimizer)  # one process: unchanged; several: gradients are averaged
    run.restore(policy, optimizer, kept=teacher)
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

        # 3 hint: the teacher's prompt for each completion; and the advantage of each token (after step 4)
        prompts = teacher.hints(trajectories, returns)
        experience = collate(trajectories, policy.pad_id, policy.device)  # ragged lists become padded tensors
        run.lap("reward")

        # 4 log-probs (B, T-1) of the same tokens: of the student, which sampled them, and of the teacher
        experience.old_log_probs = old_log_probs(config, policy, experience)
        experience.log_probs_ref = teacher(experience, prompts)
        log_w = (experience.log_probs_ref - experience.old_log_probs) * experience.action_mask
        experience.advantages = token_advantages(config, log_w)  # (B, T-1)
        run.lap("log_probs")

        # 5 update: one or more optimizer steps on this rollout
        statistics = update(config, model, optimizer, experience, step)
        teacher.follow()
        run.lap("update")

        # 6 log, evaluate, checkpoint
        metrics = statistics.metrics() | rollout_metrics(trajectories, returns)
        metrics |= teacher.metrics(log_w, returns)
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


def token_advantages(config: Config, log_w: torch.Tensor) -> torch.Tensor:
    """Of w = p_teacher / p_student: log w for the reverse KL, min(w, C) - 1 for the forward KL; both 0 at w = 1."""
    return log_w if config.divergence == "reverse" else log_w.exp().clamp(max=config.weight_cap) - 1


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
