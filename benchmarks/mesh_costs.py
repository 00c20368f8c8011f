"""Costs and savings of scale/mesh on each rank, and the damage of a log_softmax over a rank's own logits.

    python benchmarks/mesh_costs.py            # some minutes on two cores: measures, and prints the tables
    python benchmarks/mesh_costs.py --draw     # from the committed data: the tables, and scale/mesh/broken.png

Bytes are counted over the tensors that a rank has allocated; torch's dispatcher counts messages. Both are the same
on a GPU; no time is measured. The data are the entry mesh of benchmarks/results/measurements.json.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from common.experience import collate
from common.logprobs import score_logits
from common.policy import Policy
from common.sampling import begin_rows, sample
from fast.sharded_weights import gathered_weights
from viewer.bands import draw_comparison
from viewer.results import KeptRun, read_json, write_json
from viewer.runs import Run

from harness.base.machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "measurements.json"
EXPERIMENT = ROOT / "scale/mesh"
MESHES = ("1x1", "2x1", "1x2", "4x1", "2x2", "1x4", "2x2x1")  # data x tensor, or replicate x shard x tensor
SIZES = {"vocab_size": 32_768, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0, "architectures": ["Llama"]}
ROWS, PROMPT, COMPLETION = 8, 8, 56  # of each tensor group, in two micro-batches
SEEDS = (0, 1, 2)
KINDS = {"correct": "over all logits", "broken": "log_softmax over each half"}


@dataclass(frozen=True)
class Config:
    draw: bool = False  # only draw and print the committed data


def main(config: Config) -> None:
    if not config.draw:
        with tempfile.TemporaryDirectory() as folder:
            found = {mesh: measure(mesh, Path(folder)) for mesh in MESHES}
            runs = {kind: [train(kind, seed, Path(folder)) for seed in SEEDS] for kind in KINDS}
            write_json(RESULTS, {"sizes": SIZES, "meshes": found, "runs": runs} | describe_machine(), entry="mesh")
    data = read_json(RESULTS, "mesh")
    print_tables(data["meshes"])
    for kind, runs in data["runs"].items():
        for key in ("eval/sampled/accuracy", PANELS[-1]):
            print(f"{kind}, {key}, last value:", *(f"{[x[key] for x in rows if key in x][-1]:.3g}" for rows in runs))
    groups = {
        KINDS[kind]: [KeptRun(Path(kind), {}, None, rows) for rows in runs] for kind, runs in data["runs"].items()
    }
    draw_comparison(groups, EXPERIMENT / "broken.png", PANELS)


# Bytes and messages ---------------------------------------------------------------------------------------------------


def measure(mesh: str, folder: Path) -> dict:
    """Start a mesh; returns the measurements of its first rank."""
    num_ranks = math.prod(map(int, mesh.split("x")))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    _start(*launcher, __file__, mesh, str(folder))
    return json.loads((folder / "rank0.json").read_text(encoding="utf-8"))


def run_rank(sizes: str, folder: Path) -> None:
    """One rank: bytes of its tensors, and messages of a token and of an update."""
    import train
    from mesh import distribute, start_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    from harness.base.signals import leave
    from harness.models.loading import make_reference

    *copies, data, tensor = map(int, sizes.split("x"))
    replicas = math.prod(copies)
    config = train.Config(
        device="cpu", threads=1, tensor_parallel=tensor, replicas=replicas, prompts_per_step=2 * replicas * data,
        group_size=ROWS // 2, micro_batch_size=ROWS // 2,
    )  # fmt: skip
    config, mesh = start_mesh(config)
    torch.manual_seed(0)
    policy = Policy(LlamaForCausalLM(LlamaConfig(**SIZES)), None, [2], 0)
    reference = make_reference(policy)
    distribute(mesh, policy, reference)
    found = {"bytes": {"weights": bytes_of(policy.parameters()), "reference": bytes_of(reference.parameters())}}

    with gathered_weights(policy):  # of the shards, as sampling needs them
        found["bytes"]["weights while sampling"] = bytes_of(policy.parameters())
    prompts, counts = [[3 + n] * PROMPT for n in range(ROWS)], []
    for budget in (9, 1):
        with Messages(mesh) as messages:
            sample(policy, prompts, 1, max_new_tokens=budget, key=(0, 1))
        counts.append(messages.numbers)
    found["messages per sampled token"] = {name: (counts[0] - counts[1])[name] / 8 for name in counts[0]}

    rows = begin_rows(prompts, 1)
    for row in rows:
        row.act([5] * COMPLETION, [-1.0] * COMPLETION)
    experience = collate(rows, 0)
    experience.advantages, experience.log_probs_ref = torch.ones(ROWS, 1), experience.sampler_log_probs
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, foreach=False)
    logits: list[int] = []
    hook = policy.model.get_output_embeddings().register_forward_hook(lambda *x: logits.append(bytes_of([x[2]])))
    train.update(config, policy, optimizer, experience, 1)  # the first update sets up what later ones use
    hook.remove()
    with Messages(mesh) as messages:
        train.update(config, policy, optimizer, experience, 2)
    found["messages per update"], found["bytes sent per update"] = dict(messages.numbers), dict(messages.sizes)
    found["bytes"]["gradients"] = bytes_of(weight.grad for weight in policy.parameters())
    found["bytes"]["optimizer"] = bytes_of(x for state in optimizer.state.values() for x in state.values())
    found["bytes"]["logits of a micro-batch"] = max(logits)
    if distributed.get_rank() == 0:
        (folder / "rank0.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    leave(0)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes that these tensors' storages take on this rank; a storage counts once."""
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values())


class Messages(TorchDispatchMode):
    """Counts the messages that this rank takes part in, by the dimension of the mesh, and the bytes that it puts in.

    "objects" are Python objects, such as numbers of rows, of all ranks. Messages within an operation on divided weights
    are hidden from a dispatch mode: the messages for the gradient norm, one for each dimension of each kind of weight.
    """

    def __init__(self, mesh):
        super().__init__()
        self.names = {mesh[name].get_group().group_name: name for name in mesh.mesh_dim_names}
        self.numbers, self.sizes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and re.search("reduce|gather", func.__name__):
            tensors = _tensors(args)
            is_object = any(x.dtype == torch.uint8 or (x.dtype == torch.int64 and x.numel() == 1) for x in tensors)
            name = "objects" if is_object else self.names[_group_name(args)]
            self.numbers[name] += 1
            self.sizes[name] += max(x.numel() * x.element_size() for x in tensors)
        return func(*args, **kwargs or {})


def _group_name(args: tuple) -> str:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return distributed.ProcessGroup.unbox(value).group_name
    return next(value for value in args if isinstance(value, str) and value.isdigit())


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for part in value for x in _tensors(part)] if isinstance(value, list | tuple) else []


def print_tables(meshes: dict[str, dict]) -> None:
    print("| MB per rank | " + " | ".join(meshes) + " |\n" + "|---" * (1 + len(meshes)) + "|")
    for part in meshes["1x1"]["bytes"]:
        print(f"| {part} | " + " | ".join(f"{found['bytes'][part] / 1e6:.1f}" for found in meshes.values()) + " |")
    for what in ("messages per sampled token", "messages per update"):
        for name in ("tensor", "shard", "replicate", "objects"):
            print(f"| {what}, {name} | " + " | ".join(f"{m[what].get(name, 0):g}" for m in meshes.values()) + " |")


# The trap -------------------------------------------------------------------------------------------------------------

PANELS = ("reward/correct", "loss/grad_norm", "loss/kl", "policy/sampling_log_prob_difference")


def train(kind: str, seed: int, folder: Path) -> list[dict]:
    """The metrics of a run in one process; "broken": with log-probs as two ranks would compute them."""
    _start(sys.executable, __file__, kind, str(seed), str(folder))
    rows = Run(folder / "mesh" / f"{kind}-seed{seed}").metrics.rows
    keys = ("step", "eval/sampled/accuracy", *PANELS)
    return [{key: row[key] for key in keys if key in row} for row in rows]


def run_alone(kind: str, seed: str, folder: str) -> None:
    import train

    load = train.load_policy

    def load_broken(*arguments) -> Policy:
        policy = load(*arguments)
        policy.score = score_halves
        return policy

    if kind == "broken":
        train.load_policy = load_broken
    flags = ("--steps", "40", "--seed", seed, "--eval-every", "0", "--checkpoint-every", "0")
    train.main([*flags, "--name", f"{kind}-seed{seed}", "--runs-dir", folder])


def score_halves(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As scale/mesh/broken.patch: each token is scored among the columns of its half only."""
    half = logits.shape[1] // 2
    own = logits.view(-1, 2, half)[torch.arange(len(targets)), targets // half]  # (n, V/2)
    return score_logits(own, targets % half)


def _start(*command: str) -> None:
    """Start this script again, with the modules of the experiment."""
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{EXPERIMENT}", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=os.environ | paths)


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        run_rank(sys.argv[1], Path(sys.argv[2]))
    elif sys.argv[1:2] in (["broken"], ["correct"]):
        run_alone(*sys.argv[1:])
    else:
        main(tyro.cli(Config))
