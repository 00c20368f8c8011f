"""Two processes and one inference engine: the samples of one process.

The server is in the process of the tests; what the ranks do is below, in `main`.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import distributed

from common.engines.engine import Engine
from common.errors import EngineError
from common.parallel import gather, gather_rows, is_main, part_of

from common.plumbing.config import RunConfig
from common.plumbing.ending import leave
from common.plumbing.loading import load_policy
from common.plumbing.processes import meet

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 6, 7], list(range(40, 60)), [9, 8]]  # with groups of six: each rank has half of the second group
GROUP_SIZE = 6


def sample(engine: Engine) -> list[list[int]]:
    """The ids of two rollouts, with an update of the weights between them; all ranks together."""
    policy, ids = load_policy(RunConfig(device="cpu")), []
    for step in (1, 2):
        part = part_of(len(PROMPTS) * GROUP_SIZE)
        rows = engine.sample(policy, PROMPTS, GROUP_SIZE, max_new_tokens=8, key=(0, step), rows=part)
        ids += [row.ids for row in gather_rows(rows)]
        with torch.no_grad():
            policy.model.get_decoder().norm.weight.mul_(0.5)
    return ids


def main(place: str, url: str) -> None:
    """One rank: it samples; then one of two requests, of any rank, gets an answer that is wrong."""
    torch.set_num_threads(1)
    meet("gloo")
    engine = Engine(url, Path(place) / "engine")
    ids, ending = sample(engine), None
    if is_main():
        fault = json.dumps({"fault": "fewer_log_probs", "times": 1}).encode()
        urllib.request.urlopen(f"{url}/stand_in", fault).read()
    distributed.barrier()
    try:
        policy = load_policy(RunConfig(device="cpu"))
        engine.sample(policy, PROMPTS[:2], 1, max_new_tokens=4, key=(0, 3), rows=part_of(2), push=False)
    except EngineError as error:
        ending = str(error)
    endings = gather(ending)
    if is_main():
        (Path(place) / "found.json").write_text(json.dumps({"ids": ids, "endings": endings}))
    distributed.barrier()
    engine.close()
    leave(0)  # as programs of several processes end: threads of a process group can abort one that ends as usual


def test_two_ranks_sample_as_one_process_and_end_together(stand_in, tmp_path):
    """The main rank pushes for both. A wrong answer to one rank ends all with its sentence."""
    server = stand_in()
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, tmp_path, server.url)
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        **{"env": os.environ | {"OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True, "cwd": ROOT},
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert server.calls["/collective_rpc"] == 2  # before each of two rollouts
    found = json.loads((tmp_path / "found.json").read_text())
    engine = Engine(server.url, tmp_path / "alone")
    assert found["ids"] == sample(engine)
    engine.close()
    (ending, other) = found["endings"]
    assert "log-probs for" in ending
    assert other == ending


if __name__ == "__main__":
    main(*sys.argv[1:])
