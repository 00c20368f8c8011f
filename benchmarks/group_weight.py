"""How much a group pulls at the policy, by how many of its 8 completions are right: GRPO against Dr. GRPO.

    python benchmarks/group_weight.py             # the bundled policy, 1,024 training questions; three minutes

Samples 8 completions of each question and takes, for every group by itself, the gradient of the loss by all weights,
once with each of the two divisions, once with one of them and once with neither. What is compared is the length of
these gradients, averaged over the groups with equally many right completions, and given in units of the groups with 4
of 8. Beside it stands what the advantages alone say: sum of |A| over the group, in the same units. Writes
benchmarks/results/group_weight.json.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from common.advantages import group_advantages
from common.chat import encode_prompt
from common.config import TRAIN_DATA, RunConfig
from common.data import read_rows
from common.evaluate import decode
from common.experience import Experience, collate
from common.logprobs import Policy
from common.loss import GRPOLoss
from common.policy import load_policy
from common.report import describe_machine
from common.sampling import sample
from common.tasks import arithmetic as task

RESULTS = Path(__file__).resolve().parent / "results" / "group_weight.json"
GROUP_SIZE = 8
MAX_NEW_TOKENS = 96  # as in training
VARIANTS = {  # which formula stands for the advantage, and which for what the sum over a row's tokens is divided by
    "grpo": ("grpo", "grpo"),
    "no_length_division": ("grpo", "drgrpo"),
    "no_std_division": ("drgrpo", "grpo"),
    "drgrpo": ("drgrpo", "drgrpo"),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    model: str = "tiny"  # the bundled policy, or a directory
    questions: int = 1024  # the first so many of the training file
    seed: int = 0  # of the sampling


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    policy = load_policy(RunConfig(model=config.model, device="cpu", dtype="float32", attn_implementation="sdpa"))
    rows = read_rows(str(TRAIN_DATA), required=("question", "answer"))[: config.questions]
    groups = sample_groups(policy, rows, config.seed)
    table = {right: measure(policy, groups[right]) for right in sorted(groups)}
    for entry in table.values():
        for name in VARIANTS:
            entry[f"relative/{name}"] = entry[f"norm/{name}"] / table[GROUP_SIZE // 2][f"norm/{name}"]
    result = {"model": config.model, "questions": config.questions, "seed": config.seed, "group_size": GROUP_SIZE}
    result |= describe_machine() | {"by_number_right": table}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("right  groups  " + "  ".join(f"{name:>18}" for name in VARIANTS))
    for right, entry in table.items():
        values = "  ".join(f"{entry[f'relative/{name}']:18.2f}" for name in VARIANTS)
        print(f"{right} of {GROUP_SIZE} {entry['groups']:6}  {values}")


def sample_groups(policy: Policy, rows: list[dict], seed: int) -> dict[int, list[Experience]]:
    """Completions of every question: an experience for each group with a signal, by its number of right ones."""
    prompts = [encode_prompt(policy.tokenizer, task.messages(row)) for row in rows]
    trajectories = sample(policy, prompts, GROUP_SIZE, max_new_tokens=MAX_NEW_TOKENS, key=(seed, 0), rows_at_once=128)
    groups: dict[int, list[Experience]] = {}
    for index, row in enumerate(rows):
        group = trajectories[index * GROUP_SIZE : (index + 1) * GROUP_SIZE]
        correct = [task.reward(row, decode(policy, trajectory.completion_ids))["correct"] for trajectory in group]
        experience = collate(group, policy.pad_id, policy.device)
        experience.returns = torch.tensor(correct)[:, None]
        if 0 < sum(correct) < GROUP_SIZE:
            groups.setdefault(int(sum(correct)), []).append(experience)
    return groups


def measure(policy: Policy, groups: list[Experience]) -> dict[str, float]:
    """Mean length of these groups' gradients under each variant, and their mean number of tokens, right and wrong."""
    result: dict[str, float] = {"groups": len(groups)}
    for name, (advantage_type, loss_type) in VARIANTS.items():
        objective = GRPOLoss(0.2, 0.0, loss_type, generate_max_length=MAX_NEW_TOKENS)
        norms = []
        for group in groups:
            group.advantages = group_advantages(group.returns.view(1, -1), advantage_type).view(-1, 1)
            policy.zero_grad()
            log_probs, _ = policy(group.sequences, group.action_mask)
            objective(log_probs=log_probs, experience=group)[0].backward()
            norms.append(torch.nn.utils.get_total_norm([weight.grad for weight in policy.parameters()]).item())
        result[f"norm/{name}"] = sum(norms) / len(norms)
    lengths = torch.cat([group.action_mask.sum(dim=1) for group in groups]).double()
    is_right = torch.cat([group.returns[:, 0] for group in groups]) == 1
    return result | {
        "length_right": lengths[is_right].mean().item(),
        "length_wrong": lengths[~is_right].mean().item(),
    }


if __name__ == "__main__":
    main()
