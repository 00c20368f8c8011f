"""An agent in a world with a state: many turns, one reward at the end, and the question which turn earned it.

    for every step:
        reset G copies of each of Q worlds
        turn after turn, until every episode has ended: the policy acts, the world changes and shows what is seen
        credit every turn, and train on it as in tool calling: a turn's tokens share its advantage

    python agents/world/train.py                                         # the bundled policy and the bundled world
    python agents/world/train.py --credit gigpo                          # another answer to the question
    python agents/world/train.py --environment my_world.py               # your own, see docs/environments.md
    python agents/world/train.py --environment gymnasium:FrozenLake-v1
    python -m viewer.diff agents/world

Parent: experiment_multiturn_tool_calling. Read next: turn_credit.py, beside this file, and tasks/thin_ice.py.

Shapes: Q prompts per step (of several processes, each has its part), G completions per prompt, B = Q*G rows with a
group's rows adjacent, T tokens, b rows per micro-batch; entry `[:, t]` of a (B, T-1) tensor is about token t+1, which
the logits at t predict.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from turn_credit import Credit, agreement, check_credit, credit_turns

from common.chat import decode, encode_prompt
from common.episode import CONTEXT_IS_FULL
from common.experience import Experience, collate
from common.keyed import keyed_generator
from common.logprobs import token_log_probs
from common.loss import approx_kl_divergence, clipped_surrogate, is_clipped, masked_mean, probability_ratio
from common.observations import encode_observation
from common.parallel import clip_grad_norm_
from common.policy import Policy
from common.sampling import begin_rows, continue_rows
from common.trajectory import Trajectory
from fast.kept_rows import KeptRows

from harness.base.config import RESOLVED as USUAL
from harness.base.config import Count, GroupSize, LocalPath, NotNegative, OfData, Positive, RunConfig, Share
from harness.cli.parse import parse_config
from harness.data.order import prompts_of_step
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.statistics import UpdateStatistics, rollout_metrics
from harness.models.context import context_length
from harness.models.loading import load_policy, make_reference
from harness.run.run import Run
from harness.run.start import run_main, start_run
from harness.task.task import Task, load_task

# The defaults of flags left at None
RESOLVED = {"tiny": USUAL["tiny"] | {"lr": 1e-4, "max_turn_tokens": 8}}
RESOLVED |= {"full": USUAL["full"] | {"max_new_tokens": 2048, "max_turn_tokens": 256}}


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    ALIASES: ClassVar = {"task": ["--environment"]}

    credit: Credit = "episode"  # who earned the reward: each turn's advantage, see turn_credit.py
    turn_discount: Share = 0.95  # a reward counts this much less for each turn before it; not with "episode"
    process_weight: Positive = 0.1  # what "progress" and "potential" pay for coming nearer, in units of reward
    observation_weight: NotNegative = 0.0  # lambda of ECHO: also learn to predict what the world shows
    log_exact: bool = False  # also log the exact advantages, beside those of --credit; only for the bundled world
    max_turns: Count = 10  # turns of the policy per episode, for rows without a max_turns of their own
    # tokens of one turn: one without end does not spend the episode; None: 8 for the bundled policy, else 256
    max_turn_tokens: Count | None = None
    steps: Count = 80  # training steps: each samples completions, rewards them, and trains on them
    prompts_per_step: Count = 8  # Q: questions per step
    group_size: GroupSize = 8  # G: completions per question, which are compared with one another
    max_new_tokens: Count | None = None  # completion budget in tokens; None: 96 for the bundled policy, else 2048
    temperature: Positive = 1.0  # logits are divided by it, in sampling and in training alike; higher is more varied
    # below 1: draw only from the most probable tokens that together have this much probability; biases the gradient
    top_p: Share = 1.0
    epochs_per_step: Count = 1  # passes over a rollout; with more than one, the clip limits how far the policy moves
    minibatch_size: Count | None = None  # rows per optimizer step, a multiple of --group-size; None: the full rollout
    # rows per pass: changes memory and time, never the update; None: 128 for the bundled policy, else 4
    micro_batch_size: Count | None = None
    # learning rate of AdamW; None: 1e-4 for the bundled policy, else 1e-6, and ten times that with --lora-rank
    lr: Positive | None = None
    weight_decay: NotNegative = 0.0  # weight decay of AdamW
    # a token has no gradient once its ratio has moved by this much in the direction of its advantage
    clip_eps: Positive = 0.2
    kl_weight: NotNegative = 0.0  # beta: weight of the KL penalty for leaving the reference; 0 needs no reference
    max_grad_norm: Positive = 1.0  # a longer gradient is scaled down to this norm
    # the bundled policy that knows the bundled world a little, "tiny_world", or any that --model of base can be
    model: str = "tiny_world"
    # the world: a file with a class Environment, or one of another package, such as gymnasium:FrozenLake-v1
    task: OfData[LocalPath] = "thin_ice"
    environment_seconds: Positive = 5.0  # time limit of a turn in an environment of your own


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, __doc__, RESOLVED)
    task = load_task(config)  # the environment, and the rows of data that it is reset with
    check_credit(config, task.file)
    with start_run(config, task) as run:
        policy = load_policy(config, config.temperature)
        reference = make_reference(policy) if config.kl_weight > 0 else None
        talk = partial(converse, config, task, policy)
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
        # 1 sample: G episodes in each of Q worlds
        prompt_index = prompts_of_step(len(task.train_rows), config.prompts_per_step, step, config.seed)
        key = (config.seed, step)  # decides the random numbers of this step
        trajectories = talk(task.train_rows, prompt_index, config.group_size, key, top_p=config.top_p)
        run.lap("sample")

        # 2 reward: by the environment, turn after turn; an episode's return is their sum, with the other components
        totals = [task.total_reward(completion.rewards) for completion in trajectories]
        returns = torch.tensor(totals).view(-1, config.group_size)  # (Q, G)

        # 3 advantage: of every turn, for all of its tokens
        episodes = [row.episode for row in trajectories]
        credit_turns(config, policy, trajectories)  # a number for each turn of each episode
        experience = collate(trajectories, policy.pad_id, policy.device)  # ragged lists become padded tensors
        experience.advantages = spread([episode.advantages for episode in episodes], experience.action_mask)  # (B, T-1)
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
        metrics = statistics.metrics() | rollout_metrics(trajectories, returns) | agreement(episodes)
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
    policy: Policy,
    worlds: list[dict],
    prompt_index: list[int],
    group_size: int,
    key: tuple[int, ...],
    top_p: float = 1.0,
    greedy: bool = False,
) -> list[Trajectory]:
    """G episodes in each of the worlds that `prompt_index` names: B trajectories, with their rewards."""
    tokenizer, world = policy.tokenizer, task.file
    most = config.max_new_tokens  # tokens in all turns together; what the world shows does not count
    episodes = []
    for index in prompt_index:
        seed = int(keyed_generator("world", *key, index).integers(2**31))  # a group's worlds are the same
        episodes += [world.begin(worlds[index], seed, config.max_turns) for _ in range(group_size)]
    asked = [world.ask(episode.observation, config.system_prompt) for episode in episodes[::group_size]]
    prompts = [encode_prompt(tokenizer, messages) for messages in asked]
    trajectories = begin_rows(prompts, group_size, prompt_index)
    for row, episode in zip(trajectories, episodes, strict=True):
        row.episode = episode
    open_ones, kept = trajectories, KeptRows()  # keys and values from turn to turn, as long as these weights are in use
    while open_ones:
        sampled = continue_rows(
            policy,
            open_ones,
            max_new_tokens=most,
            max_turn_tokens=config.max_turn_tokens,
            max_length=context_length(policy),
            key=key,
            top_p=top_p,
            greedy=greedy,
            generation_batch_size=config.generation_batch_size,
            kept=kept,
        )
        acted = [row for row, ids in zip(open_ones, sampled, strict=True) if ids]
        world.give_up([row.episode for row, ids in zip(open_ones, sampled, strict=True) if not ids], CONTEXT_IS_FULL)
        texts = [decode(tokenizer, ids) for ids in sampled if ids]  # for the world; the row keeps the ids
        world.step_all([row.episode for row in acted], texts)
        for row, text in zip(acted, texts, strict=True):
            row.turns += [("assistant", text)]
        open_ones = [row for row in acted if not row.episode.has_ended and row.num_action_tokens < most]
        for row in open_ones:  # only what the world shows is rendered and tokenised, and it gets mask 0
            seen, is_cut_off = row.episode.observation, row.finish_reason == "length"
            ids = encode_observation(tokenizer, [seen], policy.end_of_turn_ids, role="user", is_cut_off=is_cut_off)
            row.observe(ids, context_length(policy))
            row.turns += [("user", seen)]
    for row in trajectories:
        row.text = "\n".join(row.episode.actions)
        row.rewards, row.description = world.earned(row.episode), world.described(row.episode)
    given, said = [worlds[row.prompt_index] for row in trajectories], [row.text for row in trajectories]
    together = task.reward_together(given, said, trajectories)  # components that see all episodes at once
    for row, rewards in zip(trajectories, together, strict=True):
        row.rewards |= rewards
        row.episode.settle(task.total_reward(row.rewards))
    return trajectories


def spread(numbers: list[list[float]], mask: torch.Tensor) -> torch.Tensor:
    """Each turn's number at all tokens of the turn: (B, T-1), for an action mask (B, T-1); 0 elsewhere."""
    begins = mask.bool() & ~torch.nn.functional.pad(mask[:, :-1], (1, 0)).bool()  # a turn's first token
    width = 1 + max(map(len, numbers))
    table = torch.tensor([[0.0, *row] + [0.0] * (width - 1 - len(row)) for row in numbers])  # (B, turns)
    return table.to(mask.device).gather(1, begins.long().cumsum(dim=1)) * mask


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
    """Each token's term, (b, T-1): (-min(ratio A, clip(ratio) A) + beta KL) / tokens of its row / num_rows.

    With ECHO, each token of the world: -lambda log p / tokens of the world in its row / num_rows.
    """
    mask = micro.action_mask
    ratio = probability_ratio(log_probs, micro.old_log_probs, mask)  # (b, T-1)
    token_loss = clipped_surrogate(ratio, micro.advantages, config.clip_eps)  # (b, T-1)
    diagnostics = {"ratio": ratio, "clipped": is_clipped(ratio, micro.advantages, config.clip_eps)}
    if config.kl_weight > 0:
        diagnostics["kl"] = approx_kl_divergence(log_probs, micro.log_probs_ref, mask)
        token_loss = token_loss + config.kl_weight * diagnostics["kl"]
    terms = token_loss * mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
    if config.observation_weight > 0:
        shown = micro.observation_mask
        diagnostics["surprise"] = -masked_mean(log_probs, shown, dim=1)[:, None]  # (b, 1) nats per token of the world
        terms -= config.observation_weight * log_probs * shown / shown.sum(dim=1, keepdim=True).clamp(min=1)
    return terms / num_rows, diagnostics


def update(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer, experience: Experience, step: int
) -> UpdateStatistics:
    """Train on one rollout: some epochs over shuffled minibatches, one optimizer step each."""
    statistics = UpdateStatistics(config.max_grad_norm)
    for epoch in range(config.epochs_per_step):
        key = (config.seed, step, epoch)  # decides the shuffle
        for index, minibatch in enumerate(experience.minibatches(config.minibatch_size, config.group_size, key)):
            optimizer.zero_grad()
            has_other_terms = config.kl_weight > 0 or config.observation_weight > 0  # for tokens without advantage, too
            for micro in minibatch.split(config.micro_batch, skip_zero_advantages=not has_other_terms):
                tokens = micro.action_mask + (micro.observation_mask if config.observation_weight > 0 else 0)
                log_probs, entropy = model(micro.sequences, tokens)  # (b, T-1) each, of the given tokens
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
