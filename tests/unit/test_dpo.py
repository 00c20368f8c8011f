"""DPO: its loss against a slow loop and TRL, and runs of the bundled policy on a few pairs."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from run_files import json_of, metrics_of, rows_of, write_rows

from common.experience import Experience, collate
from common.preferences import preference_metrics
from viewer.panels import panels_of
from viewer.report import count_rows_per_step, write_report

from harness.logs.statistics import RowUpdate, UpdateStatistics, pair_metrics
from harness.models.reward_loading import new_reward_model
from harness.task.pairs import load_pairs, read_pairs

PAIRS = [
    {"prompt": f"What is {a} + {b}?", "chosen": f"<think>{a}+{b}={a + b}</think><answer>{a + b}</answer>"}
    | {"rejected": f"<answer>{a * b + 1}</answer>" if b % 2 else f"<think>{a}</think><answer>{b}</answer>"}
    for a, b in itertools.product((3, 14, 15), (92, 6, 5))
]
FLAGS = "--pairs-per-step 4 --eval-prompts 3 --max-new-tokens 8 --eval-every 1 --lr 1e-4 --name x"
BETA = 0.3
MASK = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 1]])  # answers of other lengths
INDEX = torch.tensor([0, 1, 1, 0])  # of the second pair the rejected answer comes first, because it is shorter


@pytest.fixture
def train(load_script) -> ModuleType:
    return load_script("rewards/dpo/train.py")


@pytest.fixture
def config(train, tmp_path):
    write_rows(tmp_path / "pairs.jsonl", PAIRS)
    sizes = {"eval_prompts": 3, "pairs_per_step": 3, "micro_batch_size": 3}
    settings = {"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa", "beta": BETA}
    return train.Config(data=str(tmp_path / "pairs.jsonl"), **sizes, **settings)


def values(seed: int) -> torch.Tensor:
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def experience_of(make_experience, reference: torch.Tensor, rows=slice(None)) -> Experience:
    experience = make_experience(MASK[rows], completion_index=INDEX[rows])
    return replace(experience, sampler_log_probs=reference[rows])


def loss_of(train, log_probs, experience) -> tuple[torch.Tensor, torch.Tensor]:
    """The terms, and their gradient."""
    leaf = log_probs.clone().requires_grad_()
    terms, _ = train.policy_loss(train.Config(beta=BETA), leaf, experience, num_pairs=2)
    terms.sum().backward()
    return terms.detach(), leaf.grad


def slow_loss(log_probs: list, reference: list) -> tuple[list[list[float]], list[list[float]]]:
    """arXiv 2305.18290, equation 7, and its gradient by each log-prob, token by token; 2 pairs."""
    terms, slopes = ([[0.0] * MASK.shape[1] for _ in MASK] for _ in range(2))
    for pair in ((0, 1), (2, 3)):
        sums, num_tokens = {}, 0
        for row in pair:
            at = [t for t in range(MASK.shape[1]) if MASK[row, t]]
            sums[int(INDEX[row])] = sum(log_probs[row][t] - reference[row][t] for t in at)
            num_tokens += len(at)
        margin = BETA * (sums[0] - sums[1])
        for row in pair:
            for t in range(MASK.shape[1]):
                if MASK[row, t]:
                    terms[row][t] = math.log1p(math.exp(-margin)) / num_tokens / 2
                    sign = 1 if INDEX[row] == 0 else -1
                    slopes[row][t] = -sign * BETA / (1 + math.exp(margin)) / 2
    return terms, slopes


# the loss -----------------------------------------------------------------------------------------------------------


def test_terms_and_gradient_equal_a_slow_loop(train, make_experience):
    log_probs, reference = values(0), values(1)
    found = loss_of(train, log_probs, experience_of(make_experience, reference))
    for ours, slow in zip(found, slow_loss(log_probs.tolist(), reference.tolist()), strict=True):
        torch.testing.assert_close(ours, torch.tensor(slow, dtype=torch.float64), rtol=0, atol=1e-12)


def test_ignored_tokens_change_nothing(train, make_experience):
    log_probs, reference = values(0), values(1)
    expected = loss_of(train, log_probs, experience_of(make_experience, reference))
    for garbage in (math.nan, math.inf):
        spoilt = [torch.where(MASK.bool(), x, garbage) for x in (log_probs, reference)]
        found = loss_of(train, spoilt[0], experience_of(make_experience, spoilt[1]))
        assert all(torch.equal(ours, others) for ours, others in zip(found, expected, strict=True))


def test_loss_and_gradient_equal_trl(train, make_experience):
    trainer = pytest.importorskip("trl", reason="TRL is not installed").DPOTrainer
    log_probs, reference = values(0).float(), values(1).float()
    terms, gradient = loss_of(train, log_probs, experience_of(make_experience, reference))
    order = torch.tensor([0, 3, 1, 2])  # TRL's batch: the chosen answers, then the rejected ones
    theirs = log_probs[order].clone().requires_grad_()
    mask = torch.nn.functional.pad(MASK[order], (1, 0))  # of tokens
    ref = (reference * MASK).sum(dim=1)[order]
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs |= {"ref_chosen_logps": ref[:2], "ref_rejected_logps": ref[2:]}
    nothing = torch.zeros_like(log_probs)
    outputs = SimpleNamespace(log_probs=theirs * MASK[order], entropy=nothing, mean_logits=nothing, is_top1=nothing > 0)
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    own = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"], loss_weights=[1.0],
        beta=BETA, use_weighting=False, _metrics={"eval": defaultdict(list)}, _total_train_tokens=0,
    )  # fmt: skip
    loss = trainer._compute_loss(own, lambda **_: outputs, inputs, return_outputs=False)
    loss.backward()
    assert terms.sum().item() == pytest.approx(loss.item(), abs=1e-6)
    assert (gradient[order] - theirs.grad).abs().max() < 1e-6
    assert gradient.abs().max() > 0.01


# the update ---------------------------------------------------------------------------------------------------------


def test_equal_scores_count_half_in_training_as_in_the_evaluation(load_script, config):
    """Of pairs with margins of 1, -1, 0 and 0, by DPO and by a reward model."""
    margins, statistics = [1.0, -1.0, 0.0, 0.0], UpdateStatistics(1.0)
    for pair, margin in enumerate(margins):
        for index, score in enumerate((margin / 2, -margin / 2)):
            update = RowUpdate(0, 0, {"score": torch.tensor([score]), "log_probs": torch.zeros(1)})
            statistics.rows[pair, index] = [update]
    statistics.metrics = dict  # no update was made
    scores = [(margin / 2, -margin / 2) for margin in margins]
    assert preference_metrics(scores, [(1, 1)] * 4, [False] * 4)["accuracy"] == 0.5
    assert pair_metrics(statistics)["preference/accuracy"] == 0.5

    judge = load_script("rewards/reward_model/train.py")
    model = new_reward_model(judge.Config(device="cpu", dtype="float32", attn_implementation="sdpa"))
    torch.nn.init.zeros_(model.model.score.weight)
    pairs, _ = load_pairs(config, model, read_pairs(config))
    settings = judge.Config(pairs_per_step=3, micro_batch_size=3)
    batch = collate([row for pair in pairs[:3] for row in pair.rows], model.pad_id)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert judge.update(settings, model, optimizer, batch)["preference/accuracy"] == 0.5


# runs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(train, tmp_path, monkeypatch) -> Callable[..., Path]:
    monkeypatch.chdir(tmp_path)
    write_rows("pairs.jsonl", PAIRS * 2)

    def run(*flags: str) -> Path:
        train.main(["--data", "pairs.jsonl", *FLAGS.split(), *flags])
        return tmp_path / "runs" / "dpo" / "x"

    return run


def test_the_terms_of_samples_add_up_to_the_logged_loss(run):
    directory = run("--epochs", "4", "--beta", "0.5", "--lr", "2e-5")
    metrics = {row["step"]: row for row in metrics_of(directory) if "loss/total" in row}
    samples = [row for row in rows_of(directory, "samples") if row["step"] == 10]
    assert len(samples) == 8  # all answers of the step's pairs
    terms = [sum(update["terms"]) for row in samples for update in row["updates"]]
    assert sum(terms) == pytest.approx(metrics[10]["loss/total"], rel=1e-5)
    scores = {name: [row["updates"][0]["score"] for row in samples if row["rewards"]["chosen"] == value]
              for name, value in (("chosen", 1), ("rejected", 0))}  # fmt: skip
    for name, found in scores.items():
        mean = sum(map(sum, found)) / 4
        assert mean == pytest.approx(metrics[10][f"preference/score_{name}"], abs=1e-5)
        assert mean * (1 if name == "chosen" else -1) > 0
    assert metrics[12]["preference/margin"] > metrics[2]["preference/margin"]
    assert metrics[12]["loss/total"] < 0.9 * math.log(2)
    for row in samples:
        log_ratio = [a - b for a, b in zip(row["updates"][0]["log_probs"], row["sampler_log_probs"], strict=True)]
        assert row["updates"][0]["score"] == pytest.approx([0.5 * x for x in log_ratio], abs=1e-5)
        assert row["question"].startswith("What is")
    page = write_report(directory).read_text(encoding="utf-8")
    assert "trained the policy tiny on the pairs of" in page
    assert count_rows_per_step(json_of(directory / "config.json")) == len(samples)  # the page compares complete steps
    panels = {panel.title: labels for panel, labels in panels_of(metrics_of(directory))}
    assert "eval/log_prob_rejected" in panels["log-prob of an answer"]


def test_a_new_adapter_is_compared_with_its_base(run):
    """All scores are 0 at first, and only the adapter is saved."""
    directory = run("--lora-rank", "2", "--max-pairs", "4")
    first = metrics_of(directory)[1]
    assert first["loss/total"] == pytest.approx(math.log(2), abs=1e-5)
    assert (directory / "final" / "adapter_config.json").exists()
