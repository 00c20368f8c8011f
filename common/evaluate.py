"""What a policy can do on held-out questions: greedily, when sampled, and with k tries."""

from math import comb
from types import ModuleType
from typing import NamedTuple

from common.chat import encode_prompt
from common.logprobs import Policy
from common.sampling import sample
from common.trajectory import Trajectory

# Distinguishes the random numbers of evaluations from those of training steps. They are the same in every evaluation,
# so that two policies are compared under equal luck.
EVALUATION = 2**31


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


class Outcome(NamedTuple):
    """One sampled answer to one question."""

    kind: tuple  # of the question: (num_terms, num_digits), or (None, None) where the rows do not say
    worked: bool
    correct: float


class Evaluation(NamedTuple):
    metrics: dict[str, float]  # by name, see `evaluate`
    greedy_texts: list[str]  # one a question
    outcomes: list[Outcome]  # of all sampled answers


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
    rows_at_once: int = 128,
) -> Evaluation:
    """Ask every question greedily, and `num_samples` times by sampling at the policy's temperature.

    Args:
        task: a module of common/tasks with `messages`, `reward` and `is_worked`.
        num_samples: k of mean@k and pass@k; 0: greedy only.
        prefix: what every completion is made to begin with, e.g. "<think>".
        rows_at_once: see `sample`.

    Returns:
        Shares and means over all questions, by name: `greedy/...` and `sampled/...` with accuracy (for "sampled" it is
        mean@k), length (tokens), worked (share of completions that think first), accuracy_worked and accuracy_blurted
        (among those that do, and that do not; absent where there are none), stopped (share that ended their turn); and
        `sampled/pass@k`.
    """
    forced = policy.tokenizer.encode(prefix, add_special_tokens=False) if prefix else []
    prompts = [encode_prompt(policy.tokenizer, task.messages(row, system_prompt)) + forced for row in rows]

    def ask(mode: str, group_size: int) -> tuple[dict[str, float], list[str], list[Outcome]]:
        trajectories = sample(
            policy,
            prompts,
            group_size,
            max_new_tokens=max_new_tokens,
            key=(seed, EVALUATION),
            greedy=mode == "greedy",
            rows_at_once=rows_at_once,
        )
        texts = [prefix + decode(policy, row.completion_ids) for row in trajectories]
        outcomes = []
        for trajectory, text in zip(trajectories, texts, strict=True):
            row = rows[trajectory.prompt_index]
            kind = (row.get("num_terms"), row.get("num_digits"))
            outcomes.append(Outcome(kind, task.is_worked(text), task.reward(row, text)["correct"]))
        described = _describe(trajectories, outcomes)
        return {f"{mode}/{name}": value for name, value in described.items()}, texts, outcomes

    metrics, greedy_texts, _ = ask("greedy", 1)
    outcomes: list[Outcome] = []
    if num_samples:
        sampled_metrics, _, outcomes = ask("sampled", num_samples)
        groups = [outcomes[start : start + num_samples] for start in range(0, len(outcomes), num_samples)]
        right = [sum(outcome.correct == 1 for outcome in group) for group in groups]
        pass_rate = _mean([pass_at_k(num_samples, c, num_samples) for c in right])
        metrics |= sampled_metrics | {f"sampled/pass@{num_samples}": pass_rate}
    return Evaluation(metrics, greedy_texts, outcomes)


def divide_gain(before: list[Outcome], after: list[Outcome]) -> dict[str, float]:
    """How much of the gain in sampled accuracy is thinking more often, and how much is being right more often.

        accuracy = w a_w + (1 - w) a_b,     w: share worked out; a_w, a_b: accuracy with and without working
        gain     = (w' - w)(a_w - a_b)  +  w'(a_w' - a_w)  +  (1 - w')(a_b' - a_b)
                   choosing to work        working better     answering at once better

    Divided for every kind of question by itself and averaged, because hard kinds are worked out more often: over all of
    them together, the mix of what is worked out would change and pass for skill.

    Args:
        before, after: outcomes of the same questions. Where a kind was never worked out, or always, the accuracy that
            does not exist counts as the other evaluation's.

    >>> sums = (3, 2)
    >>> before = [Outcome(sums, True, 1.0), Outcome(sums, False, 0.0)]
    >>> divide_gain(before, after=[Outcome(sums, True, 1.0), Outcome(sums, True, 1.0)])
    {'choosing to work': 0.5, 'working better': 0.0, 'answering at once better': 0.0}
    """
    parts = {"choosing to work": 0.0, "working better": 0.0, "answering at once better": 0.0}
    for kind in {outcome.kind for outcome in before}:
        old, new = ([outcome for outcome in side if outcome.kind == kind] for side in (before, after))
        share, share_after = (_mean([outcome.worked for outcome in side]) for side in (old, new))
        worked, worked_after = _accuracies(old, new, worked=True)
        blurted, blurted_after = _accuracies(old, new, worked=False)
        weight = len(old) / len(before)
        parts["choosing to work"] += weight * (share_after - share) * (worked - blurted)
        parts["working better"] += weight * share_after * (worked_after - worked)
        parts["answering at once better"] += weight * (1 - share_after) * (blurted_after - blurted)
    return parts


def _accuracies(before: list[Outcome], after: list[Outcome], worked: bool) -> tuple[float, float]:
    """Accuracy before and after among the answers that were worked out, or among the others."""
    old, new = ([outcome.correct for outcome in side if outcome.worked == worked] for side in (before, after))
    known = _mean(old or new or [0.0])
    return known, _mean(new) if new else known


def decode(policy: Policy, ids: list[int]) -> str:
    """The text of a completion, for rewards and for people; it is never tokenised again."""
    return policy.tokenizer.decode(ids, skip_special_tokens=True)


def _describe(trajectories: list[Trajectory], outcomes: list[Outcome]) -> dict[str, float]:
    among = {
        "accuracy_worked": [outcome.correct for outcome in outcomes if outcome.worked],
        "accuracy_blurted": [outcome.correct for outcome in outcomes if not outcome.worked],
    }
    return {
        "accuracy": _mean([outcome.correct for outcome in outcomes]),
        "worked": _mean([outcome.worked for outcome in outcomes]),
        "length": _mean([len(row.completion_ids) for row in trajectories]),
        "stopped": _mean([row.finish_reason == "stop" for row in trajectories]),
    } | {name: _mean(values) for name, values in among.items() if values}


def _mean(values: list) -> float:
    return sum(values) / len(values)
