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

    def text(self) -> str:
        from huggingface_hub import ModelCard

        template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
        values = self._description() | self._use() | self._results()
        return str(ModelCard.from_template(self._metadata(), template_str=template, **values))

    @property
    def _is_adapter(self) -> bool:
        return self.source.is_adapter and not self.merged

    @property
    def _is_supervised(self) -> bool:
        return self.source.settings.get("task") is None

    def _metadata(self):
        from huggingface_hub import ModelCardData

        relation = "adapter" if self._is_adapter else "finetune"
        bits = {"4bit": ["4-bit", "bitsandbytes"], "8bit": ["8-bit", "bitsandbytes"]}.get(self.quantize, [])
        return ModelCardData(
            library_name="peft" if self._is_adapter else "transformers",
            pipeline_tag="text-generation",
            base_model=self.source.base_id,
            base_model_relation=None if self.source.base_id is None else relation,
            license=self.license,
            tags=[*([] if self._is_supervised else ["reinforcement-learning"]), "rl-textbook", *bits],
        )

    def _description(self) -> dict:
        """What the model is, what it was trained on, and from which model."""
        settings, step, base = self.source.settings, self.source.step, self.source.base_id
        model = str(settings.get("model"))
        about = settings.get("about")  # the first line of its train.py
        form = (
            f"in {self.dtype}" if self.quantize == "none" else f"quantised to {BITS[self.quantize]} with bitsandbytes"
        )
        if self._is_adapter:
            form = f"(its base was held in {BITS.get(self.source.load_in, self.dtype)})"
        if base is not None:
            named = f"[{base}](https://huggingface.co/{base})"
        elif model in BUNDLED:
            named = f"the textbook's bundled policy `{model}` (1.8 million parameters, made to be trained in minutes)"
        else:
            named = f"a model in a directory, {code(place('model', model))}"
        learned_from = "on examples of answers"
        if not self._is_supervised:
            task, data = str(settings.get("task")), settings.get("data")
            learned_from = f"with the questions and the reward of the task {code(place('task', task))}"
            learned_from += f", on the data {code(place('data', data))}" if isinstance(data, str) else ""
        return {
            "title": escape(self.title),
            "kind": "A LoRA adapter" if self._is_adapter else "A language model",
            "form": form,
            "merged": ", merged from a LoRA adapter and its base" if self.source.is_adapter and self.merged else "",
            "model": named,
            "state": "after" if step is None else f"at the checkpoint of step {step} of",
            "experiment": code(str(settings["experiment"])),
            "learned_from": learned_from,
            "about": f": {escape(about.rstrip('.'))}" if isinstance(about, str) and about else "",
            "base_id": base,
            "is_bundled": model in BUNDLED,
            "has_license": self.license is not None,
        }

    def _use(self) -> dict:
        """The code that asks the first question, and what the trained policy answered."""
        prefix = self.source.settings.get("completion_prefix")
        messages = json.dumps(self.questions.conversations[0], ensure_ascii=True)
        text = CODE.format(name=json.dumps(self.loads_as), messages=messages, budget=self.questions.budget)
        return {
            "code_block": fenced(text, "python"),
            "needs": "peft" if self._is_adapter else "" if self.quantize == "none" else "bitsandbytes",
            "is_on_hub": is_hub_id(self.loads_as),
            "temperature": self._number("temperature"),
            "top_p": self._number("top_p"),
            "prefix": code(prefix) if isinstance(prefix, str) and prefix else "",
            "answer": fenced(printable(self.answer, 1000), "text"),
        }

    def _number(self, name: str) -> float:
        value = self.source.settings.get(name)
        return value if type(value) in (int, float) else 1.0

    def _results(self) -> dict:
        """The command, the machine, the evaluations, and the check of what was exported."""
        settings = self.source.settings
        versions = settings.get("versions") if isinstance(settings.get("versions"), dict) else {}
        rows = {
            "commit of the textbook": settings.get("commit"),
            "seed": settings.get("seed"),
            "steps": self.source.step if self.source.step is not None else settings.get("steps"),
            "machine": settings.get("machine"),
            "GPU": settings.get("gpu"),
            "processes": settings.get("processes"),
            "held quantised in training": self.source.load_in,
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        }
        before, after, count = self.source.figures()
        names = [name for name in SHOWN if _is_share(before.get(name)) or _is_share(after.get(name))]
        turns = settings.get("max_turns")
        return {
            "command": fenced(public_command(settings), "sh"),
            "training": [(name, escape(value)) for name, value in rows.items() if value not in (None, "")],
            "has_curve": self.has_curve,
            "evaluation": [
                (SHOWN[name], _cell(before.get(name), count), _cell(after.get(name), count)) for name in names
            ],
            "count": count,
            "held_in": BITS.get(self.source.load_in),
            "has_turns": type(turns) is int and turns > 1 and settings.get("tool") is not False,
            "equal": self.equal,
            "prompts_equal": self.prompts_equal,
            "total": len(self.questions.prompts),
            "is_adapter": self._is_adapter,
        }


def public_command(settings: dict) -> str:
    """The command of a run with the settings that were given, and without what says something about the machine."""
    words = settings.get("command")
    words = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    given |= {name.removeprefix("no_") for name in given}
    experiment = re.sub(r"\W", "_", str(settings["experiment"]))
    command = ["python", f"{experiment}/train.py"]
    for name, value in settings.items():
        if name in given and name not in HIDDEN:
            command += _public(name, value)
    return shlex.join(command)


def _public(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    if type(value) in (int, float):
        return [flag(name), str(value)]
    if isinstance(value, list) and value and all(re.fullmatch(r"\w+=[\d.e+-]+", str(pair)) for pair in value):
        return [flag(name), *value]
    if not isinstance(value, str):
        return []
    if name in PLACES:
        return [flag(name), place(name, value)]
    if name in TEXTS:
        return [flag(name), printable(value, 2000)]
    is_of_the_algorithm = name not in {field.name for field in dataclasses.fields(RunConfig)}
    is_shown = (is_of_the_algorithm or name in WORDS) and re.fullmatch(r"[\w.:-]{1,40}", value)
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
    ticks = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    pad = " " if len(ticks) > 1 or not text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fenced(text: str, language: str) -> str:
    """A block of code, whatever backticks it holds."""
    ticks = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{ticks}{language}\n{visible(text)}\n{ticks}"


def _is_share(value: object) -> bool:
    return isinstance(value, float) and 0 <= value <= 1


def _cell(value: object, count: int) -> str:
    if not _is_share(value):
        return "-"
    if not count:
        return f"{value:.3f}"
    low, high = wilson(value, count)
    return f"{value:.3f} [{max(0.0, low):.3f}-{min(1.0, high):.3f}]"
