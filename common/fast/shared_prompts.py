"""Rows that begin with the same prompt: the prompt is encoded once, and every completion continues from there.

The G completions of a group begin with the same prompt. Attention is causal, so the prompt's keys and values do not
depend on the completion: they are computed once and repeated for the rows of the group. Only the completions are then
run against them, in batches of similar length. Values and gradients equal those of complete rows up to rounding, and
each prompt and each completion token is processed once.

Shapes: B rows, T tokens, U different prompts of at most P tokens, C completion tokens of a batch, N action tokens.
"""

from typing import NamedTuple

import torch
from torch import nn

# How many completion tokens, including padding, are run at once. More would no longer fit a CPU's caches (we measured
# batches of 16 rows to be twice as fast as batches of 64). A GPU needs many; we have not measured how many.
TOKENS_AT_ONCE = {"cpu": 512, "cuda": 16_384}


class _Row(NamedTuple):
    prompt: tuple[int, ...]  # all tokens before the position that predicts the first action token
    ids: list[int]  # the tokens from that position (the prompt's last token) to the one that predicts the last action


def hidden_states(
    decoder: nn.Module, sequences: torch.Tensor, action_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The hidden states that predict the action tokens, if enough prompts are shared; else None.

    Args:
        decoder: the model without its LM head.
        sequences: (B, T), right-padded.
        action_mask: (B, T-1), 1 where token t+1 counts.

    Returns:
        (N, H) hidden states, and (N,) the position of each in the flattened (B, T-1). None if there are fewer than two
        rows per prompt on average: running complete rows is then just as fast.
    """
    rows = _split_rows(sequences, action_mask)
    prompts = list(dict.fromkeys(row.prompt for row in rows.values()))
    if 2 * len(prompts) > len(rows) or not any(prompts):
        return None
    cache, prompt_mask = _encode(decoder, prompts, sequences.device)  # (U, P)
    index_of = {prompt: index for index, prompt in enumerate(prompts)}
    states, places = [], []
    for batch in _batches(rows, TOKENS_AT_ONCE.get(sequences.device.type, TOKENS_AT_ONCE["cuda"])):
        batch_rows = [rows[index] for index in batch]
        owner = torch.tensor([index_of[row.prompt] for row in batch_rows], device=sequences.device)
        hidden = _continue(decoder, cache, prompt_mask, owner, [row.ids for row in batch_rows])  # (b, C, H)
        first = torch.tensor([len(row.prompt) for row in batch_rows], device=sequences.device)
        columns = first[:, None] + torch.arange(hidden.shape[1], device=sequences.device)  # (b, C) of the (B, T-1)
        flat = torch.tensor(batch, device=sequences.device)[:, None] * action_mask.shape[1] + columns
        is_inside = columns < action_mask.shape[1]
        is_action = torch.where(is_inside, action_mask.flatten()[flat.clamp(max=action_mask.numel() - 1)], 0).bool()
        states.append(hidden[is_action])
        places.append(flat[is_action])
    return torch.cat(states), torch.cat(places)


def _split_rows(sequences: torch.Tensor, action_mask: torch.Tensor) -> dict[int, _Row]:
    """Prompt and continuation of every row that has an action token, by the row's index."""
    width = action_mask.shape[1]
    first = action_mask.argmax(dim=1).tolist()
    last = (width - 1 - action_mask.flip(1).argmax(dim=1)).tolist()
    has_actions = action_mask.any(dim=1).tolist()
    ids = sequences.tolist()
    return {
        index: _Row(tuple(row[: first[index]]), row[first[index] : last[index] + 1])
        for index, row in enumerate(ids)
        if has_actions[index]
    }


def _batches(rows: dict[int, _Row], tokens_at_once: int) -> list[list[int]]:
    """The rows' indices, in batches of similar length: at most `tokens_at_once` tokens each, or a single row."""
    batches: list[list[int]] = [[]]
    for index in sorted(rows, key=lambda index: len(rows[index].ids)):
        if batches[-1] and (len(batches[-1]) + 1) * len(rows[index].ids) > tokens_at_once:
            batches.append([])
        batches[-1].append(index)
    return batches


def _encode(decoder: nn.Module, prompts: list[tuple[int, ...]], device: torch.device):
    """The keys and values of all left-padded prompts, and the mask (U, P), which is 0 on padding."""
    from transformers import DynamicCache  # imported late: it takes seconds, and `--help` should not wait for it

    ids, mask = left_pad(prompts, 0, device)
    cache = DynamicCache()
    decoder(input_ids=ids, attention_mask=mask, position_ids=_positions(mask), past_key_values=cache, use_cache=True)
    return cache, mask


def _continue(
    decoder: nn.Module, cache, prompt_mask: torch.Tensor, owner: torch.Tensor, ids: list[list[int]]
) -> torch.Tensor:
    """Run each row's ids after its prompt: hidden states (b, C, H)."""
    from transformers import DynamicCache

    prompt_mask = prompt_mask[owner]
    width = int(prompt_mask.sum(dim=1).max())  # the longest prompt of these rows
    prompt_mask = prompt_mask[:, prompt_mask.shape[1] - width :]
    own = DynamicCache()
    for number, layer in enumerate(cache.layers):
        start = layer.keys.shape[-2] - width
        own.update(*(x[:, :, start:].index_select(0, owner) for x in (layer.keys, layer.values)), number)
    longest = max(map(len, ids))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=owner.device)
    mask = torch.cat([prompt_mask, torch.ones_like(padded)], dim=1)  # padding at the end: attention is causal
    return decoder(
        input_ids=padded,
        attention_mask=mask,
        position_ids=_positions(mask)[:, width:],
        past_key_values=own,
        use_cache=True,
    ).last_hidden_state


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """The position of each token in its own row: padding on the left does not count."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def left_pad(
    prompts: list[list[int]] | list[tuple[int, ...]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (U, P) of the prompts, padded on the left: every row's next token is at the same position."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask
