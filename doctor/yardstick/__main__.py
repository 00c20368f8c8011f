"""Measure a file's estimator of the policy gradient against the exact gradient, for all groups that can be drawn.

    python -m doctor.yardstick my_loss.py                      # docs/loss_template.py shows what the file may define
    python -m doctor.yardstick my_loss.py --figure mine.png    # its point among those of docs/yardstick.md

The file needs `policy_loss`; without `advantages`, it gets GRPO's. It is executed, as `python my_loss.py` would do: use
it only with code that you trust. Exit status: 0, or 2 if the file cannot be measured.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro

from doctor.batches import ACTION, PADDING, Batch
from doctor.examined_loss import Loss
from doctor.findings import UnusableError
from doctor.user_file import UserFile
from doctor.yardstick.figure import KEYS, SIZE, draw, medians, read_results
from doctor.yardstick.moments import Groups, Moments, Weights, draw_groups, over_questions
from doctor.yardstick.world import LENGTH, QUESTIONS, Exact, SoftmaxTable

POLICIES = 3  # softmax tables; the medians of their numbers are shown
CLEAR = 0.1  # degrees, or percent: a smaller bias is rounding in float32


@dataclass(frozen=True)
class Config:
    file: tyro.conf.Positional[Path]  # Python file that defines policy_loss, and perhaps advantages
    figure: Path | None = None  # draw its point among the others, as a .png


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    config = tyro.cli(Config, args=arguments, description=__doc__, prog="python -m doctor.yardstick")
    try:
        file = UserFile(config.file, announce=lambda what: None)
        if not hasattr(file.module, "policy_loss"):
            raise UnusableError(f"{config.file} defines no policy_loss; docs/loss_template.py shows one")
        loss = Loss(file)
        if "advantages" not in loss.knows:
            raise UnusableError(
                "policy_loss takes no advantages (as one of pairs, DPO's): it estimates no policy gradient"
            )
        found, by_length = examine(own_estimator(file, loss))
        print("\n".join(report(config.file, hasattr(file.module, "advantages"), found, by_length)))
        if config.figure:
            draw(read_results(), config.figure, own=(config.file.name, found["angle"], found["noise"]))
            print(f"\nfigure: {config.figure}")
    except (UnusableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def own_estimator(file: UserFile, loss: Loss) -> Weights:
    """The file's loss, called with one group at a time, as with a minibatch that has no other rows."""

    def advantages(returns: torch.Tensor) -> torch.Tensor:
        if not hasattr(file.module, "advantages"):
            return (returns - returns.mean(dim=1, keepdim=True)) / (returns.std(dim=1, keepdim=True) + 1e-4)
        return file.tensor("advantages", {"returns": returns}, 1, tuple(returns.shape), " (Q, G)").detach().double()

    def weights(groups: Groups) -> torch.Tensor:
        scaled, found = advantages(groups.returns), []
        if not scaled.isfinite().all():
            (worst, *_) = groups.returns[~scaled.isfinite().all(dim=1)].tolist()
            raise UnusableError(f"advantages returned values that are not finite for a group with returns {worst}")
        for mask, log_probs, own in zip(groups.mask, groups.log_probs, scaled, strict=True):
            kinds = torch.where(mask.bool(), ACTION, PADDING)
            numbers = {"num_rows": len(mask), "num_tokens": int(mask.sum()), "max_new_tokens": LENGTH}
            batch = Batch(kinds, log_probs, log_probs.clone(), log_probs.clone(), own, **numbers, kl_weight=0.0)
            found.append(-loss(batch)[1])
        return torch.stack(found)

    return weights


def examine(weights: Weights) -> tuple[dict[str, float], list[float]]:
    """Medians over the policies, and how much a token counts in completions of one, two and three letters."""
    rows, lengths = [], torch.zeros(LENGTH, 2, dtype=torch.float64)
    for seed in range(POLICIES):
        exact, parts = Exact.of(SoftmaxTable(seed)), []
        for question in range(len(QUESTIONS)):
            drawn = draw_groups(exact, question, SIZE)
            kept = weights(drawn)
            parts.append(Moments.of(lambda _, kept=kept: kept, drawn))  # 3,060 groups are one part
            if not seed:
                lengths += by_length(kept, drawn)
        alone = [part.compare(exact.gradient_of(question)) for question, part in enumerate(parts)]
        row = over_questions(parts).compare(exact.gradient())
        row |= {f"angle_{name}": each["angle"] for name, each in zip(QUESTIONS, alone, strict=True)}
        rows.append(row | {"hard_to_easy": alone[1]["scale"] / alone[0]["scale"] if alone[0]["scale"] else math.inf})
    shares = lengths[:, 0] / lengths[:, 1]
    return {name: median(row[name] for row in rows) for name in rows[0]}, (shares / shares[0]).tolist()


def by_length(kept: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Of mixed groups with one success: the mean size of a token's weight among failures, and its chance, by length."""
    failed = (groups.returns.sum(dim=1) == 1)[:, None] & (groups.returns == 0)
    size = groups.mask.sum(dim=2)  # (M, G)
    chance = groups.chances[:, None].expand(size.shape)
    found = kept.abs().sum(dim=2) / size * chance, chance
    return torch.stack([torch.stack([x[failed & (size == n)].sum() for x in found]) for n in range(1, LENGTH + 1)])


def report(path: Path, has_advantages: bool, found: dict[str, float], by_length: list[float]) -> list[str]:
    """Numbers, what they mean, and the estimator of docs/yardstick.md that is the same."""
    others = {name: row for (size, name), row in medians(tables(), KEYS["groups"]).items() if size == SIZE}
    lines = [f"{path}: all groups of {SIZE}, of two questions, for {POLICIES} policies"]
    if not has_advantages:
        lines.append("The file defines no advantages: GRPO's are used.")
    lines.append("")
    columns: dict[str, Callable[[dict], str]] = {
        "angle": lambda row: f"{row['angle']:.1f}",
        "easy": lambda row: f"{row['angle_easy']:.1f}",
        "hard": lambda row: f"{row['angle_hard']:.1f}",
        "hard / easy": lambda row: f"{row['hard_to_easy']:.2f}",
        "scale": lambda row: f"{row['scale']:.2f}",
        "noise": lambda row: f"{row['noise']:.1f}",
    }
    lines.append(f"{'':26}" + "".join(f"{name:>13}" for name in columns))
    for name, row in {path.name: found, **others}.items():
        lines.append(f"{name:26}" + "".join(f"{show(row):>13}" for show in columns.values()))
    lines += ["", *findings(found, by_length)]
    return lines


def tables() -> list[dict]:
    """The committed lines of the same policies."""
    return [row for row in read_results()["groups"] if row["policy"] == "table" and row["seed"] < POLICIES]


def findings(found: dict[str, float], by_length: list[float]) -> list[str]:
    """What is biased, and by how much."""
    if found["scale"] <= 0:
        return ["The mean points away from the gradient: is the sign of the loss wrong, or is everything detached?"]
    lines = []
    inside = max(found[f"angle_{name}"] for name in QUESTIONS)
    if inside < CLEAR:
        lines.append("Within a question the mean has exactly the direction of the gradient: no bias there.")
    else:
        angles = " and ".join(f"{found[f'angle_{name}']:.1f}" for name in QUESTIONS)
        lines.append(f"Within a question the mean is {angles} degrees off: a bias that no learning rate repairs.")
    if max(by_length) / max(min(by_length), 1e-9) > 1 + CLEAR / 100:
        ratios = ", ".join(f"{x:.2f}" for x in by_length)
        lines.append(f"A token counts for {ratios} in a wrong completion of one, two, three letters: a bias by length.")
    if abs(found["hard_to_easy"] - 1) > CLEAR / 100:
        lines.append(f"The hard question counts {found['hard_to_easy']:.2f} times as much as in the expected reward.")
    lines.append(f"{found['noise']:.1f} completions have as much noise as signal.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
