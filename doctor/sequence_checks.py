"""Checks of `action_mask` and `generate_inputs`: which tokens are trained, and how prompts are padded."""

import inspect
from pathlib import Path
from types import ModuleType

import torch

from doctor.adapters import arguments
from doctor.findings import NOT_EXAMINED, OK, TRAP, Finding, UnusableError
from doctor.guard import call

PAD, END, TOOL = 0, 2, 9  # ids; what a tool wrote is TOOL
# (prompt, what was sampled and what tools wrote, whether each of these was sampled), without padding
ROWS = (
    ([5, END, 6], [7, 8, END], [1, 1, 1]),  # the prompt ends a turn too, as chat templates do
    ([5, 6], [7, 8, 11, 12, 13], [1] * 5),  # cut off by the budget
    ([5, END, 6, 11], [END], [1]),  # answers nothing
)
TOOL_ROWS = (
    ([5, 6], [7, END, TOOL, TOOL, 8, END], [1, 1, 0, 0, 1, 1]),
    ([5, END, 6], [7, END, TOOL, 12, 8, END], [1, 1, 0, 0, 1, 1]),
)


def _mask(module: ModuleType, path: Path, rows: tuple, pad: int, **more: torch.Tensor) -> tuple:
    """The user's mask of rows, and what it should be: (B, T-1) bool each, and the prompt lengths."""
    width = max(len(prompt) + len(rest) for prompt, rest, _ in rows) + 2
    sequences = torch.full((len(rows), width), pad)
    sampled = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (prompt, rest, flags) in enumerate(rows):
        sequences[index, : len(prompt) + len(rest)] = torch.tensor(prompt + rest)
        sampled[index, len(prompt) : len(prompt) + len(rest)] = torch.tensor(flags).bool()
    prompt_lengths = torch.tensor([len(prompt) for prompt, _, _ in rows])
    lengths = torch.tensor([len(prompt) + len(rest) for prompt, rest, _ in rows])
    from_tool = torch.arange(width) >= prompt_lengths[:, None]
    from_tool &= (torch.arange(width) < lengths[:, None]) & ~sampled
    values = {
        "sequences": sequences,
        "prompt_lengths": prompt_lengths,
        "pad_id": pad,
        "end_of_turn_ids": [END],
        "lengths": lengths,
        "tool_mask": 1 - from_tool.long(),
    }
    in_order, by_name = arguments(module.action_mask, "action_mask", values, 2)
    result = call("action_mask", path, module.action_mask, *in_order, **by_name)
    shape = (len(rows), width - 1)
    if not isinstance(result, torch.Tensor) or tuple(result.shape) != shape:
        shown = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise UnusableError(
            f"action_mask must return a tensor of shape {shape}, (B, T-1): entry t is about token t+1; not {shown}"
        )
    return result.bool(), sampled[:, 1:], prompt_lengths, lengths, from_tool[:, 1:]


def check_action_mask(module: ModuleType, path: Path) -> list[Finding]:
    """All checks of the user's `action_mask`, with a pad id of its own and with one that ends turns too."""
    name = "action_mask"
    mask, expected, prompts, lengths, _ = _mask(module, path, ROWS, PAD)
    shared, *_ = _mask(module, path, ROWS, END)
    for step, where in ((-1, "before"), (1, "after")):
        if _is_moved(mask, expected, lengths, step):
            sentence = (
                f"The mask is shifted: it is 1 {where} the entry of each sampled token. Entry t is about token t+1."
            )
            first = [int(x[0].nonzero()[0]) for x in (expected, mask)]
            return [Finding("off_by_one", name, TRAP, sentence, *first)]
    columns = torch.arange(mask.shape[1])
    is_prompt, is_padding = columns < prompts[:, None] - 1, columns >= lengths[:, None] - 1
    ends = torch.zeros_like(mask)
    ends[torch.tensor([0, 2]), lengths[torch.tensor([0, 2])] - 2] = True
    findings = [
        Finding("off_by_one", name, OK, "The mask is not shifted."),
        _count(
            "end_of_turn_masked",
            expected & ends,
            mask & ends,
            "The token that ends a turn was sampled, but is not in the mask: nobody learns to stop.",
            "The token that ends a turn is in the mask.",
        ),
        _none("prompt_trained", mask & is_prompt, "prompt tokens"),
        _none("padding_trained", mask & is_padding, "padding"),
    ]
    inner = ~(is_prompt | is_padding | ends)
    findings.append(
        _count(
            "tokens_left_out",
            expected & inner,
            mask & inner,
            "Sampled tokens are not in the mask.",
            "All other sampled tokens are in the mask.",
        )
    )
    findings.append(
        _count(
            "mask_from_pad",
            mask,
            shared,
            "The mask is another one when padding has the id that ends turns: ids decide instead of places.",
            "The mask is the same when padding has the id that ends turns.",
        )
    )
    findings.append(_tool_output(module, path))
    return findings


def _is_moved(mask: torch.Tensor, expected: torch.Tensor, lengths: torch.Tensor, step: int) -> bool:
    """Whether the mask is the expected one moved by `step` entries, which can cut off the end of the longest row."""
    moved = torch.roll(expected, step, dims=1)
    moved[:, 0 if step > 0 else -1] = False
    shorter = lengths < lengths.max()
    return torch.equal(mask[shorter], moved[shorter]) and not bool((mask & ~moved).any())


def _count(check: str, expected: torch.Tensor, got: torch.Tensor, trap: str, ok: str) -> Finding:
    """Two masks that should be equal; the numbers are how many entries are 1, or how many agree if as many are."""
    numbers = int(expected.sum()), int(got.sum())
    if torch.equal(expected, got):
        return Finding(check, "action_mask", OK, ok, *numbers)
    if numbers[0] == numbers[1]:
        numbers = expected.numel(), int((expected == got).sum())
    return Finding(check, "action_mask", TRAP, trap, *numbers)


def _none(check: str, mask: torch.Tensor, what: str) -> Finding:
    """`mask` should be 0 everywhere; `what` names its tokens."""
    return _count(check, mask & False, mask, f"The mask has {what}.", f"The mask has no {what}.")


def _tool_output(module: ModuleType, path: Path) -> Finding:
    check, name = "tool_output_in_loss", "action_mask"
    if "tool_mask" not in inspect.signature(module.action_mask).parameters:
        sentence = "The function has no parameter tool_mask, so that it is for conversations of one turn."
        return Finding(check, name, NOT_EXAMINED, sentence)
    mask, *_, from_tool = _mask(module, path, TOOL_ROWS, PAD)
    return _none(check, mask & from_tool, "tokens that a tool wrote")


def check_generate_inputs(module: ModuleType, path: Path) -> list[Finding]:
    """Prompts of different lengths, one of which has tokens with the id of padding."""
    name = "generate_inputs"
    prompts = [[5, PAD, 6, 7], [8, 6], [PAD, 5, 11]]
    values = {"prompts": [list(prompt) for prompt in prompts], "pad_id": PAD}
    in_order, by_name = arguments(module.generate_inputs, name, values, 2)
    result = call(name, path, module.generate_inputs, *in_order, **by_name)
    shape = (len(prompts), max(map(len, prompts)))
    parts = list(result) if isinstance(result, tuple) else []
    if len(parts) != 2 or any(not isinstance(x, torch.Tensor) or tuple(x.shape) != shape for x in parts):
        raise UnusableError(f"{name} must return two tensors of shape {shape}: the ids, and the attention mask")
    ids, attention = (x.long() for x in parts)
    right = sum(ids[row, : len(prompt)].tolist() == prompt for row, prompt in enumerate(prompts))
    last = sum(int(ids[row, -1]) == prompt[-1] for row, prompt in enumerate(prompts))
    trap = "Prompts are padded on the right: what is sampled first follows padding instead of the prompt."
    status = TRAP if last < len(prompts) and right == len(prompts) else OK
    if status == OK and last < len(prompts):
        trap, status = "The last token of a prompt is not in the last column, from which sampling continues.", TRAP
    sentence = trap if status == TRAP else "Every prompt ends in the last column."
    findings = [Finding("right_padding_generation", name, status, sentence, len(prompts), last)]
    attended, tokens = int(attention.sum()), sum(map(len, prompts))
    status = OK if attended == tokens else TRAP
    trap = "The attention mask is not 1 on every prompt token: tokens with the id of padding are hidden from the model."
    sentence = "The attention mask is 1 on every prompt token, whatever its id." if status == OK else trap
    findings.append(Finding("prompt_attention", name, status, sentence, tokens, attended))
    return findings
