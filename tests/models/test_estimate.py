"""`--estimate`: its formula against measured runs, and against the sizes of models, caches and passes; its output."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch

from common.sampling import next_logits
from fast.cache import RowCache
from viewer.results import read_json

from harness.base.config import TINY_POLICY
from harness.cli.parse import parse_config
from harness.models.loading import load_policy
from harness.models.pretrained import count_parameters
from harness.run import estimate as estimating
from harness.run.estimate import Shape, memory_of, savings

SMALL = ("--device", "cpu", "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "24")
LORA = ("--lora-rank", "3")
SOME = (*LORA, "--lora-targets", "q_proj", "down_proj")
PROMPT, COMPLETION = 20, 24
ROOT = Path(__file__).resolve().parents[2]
MEASURED = read_json(ROOT / "benchmarks/results/measurements.json", "model_memory")["measured_float32_cpu_0.5B"]


@pytest.fixture
def configure(load_script, save_checkpoint, tmp_path, monkeypatch):
    """The settings of experiment_base with a small model, and its shape."""
    monkeypatch.chdir(tmp_path)

    def configure(*flags: str, kind: str = "qwen2"):
        save_checkpoint(kind, tmp_path / "model")
        train = load_script("experiment_base/train.py")
        config = parse_config(train.Config, [*SMALL, "--model", "./model", *flags], train.__doc__)
        return config, Shape(config)

    return configure


def test_it_is_near_every_peak_that_was_measured(load_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    benchmark = load_script("benchmarks/model_memory.py")
    for name, run in MEASURED.items():
        model = benchmark.write_model(tmp_path / name, benchmark._with_layers(run["layers"]))
        launch = "one" if run["processes"] == 1 else "multi_gpu"
        found = benchmark.estimate(model, tuple(run["flags"]), benchmark.PROMPT_OF_CHECK, launch, run["processes"])
        assert 0.93 < found["peak"] / run["measured"] < 1, name


@pytest.mark.slow
def test_the_table_for_eight_gpus_is_that_of_the_formula(load_script, monkeypatch, capsys):
    benchmark = load_script("benchmarks/model_memory.py")
    monkeypatch.setattr(benchmark, "ON_CARDS", (benchmark.ON_CARDS[0], benchmark.ON_CARDS[-1]))
    monkeypatch.setattr(benchmark, "_store", lambda name, values: None)
    benchmark.print_cards()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 2
    assert set(rows) <= set((ROOT / "docs" / "eight_gpus.md").read_text(encoding="utf-8").splitlines())


def test_the_estimates_for_long_rows_are_those_of_the_formula(load_script, tmp_path):
    benchmark, text = load_script("benchmarks/model_memory.py"), (ROOT / "docs" / "real_models.md").read_text("utf-8")
    (command,) = re.findall(r"^python imitation/sft/train.py --model \S+ (.*) --estimate .*$", text, re.MULTILINE)
    model = benchmark.write_model(tmp_path / "model", benchmark.EIGHT_BILLION)

    flags = (*command.split(), "--dtype", "bfloat16", "--device", "cpu")
    for more, launch, where in (
        ((), ("fsdp2", 8), "on each of eight GPUs with FSDP2"),
        (("--lora-rank", "16"), ("one", 1), "on one GPU"),
    ):
        found = benchmark.estimate(model, (*flags, *more), 0, *launch, "imitation/sft/train.py", "cuda")
        assert f"{found['peak'] / 1e9:.0f} GB {where}" in " ".join(text.split())


def test_moments_in_8_bits_take_a_quarter(configure):
    config, shape = configure()
    eight = dataclasses.replace(config, optimizer="adamw_8bit")
    small, large = (memory_of(each, shape, PROMPT)["gradients and optimizer"] for each in (eight, config))
    assert small == pytest.approx((4 + 2 * (1 + 4 / 256)) / 12 * large)


def test_a_critic_is_a_second_decoder(configure, load_script):
    config, shape = configure()
    with_critic = load_script("policy_gradients/ppo/train.py").Config(**vars(config))
    one, two = memory_of(config, shape, PROMPT), memory_of(with_critic, shape, PROMPT)
    for part in ("weights", "gradients and optimizer"):
        assert two[part] == 2 * one[part] > 0
    activations = "update: activations, logits"
    assert one[activations] < two[activations] < 2 * one[activations]


@pytest.mark.parametrize(("flags", "kind"), [((), "qwen2"), (LORA, "qwen2"), ((), "llama"), (SOME, "llama")])
def test_weights_are_counted_as_they_are(configure, flags, kind):
    config, shape = configure(*flags, kind=kind)
    policy, memory = load_policy(config), memory_of(config, shape, PROMPT)
    trained = count_parameters(policy.model)["trained_parameters"]
    assert memory["weights"] == sum(weight.nbytes for weight in policy.parameters())
    assert memory["gradients and optimizer"] == 12 * trained
    assert memory["reference"] == (0 if flags else 4 * trained)


@pytest.mark.parametrize("flags", [(), LORA, ("--dtype", "bfloat16")])
@pytest.mark.parametrize("rows", [1, 8])  # complete rows, and shared prompts
def test_activations_are_those_that_a_pass_keeps(configure, flags, rows):
    config, shape = configure(*flags)
    policy, length = load_policy(config), PROMPT + COMPLETION
    sequences = (torch.arange(rows)[:, None] // 4 + torch.arange(length) % 7).long() % 50
    mask = torch.ones(rows, length - 1, dtype=torch.long)
    mask[:, : PROMPT - 1] = 0
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    held = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), policy.autocast():
        policy._hidden_states(sequences, mask)
    measured = sum(size for place, size in kept.items() if place not in held)
    measured -= 2 * shape.in_linear if config.dtype == "bfloat16" else 0  # casts of weights are counted elsewhere
    found = estimating._activations(config, shape, rows, PROMPT, COMPLETION, shares=rows > 1)
    assert found == pytest.approx(measured, rel=0.25)


def test_padded_rows_share_no_prompt(configure):
    config, shape = configure("--micro-batch-size", "4")
    packed, padded = (
        memory_of(dataclasses.replace(config, pack=pack), shape, 200)["update: activations, logits"]
        for pack in (True, False)
    )
    shared, own = (estimating._activations(config, shape, 4, 200, COMPLETION, shares) for shares in (True, False))
    assert padded - packed == pytest.approx((own - shared) * (1 + estimating.IN_PIECES))


def test_the_cache_is_that_of_all_rows(configure):
    config, shape = configure("--generation-batch-size", "8", "--eval-prompts", "1")
    policy, cache = load_policy(config), RowCache()
    ids = torch.ones(8, PROMPT + COMPLETION, dtype=torch.long)
    next_logits(policy, ids, torch.ones_like(ids), cache)
    rooms = sum(room.nbytes for layer in cache.layers for room in layer._room)
    one_more_layer = 1 + 1 / shape.layers  # the copy when it grows
    logits = 32 * 8 * shape.vocabulary
    assert memory_of(config, shape, PROMPT)["sampling: KV cache, logits"] == rooms * one_more_layer + logits


def test_each_flag_that_helps_saves_what_it_says(configure, monkeypatch):
    monkeypatch.setattr(estimating, "PROGRAM", 0)  # it would dwarf this model
    config, shape = configure("--micro-batch-size", "8")
    found = savings(config, shape, PROMPT)
    assert found == sorted(found, reverse=True)
    assert any("--lora-rank 16" in flags for _, flags in found)
    for size, flags in found:
        if "--load-in" not in flags:  # it needs a package
            changed, _ = configure("--micro-batch-size", "8", *flags.split())
            totals = [memory_of(each, shape, PROMPT)["total"] for each in (config, changed)]
            assert totals[0] - totals[1] == pytest.approx(size), flags


@pytest.mark.parametrize(
    ("experiment", "flags"),
    [
        ("experiment_base", ""),
        ("imitation/sft", "--tokens-per-batch 256"),
        ("scale/mesh", "--tensor-parallel 2"),
    ],
)
def test_an_estimate_reads_no_weights_and_writes_nothing(load_script, tmp_path, monkeypatch, capsys, experiment, flags):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY_POLICY, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.syspath_prepend(ROOT / experiment)  # python would put the script's directory there
    every = "--model ./model --device cpu --estimate --eval-prompts 2"
    with pytest.raises(SystemExit) as ended:
        load_script(f"{experiment}/train.py").main([*every.split(), *flags.split()])
    assert not ended.value.code
    output = capsys.readouterr().out
    launch = "mesh 1x2" if experiment == "scale/mesh" else "fsdp2 x2"
    for expected in ("1,820,352 parameters", launch, "one process fits", "less memory: "):
        assert expected in output
    savings = re.search("less memory: (.*)", output)[1]
    assert savings == "no flag helps much" or all(re.search(r" saves [\d.]+ GB$", part) for part in savings.split("; "))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("experiment", "flags", "launches"),
    [
        (
            "experiment_accelerate",
            "--gpus 8 --device cuda:7 --attn-implementation flash_attention_2",
            "multi_gpu x8, fsdp2 x8",
        ),
        ("experiment_accelerate", "--gpus 8 --lora-rank 4 --load-in 4bit", "multi_gpu x8"),
        ("experiment_accelerate", "--gpus 8 --optimizer adamw_8bit --gpu-memory 0.4", "multi_gpu x8"),
        ("experiment_accelerate_ddp", "--gpus 16", "multi_gpu x16"),
        ("scale/engine", "--gpus 4 --engine-url http://127.0.0.1:1", "multi_gpu x4"),
        ("scale/mesh", "--gpus 8 --tensor-parallel 2 --gpu-memory 0.4", "mesh 4x2"),
        ("scale/mesh", "--gpus 8 --tensor-parallel 2 --replicas 2", "mesh 2x2x2"),
    ],
)
def test_the_gpus_of_an_estimate_need_not_be_here(
    configure, load_script, monkeypatch, capsys, experiment, flags, launches
):
    configure()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.syspath_prepend(ROOT / experiment)
    train = load_script(f"{experiment}/train.py")
    with pytest.raises(SystemExit):
        train.main(f"--model ./model --prompts-per-step 16 --estimate --gpu-memory 80 {flags}".split())
    output = capsys.readouterr().out
    assert "trained; bfloat16, cuda\n" in output
    verdict, memory = ("does not fit", 0.4) if flags.endswith("0.4") else ("fits", 80)
    found = re.findall(rf"^(.*) {verdict}: 0\.[5-9] of {memory:.1f} GB", output, re.MULTILINE)
    assert found == ["one process", *launches.split(", ")]


def test_before_fsdp2_shards_a_model_each_process_evaluates_with_all_of_it(configure, monkeypatch):
    config, shape = configure("--dtype", "bfloat16")
    monkeypatch.setattr(estimating, "PROGRAM", 0)
    memory = memory_of(config, shape, PROMPT, "fsdp2", 1000)
    rows = 8 * config.eval_prompts // 1000 + 1
    cache = estimating._cache(config, shape, PROMPT + COMPLETION, rows)
    names = ("weights", "gradients and optimizer", "reference", "sampling: KV cache, logits")
    whole = (4 + 4 / 1000 + 2) * shape.parameters  # weights, the part of a reference, casts
    assert sum(memory[name] for name in names) == pytest.approx(whole + cache)


def test_a_mesh_divides_what_is_held_and_what_is_computed(configure, load_script):
    config, shape = configure("--kl-weight", "0.1")
    of_mesh = load_script("scale/mesh/train.py").Config
    one, two, four, copies = (
        memory_of(of_mesh(**vars(config) | {"tensor_parallel": tensor, "replicas": n}), shape, PROMPT, "mesh", 4)
        for tensor, n in ((1, 1), (2, 1), (4, 1), (1, 2))
    )
    whole, activations = memory_of(config, shape, PROMPT), "update: activations, logits"
    for part in ("weights", "gradients and optimizer", "reference"):  # over all four ranks, however they are arranged
        assert one[part] == two[part] == four[part] == whole[part] / 4 > 0
        assert copies[part] == whole[part] / 2  # each of the two copies over two ranks
    assert four[activations] < 2 * two[activations]  # a tensor group of four has four times the rows, not their work
    assert four[activations] > whole[activations] / 4


def test_the_limit_of_a_container_is_respected(monkeypatch, tmp_path):
    monkeypatch.setattr(estimating, "MEMORY_LIMIT", tmp_path / "memory.max")
    whole = estimating.device_memory("cpu")
    for text, expected in (("max\n", whole), ("1000000\n", 1_000_000)):
        (tmp_path / "memory.max").write_text(text, encoding="utf-8")
        assert estimating.device_memory("cpu") == expected
