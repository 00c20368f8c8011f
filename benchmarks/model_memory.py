"""How much memory experiment_base needs for three known models: an estimate, and its check against a real run.

    python benchmarks/model_memory.py             # the table of docs/real_models.md; one minute, without any weights
    python benchmarks/model_memory.py --check     # 0.5B parameters on this CPU; 12 GB of memory, about ten minutes

The estimate adds up what must be in memory at the same time: weights, gradients, optimizer and reference from the
number of parameters; the KV cache from its shape; activations from a forward pass on tensors that have shapes but no
data. It does not include fragmentation, CUDA's own context (about 0.5 GB) and the memory that libraries reserve.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch._subclasses.fake_tensor import FakeTensorMode

from common.logprobs import MAX_LOGITS

from common.plumbing.config import TINY_POLICY
from common.plumbing.machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "model_memory.json"
LORA_RANK = 16
# 4-bit weights with double quantisation: 4 bits, 8 for each block of 64 weights, 32 for each 256 of those
BYTES_4BIT = (4 + 8 / 64 + 32 / (64 * 256)) / 8

SHAPES = {  # as their config.json on the hub gives them
    "Qwen/Qwen2.5-0.5B-Instruct": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    },
    "meta-llama/Llama-3.2-3B-Instruct": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a run that determine its memory."""

    mode: str = "full"  # full, lora or 4bit
    bfloat16: bool = True
    kl_weight: float = 0.02
    gradient_checkpointing: bool = False
    micro_batch_size: int = 4
    generation_batch_size: int = 128
    tokens: int = 640  # per row: a prompt of 128 and a completion of 512


@dataclass(frozen=True, kw_only=True)
class Command:
    check: bool = False  # run the 0.5B shape on this CPU and compare


def estimate(shape: dict, setting: Setting) -> dict[str, float]:
    """Bytes by part, and the two peaks: in sampling and in the update."""
    one, two = (_count(shape, setting, num_layers) for num_layers in (1, 2))
    layers = shape["num_hidden_layers"]
    in_layers, num_trained, activations = (
        first + (layers - 1) * (second - first) for first, second in zip(one, two, strict=True)
    )
    num_embedding = shape["vocab_size"] * shape["hidden_size"]  # shared with the LM head
    num_parameters = in_layers + num_embedding
    if setting.mode == "full":
        num_trained = num_parameters
    if setting.gradient_checkpointing:  # the activations of one layer at a time, and the input of every layer
        inputs = 4 * setting.micro_batch_size * setting.tokens * shape["hidden_size"]
        activations = (two[2] - one[2]) + layers * inputs

    compute_bytes = 2 if setting.bfloat16 else 4
    if setting.mode == "full":
        weights = 4 * num_parameters
    elif setting.mode == "lora":
        weights = compute_bytes * num_parameters + 4 * num_trained
    else:
        weights = BYTES_4BIT * in_layers + compute_bytes * num_embedding + 4 * num_trained
    head_dim = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    cache = (
        2
        * layers
        * shape["num_key_value_heads"]
        * head_dim
        * compute_bytes
        * setting.generation_batch_size
        * setting.tokens
    )
    has_copy = setting.mode == "full" and setting.kl_weight > 0
    parts = {
        "parameters": num_parameters,
        "weights": weights,
        "gradients": 4 * num_trained,
        "optimizer": 8 * num_trained,
        "reference": 4 * num_parameters if has_copy else 0,
        "kv_cache": cache * (1 + 1 / layers),  # one layer's cache is copied to be extended
        "cast_weights": 2 * num_parameters if setting.mode == "full" and setting.bfloat16 else 0,  # autocast's copies
        "activations": activations,
        "logits": 3 * 4 * MAX_LOGITS,  # of one chunk, with their log_softmax and its gradient
        "drawing": 32
        * setting.generation_batch_size
        * shape["vocab_size"],  # logits and log-probs, and the CDF in float64
    }
    always = sum(parts[name] for name in ("weights", "gradients", "optimizer", "reference"))
    parts["sampling_peak"] = always + parts["kv_cache"] + parts["cast_weights"] + parts["drawing"]
    parts["update_peak"] = always + parts["activations"] + parts["logits"]
    parts["peak"] = max(parts["sampling_peak"], parts["update_peak"])
    return parts


def _count(shape: dict, setting: Setting, num_layers: int) -> tuple[int, int, int]:
    """Count weights, adapter weights and bytes of activations of a model with few layers, without its embedding.

    Activations are what the forward pass of one micro-batch keeps for its backward pass. The pass runs on tensors that
    have shapes but no data.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**(shape | {"vocab_size": 8, "num_hidden_layers": num_layers}))
    dtype = torch.bfloat16 if setting.bfloat16 and setting.mode != "full" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    num_parameters = sum(p.numel() for p in model.get_decoder().layers.parameters())
    num_trained = 0
    if setting.mode != "full":
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=LORA_RANK, target_modules="all-linear"))
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=setting.bfloat16),
    ):
        ids = torch.zeros(setting.micro_batch_size, setting.tokens, dtype=torch.long)
        model.get_decoder()(ids, use_cache=False)
        weights = {mode.from_tensor(p).untyped_storage()._cdata for p in model.parameters()}
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in saved}
    activations = sum(storage.nbytes() for place, storage in storages.items() if place not in weights)
    return num_parameters, num_trained, activations


def print_estimates() -> None:
    from rich.console import Console
    from rich.table import Table

    settings = {
        "full": Setting(gradient_checkpointing=True),
        "full, no KL, 64 rows": Setting(gradient_checkpointing=True, kl_weight=0.0, generation_batch_size=64),
        f"LoRA {LORA_RANK}": Setting(mode="lora", gradient_checkpointing=True),
        f"4-bit, LoRA {LORA_RANK}": Setting(mode="4bit", gradient_checkpointing=True, generation_batch_size=64),
    }
    estimates = {f"{model}, {name}": estimate(SHAPES[model], settings[name]) for model in SHAPES for name in settings}
    table = Table("model and setting", "weights", "Adam, gradient", "reference", "sampling", "updating", "peak (GB)")
    for name, parts in estimates.items():
        figures = (
            parts["weights"], parts["gradients"] + parts["optimizer"], parts["reference"],
            parts["kv_cache"] + parts["cast_weights"] + parts["drawing"], parts["activations"] + parts["logits"],
            parts["peak"],
        )  # fmt: skip
        table.add_row(name, *(f"{figure / 1e9:.1f}" for figure in figures))
    Console(width=120).print(table)
    _store("estimates", estimates)


def check() -> None:
    """Run a freshly initialised model of 0.5B parameters on this CPU for two steps, and compare the peaks."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shape = SHAPES["Qwen/Qwen2.5-0.5B-Instruct"]
    results = {}
    with tempfile.TemporaryDirectory() as place:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape, tie_word_embeddings=True))
        model.save_pretrained(Path(place) / "model")
        AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(Path(place) / "model")
        del model
        modes = {"full": [], "lora": ["--lora-rank", str(LORA_RANK)]}
        modes["4bit"] = [*modes["lora"], "--load-in", "4bit"]
        for mode, flags in modes.items():
            command = [
                *(sys.executable, ROOT / "experiment_base" / "train.py", "--model", "./model", "--name", mode),
                *("--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "32"),
                *("--micro-batch-size", "4", "--eval-prompts", "1", "--eval-every", "0", "--checkpoint-every", "0"),
                *("--device", "cpu", "--system-prompt", "", *flags),
            ]
            subprocess.run([str(part) for part in command], cwd=place, check=True)
            run = Path(place) / "runs" / "experiment_base" / mode
            metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
            tokens = 56  # a prompt of about 24 and a completion of 32
            setting = Setting(mode=mode, bfloat16=False, micro_batch_size=4, generation_batch_size=8, tokens=tokens)
            parts = estimate(shape, setting)
            measured = max(entry["memory/peak_bytes"] for entry in metrics if "memory/peak_bytes" in entry)
            results[mode] = {"measured": measured, "estimated": parts["peak"]}
            print(f"{mode}: measured {measured / 1e9:.1f} GB (the process), estimated {parts['peak'] / 1e9:.1f} GB")
    _store("check_float32_cpu_0.5B", results)


def _store(name: str, values: dict) -> None:
    """Replace one part of the results, with the versions, the machine and the commit that it is from."""
    stored = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    stored |= {name: values, f"{name}/from": describe_machine()}
    RESULTS.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if tyro.cli(Command, description=__doc__).check:
        check()
    else:
        print_estimates()
