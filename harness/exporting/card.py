"""The model card: the training, the results, how to use the model, and its limits; card.md.jinja has its sentences.

Names, settings and texts come from the user's machine and from data: no path of that machine is shown, and none of them
can end the code block or the line that it is in.
"""

import dataclasses
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from jinja2 import Environment

from viewer.table import wilson

from harness.base.checks import flag
from harness.base.config import BUNDLED, RunConfig, is_hub_id
from harness.base.hub import is_hub_source
from harness.base.terminal import printable, visible
from harness.exporting.exported_answers import Questions
from harness.exporting.source import Source

SHOWN = {
    "greedy/accuracy": "greedy accuracy",
    "sampled/accuracy": "sampled accuracy (mean of 8)",
    "sampled/pass@8": "at least one of 8 right (pass@8)",
}
BITS = {"4bit": "4 bits", "8bit": "8 bits"}
TAGS = {"4bit": ("4-bit", "bitsandbytes"), "8bit": ("8-bit", "bitsandbytes")}
# Flags that name a file or directory, of which the last part is shown
PLACES = ("model", "task", "chat_template", "data", "eval_data", "tools", "corpus", "index", "encoder")
TEXTS = ("system_prompt", "completion_prefix")
WORDS = ("dtype", "load_in", "attn_implementation", "device")  # other flags of every experiment that are shown
HIDDEN = ("wandb", "estimate", "engine_start", "engine_url", "search_url")
CODE = """from transformers import AutoModelForCausalLM, AutoTokenizer

name = {name}
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
messages = {messages}
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**prompt.to(model.device), max_new_tokens={budget})
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))"""


@dataclass(frozen=True, kw_only=True)
class Card:
    source: Source
    title: str  # the name of the repository, or of the directory
    loads_as: str  # what `from_pretrained` is given
    dtype: str
    quantize: str
    merged: bool
    license: str | None
    questions: Questions
    answer: str  # the greedy one to the first question, by the trained policy
    equal: int  # questions with the same greedy answer
    prompts_equal: int
    has_curve: bool

    @property
    def is_adapter(self) -> bool:
        return self.source.is_adapter and not self.merged

    def text(self) -> str:
        source, settings, bits = self.source, self.source.settings, BITS.get(self.quantize)
        form = f"in {self.dtype}" if bits is None else f"quantised to {bits} with bitsandbytes"
        if self.is_adapter:
            form = f"(its base was held in {BITS.get(source.load_in, self.dtype)})"
        messages = json.dumps(self.questions.conversations[0], ensure_ascii=True)
        before, after, count = source.figures()
        training = {
            "commit of the textbook": settings.get("commit"),
            "seed": str(settings.get("seed", "")),
            "steps": source.step if source.step is not None else settings.get("steps"),
            "machine": settings.get("machine"),
            "GPU": settings.get("gpu"),
            "processes": settings.get("processes"),
            "held quantised in training": source.load_in,
            "versions": ", ".join(f"{name} {version}" for name, version in settings.get("versions", {}).items()),
        }
        environment = Environment()
        environment.filters |= {"escape": escape, "code": code, "fenced": fenced}
        template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
        return environment.from_string(template).render(
            card=self,
            metadata=self._metadata(),
            settings=settings,
            place=place,
            form=form,
            base=source.base_id,
            is_bundled=settings["model"] in BUNDLED,
            is_supervised=settings.get("task") is None,
            step=source.step,
            use=CODE.format(name=json.dumps(self.loads_as), messages=messages, budget=self.questions.budget),
            needs="peft" if self.is_adapter else "bitsandbytes" if bits else "",
            is_on_hub=is_hub_id(self.loads_as),
            temperature=settings.get("temperature", 1.0),
            answer=printable(self.answer, 1000),
            command=public_command(settings),
            training=training,
            count=count,
            evaluation=[
                (label, *(_cell(metrics.get(name), count) for metrics in (before, after)))
                for name, label in SHOWN.items()
                if name in before or name in after
            ],
            held_in=BITS.get(source.load_in),
            has_turns=settings.get("max_turns", 1) > 1 and settings.get("tool", True),
            total=len(self.questions.prompts),
        )

    def _metadata(self) -> str:
        from huggingface_hub import ModelCardData

        base = self.source.base_id
        tags = [] if self.source.settings.get("task") is None else ["reinforcement-learning"]
        return ModelCardData(
            library_name="peft" if self.is_adapter else "transformers",
            pipeline_tag="text-generation",
            base_model=base,
            base_model_relation=None if base is None else "adapter" if self.is_adapter else "finetune",
            license=self.license,
            tags=[*tags, "rl-textbook", *TAGS.get(self.quantize, ())],
        ).to_yaml()


def public_command(settings: dict) -> str:
    """The command of a run with the settings that were given, and without what says something about the machine."""
    words = [word for word in settings["command"] if word.startswith("--")]
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words}
    given |= {name.removeprefix("no_") for name in given}
    experiment = re.sub(r"\W", "_", settings["experiment"])
    command = ["python", f"{experiment}/train.py"]
    for name, value in settings.items():
        if name in given and name not in HIDDEN:
            command += _public(name, value)
    return shlex.join(command)


def _public(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    if isinstance(value, int | float):
        return [flag(name), str(value)]
    if isinstance(value, list):  # NAME=NUMBER
        return [flag(name), *value] if value else []
    if name in PLACES and value is not None:
        return [flag(name), place(name, value)]
    if name in TEXTS and value is not None:
        return [flag(name), printable(value, 2000)]
    is_of_the_algorithm = name not in {field.name for field in dataclasses.fields(RunConfig)}
    is_shown = (is_of_the_algorithm or name in WORDS) and re.fullmatch(r"[\w.:-]{1,40}", value or "")
    return [flag(name), value] if is_shown else []


def place(name: str, value: str) -> str:
    """A hub id, the name of a bundled model or task, or the last part of a path.

    >>> place("model", "/home/ada/models/llama"), place("model", "Qwen/Qwen2.5-0.5B"), place("task", "gsm8k")
    ('llama', 'Qwen/Qwen2.5-0.5B', 'gsm8k')
    """
    is_on_hub = is_hub_id(value) if name == "model" else name in ("data", "eval_data") and is_hub_source(value)
    if is_on_hub and not Path(value).exists():
        return value
    return printable(PureWindowsPath(value).name or "a directory", 100)


def escape(value: object) -> str:
    """One line of text that is no markup.

    >>> escape("a|b <i> [x](y)")
    'a\\\\|b &lt;i> \\\\[x\\\\](y)'
    """
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", printable(str(value), 200)).replace("<", "&lt;")


def code(text: str) -> str:
    """A text in one line of code, whatever backticks it holds."""
    text = printable(text, 200)
    ticks = _ticks(text, 1)
    pad = " " if len(ticks) > 1 or not text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fenced(text: str, language: str) -> str:
    """A block of code, whatever backticks it holds."""
    ticks = _ticks(text, 3)
    return f"{ticks}{language}\n{visible(text)}\n{ticks}"


def _ticks(text: str, at_least: int) -> str:
    return "`" * max(at_least, max(map(len, re.findall("`+", text)), default=0) + 1)


def _cell(value: float | None, count: int) -> str:
    if value is None:
        return "-"
    if not count:
        return f"{value:.3f}"
    low, high = wilson(value, count)
    return f"{value:.3f} [{max(0.0, low):.3f}-{min(1.0, high):.3f}]"
