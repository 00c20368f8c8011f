"""Rewards that read no answers, for `--reward-functions`: the form of a completion, and chance."""

import random


def has_thought(completions: list[str], **_) -> list[float]:
    """1 for a completion that is one closed thought and one closed answer, whatever they say."""
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return [float(text.startswith(tags[0]) and all(text.count(tag) == 1 for tag in tags)) for text in completions]


def coin(completions: list[str], trainer_state, **_) -> list[float]:
    """0 or 1 by chance; the same in a resumed run."""
    return [float(random.Random(f"{trainer_state.global_step} {i}").random() < 0.5) for i in range(len(completions))]
