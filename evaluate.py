"""Evaluate a policy on a set of questions: greedy and sampled, with error bars.

    python evaluate.py --model runs/experiment_base/<name>/final
    python evaluate.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --limit 200 --num-samples 4
    python evaluate.py --model tiny --compare runs/evaluate/<name>
    python evaluate.py --model Qwen/Qwen2.5-Math-1.5B --suite math --max-new-tokens 2048
    python evaluate.py --model Qwen/Qwen2.5-1.5B-Instruct --suite ifeval --num-samples 0 --max-new-tokens 1280

Each question is answered greedily, and --num-samples times by sampling. All completions and figures are kept in one
directory. The same command with the same --output continues an evaluation that was interrupted or killed, and shows a
complete one again. docs/evaluate.md explains every figure.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import dataclasses
import functools
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from common.errors import EngineError, UserError
from common.policy import Policy

from harness.base.config import (
    RESOLVED,
    Count,
    CountOrZero,
    InputPath,
    JudgeConfig,
    LocalPath,
    ModelConfig,
    OfData,
    OfEvaluation,
    OfRun,
    Positive,
    Share,
    shown,
)
from harness.base.files import replace_file
from harness.base.machine import is_out_of_memory, out_of_memory
from harness.base.ranks import num_launched
from harness.base.signals import signals_to
from harness.base.terminal import say
from harness.cli.parse import parse_config
from harness.data.benchmarks import SUITES, Read
from harness.evaluation.comparison import show_comparison
from harness.evaluation.session import default_directory, evaluate, locked
from harness.evaluation.suite import parts, summary
from harness.evaluation.tables import print_suite, print_table
from harness.models.loading import load_policy
from harness.run.start import run_main


@dataclass(frozen=True, kw_only=True)
class Config(JudgeConfig, ModelConfig):
    FIRST_GROUP: ClassVar[str] = "sampling"

    num_samples: CountOrZero = 8  # n: sampled answers per question, beside the greedy one; 0: the greedy one only
    max_new_tokens: Count | None = None  # completion budget in tokens; None: 96 for the bundled policy, else 512
    temperature: Positive = 1.0  # of the sampled answers: logits are divided by it
    # below 1: draw only from the most probable tokens that together have this much probability
    top_p: Share = 1.0
    # questions and right answers: a file of tasks, or the path of your own
    task: OfData[LocalPath] = "arithmetic"
    # questions: file (docs/data.md), or hub dataset id[:subset[:split]]; None: the task's own evaluation data
    data: OfData[InputPath | None] = None
    at_most: OfData[tuple[str, ...]] = ()  # NAME=NUMBER: keep rows whose field NAME is at most NUMBER, e.g. num_terms=2
    max_question_length: OfData[Count | None] = None  # keep questions of at most this many characters; None: any
    # the system turn of every question; None: none for the bundled policy, the task's own for other models
    system_prompt: OfData[str | None] = None
    # a text at which a completion ends, e.g. "</response>", for models that were taught no end of turn; may be given
    # several times
    stop: OfData[tuple[str, ...]] = ()
    completion_prefix: OfData[str | None] = None  # every completion begins with this text, e.g. "<think>"
    limit: OfEvaluation[Count | None] = None  # ask the first questions only, this many; None: all
    # published benchmarks, each asked by its task: a file for each in the directory --data, else from the hub
    suite: OfEvaluation[Literal["math", "ifeval", "mmlu_redux", "popqa", "zebra_logic"] | None] = None
    # results.json of another evaluation, or its directory: print the difference to it
    compare: OfEvaluation[LocalPath | None] = None
    # completions sampled at the same time, which bounds the memory of the KV cache
    generation_batch_size: OfRun[Count] = 128
    # directory of the results, new or of an evaluation to continue; None: runs/evaluate/ and date, time and seed
    output: OfRun[LocalPath | None] = None

    def __post_init__(self) -> None:
        if self.suite is not None and self.task == Config.task:
            object.__setattr__(self, "task", SUITES[self.suite][0])


def main(argv: list[str] | None = None) -> None:
    defaults = {kind: {"max_new_tokens": values["max_new_tokens"]} for kind, values in RESOLVED.items()}
    config = parse_config(Config, argv, description=__doc__, resolved=defaults)
    if num_launched() > 1:
        raise UserError("evaluate.py runs in one process: start it with python")
    directory = default_directory(config.seed) if config.output is None else Path(config.output).expanduser()
    config = dataclasses.replace(config, output=str(directory))
    torch.set_num_threads(config.threads)
    load = functools.cache(lambda: load_policy(config, config.temperature))
    with told_how_to_go_on(config, directory):
        (evaluate_one if config.suite is None else evaluate_suite)(config, directory, load)


def evaluate_one(config: Config, directory: Path, load: Callable[[], Policy], read: Read | None = None) -> None:
    results = evaluate(config, directory, load, read)
    print_table(f"{shown(config.model)}: {results['num_questions']} questions of {shown(results['asked'])}", results)
    if "comparison" in results:
        show_comparison(results["comparison"])
    say(f"results:  {shown(directory / 'results.json')}")
    if "accuracy" in results["greedy"]:
        say(f"failures: {shown(directory / 'failures.txt')}")


def evaluate_suite(config: Config, directory: Path, load: Callable[[], Policy]) -> None:
    """One benchmark after the other, each in its own directory, and the table of all; a single benchmark has no
    table."""
    results, benchmarks = {}, parts(config, directory)
    if len(benchmarks) == 1:
        evaluate_one(benchmarks[0].config, directory, load, benchmarks[0].read)
        return
    with locked(directory):
        for part in benchmarks:
            say(f"{part.title}: {shown(part.config.data)}")
            results[part.title] = evaluate(part.config, part.directory, load, part.read)
        columns = summary(results)
        table = json.dumps({"suite": config.suite, "table": columns}, indent=1)
        replace_file(directory / "results.json", (table + "\n").encode())
    print_suite(f"{shown(config.model)}, --suite {config.suite}", results, columns)
    for title, found in results.items():
        if "comparison" in found:
            say(f"\n{title}")
            show_comparison(found["comparison"])
    say(f"results: {shown(directory)}")


@contextmanager
def told_how_to_go_on(config: Config, directory: Path) -> Iterator[None]:
    """If Ctrl-C, SIGTERM, a judge's server or a lack of memory ends the block, a sentence says what to do."""
    output = [] if any(word.partition("=")[0] == "--output" for word in sys.argv) else ["--output", str(directory)]
    how = f"; continue with: {shlex.join(['python', *sys.argv, *output])}"
    try:
        with signals_to(signal.default_int_handler):
            yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted{how}") from None
    except EngineError as error:  # of a judge's server
        raise EngineError(f"{error}{how}") from error
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(config, error, None) from error
        raise


def program() -> None:
    run_main(main)


if __name__ == "__main__":
    program()
