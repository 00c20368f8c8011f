"""The audit itself: every file is read as training would, and all of its faulty rows are found, not only the first."""

from common.errors import UserError
from common.tasks.audit.calculations import find_wrong_calculations
from common.tasks.audit.findings import Finding, Place, Report
from common.tasks.audit.golds import find_boxed, find_control_characters, find_copied, find_gold_problems
from common.tasks.audit.lengths import load_tokenizer, measure_prompts, measure_solutions
from common.tasks.audit.questions import find_repeated, find_shared

from common.plumbing.config import RunConfig, shown
from common.plumbing.data import filter_rows, find_sources, scan_rows
from common.plumbing.rows import FieldsError
from common.plumbing.task import Row, Task, import_task, suggest_task


def examine(config: RunConfig, max_new_tokens: int) -> Report:
    """Audit the data of a task.

    Raises:
        UserError: the task, a file as a whole, or the model's tokenizer cannot be used, or no row can be read.
    """
    task = import_task(config)
    system_prompt = config.system_prompt
    if system_prompt is None:
        system_prompt = "" if config.kind == "tiny" else task.system_prompt
    source, eval_source = find_sources(config, task)
    named = {"training": source} | ({"evaluation": eval_source} if eval_source is not None else {})
    tokenizer, context = load_tokenizer(config)
    findings, lengths, num_rows, kept = [], [], {}, {}
    for of, name in named.items():
        rows, unusable = _read(task, config, name, of)
        num_rows[of] = len(rows)
        rows = kept[of] = filter_rows(rows, config, task, name)
        prompts, long = measure_prompts(tokenizer, task, rows, system_prompt, of, context - max_new_tokens)
        lengths += [prompts, measure_solutions(tokenizer, rows, of, max_new_tokens)]
        findings += [unusable, *find_gold_problems(task, rows, of), *find_repeated(task, rows, of), long]
        findings += [
            find_control_characters(rows, of),
            find_boxed(task, rows, of),
            find_copied(task, rows, of),
            find_wrong_calculations(rows, of),
        ]
    if eval_source is not None:
        findings += find_shared(kept["training"], kept["evaluation"])
    return Report(
        task=shown(config.task),
        sources={of: shown(name) for of, name in named.items()},
        num_rows=num_rows,
        num_kept={of: len(rows) for of, rows in kept.items()},
        model=shown(config.model),
        context=context,
        max_new_tokens=max_new_tokens,
        findings=findings,
        lengths=[entry for entry in lengths if entry.tokens],
    )


def _read(task: Task, config: RunConfig, source: str, of: str) -> tuple[list[Row], Finding]:
    """The rows that can be read and asked, and those that cannot.

    Raises:
        UserError: there is none that can, with the problem of the first one.
    """
    unusable = Finding(f"{of}_unusable", f"{of}: rows that cannot be used", True, 0)
    usable, first = [], None
    for row in scan_rows(source, task.fields):
        unusable.of += 1
        try:
            if isinstance(row, UserError):
                raise row
            row.question = task.question(row)
            usable.append(row)
        except UserError as error:
            first = first or error
            place, _, problem = str(error).partition(": ")
            if isinstance(row, Row):
                place, problem = row.place, str(error).partition(f"{row.place} ")[2] or str(error)
            unusable.places.append(Place(place, problem))
    if not usable:
        hint = suggest_task(first.row, config.task) if isinstance(first, FieldsError) else ""
        raise UserError(
            f"no row of {shown(source)} can be used: {first}{hint}" if first else f"{shown(source)} has no rows"
        )
    return usable, unusable
