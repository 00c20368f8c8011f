"""Sampling: Q prompts in, G completions of each out. `Engine.sample` of harness/engines has the same signature.

A prompt is encoded once and its cache repeated for the group; a row that has ended its turn leaves the batch; every
token is drawn with a random number that belongs to its row alone. So batching changes no sample, except where rounding
in the logits moves a token across a boundary.
"""

import math
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import torch

from common.keyed import keyed_generator
from common.policy import Policy
from common.stop_texts import ends_turn
from common.trajectory import Trajectory
from fast.inverse_cdf import invert_cdf
from fast.sharded_weights import gathered_weights

if TYPE_CHECKING:
    from fast.cache import RowCache
    from fast.kept_rows import KeptRows

T = TypeVar("T")


def sample(
    policy: Policy,
    prompts: list[list[int]],
    group_size: int,
    *,
    max_new_tokens: int,
    key: tuple[int, ...],
    prompt_index: list[int] | None = None,
    rows: range | None = None,
    top_p: float = 1.0,
    greedy: bool = False,
    generation_batch_size: int | None = None,
) -> list[Trajectory]:
    """Sample `group_size` completions of every prompt.

    Args:
        policy: its temperature is the sampling temperature; its end-of-turn ids and stop texts end a completion.
        prompts: Q lists of ids, of any lengths.
        group_size: G.
        max_new_tokens: the completion budget; a row that reaches it has finish_reason "length".
        key: (seed, step). A row's random numbers depend only on it, on the prompt's index and on the completion's
            index.
        prompt_index: names the prompts, one for each; by default 0..Q-1.
        rows: which of the Q*G rows to sample: a rank's part, which may begin or end within a group. None: all.
        top_p: draw from the smallest set of tokens with at least this probability. The recorded log-probs still refer
            to the full distribution.
        greedy: take the most probable token instead of drawing one.
        generation_batch_size: completions sampled at the same time, in complete groups if it is that large. It bounds
            the memory of the cache and changes no sample. None: all.

    Returns:
        B trajectories, one for each of `rows`, in the order of `prompts`, a group's rows adjacent.

    Raises:
        ValueError: a prompt is empty, or `prompt_index` does not have one index per prompt.
    """
    trajectories = begin_rows(prompts, group_size, prompt_index, rows)
    size = generation_batch_size or len(prompts) * group_size or 1
    batches = in_groups(trajectories, size - size % group_size if size >= group_size else size, rows)
    _continue_batches(policy, batches, (max_new_tokens, math.inf, math.inf), key, top_p, greedy)
    return trajectories


def in_groups(items: list[T], size: int, numbers: range | None = None) -> list[list[T]]:
    """Items with consecutive numbers, by group of `size` numbers; the first and the last group can be incomplete.

    >>> in_groups(list("abcde"), 2, range(3, 8))
    [['a'], ['b', 'c'], ['d', 'e']]
    """
    paired = groupby(zip(numbers or range(len(items)), items, strict=True), lambda pair: pair[0] // size)
    return [[item for _, item in group] for _, group in paired]


def begin_rows(
    prompts: list[list[int]], group_size: int, prompt_index: list[int] | None = None, rows: range | None = None
) -> list[Trajectory]:
    """Trajectories that hold their prompts only. Arguments, order and errors as in `sample`."""
    prompt_index = list(range(len(prompts))) if prompt_index is None else prompt_index
    if len(prompt_index) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(prompt_index)} entries in prompt_index")
    if not all(prompts):
        raise ValueError(f"prompt {prompt_index[prompts.index([])]} has no tokens")
    trajectories = []
    for row in range(len(prompts) * group_size) if rows is None else rows:
        prompt, completion = divmod(row, group_size)
        ids, num_ids = list(prompts[prompt]), len(prompts[prompt])
        trajectories.append(Trajectory(ids, num_ids, [0] * num_ids, [0.0] * num_ids, prompt_index[prompt], completion))
    return trajectories


def continue_rows(
    policy: Policy,
    rows: list[Trajectory],
    *,
    max_new_tokens: int,
    key: tuple[int, ...],
    max_turn_tokens: float = math.inf,
    max_length: float = math.inf,
    top_p: float = 1.0,
    greedy: bool = False,
    generation_batch_size: int | None = None,
    kept: "KeptRows | None" = None,
) -> list[list[int]]:
    """Sample one more turn of every row, after its present ids. Arguments as in `sample`, and:

    Args:
        rows: B trajectories, which grow in place. Rows with the same ids are encoded once.
        max_new_tokens: the completion budget of *all* turns of a row; the tools' answers do not count. A row that has
            reached it is left as it is, with finish_reason "length".
        key: the same as for the earlier turns. A row's n-th token is drawn with its n-th random number, whatever its
            turn.
        max_turn_tokens: the budget of this turn, as far as that of all turns allows it.
        max_length: of all ids of a row: the model's context.
        kept: holds the keys and values of these rows from turn to turn, so that only a row's new tokens are run; a new
            `KeptRows()` for each rollout. It holds one batch: rows of several batches are run again.

    Returns:
        The ids that were appended to each row.
    """
    lengths = [len(row.ids) for row in rows]
    size = generation_batch_size or len(rows) or 1
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    most = (max_new_tokens, max_turn_tokens, max_length)
    _continue_batches(policy, batches, most, key, top_p, greedy, kept)
    return [row.ids[length:] for row, length in zip(rows, lengths, strict=True)]


def _continue_batches(
    policy: Policy,
    batches: list[list[Trajectory]],
    most: tuple[float, float, float],  # tokens: of all turns, of this one, and with the prompt
    key: tuple[int, ...],
    top_p: float,
    greedy: bool,
    kept: "KeptRows | None" = None,
) -> None:
    max_new_tokens, max_turn_tokens, max_length = most
    policy.eval()  # in training mode gradient checkpointing would switch the cache off
    exact = torch.float32 if policy.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    # Weights that are gathered in PyTorch's inference mode could no longer be trained, so gather them before it.
    with gathered_weights(policy), policy.inference():
        for batch in batches:
            rows, budgets = [], []
            for row in batch:
                row.finish_reason = "length"  # until it ends its turn
                budget = int(min(max_new_tokens - row.num_action_tokens, max_turn_tokens, max_length - len(row.ids)))
                if budget > 0:
                    rows.append(row)
                    budgets.append(budget)
            if not rows:
                continue
            draws = None if greedy else _uniforms(rows, max(budgets), key).to(policy.device, exact)
            with policy.autocast():  # once around the loop: it keeps the cast weights until it is left
                _complete(policy, rows, budgets, top_p, draws, kept)


def _complete(
    policy: Policy,
    rows: list[Trajectory],
    budgets: list[int],
    top_p: float,
    uniforms: torch.Tensor | None,
    kept: "KeptRows | None" = None,
) -> None:
    """Append sampled tokens to every row of one batch, at most `budgets[b]` to row b; a stop text lowers it."""
    # not at the top: `--help` needs neither, and need not wait for transformers, which the first imports
    from fast.cache import RowCache
    from fast.decoding import decoding_step

    beginnings = [tuple(row.ids) for row in rows]
    index_of = {ids: index for index, ids in enumerate(dict.fromkeys(beginnings))}
    owner = torch.tensor([index_of[ids] for ids in beginnings], device=policy.device)  # (B,)
    cache = RowCache()
    sequences, attention_mask = left_pad(list(index_of), policy.pad_id, policy.device)  # (U, P), (U, P)
    known = 0 if kept is None else kept.fill(cache, list(dict(zip(beginnings, rows, strict=True)).values()))
    logits = next_logits(policy, sequences[:, known:], attention_mask, cache)[owner]  # (B, V)
    cache.batch_select_indices(owner)  # a prompt is run once; its keys and values serve the group
    attention_mask = attention_mask[owner]  # (B, P), one column wider each round
    step = decoding_step(policy.model, attention_mask.shape[1] + max(budgets))
    end_of_turn = torch.tensor(policy.end_of_turn_ids, device=policy.device)
    turns = [row.newest_turn for row in rows] if policy.stop_texts else []  # the ids so far
    active = torch.arange(len(rows), device=policy.device)  # the rows that are still in the batch
    last = torch.tensor(budgets, device=policy.device) - 1  # (B,) the position of a row's last token
    drawn = torch.zeros(len(rows), max(budgets), dtype=torch.long, device=policy.device)
    drawn_log_probs = torch.zeros(drawn.shape, device=policy.device)

    for position in range(max(budgets)):
        u = None if uniforms is None else uniforms[active, position]
        ids, log_probs = _draw(logits, policy.temperature, top_p, u)  # (active,), (active,)
        drawn[active, position], drawn_log_probs[active, position] = ids, log_probs
        ended = torch.isin(ids, end_of_turn) | (position >= last[active])
        if policy.stop_texts:
            for place, (row, i) in enumerate(zip(active.tolist(), ids.tolist(), strict=True)):
                turns[row].append(i)
                if ends_turn(policy.tokenizer, turns[row], policy.stop_texts):
                    ended[place], budgets[row], rows[row].finish_reason = True, position + 1, "stop"
        if kept is not None:
            kept.put([rows[row] for row in active[ended].tolist()], cache, ended, attention_mask)
        if ended.all():
            break
        if ended.any():
            order = cache.drop_rows(ended)
            active, ids, attention_mask = active[order], ids[order], attention_mask[order]
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(active), 1)], dim=1)
        logits = next_logits(policy, ids[:, None], attention_mask, cache, step)  # (active, V)
    _record(rows, budgets, drawn, drawn_log_probs, policy.end_of_turn_ids)


def left_pad(prompts: list[tuple[int, ...]], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (U, P) of the prompts, padded on the left: every row's next token is at the same position."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def next_logits(
    policy: Policy,
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: "RowCache",
    step: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Feed `ids` (rows, new tokens) after the cached tokens; the logits of the token that follows: (rows, V)."""
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]  # left padding does not count
    inputs = {"input_ids": ids, "attention_mask": attention_mask, "position_ids": positions, "past_key_values": cache}
    return policy.next_logits(step, **inputs)


def _draw(
    logits: torch.Tensor, temperature: float, top_p: float, uniforms: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverse CDF, or the most probable one if `uniforms` is None.

    Lay the tokens' probabilities end to end on [0, 1) and take the token whose interval contains the uniform number.
    Returns (rows,) ids and (rows,) their log-probabilities in nats, under logits / temperature in float32.

    >>> logits = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(3, 3)
    >>> _draw(logits, 1.0, 1.0, torch.tensor([0.2, 0.3, 0.9]))[0]
    tensor([0, 1, 2])
    """
    log_probs = (logits.float() / temperature).log_softmax(dim=-1)  # (rows, V)
    if uniforms is None:
        ids = log_probs.argmax(dim=-1)
    else:
        probs = log_probs.exp()
        ids = invert_cdf(probs * _nucleus(probs, top_p) if top_p < 1 else probs, uniforms)
    return ids, log_probs.gather(-1, ids[:, None])[:, 0]


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which tokens form the smallest set with at least `top_p` of the probability: (rows, V) bool."""
    sorted_probs, order = probs.sort(dim=-1, descending=True)
    before = sorted_probs.cumsum(dim=-1) - sorted_probs  # the probability of all more probable tokens
    return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, before < top_p)


def _uniforms(rows: list[Trajectory], width: int, key: tuple[int, ...]) -> torch.Tensor:
    """Numbers in [0, 1) for the next `width` tokens of every row: (B, width), each row's from its own key."""
    numbers = []
    for row in rows:
        start = row.num_action_tokens
        generator = keyed_generator("tokens", *key, row.prompt_index, row.completion_index)
        numbers.append(torch.from_numpy(generator.random(start + width)[start:]))
    return torch.stack(numbers)


def _record(
    rows: list[Trajectory],
    budgets: list[int],
    drawn: torch.Tensor,
    log_probs: torch.Tensor,
    end_of_turn_ids: list[int],
) -> None:
    """Write each row's ids `drawn` (B, C) up to its end of turn or its budget, with their log-probs."""
    for row, budget, ids, values in zip(rows, budgets, drawn.tolist(), log_probs.tolist(), strict=True):
        ids = ids[:budget]
        end = next((position for position, i in enumerate(ids) if i in end_of_turn_ids), None)
        if end is not None:
            ids, row.finish_reason = ids[: end + 1], "stop"
        row.act(ids, values[: len(ids)])
