"""Run a file's loss function, masks and advantages through numeric tests for known traps.

    python -m doctor my_loss.py                 # docs/loss_template.py shows what the file may define
    python -m doctor experiment_base/train.py
    python -m doctor my_trainer.py --adapter trl

The file is run, as `python my_loss.py` would: give it only code that you trust. Exit status: 0 without a trap, 1 with
one, 2 if the file or one of its functions cannot be examined.
"""

import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

try:
    import tyro
except KeyboardInterrupt:
    sys.exit(130)


@dataclass(frozen=True)
class Config:
    file: tyro.conf.Positional[Path]  # Python file that defines policy_loss, advantages, ...
    # names and shapes of the file's policy_loss; None: the file's ADAPTER, or by the names of its parameters
    adapter: Literal["native", "trl", "verl", "textbook"] | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # print one JSON object


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    if sys.stdout is None:  # closed by the shell
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):  # not every encoding has every character
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        config = tyro.cli(Config, args=arguments, description=__doc__, prog="python -m doctor")
        return run(config)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads any more, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run(config: Config) -> int:
    """Examine the file and print the report; the exit status."""
    from rich.console import Console  # only now: imports of torch take seconds, and --help needs none

    from doctor.examine import examine
    from doctor.findings import UnusableError
    from doctor.report import as_json, print_report

    try:
        report = examine(config.file, config.adapter)
    except UnusableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        if config.json:
            print(as_json(report), flush=True)
        else:
            console = Console(highlight=False)
            print_report(report, console if console.is_terminal else Console(highlight=False, width=120))
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try once more at its end
        print(f"error: the report cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    for error in report.errors:
        print(f"error: {error}", file=sys.stderr)
    return report.status


if __name__ == "__main__":
    sys.exit(main())
