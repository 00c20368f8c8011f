"""Show a run: its curves, its findings, and what its loss sees of every token.

    python -m viewer runs/experiment_base/<name>              # writes report.html into it, a page that needs no network
    python -m viewer runs/experiment_base/<name> --serve      # the same page while the run goes on, at 127.0.0.1

Reads the run's directory and imports nothing of the training code.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from viewer.report import write_report
from viewer.runs import RunError, printable


@dataclass(frozen=True)
class Config:
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]  # the run's directory
    output: Path | None = None  # file that the page is written to; by default report.html in the run's directory
    serve: bool = False  # show the page at 127.0.0.1 instead, and make it again when the run goes on
    port: int = 8008  # port of --serve; 0: any free port


def main(arguments: Sequence[str] | None = None) -> None:
    flags = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    config = tyro.cli(Config, args=arguments, description=__doc__, prog="python -m viewer", config=flags)
    try:
        _show(config)
    except (RunError, OSError) as error:
        written = getattr(error, "filename", None) or "the output"
        sentence = error if isinstance(error, RunError) else f"{written} cannot be written: {error.strerror}"
        print(f"error: {printable(sentence)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _show(config: Config) -> None:
    if not 0 <= config.port < 65536:
        raise RunError(f"--port {config.port} is no port: give 0 to 65535")
    if config.serve and config.output is not None:
        raise RunError("--serve writes no file: leave out --output")
    if config.serve:
        from viewer.serve import serve

        serve(config.run, config.port)
        return
    path = write_report(config.run, output=config.output)
    print(f"{printable(path)} ({path.stat().st_size / 1000:,.0f} KB)")


def program() -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
        sys.stderr.reconfigure(errors="backslashreplace")
    main()


if __name__ == "__main__":
    program()
