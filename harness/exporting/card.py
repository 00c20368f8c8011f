"""The model card: the training, the results, how to use the model, and its limits; card.md.jinja has its sentences.

Names, settings and texts come from the user's machine and from data: no path of that machine is shown, and none of them
can break out of its code block or line.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from jinja2 import Environment

from viewer.table import wilson

from harness.base.checks import flag
from harness.base.config import BUNDLED, is_hub_id
from harness.base.flags import REPEATED
from harness.base.hub import is_hub_source
from harness.base.places import train_file
from harness.base.terminal import printable, visible
from harness.data.thoughts import names_file
from harness.exporting.source import Source
from harness.exporting.writing import Questions
from harness.run.settings import NOT_FLAGS

# Flags that name a model, a data set or a file: of a path the last part is shown
PLACES = ("model", "reward_model", "teacher", "task", "data", "eval_data")
TEXTS = ("system_prompt", "stop", "completion_prefix", "answer_begins")  # may begin with a slash
STAND_INS = {"engine_start": "PYTHON", "engine": "URL"}
# Of this machine, or of no effect on the policy
HIDDEN = {"name", "runs_dir", "resume", "config", "threads", "watch", "profile"}
HIDDEN |= {"wandb", "wandb_project", "wandb_group"}


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
    """The command of a run with all settings that are not the defaults, without details of the machine.

    Older runs did not record which these are: of them, all settings are shown.
    """
    command = ["python", train_file(re.sub(r"\W", "_", settings["experiment"]))]
    for name in settings.get("changed", [name for name in settings if name not in NOT_FLAGS]):
        if name not in HIDDEN and settings[name] is not None:
            command += _public(name, settings[name])
    return shlex.join(command)


def _public(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    if name in REPEATED:
        return [f"{flag(name)}={_text(name, text)}" for text in value]
    if isinstance(value, list):
        return [flag(name), *(_text(name, str(entry)) for entry in value)] if value else []
    text = _text(name, str(value))
    return [f"{flag(name)}={text}"] if text.startswith("-") else [flag(name), text]


def _text(name: str, value: str) -> str:
    if name in STAND_INS or name.endswith("_url"):
        return STAND_INS.get(name, "URL")
    if name in TEXTS and not (name == "answer_begins" and names_file(value)):
        return visible(value)  # whole, with its line breaks
    if name in PLACES or any(kind(value).is_absolute() for kind in (PurePosixPath, PureWindowsPath)):
        return place(name, value)
    label, is_pair, source = value.partition("=")  # of --eval-sets
    return f"{printable(label, 100)}={_text(name, source)}" if is_pair else printable(value, 2000)


def place(name: str, value: str) -> str:
    """A hub id, the name of a bundled model or task, or the last part of a path.

    >>> place("model", "/home/ada/models/llama"), place("teacher", "Qwen/Qwen2.5-0.5B"), place("task", "gsm8k")
    ('llama', 'Qwen/Qwen2.5-0.5B', 'gsm8k')
    """
    is_on_hub = name != "task" and (is_hub_source if "data" in name else is_hub_id)(value)
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
