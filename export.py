"""Turn a run into a model that others can use: a directory with a model card, checked, and uploaded if asked.

    python export.py runs/experiment_base/<name>
    python export.py runs/experiment_base/<name> --merge --dtype bfloat16 --output my-model
    python export.py runs/experiment_base/<name> --quantize 4bit
    python export.py runs/experiment_base/<name> --merge --push owner/name --private
    python export.py data/policies/tiny_policy --push owner/name               # a bundled policy, as it is

The exported model loads with plain transformers. It answers held-out questions greedily as the trained policy does, and
the program checks this before it uploads anything. docs/export.md lists the files.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from safetensors import SafetensorError

from common.chat import decode
from common.errors import UserError

from harness.base.checks import check_device, local_path
from harness.base.config import BUNDLED, Count, LocalPath, ModelConfig, OfPolicy, OfRun, resolve, shown
from harness.base.files import NO_SPACE
from harness.base.ranks import num_launched
from harness.base.signals import signals_to
from harness.base.terminal import printable, say
from harness.cli.parse import parse_plain
from harness.exporting.card import Card
from harness.exporting.source import Source, find_source
from harness.exporting.upload import check_push, push
from harness.exporting.writing import (
    num_equal,
    num_prompts_equal,
    read_questions,
    refuse_quantised,
    trained_answers,
    write_adapter,
    write_model,
    write_quantised,
    written_answers,
)
from harness.models.loading import load_policy
from harness.run.start import run_main


@dataclass(frozen=True, kw_only=True)
class Config:
    FIRST_GROUP: ClassVar[str] = "export"
    POSITIONAL: ClassVar[tuple[str, ...]] = ("run",)

    run: str = ""  # directory of a run, its final/, or one of its checkpoints; with --push also of a bundled policy
    merge: bool = False  # of a run with an adapter: write the model with the adapter merged in, not the adapter alone
    quantize: Literal["none", "4bit", "8bit"] = "none"  # 4bit and 8bit: a checkpoint of bitsandbytes
    # dtype of the weights; None: as the run's final policy is saved: float32, or with an adapter the dtype of its base
    dtype: OfPolicy[Literal["float32", "bfloat16", "float16"] | None] = None
    # directory to write, which must not exist; None: exports/ and the run's name
    output: OfRun[LocalPath | None] = None
    questions: Count = 16  # held-out questions that both the trained policy and the exported model must answer
    push: str | None = None  # owner/name: upload it to this repository of the Hugging Face hub; None: do not
    private: bool = False  # make that repository private
    dry_run: bool = False  # with --push: only print what would be uploaded
    license: str | None = None  # for the model card, as the hub writes it, e.g. apache-2.0; None: not stated
    # where answers are computed: cpu, cuda, ...; auto: an accelerator, cuda first, else cpu
    device: OfPolicy[str] = "auto"


def main(argv: list[str] | None = None) -> None:
    config = parse_plain(Config(), argv, description=__doc__)
    if num_launched() > 1:
        raise UserError("export.py runs in one process: start it with python")
    check(config)
    if (bundled := local_path(config.run, "RUN").resolve()) in BUNDLED.values():
        upload_bundled(config, bundled)
        return
    source = find_source(config.run)
    is_quantised = config.quantize != "none"
    merge = source.is_adapter and (config.merge or is_quantised or source.base_id is None)
    if config.merge and not source.is_adapter:
        say("--merge: this run has no adapter, its model is complete")
    if merge:
        refuse_quantised(source)
        if not config.merge:
            reason = f"--quantize {config.quantize}" if is_quantised else "its base is not on the hub"
            say(f"the adapter is merged into its base ({reason})")
    elif source.is_adapter and config.dtype is not None:
        raise UserError(f"--dtype {config.dtype}: an adapter alone is kept as it is: add --merge")
    output = find_output(config, source)
    with signals_to(signal.default_int_handler), writing(output) as partial:
        card = write(config, source, merge, output, partial)
        (partial / "README.md").write_text(card.text(), encoding="utf-8")
    say(f"exported to {shown(output)}")
    if config.push is None:
        task = shown(source.settings.get("task", "arithmetic"))
        words = ["python", "evaluate.py", "--model", shown(output), "--task", task]
        say(f"evaluate it with: {shlex.join(words)}")
        return
    upload(config, output)


def upload(config: Config, directory: Path) -> None:
    """Send the files of a directory, or only print them."""
    if config.dry_run:
        say(f"--dry-run: these files would be uploaded to {config.push}{', private' if config.private else ''}:")
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            say(f"  {path.relative_to(directory)}  {path.stat().st_size:,} bytes")
        return
    say(f"uploaded to {push(directory, config.push, config.private)}")


def upload_bundled(config: Config, directory: Path) -> None:
    """A bundled policy is complete, and its card stands beside it."""
    others = [name for name in ("merge", "quantize", "dtype", "output", "license")
              if getattr(config, name) != getattr(Config, name)]  # fmt: skip
    if config.push is None or others:
        given = f"omit --{others[0]}" if others else "add --push owner/name"
        raise UserError(f"RUN {shown(directory)} is a bundled policy, which can only be uploaded as it is: {given}")
    upload(config, directory)


def check(config: Config) -> None:
    """Refuse settings that cannot work, before anything is read."""
    if not config.run:
        raise UserError("RUN is missing: give the directory of a run, runs/experiment_base/<name> for example")
    check_device(config.device)
    if config.quantize != "none":
        if importlib.util.find_spec("bitsandbytes") is None:
            raise UserError(f"--quantize {config.quantize} needs the package bitsandbytes: pip install bitsandbytes")
        if config.dtype is not None:
            raise UserError(f"--dtype {config.dtype} contradicts --quantize {config.quantize}: omit one of them")
    for name in ("private", "dry_run"):
        if getattr(config, name) and config.push is None:
            raise UserError(f"--{name.replace('_', '-')} is for --push owner/name")
    if config.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,40}", config.license):
        raise UserError(f"--license {printable(config.license, 60)} is not an id of the hub, such as apache-2.0")
    if config.push is not None:
        check_push(config.push, needs_token=not config.dry_run)


def find_output(config: Config, source: Source) -> Path:
    """
    Raises:
        UserError: it exists.
    """
    name = source.run.name + ("" if source.step is None else f"-step{source.step}")
    name += "" if config.quantize == "none" else f"-{config.quantize}"
    output = Path("exports") / name if config.output is None else local_path(config.output, "--output")
    if output.exists() or output.is_symlink():
        raise UserError(f"{shown(output)} exists already: remove it, or choose another --output")
    return output.absolute()


@contextmanager
def writing(output: Path) -> Iterator[Path]:
    """A directory beside `output`, which becomes it at the end of the block, and is removed if the block fails."""
    partial = output.with_name(f"{output.name}.{os.getpid()}.partial")  # only this process uses it
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--output {shown(output)} cannot be made ({error.strerror})") from error
    try:
        yield partial
        partial.rename(output)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt("interrupted; nothing was exported") from None
        if output.exists():  # created after `find_output` checked
            raise UserError(f"{shown(output)} exists already; nothing was exported") from error
        # Errors of safetensors have no errno
        if isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno in NO_SPACE):
            raise UserError(f"{shown(output)} could not be written ({error}); nothing was exported") from error
        raise


def write(config: Config, source: Source, merge: bool, output: Path, partial: Path) -> Card:
    """Write the weights, and compare the answers.

    Raises:
        UserError: no weight was rounded, but the answers differ from the trained policy's.
    """
    torch.set_num_threads(source.settings.get("threads") or torch.get_num_threads())
    device = resolve(ModelConfig(device=config.device), {}).device
    dtype = config.dtype or source.policy.dtype
    policy = load_policy(dataclasses.replace(source.policy, device=device)).eval()
    questions = read_questions(source, config.questions, policy)
    trained = trained_answers(policy, questions)
    answer = decode(policy.tokenizer, trained[0])
    del policy  # two models need not be in memory at once

    if config.quantize != "none":
        write_quantised(source, partial, config.quantize, device)
    elif source.is_adapter and not merge:
        write_adapter(source, partial)
    else:
        write_model(source, partial, dtype)
    prompts_equal = num_prompts_equal(partial, questions)
    written, loaded_dtype = written_answers(partial, questions, device)
    equal = num_equal(trained, written)
    share = f"{equal} of {len(trained)} greedy answers"
    say(f"{share} of the exported model, by transformers' generate, equal the trained policy's")
    is_rounded = config.quantize != "none" or source.load_in is not None
    is_rounded = is_rounded or loaded_dtype != torch.float32 or source.policy.dtype != "float32"
    if equal < len(trained) and not is_rounded:
        raise UserError(
            f"{len(trained) - equal} of {len(trained)} greedy answers differ from the trained policy's, "
            "although no weight was rounded: nothing was exported"
        )
    curve = source.run / "curve.png"
    if has_curve := source.step is None and curve.is_file():
        shutil.copyfile(curve, partial / "curve.png")
    return Card(
        source=source,
        title=(config.push or output.name).rpartition("/")[2],
        loads_as=config.push or f"./{output.name}",
        dtype=dtype,
        quantize=config.quantize,
        merged=merge,
        license=config.license,
        questions=questions,
        answer=answer,
        equal=equal,
        prompts_equal=prompts_equal,
        has_curve=has_curve,
    )


def program() -> None:
    run_main(main)


if __name__ == "__main__":
    program()
