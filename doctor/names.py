"""What the names of a loss function's parameters mean: a tensor or a setting of the batch."""

import re

TENSORS = ("log_probs", "old_log_probs", "log_probs_ref", "advantages", "mask")  # in the order of docs/loss_template.py
SETTINGS = ("clip_eps", "clip_low", "clip_high", "kl_weight", "max_new_tokens", "num_rows", "num_tokens", "num_parts")
OF_THE_MINIBATCH = {"num_rows", "num_tokens", "num_parts"}
OTHER_NAMES = {
    "advantages": "advantage adv advs",
    "mask": "completion_mask response_mask action_mask loss_mask token_mask eos_mask masks",
    "kl_weight": "beta kl_loss_coef kl_coef kl_coeff kl_beta",
    "clip_eps": "epsilon cliprange clip_range clip_ratio clip_epsilon eps_clip",
    "clip_low": "epsilon_low cliprange_low clip_eps_low clip_ratio_low eps_low",
    "clip_high": "epsilon_high cliprange_high clip_eps_high clip_ratio_high eps_high",
    "max_new_tokens": "max_completion_length",
    "num_tokens": "num_items_in_batch",
    "num_parts": "gradient_accumulation_steps current_gradient_accumulation_steps",
}
ALIASES = {alias: name for name, aliases in OTHER_NAMES.items() for alias in aliases.split()}
OLD = "old|sampler|sampling|rollout|vllm|behavior|behaviour"  # one policy in the doctor's batches: it sampled
LOG_PROBS = re.compile(
    rf"((?P<before>{OLD}|ref|reference|new|cur|current|policy|pi)_)?((per_)?token_)?log_?p(rob)?s?(_(?P<after>old|ref|new))?"
)


def meaning(name: str) -> str:
    """The tensor or setting that a parameter of this name is given, else the name itself.

    >>> meaning("old_per_token_logps"), meaning("logprobs_ref"), meaning("new_logp"), meaning("x")
    ('old_log_probs', 'log_probs_ref', 'log_probs', 'x')
    """
    match = LOG_PROBS.fullmatch(name)
    if match and not (match["before"] and match["after"]):
        policy = match["before"] or match["after"] or "new"
        return (
            "log_probs_ref"
            if policy.startswith("ref")
            else "old_log_probs"
            if policy in OLD.split("|")
            else "log_probs"
        )
    return ALIASES.get(name, name)
