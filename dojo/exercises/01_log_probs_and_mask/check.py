"""Log-probs and mask, one token at a time."""

import math

import torch

from dojo.judge import Call

SCORES = [[0.0, 1.0, 2.0], [2.0, 0.0, 1.0], [1.0, 2.0, 0.0], [0.0, 3.0, 1.0]]  # of a row with four tokens


def call(ids: list[list[int]], prompt_length: list[int], length: list[int], about: str) -> Call:
    numbers = {"ids": ids, "prompt_length": prompt_length, "length": length}
    logits = torch.tensor([SCORES, SCORES[::-1]][: len(ids)])
    tensors = {name: torch.tensor(value) for name, value in numbers.items()}
    return Call("log_probs_and_mask", {"logits": logits} | tensors, about=about)


CALLS = [
    call([[2, 1, 2, 1]], [2], [4], about="the completion was cut off; there is no padding"),
    call([[2, 1, 0, 0]], [1], [3], about="the first 0 ends the turn, the second one is padding"),
    call([[1, 0, 2, 0], [2, 0, 0, 0]], [2, 1], [4, 2], about="a turn of the first prompt ends with 0"),
]


def slow(call: Call, logits_at: int = 0, begin: int = 0, end: int = 0, pad: int | None = None, zeroed: bool = True):
    """`begin` and `end` move the two ends of the mask; `pad` is an id that is left out."""
    logits, ids, prompts, lengths = (x.tolist() for x in call.arguments.values())
    found = {"log_probs": [], "mask": []}
    for scores, tokens, prompt_length, length in zip(logits, ids, prompts, lengths, strict=True):
        log_probs, mask = [], []
        for t in range(len(tokens) - 1):
            is_sampled = prompt_length + begin <= t + 1 < length + end and tokens[t + 1] != pad
            among = scores[t + logits_at]
            log_prob = among[tokens[t + 1]] - math.log(sum(math.exp(x) for x in among))
            log_probs.append(log_prob if is_sampled or not zeroed else 0.0)
            mask.append(int(is_sampled))
        found["log_probs"].append(log_probs)
        found["mask"].append(mask)
    return found


def expected(call: Call) -> dict[str, list]:
    return slow(call)


MISTAKES = {
    "The log-prob of a token is read one position too late: the logits at t are about token t+1.": lambda call: slow(
        call, logits_at=1
    ),
    "The mask is shifted by one: its entry t is about token t+1, like the log-prob there.": lambda call: slow(
        call, begin=1, end=1
    ),
    "The policy did not choose the prompt: the mask must be 0 there.": lambda call: slow(call, begin=-100),
    "The end-of-turn token is missing: the policy chose to stop. It has the id of padding, so that no mask can be made "
    "from ids != pad.": lambda call: slow(call, pad=0),
    "The last token of the completion is missing: it is at position length - 1, and it was sampled too.": lambda call: (
        slow(call, end=-1)
    ),
    "The mask is right, but the log-probs must be 0 where it is 0.": lambda call: slow(call, zeroed=False),
    "Padding is counted: the mask must be 0 from position length on.": lambda call: slow(call, end=100),
}
