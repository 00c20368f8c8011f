"""The estimates of `--estimate` for known models, for the recipes, and for runs with measured memory.

    python benchmarks/model_memory.py             # the table of docs/real_models.md; one minute, without any weights
    python benchmarks/model_memory.py --recipes   # the needs of each file in recipes/
    python benchmarks/model_memory.py --cards     # the table of docs/eight_gpus.md: one GPU, and each of eight
    python benchmarks/model_memory.py --compare   # the estimates for the runs with measured peaks

The measured runs train a freshly initialised model of the shape of Qwen2.5-0.5B in float32, on a CPU; the peak is the
memory of the process, as the system counts it.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import tyro

from viewer.results import read_json, write_json

from harness.base.config import TINY_POLICY
from harness.base.machine import describe_machine
from harness.cli.parse import parse_config
from harness.run.estimate import FULL, Shape, memory_of

ROOT = Path(__file__).resolve().parent.parent
ACCELERATE = "experiment_accelerate/train.py"
RESULTS = ROOT / "benchmarks" / "results" / "measurements.json"
SHAPES = {  # from their config.json on the hub
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
    ("Qwen/Qwen2.5-7B", 3584, 18944, 28, 28, 4),
    ("Qwen/Qwen2.5-7B-Instruct", 3584, 18944, 28, 28, 4),
    ("Qwen/Qwen2.5-14B-Instruct", 5120, 13824, 48, 40, 8),
):
    SHAPES[name] = {
        "model_type": "qwen2", "vocab_size": 152064 if hidden >= 3584 else 151936, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "tie_word_embeddings": hidden < 3584,
    }  # fmt: skip
EIGHT_BILLION = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
LLAMAS = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2")
SHAPES |= dict.fromkeys(LLAMAS, EIGHT_BILLION)
IN_THE_TABLE = ("Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct")
SETTINGS = {  # from the commands in docs/real_models.md
    "full": (),
    "full, no KL, 64 rows": ("--kl-weight", "0", "--generation-batch-size", "64"),
    "LoRA": LORA,
    "4-bit and LoRA": (*LORA, "--load-in", "4bit", "--generation-batch-size", "64"),
}
CHAT = "think_and_chat"  # a recipe that needs words
OTHER_SIZES = {  # recipes with their words, and the flags after them
    "qwen2.5_1.5b_full": ("gsm8k_qwen2.5_0.5b_full", "--model Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen2.5_3b_full": (
        "gsm8k_qwen2.5_0.5b_full",
        "--model Qwen/Qwen2.5-3B-Instruct --kl-weight 0 --generation-batch-size 64",
    ),
    "qwen2.5_3b_full_8bit": (
        "gsm8k_qwen2.5_0.5b_full",
        "--model Qwen/Qwen2.5-3B-Instruct --kl-weight 0 --generation-batch-size 64 --optimizer adamw_8bit",
    ),
    "qwen2.5_14b_lora": ("gsm8k_qwen2.5_7b_lora", "--model Qwen/Qwen2.5-14B-Instruct"),
    "chat_llama_grpo": (f"{CHAT} llama_base zero think grpo", ""),
    "chat_llama_grpo_few_rows": (f"{CHAT} llama_base zero think grpo", "--generation-batch-size 8"),
    "chat_llama_ppo": (f"{CHAT} llama_base warm think ppo", "--model meta-llama/Llama-3.1-8B"),
    "chat_qwen_grpo": (f"{CHAT} qwen_base zero think grpo", ""),
    "chat_qwen_grpo_few_rows": (f"{CHAT} qwen_base zero think grpo", "--generation-batch-size 8"),
}
ON_CARDS = ("Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct")
ON_CARDS += ("meta-llama/Llama-3.2-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B-Instruct")
METHODS = {
    "full": (),
    "full, no KL": ("--kl-weight", "0"),
    "LoRA": LORA,
    "4-bit and LoRA": (*LORA, "--load-in", "4bit"),
}
CARDS, CARD = 8, 80  # GPUs, and GB of each
PROMPT = 128  # tokens, in the tables
PROMPT_OF_RECIPES, PROMPT_OF_CHAT = 256, 1024
PROMPT_OF_CHECK = 27  # the longest of the bundled questions


@dataclass(frozen=True, kw_only=True)
class Command:
    compare: bool = False  # compare with the stored peaks of runs
    recipes: bool = False  # estimate what each recipe needs
    cards: bool = False  # estimate the memory of one GPU, and of each of eight


def write_model(place: Path, shape: dict) -> str:
    """A directory with a config and a tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.for_model(**({"tie_word_embeddings": True} | shape))
    config.save_pretrained(place)
    AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(place)
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


def print_cards() -> None:
    """The table of docs/eight_gpus.md: GB on one GPU / on each of eight with DDP / with FSDP2; bold where it fits."""
    estimates = {}
    print("| model | " + " | ".join(METHODS) + " |\n" + "|---" * (len(METHODS) + 1) + "|")
    with tempfile.TemporaryDirectory() as directory:
        for name in ON_CARDS:
            model, cells = write_model(Path(directory) / name, SHAPES[name]), [f"`{name}`"]
            for kind, flags in METHODS.items():
                flags = (*flags, "--gradient-checkpointing", "--estimate", "--gpu-memory", str(CARD))
                launches = {"one": 1, "multi_gpu": CARDS} | ({} if "--load-in" in flags else {"fsdp2": CARDS})
                found = {
                    f"{launch} x{count}": estimate(model, flags, PROMPT, launch, count, ACCELERATE, "cuda")["peak"]
                    for launch, count in launches.items()
                }
                estimates[f"{name}, {kind}"] = found
                marks = ["**" if peak <= FULL * CARD * 1e9 else "" for peak in found.values()]
                figures = zip(marks, found.values(), strict=True)
                cells.append(" / ".join(f"{mark}{peak / 1e9:.0f}{mark}" for mark, peak in figures))
            print("| " + " | ".join(cells) + " |", flush=True)
    _store("cards", estimates)


def print_recipes() -> None:
    """The peak of every recipe in bfloat16, with the flags that it gives to Python: on one GPU, or with a reward model
    on each of eight, under FSDP2.
    """
    recorder = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    estimates = {}
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory) / "python"
        python.write_text(recorder, encoding="utf-8")
        python.chmod(0o755)
        recipes = [path.stem for path in sorted((ROOT / "recipes").glob("*_*.sh")) if path.stem != CHAT]
        runs = {recipe: (recipe, "") for recipe in recipes} | OTHER_SIZES
        for title, (recipe, more) in runs.items():
            recipe, *words = recipe.split()
            environment = os.environ | {"PYTHON": str(python)}
            command = ["bash", f"{ROOT}/recipes/{recipe}.sh", *words, "--", *more.split()]
            given = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            script, *flags = json.loads(given.stdout.splitlines()[-1])  # a recipe can prepare something first
            while flags.count("--model") > 1:  # the last one counts
                place = flags.index("--model")
                flags = [*flags[:place], *flags[place + 2 :]]
            place = flags.index("--model")
            if (name := flags[place + 1]) not in SHAPES:  # measured instead
                continue
            flags = [*flags[:place], *flags[place + 2 :], "--dtype", "bfloat16", "--device", "cpu"]
            model = write_model(Path(directory) / "models" / name, SHAPES[name])
            script, setting = str(Path(script).relative_to(ROOT)), (PROMPT_OF_RECIPES, "one", 1)
            if "--reward-model" in flags:
                place, setting = flags.index("--reward-model") + 1, (PROMPT_OF_CHAT, "fsdp2", CARDS)
                flags[place] = str(write_model(Path(directory) / "models" / flags[place], SHAPES[flags[place]]))
            found = estimate(model, tuple(flags), *setting, script=script, device="cuda")
            estimates[title] = {"model": name, "flags": flags} | found
            print(f"{title}: {found['peak'] / 1e9:.1f} GB", flush=True)
    _store("recipes", estimates)


def compare() -> None:
    """The estimates for the measured runs."""
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


def _store(name: str, values: dict) -> None:
    """Replace one part of the results, together with its versions, machine and commit."""
    parts = {name: values, f"{name}/from": describe_machine()}
    write_json(RESULTS, read_json(RESULTS, "model_memory") | parts, entry="model_memory")


if __name__ == "__main__":
    command = tyro.cli(Command, description=__doc__)
    if command.compare:
        compare()
    elif command.recipes:
        print_recipes()
    elif command.cards:
        print_cards()
    else:
        print_estimates()
