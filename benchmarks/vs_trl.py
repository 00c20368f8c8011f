"""experiment_base against TRL's GRPOTrainer on the same work, side by side, in separate processes.

    pip install -e '.[bench]'
    python benchmarks/vs_trl.py                   # 2 hours on two idle cores; --help shows how to run parts of it

Both train the bundled policy on the bundled task: the same checkpoint, the same questions in the same order, groups of
8, completion budget, AdamW with the same settings, one update per step, float32. Only the random numbers of sampling
differ. A second policy of the same size, freshly initialised, reads and writes single characters, so its completions
end at random, after about 22 of at most 48 tokens. It gets a reward if ten divides the number of characters. About four
groups in ten then have zero reward variance, as with a policy that has learned something. Its learning rate is nearly
0, because otherwise it would learn to be brief.

A third policy, SmolLM2-135M-Instruct as `recipes/smollm2.py smollm2` writes it, follows short instructions: 4 prompts a
step, and micro-batches of 8 rows. It is measured if --policies names it.

Runs of the two are interleaved and repeated. The medians are compared: CPU seconds with one thread, which other jobs on
the machine hardly affect, and wall-clock seconds with two threads.

Then both are trained with several seeds, and evaluated on the held-out questions from time to time, with the clock
stopped: how long does each take to reach TRL's accuracy after 300 CPU seconds?

Writes benchmarks/results/vs_trl.json and vs_trl.png; results of parts that are not repeated are kept.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import tyro

from viewer.results import write_json
from viewer.save_figure import save_figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "vs_trl.json"
LR = {"tiny": 5e-5, "characters": 1e-9, "smollm2": 1e-6}
BUDGETS = {"tiny": (96, 48), "characters": (48,), "smollm2": (24, 48, 96)}


@dataclass(frozen=True)
class Job:
    """The work of one process, and its trainer."""

    trainer: str  # ours or trl
    policy: str = "tiny"  # or characters, smollm2, or the directory of another model
    beta: float = 0.0
    threads: int = 1
    prompts: int = 16  # per step
    group_size: int = 8
    max_new_tokens: int = 96
    seed: int = 0
    steps: int = 12
    seconds: float | None = None  # CPU seconds until it stops, instead of steps
    eval_every: int = 0  # steps; 0: never
    micro_batch_size: int | None = None  # rows per pass; None: ours 128, TRL 32
    device: str = "cpu"  # cuda: in bfloat16 over weights in float32


@dataclass(frozen=True, kw_only=True)
class Config:
    repetitions: int = 3  # of each trainer and setting, interleaved; 0: skip the comparison of speeds
    policies: tuple[str, ...] = ("tiny", "characters")  # of the settings
    threads: tuple[int, ...] = (1, 2)  # of the settings
    budgets: tuple[int, ...] = (24, 48, 96)  # of the settings, in tokens
    steps: int = 24  # of each repetition
    warm_up: int = 3  # steps that do not count: they import modules, allocate memory and choose kernels
    entry: str = "settings"  # of vs_trl.json, for the speeds
    seeds: tuple[int, ...] = (0, 1, 2)  # of the comparison of accuracies; none: skip it
    seconds: float = 300  # CPU seconds that TRL trains for in that comparison
    job: str | None = None  # used by the program itself, for its processes


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if config.job is not None:
        work(Job(**json.loads(config.job)))
        return
    result = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    if config.repetitions:
        result[config.entry] = result.get(config.entry, {}) | compare_speed(config)
    if config.seeds:
        result["accuracy"] = compare_accuracy(config)
        draw(result["accuracy"])
    write_json(RESULTS, result)
    print_table(result[config.entry])


def describe() -> dict:
    """The machine and versions for the measurement of one part."""
    from importlib.metadata import version

    from harness.base.machine import describe_machine

    return {"trl": version("trl"), "cores": os.cpu_count()} | describe_machine()


# Speed ---------------------------------------------------------------------------------------------------------------


def compare_speed(config: Config) -> dict[str, dict]:
    """Both trainers in every setting: medians over the counted steps of all repetitions."""
    settings = {
        f"{policy}, beta {beta}, budget {budget}, {threads} thread{'s' * (threads > 1)}": Job(
            "ours", policy, beta=beta, threads=threads, max_new_tokens=budget, steps=config.steps, **more
        )
        for threads in config.threads
        for policy in config.policies
        for more in [{"prompts": 4, "micro_batch_size": 8} if policy == "smollm2" else {}]
        for budget in BUDGETS[policy]
        if budget in config.budgets
        for beta in (0.0, 0.02)
    }
    results = {}
    for name, job in settings.items():
        runs: dict[str, list[dict]] = {"ours": [], "trl": []}
        for _ in range(config.repetitions):
            for trainer in runs:
                runs[trainer].append(start(replace(job, trainer=trainer)))
        results[name] = summarise(runs, "cpu" if job.threads == 1 else "wall", config.warm_up) | describe()
        print(f"{name}: {results[name]['ratio']:.2f} times TRL's tokens per second", flush=True)
    return results


def summarise(runs: dict[str, list[dict]], clock: str, warm_up: int) -> dict:
    """Medians and ranges of one setting, in CPU (`cpu`) or wall-clock (`wall`) seconds."""

    def rate(run: dict) -> float:
        steps = run["steps"][warm_up:]
        return sum(step["tokens"] for step in steps) / sum(step[f"{clock}/step"] for step in steps)

    result: dict = {"clock": clock}
    for trainer, repetitions in runs.items():
        rates = [rate(repetition) for repetition in repetitions]
        result[f"{trainer}_tokens_per_second"] = statistics.median(rates)
        result[f"{trainer}_tokens_per_second_range"] = [min(rates), max(rates)]
        result[f"{trainer}_peak_bytes"] = statistics.median(repetition["peak_bytes"] for repetition in repetitions)
        counted = [step for repetition in repetitions for step in repetition["steps"][warm_up:]]
        for part in ("tokens", *(f"{clock}/{part}" for part in ("step", "sampling", "log_probs", "update"))):
            result[f"{trainer}_{part.split('/')[-1]}"] = statistics.median(step[part] for step in counted)
    pairs = zip(runs["ours"], runs["trl"], strict=True)
    result["ratio"] = result["ours_tokens_per_second"] / result["trl_tokens_per_second"]
    result["ratio_of_pairs"] = sorted(rate(ours) / rate(trl) for ours, trl in pairs)
    result["repetitions"] = runs
    return result


def print_table(settings: dict[str, dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "", "tokens/s", "step", "sampling", "log-probs", "update", "peak GB", "ratio")
    for name, result in settings.items():
        for trainer in ("trl", "ours"):
            parts = [f"{result[f'{trainer}_{part}']:.2f}" for part in ("step", "sampling", "log_probs", "update")]
            rate, peak = result[f"{trainer}_tokens_per_second"], result[f"{trainer}_peak_bytes"] / 1e9
            ratio = f"{result['ratio']:.2f}" if trainer == "ours" else ""
            table.add_row(name if trainer == "trl" else "", trainer, f"{rate:,.0f}", *parts, f"{peak:.2f}", ratio)
    Console(width=120).print(table)


# Accuracy ------------------------------------------------------------------------------------------------------------


def compare_accuracy(config: Config) -> dict:
    """Held-out accuracy against CPU seconds for several seeds, and when ours reaches TRL's final accuracy."""
    curves: dict[str, list[list[dict]]] = {"trl": [], "ours": []}
    for seed in config.seeds:
        for trainer in curves:
            seconds = config.seconds if trainer == "trl" else 0.4 * config.seconds  # ours needs less to reach it
            run = start(Job(trainer, seed=seed, seconds=seconds, steps=100_000, eval_every=4))
            curves[trainer].append(run["evaluations"])
            print(f"{trainer}, seed {seed}: {run['evaluations'][-1]}", flush=True)
    sooner = []
    for trl, ours in zip(curves["trl"], curves["ours"], strict=True):
        target = statistics.mean(point["accuracy"] for point in trl[-3:])  # one evaluation is noisy
        reached = next((point["cpu"] for point in ours if point["accuracy"] >= target), None)
        sooner.append({"target": target, "trl_cpu": trl[-1]["cpu"], "ours_cpu": reached})
    return {"seeds": config.seeds, "curves": curves, "sooner": sooner} | describe()


def draw(accuracy: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for place, clock, unit in ((axes[0], "cpu", "CPU seconds"), (axes[1], "wall", "wall-clock seconds")):
        for color, (trainer, label) in enumerate((("ours", "experiment_base"), ("trl", "TRL"))):
            for number, curve in enumerate(accuracy["curves"][trainer]):
                points = [(point[clock], point["accuracy"]) for point in curve]
                place.plot(*zip(*points, strict=True), color=f"C{color}", label=label if number == 0 else None)
        place.set_xlabel(f"{unit} of training")
        place.grid(alpha=0.3)
        place.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("sampled accuracy, held-out questions")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    save_figure(figure, RESULTS.with_suffix(".png"))


# One process ---------------------------------------------------------------------------------------------------------


def start(job: Job) -> dict:
    """Run a job in a separate process, and return its measurements."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--job", json.dumps(asdict(job))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"error: {job} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def work(job: Job) -> None:
    """Do the job in this process; the last line on stdout holds its measurements."""
    import torch

    from harness.base.machine import peak_memory_bytes

    if job.policy == "characters":
        from tasks import arithmetic

        arithmetic.reward = lambda row, text: {"correct": float(len(text.replace(" ", "")) % 10 == 0), "format": 0.0}
        arithmetic.solution = lambda row: "0123456789"
    torch.set_num_threads(job.threads)
    clock = Clock(job)
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as directory:
        (train_ours if job.trainer == "ours" else train_trl)(job, clock, directory)
    measured = {"steps": clock.steps, "evaluations": clock.evaluations}
    print(json.dumps(measured | {"peak_bytes": peak_memory_bytes(job.device)}))


class JobDoneError(Exception):
    """The job has reached its number of steps or seconds."""


class Clock:
    """Times the steps of a run and their parts; it is stopped during evaluations."""

    def __init__(self, job: Job):
        self.job = job
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self._total = {"cpu": 0.0, "wall": 0.0}
        self._begin_step()

    def timed(self, part: str, function: Callable) -> Callable:
        """Wrap the function so that its time is added to a part of the step."""

        @wraps(function)
        def call(*arguments, **settings):
            before = self._now()
            try:
                return function(*arguments, **settings)
            finally:
                for name, value in self._now().items():
                    self._parts[f"{name}/{part}"] += value - before[name]

        return call

    def end_step(self, tokens: int, evaluate: Callable[[], float]) -> None:
        """Record a step with `tokens` sampled tokens; evaluate if due; raise JobDoneError at the end of the job."""
        now = self._now()
        step = {f"{name}/step": now[name] - self._start[name] for name in now}
        for name in now:
            self._total[name] += step[f"{name}/step"]
            update = step[f"{name}/step"] - self._parts[f"{name}/sampling"] - self._parts[f"{name}/log_probs"]
            step |= {f"{name}/{part}": self._parts[f"{name}/{part}"] for part in ("sampling", "log_probs")}
            step[f"{name}/update"] = update  # everything that is neither sampling nor log-probs
        self.steps.append({"tokens": tokens} | step)
        over = len(self.steps) == self.job.steps
        over |= self.job.seconds is not None and self._total["cpu"] >= self.job.seconds
        if self.job.eval_every and (over or len(self.steps) % self.job.eval_every == 0):
            self.evaluations.append({"step": len(self.steps), "accuracy": evaluate()} | self._total)
        if over:
            raise JobDoneError
        self._begin_step()

    def _begin_step(self) -> None:
        self._start = self._now()
        self._parts = {f"{name}/{part}": 0.0 for name in self._start for part in ("sampling", "log_probs")}

    @staticmethod
    def _now() -> dict[str, float]:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # queued work belongs to this part, too
        return {"cpu": time.process_time(), "wall": time.perf_counter()}


def examine(policy, seed: int) -> float:
    """Sampled accuracy on the held-out questions, each asked four times."""
    from common.evaluate import evaluate
    from tasks import arithmetic

    from harness.data.data import read_rows

    rows = read_rows(str(arithmetic.EVAL_DATA), arithmetic.FIELDS)[:256]
    evaluation = evaluate(policy, rows, arithmetic, max_new_tokens=96, num_samples=4, seed=seed)
    return evaluation.metrics["sampled/accuracy"]


def questions_of(job: Job) -> tuple[ModuleType, Path]:
    """The task that both trainers train on, and its rows."""
    from tasks import arithmetic, instructions

    if job.policy == "smollm2":
        return instructions, ROOT / "data" / "instructions_short.jsonl"
    return arithmetic, arithmetic.TRAIN_DATA


def checkpoint_of(job: Job, directory: str) -> str:
    """The directory of the policy that both trainers load."""
    from tasks.arithmetic import TRAIN_DATA

    from harness.base.config import TINY_POLICY

    if job.policy != "characters":
        return {"tiny": str(TINY_POLICY), "smollm2": str(ROOT / "smollm2")}.get(job.policy, job.policy)
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = sorted(set(TRAIN_DATA.read_text(encoding="utf-8").lower()) - set('{}[]"_:\n'))[:24]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<end>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<end>|[\\s\\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    torch.manual_seed(0)
    shape = LlamaConfig.from_pretrained(TINY_POLICY).to_dict()
    shape |= {"vocab_size": len(vocabulary), "eos_token_id": 1, "dtype": "float32"}
    place = f"{directory}/characters"
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def train_ours(job: Job, clock: Clock, directory: str) -> None:
    """Run experiment_base/train.py unchanged, with a clock around the functions that its loop calls."""
    spec = spec_from_file_location("train", ROOT / "experiment_base" / "train.py")
    train = sys.modules["train"] = module_from_spec(spec)
    spec.loader.exec_module(train)
    policies, lengths = [], []
    log, load = train.Run.log, train.load_policy

    def log_and_note(run, step, metrics):
        lengths.append(metrics["completion/length"])
        log(run, step, metrics)

    def end_step(run, step, policy, optimizer):
        """Replaces the checkpoint, the last part of a step."""
        clock.end_step(round(lengths[-1] * job.prompts * job.group_size), lambda: examine(policies[0], job.seed))

    def load_and_keep(*arguments):
        policies.append(load(*arguments))
        return policies[-1]

    train.load_policy = load_and_keep
    train.sample_completions = clock.timed("sampling", train.sample_completions)
    train.token_log_probs = clock.timed("log_probs", train.token_log_probs)
    train.Run.log = log_and_note
    train.Run.checkpoint = end_step
    train.Run.log_before = lambda run, evaluation: clock._begin_step()
    task, data = questions_of(job)
    flags = {
        "task": task.__name__.removeprefix("tasks."), "data": data, "eval-data": task.EVAL_DATA,
        "model": checkpoint_of(job, directory), "micro-batch-size": job.micro_batch_size or 128,
        "tokens-per-micro-batch": 2048 if job.policy in ("tiny", "characters") else 16_384,
        "system-prompt": "",  # as for the bundled policy
        "steps": job.steps, "prompts-per-step": job.prompts, "group-size": job.group_size, "seed": job.seed,
        "max-new-tokens": job.max_new_tokens, "kl-weight": job.beta, "threads": job.threads,
        "lr": LR.get(job.policy, 1e-9), "eval-prompts": 1, "eval-every": 0, "checkpoint-every": 0,
        "runs-dir": directory, "device": job.device,
    }  # fmt: skip
    with suppress(JobDoneError):
        train.main([word for name, value in flags.items() for word in (f"--{name}", str(value))])


def train_trl(job: Job, clock: Clock, directory: str) -> None:
    """TRL's GRPOTrainer with the settings of experiment_base; saving, reporting and progress bars are switched off."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from common.policy import Policy

    from harness.data.data import read_rows
    from harness.data.order import prompts_of_step
    from harness.models.loading import find_end_of_turn_ids

    micro_batch_size = job.micro_batch_size or 32
    task, data = questions_of(job)
    rows = read_rows(str(data), task.FIELDS)
    num_steps = min(job.steps, 2000)
    order = [
        index for step in range(1, num_steps + 1) for index in prompts_of_step(len(rows), job.prompts, step, job.seed)
    ]
    dataset = Dataset.from_list(
        [{"prompt": task.messages(rows[index]), "row": index} for index in order]  # columns of one type
    )
    checkpoint = checkpoint_of(job, directory)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    # for the evaluations only; without make_policy's optimizations, so that TRL's model is unchanged
    end_of_turn_ids = find_end_of_turn_ids(tokenizer, model.generation_config)
    policy = Policy(model, tokenizer, end_of_turn_ids, tokenizer.pad_token_id)
    sampled: list[int] = []

    def correct(completions, row, **_) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [task.reward(rows[index], text)["correct"] for index, text in zip(row, texts, strict=True)]

    class Steps(TrainerCallback):
        def on_train_begin(self, *arguments, **settings):
            clock._begin_step()

        def on_step_end(self, *arguments, **settings):
            clock.end_step(sampled[-1], lambda: examine(policy, job.seed))

    in_update = GRPOTrainer._compute_loss

    def compute_loss(self, *arguments, **settings):
        """The log-probs that the update computes are part of the update."""
        self._get_per_token_logps_and_entropies = log_probs.__get__(self)
        try:
            return in_update(self, *arguments, **settings)
        finally:
            del self._get_per_token_logps_and_entropies

    log_probs = GRPOTrainer._get_per_token_logps_and_entropies
    GRPOTrainer._compute_loss = compute_loss
    GRPOTrainer._get_per_token_logps_and_entropies = clock.timed("log_probs", log_probs)
    generate = clock.timed("sampling", GRPOTrainer._generate)

    def generate_and_note(self, *arguments, **settings):
        result = generate(self, *arguments, **settings)
        sampled.append(sum(map(len, result[1])))
        return result

    GRPOTrainer._generate = generate_and_note
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=correct,
        train_dataset=dataset,
        callbacks=[Steps()],
        args=GRPOConfig(
            output_dir=directory,
            seed=job.seed,
            max_steps=num_steps,
            shuffle_dataset=False,
            use_cpu=job.device == "cpu",
            bf16=job.device != "cpu",
            per_device_train_batch_size=micro_batch_size,
            gradient_accumulation_steps=job.prompts * job.group_size // micro_batch_size,
            num_generations=job.group_size,
            max_completion_length=job.max_new_tokens,
            temperature=1.0,
            beta=job.beta,
            loss_type="grpo",
            learning_rate=LR.get(job.policy, 1e-9),
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    with suppress(JobDoneError):
        trainer.train()


if __name__ == "__main__":
    main()
