"""`--micro-batch-size auto` and `--generation-batch-size auto`: chosen, agreed on by all ranks, told and stored."""

import dataclasses
from typing import TYPE_CHECKING

from common.errors import UserError
from common.fast.auto_size import AutoSize
from common.parallel import gather, is_main

from common.plumbing.checks import flag
from common.plumbing.config import ConfigT, ModelConfig
from common.plumbing.settings import AUTO_SIZES, change_settings

if TYPE_CHECKING:
    from common.plumbing.run import Run

WHERE = {"micro_batch_size": "micro-batches", "generation_batch_size": "batches of completions"}


def with_sizes(config: ConfigT) -> ConfigT:
    """The settings with a number for each size that is "auto"."""
    names = [name for name in AUTO_SIZES if getattr(config, name, None) == "auto"]
    if not names:
        return config
    from common.plumbing.estimate.first_sizes import first_sizes

    first = first_sizes(config)
    return dataclasses.replace(config, **{name: AutoSize(first[name]) for name in names})


def with_sizes_of(before: ConfigT, config: ConfigT, automatic: object) -> ConfigT:
    """The settings of a resumed run, which keeps its sizes and may halve those that are automatic.

    Args:
        before: the run's.
        config: what the command line makes of them: a size can become automatic, since no update depends on it.
        automatic: the entry of config.json.
    """
    known = automatic if isinstance(automatic, list) else []
    sizes = {name: getattr(before, name) for name in AUTO_SIZES if isinstance(getattr(before, name, None), int)}
    chosen = {
        name: AutoSize(size)
        for name, size in sizes.items()
        if getattr(config, name) == "auto" or (name in known and getattr(config, name) == size)
    }
    return dataclasses.replace(config, **chosen)


def automatic_sizes(config: ModelConfig) -> dict[str, AutoSize]:
    values = {name: getattr(config, name, None) for name in AUTO_SIZES}
    return {name: value for name, value in values.items() if isinstance(value, AutoSize)}


def agree_on_sizes(config: ModelConfig) -> None:
    """Begin with the same sizes on all ranks: the smallest ones that any has chosen."""
    for size in automatic_sizes(config).values():
        size.now = min(gather(size.now))


def follow_sizes(config: ModelConfig, run: "Run") -> None:
    """Tell the user of every size that is halved, and store it for the run when it is resumed."""

    def follow(name: str, size: AutoSize) -> None:
        def change(before: int) -> None:
            kind, step = WHERE[name], run.step
            run.tell(f"step {step}: memory ran out with {kind} of up to {before} rows: from here on {size.now}")
            if is_main():
                change_settings(run.directory, **{name: size.now})

        size.on_change = change

    for name, size in automatic_sizes(config).items():
        follow(name, size)


def out_of_memory(config: ModelConfig, error: BaseException, resume_command: str | None) -> UserError:
    """One sentence on what helps a run that has run out of memory.

    Args:
        resume_command: None: there is nothing to resume.
    """
    sizes = {name: getattr(config, name, None) for name in AUTO_SIZES}
    numbers = {name: int(getattr(size, "now", size)) for name, size in sizes.items() if isinstance(size, int)}
    smaller = [f"{flag(name)} {size // 2}" for name, size in numbers.items() if size > 1]
    others = [] if getattr(config, "gradient_checkpointing", True) else ["--gradient-checkpointing"]
    others += [] if getattr(config, "lora_rank", 1) else ["--lora-rank 16"]
    what = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    sentence = f"memory ran out ({what}); what helps: {', '.join([*smaller, *others, 'a smaller model'])}"
    if resume_command is not None:
        can_be_auto = numbers if hasattr(config, "generation_batch_size") else ()  # not in experiment_sft
        left = [name for name in can_be_auto if name not in automatic_sizes(config)]
        flags = "".join(f" {flag(name)} auto" for name in left)  # other flags cannot change when it is resumed
        sentence += f"; resume with: {resume_command}{flags}"
    return UserError(sentence)
