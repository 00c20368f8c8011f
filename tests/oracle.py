"""The loss of every experiment, one token at a time, from the papers: the right terms and pushes.

GRPO    arXiv 2402.03300, equation 3             Dr. GRPO   arXiv 2503.20783, section 3.2; RLOO divides alike
DAPO    arXiv 2503.14476, equations 8 and 10     GSPO       arXiv 2507.18071, equations 5 and 7
CISPO   arXiv 2506.13585, equations 4 and 5
"""

import math
from collections.abc import Sequence

FORMULAS = {  # for each experiment with a policy gradient: the formula, and the flags that select it
    "experiment_base": [("grpo", {})],
    "experiment_drgrpo": [("drgrpo", {}), ("grpo", {"critic_type": "length"})],
    "experiment_accelerate": [("grpo", {})],
    "experiment_accelerate_ddp": [("grpo", {})],
    "experiment_multiturn_tool_calling": [("grpo", {})],
    "experiment_multiturn_qa": [("grpo", {})],
    "agents/world": [("grpo", {})],  # the advantages of its turns: unit/test_turn_credit.py
    "agents/critic": [("grpo", {})],
    "scale/engine": [("grpo", {})],
    "scale/mesh": [("grpo", {})],
    "scale/asynchronous": [("grpo", {}), ("grpo", {"correction": "clip"})],  # the others: unit/test_asynchronous.py
    "rewards/majority": [("grpo", {})],
    "policy_gradients/rloo": [("drgrpo", {})],
    "rewards/likelihood": [("drgrpo", {})],
    "policy_gradients/maxrl": [("grpo", {})],
    "policy_gradients/dapo": [("dapo", {})],
    "policy_gradients/gspo": [("gspo", {})],
    "policy_gradients/cispo": [("cispo", {})],
    "policy_gradients/ppo": [("grpo", {})],  # the loss of its critic: tests/unit/test_ppo.py
}
# Their formulas have one line, are about pairs, or need a teacher: see learning/test_replay.py, unit/test_dpo.py and
# test_distill.py, and models/test_reward_model.py
ONE_LINE = {"imitation/sft", "policy_gradients/reinforce", "rewards/reward_model", "rewards/dpo", "imitation/distill"}
ONE_LINE |= {"imitation/rejection", "imitation/self_distill"}
TOKEN_MEAN = {"dapo", "cispo"}  # divided by the number of all tokens, not by rows
# Flags, narrow enough that the tests' ratios are clipped
CLIPS = {"dapo": {"clip_eps": 0.2, "clip_eps_high": 0.28}, "gspo": {"clip_eps": 0.03, "clip_eps_high": 0.04}}
CLIPS |= {"cispo": {"ratio_cap": 1.28}}
PPO_CLIP = {"clip_eps": 0.2}

Row = Sequence[float]


def clips_of(formula: str) -> dict[str, float]:
    return CLIPS.get(formula, PPO_CLIP)


def slow_row(
    formula: str,
    mask: Sequence[int],
    log_probs: Row,
    advantages: Row,
    old: Row | None,
    ref: Row | None,
    *,
    num_rows: int,
    num_tokens: int,
    kl_weight: float,
    budget: int,
    clip_eps: float = math.inf,
    clip_eps_high: float | None = None,
    ratio_cap: float = math.inf,
) -> tuple[list[float], list[float]]:
    """The terms and pushes of a row's tokens; `advantages` are per token, `old` is None for a ratio of 1."""
    length, high = max(1, sum(mask)), clip_eps if clip_eps_high is None else clip_eps_high
    divisors = {"drgrpo": budget * num_rows, "dapo": num_tokens, "cispo": num_tokens}
    divisor = divisors.get(formula, length * num_rows)
    places = [t for t, is_action in enumerate(mask) if is_action]
    log_ratios = {t: 0.0 if old is None else log_probs[t] - old[t] for t in places}
    terms, slopes = [0.0] * len(mask), [0.0] * len(mask)  # the slope by the token's log-prob
    for t in places:
        ratio = math.exp(sum(log_ratios.values()) / length if formula == "gspo" else log_ratios[t])
        if formula == "cispo":
            weight = min(ratio, ratio_cap)
            terms[t], slopes[t] = -weight * advantages[t] * log_probs[t], -weight * advantages[t]
            continue
        limited = min(max(ratio, 1 - clip_eps), 1 + high)
        terms[t] = -min(ratio * advantages[t], limited * advantages[t])
        slopes[t] = -ratio * advantages[t] if ratio * advantages[t] <= limited * advantages[t] else 0.0
    if formula == "gspo":  # each log-prob moves the one ratio of its row, by 1 / length
        mean = sum(slopes) / length
        slopes = [mean if is_action else 0.0 for is_action in mask]
    for t in places if kl_weight else ():
        log_r = ref[t] - log_probs[t]
        terms[t] += kl_weight * (math.exp(log_r) - log_r - 1)
        slopes[t] += kl_weight * (1 - math.exp(log_r))
    return [term / divisor for term in terms], [-slope / divisor for slope in slopes]
