"""What a policy can do on held-out questions: greedily, when sampled, and with k tries."""

from math import comb
from types import ModuleType

from common.chat import encode_prompt
from common.logprobs import Policy
from common.sampling import sample
from common.trajectory import Trajectory

# Distinguishes the random numbers of evaluations from those of training steps. They are the same in every evaluation,
# so that two policies are compared under equal luck.
EVALUATION = 2**31

PROMPTS_AT_ONCE = 64  # bounds the memory of the cache


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples is right, from n samples with c right.

        pass@k = 1 - C(n-c, k) / C(n, k)        (Chen et al. 2021, arXiv 2107.03374, equation 1)

    >>> pass_at_k(n=8, c=2, k=1), pass_at_k(n=8, c=2, k=8)
    (0.25, 1.0)

    Raises:
        ValueError: k is more than n.
    """
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def evaluate(
    policy: Policy,
    rows: list[dict],
    task: ModuleType,
    *,
    max_new_tokens: int,
    system_prompt: str = "",
    num_samples: int = 0,
    seed: int = 0,
    prefix: str = "",
) -> tuple[dict[str, float], list[str]]:
    """Ask every question greedily, and `num_samples` times by sampling.

    Args:
        task: a module of common/tasks with `messages`, `reward` and `is_worked`.
        num_samples: k of mean@k and pass@k; 0: greedy only.
        prefix: what every completion is made to begin with, e.g. "<think>".

    Returns:
        Shares and means over all questions, by name, and the greedy completions as text. The names are `greedy/...`
        and `sampled/...` with: accuracy (for "sampled" it is mean@k), length (tokens), worked (share of completions
        that think first), accuracy_worked and accuracy_blurted (among those that do, and that do not; absent where
        there are none), stopped (share that ended their turn); and `sampled/pass@k`.
    """
    forced = policy.tokenizer.encode(prefix, add_special_tokens=False) if prefix else []
    prompts = [encode_prompt(policy.tokenizer, task.messages(row, system_prompt)) + forced for row in rows]
    metrics: dict[str, float] = {}
    greedy_texts: list[str] = []
    for mode, group_size in (("greedy", 1), ("sampled", num_samples)):
        if group_size == 0:
            continue
        trajectories = sample(
            policy,
            prompts,
            group_size,
            max_new_tokens=max_new_tokens,
            key=(seed, EVALUATION),
            greedy=mode == "greedy",
            prompts_at_once=max(1, PROMPTS_AT_ONCE // group_size),
        )
        texts = [prefix + decode(policy, row.completion_ids) for row in trajectories]
        correct = [
            task.reward(rows[row.prompt_index], text)["correct"] for row, text in zip(trajectories, texts, strict=True)
        ]
        worked = [task.is_worked(text) for text in texts]
        metrics |= {f"{mode}/{name}": value for name, value in _describe(trajectories, correct, worked).items()}
        if mode == "greedy":
            greedy_texts = texts
        else:
            right = [int(sum(correct[i : i + group_size])) for i in range(0, len(correct), group_size)]
            metrics[f"sampled/pass@{group_size}"] = _mean([pass_at_k(group_size, c, group_size) for c in right])
    return metrics, greedy_texts


def divide_gain(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """How much of the gain in sampled accuracy is thinking more often, and how much is being right more often.

        accuracy = w a_w + (1 - w) a_b,     w: share worked out; a_w, a_b: accuracy with and without working
        gain     = (w' - w)(a_w - a_b)  +  w'(a_w' - a_w)  +  (1 - w')(a_b' - a_b)
                   choosing to work        working better     answering at once better

    Args:
        before, after: metrics of `evaluate` with `num_samples` > 0. Where nothing was worked out, or everything, the
            accuracy that does not exist counts as the other evaluation's.

    >>> before = {"sampled/worked": 0.25, "sampled/accuracy_worked": 0.75, "sampled/accuracy_blurted": 0.25}
    >>> after = {"sampled/worked": 1.0, "sampled/accuracy_worked": 1.0}
    >>> divide_gain(before, after)
    {'choosing to work': 0.375, 'working better': 0.25, 'answering at once better': 0.0}
    """

    def accuracies(how: str) -> tuple[float, float]:
        name = f"sampled/accuracy_{how}"
        known = before.get(name, after.get(name, 0.0))
        return known, after.get(name, known)

    (worked, worked_after), (blurted, blurted_after) = accuracies("worked"), accuracies("blurted")
    share, share_after = before["sampled/worked"], after["sampled/worked"]
    return {
        "choosing to work": (share_after - share) * (worked - blurted),
        "working better": share_after * (worked_after - worked),
        "answering at once better": (1 - share_after) * (blurted_after - blurted),
    }


def decode(policy: Policy, ids: list[int]) -> str:
    """The text of a completion, for rewards and for people; it is never tokenised again."""
    return policy.tokenizer.decode(ids, skip_special_tokens=True)


def _describe(trajectories: list[Trajectory], correct: list[float], worked: list[bool]) -> dict[str, float]:
    among = {
        "accuracy_worked": [c for c, w in zip(correct, worked, strict=True) if w],
        "accuracy_blurted": [c for c, w in zip(correct, worked, strict=True) if not w],
    }
    return {
        "accuracy": _mean(correct),
        "worked": _mean(worked),
        "length": _mean([len(row.completion_ids) for row in trajectories]),
        "stopped": _mean([row.finish_reason == "stop" for row in trajectories]),
    } | {name: _mean(values) for name, values in among.items() if values}


def _mean(values: list) -> float:
    return sum(values) / len(values)
