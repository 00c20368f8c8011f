"""The update of every experiment: leaving out rows to save time changes no gradient."""

import pytest
import torch

from common.experience import Experience, collate
from common.sampling import sample

from common.plumbing.config import RunConfig
from common.plumbing.loading import load_policy

GROUP_SIZE = 2


@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_drgrpo"])
@pytest.mark.parametrize("advantages", [[1.0, -1.0, 0.0, 0.0, 2.0, -2.0], [0.0] * 6])
def test_skipping_zero_variance_groups_changes_no_gradient(load_script, monkeypatch, experiment, advantages):
    train = load_script(f"{experiment}/train.py")
    config = train.Config(kl_weight=0.0, group_size=GROUP_SIZE, micro_batch_size=2, max_grad_norm=1e9, max_new_tokens=6)
    policy = load_policy(RunConfig(device="cpu"))
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    experience = collate(sample(policy, prompts, GROUP_SIZE, max_new_tokens=6, key=(0,)), policy.pad_id)
    experience.advantages = torch.tensor(advantages)[:, None]

    def gradient() -> tuple[torch.Tensor, int]:
        policy.zero_grad()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        statistics = train.update(config, policy, optimizer, experience, step=1)
        assert all(parameter.grad is not None for parameter in policy.parameters())
        return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), len(statistics.rows)

    skipping, trained = gradient()
    split = Experience.split
    monkeypatch.setattr(Experience, "split", lambda self, size, skip_zero_advantages: split(self, size))
    everything, all_rows = gradient()
    assert (trained, all_rows) == (4 if any(advantages) else 1, 6)
    assert (skipping - everything).norm() <= 1e-6 * everything.norm()
