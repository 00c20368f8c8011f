"""The yardstick: exact quantities against slow loops, known biases against their closed forms, planted faults."""

import itertools
import math

import pytest
import torch

from doctor.yardstick.__main__ import main
from doctor.yardstick.figure import read_results
from doctor.yardstick.moments import Moments, draw_groups, measure
from doctor.yardstick.world import LENGTH, Exact, SoftmaxTable, Transformer, completions

EXACT = Exact.of(SoftmaxTable(0))
ACCURACY = EXACT.accuracy(EXACT.weights).tolist()
UNBIASED = ("REINFORCE", "REINFORCE, baseline J", "REINFORCE, best baseline", "RLOO", "Dr. GRPO")


@pytest.fixture
def yardstick(load_script):
    return load_script("benchmarks/yardstick.py")


@pytest.mark.parametrize("make", [SoftmaxTable, Transformer])
def test_the_world_is_complete_and_its_gradient_is_the_slope(make):
    exact = Exact.of(make(1))
    slow, policy = [0.0, 0.0], exact.log_distributions(exact.weights).exp()
    for question, rule in enumerate((lambda text: "a" in text, lambda text: text == "ab.")):
        total = 0.0
        for index, text in enumerate(completions()):
            row = question * len(completions()) + index
            chance = math.prod(policy[row, t, "ab.".index(letter)].item() for t, letter in enumerate(text))
            total += chance
            slow[question] += chance * rule(text)
        assert total == pytest.approx(1, abs=1e-12)
    assert exact.accuracy(exact.weights).tolist() == pytest.approx(slow, abs=1e-12)
    gradient = exact.gradient()
    for weight in (0, 5, len(gradient) - 1):
        step = torch.zeros_like(gradient)
        step[weight] = 1e-6
        rise = exact.objective(exact.weights + step) - exact.objective(exact.weights - step)
        assert gradient[weight].item() == pytest.approx(rise.item() / 2e-6, abs=1e-8)


def test_all_groups_are_there_with_their_chances():
    groups = draw_groups(EXACT, 0, 3)
    assert groups.chances.sum().item() == pytest.approx(1, abs=1e-12)
    slow: dict[tuple, float] = {}
    for rows in itertools.product(range(len(completions())), repeat=3):
        key = tuple(sorted(rows))
        slow[key] = slow.get(key, 0.0) + math.prod(EXACT.probabilities[row].item() for row in rows)
    found = {tuple(sorted(rows)): chance for rows, chance in zip(groups.rows.tolist(), groups.chances, strict=True)}
    assert found.keys() == slow.keys()
    assert all(found[key].item() == pytest.approx(slow[key], abs=1e-12) for key in slow)


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", UNBIASED)
def test_an_unbiased_estimator_measures_as_unbiased(yardstick, name, size):
    scale = {"RLOO": 1 / LENGTH, "Dr. GRPO": (size - 1) / size / LENGTH}.get(name, 1.0)  # no division by G - 1
    mean = measure(yardstick.ESTIMATORS[name], EXACT, size).mean
    assert torch.allclose(mean, scale * EXACT.gradient(), atol=1e-9 * scale)


@pytest.mark.parametrize("size", [2, 4])
def test_other_objectives_have_exactly_their_own_gradient(yardstick, size):
    names = ["MaxRL, summed"] + ["pass@2"] * (size > 2)
    for name in names:
        target = EXACT.gradient(yardstick.own_objective(name, EXACT, size))
        assert torch.allclose(measure(yardstick.ESTIMATORS[name], EXACT, size).mean, target, atol=1e-9), name


@pytest.mark.parametrize("question", [0, 1])
def test_the_standard_deviation_weighs_a_question_as_its_closed_form_says(yardstick, question):
    """E[advantage | k others succeed] of a success, minus that of a failure, over the numbers k of other successes."""
    size, p, wanted = 4, ACCURACY[question], 0.0
    for others in range(size):
        chance = math.comb(size - 1, others) * p**others * (1 - p) ** (size - 1 - others)
        for own, sign in ((1, 1), (0, -1)):
            share = (others + own) / size
            deviation = math.sqrt(share * (1 - share) * size / (size - 1)) + yardstick.STD_EPS
            wanted += sign * chance * (own - share) / deviation if 0 < share < 1 else 0.0
    moments = Moments.of(yardstick.ESTIMATORS["GRPO, only / std"], draw_groups(EXACT, question, size))
    assert torch.allclose(moments.mean, wanted / LENGTH * EXACT.gradient_of(question), atol=1e-9)


def test_the_filter_of_dapo_changes_the_scale_and_no_direction(yardstick):
    plain, filtered = (
        yardstick.one(name, yardstick.ESTIMATORS["DAPO"], EXACT, 4) for name in ("DAPO", "DAPO, filtered")
    )
    mixed = sum(1 - p**4 - (1 - p) ** 4 for p in ACCURACY) / 2
    assert filtered["scale"] == pytest.approx(plain["scale"] / mixed, abs=1e-9)
    assert filtered["angle"] == pytest.approx(plain["angle"], abs=1e-6)


def test_a_perfect_critic_never_misleads_and_no_critic_does_at_lambda_1(yardstick):
    rows = [row for row in yardstick.critics() if row["seed"] == 0]
    for row in rows:
        is_unbiased = row["critic"] == "perfect critic" or row["lambda"] == 1
        assert (row["angle"] < 1e-4) == is_unbiased, row
        assert not is_unbiased or row["scale"] == pytest.approx(1, abs=1e-9)


def test_gradients_of_the_divergence(yardstick):
    rows = {row["estimator"]: row for row in yardstick.penalties() if row["seed"] == 0}
    assert abs(rows["k1 as loss"]["scale"]) < 1e-12  # its gradient is 0 on average
    for name in ("k1 in the reward", "k1 in the reward, to go"):
        assert rows[name]["angle"] < 1e-4
        assert rows[name]["scale"] == pytest.approx(1, abs=1e-9)
    for name in ("k2 as loss", "k3 as loss, times the ratio", "all letters"):
        assert rows[name]["angle_tokens"] < 1e-4
        assert rows[name]["scale_tokens"] == pytest.approx(1, abs=1e-9)
    assert rows["k3 as loss"]["angle_tokens"] > 1
    assert rows["k3 in the reward"]["angle"] > 30


def test_old_samples_are_unbiased_only_with_the_weight_of_the_whole_completion(yardstick, monkeypatch):
    monkeypatch.setitem(yardstick.POLICIES, "table", [SoftmaxTable(0)])
    rows = {(row["lag"], row["correction"]): row for row in yardstick.lags()}
    for lag in yardstick.LAGS:
        assert rows[lag, "weight of the whole completion"]["changed"] < 1e-4
        others = {name: row["changed"] for (at, name), row in rows.items() if at == lag and "whole" not in name}
        assert all((angle > 0.1) == (lag > 0) for angle in others.values()), others


def test_moments_are_those_of_a_sample(yardstick):
    groups = draw_groups(EXACT, 0, 4)
    moments = Moments.of(yardstick.ESTIMATORS["GRPO"], groups)
    drawn = torch.multinomial(groups.chances, 20_000, replacement=True, generator=torch.Generator().manual_seed(0))
    sample = groups.part(drawn)
    own = yardstick.ESTIMATORS["GRPO"](sample) * sample.mask  # (M, G, T)
    gradients = torch.einsum("mgt,mgtp->mp", own, EXACT.scores[sample.rows])
    assert torch.allclose(gradients.mean(dim=0), moments.mean, atol=5 * (moments.variance / 20_000) ** 0.5)
    assert gradients.var(dim=0).sum().item() == pytest.approx(moments.variance, rel=0.05)


def test_the_committed_figures_are_those_of_the_code(yardstick):
    rows = {
        row["estimator"]: row
        for row in read_results()["groups"]
        if (row["policy"], row["seed"], row["size"]) == ("table", 0, 4)
    }
    for name in ("GRPO", "DAPO, filtered", "MaxRL, summed"):
        found = yardstick.one(name, yardstick.ESTIMATORS[name], EXACT, 4)
        assert {key: rows[name][key] for key in found} == pytest.approx(found, rel=1e-4, abs=1e-4)


# A user's file --------------------------------------------------------------------------------------------------------

LOSS = """
import torch
def policy_loss(log_probs, old_log_probs, log_probs_ref, advantages, mask, *, num_rows, num_tokens):
    ratio = (log_probs - old_log_probs).exp()
    return {sign}(ratio * advantages * mask{more}).sum() / {count}
def advantages(returns):
    return returns - returns.mean(dim=1, keepdim=True){std}
"""
RIGHT = {"sign": "-", "more": "", "count": "num_rows", "std": ""}


@pytest.mark.parametrize(
    ("fault", "sentences"),
    [
        ({}, ["exactly the direction"]),
        ({"sign": ""}, ["points away"]),
        ({"sign": "-0 * "}, ["points away"]),
        ({"count": "num_tokens"}, ["degrees off", "a bias by length"]),
        ({"more": " / mask.sum(dim=1, keepdim=True)"}, ["1.00, 0.50, 0.33 in a wrong completion"]),
        ({"std": " + 0.2"}, ["exactly the direction"]),  # a baseline: only noise
        ({"std": ".clamp(min=0.5)"}, ["exactly the direction", "The hard question counts"]),
        ({"more": " * (advantages > 0)"}, ["exactly the direction", "The hard question counts"]),
        (
            {"more": " * (mask.cumsum(dim=1) < mask.sum(dim=1, keepdim=True))"},
            ["degrees off"],
        ),  # the last token is left out
    ],
)
def test_a_fault_in_a_file_is_seen(fault, sentences, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("doctor.yardstick.__main__.SIZE", 2)  # seconds less, with the same biases
    path = tmp_path / "my_loss.py"
    path.write_text(LOSS.format(**RIGHT | fault))
    assert main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(sentence in shown for sentence in sentences), shown
    assert ("degrees off" in shown) == any("degrees off" in x or "1.00, 0.50" in x for x in sentences)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1", "defines none of the functions"),
        ("def advantages(returns): return returns", "defines no policy_loss"),
        ("def policy_loss(log_probs, mask): return (log_probs * mask).sum()", "takes no advantages"),
        (LOSS.format(**RIGHT | {"std": "[..., None]"}), "advantages must return a tensor of shape"),
        (LOSS.format(**RIGHT | {"count": "(0 / 0)"}), "raised ZeroDivisionError"),
        (
            LOSS.format(**RIGHT | {"std": " + 0 / returns.std(dim=1, keepdim=True)"}),
            "not finite for a group with returns [1.0, 1.0",
        ),
    ],
)
def test_a_file_that_cannot_be_measured_gets_a_sentence(text, sentence, tmp_path, capsys):
    path = tmp_path / "my_loss.py"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_has_a_point_in_the_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("doctor.yardstick.__main__.POLICIES", 1)
    assert main(["docs/loss_ours.py", "--figure", str(tmp_path / "mine.png")]) == 0
    assert (tmp_path / "mine.png").stat().st_size > 10_000
