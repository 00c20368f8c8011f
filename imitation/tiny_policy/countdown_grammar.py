"""The grammar of Countdown's problems, and of tries at them. It makes data; reinforcement learning does not use it.

`make_countdown_tasks.py` draws the problems of the task from it, and `countdown_lessons.py` those of its lessons.

A try combines three numbers in two steps. In a sum or a product the larger number comes first; no step is negative or
leaves the integers, divides by 1, or subtracts a number from itself.
"""

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

MAX_NUMBER, MAX_TARGET, MAX_STEP = 15, 100, 199  # every step of a try is in 1..MAX_STEP


@dataclass(frozen=True)
class Problem:
    """Make `target` from `nums`, each used exactly once."""

    nums: tuple[int, ...]
    target: int

    @property
    def key(self) -> str:
        """The problem, up to the order of the numbers.

        >>> Problem((8, 3, 1), 24).key
        '1 3 8 = 24'
        """
        return f"{' '.join(map(str, sorted(self.nums)))} = {self.target}"


@dataclass(frozen=True)
class Try:
    """An expression over three numbers, its last step with the first one done, and its value."""

    expression: str  # (7*5)+2
    step: str  # 35+2
    value: int

    def __str__(self) -> str:
        """As the lessons write it: (7*5)+2=35+2=37."""
        return f"{self.expression}={self.step}={self.value}"


def pool(problem: Problem) -> str:
    """Which of three disjoint sets a problem belongs to: "heldout", "train" or "warm_start".

    A hash of `key` decides, so the same problem with its numbers in another order is never in two sets.
    """
    bucket = hashlib.sha256(problem.key.encode()).digest()[0]
    return "heldout" if bucket < 32 else "train" if bucket < 128 else "warm_start"


def tries(nums: tuple[int, ...]) -> dict[int, list[Try]]:
    """All tries over three numbers, by value; the order of the numbers makes no difference.

    >>> [str(found) for found in tries((2, 7, 5))[4]]
    ['(7-5)+2=2+2=4', '(7-5)*2=2*2=4', '(7+2)-5=9-5=4', '7-(5-2)=7-3=4']
    """
    return _tries(tuple(sorted(nums)))


@lru_cache
def _tries(nums: tuple[int, ...]) -> dict[int, list[Try]]:
    found: dict[int, dict[str, Try]] = {}
    for index, other in enumerate(nums):
        low, high = nums[:index] + nums[index + 1 :]
        for first_sign, inner in _results(high, low):
            pair = f"({high}{first_sign}{low})"
            for sign, value in _results(max(inner, other), min(inner, other)):
                expression, step = f"{pair}{sign}{other}", f"{inner}{sign}{other}"
                if sign in "-/" and other > inner:  # sums and products begin with the parentheses
                    expression, step = f"{other}{sign}{pair}", f"{other}{sign}{inner}"
                found.setdefault(value, {}).setdefault(expression, Try(expression, step, value))
    return {value: list(found[value].values()) for value in sorted(found)}


def _results(high: int, low: int) -> list[tuple[str, int]]:
    """The results of two numbers in one step."""
    results = [("+", high + low), ("-", high - low), ("*", high * low)]
    if low > 1 and high % low == 0:
        results.append(("/", high // low))
    return [(sign, value) for sign, value in results if 1 <= value <= MAX_STEP]


def draw_nums(rng: random.Random) -> tuple[int, ...]:
    """Three numbers, in the order of a problem."""
    return tuple(rng.randint(1, MAX_NUMBER) for _ in range(3))


def draw_problem(rng: random.Random, only_pool: str) -> Problem:
    """Draw a solvable problem from one pool: three numbers, and one of the values up to MAX_TARGET that they make."""
    while True:
        nums = draw_nums(rng)
        problem = Problem(nums, rng.choice([value for value in tries(nums) if value <= MAX_TARGET]))
        if pool(problem) == only_pool:
            return problem


def to_row(problem: Problem) -> dict:
    """A problem as a row of the task's files.

    >>> to_row(Problem((3, 8, 1), 24))
    {'nums': [3, 8, 1], 'target': 24, 'num_numbers': 3}
    """
    return {"nums": list(problem.nums), "target": problem.target, "num_numbers": len(problem.nums)}
