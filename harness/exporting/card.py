"""The model card: the training, the results, how to use the model, and its limits; card.md.jinja has its sentences.

Names, settings and texts come from the user's machine and from data: no path of that machine is shown, and none of them
can break out of its code block or line.
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
from harness.exporting.source import Source
from harness.exporting.writing import Questions

# For flags that name a file or directory, the last part is shown
PLACES = ("model", "task", "chat_template", "data", "eval_data", "tools", "corpus", "index", "encoder")
TEXTS = ("system_prompt", "completion_prefix")
WORDS = ("dtype", "load_in", "attn_implementation", "device")  # further flags to show, which every experiment has
HIDDEN = ("wandb", "watch", "estimate", "engine_start", "engine_url", "engine", "search_url")


@dataclass(frozen=True, kw_only=True)
class Card:
    source: Source
    title: str  # the name of the repository or directory
    loads_as: str  # the argument for `from_pretrained`
    dtype: str
    quantize: str
    merged: bool
    license: str | None
    questions: Questions
    answer: str  # the trained policy's greedy answer to the first question
    equal: int  # questions with the same greedy answer
    prompts_equal: int
    has_curve: bool

    @property
    def is_adapter(self) -> bool:
        return self.source.is_adapter and not self.merged

    def text(self) -> str:
        settings = self.source.settings
        before, after, count = self.source.figures()
        environment = Environment()
        environment.filters |= {"escape": escape, "code": code, "fenced": fenced, "json": json.dumps}
        environment.filters |= {"printable": printable, "estimate": estimate}
        template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
        return environment.from_string(template).render(
            card=self,
            source=self.source,
            settings=settings,
            metadata=self._metadata(),
            place=place,
            is_bundled=settings["model"] in BUNDLED,
            is_supervised=settings.get("task") is None,
            is_on_hub=is_hub_id(self.loads_as),
            command=public_command(settings),
            before=before,
            after=after,
            count=count,
            has_turns=settings.get("max_turns", 1) > 1 and settings.get("tool", True),
            total=len(self.questions.prompts),
        )

    def _metadata(self) -> str:
        from huggingface_hub import ModelCardData

        base = self.source.base_id
        tags = [] if self.source.settings.get("task") is None else ["reinforcement-learning"]
        tags += ["rl-textbook"]
        tags += [] if self.quantize == "none" else [self.quantize.replace("bit", "-bit"), "bitsandbytes"]
        return ModelCardData(
            library_name="peft" if self.is_adapter else "transformers",
            pipeline_tag="text-generation",
            base_model=base,
            base_model_relation=None if base is None else "adapter" if self.is_adapter else "finetune",
            license=self.license,
            tags=tags,
        ).to_yaml()


def public_command(settings: dict) -> str:
    """The command of a run with the settings that were given, without details of the machine."""
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
    """One line of text without any markup.

    >>> escape("a|b <i> [x](y)")
    'a\\\\|b &lt;i> \\\\[x\\\\](y)'
    """
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", printable(str(value), 200)).replace("<", "&lt;")


def code(text: str) -> str:
    """A text in one line of code, even if it contains backticks."""
    text = printable(text, 200)
    ticks = _ticks(text, 1)
    pad = " " if len(ticks) > 1 or not text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fenced(text: str, language: str) -> str:
    """A block of code, even if it contains backticks."""
    ticks = _ticks(text, 3)
    return f"{ticks}{language}\n{visible(text)}\n{ticks}"


def _ticks(text: str, at_least: int) -> str:
    return "`" * max(at_least, max(map(len, re.findall("`+", text)), default=0) + 1)


def estimate(value: float | None, count: int) -> str:
    """A share, with the number of questions if that is known."""
    if value is None:
        return "-"
    if not count:
        return f"{value:.3f}"
    low, high = wilson(value, count)
    return f"{value:.3f} [{max(0.0, low):.3f}-{min(1.0, high):.3f}]"
