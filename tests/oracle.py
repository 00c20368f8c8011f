"""The loss of every experiment, one token at a time, from the papers: the right terms and pushes.

GRPO       arXiv 2402.03300, equation 3      Dr. GRPO   arXiv 2503.20783, section 3.2
"""

import math
from collections.abc import Sequence

FORMULAS = {  # for each experiment with a policy gradient: the formula, and the flags that select it
    "experiment_base": [("grpo", {})],
    "experiment_drgrpo": [("drgrpo", {}), ("grpo", {"critic_type": "grpo"})],
    "experiment_accelerate": [("grpo", {})],
    "experiment_accelerate_ddp": [("grpo", {})],
    "experiment_multiturn_tool_calling": [("grpo", {})],
    "experiment_multiturn_qa": [("grpo", {})],
    "experiment_engine": [("grpo", {})],
}
# Their formulas have one line: see tests/unit/test_sft.py and tests/unit/test_reinforce.py
ONE_LINE = {"experiment_sft", "experiment_reinforce"}

Row = Sequence[float]


def slow_row(
    formula: str,
    mask: Sequence[int],
    log_probs: Row,
    advantages: Row,
    old: Row | None,
    ref: Row | None,
    *,
    num_rows: int,
    clip_eps: float,
    kl_weight: float,
    budget: int,
) -> tuple[list[float], list[float]]:
    """The terms and pushes of a row's tokens; `advantages` are per token, `old` is None for a ratio of 1."""
    divisor = (max(1, sum(mask)) if formula == "grpo" else budget) * num_rows
    terms, pushes = [], []
    for t, is_action in enumerate(mask):
        term = slope = 0.0
        if is_action:
            advantage, ratio = advantages[t], 1.0 if old is None else math.exp(log_probs[t] - old[t])
            limited = min(max(ratio, 1 - clip_eps), 1 + clip_eps)
            term = -min(ratio * advantage, limited * advantage)
            slope = -ratio * advantage if ratio * advantage <= limited * advantage else 0.0
            if kl_weight:
                log_r = ref[t] - log_probs[t]
                term += kl_weight * (math.exp(log_r) - log_r - 1)
                slope += kl_weight * (1 - math.exp(log_r))
        terms.append(term / divisor)
        pushes.append(-slope / divisor)
    return terms, pushes
