"""The settings that all experiments share; a field's comment is its help, its type the range and group of its flag."""

import dataclasses
import importlib.util
import json
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
from annotated_types import Ge, Gt, Interval

from common.errors import UserError
from common.experience import MicroBatchSize

from harness.base.places import ROOT, current_path

TINY_POLICY = ROOT / "data" / "policies" / "tiny_policy"
# The second was trained with tools, the third with a search tool
BUNDLED = {
    "tiny": TINY_POLICY,
    "tiny_tools": ROOT / "data" / "policies" / "tiny_policy_tools",
    "tiny_countdown": ROOT / "data" / "policies" / "tiny_policy_countdown",
    "tiny_teacher": ROOT / "data" / "policies" / "tiny_teacher",  # a LoRA adapter of the first, which reasons
    "tiny_reader": ROOT / "data" / "policies" / "tiny_reader",  # another one, which reads hints
    "tiny_world": ROOT / "data" / "policies" / "tiny_world",  # knows the words and some of the ways of thin_ice
}
ADAPTER_SETTINGS = "adapter_config.json"
# The training of a bundled policy: its tasks, and a description
TAUGHT = {
    "tiny": (("arithmetic",), "short sums and products of small numbers"),
    "tiny_tools": (("arithmetic", "calculator", "qa"), "the bundled calculator questions and documents"),
    "tiny_countdown": (("countdown",), "Countdown with small numbers"),
    "tiny_world": (("thin_ice",), "the bundled world"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Numbers in a range, which --help shows
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
ZeroOrOne = Annotated[int, Interval(ge=0, le=1)]
GroupSize = Annotated[int, Ge(2)]  # a group is its own baseline
Seed = Annotated[int, Interval(ge=0, le=10**18)]  # the range that PyTorch accepts
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(gt=0, le=1)]
ZeroToOne = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True)
class IsPath:
    """Marks text that names a file or a directory and is therefore checked early."""

    is_input: bool = False  # a run reads it; config.json keeps its absolute path, to resume from any directory


LocalPath = Annotated[str, IsPath()]
InputPath = Annotated[str, IsPath(is_input=True)]


class Group(Enum):
    """Where --help shows a flag. An experiment's own flags need no group: theirs is the first one."""

    POLICY = "policy"
    DATA = "data and task"
    JUDGE = "judge"
    TEACHER = "teacher"
    SEARCH = "search"
    ENGINE = "engine"
    EVALUATION = "evaluation"
    RUN = "run"


T = TypeVar("T")
OfPolicy = Annotated[T, Group.POLICY]
OfData = Annotated[T, Group.DATA]
OfJudge = Annotated[T, Group.JUDGE]
OfTeacher = Annotated[T, Group.TEACHER]
OfSearch = Annotated[T, Group.SEARCH]
OfEngine = Annotated[T, Group.ENGINE]
OfEvaluation = Annotated[T, Group.EVALUATION]
OfRun = Annotated[T, Group.RUN]

# The defaults of flags left at None, by the kind of policy. A test compares the --help texts with these figures.
RESOLVED = {
    "tiny": {"lr": 5e-5, "max_new_tokens": 96, "micro_batch_size": 128, "tokens_per_micro_batch": 2048},
    "full": {"lr": 1e-6, "max_new_tokens": 512, "micro_batch_size": 4, "tokens_per_micro_batch": 16_384},
}
LORA_LR_FACTOR = 10  # of the learning rate of full fine-tuning (Thinking Machines Lab 2025, "LoRA Without Regret")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings of every program that loads a model."""

    # the bundled policy "tiny", a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or a directory: of a model, or of a LoRA
    # adapter
    model: OfPolicy[LocalPath] = "tiny"
    # file of a chat template (Jinja), for models that have none, such as base models; None: the model's own
    chat_template: OfPolicy[InputPath | None] = None
    seed: OfRun[Seed] = 0  # seed of sampling
    # CPU threads; auto: OMP_NUM_THREADS, else 1 for the bundled policies and the physical cores for other models
    threads: OfRun[Literal["auto"] | Count] = "auto"
    # cpu, cuda, cuda:1, mps, or another device of PyTorch; auto: an accelerator, cuda first, or cpu; tried on cpu only
    device: OfPolicy[str] = "auto"
    # arithmetic, and the dtype of frozen weights; trained weights are float32, and bfloat16 is autocast over them;
    # None: bfloat16 for models other than the bundled one on cuda, else float32
    dtype: OfPolicy[Literal["float32", "bfloat16"] | None] = None
    # how attention is computed; auto: flash_attention_2 if it is installed and usable (cuda, bfloat16), else sdpa
    attn_implementation: OfPolicy[Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"]] = "auto"
    load_in: OfPolicy[Literal["8bit", "4bit"] | None] = None  # hold the weights quantised (bitsandbytes)

    @property
    def model_path(self) -> Path | None:
        """The directory that `model` names, or None if it is a hub id or "new"."""
        return None if self.model == "new" else find_directory(self.model)

    @property
    def adapter_path(self) -> Path | None:
        """The directory that `model` names, if it holds a LoRA adapter and no model."""
        path = self.model_path
        is_adapter = path is not None and (path / ADAPTER_SETTINGS).is_file() and not (path / "config.json").exists()
        return path if is_adapter else None

    @property
    def base_path(self) -> Path | None:
        """The directory of the model, or of the adapter's base model; None if it is a hub id or "new"."""
        return self.model_path if self.adapter_path is None else find_directory(read_base(self.adapter_path))

    @property
    def base(self) -> str:
        """The same as an absolute path, or the hub id."""
        if self.base_path is not None:
            return str(self.base_path.resolve())
        return self.model if self.adapter_path is None else read_base(self.adapter_path)

    @property
    def has_adapter(self) -> bool:
        """Whether the model is a LoRA adapter on frozen weights."""
        return self.adapter_path is not None

    @property
    def kind(self) -> str:
        """Which row of a table of resolved defaults applies: "tiny" also for a policy with the bundled one's shape."""
        if self.model == "new":
            return "new"
        is_tiny = self.base_path is not None and _shape(self.base_path) == _shape(TINY_POLICY)
        return "tiny" if is_tiny else "full"


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(ModelConfig):
    """The additional settings of every program that trains a policy."""

    # the bundled policy "tiny", a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or a directory: of a model, or of a LoRA
    # adapter, which is trained further, or with --lora-rank merged into its base
    model: str = "tiny"
    seed: int = 0  # seed of data order, sampling and minibatches
    gradient_checkpointing: OfPolicy[bool] = False  # recompute activations in the backward pass: less memory, more time
    # lay the rows of a micro-batch end to end, with a shared prompt only once, instead of padding them; the loss is the
    # same; not where the model's attention does not know the borders of rows
    pack: OfPolicy[bool] = True
    lora_rank: OfPolicy[CountOrZero] = 0  # train low-rank adapters of this rank instead of all weights; 0: all weights
    lora_alpha: OfPolicy[Positive | None] = None  # adapters are scaled by alpha / rank; None: twice the rank
    # linear layers that get an adapter, by the last part of their names, e.g. q_proj v_proj; none: all but the head
    lora_targets: OfPolicy[tuple[str, ...]] = ()
    load_in: Literal["8bit", "4bit"] | None = None  # hold the weights quantised (bitsandbytes); needs an adapter
    save_merged: OfPolicy[bool] = False  # with an adapter: also write final_merged/, a model with the adapter merged in
    # held-out questions per evaluation; without --eval-data this many rows of --data are held out
    eval_prompts: OfEvaluation[Count] = 256
    checkpoint_every: OfRun[CountOrZero] = 20  # steps between checkpoints; 0: only on Ctrl-C
    keep_checkpoints: OfRun[Count] = 2  # how many of the newest checkpoints are kept
    estimate: OfRun[bool] = False  # print how much memory a run with these settings needs, and end
    # with --estimate: the number of GPUs; None: all of this machine, and at least 2
    gpus: OfRun[Count | None] = None
    # with --estimate: the memory of each GPU in GB, for GPUs that this machine need not have; None: as this machine's
    gpu_memory: OfRun[Annotated[float, Interval(gt=0, le=1024)] | None] = None
    # open the run's page in the browser, live while it trains; without a screen its address is only printed
    watch: OfRun[bool] = False
    verbose: OfRun[bool] = False  # print all settings at the start, not only those that differ from the defaults
    # record this many steps, from the second on: trace.json.gz, which https://ui.perfetto.dev opens; 0: none
    profile: OfRun[CountOrZero] = 0
    # also log to Weights & Biases; without its package, a key or a network the run continues
    wandb: OfRun[bool] = False
    wandb_project: OfRun[str | None] = None  # with --wandb: the project; None: the experiment's name
    wandb_group: OfRun[str | None] = None  # with --wandb: the group, for example of runs that differ by their seed
    # a file of settings (YAML or JSON), by the names of flags: a run's config.json starts that run again; flags of the
    # command line replace its values
    config: OfRun[InputPath | None] = None
    name: OfRun[str | None] = None  # the run's name; None: date, time and seed
    runs_dir: OfRun[LocalPath] = "runs"  # directory of all runs: <runs-dir>/<experiment>/<name>/
    # directory of a run to resume, with its own settings; you can only raise --steps, or change batch sizes; None: a
    # new run
    resume: OfRun[LocalPath | None] = None

    @property
    def has_adapter(self) -> bool:
        """Whether the policy has an adapter, either new or named by `model`."""
        return self.lora_rank > 0 or self.adapter_path is not None


@dataclass(frozen=True, kw_only=True)
class EvaluatedConfig(PolicyConfig):
    """The additional settings of every experiment that is evaluated while it trains."""

    # the learning rate after the warm-up: constant, or falling to nearly 0 at the last step, linearly or as a cosine
    lr_schedule: OfPolicy[Literal["constant", "linear", "cosine"]] = "constant"
    lr_warmup_steps: OfPolicy[CountOrZero] = 0  # steps over which the learning rate rises from 0
    # adamw_8bit: hold the moments of AdamW in 8 bits (bitsandbytes); not for sharded weights
    optimizer: OfPolicy[Literal["adamw", "adamw_8bit"]] = "adamw"
    # also keep the weights, in best/, of the step with the highest value of this metric, e.g. eval/greedy/accuracy;
    # None: only the last ones
    keep_best: OfEvaluation[str | None] = None


@dataclass(frozen=True, kw_only=True)
class AskedConfig(EvaluatedConfig):
    """The additional settings of every experiment whose policy is asked the questions of a task."""

    # questions and rewards: a file of tasks, or the path of your own
    task: OfData[LocalPath] = "arithmetic"
    # the system turn of every question; None: none for the bundled policy, the task's own for other models
    system_prompt: OfData[str | None] = None
    # a text at which a completion ends, e.g. "</response>", for models that were taught no end of turn; may be given
    # several times
    stop: OfData[tuple[str, ...]] = ()
    eval_every: OfEvaluation[CountOrZero] = 10  # steps between evaluations (greedy only); 0: only before and after
    # steps between entries of samples.jsonl (two groups; every tenth step all); 0: none
    samples_every: OfRun[CountOrZero] = 1
    progress: OfRun[tuple[str, ...]] = ()  # metrics that the progress line also shows, e.g. policy/clipped
    # completions sampled at the same time, which bounds the memory of the KV cache
    generation_batch_size: OfRun[Count] = 128


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """The settings of a judge with a rubric, in training and in evaluate.py."""

    # a rubric: a JSONL file of yes/no questions, each a component whose value is the judge's probability of yes
    judge: OfJudge[InputPath | None] = None
    # the language model that answers the rubric: a directory or a hub id; with --judge-url, the model's name there
    judge_model: OfJudge[InputPath | None] = None
    # the address of a server that speaks OpenAI's protocol and returns log-probs, instead of a model in this process
    judge_url: OfJudge[str | None] = None
    # the part of a completion that a judge sees: all after this tag, e.g. "</think>"; or a JSON file of tags, or a
    # model's directory with a longcot_config.json
    answer_begins: OfJudge[str | None] = None
    strict: OfJudge[bool] = False  # with --answer-begins: score only completions of exactly one thought and one answer


@dataclass(frozen=True, kw_only=True)
class RunConfig(JudgeConfig, AskedConfig):
    """The additional settings of every experiment with rewards."""

    # tokens per pass, beside --micro-batch-size rows: memory then does not depend on the longest row; None: 2048 for
    # the bundled policy, else 16384
    tokens_per_micro_batch: OfPolicy[Count | None] = None
    reward_weight: OfData[tuple[str, ...]] = ()  # NAME=NUMBER: weights of reward components, instead of the task's own
    # file of reward functions in TRL's form, f(prompts, completions, **columns) -> list[float]; each adds a component
    # under its name, with weight 1, to the task's own
    reward_functions: OfData[InputPath | None] = None
    # file (docs/data.md), or hub dataset id[:subset[:split]], split train; None: the task's own
    data: OfData[InputPath | None] = None
    # a reward model that scores each answer, as a component "preference" beside the task's: a directory or a hub id
    reward_model: OfJudge[InputPath | None] = None
    reward_model_url: OfJudge[str | None] = None  # instead: the address of a vLLM server with a reward model
    no_answer_penalty: OfJudge[NotNegative] = 10.0  # a completion without an answer to score gets minus this instead
    # held-out questions, a file or a hub dataset like --data; None: the task's own, or with --data test.jsonl beside
    # train.jsonl, or the hub dataset's split test if --data names no split, or else rows held out from --data
    eval_data: OfEvaluation[InputPath | None] = None
    # end early once a metric of a step has a value, in quotes: "eval/greedy/accuracy>=0.9" (or <=, >, <); or, with a
    # judge or reward model, over-optimised: when a reward rises while the held-out accuracy falls
    stop_when: OfEvaluation[str | None] = None
    # NAME=SOURCE: further held-out questions of the task, each with its own curve, eval/NAME/greedy/accuracy
    eval_sets: OfEvaluation[tuple[str, ...]] = ()
    eval_suite: OfEvaluation[Literal["math"] | None] = None  # the benchmarks of evaluate.py --suite as further sets
    # passes over the training prompts, in place of --steps; None: as many steps as --steps says
    epochs: OfData[Count | None] = None
    max_prompts: OfData[Count | None] = None  # train only on this many prompts that pass the filters; None: on all
    at_most: OfData[tuple[str, ...]] = ()  # NAME=NUMBER: keep rows whose field NAME is at most NUMBER, e.g. num_terms=2
    max_question_length: OfData[Count | None] = None  # keep questions of at most this many characters; None: any
    # every completion begins with this text, e.g. "<think>"; it is given, not sampled, so none of its tokens is trained
    completion_prefix: OfData[str | None] = None

    @property
    def micro_batch(self) -> MicroBatchSize:
        """The largest micro-batch: a flag of the experiment in rows, and one of all experiments in tokens."""
        return MicroBatchSize(self.micro_batch_size, self.tokens_per_micro_batch)


def shown(source: str | Path) -> str:
    """A path as a user would type it: relative if it is inside the current directory."""
    path = Path(source)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else source)


def find_directory(model: str) -> Path | None:
    """The directory of a model, whether it exists or not; None for a hub id."""
    if model in BUNDLED:
        return BUNDLED[model]
    model = current_path(model)
    path = Path(model).expanduser()
    return None if is_hub_id(model) and not path.is_dir() else path


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id, owner/name.

    >>> is_hub_id("Qwen/Qwen2.5-0.5B-Instruct"), is_hub_id("my models/llama"), is_hub_id("../x")
    (True, False, False)
    """
    is_id = re.fullmatch(r"\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", name, re.ASCII) is not None
    return is_id and ".." not in name and "--" not in name and not name.endswith(".git")


def read_base(adapter: Path) -> str:
    """The hub id or directory of the model that an adapter was trained on; UserError if its settings do not name it."""
    name = _read_json(adapter / ADAPTER_SETTINGS).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(f"{adapter / ADAPTER_SETTINGS} does not name the base model (base_model_name_or_path)")
    return name


def _shape(model_path: Path) -> tuple[int, int] | None:
    """Vocabulary size and hidden size of a Hugging Face model directory; None if config.json does not name them."""
    settings = _read_json(model_path / "config.json")
    names = ("vocab_size", "hidden_size")
    return tuple(settings[name] for name in names) if settings.keys() >= {*names} else None


def _read_json(path: Path) -> dict:
    """The JSON object in a file; empty if there is none, which loading the model then refuses."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


ConfigT = TypeVar("ConfigT", bound=ModelConfig)


def resolve(config: ConfigT, defaults: dict) -> ConfigT:
    """The settings, with every None and "auto" resolved from the machine, the model, and `defaults`."""
    device, is_elsewhere = config.device, getattr(config, "gpu_memory", None) is not None
    if is_elsewhere:  # what the process itself can use; the estimate is for a GPU
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = "cuda" if torch.cuda.is_available() else "cpu" if accelerator is None else accelerator.type
    on_cuda = device.startswith("cuda")
    dtype = config.dtype
    if dtype is None:
        fits = config.kind == "full" and (is_elsewhere or (on_cuda and torch.cuda.is_bf16_supported()))
        dtype = "bfloat16" if fits or config.load_in == "8bit" else "float32"
    attention = config.attn_implementation
    if attention == "auto":
        has_flash = on_cuda and dtype == "bfloat16" and importlib.util.find_spec("flash_attn") is not None
        attention = "flash_attention_2" if has_flash else "sdpa"
    left_open = {name: value for name, value in defaults.items() if getattr(config, name, value) is None}
    if config.has_adapter and "lr" in left_open:
        left_open["lr"] *= LORA_LR_FACTOR
    return dataclasses.replace(config, device=device, dtype=dtype, attn_implementation=attention, **left_open)
