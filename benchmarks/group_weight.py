"""How much a group contributes to the gradient, by how many of its 8 completions are right: GRPO against Dr. GRPO.

    python benchmarks/group_weight.py             # the bundled policy, 1,024 training questions; 3 minutes

Samples 8 completions of each question. For every group separately, it computes the gradient of the loss with respect to
all weights: with both divisions of GRPO, with each one alone, and with neither. The norms of these gradients are
averaged over the groups with the same number of right completions, and given relative to the groups with 4 of 8 right.
Writes the entry group_weight of benchmarks/results/measurements.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from common.advantages import STD_EPS, group_advantages, group_std
from common.chat import decode, encode_prompt
from common.experience import Experience, collate
from common.loss import clipped_surrogate, masked_mean, masked_sum, probability_ratio
from common.policy import Policy
from common.sampling import sample
from tasks import arithmetic as task
from viewer.results import write_json

from harness.base.config import RunConfig
from harness.data.data import read_rows
from harness.models.loading import load_policy
from harness.run.machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
GROUP_SIZE = 8
MAX_NEW_TOKENS = 96  # as in training
VARIANTS = {  # whether advantages are divided by the group's standard deviation, and a row's loss by its length
    "grpo": (True, True),
    "no_length_division": (True, False),
    "no_std_division": (False, True),
    "drgrpo": (False, False),
}
Group = tuple[Experience, torch.Tensor]  # the completions, and their returns (G,)


@dataclass(frozen=True, kw_only=True)
class Config:
    model: str = "tiny"  # the bundled policy, or a directory
    questions: int = 1024  # how many questions, from the start of the training file
    seed: int = 0  # of the sampling


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    policy = load_policy(RunConfig(model=config.model, device="cpu", dtype="float32", attn_implementation="sdpa"))
    rows = read_rows(str(task.TRAIN_DATA), task.FIELDS)[: config.questions]
    groups = sample_groups(policy, rows, config.seed)
    table = {right: measure(policy, groups[right]) for right in sorted(groups)}
    for entry in table.values():
        for name in VARIANTS:
            entry[f"relative/{name}"] = entry[f"norm/{name}"] / table[GROUP_SIZE // 2][f"norm/{name}"]
    result = {"model": config.model, "questions": config.questions, "seed": config.seed, "group_size": GROUP_SIZE}
    result |= describe_machine() | {"by_number_right": table}
    write_json(RESULTS, result, entry="group_weight")
    print("right  groups  " + "  ".join(f"{name:>18}" for name in VARIANTS))
    for right, entry in table.items():
        values = "  ".join(f"{entry[f'relative/{name}']:18.2f}" for name in VARIANTS)
        print(f"{right} of {GROUP_SIZE} {entry['groups']:6}  {values}")


def sample_groups(policy: Policy, rows: list[dict], seed: int) -> dict[int, list[Group]]:
    """Complete every question; return the groups with reward variance, by their number of right completions."""
    prompts = [encode_prompt(policy.tokenizer, task.messages(row)) for row in rows]
    trajectories = sample(
        policy, prompts, GROUP_SIZE, max_new_tokens=MAX_NEW_TOKENS, key=(seed, 0), generation_batch_size=128
    )
    groups: dict[int, list[Group]] = {}
    for index, row in enumerate(rows):
        group = trajectories[index * GROUP_SIZE : (index + 1) * GROUP_SIZE]
        correct = [
            task.reward(row, decode(policy.tokenizer, trajectory.completion_ids))["correct"] for trajectory in group
        ]
        experience = collate(group, policy.pad_id, policy.device)
        if 0 < sum(correct) < GROUP_SIZE:
            groups.setdefault(int(sum(correct)), []).append((experience, torch.tensor(correct)))
    return groups


def measure(policy: Policy, groups: list[Group]) -> dict[str, float]:
    """Mean gradient norm of these groups under each variant, and mean number of tokens of right and wrong rows."""
    result: dict[str, float] = {"groups": len(groups)}
    for name, (by_std, by_length) in VARIANTS.items():
        norms = []
        for experience, returns in groups:
            scale = group_std(returns[None]) + STD_EPS if by_std else 1.0
            advantages = (group_advantages(returns[None]) / scale).view(-1, 1).float()
            policy.zero_grad()
            log_probs, _ = policy(experience.sequences, mask := experience.action_mask)
            token_loss = clipped_surrogate(probability_ratio(log_probs, None, mask), advantages, clip_eps=0.2)
            rows = masked_mean(token_loss, mask, 1) if by_length else masked_sum(token_loss, mask, 1) / MAX_NEW_TOKENS
            rows.mean().backward()
            norms.append(torch.nn.utils.get_total_norm([weight.grad for weight in policy.parameters()]).item())
        result[f"norm/{name}"] = sum(norms) / len(norms)
    lengths = torch.cat([experience.action_mask.sum(dim=1) for experience, _ in groups]).double()
    is_right = torch.cat([returns for _, returns in groups]) == 1
    return result | {
        "length_right": lengths[is_right].mean().item(),
        "length_wrong": lengths[~is_right].mean().item(),
    }


if __name__ == "__main__":
    main()
