"""Estimators of the policy gradient beside the exact gradient, in a world that can be computed.

    python benchmarks/yardstick.py            # everything: 13 minutes beside other work, on one thread
    python benchmarks/yardstick.py --draw     # the figure and the tables, from the committed data

doctor/yardstick has the world and the comparison; docs/yardstick.md says what is found. The losses are those of the
experiments, called as they are. Writes benchmarks/results/yardstick.json and draws docs/yardstick.png.
"""

import csv
import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
import tyro
from load_file import load_file

from common.advantages import STD_EPS, generalized_advantages, group_advantages, group_std, success_rate
from common.experience import Experience
from common.loss import approx_kl_divergence, probability_ratio
from doctor.yardstick.figure import KEYS, RESULTS, draw, read_results, table
from doctor.yardstick.moments import Groups, Moments, Weights, draw_groups, measure, over_questions
from doctor.yardstick.world import LENGTH, LETTERS, QUESTIONS, Exact, SoftmaxTable, Transformer
from viewer.results import write_json

from harness.base.config import ROOT
from harness.base.machine import describe_machine

PICTURE = ROOT / "docs" / "yardstick.png"
SIZES = {"table": (2, 4, 8, 16), "transformer": (2, 4, 8)}  # completions of a group
POLICIES = {"table": [SoftmaxTable(seed) for seed in range(5)], "transformer": [Transformer(seed) for seed in range(5)]}
LAGS = (0, 1, 4, 16)  # updates between the policy that draws and the one that learns
STEP = 1.0  # of these updates, along the exact gradient
Advantages = Callable[[Groups], torch.Tensor]  # (M, G), or (M, G, T)


@dataclass(frozen=True, kw_only=True)
class Config:
    draw: bool = False  # draw and print, without any measurement


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    if not config.draw:
        machine = {
            key: describe_machine()[key] for key in ("commit", "machine")
        }  # now: the results change the checkout
        for part in (groups, accuracies, critics, lags, penalties, tokens, proposals):
            began = time.time()
            write(part.__name__, part())
            machine[f"seconds_{part.__name__}"] = round(time.time() - began, 1)
        write_json(RESULTS / "machine.json", machine)
    results = read_results()
    draw(results, PICTURE)
    for part in KEYS:
        print(table(results, part), end="\n\n")


def write(part: str, rows: list[dict]) -> None:
    """A file of comma-separated values; numbers have six significant digits."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (RESULTS / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        shown = [{name: f"{x:.6g}" if isinstance(x, float) else x for name, x in row.items()} for row in rows]
        writer.writerows(shown)


# The losses and the advantages of the experiments --------------------------------------------------------------------


def loss_of(path: str, advantages: Advantages, now: Exact | None = None, old: bool = True, **flags) -> Weights:
    """The estimator of an experiment's `policy_loss`, with these advantages.

    Args:
        now: the policy that learns, if it isn't the one that draws.
        old: then the denominators of the ratios are of the policy that draws; otherwise of the one that learns.
    """
    module = load_file(path)
    names = {field.name for field in fields(module.Config)}
    usual = {"kl_weight": 0.0, "max_new_tokens": LENGTH}
    config = module.Config(**{name: value for name, value in (usual | flags).items() if name in names})
    count = list(inspect.signature(module.policy_loss).parameters)[3]

    def weights(groups: Groups) -> torch.Tensor:
        shape, mask = groups.mask.shape, groups.mask.flatten(0, 1)
        drawn = groups.log_probs.flatten(0, 1)
        leaf = (drawn if now is None else now.log_probs[groups.rows].flatten(0, 1)).clone().requires_grad_()
        own = advantages(groups)
        own = own.flatten(0, 1) if own.dim() == 3 else own.reshape(-1, 1)
        ids, rows = torch.zeros(len(mask), LENGTH + 1).long(), torch.zeros(len(mask)).long()
        micro = Experience(ids, torch.ones_like(ids), mask, drawn, rows, rows, rows, advantages=own)
        micro.old_log_probs = drawn if now is not None and old else None
        terms, _ = module.policy_loss(config, leaf, micro, 1.0)
        terms.sum().backward()
        share = shape[1] if count == "num_rows" else groups.mask.sum(dim=(1, 2))[:, None, None]
        return -leaf.grad.view(shape) / share

    return weights


def grpo(groups: Groups) -> torch.Tensor:
    return group_advantages(groups.returns) / (group_std(groups.returns) + STD_EPS)


def leave_one_out(groups: Groups) -> torch.Tensor:
    size = groups.rows.shape[1]
    return group_advantages(groups.returns) * size / (size - 1)


def maxrl(groups: Groups) -> torch.Tensor:
    return group_advantages(groups.returns) / success_rate(groups.returns)


def minus(baseline: Callable[[Exact], torch.Tensor]) -> Advantages:
    """The return minus a number for each question, (Q,)."""
    return lambda groups: groups.returns - baseline(groups.exact)[groups.exact.question[groups.rows]]


def best_baseline(exact: Exact) -> torch.Tensor:
    """The number for each question with the least variance: the mean return, weighted by the squared score."""
    squares = exact.probabilities * exact.scores.sum(dim=1).pow(2).sum(dim=1)  # (N,)
    found = [squares[exact.question == q] for q in range(len(QUESTIONS))]
    right = [(squares * exact.rewards)[exact.question == q] for q in range(len(QUESTIONS))]
    return torch.stack([b.sum() / a.sum() for a, b in zip(found, right, strict=True)])


def pass_at(k: int) -> Advantages:
    """The unbiased estimator of the gradient of pass@k for rewards of 0 and 1 (PKPO, arXiv 2505.15201, section 3).

    A completion gets the share of the subsets of k with it in which somebody succeeds, times k: 1 if it succeeds.
    """

    def advantages(groups: Groups) -> torch.Tensor:
        size, right = groups.rows.shape[1], groups.returns.sum(dim=1).long()
        none = torch.tensor([math.comb(size - 1 - c, k - 1) if size > c else 0 for c in range(size + 1)])[right]
        share = 1 - none[:, None] / math.comb(size - 1, k - 1)  # of a completion that fails
        return k * torch.where(groups.returns > 0, 1.0, share.double())

    return advantages


def without_expectation(advantages: Advantages) -> Advantages:
    """With a baseline: what the other completions would get on average without this one."""

    def centered(groups: Groups) -> torch.Tensor:
        size = groups.rows.shape[1]
        others = [groups.rows[:, [j for j in range(size) if j != i]] for i in range(size)]
        means = [advantages(Groups(groups.exact, each, groups.chances)).mean(dim=1) for each in others]
        return advantages(groups) - torch.stack(means, dim=1)

    return centered


def centered(groups: Groups) -> torch.Tensor:
    return group_advantages(groups.returns)


def summed(advantages: Advantages, now: Exact | None = None) -> Weights:
    """The plain estimator: advantages times the score, summed over tokens, the mean over completions."""
    return loss_of("policy_gradients/reinforce/train.py", advantages, now)


def expected(exact: Exact) -> torch.Tensor:
    return exact.accuracy(exact.weights)


ESTIMATORS: dict[str, Weights] = {
    "REINFORCE": summed(lambda groups: groups.returns),
    "REINFORCE, baseline J": summed(minus(expected)),
    "REINFORCE, best baseline": summed(minus(best_baseline)),
    "RLOO": loss_of("policy_gradients/rloo/train.py", leave_one_out),
    "Dr. GRPO": loss_of("experiment_drgrpo/train.py", centered),
    "GRPO": loss_of("experiment_base/train.py", grpo),
    "GRPO, only / length": loss_of("experiment_drgrpo/train.py", centered, critic_type="length"),
    "GRPO, only / std": loss_of("experiment_drgrpo/train.py", grpo, critic_type="std"),
    "DAPO": loss_of("policy_gradients/dapo/train.py", grpo),
    "DAPO, filtered": loss_of("policy_gradients/dapo/train.py", grpo),
    "MaxRL": loss_of("policy_gradients/maxrl/train.py", maxrl),
    "MaxRL, summed": summed(maxrl),
    "pass@2": summed(without_expectation(pass_at(2))),
}


def own_objective(name: str, exact: Exact, size: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What an estimator is made for, if it isn't J."""
    if name.startswith("MaxRL"):  # log p, as a series up to the order size - 1
        return lambda w: -sum((1 - exact.accuracy(w)) ** k / k for k in range(1, size)).mean()
    return (lambda w: (1 - (1 - exact.accuracy(w)) ** 2).mean()) if name == "pass@2" else None


# The parts: each returns a list of measurements -----------------------------------------------------------------------


def groups() -> list[dict]:
    """Every estimator, policy and size of a group, with samples of the policy that learns."""
    found = []
    for kind, policies in POLICIES.items():
        for seed, policy in enumerate(policies):
            exact = Exact.of(policy)
            for size in SIZES[kind]:
                for name, weights in ESTIMATORS.items():
                    if name != "pass@2" or size > 2:
                        row = {"policy": kind, "seed": seed, "size": size, "estimator": name}
                        found.append(row | one(name, weights, exact, size))
    return found


def one(name: str, weights: Weights, exact: Exact, size: int) -> dict:
    """Of groups of either question, and of each question alone."""
    groups = [draw_groups(exact, question, size) for question in range(len(QUESTIONS))]
    chances = [1 / len(groups)] * len(groups)
    if name == "DAPO, filtered":  # instead of a group without differences, another question is drawn
        groups = [drawn.part(drawn.returns.std(dim=1) > 0) for drawn in groups]
        mixed = [float(drawn.chances.sum()) for drawn in groups]
        groups = [Groups(exact, drawn.rows, drawn.chances / m) for drawn, m in zip(groups, mixed, strict=True)]
        chances = [m / sum(mixed) for m in mixed]
    parts = [Moments.of(weights, drawn) for drawn in groups]
    whole = over_questions(parts, chances)
    if name == "DAPO, filtered":  # those that were drawn in vain cost as much
        whole = replace(whole, rows=whole.rows * len(groups) / sum(mixed))
    found = whole.compare(exact.gradient())
    alone = [part.compare(exact.gradient_of(question)) for question, part in enumerate(parts)]
    found |= {f"angle_{name}": each["angle"] for name, each in zip(QUESTIONS, alone, strict=True)}
    found["hard_to_easy"] = alone[1]["scale"] * chances[1] / (alone[0]["scale"] * chances[0])
    own = own_objective(name, exact, size)
    return found | ({"angle_own": whole.compare(exact.gradient(own))["angle"]} if own else {})


def accuracies() -> list[dict]:
    """The easy question alone, from hopeless to solved: the letter a is made more or less probable everywhere."""
    found, policy = [], SoftmaxTable(0)
    shift = torch.zeros(policy.shape, dtype=torch.float64)
    shift[: len(shift) // 2, 0] = 1.0
    for amount in (-4.5, -3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 4.5):
        exact = Exact(policy, policy.weights + amount * shift.flatten())
        target = exact.gradient_of(0)
        for size in SIZES["table"]:
            for name in ("REINFORCE", "RLOO", "GRPO, only / std"):
                moments = Moments.of(ESTIMATORS[name], draw_groups(exact, 0, size))
                row = {"accuracy": float(exact.accuracy(exact.weights)[0]), "size": size, "estimator": name}
                found.append(row | moments.compare(target))
    return found


CRITICS: dict[str, Callable[[Exact], torch.Tensor]] = {  # (N, T) what is said to be still expected before each token
    "perfect critic": lambda exact: exact.values,
    "the mean of the question": lambda exact: expected(exact)[exact.question][:, None] * exact.mask,
    "untrained critic": lambda exact: torch.zeros_like(exact.values),
    "wrong critic": lambda exact: (1 - exact.values) * exact.mask,
}


def critics() -> list[dict]:
    """Generalized advantages with four critics; completions one by one. The wrong one says 1 - V, the untrained 0."""
    found = []
    for seed, policy in enumerate(POLICIES["table"]):
        exact = Exact.of(policy)
        last = exact.mask * (exact.mask.cumsum(dim=1) == exact.mask.sum(dim=1, keepdim=True))
        for name, critic in CRITICS.items():
            for gae_lambda in (0.0, 0.5, 0.95, 1.0):
                values = critic(exact)
                own = generalized_advantages(
                    last * exact.rewards[:, None].double(), values, exact.mask, 1.0, gae_lambda
                )
                moments = measure(summed(lambda groups, own=own: own[groups.rows]), exact, 1)
                row = {"seed": seed, "critic": name, "lambda": gae_lambda}
                found.append(row | moments.compare(exact.gradient()))
    return found


def lags() -> list[dict]:
    """Samples of a policy that is some updates behind; completions one by one, with the baseline J.

    Beside the exact gradient, `changed` is the angle to the mean of the same loss with new samples.
    """
    path, found = "scale/asynchronous/train.py", []
    load_file("scale/asynchronous/lagging_sampler.py", "lagging_sampler")
    baseline = minus(expected)
    for seed, policy in enumerate(POLICIES["table"]):
        drawing = now = Exact.of(policy)
        for step in range(max(LAGS) + 1):
            if step in LAGS:
                losses = {
                    name: lambda now, name=name, old=old: loss_of(path, baseline, now, old=old, correction=name)
                    for name, old in {"clip": True, "dppo": True, "sequence_mask": True}.items()
                    | {"none": False, "tis": False, "icepop": False, "decoupled": False}.items()
                }
                losses["GSPO"] = lambda now: loss_of("policy_gradients/gspo/train.py", baseline, now)
                losses["CISPO"] = lambda now: loss_of("policy_gradients/cispo/train.py", baseline, now)
                losses["weight of the whole completion"] = lambda now: summed(whole_weight(baseline, now), now)
                for name, make in losses.items():
                    stale = over_questions(
                        [Moments.of(make(now), draw_groups(drawing, q, 1), now) for q in range(len(QUESTIONS))]
                    )
                    new = measure(make(now), now, 1)
                    row = {"seed": seed, "lag": step, "correction": name} | stale.compare(now.gradient())
                    row["ratio"] = spread_of_ratios(drawing, now)
                    found.append(row | {"changed": stale.compare(new.mean)["angle"]})
            now = now.moved(STEP * now.gradient())
    return found


def whole_weight(advantages: Advantages, now: Exact) -> Advantages:
    """Times p / p_sampler of the whole completion: unbiased, whatever drew it."""
    return lambda groups: advantages(groups) * (now.probabilities / groups.exact.probabilities)[groups.rows]


def spread_of_ratios(drawing: Exact, now: Exact) -> float:
    """The mean over tokens of |p / p_sampler - 1|."""
    chance = drawing.probabilities[:, None] * drawing.mask
    return float((chance * ((now.log_probs - drawing.log_probs).exp() - 1).abs()).sum() / chance.sum())


def penalties() -> list[dict]:
    """The gradient of the KL divergence to a reference, or to a teacher; completions one by one.

    `angle` and `scale` are against the divergence of whole completions, `angle_tokens` and `scale_tokens` against the
    sum of the divergences of the next letters, on prefixes that do not move.
    """
    found = []
    for seed, policy in enumerate(POLICIES["table"]):
        exact = Exact.of(policy)
        noise = torch.randn(
            len(exact.weights), generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64
        )
        reference = exact.moved(0.5 * noise)
        other = reference.log_distributions(reference.weights)

        def divergence(w: torch.Tensor, exact: Exact = exact, reference: Exact = reference) -> torch.Tensor:
            log_p = exact.token_log_probs(w).sum(dim=1)
            return (log_p.exp() * (log_p - reference.log_probs.sum(dim=1))).sum() / len(QUESTIONS)

        def of_next_letters(w: torch.Tensor, exact: Exact = exact, other: torch.Tensor = other) -> torch.Tensor:
            log_p = exact.log_distributions(w)
            full = (log_p.exp() * (log_p - other)).sum(dim=-1) * exact.mask  # (N, T)
            return (exact.probabilities[:, None] * full).sum() / len(QUESTIONS)

        targets = exact.gradient(divergence), exact.gradient(of_next_letters)
        for name, gradient in penalty_gradients(exact, reference).items():  # (N, P): of one completion
            chance = exact.probabilities / len(QUESTIONS)
            mean = chance @ gradient
            variance = float(chance @ gradient.pow(2).sum(dim=1) - mean @ mean)
            whole, tokens = (Moments(mean, variance, 1).compare(target) for target in targets)
            row = {"seed": seed, "estimator": name, **whole}
            found.append(row | {"angle_tokens": tokens["angle"], "scale_tokens": tokens["scale"]})
    return found


def penalty_gradients(exact: Exact, reference: Exact) -> dict[str, torch.Tensor]:
    """For each way of estimating the divergence, the gradient of each completion's loss, (N, P)."""
    mask, scores = exact.mask.double(), exact.scores
    log_r = (exact.log_probs - reference.log_probs) * mask  # (N, T) log(p / p_ref)
    k3 = approx_kl_divergence(exact.log_probs, reference.log_probs, mask)
    times = lambda weights: (weights[..., None] * scores).sum(dim=1)  # noqa: E731
    to_go = log_r.flip(1).cumsum(dim=1).flip(1)

    def of(loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.func.jacrev(lambda w: loss(w).sum(dim=1))(exact.weights)

    other = reference.log_distributions(reference.weights)

    def of_letters(w: torch.Tensor, most: int) -> torch.Tensor:
        """The divergence over the policy's most probable letters, renormalised."""
        log_p = exact.log_distributions(w)
        best = log_p.topk(most, dim=-1).indices
        own, its = (x.gather(-1, best).log_softmax(dim=-1) for x in (log_p, other))
        return (own.exp() * (own - its)).sum(dim=-1) * mask

    return {
        "k1 as loss": times(mask),
        "k2 as loss": times(log_r),
        "k3 as loss": of(lambda w: approx_kl_divergence(exact.token_log_probs(w), reference.log_probs, mask)),
        "k3 as loss, times the ratio": of(
            lambda w: (
                probability_ratio(exact.token_log_probs(w), exact.log_probs, mask)
                * approx_kl_divergence(exact.token_log_probs(w), reference.log_probs, mask)
            )
        ),
        "k1 in the reward": times(log_r.sum(dim=1, keepdim=True) * mask),
        "k1 in the reward, to go": times(to_go),
        "k2 in the reward": times((log_r**2 / 2).sum(dim=1, keepdim=True) * mask),
        "k3 in the reward": times(k3.sum(dim=1, keepdim=True) * mask),
        "all letters": of(lambda w: of_letters(w, 3)),
        "top 2 letters": of(lambda w: of_letters(w, 2)),
        "top letter": of(lambda w: of_letters(w, 1)),
    }


def tokens() -> list[dict]:
    """Which tokens are trained: RLOO with groups of 4, and what a step costs in entropy.

    `entropy` is the first-order change of the mean entropy of a completion, in nats, where a step raises J by 0.01.
    """
    found = []
    for seed, policy in enumerate(POLICIES["table"]):
        exact = Exact.of(policy)
        log_p = exact.log_distributions(exact.weights)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)  # (N, T)
        chance = exact.probabilities[:, None] * exact.mask

        def highest(values: torch.Tensor, share: float, chance: torch.Tensor = chance) -> torch.Tensor:
            """The part (N, T) of each token that is in this share with the highest values; ties share what is left."""
            flat, each = values.flatten(), chance.flatten()
            above = torch.stack([each[flat > x].sum() for x in flat])
            tied = torch.stack([each[(flat - x).abs() < 1e-12].sum() for x in flat])
            left = share * chance.sum() - above
            return (left / tied.clamp(min=1e-12)).clamp(0, 1).view(values.shape)

        advantage = exact.rewards.double()[:, None] - expected(exact)[exact.question][:, None]
        surplus = (exact.log_probs - (log_p.exp() * log_p).sum(dim=-1)) * advantage  # clip-cov's covariance
        masks = {
            "all": exact.mask.double(),
            "20% with the highest entropy": highest(entropy, 0.2),
            "the other 80%": 1 - highest(entropy, 0.2),
            "without the 2% with the highest covariance": 1 - highest(surplus, 0.02),
            "without the 20% with the highest covariance": 1 - highest(surplus, 0.2),
        }

        def mean_entropy(w: torch.Tensor, exact: Exact = exact) -> torch.Tensor:
            log_p = exact.token_log_probs(w).sum(dim=1)
            return -(log_p.exp() * log_p).sum() / len(QUESTIONS)

        fall, target = exact.gradient(mean_entropy), exact.gradient()
        for name, kept in masks.items():
            weights = lambda groups, kept=kept: ESTIMATORS["RLOO"](groups) * kept[groups.rows]  # noqa: E731
            moments = measure(weights, exact, 4)
            row = {"seed": seed, "tokens": name, **moments.compare(target)}
            row["share"] = float((chance * kept).sum() / chance.sum())
            found.append(row | {"entropy": float(0.01 * (moments.mean @ fall) / (moments.mean @ target))})
    return found


def shortest_half(groups: Groups) -> torch.Tensor:
    """GFPO (arXiv 2508.09726): only the shortest half of a group is kept, and compared among itself; ties by chance."""
    size = groups.rows.shape[1]
    luck = torch.rand(groups.rows.shape, generator=torch.Generator().manual_seed(len(groups)), dtype=torch.float64)
    kept = (groups.mask.sum(dim=2) + luck).argsort(dim=1)[:, : size // 2]
    own = groups.returns.gather(1, kept)
    own = group_advantages(own) / (group_std(own) + STD_EPS)
    return torch.zeros(groups.rows.shape, dtype=torch.float64).scatter(1, kept, own) * 2  # a mean over those kept


def ends(exact: Exact) -> torch.Tensor:
    """(N,): 1 for a completion that ends itself, a reward for the form."""
    dot = LETTERS.index(".")
    return ((exact.letters == dot) & exact.mask.bool()).any(dim=1).double()


def of_the_sum(groups: Groups) -> torch.Tensor:
    """GRPO with two rewards: their sum is normalised."""
    total = groups.returns + ends(groups.exact)[groups.rows]
    return group_advantages(total) / (group_std(total) + STD_EPS)


def of_each(groups: Groups) -> torch.Tensor:
    """GDPO (arXiv 2601.05242): each reward is normalised by itself; without its last division, over the batch."""
    parts = groups.returns, ends(groups.exact)[groups.rows]
    return sum(group_advantages(part) / (group_std(part) + STD_EPS) for part in parts)


def proposals() -> list[dict]:
    """Two proposals beside what they would improve, with groups of 8.

    `length` is the first-order change of the mean length of a completion, in letters, where a step raises the expected
    reward by 0.01; `right` and `form` are the shares of a step's gain that are right answers and good form.
    """
    found = []
    for seed, policy in enumerate(POLICIES["table"]):
        exact = Exact.of(policy)
        tokens, form = exact.mask.sum(dim=1).double(), ends(exact)

        def mean_of(values: torch.Tensor, exact: Exact = exact) -> torch.Tensor:
            """(P,): the gradient of the expected value of a completion."""
            of_all = lambda w: (exact.token_log_probs(w).sum(dim=1).exp() * values).sum() / len(QUESTIONS)  # noqa: E731
            return exact.gradient(of_all)

        longer, right, good = mean_of(tokens), exact.gradient(), mean_of(form)
        cases = {"GRPO": (grpo, right), "GFPO": (shortest_half, right)}
        cases |= {"GRPO of the sum": (of_the_sum, right + good), "GDPO": (of_each, right + good)}
        for name, (advantages, target) in cases.items():
            loss = loss_of("experiment_drgrpo/train.py", advantages, critic_type="std")
            moments = measure(loss, exact, 8)
            gain = float(moments.mean @ target)
            row = {"seed": seed, "proposal": name, **moments.compare(target)}
            row["length"] = 0.01 * float(moments.mean @ longer) / gain
            if target is not right:
                row |= {"right": float(moments.mean @ right) / gain, "form": float(moments.mean @ good) / gain}
            found.append(row)
    return found


if __name__ == "__main__":
    main()
