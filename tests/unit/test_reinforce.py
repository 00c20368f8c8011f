"""policy_gradients/reinforce without a baseline, and over more steps than learning/test_replay.py computes again."""

import pytest
from run_files import metrics_of, rows_of


@pytest.mark.parametrize("kind", ["mean", "none"])
def test_advantages_are_rewards_minus_the_mean_of_earlier_ones(load_script, tmp_path, kind):
    flags = "--steps 3 --prompts-per-step 2 --eval-prompts 1 --eval-every 0 --max-new-tokens 24 --name x"
    train = load_script("policy_gradients/reinforce/train.py")
    train.main([*flags.split(), "--baseline", kind, "--runs-dir", str(tmp_path)])
    directory, baseline = tmp_path / "reinforce" / "x", 0.0
    for metrics in metrics_of(directory)[1:4]:
        rows = [row for row in rows_of(directory, "samples") if row["step"] == metrics["step"]]
        assert [row["advantage"] for row in rows] == pytest.approx([row["return"] - baseline for row in rows])
        baseline += 0.1 * (metrics["reward/total"] - baseline) if kind == "mean" else 0
        assert metrics["reward/baseline"] == pytest.approx(baseline)
