"""Which device a process takes, and what a run of several keeps of it."""

import pytest

from common.errors import UserError

from common.plumbing.config import PolicyConfig
from common.plumbing.processes import own_device
from common.plumbing.settings import describe_settings


@pytest.fixture
def start(monkeypatch):
    """Be one of several processes of a machine with two GPUs."""

    def start(num_processes: int, local_rank: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(num_processes))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    return start


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_each_of_several_processes_takes_its_own_gpu(start, device):
    """Also where the run that is resumed, or the user, names one."""
    for local_rank in (0, 1):
        start(2, local_rank)
        assert own_device(device) == f"cuda:{local_rank}"
    start(3, 2)
    with pytest.raises(UserError, match="process 2 of this machine has no GPU: start at most 2"):
        own_device(device)


def test_one_process_takes_the_device_that_is_named(start):
    start(1, 0)
    for device in ("cuda", "cuda:1", "cpu"):
        assert own_device(device) == device
    start(2, 1)
    assert own_device("cpu") == "cpu"


@pytest.mark.parametrize(("processes", "kept"), [(1, "cuda:1"), (2, "cuda")])
def test_a_run_of_several_processes_keeps_no_number_of_a_gpu(processes, kept):
    """Otherwise all of them would be on the main one's GPU when it is resumed."""
    settings = describe_settings("experiment_base", PolicyConfig(device="cuda:1"), {"processes": processes})
    assert settings["device"] == kept
