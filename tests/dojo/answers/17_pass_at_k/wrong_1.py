# says: is biased
"""How likely is at least one right answer in k attempts?"""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of pass@k from n samples.

        pass@k = 1 - C(n - c, k) / C(n, k)

    C(n, k) is the number of ways to choose k of n samples. If fewer than k samples are wrong, each choice has a right
    one: pass@k is 1. The result must also be right for n = 10,000.

    Args:
        n: the number of samples.
        c: how many of them are right.
        k: the number of attempts, at most n.

    Returns:
        A number from 0 to 1.
    """
    return 1.0 - (1.0 - c / n) ** k
