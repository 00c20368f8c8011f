"""What a reader must know before comparing two rows: other questions, another machine."""

from collections.abc import Callable

from viewer.groups import Groups, plain
from viewer.runs import Run


def remarks(rows: Groups) -> list[str]:
    """A sentence for each reason not to compare."""
    runs = [run for members in rows.values() for run in members]
    sentences = []
    tasks = _different(runs, lambda run: run.config.get("task"))
    if tasks or any(_different(runs, lambda run, name=name: _questions(run).get(name)) for name in QUESTIONS):
        names = f" (tasks: {', '.join(tasks)})" if tasks else ""
        sentences.append(f"Not all runs answer the same held-out questions{names}: do not compare their accuracies.")
    machines = _different(runs, lambda run: run.config.get("gpu") or run.config.get("machine"))
    processes = _different(runs, lambda run: run.config.get("processes", 1))
    if machines or processes:
        found = [*machines, *([f"{' or '.join(processes)} processes"] if processes else [])]
        sentences.append(f"Not all runs had the same machine ({'; '.join(found)}): do not compare seconds and memory.")
    return sentences


QUESTIONS = ("eval_data", "data", "eval_prompts", "at_most", "max_question_length")


def _questions(run: Run) -> dict[str, object]:
    """What decides which questions are held out; of a file its checksum, where that is recorded."""
    found = {name: run.config.get(name) for name in QUESTIONS}
    sources = run.config.get("sources")
    recorded = sources.get("eval_data") if isinstance(sources, dict) else None
    if isinstance(recorded, dict):
        found["eval_data"] = recorded.get("content")
    if found["eval_data"] is not None:
        found["data"] = None  # of training only
    return found


def _different(runs: list[Run], value: Callable[[Run], object]) -> list[str]:
    """The values, if there are several among the runs that have recorded one; older runs have not recorded all."""
    found = {plain(value(run)) for run in runs if value(run) is not None}
    return sorted(found) if len(found) > 1 else []
