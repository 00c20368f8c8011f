"""policy_gradients/reinforce: its loss against the definition, its baseline against a slow loop."""

import json

import pytest
import torch

MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
ADVANTAGES = torch.tensor([[0.75], [-0.25], [-2.0]], dtype=torch.float64)


@pytest.fixture
def train(load_script):
    return load_script("policy_gradients/reinforce/train.py")


def test_terms_and_pushes_are_those_of_the_definition(train, make_experience):
    """Whatever the values at other tokens are."""
    log_probs = torch.linspace(-3, -1, 15, dtype=torch.float64).view(3, 5)
    for garbage in (0.0, float("nan"), float("-inf")):
        given = torch.where(MASK.bool(), log_probs, garbage).requires_grad_()
        terms, _ = train.policy_loss(train.Config(), given, make_experience(MASK, advantages=ADVANTAGES), num_rows=3)
        terms.sum().backward()
        for row in range(3):
            for t in range(5):
                advantage = ADVANTAGES[row, 0].item() if MASK[row, t] else 0.0
                assert terms[row, t].item() == pytest.approx(-advantage * log_probs[row, t].item() / 3)
                assert -given.grad[row, t].item() == pytest.approx(advantage / 3)


@pytest.mark.parametrize("baseline", [0.0, 0.4, 17.0])
def test_the_mean_gradient_is_that_of_the_expected_reward_whatever_the_baseline(train, make_experience, baseline):
    """Over all answers of one token, each with its probability."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, 0.2, 0.7], dtype=torch.float64)
    (expected,) = torch.autograd.grad(-(logits.softmax(0) @ rewards), logits)
    found = torch.zeros_like(logits)
    for answer, probability in enumerate(logits.softmax(0).tolist()):
        log_prob = logits.log_softmax(0)[answer].view(1, 1)
        advantage = (rewards[answer] - baseline).view(1, 1)
        experience = make_experience(torch.ones(1, 1, dtype=torch.long), advantages=advantage)
        terms, _ = train.policy_loss(train.Config(), log_prob, experience, num_rows=1)
        found += probability * torch.autograd.grad(terms.sum(), logits)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["mean", "none"])
def test_advantages_are_rewards_minus_the_mean_of_earlier_ones_also_after_a_resume(train, tmp_path, kind):
    flags = ["--steps", "3", "--prompts-per-step", "6", "--eval-prompts", "4", "--eval-every", "0", "--baseline", kind]
    flags += ["--checkpoint-every", "2", "--runs-dir", str(tmp_path), "--max-new-tokens", "24"]
    train.main([*flags, "--name", "whole"])
    train.main([*flags, "--name", "half", "--steps", "2"])
    train.main(["--resume", str(tmp_path / "reinforce/half"), "--steps", "3"])
    lines = (tmp_path / "reinforce/whole/metrics.jsonl").read_text().splitlines()
    metrics = {row["step"]: row for row in map(json.loads, lines) if "reward/total" in row}
    samples = (tmp_path / "reinforce/whole/samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in samples]
    baseline = 0.0
    for step in (1, 2, 3):
        of_step = [row for row in samples if row["step"] == step]
        assert [row["advantage"] for row in of_step] == pytest.approx([row["return"] - baseline for row in of_step])
        if kind == "mean":
            baseline = 0.9 * baseline + 0.1 * metrics[step]["reward/total"]
        assert metrics[step]["reward/baseline"] == pytest.approx(baseline)
    whole, half = (tmp_path / f"reinforce/{name}/final/model.safetensors" for name in ("whole", "half"))
    assert whole.read_bytes() == half.read_bytes()
