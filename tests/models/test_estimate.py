"""`--estimate`: its parts of memory against what models, caches and passes hold, and what it prints."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from common.fast.cache import RowCache
from common.sampling import next_logits

from common.plumbing.config import TINY_POLICY
from common.plumbing.estimate import report
from common.plumbing.estimate.advice import helpful
from common.plumbing.estimate.memory import Memory, setting_of
from common.plumbing.estimate.shape import Shape
from common.plumbing.loading import load_policy
from common.plumbing.parse import parse_config
from common.plumbing.pretrained import count_parameters

pytestmark = pytest.mark.slow

SMALL = ("--device", "cpu", "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "24")
FULL, LORA = (), ("--lora-rank", "3")
PROMPT = 20
NO_LESSONS = ("--num-copying", "8", "--num-reasoning", "0", "--num-answering", "0")
ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("flags", [FULL, LORA])
def test_weights_are_counted_as_they_are(configure, kind, flags):
    config, shape = configure(*flags, kind=kind)
    policy = load_policy(config)
    counted = count_parameters(policy.model)
    memory = Memory(shape, setting_of(config, shape, PROMPT))
    trained = counted["trained_parameters"]
    assert memory.part("weights") == sum(weight.nbytes for weight in policy.parameters())
    assert (memory.part("gradients"), memory.part("optimizer")) == (4 * trained, 8 * trained)
    assert memory.part("reference") == (0 if flags else 4 * trained)


@pytest.mark.parametrize("flags", [FULL, LORA, ("--dtype", "bfloat16"), ("--gradient-checkpointing",)])
@pytest.mark.parametrize("micro_batch_size", ["1", "8"])  # complete rows, and shared prompts
def test_activations_are_those_that_a_pass_keeps(configure, flags, micro_batch_size):
    config, shape = configure(*flags, "--micro-batch-size", micro_batch_size)
    setting = setting_of(config, shape, PROMPT)
    policy = load_policy(config)
    rows, length = int(micro_batch_size), PROMPT + setting.completion
    sequences = (torch.arange(rows)[:, None] // 4 + torch.arange(length) % 7).long() % 50
    mask = torch.ones(rows, length - 1, dtype=torch.long)
    mask[:, : PROMPT - 1] = 0
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    held = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.model.train(config.gradient_checkpointing)
        with policy.autocast():
            policy._hidden_states(sequences, mask)
    measured = sum(size for place, size in kept.items() if place not in held)
    if config.gradient_checkpointing:  # what one layer keeps, while it is computed again, is not seen here
        layer = Memory(shape, setting).part("activations") - 4 * shape.layers * rows * length * shape.hidden
        assert layer > 0
        measured += layer
    assert Memory(shape, setting).part("activations") == pytest.approx(measured, rel=0.15)


def test_the_cache_is_that_of_all_rows(configure):
    config, shape = configure("--generation-batch-size", "8", "--eval-prompts", "1")
    setting = setting_of(config, shape, PROMPT)
    policy, cache = load_policy(config), RowCache()
    ids = torch.ones(8, PROMPT + setting.completion, dtype=torch.long)
    next_logits(policy, ids, torch.ones_like(ids), cache)
    rooms = sum(room.nbytes for layer in cache.layers for room in layer._room)
    one_more_layer = 1 + 1 / shape.layers  # which is copied when it grows
    assert Memory(shape, setting).part("KV cache") == rooms * one_more_layer


def test_what_is_divided_takes_less_per_process(configure):
    config, shape = configure()
    setting = setting_of(config, shape, PROMPT)
    parts = {launch: Memory(shape, setting, launch, 4) for launch in ("ddp", "zero2", "zero3", "fsdp2", "offload")}
    for launch, divided in {"zero2": 4, "zero3": 4, "fsdp2": 4}.items():
        assert parts[launch].part("optimizer") == parts["ddp"].part("optimizer") / divided
    buckets, none = (Memory(shape, setting, launch, 4).phases["sampling"]["other"] for launch in ("ddp", "one"))
    assert buckets - none == 4 * shape.num_parameters  # in which gradients are averaged
    assert parts["fsdp2"].phases["update"]["weights"] == shape.num_parameters
    assert parts["offload"].part("optimizer") == 0


def test_each_flag_that_helps_saves_what_it_says(configure):
    config, shape = configure("--micro-batch-size", "8")
    setting = setting_of(config, shape, PROMPT)
    found = helpful(shape, setting)
    assert [size for _, size in found] == sorted((size for _, size in found), reverse=True)
    for flags, size in found:
        if "--load-in" in flags:  # needs a package
            continue
        changed, _ = configure("--micro-batch-size", "8", *flags.split())
        difference = Memory(shape, setting).peak - Memory(shape, setting_of(changed, shape, PROMPT)).peak
        assert difference == pytest.approx(size), flags


@pytest.mark.parametrize("experiment", ["experiment_base", "experiment_sft", "experiment_engine"])
def test_an_estimate_reads_no_weights_and_writes_nothing(load_script, tmp_path, monkeypatch, capsys, experiment):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY_POLICY, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    flags = ["--model", "./model", "--device", "cpu", "--estimate", "--eval-prompts", "2"]
    flags += ["--engine-url", "http://127.0.0.1:1"] if experiment == "experiment_engine" else []
    flags += (
        ["--tokens-per-batch", "256", *NO_LESSONS] if experiment == "experiment_sft" else ["--prompts-per-step", "2"]
    )
    monkeypatch.syspath_prepend(ROOT / experiment)  # where python puts the script's directory
    with pytest.raises(SystemExit) as ended:
        load_script(f"{experiment}/train.py").main(flags)
    assert not ended.value.code
    output = capsys.readouterr().out
    for expected in ("1,820,352 parameters", "fsdp2", "one process fits", "a step of", "less memory:"):
        assert expected in output
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_without_a_config_is_told_of(configure):
    config, _ = configure()
    (Path("model") / "config.json").write_text('{"model_type": "unheard-of"}', encoding="utf-8")
    with pytest.raises(UserError, match="could not be read"):
        Shape(config)


def test_a_limit_of_memory_is_respected(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(report, "CGROUP", limit)
    _, whole = report.device_memory("cpu")
    limit.write_text("max\n", encoding="utf-8")
    assert report.device_memory("cpu") == ("cpu", whole)
    limit.write_text("1000000\n", encoding="utf-8")
    assert report.device_memory("cpu") == ("cpu", 1_000_000)


def test_a_model_too_large_does_not_fit(configure, monkeypatch, capsys):
    """With the shape of a model of 70 billion parameters, which nobody builds for it."""
    config, _ = configure()
    settings = {
        *('"hidden_size": 8192', '"intermediate_size": 28672', '"num_hidden_layers": 80', '"num_attention_heads": 64'),
        *('"num_key_value_heads": 8', '"vocab_size": 128256', '"model_type": "llama"', '"tie_word_embeddings": false'),
    }
    (Path("model") / "config.json").write_text("{" + ", ".join(settings) + "}", encoding="utf-8")
    monkeypatch.setattr(report, "measure", lambda *_: (_ for _ in ()).throw(MemoryError()))
    monkeypatch.setattr(report, "longest_prompt", lambda *_: PROMPT)
    report.estimate(dataclasses.replace(config), object())
    output = capsys.readouterr().out
    assert "70,553,706,496 parameters" in output
    assert "one process does not fit" in output
    assert "no memory for two layers" in output
