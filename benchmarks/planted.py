"""The traps of docs/traps.md, each as a context that plants the mistake in an experiment, for benchmarks/traps.py.

A context plants a mistake at run time by replacing functions that a train.py calls, and removes it at its end: the
library itself has no switch for being wrong. tests/unit/test_docs.py shows that each mistake changes a number, and
leaves nothing behind.

Shapes as in the experiments: B rows, T tokens, Q prompts, G completions per prompt.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from unittest.mock import patch

import torch
from torch import nn

import common.policy
import common.sampling
from common.experience import Experience, collate
from common.loss import approx_kl_divergence
from common.policy import Policy

from harness.models.loading import load_policy, make_reference

Plant = Callable[[ModuleType], AbstractContextManager]  # takes the train.py that gets the mistake
DROPOUT = 0.1  # as in the configs of GPT-2, and often for LoRA


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where traps are measured: flags under which the mistake can have an effect, and the correct runs beside it."""

    label: str
    experiment: str = "experiment_base"
    flags: tuple[str, ...] = ()
    plant: Plant = nullcontext  # additions that the correct runs need and the experiment lacks


@dataclass(frozen=True, kw_only=True)
class Trap:
    title: str
    plant: Plant
    test: str  # in this repository: it fails if the library has the mistake
    setting: str = "default"  # of SETTINGS
    in_evaluation: bool = False  # the mistake affects sampling, and therefore the run's evaluations, too


replaced = patch.multiple  # replaces attributes of a module or a class within the context


def with_mask(change: Callable[[Experience, list], torch.Tensor]) -> Plant:
    """Make `change(experience, trajectories)` return the action mask (B, T-1)."""

    def plant(train: ModuleType) -> AbstractContextManager:
        def collate_wrongly(trajectories: list, pad_id: int, device: torch.device | str = "cpu") -> Experience:
            experience = collate(trajectories, pad_id, device)
            experience.action_mask = change(experience, trajectories)
            return experience

        return replaced(train, collate=collate_wrongly)

    return plant


def without_end_of_turn(experience: Experience, trajectories: list) -> torch.Tensor:
    """Completions are masked up to their end-of-turn token, exclusive."""
    ends = [row.ids[-1] for row in trajectories if row.finish_reason == "stop"]
    ends = torch.tensor(ends, dtype=torch.long, device=experience.sequences.device)
    return experience.action_mask * ~torch.isin(experience.sequences[:, 1:], ends)


@contextmanager
def mask_from_pad(train: ModuleType) -> Iterator[None]:
    """Pad is the end-of-turn token, and the masks of attention and loss are both `sequences != pad`."""

    def load_with_pad(*arguments) -> Policy:
        policy = load_policy(*arguments)
        policy.pad_id = policy.end_of_turn_ids[0]
        return policy

    def hidden_states(policy: Policy, sequences: torch.Tensor, action_mask: torch.Tensor) -> tuple:
        mask = (sequences != policy.pad_id).long()
        hidden = policy.model.get_decoder()(sequences, attention_mask=mask, use_cache=False).last_hidden_state
        positions = action_mask.flatten().nonzero()[:, 0]
        return hidden[:, :-1].flatten(0, 1)[positions], positions

    with (
        replaced(train, load_policy=load_with_pad),
        with_mask(without_end_of_turn)(train),
        replaced(common.policy.Policy, _hidden_states=hidden_states),
    ):
        yield


def no_temperature(train: ModuleType) -> AbstractContextManager:
    """Tokens are drawn at the temperature, but log-probs come from the unscaled logits."""
    score = common.policy.log_probs_and_entropy

    def score_without(hidden, targets, head, temperature, *others):
        return score(hidden, targets, head, 1.0, *others)

    return replaced(common.policy, log_probs_and_entropy=score_without)


def equal_rewards_noise(train: ModuleType) -> AbstractContextManager:
    """Advantages group by group in float32, with 1e-8 as the only protection from a standard deviation of 0."""

    def advantages(returns: torch.Tensor) -> torch.Tensor:
        return torch.stack([group - group.mean() for group in returns])

    def std(returns: torch.Tensor) -> torch.Tensor:
        return torch.stack([group.std() for group in returns])[:, None]

    return replaced(train, group_advantages=advantages, group_std=std, STD_EPS=1e-8)


def std_wrong_axis(train: ModuleType) -> AbstractContextManager:
    """The standard deviation (1, G) over prompts instead of (Q, 1) over a prompt's completions: both broadcast."""
    return replaced(train, group_std=lambda returns: returns.double().std(dim=0, keepdim=True))


def reference_dropout(train: ModuleType) -> AbstractContextManager:
    """The reference applies dropout to the layers' outputs to the residual stream, as GPT-2 does in training mode."""

    def drop(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(output, DROPOUT, training=True)

    def make_in_training_mode(policy: Policy) -> Policy:
        reference = make_reference(policy)
        for layer in reference.model.get_decoder().layers:
            layer.self_attn.o_proj.register_forward_hook(drop)
            layer.mlp.down_proj.register_forward_hook(drop)
        return reference

    return replaced(train, make_reference=make_in_training_mode)


def kl_over_padding(train: ModuleType) -> AbstractContextManager:
    """The KL penalty is averaged over all entries of the padded (b, T-1), including prompt and padding."""

    right = train.policy_loss

    def loss(config, log_probs: torch.Tensor, micro: Experience, num_rows: int) -> tuple[torch.Tensor, dict]:
        surrogate, diagnostics = right(replace(config, kl_weight=0.0), log_probs, micro, num_rows)
        kl = approx_kl_divergence(log_probs, micro.log_probs_ref, micro.action_mask)
        return surrogate + config.kl_weight * kl / kl.shape[1] / num_rows, diagnostics | {"kl": kl}

    return replaced(train, policy_loss=loss)


@contextmanager
def per_token(train: ModuleType, *, by_micro_batch: bool = False) -> Iterator[None]:
    """The loss is the mean over all tokens of the minibatch; wrongly: the mean of its micro-batches' means."""
    right, split, seen = train.policy_loss, Experience.split, {}

    def split_and_count(minibatch: Experience, *arguments, **options) -> Iterator[Experience]:
        parts = list(split(minibatch, *arguments, **options))
        seen.update(tokens=sum(part.action_mask.sum() for part in parts), parts=len(parts))
        yield from parts

    def loss(config, log_probs: torch.Tensor, micro: Experience, num_rows: int) -> tuple[torch.Tensor, dict]:
        terms, diagnostics = right(config, log_probs, micro, num_rows)
        lengths = micro.action_mask.sum(dim=1, keepdim=True)  # (b, 1)
        token_loss = terms * lengths * num_rows  # without the two denominators of GRPO
        return token_loss / (lengths.sum() * seen["parts"] if by_micro_batch else seen["tokens"]), diagnostics

    with replaced(Experience, split=split_and_count), replaced(train, policy_loss=loss):
        yield


def behind_the_prompt(experience: Experience, trajectories: list) -> torch.Tensor:
    """Everything after the prompt is trained, including tool output."""
    position = torch.arange(experience.action_mask.shape[1], device=experience.sequences.device)
    return experience.attention_mask[:, 1:] * (position >= experience.prompt_lengths[:, None] - 1)


def right_padding(train: ModuleType) -> AbstractContextManager:
    """Prompts of one batch are padded on the right, so that shorter ones continue from padding."""
    left_pad = common.sampling.left_pad

    def right_pad(prompts, pad_id, device) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = left_pad([prompt[::-1] for prompt in prompts], pad_id, device)
        return ids.flip(1), mask.flip(1)

    return replaced(common.sampling, left_pad=right_pad)


SETTINGS = {
    "default": Setting(label="experiment_base"),
    "temperature": Setting(label="temperature 0.7", flags=("--temperature", "0.7")),
    "weights": Setting(
        label="0.7 for a right answer, 0.2 for its format", flags=("--reward-weight", "correct=0.7", "format=0.2")
    ),
    "token_mean": Setting(
        label="mean over all tokens, micro-batches of 16 rows", flags=("--micro-batch-size", "16"), plant=per_token
    ),
    "kl": Setting(label="KL weight 0.5", flags=("--kl-weight", "0.5")),
    "tools": Setting(label="experiment_multiturn_tool_calling", experiment="experiment_multiturn_tool_calling"),
}
TRAPS = {
    "end_of_turn_masked": Trap(
        title="end-of-turn token masked out",
        plant=with_mask(without_end_of_turn),
        test="unit/test_logprobs.py::test_the_end_of_turn_token_is_trained_even_as_pad_id",
    ),
    "mask_from_pad": Trap(
        title="masks from ids != pad, with pad = end of turn",
        plant=mask_from_pad,
        test="unit/test_logprobs.py::test_prompt_tokens_equal_to_pad_keep_their_attention",
    ),
    "off_by_one": Trap(
        title="mask shifted by one",
        plant=with_mask(lambda experience, _: nn.functional.pad(experience.action_mask, (1, -1))),
        test="unit/test_experience.py::test_collate_shifts_masks_and_log_probs_to_their_targets",
    ),
    "prompt_trained": Trap(
        title="prompt tokens trained",
        plant=with_mask(lambda experience, _: experience.attention_mask[:, 1:]),
        test="unit/test_sampling.py::test_sampling_records_all_fields_of_a_row",
    ),
    "tool_output_in_loss": Trap(
        title="tool output in the loss",
        plant=with_mask(behind_the_prompt),
        setting="tools",
        test="unit/test_experience.py::test_masks_are_carried_over_and_never_rebuilt_from_ids",
    ),
    "no_temperature": Trap(
        title="no temperature in the log-probs",
        plant=no_temperature,
        setting="temperature",
        test="unit/test_sampling.py::test_recorded_log_probs_are_those_that_training_computes",
    ),
    "right_padding_generation": Trap(
        title="right padding in generation",
        plant=right_padding,
        in_evaluation=True,
        test="unit/test_sampling.py::test_greedy_completions_equal_a_loop_without_cache",
    ),
    "equal_rewards_noise": Trap(
        title="equal rewards, noisy advantages",
        plant=equal_rewards_noise,
        setting="weights",
        test="unit/test_experience.py::test_equal_returns_give_exactly_zero_for_every_group_size",
    ),
    "std_wrong_axis": Trap(
        title="standard deviation over the wrong axis",
        plant=std_wrong_axis,
        test="unit/test_experience.py::test_advantages_equal_a_slow_loop",
    ),
    "micro_batch_mean": Trap(
        title="loss averaged per micro-batch",
        plant=partial(per_token, by_micro_batch=True),
        setting="token_mean",
        test="unit/test_loss.py::test_losses_of_micro_batches_add_up",
    ),
    "kl_over_padding": Trap(
        title="KL averaged over padding",
        plant=kl_over_padding,
        setting="kl",
        test="unit/test_loss.py::test_terms_and_pushes_equal_a_slow_loop",
    ),
    "reference_dropout": Trap(
        title="reference with dropout",
        plant=reference_dropout,
        setting="kl",
        test="models/test_loading.py::test_the_reference_is_a_frozen_copy",
    ),
}


@contextmanager
def planted(name: str, train: ModuleType) -> Iterator[None]:
    """Plant the mistake in TRAPS, or the additions for the correct runs of SETTINGS, in `train` within the context."""
    trap = TRAPS.get(name)
    with ExitStack() as stack:
        stack.enter_context(SETTINGS[trap.setting if trap else name].plant(train))
        if trap:
            stack.enter_context(trap.plant(train))
        yield
