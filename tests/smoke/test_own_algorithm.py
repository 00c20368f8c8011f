"""A new experiment is a directory with a train.py: nothing else needs to know about it.

The example comes from docs/your_algorithm.md.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_files import ROOT, finished, json_of, rows_of

from common.experience import collate
from common.logprobs import token_log_probs
from common.sampling import sample

from harness.base.config import RunConfig
from harness.models.loading import load_policy

SMALL = (
    *("--prompts-per-step", "2", "--group-size", "4", "--epochs-per-step", "2", "--minibatch-size", "4"),
    *("--eval-prompts", "2", "--eval-every", "0", "--max-new-tokens", "16", "--device", "cpu", "--lr", "1e-4"),
)
SEQUENCE_RATIO = (
    "    ratio = probability_ratio(log_probs, micro.old_log_probs, mask)  # (b, T-1)\n",
    """    log_ratio = probability_ratio(log_probs, micro.old_log_probs, mask).log().sum(dim=1, keepdim=True)
    ratio = (log_ratio / mask.sum(dim=1, keepdim=True)).exp().expand(mask.shape)
""",
)


@pytest.mark.slow
def test_a_copy_with_another_loss_is_an_experiment(experiment_mine, tmp_path):
    """Run, help, samples, page, comparison, card and resuming use the new experiment."""
    shutil.copytree(Path(experiment_mine.__file__).parent, tmp_path / "policy_gradients" / "mine")

    def run(*command: str) -> str:
        result = finished(*command, cwd=tmp_path)
        assert result.returncode == 0, result.stderr[-2000:]
        return result.stdout + result.stderr

    script = "policy_gradients/mine/train.py"
    assert "--clip-eps" in run(script, "--help")
    printed = run(script, *SMALL, "--steps", "2", "--name", "first", "--progress", "policy/surprise")
    assert re.search(r"step 2/2 .*  surprise \d", printed)
    directory = tmp_path / "runs" / "mine" / "first"
    settings = json_of(directory / "config.json")
    assert settings["experiment"] == "mine"
    assert "of REINFORCE" in settings["loss"]
    assert "of REINFORCE" in (directory / "report.html").read_text()

    metrics, samples = rows_of(directory), rows_of(directory, "samples")
    losses = {row["step"]: row["loss/total"] for row in metrics if "loss/total" in row}
    for step, loss in losses.items():
        updates = [update for row in samples if row["step"] == step for update in row["updates"]]
        assert sum(sum(update["terms"]) for update in updates) / 4 == pytest.approx(loss, abs=5e-6)
    for update in (update for row in samples for update in row["updates"]):
        assert update["surprise"] == pytest.approx([-x for x in update["log_probs"]], abs=1e-5)
    assert all(row["policy/surprise"] > 0 for row in metrics if "loss/total" in row)

    assert "resuming" in run(script, "--resume", str(directory), "--steps", "3")
    table = run("-m", "viewer.compare", str(directory), str(ROOT / "experiment_base/results/seed0"))
    assert "mine/first" in table
    run(str(ROOT / "export.py"), str(directory), "--output", "exported")
    assert "a run of `mine` with the questions" in (tmp_path / "exported" / "README.md").read_text()
    assert "TRAP" not in run("-m", "doctor", script)


@pytest.mark.parametrize("name", ["REINFORCE", "a ratio of sequences"])
def test_the_push_is_a_finite_difference_of_the_loss(experiment_mine, make_own, name):
    """For any loss: the value that `update` records, compared with the slope of the sum of all terms."""
    train = experiment_mine if name == "REINFORCE" else make_own(SEQUENCE_RATIO)
    policy = load_policy(RunConfig(device="cpu"))
    rows = sample(policy, [[5, 6, 7]], 4, max_new_tokens=6, key=(0,), prompt_index=[0])
    experience = collate(rows, policy.pad_id)
    experience.advantages = torch.tensor([1.0, -0.5, 2.0, -1.0])[:, None]
    scores, generator = token_log_probs(policy, experience, 4), torch.manual_seed(0)
    experience.old_log_probs = scores + 0.05 * torch.randn(scores.shape, generator=generator)
    experience.log_probs_ref = scores + 0.5 * torch.randn(scores.shape, generator=generator)
    config = train.Config(group_size=4, prompts_per_step=1, micro_batch_size=2, kl_weight=0.1, max_new_tokens=6)
    statistics = train.update(config, policy, torch.optim.SGD(policy.parameters(), lr=0.0), experience, step=1)

    exact = replace(
        experience,
        **{field: getattr(experience, field).double() for field in ("old_log_probs", "log_probs_ref", "advantages")},
    )
    terms, _ = train.policy_loss(config, scores.double(), exact, num_rows=4)
    for index, row in enumerate(rows):
        measured = statistics.rows[0, row.completion_index][0].measurements
        expected = terms[index, : len(measured["terms"])]
        torch.testing.assert_close(measured["terms"].double(), expected, atol=1e-6, rtol=0)
        for t in range(len(row.ids) - 1):
            ends = []
            for step in (1e-5, -1e-5):
                moved = scores.double()
                moved[index, t] += step
                ends.append(train.policy_loss(config, moved, exact, num_rows=4)[0].sum().item())
            assert measured["push"][t].item() == pytest.approx((ends[1] - ends[0]) / 2e-5, abs=1e-6)
