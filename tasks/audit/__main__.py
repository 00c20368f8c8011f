"""Read data as training would, and report their faults before anyone trains on them.

    python -m tasks.audit --task gsm8k --data data/train.jsonl
    python -m tasks.audit --task my_task.py --data my_rows.jsonl --eval-data my_test.jsonl --json report.json

A problem stops a run, or makes its figures wrong: rows that cannot be read, gold answers that the reward does not
accept, the same question with different answers, questions that training and evaluation share, prompts that do not
fit. Notes are worth a look. Exit status: 0 without a problem, 1 with one, 2 if the task or the data cannot be used.
"""

from harness.base.interrupt import handle_as_usual  # first: no traceback of Ctrl-C during the imports
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from common.errors import UserError

from harness.base.checks import check_model, check_ranges, check_texts
from harness.base.config import RESOLVED, Count, RunConfig, Seed
from harness.base.files import replace_file
from harness.base.terminal import printable, say
from harness.run.start import run_main

SHOWN = 3  # rows of a finding that people see


@dataclass(frozen=True, kw_only=True)
class Config:
    task: str  # questions and rewards, as in training: a file of tasks, or the path of your own
    data: str | None = None  # as in training: a file (docs/data.md), or a hub dataset owner/name[:subset[:split]]
    eval_data: str | None = None  # as in training; None: the data of training's evaluations, if separate
    # as in training: keep rows whose field NAME is at most NUMBER
    at_most: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=NUMBER ...", help_behavior_hint="")] = ()
    max_question_length: Count | None = None  # as in training: keep questions of at most this many characters
    model: str = "tiny"  # the model whose tokens and context count, as in training
    chat_template: str | None = None  # as in training: file of a chat template, for models that have none
    system_prompt: str | None = None  # as in training; None: none for the bundled policy, the task's for other models
    max_new_tokens: Count | None = None  # completion budget in tokens; None: as in training
    eval_prompts: Count = 256  # as in training: rows to hold out of --data, if there are no evaluation data
    seed: Seed = 0  # as in training: the seed that chooses the rows to hold out
    json: str | None = None  # also write the report to this file, with the places of all rows


def main(argv: list[str] | None = None) -> None:
    tyro._experimental_options["ansi_codes"] = not os.environ.get("NO_COLOR")  # https://no-color.org
    config = tyro.cli(
        Config, args=argv, description=__doc__, prog="python -m tasks.audit", config=(tyro.conf.DisallowNone,)
    )
    handle_as_usual()
    check_ranges(config)
    own = ("max_new_tokens", "json")
    settings = RunConfig(**{name: value for name, value in vars(config).items() if name not in own})
    check_texts(settings)
    check_model(settings)
    if settings.kind not in RESOLVED:
        raise UserError(f"--model {config.model} has no tokenizer")

    from tasks.audit.examine_rows import examine  # takes seconds to import

    report = examine(settings, config.max_new_tokens or RESOLVED[settings.kind]["max_new_tokens"])
    if config.json is not None:
        text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
        try:
            replace_file(Path(config.json), text.encode(errors="replace"))
        except OSError as error:
            raise UserError(f"--json {config.json}: it cannot be written ({error.strerror})") from error
    print_report(report)
    sys.exit(int(any(finding["rows"] and finding["is_problem"] for finding in report["findings"])))


def print_report(report: dict) -> None:
    for of, source in report["sources"].items():
        num_rows, num_kept = report["rows"][of], report["rows_after_filters"][of]
        filtered = f", {num_rows - num_kept:,} filtered out" if num_rows > num_kept else ""
        say(f"{of}: {source}, {num_rows:,} rows{filtered}")
    if "evaluation" not in report["sources"]:
        fate = "can hold out none of so few: lower --eval-prompts, or give --eval-data"
        fate = f"holds out {report['held_out']} of --data" if report["held_out"] else fate
        say(f"evaluation: no separate file; a run {fate}")
    for title, is_problem in (("problems", True), ("notes", False)):
        findings = [f for f in report["findings"] if f["rows"] and f["is_problem"] is is_problem]
        say(f"\n{title}" + ("" if findings else ": none"))
        for finding in findings:
            say(f"  {finding['rows']:>6,} ({finding['rows'] / max(1, finding['of']):.1%})  {finding['what']}")
            for example in finding["examples"][:SHOWN]:
                say("            " + printable(f"{example['place'].rpartition('/')[2]}: {example['text']}", 120))
            if finding["rows"] > SHOWN:
                say("            ...")
    context = "unlimited" if report["context"] is None else f"{report['context']:,}"
    say(
        f"\ntokens of {report['model']} (context {context}; --max-new-tokens {report['max_new_tokens']:,})\n"
        f"  {'':36}{'texts':>8}{'median':>8}{'90 %':>8}{'99 %':>8}{'longest':>9}{'limit':>8}   beyond it"
    )
    for entry in report["tokens"]:
        percentiles = "".join(f"{entry[share]:>8,}" for share in ("median", "90%", "99%"))
        limit = "none" if entry["limit"] is None else f"{entry['limit']:,}"
        beyond = f"{entry['beyond_limit']:,} ({entry['beyond_limit'] / entry['texts']:.1%})"
        say(f"  {entry['what']:36}{entry['texts']:>8,}{percentiles}{entry['longest']:>9,}{limit:>8}   {beyond}")


def program() -> None:
    run_main(main)


if __name__ == "__main__":
    program()
