"""What `--estimate` says of three known models, and its check against real runs.

    python benchmarks/model_memory.py             # the table of docs/real_models.md; one minute, without any weights
    python benchmarks/model_memory.py --recipes   # what each file of recipes/ needs
    python benchmarks/model_memory.py --check     # 0.5B parameters on this CPU; 20 GB of memory, about ten minutes

The check runs a freshly initialised model of the shape of Qwen2.5-0.5B in float32, and compares the peak of the
process's memory, as the system counts it, with the estimate for the same command.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import tyro

from viewer.results import read_json, write_json

from harness.base.config import TINY_POLICY
from harness.cli.parse import parse_config
from harness.models.estimate import Shape, memory_of
from harness.run.machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "measurements.json"
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
LORA = ("--lora-rank", "16")
for name, hidden, inner, layers, heads, kv_heads in (
    ("Qwen/Qwen2.5-1.5B-Instruct", 1536, 8960, 28, 12, 2),
    ("Qwen/Qwen2.5-Math-1.5B", 1536, 8960, 28, 12, 2),
    ("Qwen/Qwen2.5-3B-Instruct", 2048, 11008, 36, 16, 2),
    ("Qwen/Qwen2.5-3B", 2048, 11008, 36, 16, 2),
    ("Qwen/Qwen2.5-7B-Instruct", 3584, 18944, 28, 28, 4),
):
    SHAPES[name] = {
        "model_type": "qwen2", "vocab_size": 152064 if hidden == 3584 else 151936, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "tie_word_embeddings": hidden < 3584,
    }  # fmt: skip
IN_THE_TABLE = ("Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct")
SETTINGS = {  # of the commands in docs/real_models.md
    "full": (),
    "full, no KL, 64 rows": ("--kl-weight", "0", "--generation-batch-size", "64"),
    "LoRA": LORA,
    "4-bit and LoRA": (*LORA, "--load-in", "4bit", "--generation-batch-size", "64"),
}
PROMPT = 128  # tokens, in the table
PROMPT_OF_RECIPES = 256
PROMPT_OF_CHECK = 27  # the longest of the bundled questions
SMALL = (
    *("--prompts-per-step", "2", "--micro-batch-size", "8", "--eval-prompts", "1", "--eval-every", "0"),
    *("--checkpoint-every", "0", "--device", "cpu", "--dtype", "float32", "--system-prompt", "", "--threads", "1"),
)
SHORT = ("--steps", "2", "--group-size", "2", "--max-new-tokens", "32")
LONG = ("--steps", "1", "--group-size", "4", "--max-new-tokens", "128")
CHECKS = {  # processes, layers of 24, flags
    "full": (1, 24, SHORT),
    "LoRA": (1, 24, (*SHORT, *LORA)),
    "LoRA, longer rows": (1, 24, (*LONG, *LORA)),
    "LoRA, two processes": (2, 24, (*SHORT, *LORA)),
    "full, 12 layers": (1, 12, SHORT),
    "full, 12 layers, two processes": (2, 12, SHORT),  # two of the whole model need more memory than most laptops have
}


@dataclass(frozen=True, kw_only=True)
class Command:
    check: bool = False  # run the 0.5B shape on this CPU and compare
    compare: bool = False  # estimate again, and compare with the stored peaks of --check
    recipes: bool = False  # estimate what each recipe needs


def write_model(place: Path, shape: dict, weights: bool = False) -> str:
    """A directory with a config and a tokenizer, and random weights if they are asked for."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.for_model(**({"tie_word_embeddings": True} | shape))
    config.save_pretrained(place)
    AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(place)
    if weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return str(place)


def load_train(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_to_estimate", ROOT / script)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def estimate(
    model: str,
    flags: tuple[str, ...],
    prompt: int,
    launch: str = "one",
    processes: int = 1,
    script: str = "experiment_base/train.py",
    device: str = "cpu",
) -> dict:
    """Bytes by part, and their total."""
    train = load_train(script)
    config = parse_config(train.Config, ["--model", model, "--threads", "1", *flags], train.__doc__)
    shape = Shape(config)
    parts = memory_of(dataclasses.replace(config, device=device), shape, prompt, launch, processes)
    return {"parameters": shape.parameters, "parts": parts, "peak": parts.pop("total")}


def print_estimates() -> None:
    from rich.console import Console
    from rich.table import Table

    table, estimates = Table("model and setting (GB)"), {}
    with tempfile.TemporaryDirectory() as directory:
        for name in IN_THE_TABLE:
            model = write_model(Path(directory) / name.partition("/")[2], SHAPES[name])
            for kind, flags in SETTINGS.items():
                flags = (*flags, "--gradient-checkpointing", "--dtype", "bfloat16", "--device", "cpu")
                found = estimate(model, flags, PROMPT, device="cuda")
                estimates[f"{name}, {kind}"] = found
                figures = found["parts"] | {"peak": found["peak"]}
                if not table.rows:
                    for part in figures:
                        table.add_column(part)
                table.add_row(f"{name}, {kind}", *(f"{figure / 1e9:.1f}" for figure in figures.values()))
    Console(width=120).print(table)
    _store("estimates", estimates)


def print_recipes() -> None:
    """The peak of every recipe on one GPU, in bfloat16; its flags are those that it gives to Python."""
    recorder = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    estimates = {}
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory) / "python"
        python.write_text(recorder, encoding="utf-8")
        python.chmod(0o755)
        for recipe in sorted((ROOT / "recipes").glob("*_*.sh")):
            environment = os.environ | {"PYTHON": str(python)}
            given = subprocess.run(["bash", str(recipe)], env=environment, capture_output=True, text=True, check=True)
            script, *flags = json.loads(given.stdout)
            place = flags.index("--model")
            name = flags[place + 1]
            flags = [*flags[:place], *flags[place + 2 :], "--dtype", "bfloat16", "--device", "cpu"]
            model = write_model(Path(directory) / "models" / name, SHAPES[name])
            script = str(Path(script).relative_to(ROOT))
            found = estimate(model, tuple(flags), PROMPT_OF_RECIPES, script=script, device="cuda")
            estimates[recipe.stem] = {"model": name, "flags": flags} | found
            print(f"{recipe.stem}: {found['peak'] / 1e9:.1f} GB", flush=True)
    _store("recipes", estimates)


def measure() -> None:
    """Run a freshly initialised model of 0.5B parameters on this CPU, and store the peaks."""
    measured = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for name, (processes, layers, flags) in CHECKS.items():
            model = place / f"layers_{layers}"
            if not model.exists():
                write_model(model, _with_layers(layers), weights=True)
            run = f"{processes}_{layers}_{len(measured)}"
            words = ["--model", str(model), *SMALL, *flags, "--name", run, "--runs-dir", str(place / "runs")]
            experiment = "experiment_base" if processes == 1 else "experiment_accelerate_ddp"
            launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone"]
            launcher += [] if processes == 1 else ["--nproc-per-node", str(processes)]
            command = [sys.executable, *launcher, str(ROOT / experiment / "train.py"), *words]
            subprocess.run(command, cwd=place, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            lines = (place / "runs" / experiment / run / "metrics.jsonl").read_text("utf-8").splitlines()
            peak = max(json.loads(line).get("memory/peak_bytes", 0) for line in lines)
            measured[name] = {"flags": [*SMALL, *flags], "processes": processes, "layers": layers, "measured": peak}
            _store("measured_float32_cpu_0.5B", measured)


def compare() -> None:
    """The estimates for the runs that `measure` has made."""
    estimated = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, run in read_json(RESULTS, "model_memory")["measured_float32_cpu_0.5B"].items():
            model = write_model(Path(directory) / name, _with_layers(run["layers"]))
            launch = "one" if run["processes"] == 1 else "multi_gpu"
            flags = tuple(run["flags"])
            found = estimate(model, flags, PROMPT_OF_CHECK, launch, run["processes"])
            estimated[name] = found | {"ratio": found["peak"] / run["measured"]}
            figures = f"measured {run['measured'] / 1e9:.2f} GB, estimated {found['peak'] / 1e9:.2f} GB"
            print(f"{name}: {figures} ({estimated[name]['ratio'] - 1:+.0%})", flush=True)
    _store("estimated_float32_cpu_0.5B", estimated)


def _with_layers(number: int) -> dict:
    return SHAPES["Qwen/Qwen2.5-0.5B-Instruct"] | {"num_hidden_layers": number}


@functools.cache
def _machine() -> dict:
    """As it is before the first results are written, which change the working tree."""
    return describe_machine()


def _store(name: str, values: dict) -> None:
    """Replace one part of the results, with the versions, the machine and the commit that it is from."""
    parts = {name: values, f"{name}/from": _machine()}
    write_json(RESULTS, read_json(RESULTS, "model_memory") | parts, entry="model_memory")


if __name__ == "__main__":
    command = tyro.cli(Command, description=__doc__)
    if command.check:
        measure()
        compare()
    elif command.compare:
        compare()
    elif command.recipes:
        print_recipes()
    else:
        print_estimates()
