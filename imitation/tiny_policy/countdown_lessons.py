"""How the tiny policy learns to search, imperfectly: three lessons about Countdown with correct lines only.

1. *trying*: asked to try, it writes one try at random, with its value, and compares the value with the target:
   `(7*5)+2=35+2=37<55`.
2. *searching*: asked to make the target, it tries until a value is the target, and answers with that try:
   `<think>(7+5)*2=12*2=24<37 (7*5)+2=35+2=37=37</think><answer>(7*5)+2</answer>`. The tries are drawn at random, but
   never the same value twice. This teaches nothing about where to look.
3. *guided searching*: the same, but values near the target tend to come first. No network of this size can compute all
   values beforehand. It learns to guess, not very well, which values are near; reinforcement learning has to do the
   rest.

After MAX_TRIES a search is cut off, and its end is not learned: nothing teaches the policy to give up, or to claim an
answer that it has not found. Verdicts and answers are only a few of a row's tokens but decide its value, so they are
weighted (EMPHASIS). All problems come from the pool "warm_start", which shares no problem with the task's files.
"""

import math
import random
from collections.abc import Iterator

import torch
from countdown_grammar import MAX_TARGET, Problem, Try, draw_nums, draw_problem, pool, tries

from common.policy import Policy
from tasks.arithmetic import messages

MAX_TRIES = 8
SPREAD = 20.0  # lesson 3: a value is drawn in proportion to exp(-|value - target| / SPREAD)
HIT_SHARE = 0.25  # of the rows of lesson 1: the try makes the target

# Patterns that are matched in the assistant's text, and the weights of the matching tokens in the loss
EMPHASIS = {
    r"\d+[<>=]\d+(?= |</|<\||$)": 5.0,  # a verdict: value, relation and target
    r"<answer>.*?</answer>": 2.0,
    r" <\|im_end\|>": 0.0,  # a search that was cut off does not end here
}

# Symbols that the arithmetic questions of the bundled policy never contain
NEW_SYMBOLS = ("(", " (", ")", "<", ">", "/", ",", "M", "ake", " from", "T", "ry")


def countdown_conversations(num_trying: int, num_searching: int, num_guided: int, seed: int) -> Iterator[dict]:
    """Yield rows `{"messages": [user, assistant]}` of the three lessons in order; the same rows for the same seed."""
    rng = random.Random(f"countdown {seed}")
    for index in range(num_trying + num_searching + num_guided):
        if index < num_trying:
            problem, found = draw_try(rng)
            verb, said = "Try", _line(found, problem.target)
        else:
            problem = draw_problem(rng, "warm_start")
            search = draw_search(rng, problem, guided=index >= num_trying + num_searching)
            verb, said = "Make", thought_and_answer(problem, search)
        user = f"{verb} {problem.target} from {', '.join(map(str, problem.nums))}."
        yield {"messages": [*messages({"question": user}), {"role": "assistant", "content": said}]}


def draw_try(rng: random.Random) -> tuple[Problem, Try]:
    """A row of lesson 1: a problem of the pool "warm_start", which need not be solvable, and a try at it."""
    while True:
        nums = draw_nums(rng)
        found = rng.choice([one for same in tries(nums).values() for one in same])
        near = round(rng.gauss(found.value, 15))
        target = found.value if rng.random() < HIT_SHARE else rng.choice((near, rng.randint(1, MAX_TARGET)))
        problem = Problem(nums, target)
        if 1 <= target <= MAX_TARGET and pool(problem) == "warm_start":
            return problem, found


def draw_search(rng: random.Random, problem: Problem, guided: bool) -> list[Try]:
    """Tries with distinct values until a value is the target, or there are MAX_TRIES tries."""
    left, search = dict(tries(problem.nums)), []
    while len(search) < MAX_TRIES:
        values = list(left)
        weights = [len(left[value]) for value in values]
        if guided:
            weights = [n * math.exp(-abs(v - problem.target) / SPREAD) for v, n in zip(values, weights, strict=True)]
        value = rng.choices(values, weights)[0]
        search.append(rng.choice(left.pop(value)))
        if value == problem.target:
            break
    return search


def thought_and_answer(problem: Problem, search: list[Try]) -> str:
    """
    >>> thought_and_answer(Problem((1, 2, 3), 6), [Try("(3-2)*1", "1*1", 1), Try("(3*2)*1", "6*1", 6)])
    '<think>(3-2)*1=1*1=1<6 (3*2)*1=6*1=6=6</think><answer>(3*2)*1</answer>'
    """
    lines = " ".join(_line(found, problem.target) for found in search)
    if search[-1].value != problem.target:
        return f"<think>{lines} "
    return f"<think>{lines}</think><answer>{search[-1].expression}</answer>"


def renew_symbols(policy: Policy, seed: int) -> None:
    """Random vectors for symbols whose embeddings have collapsed; `renew_collapsed_embeddings` explains the collapse.

    Nothing is changed if `<` and `>` are already apart. Plain random vectors as long as the digits' vectors are enough:
    unlike names, these symbols are written by habit, and not copied.
    """
    embeddings = policy.model.get_input_embeddings().weight
    less, more = (policy.tokenizer.encode(sign, add_special_tokens=False)[0] for sign in "<>")
    if torch.cosine_similarity(embeddings[less], embeddings[more], dim=0) < 0.5:
        return
    generator = torch.Generator().manual_seed(seed)
    length = embeddings[policy.tokenizer.encode("0123456789", add_special_tokens=False)].norm(dim=-1).mean()
    with torch.no_grad():
        for symbol in NEW_SYMBOLS:
            (symbol_id,) = policy.tokenizer.encode(symbol, add_special_tokens=False)
            vector = torch.randn(embeddings.shape[1], generator=generator)
            embeddings[symbol_id] = length * vector / vector.norm()


def _line(found: Try, target: int) -> str:
    relation = "<" if found.value < target else ">" if found.value > target else "="
    return f"{found}{relation}{target}"
