"""scale/mesh: meshes of two and four processes sample and train like one process.

Processes are started once for all meshes of two ranks, and once for all of four, with all their scenarios; the tests
compare the results with experiment_base's in this process.
"""

import functools
import importlib.util
import math
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from run_files import ROOT, launch, metrics_of, rows_of
from safetensors.torch import load_file
from torch import distributed
from transformers import AutoModelForCausalLM

from common.errors import UserError
from common.experience import collate
from common.logprobs import score_logits, token_log_probs
from common.parallel import call_once, data_size, gather, gather_all, part_of, rank, world_size
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory

from harness.base.config import TINY_POLICY
from harness.logs.statistics import UpdateStatistics

HEADS, VOCAB, ROWS, STEPS, GROUP_SIZE = 4, 24, 24, 2, 4
pytestmark = [pytest.mark.all_questions, pytest.mark.slow]

TRAIN = ROOT / "scale/mesh" / "train.py"
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10], [11, 12]]
# Rows, optimizers and models: see `make_policy` and `run_scenario`
SCENARIOS = (
    "ragged", "minibatches", "adamw", "skipped", "tools", "chunks", "biases", "all biases", "norms of heads",
    "checkpoints", "lora", "bfloat16", "lora bfloat16",
)  # fmt: skip
SAMPLED = ("ragged", "biases", "all biases", "norms of heads", "lora")  # the others have one of these models
OF_ONE_TENSOR_GROUP = tuple(name for name in SCENARIOS if name not in ("minibatches", "skipped"))
MESHES = {  # replicate x shard x tensor
    "1x1x2": OF_ONE_TENSOR_GROUP,
    "1x2x1": ("ragged", "adamw", "minibatches", "skipped", "lora"),
    "1x2x2": ("ragged", "adamw", "minibatches", "skipped"),
    "1x1x4": ("ragged",),  # its model has four key-value heads
    "2x2x1": ("ragged", "adamw", "minibatches", "skipped"),
    "2x1x2": ("ragged", "adamw"),
}


# Run by every process


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.replace("/", "__").removesuffix(".py"), ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_policy(scenario: str, num_kv_heads: int = 2) -> Policy:
    """A random model with its adapter, if the scenario has one."""
    from transformers import AutoConfig

    from harness.models.adapters import add_adapter

    kind = {"biases": "qwen2", "norms of heads": "qwen3"}.get(scenario, "llama")
    more = {"attention_bias": True, "mlp_bias": True} if scenario == "all biases" else {}
    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS, head_dim=8,
        num_key_value_heads=num_kv_heads, intermediate_size=64, initializer_range=0.3, bos_token_id=None,
        eos_token_id=2, pad_token_id=None, tie_word_embeddings=scenario == "adamw",
        architectures=["ARandomModel"], **more,
    )  # fmt: skip
    if config.tie_word_embeddings:  # as transformers 5.17 does
        config.base_model_tp_plan = config.base_model_tp_plan | {"embed_tokens": "embedding_rowwise"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # biases and norms
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 5)
    dtype = torch.bfloat16 if "bfloat16" in scenario else torch.float32
    if "lora" in scenario:
        model = add_adapter(model.to(dtype), rank=4)
    policy = Policy(model, None, [2], 0, 0.9, dtype, gradient_checkpointing=scenario == "checkpoints")
    if scenario == "checkpoints":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if scenario == "chunks":
        policy.max_logits = 5 * VOCAB
    return policy


@torch.no_grad()
def train_adapter(policy: Policy) -> None:
    """Make B nonzero: while it is 0, A has no gradient."""
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 10)


def make_rows(scenario: str) -> tuple[list[Trajectory], torch.Tensor]:
    """All rows of a rollout and their advantages (B, 1)."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    rows = []
    for prompt_index in range(ROWS // GROUP_SIZE):
        prompt = ids(2 + prompt_index)
        for completion in range(GROUP_SIZE):
            count = 1 + int(torch.randint(6, (), generator=generator))
            row = Trajectory(prompt + ids(count), len(prompt), [0] * len(prompt) + [1] * count, [], prompt_index)
            row.sampler_log_probs = [-1.0] * len(row.ids)
            row.completion_index = completion
            rows.append(row)
    advantages = torch.randn(ROWS, 1, generator=generator)
    if scenario == "skipped":
        advantages[-1] = torch.nan  # in the last rank only
    return rows, advantages


def tokens_of_all_ranks(statistics: UpdateStatistics, rows: list[Trajectory]) -> dict[str, torch.Tensor]:
    """Terms and pushes of all rows, one row and update after the other."""
    lengths = {(row.prompt_index, row.completion_index): len(row.ids) - 1 for row in rows}
    seen = {key: updates for part in gather(statistics.rows) for key, updates in part.items()}
    order = [(update.measurements, lengths[key]) for key in sorted(seen) for update in seen[key]]
    return {name: torch.cat([tokens[name][:length] for tokens, length in order]) for name in ("terms", "push")}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def run_scenario(train: ModuleType, scenario: str, divide: Callable, call: Callable, kv_heads: int) -> dict:
    """A rollout, and the updates on given rows: the parameters after each, metrics, and each token's terms."""
    from harness.models.loading import make_reference

    policy = make_policy(scenario, kv_heads)
    reference = make_reference(policy)  # of a new adapter: without it
    if "lora" in scenario:
        train_adapter(policy)
    divide(policy, reference)
    assert call_once(rank) == rank() - rank() % (world_size() // data_size())  # the first rank with the same rows
    sampled = []
    if scenario in SAMPLED:
        own = part_of(len(PROMPTS))
        prompts = PROMPTS[own.start : own.stop]
        sampled = sample(policy, prompts, GROUP_SIZE, max_new_tokens=6, key=(0, 1), prompt_index=list(own))
        sampled = [row for part in gather(sampled) for row in part]

    rows, advantages = make_rows(scenario)
    if scenario == "tools":
        for row in rows:  # every second token of the completion was observed
            row.action_mask[row.prompt_length + 1 :: 2] = [0] * len(row.action_mask[row.prompt_length + 1 :: 2])
    own = part_of(ROWS)
    experience = collate(rows[own.start : own.stop], policy.pad_id)
    experience.advantages = advantages[own.start : own.stop]
    experience.old_log_probs = token_log_probs(policy, experience, 8) + 0.01  # ratios are not 1
    experience.log_probs_ref = token_log_probs(reference, experience, 8)
    all_ranks = gather((experience.log_probs_ref, experience.action_mask))
    reference_log_probs = torch.cat([log_probs[mask == 1] for log_probs, mask in all_ranks])
    experience.log_probs_ref = experience.log_probs_ref - 0.1
    is_split = scenario == "minibatches"
    config = train.Config(
        group_size=GROUP_SIZE, prompts_per_step=ROWS // GROUP_SIZE, micro_batch_size=5, max_new_tokens=40,
        tokens_per_micro_batch=40 if scenario == "ragged" else None,
        minibatch_size=12 if is_split else None, epochs_per_step=2 if is_split else 1, kl_weight=0.1,
        max_grad_norm=1.0 if scenario == "adamw" else 1e9,
    )  # fmt: skip
    kind, lr = (torch.optim.AdamW, 1e-3) if scenario == "adamw" else (torch.optim.SGD, 0.01)
    optimizer = kind(policy.parameters(), lr=lr, foreach=False)
    parameters, metrics, tokens = [], [], []
    for step in range(1, STEPS + 1):
        statistics = call(config, policy, optimizer, experience, step)
        metrics.append(statistics.metrics())
        tokens.append(tokens_of_all_ranks(statistics, rows))
        parameters.append(torch.cat([whole(weight).flatten() for weight in policy.parameters()]))
    assert all(torch.equal(parameters[-1], other) for other in gather_all(parameters[-1]))
    return {
        "sampled": [(row.ids, row.sampler_log_probs) for row in sampled], "reference": reference_log_probs,
        "parameters": parameters, "metrics": metrics, "tokens": tokens,
    }  # fmt: skip


def scores(group) -> dict[str, torch.Tensor]:
    """Log-probs, entropy and the gradient of this rank's columns, for logits up to 200; put together by the test."""
    logits, targets = logits_and_targets()
    columns = logits.chunk(group.size(), dim=-1)[group.rank()].clone().requires_grad_()
    score = sys.modules["split_vocabulary"].score_split_logits
    log_probs, entropy = score(columns, targets, group)
    (log_probs * torch.arange(1.0, 6.0)).sum().backward()
    gradient = torch.cat(gather_all(columns.grad)[: group.size()], dim=-1)
    nothing = sys.modules["split_vocabulary"].score_split_logits(columns[:0], targets[:0], group)[
        0
    ]  # a rank without action tokens
    return {"log_probs": log_probs.detach(), "entropy": entropy, "gradient": gradient, "nothing": nothing.detach()}


def logits_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    logits = logits * torch.tensor([[1.0, 5, 50, 200, 200]]).T
    return logits, torch.tensor([0, VOCAB // 2 - 1, VOCAB // 2, VOCAB - 1, int(logits[4].argmax())])


def exported(mesh_of: ModuleType, mesh, folder: Path) -> int:
    """Write a divided policy for an engine; the most whole weights that existed at the same time."""
    from torch.distributed.tensor import DTensor
    from transformers import AutoTokenizer

    from harness.base.config import TINY_POLICY
    from harness.engines.folder import export_divided

    policy = make_policy("adamw", max(2, mesh["tensor"].size()))  # its embedding and head are tied
    gather_one, kept, most = DTensor.full_tensor, [], 0
    policy.tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    mesh_of.distribute(mesh, policy, None)

    def full_tensor(weight: DTensor) -> torch.Tensor:
        nonlocal most
        whole = gather_one(weight)
        kept.append(weakref.ref(whole))
        most = max(most, sum(other() is not None for other in kept))
        return whole

    DTensor.full_tensor = full_tensor
    try:
        export_divided(policy, folder, torch.float32)
    finally:
        DTensor.full_tensor = gather_one
    assert len(kept) == len(policy.model.state_dict())
    return most


def refusals(train: ModuleType, mesh_of: ModuleType, mesh) -> dict[str, str]:
    """The sentences of models that cannot be split, and of ranks that draw different tokens."""
    from transformers import AutoConfig

    def sentence(change: Callable) -> str:
        try:
            change()
        except UserError as error:
            return str(error)
        return "none"

    def divide(kind: str = "llama", **changes) -> None:
        sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": HEADS}
        sizes |= {"intermediate_size": 64, "pad_token_id": None, "architectures": ["ARandomModel"]}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | changes))
        mesh_of.distribute(mesh, Policy(model, None, [2], 0), None)

    def score_own_columns() -> None:
        right = mesh_of.score_split_logits
        mesh_of.score_split_logits = lambda logits, targets, group: score_logits(logits, targets % logits.shape[1])
        try:
            divide()
        finally:
            mesh_of.score_split_logits = right

    def draw_differently() -> None:
        import common.sampling

        policy, uniforms = make_policy("ragged"), common.sampling._uniforms
        mesh_of.distribute(mesh, policy, None)
        common.sampling._uniforms = lambda *arguments: uniforms(*arguments) * (0.5 if rank() % 2 else 1)
        try:
            sample(policy, PROMPTS, GROUP_SIZE, max_new_tokens=10, key=(0, 1))
        finally:
            common.sampling._uniforms = uniforms

    return {
        "key-value heads": sentence(lambda: divide(num_key_value_heads=1)),
        "vocabulary": sentence(lambda: divide(vocab_size=VOCAB + 1)),
        "no plan": sentence(lambda: divide("gpt2")),
        "other layers": sentence(lambda: divide("olmo2")),
        "other embedding": sentence(lambda: divide("gemma3_text")),
        "half a plan": sentence(lambda: divide(base_model_tp_plan={"layers.*.self_attn.q_proj": "colwise"})),
        "different log-probs": sentence(score_own_columns),
        "different tokens": sentence(draw_differently),
    }


def num_ranks(mesh: str) -> int:
    return math.prod(map(int, mesh.split("x")))


def main(folder: str) -> None:
    """One rank: all scenarios on every mesh of as many ranks."""
    torch.set_num_threads(1)
    train, mesh_of = load("scale/mesh/train.py"), sys.modules["mesh"]
    for name in (name for name in MESHES if num_ranks(name) == int(os.environ["WORLD_SIZE"])):
        replicas, shards, tensor_size = map(int, name.split("x"))
        config = train.Config(device="cpu", tensor_parallel=tensor_size, replicas=replicas, prompts_per_step=4)
        _, mesh = mesh_of.start_mesh(config)
        assert mesh.shape == (replicas, shards, tensor_size)
        assert data_size() == replicas * shards
        kv_heads, divide = max(2, tensor_size), functools.partial(mesh_of.distribute, mesh)
        results = {each: run_scenario(train, each, divide, train.update, kv_heads) for each in MESHES[name]}
        results["scores"] = scores(mesh["tensor"].get_group())
        results["weights at once"] = exported(mesh_of, mesh, Path(folder, name))
        if name == "1x1x2":
            results["refusals"] = refusals(train, mesh_of, mesh)
        if rank() == 0:
            torch.save(results, Path(folder, f"{name}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()


# The tests


@pytest.fixture(scope="module")
def results_of(tmp_path_factory) -> Callable[[str], dict]:
    @functools.cache
    def start(num_processes: int) -> Path:
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "scale/mesh")))
        launch(num_processes, __file__, folder := tmp_path_factory.mktemp("results"), PYTHONPATH=paths)
        return folder

    @functools.cache
    def read(mesh: str) -> dict:
        folder = start(num_ranks(mesh))
        return torch.load(folder / f"{mesh}.pt") | {"exported": folder / mesh}

    return read


@pytest.fixture(scope="module")
def alone(load_script) -> Callable[[str, int], dict]:
    """The results of experiment_base in this process."""
    train = load_script("experiment_base/train.py")

    @functools.cache
    def start(scenario: str, kv_heads: int) -> dict:
        return run_scenario(train, scenario, lambda *_: None, train.update, kv_heads)

    return start


each_mesh = pytest.mark.parametrize("mesh", MESHES)


@pytest.mark.parametrize(("mesh", "scenario"), [(mesh, name) for mesh, names in MESHES.items() for name in names])
def test_a_mesh_samples_and_trains_like_one_process(results_of, alone, mesh, scenario):
    """Tokens, log-probs, parameters after each of two updates, and everything that is logged about them."""
    found, expected = results_of(mesh)[scenario], alone(scenario, max(2, int(mesh[-1])))
    if "bfloat16" in scenario:
        check_rounding(found, expected, alone("lora" if "lora" in scenario else "ragged", 2))
        return
    assert [ids for ids, _ in found["sampled"]] == [ids for ids, _ in expected["sampled"]]
    for (_, new), (_, old) in zip(found["sampled"], expected["sampled"], strict=True):
        assert new == pytest.approx(old, abs=1e-5)
    assert (found["reference"] - expected["reference"]).abs().max() <= 1e-5
    for update, (new, old) in enumerate(zip(found["parameters"], expected["parameters"], strict=True)):
        assert (new - old).abs().max() <= 1e-5
        before = expected["parameters"][update - 1] if update else None
        if before is not None and scenario != "skipped":
            assert (new - old).norm() <= 1e-3 * (old - before).norm()  # small compared with the update's effect
            assert (old - before).norm() > 1e-3
    for new, old in zip(found["metrics"], expected["metrics"], strict=True):
        assert new.keys() == old.keys()
        for name in old:
            assert new[name] == pytest.approx(old[name], rel=1e-4, abs=1e-5, nan_ok=True), name
    for new, old in zip(found["tokens"], expected["tokens"], strict=True):
        for name in ("terms", "push"):
            torch.testing.assert_close(new[name], old[name], atol=1e-6, rtol=1e-4, equal_nan=True)


def check_rounding(found: dict, expected: dict, exact: dict) -> None:
    """In bfloat16 a mesh rounds elsewhere than one process, but is not farther from float32."""
    for value in (lambda result: result["reference"], lambda result: result["parameters"][0]):
        error, usual = ((value(result) - value(exact)).norm() for result in (found, expected))
        assert 0 < error <= 1.5 * usual


@each_mesh
def test_scores_of_split_logits_are_those_of_whole_ones(results_of, mesh):
    """Tokens of the first and the last rank, at both edges; with logits that only a common maximum keeps finite."""
    logits, targets = logits_and_targets()
    logits = logits.double().requires_grad_()
    log_probs, entropy = score_logits(logits, targets)
    (log_probs * torch.arange(1.0, 6.0)).sum().backward()
    found = results_of(mesh)["scores"]
    torch.testing.assert_close(found["log_probs"], log_probs.detach().float(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found["entropy"], entropy.float(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found["gradient"], logits.grad.float(), atol=1e-6, rtol=1e-5)
    assert found["nothing"].shape == (0,)


@each_mesh
def test_weights_for_an_engine_are_gathered_one_by_one(results_of, mesh):
    """The folder is that of whole weights; while the next one is gathered, the one before it may still be written."""
    found = results_of(mesh)
    assert found["weights at once"] <= 2
    model = AutoModelForCausalLM.from_pretrained(found["exported"])
    expected = make_policy("adamw", max(2, int(mesh[-1]))).model.state_dict()
    assert not model.config.tie_word_embeddings
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(("what", "words"), [
    ("key-value heads", "the 1 key-value heads of the model cannot be divided by 2: use 1"),
    ("vocabulary", "the 25 ids of the vocabulary of the model cannot be divided by 2: use 1"),
    ("no plan", "transformers describes GPT2LMHeadModel without a plan"),
    ("other layers", "with layers of the kind colwise_gather_output: use a model such as Llama"),
    ("other embedding", "with its own kind of embedding"),
    ("half a plan", "ARandomModel does not run when it is split ("),
    ("different log-probs", "ARandomModel computes other log-probs when it is split, by "),
    ("different tokens", "the ranks of a tensor group drew different tokens"),
])  # fmt: skip
def test_what_cannot_be_split_is_refused_in_one_sentence(results_of, what, words):
    assert words in results_of("1x1x2")["refusals"][what]


# Whole runs

RUN = (
    *("--steps", "2", "--prompts-per-step", "4", "--group-size", "4", "--eval-prompts", "3", "--max-new-tokens", "8"),
    *("--micro-batch-size", "8", "--checkpoint-every", "1", "--lr", "1e-5", "--name", "x"),
)


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory) -> str:
    """The bundled policy with each key-value head twice, which changes no output: four ranks can share them."""
    place = shutil.copytree(TINY_POLICY, tmp_path_factory.mktemp("model") / "four_heads")
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    for layer in model.model.layers:
        for name in ("k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight.detach().unflatten(0, (2, -1)).repeat_interleave(2, dim=0)
            getattr(layer.self_attn, name).weight = torch.nn.Parameter(weight.flatten(0, 1))
    model.config.num_key_value_heads = 4
    model.save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def run_of_2x2x1(tmp_path_factory, four_heads) -> Path:
    place = tmp_path_factory.mktemp("runs")
    launch(4, TRAIN, *RUN, "--model", four_heads, "--replicas", "2", "--runs-dir", place)
    return place / "mesh" / "x"


@pytest.fixture(scope="module")
def run_alone(tmp_path_factory, load_script, four_heads) -> Path:
    place = tmp_path_factory.mktemp("alone")
    load_script("experiment_base/train.py").main([*RUN, "--model", four_heads, "--runs-dir", str(place)])
    return place / "experiment_base" / "x"


def check_same_run(found: Path, expected: Path) -> None:
    for new, old in zip(metrics_of(found), metrics_of(expected), strict=True):
        assert new == pytest.approx(old, rel=1e-4, abs=1e-5)
    for new, old in zip(rows_of(found, "samples"), rows_of(expected, "samples"), strict=True):
        assert new["ids"] == old["ids"]
    weights, others = (load_file(directory / "final" / "model.safetensors") for directory in (found, expected))
    assert weights.keys() == others.keys()
    assert all((weights[name] - others[name]).abs().max() <= 1e-5 for name in weights)


def test_a_run_on_a_mesh_is_the_run_of_one_process(run_of_2x2x1, run_alone):
    """Its final/ is a Hugging Face directory with whole weights; a checkpoint has each weight and its moments once."""
    check_same_run(run_of_2x2x1, run_alone)
    stored = sum(path.stat().st_size for path in run_of_2x2x1.glob("checkpoints/step_2/**/*.distcp"))
    assert stored == pytest.approx(3 * (run_of_2x2x1 / "final" / "model.safetensors").stat().st_size, rel=0.1)


def test_an_engine_samples_for_a_mesh(stand_in, tmp_path, load_script):
    """As for one process of scale/engine; it is asked once for each row, and gets the weights of every step."""
    server, other = stand_in(), stand_in()
    launch(2, TRAIN, *RUN, "--tensor-parallel", "2", "--runs-dir", tmp_path, "--engine", server.url)
    flags = ("--engine-url", other.url, "--importance-cap", "0", "--runs-dir", str(tmp_path))
    load_script("scale/engine/train.py").main([*RUN, *flags])
    found, expected = (tmp_path / name / "x" for name in ("mesh", "engine"))
    for request in ("/v1/completions", "/collective_rpc"):
        assert server.calls[request] == other.calls[request] > 0
    for new, old in zip(metrics_of(found), metrics_of(expected), strict=True):
        assert new == pytest.approx({name: old[name] for name in new}, rel=1e-4, abs=1e-5)
    assert [row["ids"] for row in rows_of(found, "samples")] == [row["ids"] for row in rows_of(expected, "samples")]
    weights, others = (load_file(directory / "final" / "model.safetensors") for directory in (found, expected))
    assert all((weights[name] - others[name]).abs().max() <= 1e-5 for name in others)
    assert not (found / "engine").exists()


@pytest.mark.parametrize("mesh", ["1x1x1", "1x1x2", "1x2x2", "2x2x1"])
def test_a_run_is_resumed_on_another_mesh(run_of_2x2x1, tmp_path, mesh):
    """And on its own mesh bit for bit."""
    copy, (replicas, _, tensor) = tmp_path / "x", mesh.split("x")
    shutil.copytree(run_of_2x2x1, copy)
    shutil.rmtree(copy / "checkpoints" / "step_2")
    launch(num_ranks(mesh), TRAIN, "--resume", copy, "--replicas", replicas, "--tensor-parallel", tensor)
    check_same_run(copy, run_of_2x2x1)
    if mesh == "2x2x1":
        assert metrics_of(copy) == metrics_of(run_of_2x2x1)


if __name__ == "__main__":
    main(*sys.argv[1:])
