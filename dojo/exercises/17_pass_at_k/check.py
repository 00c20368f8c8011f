"""pass@k as k draws without replacement."""

import math

from dojo.judge import Call

CALLS = [
    Call("pass_at_k", {"n": 8, "c": 2, "k": 1}, about="one attempt"),
    Call("pass_at_k", {"n": 8, "c": 2, "k": 4}),
    Call("pass_at_k", {"n": 8, "c": 6, "k": 4}, about="fewer than k samples are wrong"),
    Call("pass_at_k", {"n": 8, "c": 0, "k": 4}, about="no sample is right"),
    Call("pass_at_k", {"n": 8, "c": 8, "k": 8}, about="all samples are right, and all are chosen"),
    Call("pass_at_k", {"n": 256, "c": 1, "k": 256}, about="one of 256"),
    Call("pass_at_k", {"n": 10_000, "c": 3, "k": 1_000}, about="many samples"),
]


def all_wrong(wrong: int, n: int, k: int) -> float:
    """The probability that k draws without replacement find only the `wrong` of n."""
    product = 1.0
    for drawn in range(k):
        product *= max(wrong - drawn, 0) / (n - drawn)
    return product


def expected(call: Call) -> float:
    n, c, k = (call.arguments[name] for name in "nck")
    return 1.0 - all_wrong(n - c, n, k)


MISTAKES = {
    "1 - (1 - c/n)^k is biased: it draws with replacement, and can draw the same sample twice.": lambda call: (
        1.0 - (1.0 - call.arguments["c"] / call.arguments["n"]) ** call.arguments["k"]
    ),
    "This is the probability that all k samples are right; one of them is enough.": lambda call: all_wrong(
        call.arguments["c"], call.arguments["n"], call.arguments["k"]
    ),
    "This is the probability that there is no right answer among the k: subtract it from 1.": lambda call: (
        1.0 - expected(call)
    ),
    "k c / n is the expected number of right answers, and not the probability of at least one.": lambda call: (
        call.arguments["k"] * call.arguments["c"] / call.arguments["n"]
    ),
    "The two counts overflow: inf / inf is not a number. Use integers, or multiply small quotients.": lambda call: (
        math.nan
    ),
}
