"""GRPO with tools, turn by turn: a policy learns to use a calculator for sums that it cannot do in its head.

    for every step:
        turn after turn, until every conversation has ended:
            the policy continues all open rows; its tokens are appended with mask 1
            its calls are executed; the tools' answers are appended with mask 0
        reward each conversation, and train on it as in experiment_base: only tokens with mask 1 count

A conversation is a row of ids that only grows: the policy is trained on exactly the tokens that it saw and sampled.

    python experiment_multiturn_tool_calling/train.py                   # the bundled policy, questions and calculator
    python experiment_multiturn_tool_calling/train.py --no-tool         # the same without the calculator
    python experiment_multiturn_tool_calling/train.py --tools my_tools.py --task my_task.py --data my_rows.jsonl
    python -m viewer.diff experiment_multiturn_tool_calling

Parent: experiment_base. Read next: common/environment.py, which handles the calls, and common/tools.py.

Shapes: Q prompts per step (of several processes, each has its part), G completions per prompt, B = Q*G rows with a
group's rows adjacent, T tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which
the logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from common.advantages import STD_EPS, group_advantages, group_std
from common.calculator_tool import calculator
from common.chat import decode, encode_prompt
from common.environment import CALL_WEIGHTS, State, env_step
from common.experience import Experience, collate
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, is_clipped, probability_ratio
from common.observations import encode_observation
from common.parallel import clip_grad_norm_
from common.policy import Policy
from common.sampling import begin_rows, continue_rows
from common.tools import call_form, schemas
from common.trajectory import Trajectory
from fast.kept_rows import KeptRows

from harness.base.config import Count, GroupSize, InputPath, NotNegative, Positive, RunConfig, Share
from harness.cli.parse import parse_config
from harness.data.order import prompts_of_step
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.statistics import UpdateStatistics, rollout_metrics
from harness.models.context import context_length
from harness.models.loading import load_policy, make_reference
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.task import Task, load_task
from harness.tools.tool_files import check_turns, load_tools
from harness.workers.tool_processes import in_threads


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    max_turns: Count = 3  # turns of the policy per conversation; calls in the last turn are not executed
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
    # the bundled policy that knows tools, "tiny_tools", or any that --model of experiment_base can be
    model: str = "tiny_tools"
    task: str = "calculator"  # questions and rewards: a file of tasks, or the path of your own
    tools: InputPath | None = None  # a Python file whose functions are tools as well, see docs/tools_template.py
    tool_seconds: Positive = 5.0  # time limit of a call of a tool of your own
    tool: bool = True  # offer the calculator; --no-tool asks the same questions without any tool


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__)
    tools = {"calculator": calculator} if config.tool else {}  # functions by name
    tools |= load_tools(config.tools, config.tool_seconds, taken=tools)
    task = load_task(config, CALL_WEIGHTS, schemas(tools))  # the questions, their rewards, and the rows of data
    with start_run(config, task) as run:
        policy = load_policy(config, config.temperature)
        reference = make_reference(policy) if config.kl_weight > 0 else None
        check_turns(policy)
        talk = partial(converse, config, task, tools, policy)
        if not run.has_before:
            run.log_before(evaluate_held_out(config, task, policy, num_samples=8, converse=talk))
        train(config, run, task, policy, reference, talk)
        run.save_final(policy)
        run.finish(evaluate_held_out(config, task, policy, num_samples=8, converse=talk))


def train(
    config: Config,
    run: Run,
    task: Task,
    policy: Policy,
    reference: Policy | None,
    talk: Callable[..., list[Trajectory]],
) -> None:
    """Run all steps, or the steps that a resumed run has left."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    model, optimizer = run.prepare(policy, optimizer)  # one process: unchanged; several: gradients are averaged
    run.restore(policy, optimizer)
    for step in run.steps(config.steps):
        # 1 sample: G conversations about each of Q questions
        prompt_index = prompts_of_step(len(task.train_rows), config.prompts_per_step, step, config.seed)
        key = (config.seed, step)  # decides the random numbers of this step
        trajectories = talk(task.train_rows, prompt_index, config.group_size, key, top_p=config.top_p)
        run.lap("sample")

        # 2 reward: each conversation by itself, by its environment; its return is the weighted sum of the components
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
        statistics = update(config, model, optimizer, experience, step)
        run.lap("update")

        # 6 log, evaluate, checkpoint
        metrics = statistics.metrics() | rollout_metrics(trajectories, returns)
        metrics |= run.costs(num_tokens=sum(completion.num_action_tokens for completion in trajectories))
        if config.eval_every and step % config.eval_every == 0:
            evaluation = evaluate_held_out(config, task, policy, converse=talk)
            metrics |= {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        run.log(step, metrics)
        run.log_samples(step, trajectories, experience, statistics)
        run.checkpoint(step, policy, optimizer)


def converse(
    config: Config,
    task: Task,
    tools: dict[str, Callable[..., str]],
    policy: Policy,
    questions: list[dict],
    prompt_index: list[int],
    group_size: int,
    key: tuple[int, ...],
    top_p: float = 1.0,
    greedy: bool = False,
) -> list[Trajectory]:
    """G conversations about each of the questions that `prompt_index` names: B trajectories, with their rewards."""
    tokenizer, form = policy.tokenizer, call_form(policy.tokenizer)
    asked = [task.messages(questions[index], config.system_prompt) for index in prompt_index]
    prompts = [encode_prompt(tokenizer, messages, task.tools) for messages in asked]
    trajectories = begin_rows(prompts, group_size, prompt_index)
    conversations = [(row, State(task, questions[row.prompt_index], tools, form)) for row in trajectories]
    kept = KeptRows()  # keys and values from turn to turn, as long as these weights are in use
    for turn in range(1, config.max_turns + 1):
        open_ones = [(row, state) for row, state in conversations if not state.is_over]
        sampled = continue_rows(
            policy,
            [row for row, _ in open_ones],
            max_new_tokens=config.max_new_tokens,  # in all turns together; the tools' answers do not count
            max_length=context_length(policy),
            key=key,
            top_p=top_p,
            greedy=greedy,
            generation_batch_size=config.generation_batch_size,
            kept=kept,
        )
        texts = [decode(tokenizer, ids) for ids in sampled]  # for the environment; the row keeps the ids
        for (row, state), ids, text in zip(open_ones, sampled, texts, strict=True):
            row.turns += [("assistant", text)] if ids else []  # none if the tools' answers have filled the context
            is_spent = row.finish_reason == "length" or row.num_action_tokens == config.max_new_tokens
            state.is_last_turn = turn == config.max_turns or is_spent
        results = in_threads(env_step, [state for _, state in open_ones], texts, parallel=config.tools is not None)
        for (row, _), (observation, rewards, done) in zip(open_ones, results, strict=True):
            if done:
                row.rewards = rewards
            else:  # only the tools' answers are rendered and tokenised, and they get mask 0
                row.observe(encode_observation(tokenizer, observation, policy.end_of_turn_ids), context_length(policy))
                row.turns += [("tool", text) for text in observation]
    asked, said = [state.row for _, state in conversations], [state.text for _, state in conversations]
    together = task.reward_together(asked, said, trajectories)  # components that see all conversations at once
    for (row, state), rewards in zip(conversations, together, strict=True):
        row.rewards |= rewards
        row.text = "\n".join(text for role, text in row.turns if role == "assistant")
        row.description = state.describe()  # only logged
    return trajectories


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
