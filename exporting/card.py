"""The model card: the training, the results, how to use the model, and its limits.

Names, settings and texts come from the user's machine and from data: no path of that machine is shown, and none of them
can end the code block or the line that it is in.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from exporting.answers import Questions
from exporting.source import Source
from viewer.table import wilson

from common.plumbing.checks import flag
from common.plumbing.config import BUNDLED, RunConfig, is_hub_id
from common.plumbing.hub import is_hub_source
from common.plumbing.terminal import printable, visible

SHOWN = {
    "greedy/accuracy": "greedy accuracy",
    "sampled/accuracy": "sampled accuracy (mean of 8)",
    "sampled/pass@8": "at least one of 8 right (pass@8)",
}
BITS = {"4bit": "4 bits", "8bit": "8 bits"}
PLACES = (
    "model",
    "task",
    "chat_template",
    "data",
    "eval_data",
    "tools",
    "corpus",
    "index",
    "encoder",
)  # shown by their last part
TEXTS = ("system_prompt", "completion_prefix")


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
    equal: int  # questions with the same greedy answer, before a conversion to GGUF
    gguf_equal: int | None  # the same, of the GGUF file; None: there is none, or it was not run
    prompts_equal: int
    has_curve: bool

    def text(self) -> str:
        parts = [self._front_matter(), f"# {escape(self.title)}", self._what(), self._use(), self._training()]
        return "\n\n".join(part for part in [*parts, self._evaluation(), self._check(), self._limits()] if part) + "\n"

    @property
    def _is_adapter(self) -> bool:
        return self.source.is_adapter and not self.merged

    @property
    def _model(self) -> str:
        name = self.source.base_id
        if name is not None:
            return f"[{name}](https://huggingface.co/{name})"
        model = str(self.source.settings.get("model"))
        if model in BUNDLED:
            return f"the textbook's bundled policy `{model}` (1.8 million parameters, made to be trained in minutes)"
        return f"a model in a directory, {code(place('model', model))}"

    def _front_matter(self) -> str:
        import yaml

        library = "gguf" if self.quantize == "gguf" else "peft" if self._is_adapter else "transformers"
        fields: dict = {"library_name": library, "pipeline_tag": "text-generation"}
        if self.source.base_id is not None:
            fields["base_model"] = self.source.base_id
            fields["base_model_relation"] = "adapter" if self._is_adapter else "finetune"
        if self.license is not None:
            fields["license"] = self.license
        bits = {"4bit": ["4-bit", "bitsandbytes"], "8bit": ["8-bit", "bitsandbytes"]}.get(self.quantize, [])
        learning = [] if self._is_supervised else ["reinforcement-learning"]
        fields["tags"] = [*learning, "rl-textbook", *bits]
        return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"

    def _what(self) -> str:
        form = f"in {self.dtype}"
        if self.quantize == "gguf":
            form = f"as GGUF in {self.dtype}, for llama.cpp"
        elif self.quantize != "none":
            form = f"quantised to {BITS[self.quantize]} with bitsandbytes"
        if self._is_adapter:
            form = f"(its base was held in {BITS.get(self._load_in, self.dtype)})"
        kind = "A LoRA adapter" if self._is_adapter else "A language model"
        merged = ", merged from a LoRA adapter and its base" if self.source.is_adapter and self.merged else ""
        state = "after" if self.source.step is None else f"at the checkpoint of step {self.source.step} of"
        settings = self.source.settings
        about = settings.get("about")  # the first line of its train.py
        about = f": {escape(about.rstrip('.'))}" if isinstance(about, str) and about else ""
        what = "on examples of answers"
        if not self._is_supervised:
            what = f"with the questions and the reward of the task {code(place('task', str(settings.get('task'))))}"
            data = settings.get("data")
            what += f", on the data {code(place('data', data))}" if isinstance(data, str) else ""
        return (
            f"{kind} {form}{merged}: {self._model} {state} a run of {code(str(settings['experiment']))} {what}. That "
            f"experiment is part of an open textbook of reinforcement learning for language models{about}."
        )

    @property
    def _is_supervised(self) -> bool:
        return self.source.settings.get("task") is None

    @property
    def _load_in(self) -> str | None:
        return self.source.load_in

    def _use(self) -> str:
        if self.quantize == "gguf":
            return "## How to use it\n\n" + self._use_of_gguf() + self._given_prefix()
        messages = json.dumps(self.questions.conversations[0], ensure_ascii=True)
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"name = {json.dumps(self.loads_as)}",
            "tokenizer = AutoTokenizer.from_pretrained(name)",
            "model = AutoModelForCausalLM.from_pretrained(name)",
            f"messages = {messages}",
            'prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", '
            "return_dict=True)",
            f"output = model.generate(**prompt.to(model.device), max_new_tokens={self.questions.budget})",
            'print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))',
        ]
        needs = {"4bit": "bitsandbytes", "8bit": "bitsandbytes"}.get(self.quantize, "peft" if self._is_adapter else "")
        text = f"It needs `torch`, `transformers` and `{needs}`." if needs else "It needs `torch` and `transformers`."
        if not is_hub_id(self.loads_as):
            text += " `name` is this directory, seen from the one that it is in; after an upload it is `owner/name`."
        text += (
            " The question is one of those that training did not use. Answers are greedy by default; to sample as in "
        )
        text += f"training, pass `do_sample=True, temperature={self._number('temperature', 1.0)}, "
        text += f"top_p={self._number('top_p', 1.0)}, top_k=0` to `generate`."
        text += self._given_prefix() + " The greedy answer of the trained policy:"
        return "\n\n".join(
            ["## How to use it", fenced("\n".join(lines), "python"), text, fenced(printable(self.answer, 1000), "text")]
        )

    def _use_of_gguf(self) -> str:
        turns = {str(turn.get("role")): str(turn.get("content")) for turn in self.questions.conversations[0]}
        command = ["llama-cli", "-m", "model.gguf", "--jinja", "--temp", "0", "-n", str(self.questions.budget)]
        command += ["-sys", turns["system"]] if turns.get("system") else []
        command += ["-st", "-p", turns.get("user", "")]
        return fenced(shlex.join(command), "sh") + "\n\nThe chat template is in the file."

    def _given_prefix(self) -> str:
        prefix = self.source.settings.get("completion_prefix")
        if not isinstance(prefix, str) or not prefix:
            return ""
        return f" The chat template begins every answer with {code(prefix)}, which `generate` does not print."

    def _number(self, name: str, otherwise: float) -> float:
        value = self.source.settings.get(name)
        return value if type(value) in (int, float) else otherwise

    def _training(self) -> str:
        settings = self.source.settings
        versions = settings.get("versions") if isinstance(settings.get("versions"), dict) else {}
        rows = {
            "commit of the textbook": settings.get("commit"),
            "seed": settings.get("seed"),
            "steps": self.source.step if self.source.step is not None else settings.get("steps"),
            "machine": settings.get("machine"),
            "GPU": settings.get("gpu"),
            "processes": settings.get("processes"),
            "held quantised in training": self._load_in,
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        }
        table = [f"| {name} | {escape(value)} |" for name, value in rows.items() if value not in (None, "")]
        text = "## Training\n\n" + fenced(public_command(settings), "sh")
        text += (
            "\n\nPaths in this command are shortened to their last part, and flags that only name places (`--name`, "
        )
        text += "for example) are left out. All other settings are the defaults of that commit.\n\n"
        text += "\n".join(["| | |", "|---|---|", *table])
        return text + ("\n\n![metrics of the run over its steps](curve.png)" if self.has_curve else "")

    def _evaluation(self) -> str:
        before, after, count = self.source.figures()
        names = [name for name in SHOWN if _is_share(before.get(name)) or _is_share(after.get(name))]
        if not names:
            return "## Evaluation\n\nThe run was not evaluated."
        rows = [
            f"| {SHOWN[name]} | {_cell(before.get(name), count)} | {_cell(after.get(name), count)} |" for name in names
        ]
        asked = f"{count} held-out questions" if count else "the held-out questions"
        text = f"## Evaluation\n\nBy the run itself, before and after training, on {asked} of its task. Greedy: one "
        text += "answer, of the most probable tokens. Sampled: 8 answers at temperature "
        text += f"{self._number('temperature', 1.0)}."
        if count:
            text += (
                " In brackets: 95 % intervals (Wilson) for that number of questions; of other seeds they say nothing."
            )
        if self._load_in is not None:
            text += f" Its base was held in {BITS[self._load_in]} meanwhile."
        if self._has_turns:
            text += " These figures are of several turns with tools; the code above asks in one turn, without tools."
        return "\n".join([text, "", "| | before | after |", "|---|---|---|", *rows])

    @property
    def _has_turns(self) -> bool:
        turns = self.source.settings.get("max_turns")
        return type(turns) is int and turns > 1 and self.source.settings.get("tool") is not False

    def _check(self) -> str:
        total = len(self.questions.prompts)
        equal, by = self.equal, "`generate` of transformers"
        text = "## Check of what was exported\n\n"
        if self.gguf_equal is not None:
            equal, by = self.gguf_equal, "llama.cpp"
        text += f"{equal} of {total} greedy answers to held-out questions, by {by}, are token for token those of the "
        text += "trained policy."
        if equal < total and self.gguf_equal is not None:
            text += " llama.cpp computes otherwise, with keys and values in half precision for example."
        elif equal < total and self._is_adapter:
            text += " Another order of the arithmetic can change an answer."
        elif equal < total:
            text += " Rounding the weights can change an answer."
        if self.quantize == "gguf" and self.gguf_equal is None:
            text += " That was before the conversion; the GGUF file itself was not run."
        if self._has_turns:
            text += " They are answers in one turn, without tools."
        if self._load_in is not None:
            text += f" The trained policy held its base in {BITS[self._load_in]}; here it is not quantised so."
        if self.prompts_equal < total:
            text += f" The chat template renders {total - self.prompts_equal} of {total} prompts otherwise than in "
            text += "training, because it writes the date or a question spells a control token."
        return text

    def _limits(self) -> str:
        text = (
            "## Limits\n\nThe figures are of one run with one seed, on questions of the kind that it was trained on. "
        )
        text += "Other abilities, safety and biases were not evaluated."
        if self.source.base_id is not None:
            text += f" {self.source.base_id} has a licence of its own, which applies to what is made of it."
        elif str(self.source.settings.get("model")) in BUNDLED:
            text += " The bundled policy is part of the textbook, which has the licence Apache 2.0."
        if self.license is None:
            text += " No licence was given for the trained weights."
        return text


def public_command(settings: dict) -> str:
    """The command of a run with the settings that were given, and without what says something about the machine."""
    words = settings.get("command")
    words = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    given |= {name.removeprefix("no_") for name in given}
    experiment = re.sub(r"\W", "_", str(settings["experiment"]))
    command = ["python", f"{experiment}/train.py"]
    for name, value in settings.items():
        if name in given:
            command += _public(name, value)
    return shlex.join(command)


def _public(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")] if name not in ("wandb", "estimate") else []
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
    is_of_the_algorithm = name not in RunConfig.__dataclass_fields__
    is_word = is_of_the_algorithm or name in ("dtype", "load_in", "attn_implementation", "device")
    return [flag(name), value] if is_word and re.fullmatch(r"[\w.:-]{1,40}", value) else []


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
