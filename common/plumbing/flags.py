"""The flags of a command line: their groups, units and ranges, and how `--help` shows them.

A flag is a field of an experiment's `Config`: its name, type, default, and the comment beside it or above it.
"""

import dataclasses
import inspect
import os
import re
import textwrap
from typing import Annotated, NamedTuple, get_type_hints

from common.plumbing.config import ModelConfig
from common.plumbing.terminal import say


class Range(NamedTuple):
    """The numbers that a flag takes: from `low` to `high`, both included, or only `high` if it must be `above` low.

    >>> print(Range(1, 1_000_000, "tokens"), Range(0, 1, above=True), sep=" | ")
    1 to 1e6 tokens | above 0 and at most 1
    """

    low: float
    high: float
    unit: str = ""
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high  # false for NaN

    def __str__(self) -> str:
        low, high = (str(end) if end < 10**6 else f"{end:.0e}".replace("+0", "").replace("+", "") for end in self[:2])
        return (f"above {low} and at most {high}" if self.above else f"{low} to {high}") + f" {self.unit}".rstrip()


# What --help shows and what is checked. An upper end is far beyond what helps, and below what cannot work: numbers that
# overflow, or more memory than any machine has. PyTorch crashes when it cannot start so many threads.
RANGES = {
    # the algorithm's
    "steps": Range(1, 10**9, "steps"),
    "prompts_per_step": Range(1, 100_000, "prompts"),
    "group_size": Range(2, 10_000, "completions"),
    "max_new_tokens": Range(1, 1_000_000, "tokens"),
    "temperature": Range(0.001, 1000),
    "top_p": Range(0, 1, above=True),
    "epochs_per_step": Range(1, 1000, "epochs"),
    "minibatch_size": Range(1, 10**9, "rows"),
    "micro_batch_size": Range(1, 10**6, "rows"),
    "lr": Range(0, 1000, above=True),
    "weight_decay": Range(0, 1000),
    "clip_eps": Range(0, 1000, above=True),
    "kl_weight": Range(0, 1000),
    "max_turns": Range(1, 1000, "turns"),
    "max_grad_norm": Range(0, 10**9, above=True),
    "importance_cap": Range(0, 10**6),
    "steps_ahead": Range(0, 1, "steps"),
    "push_every": Range(1, 10**9, "steps"),
    "epochs": Range(1, 1000, "epochs"),
    "tokens_per_batch": Range(1, 10**8, "tokens"),
    "warmup_steps": Range(0, 10**9, "steps"),
    "final_lr": Range(0, 1),
    # the policy's
    "lora_rank": Range(0, 8192),
    "lora_alpha": Range(0, 10**6, above=True),
    # of data and evaluation
    "max_question_length": Range(1, 10**9, "characters"),
    "tool_seconds": Range(0, 3600, "seconds", above=True),
    "top_k": Range(1, 1000, "documents"),
    "search_seconds": Range(0, 3600, "seconds", above=True),
    "port": Range(0, 65535),
    "chunk_words": Range(1, 10**6, "words"),
    "chunk_overlap": Range(0, 10**6, "words"),
    "num_copying": Range(0, 10**7, "rows"),
    "num_reasoning": Range(0, 10**7, "rows"),
    "num_answering": Range(0, 10**7, "rows"),
    "max_length": Range(1, 10**6, "tokens"),
    "limit": Range(1, 10**9, "questions"),
    "num_samples": Range(0, 10**6, "answers"),
    "eval_prompts": Range(1, 10**9, "questions"),
    "eval_every": Range(0, 10**9, "steps"),
    # of the run
    "seed": Range(0, 10**18),
    "threads": Range(1, max(256, 4 * (os.cpu_count() or 1)), "threads"),
    "checkpoint_every": Range(0, 10**9, "steps"),
    "keep_checkpoints": Range(1, 10**9, "checkpoints"),
    "samples_every": Range(0, 10**9, "steps"),
    "generation_batch_size": Range(1, 10**6, "completions"),
    # of an export
    "questions": Range(1, 10**6, "questions"),
}

# The groups of --help, after that of the algorithm (FIRST_GROUP can call it otherwise), which has all other flags.
# Their order is that of the fields.
GROUPS = {
    "policy": (
        *("model", "chat_template", "device", "dtype", "attn_implementation", "gradient_checkpointing"),
        *("lora_rank", "lora_alpha", "load_in", "save_merged"),
    ),
    "data and task": (
        *("task", "reward_weight", "data", "at_most", "max_question_length", "system_prompt", "completion_prefix"),
        *("tool", "tools", "tool_seconds", "lessons", "embeddings"),
        *("num_copying", "num_reasoning", "num_answering", "max_length"),
    ),
    "search": (
        *("corpus", "chunk_words", "chunk_overlap", "index", "encoder"),
        *("search_url", "search_seconds", "top_k"),
    ),
    "engine": ("engine_url", "engine_start", "engine_dtype"),
    "evaluation": ("eval_data", "eval_prompts", "eval_every", "suite", "limit", "compare"),
    "run": (
        *("name", "runs_dir", "resume", "seed", "threads", "checkpoint_every", "keep_checkpoints", "samples_every"),
        *("progress", "generation_batch_size", "estimate", "wandb", "save_dtype", "output"),
    ),
}


def make_flags(config: ModelConfig) -> type:
    """The flags in their groups, a dataclass of dataclasses for tyro, with the values of `config` as the defaults."""
    import tyro

    types, comments = get_type_hints(type(config)), read_comments(type(config))
    first = getattr(config, "FIRST_GROUP", "algorithm")
    grouped: dict[str, list] = {first: [], **{group: [] for group in GROUPS}}
    for field in dataclasses.fields(config):
        group = next((group for group, names in GROUPS.items() if field.name in names), first)
        text, _, resolved = comments[field.name].partition("None: ")
        default = getattr(config, field.name)
        argument = tyro.conf.arg(
            help=text.rstrip("; ") or resolved,
            help_behavior_hint=f"({_hint(field.name, default, resolved)})",
            aliases=getattr(config, "ALIASES", {}).get(field.name),
            metavar=_metavar(text) if types[field.name] == tuple[str, ...] else None,
        )
        flag_type = Annotated[types[field.name], argument]
        if field.name in getattr(config, "POSITIONAL", ()):
            flag_type = tyro.conf.Positional[flag_type]
        grouped[group].append((field.name, flag_type, dataclasses.field(default=default)))
    groups = [
        (
            group.replace(" ", "_"),
            Annotated[dataclasses.make_dataclass("Group", flags, kw_only=True), tyro.conf.arg(name=group, help="")],
        )
        for group, flags in grouped.items()
        if flags
    ]
    return dataclasses.make_dataclass("Flags", groups, kw_only=True)


def _metavar(text: str) -> str:
    """What the values of a flag that takes several look like."""
    return "NAME=NUMBER ..." if text.startswith("NAME=NUMBER") else "NAME ..."


def _hint(name: str, default: object, resolved: str) -> str:
    """Unit, range and default of a flag, as `--help` shows them behind its comment."""
    if default is None:
        shown = resolved or "none"
    elif isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = (" ".join(default) if isinstance(default, tuple) else str(default)) or "none"
    return f"{RANGES[name]}; default: {shown}" if name in RANGES else f"default: {shown}"


def read_comments(config_class: type[ModelConfig]) -> dict[str, str]:
    """The comment of every field, beside it or in the lines above it, from the source of the class and its bases."""
    found = {}
    for parent in reversed(config_class.__mro__[:-1]):
        above: list[str] = []
        for line in inspect.getsource(parent).splitlines():
            if comment := re.fullmatch(r" +# (.+)", line):
                above.append(comment[1])
                continue
            if field := re.match(r" +(\w+): .*?(?:  # (.+))?$", line):
                found[field[1]] = " ".join([*above, field[2] or ""]).strip()
            above = []
    return found


def show_description(text: str, width: int) -> None:
    """Print what a program is and does, its paragraphs wrapped to the width of the terminal, indented lines unchanged.

    It is printed here because tyro joins the lines of a paragraph and does not wrap it.
    """
    for paragraph in text.strip("\n").split("\n\n"):
        say((paragraph if paragraph.startswith(" ") else textwrap.fill(paragraph, min(width, 120))) + "\n")
