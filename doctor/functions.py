"""Checks of functions other than `policy_loss`: advantages, log-probs, masks, and the inputs of `generate`."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import nn

from doctor.findings import NOT_EXAMINED, NOTE, OK, TRAP, Finding, UnusableError, compare, either, farthest, number
from doctor.user_file import UserFile, parameters_of
from doctor.weights import shifted

SMALL = 0.01  # compared with advantages of about 1; a standard deviation plus 1e-4 leaves 0.001
RETURNS = torch.tensor([[1.0, 0.0, 0.0, 0.5], [0.1, 1.0, 0.7, 1.0], [2.0, 5.0, 3.0, 4.0]])  # Q = 3 groups, G = 4
OTHER_RETURNS = torch.cat([RETURNS[:2], torch.tensor([[20.0, -50.0, 3.0, 7.0]])])  # the last group is different
DIVISORS = {  # for returns minus their group's mean. Dr. GRPO: arXiv 2503.20783; RLOO: arXiv 2402.14740
    "GRPO's: divided by the group's standard deviation, with G - 1 (as torch.std has it)": RETURNS.double().std(dim=1),
    "GRPO's: divided by the group's standard deviation, with G (as numpy.std has it), which makes them 15 % larger "
    "than G - 1 does when G = 4": RETURNS.double().std(dim=1, correction=0),
    "Dr. GRPO's: not divided by a standard deviation": torch.ones(3),
    "RLOO's: each return minus the mean of the others": torch.ones(3) * 3 / 4,
}


def check_advantages(file: UserFile) -> Iterator[Finding]:
    """All checks of the user's `advantages(returns)`."""
    result = _advantages(file, RETURNS)
    trap = (
        "Other returns in one group change another's advantages: mean or standard deviation are over the wrong axis. "
        "(Is it for one group at a time? Then hand over torch.stack([yours(group) for group in returns]).)"
    )
    ok = "A group's advantages depend on its own returns only."
    own = compare("std_wrong_axis", result[:2], _advantages(file, OTHER_RETURNS)[:2], trap, ok)
    yield own
    if own.status == TRAP:
        sentence = "Not examined before another trap is gone: std_wrong_axis."
        others = ("baseline", "advantage_sign", "divisor", "equal_rewards_noise")
        yield from (Finding(check, NOT_EXAMINED, sentence) for check in others)
        return
    _, worst = farthest(torch.zeros(3), result.sum(dim=1))
    trap = "The advantages of a group do not add up to 0: its mean is no baseline."
    yield compare("baseline", 0.0, worst * (abs(worst) > 1e-4), trap, "The advantages of a group add up to 0.")
    centered = RETURNS.double() - RETURNS.double().mean(dim=1, keepdim=True)
    expected, got = float(centered[0, 0]), float(result[0, 0])
    trap, ok = (f"The best return of a group has {a} positive advantage." for a in ("no", "a"))
    yield either("advantage_sign", got > 0, trap, ok, expected, got)
    known = "none that the doctor knows"
    for name, divisors in DIVISORS.items():
        known = name if torch.allclose(result, centered / divisors[:, None], rtol=5e-3, atol=1e-4) else known
    yield Finding("divisor", NOTE, f"The advantages are {known}.")
    yield _equal_rewards(file)


def _advantages(file: UserFile, returns: torch.Tensor) -> torch.Tensor:
    """The user's advantages for returns (Q, G), as float64."""
    result = file.tensor("advantages", {"returns": returns.clone()}, 1, tuple(returns.shape))
    if not result.isfinite().all():
        raise UnusableError("advantages returned a number that is not finite")
    return result.detach().double()


def _equal_rewards(file: UserFile) -> Finding:
    """Groups of equal returns whose float32 mean differs from them, and of returns that differ only by rounding."""
    cases = {f"Equal returns of {number(value)}": [value] * 12 for value in (0.7, 0.1, 1.01, 0.9)}
    rounded = float(3 * torch.tensor(0.3))  # 0.9 up to rounding, as from a weighted sum of rewards
    cases["Returns of 0.9, equal but for rounding in float32,"] = [rounded] + [0.9] * 11
    worst = 0.0
    for name, group in cases.items():
        groups = [torch.tensor([group[:size]] * 2) for size in (6, 7, 12)]
        largest = max(float(_advantages(file, group).abs().max()) for group in groups)
        if largest > SMALL:
            sentence = f"{name} have advantages that are not 0: rounding, divided by a tiny standard deviation."
            return Finding("equal_rewards_noise", TRAP, sentence, 0.0, largest)
        worst = max(worst, largest)
    more = f", but for at most {number(worst)}" if worst else ""
    return Finding("equal_rewards_noise", OK, f"Equal returns have advantages of 0{more}.")


TEMPERATURE = 0.7


def check_log_probs(file: UserFile) -> Iterator[Finding]:
    """All checks of the user's `log_probs(logits, sequences, temperature)`."""

    def log_probs(logits: torch.Tensor, sequences: torch.Tensor, temperature: float) -> torch.Tensor:
        values = {"logits": logits.clone(), "sequences": sequences.clone(), "temperature": temperature}
        return file.tensor("log_probs", values, 2, (len(sequences), sequences.shape[1] - 1), ", (B, T-1)")

    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 6, 11, generator=generator)
    sequences = torch.randint(11, (2, 6), generator=generator)
    got = log_probs(logits, sequences, TEMPERATURE)
    slow = {temperature: _slow_log_probs(logits, sequences, temperature) for temperature in (TEMPERATURE, 1.0)}
    numbers = farthest(slow[TEMPERATURE], got)
    used = next((temperature for temperature, expected in slow.items() if _equal(got, expected)), None)
    if used is None:
        at_their_own = (_slow_log_probs(logits, sequences, t, but) for t in slow for but in ("first", "last"))
        if any(_equal(got, expected) for expected in at_their_own):
            sentence = "The logits at a token are those for the next one, but here they score the token itself."
            yield Finding("off_by_one", TRAP, sentence, *numbers)
        else:
            sentence = "The log-probs differ from a slow loop's, at any temperature or shift."
            yield Finding("log_probs", TRAP, sentence, *numbers)
        return
    yield Finding("off_by_one", OK, "Entry t is about token t+1, under the logits at t.")
    trap = f"The logits are not divided by the sampling temperature, {TEMPERATURE}."
    ok = "The logits are divided by the temperature."
    yield either("no_temperature", used == TEMPERATURE, trap, ok, *numbers)
    leaf = logits.clone().requires_grad_()
    result = log_probs(leaf, sequences, TEMPERATURE)
    got = float(torch.autograd.grad(result[0, 0], leaf)[0][0, 0, sequences[0, 1]]) if result.requires_grad else 0.0
    expected = float(1 - slow[used][0, 0].exp()) / used  # (1 - p) / temperature
    trap = "The gradient of a log-prob by the logit of its token is wrong."
    ok = "The gradient by the logits is a softmax's."
    yield compare("gradient_of_log_probs", expected, got, trap, ok, 1e-3)
    generator.manual_seed(1)
    logits = (3 * torch.randn(1, 4, 4096, generator=generator)).bfloat16()  # for a larger vocabulary
    sequences = torch.randint(4096, (1, 4), generator=generator)
    expected, got = _slow_log_probs(logits, sequences, 1.0), log_probs(logits, sequences, 1.0).float()
    trap = "Logits in bfloat16 are not computed with in float32: log-probs are wrong in the third digit."
    yield compare("log_probs_in_bfloat16", expected, got, trap, "Logits in bfloat16 give log-probs in float32.", 1e-3)
    far = torch.tensor([[[0.0, 200.0, -100.0], [0.0, 0.0, 0.0]]])
    trap = "The logarithm is taken after the softmax: a token far below the most probable one has minus infinity."
    got = float(log_probs(far, torch.tensor([[1, 2]]), 1.0))
    yield compare("log_of_softmax", -300.0, got, trap, "Logits far apart give finite log-probs.")


def _slow_log_probs(logits: torch.Tensor, sequences: torch.Tensor, temperature: float, but: str = "") -> torch.Tensor:
    """Log-probs of each token except the first under the logits before it, one at a time: (B, T-1).

    With `but`, wrongly under the logits at the token's own place: for all tokens except the first, or except the last.
    """
    scores = torch.zeros(len(sequences), sequences.shape[1] - 1)
    for row, place in torch.ones_like(scores).nonzero().tolist():
        scaled = logits[row, place + (but == "first")].double() / temperature
        scores[row, place] = scaled[sequences[row, place + (but != "last")]] - scaled.logsumexp(dim=0)
    return scores


def _equal(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got.float(), expected, atol=1e-3, rtol=1e-3)


class TinyModel(nn.Module):
    """A causal model with dropout, with the call signature of transformers."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(13, 16), nn.Linear(16, 13)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_) -> SimpleNamespace:
        hidden = self.embedding(input_ids).cumsum(dim=1)
        return SimpleNamespace(logits=self.head(nn.functional.dropout(hidden, 0.5, self.training)))


def check_reference_log_probs(file: UserFile) -> Iterator[Finding]:
    """The user's `reference_log_probs(model, sequences, attention_mask)`, twice, with a model in training mode."""
    model = TinyModel()
    sequences = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 2, 0, 0]])
    values = {"model": model, "sequences": sequences, "attention_mask": (sequences > 0).long()}
    results = []
    for _ in range(2):
        model.train()
        results.append(file.tensor("reference_log_probs", values, 3, (2, 4), ", (B, T-1)"))
    trap = "Two calls give different log-probs: dropout is on when the model is in training mode."
    ok = "Two calls give the same log-probs of a model that was in training mode, with dropout."
    yield compare("reference_dropout", *(result.detach() for result in results), trap, ok)
    if results[0].requires_grad:
        sentence = "The reference's log-probs have a gradient, which costs memory and is needed for nothing."
        yield Finding("reference_gradient", NOTE, sentence)


PAD, END, TOOL = 0, 2, 9  # ids; TOOL is tool output
# (prompt, tokens of policy and tools, which of these the policy sampled), without padding
ROWS = (
    ([5, END, 6], [7, 8, END], [1, 1, 1]),  # the prompt also ends with a turn, as in chat templates
    ([5, 6], [7, 8, 11, 12, 13], [1] * 5),  # cut off by the budget
    ([5, END, 6, 11], [END], [1]),  # an empty answer
)
TOOL_ROWS = (
    ([5, 6], [7, END, TOOL, TOOL, 8, END], [1, 1, 0, 0, 1, 1]),
    ([5, END, 6], [7, END, TOOL, 12, 8, END], [1, 1, 0, 0, 1, 1]),
)


def check_action_mask(file: UserFile) -> Iterator[Finding]:
    """All checks of the user's `action_mask`, with a separate pad id and with one that also ends turns."""
    mask, expected, prompts, lengths = _mask(file, ROWS, PAD)
    shared, *_ = _mask(file, ROWS, END)
    shorter = (lengths < lengths.max())[:, 0]  # the end of the longest row can be cut off
    for step, where in ((-1, "before"), (1, "after")):
        moved = shifted(expected, step)
        if torch.equal(mask[shorter], moved[shorter]) and not (mask & ~moved).any():
            sentence = f"it is 1 {where} the entry of each sampled token. Entry t is about token t+1."
            numbers = (int(each[0].nonzero()[0]) for each in (expected, mask))
            yield Finding("off_by_one", TRAP, f"The mask is shifted: {sentence}", *numbers)
            return
    yield Finding("off_by_one", OK, "The mask is not shifted.")
    columns = torch.arange(mask.shape[1])
    is_prompt, is_padding = columns < prompts - 1, columns >= lengths - 1
    ends = (columns == lengths - 2) & torch.tensor([[True], [False], [True]])
    trap = "The token that ends a turn was sampled, but is not in the mask: nobody learns to stop."
    ok = "The token that ends a turn is in the mask."
    yield _same("end_of_turn_masked", expected & ends, mask & ends, trap, ok)
    yield _none("prompt_trained", mask & is_prompt, "prompt tokens")
    yield _none("padding_trained", mask & is_padding, "padding")
    inner = ~(is_prompt | is_padding | ends)
    trap, ok = "Sampled tokens are not in the mask.", "All other sampled tokens are in the mask."
    yield _same("tokens_left_out", expected & inner, mask & inner, trap, ok)
    trap = "The mask is another one when padding has the id that ends turns: ids decide instead of places."
    ok = "The mask is the same when padding has the id that ends turns."
    yield _same("mask_from_pad", mask, shared, trap, ok)
    if "tool_mask" in parameters_of(file.module.action_mask):
        mask, expected, prompts, lengths = _mask(file, TOOL_ROWS, PAD)
        columns = torch.arange(mask.shape[1])
        is_completion = (columns >= prompts - 1) & (columns < lengths - 1)
        yield _none("tool_output_in_loss", mask & is_completion & ~expected, "tokens that a tool wrote")
    else:
        sentence = "The function has no parameter tool_mask, so that it is for conversations of one turn."
        yield Finding("tool_output_in_loss", NOT_EXAMINED, sentence)


def _mask(file: UserFile, rows: tuple, pad: int) -> tuple[torch.Tensor, ...]:
    """The user's mask of rows and the right one, (B, T-1) bool each; the lengths of prompts and of rows, (B, 1)."""
    prompts = torch.tensor([len(prompt) for prompt, _, _ in rows])
    lengths = torch.tensor([len(prompt) + len(rest) for prompt, rest, _ in rows])
    shape = (len(rows), int(lengths.max()) + 2)
    sequences, sampled, tool_mask = torch.full(shape, pad), torch.zeros(shape).bool(), torch.ones(shape).long()
    for row, (prompt, rest, flags) in enumerate(rows):
        sequences[row, : lengths[row]] = torch.tensor(prompt + rest)
        sampled[row, len(prompt) : lengths[row]] = torch.tensor(flags).bool()
        tool_mask[row, len(prompt) : lengths[row]] = torch.tensor(flags)
    values = {"sequences": sequences, "prompt_lengths": prompts, "pad_id": pad, "end_of_turn_ids": [END]}
    values |= {"lengths": lengths, "tool_mask": tool_mask}
    about = ", (B, T-1): entry t is about token t+1"
    result = file.tensor("action_mask", values, 2, (shape[0], shape[1] - 1), about)
    return result.bool(), sampled[:, 1:], prompts[:, None], lengths[:, None]


def _same(check: str, expected: torch.Tensor, got: torch.Tensor, trap: str, ok: str) -> Finding:
    """Two masks that should be equal; the numbers count the 1s or, if these counts agree, the equal entries."""
    numbers = int(expected.sum()), int(got.sum())
    if numbers[0] == numbers[1]:
        numbers = expected.numel(), int((expected == got).sum())
    return either(check, torch.equal(expected, got), trap, ok, *numbers)


def _none(check: str, mask: torch.Tensor, what: str) -> Finding:
    """`mask` should be 0 everywhere; `what` names its tokens."""
    return _same(check, mask & False, mask, f"The mask has {what}.", f"The mask has no {what}.")


def check_generate_inputs(file: UserFile) -> Iterator[Finding]:
    """Prompts of different lengths; two of them contain the id of padding."""
    prompts = [[5, PAD, 6, 7], [8, 6], [PAD, 5, 11]]
    result = file.call_by_name("generate_inputs", {"prompts": [[*prompt] for prompt in prompts], "pad_id": PAD}, 2)
    shape = (len(prompts), max(map(len, prompts)))
    parts = list(result) if isinstance(result, tuple) else []
    if len(parts) != 2 or any(not isinstance(x, torch.Tensor) or tuple(x.shape) != shape for x in parts):
        raise UnusableError(f"generate_inputs must return two tensors of shape {shape}: ids, and attention mask")
    ids, attention = (x.tolist() for x in parts)
    last = sum(row[-1] == prompt[-1] for row, prompt in zip(ids, prompts, strict=True))
    trap = "The last token of a prompt is not in the last column, where sampling continues."
    if all(row[: len(prompt)] == prompt for row, prompt in zip(ids, prompts, strict=True)):
        trap = "Prompts are padded on the right: the first sampled token follows padding instead of the prompt."
    yield compare("right_padding_generation", len(prompts), last, trap, "Every prompt ends in the last column.")
    trap = "The attention mask is not 1 on every prompt token: tokens with the id of padding are hidden from the model."
    ok = "The attention mask is 1 on every prompt token, whatever its id."
    yield compare("prompt_attention", sum(map(len, prompts)), sum(map(sum, attention)), trap, ok)
