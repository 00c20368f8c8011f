"""Rows of different lengths, laid end to end in one row: no padding, and a prompt that rows share is there only once.

All layers except attention treat each token by itself. Attention must know the borders: a token sees the tokens before
it in its own segment, and all tokens of its prompt, if the prompt is a segment that several rows share. Values and
gradients are the same as for complete rows, up to rounding, and the decoder is called once.

Shapes: B rows, T tokens, L tokens in the packed row, N action tokens; a bucket holds b segments of at most C tokens,
which see at most K tokens each.
"""

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

NAME = "sdpa_with_segments"  # under which transformers find `attend`
FLASH, FLEX = "flash_attention_2", "flex_attention"


class Segment(NamedTuple):
    start: int  # of its tokens in the packed row
    length: int
    prompt: "Segment | None" = None  # the segment before it, if its prompt is a segment


class Bucket(NamedTuple):
    """Segments of similar length, whose attention is computed together: padding costs little here."""

    queries: torch.Tensor  # (b, C) positions in the packed row; padding at the end
    keys: torch.Tensor  # (b, K) the same for the tokens that they see
    mask: torch.Tensor | None  # (b, 1, C, K) which query sees which key; None: causal


class Buckets(NamedTuple):
    buckets: list[Bucket]
    places: torch.Tensor  # (L,) of each token of the packed row among the queries of all buckets, end to end


class PackedRow(NamedTuple):
    ids: list[int]  # (L,)
    positions: list[int]  # (L,) of each token in its own row
    segments: list[Segment]
    places: list[int]  # of the tokens that predict, in the packed row
    flat: list[int]  # and in the flattened (B, T-1)


def hidden_states(
    decoder: nn.Module, sequences: torch.Tensor, action_mask: torch.Tensor, attention: str = "sdpa"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states (N, H) that predict the action tokens, and their positions (N,) in the flattened (B, T-1).

    Args:
        decoder: the model without its LM head, after `use_segments`.
        sequences: (B, T), right-padded.
        action_mask: (B, T-1), 1 where token t+1 counts; at least one does.
        attention: "sdpa" computes buckets, "flex_attention" takes a block mask. "flash_attention_2" takes the borders
            of complete rows: its kernels know no shared prompt.
    """
    device = sequences.device
    row = lay_out(sequences, action_mask, share_prompts=attention != FLASH)
    if attention == FLASH:
        borders = _flash_borders(row.segments, device)
    else:  # a mask of four dimensions is passed on as it is; NaN shows attention that uses it instead of the segments
        segments = (_block_mask if attention == FLEX else _buckets)(row.segments, device)
        borders = {"segments": segments, "attention_mask": torch.full((1, 1, 1, 1), torch.nan, device=device)}
    ids, positions = (torch.tensor([values], device=device) for values in (row.ids, row.positions))
    hidden = decoder(input_ids=ids, position_ids=positions, use_cache=False, **borders).last_hidden_state[0]  # (L, H)
    places, flat = torch.tensor(row.places, device=device), torch.tensor(row.flat, device=device)
    is_action = action_mask.flatten()[flat].bool()
    return hidden[places[is_action]], flat[is_action]


def lay_out(sequences: torch.Tensor, action_mask: torch.Tensor, share_prompts: bool = True) -> PackedRow:
    """The rows that have action tokens, end to end, each up to the token that predicts its last action."""
    width = action_mask.shape[1]
    first = action_mask.argmax(dim=1).tolist()
    last = (width - 1 - action_mask.flip(1).argmax(dim=1)).tolist()
    has_actions, ids = action_mask.any(dim=1).tolist(), sequences.tolist()
    rows = [index for index in range(len(ids)) if has_actions[index]]
    prompts = {index: tuple(ids[index][: first[index]]) for index in rows}  # without the token that predicts the first
    uses = Counter(prompts.values())
    segment_of: dict[tuple[int, ...], Segment] = {}
    packed = PackedRow([], [], [], [], [])

    def add(new: list[int] | tuple[int, ...], position: int, prompt: Segment | None) -> Segment:
        packed.segments.append(Segment(len(packed.ids), len(new), prompt))
        packed.ids.extend(new)
        packed.positions.extend(range(position, position + len(new)))
        return packed.segments[-1]

    for index in rows:
        prompt, end = prompts[index], last[index] + 1
        if share_prompts and prompt and uses[prompt] > 1:
            if prompt not in segment_of:
                segment_of[prompt] = add(prompt, 0, None)
            start = add(ids[index][first[index] : end], first[index], segment_of[prompt]).start
        else:
            start = add(ids[index][:end], 0, None).start + first[index]
        packed.places.extend(range(start, start + end - first[index]))
        packed.flat.extend(range(index * width + first[index], index * width + end))
    return packed


def use_segments(model: nn.Module) -> str | None:
    """Let the model's attention know segments; returns the `attention` of `hidden_states`, None if there is none."""
    attention = model.config._attn_implementation
    if attention == "sdpa":
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation(NAME)
    return {"sdpa": "sdpa", NAME: "sdpa", FLASH: FLASH}.get(attention)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    segments: Buckets | object | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention, of (1, heads, L, size) within segments, and of (B, heads, T, size) without any."""
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    window = kwargs.get("sliding_window")
    if not isinstance(segments, Buckets):
        if window is not None:
            raise ValueError("the block mask knows no sliding window")
        return flex_attention_forward(module, query, key, value, segments, **kwargs)
    buckets, places = segments
    queries, keys = [bucket.queries for bucket in buckets], [bucket.keys for bucket in buckets]
    states_of_buckets = _take(query, queries), _take(key, keys), _take(value, keys)
    outputs = []
    for bucket, *states in zip(buckets, *states_of_buckets, strict=True):
        mask = bucket.mask if window is None else _within(window, bucket, kwargs["position_ids"][0])
        found, _ = sdpa_attention_forward(module, *states, mask, **kwargs)  # (b, C, heads, size)
        outputs.append(found.flatten(0, 1))
    return torch.cat(outputs).index_select(0, places)[None], None


def _take(states: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of (1, heads, L, size), the tokens at the positions (b, C) of each part: (b, heads, C, size).

    All parts at once: each selection has a gradient of the size of the complete row.
    """
    taken = states[0].transpose(0, 1).index_select(0, torch.cat([part.flatten() for part in parts]))
    pieces = taken.split([part.numel() for part in parts])
    return [piece.unflatten(0, part.shape).transpose(1, 2) for piece, part in zip(pieces, parts, strict=True)]


def _buckets(segments: list[Segment], device: torch.device) -> Buckets:
    """The segments in buckets: lengths, and lengths with the prompt, between the same powers of two."""
    groups: dict[tuple[int, ...], list[Segment]] = {}
    for segment in segments:
        prompt = segment.prompt.length if segment.prompt else 0
        key = (prompt > 0, segment.length.bit_length(), (prompt + segment.length).bit_length())
        groups.setdefault(key, []).append(segment)

    def positions(group: list[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        column = torch.arange(max(segment.length for segment in group), device=device)
        start, length = (
            torch.tensor([getattr(segment, name) for segment in group], device=device)[:, None]
            for name in ("start", "length")
        )
        return torch.where(column < length, start + column, 0), column < length  # (b, C), (b, C)

    buckets, is_token = [], []
    for group in groups.values():
        queries, is_query = positions(group)
        is_token.append(is_query.flatten())
        if group[0].prompt is None:
            buckets.append(Bucket(queries, queries, None))
            continue
        prompt, is_prompt = positions([segment.prompt for segment in group])
        rows, size = queries.shape
        is_prompt = is_prompt[:, None, None].expand(rows, 1, size, -1)
        is_before = torch.ones(size, size, dtype=torch.bool, device=device).tril().expand(rows, 1, size, size)
        mask = torch.cat([is_prompt, is_before], dim=3)
        buckets.append(Bucket(queries, torch.cat([prompt, queries], dim=1), mask))
    found = torch.cat(is_token).nonzero()[:, 0]
    places = torch.empty_like(found)
    places[torch.cat([bucket.queries.flatten() for bucket in buckets])[found]] = found
    return Buckets(buckets, places)


def _within(window: int, bucket: Bucket, positions: torch.Tensor) -> torch.Tensor:
    """The bucket's mask for a layer whose tokens see only those less than `window` before them."""
    distance = positions[bucket.queries][:, None, :, None] - positions[bucket.keys][:, None, None, :]  # (b, 1, C, K)
    is_near = distance < window
    return is_near.tril() if bucket.mask is None else is_near & bucket.mask  # padding has position 0: go by columns


def _block_mask(segments: list[Segment], device: torch.device) -> object:
    """The same as a mask of FlexAttention (arXiv 2412.05496), which skips the blocks in which no token sees another."""
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = torch.tensor([segment.length for segment in segments], device=device)
    own = torch.tensor([segment.start for segment in segments], device=device).repeat_interleave(lengths)  # (L,)
    prompt = torch.tensor([(segment.prompt or segment).start for segment in segments], device=device)
    prompt = prompt.repeat_interleave(lengths)  # (L,)

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & ((own[key] == own[query]) | (own[key] == prompt[query]))

    return create_block_mask(sees, None, None, len(own), len(own), device=device)


def _flash_borders(segments: list[Segment], device: torch.device) -> dict:
    """The arguments by which transformers call FlashAttention for rows of different lengths."""
    lengths = [segment.length for segment in segments]
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    names = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    return names | {"max_length_q": max(lengths), "max_length_k": max(lengths)}
