"""Reads rows of a local file, with errors that name file and row, or of the hub; filters, splits, orders them."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from common.errors import UserError
from common.keyed import keyed_generator
from common.parallel import own_part

from harness.base.checks import local_path, parse_numbers, parse_sources
from harness.base.config import AskedConfig, RunConfig, shown
from harness.base.hub import find_test_split, is_hub_source, read_split
from harness.base.terminal import say
from harness.data.answer_judge import PREFERENCE, load_judge
from harness.data.row_checks import hold_out, shared_questions, tell_unpaid, try_solutions
from harness.data.rows import Fields, FieldsError, placed, read_file
from harness.data.schemas import read_as
from harness.data.task import Row, Task, import_task, suggest_task
from harness.processes.processes import agreed

# Completions on which reward functions are tried: empty, short, long, with tags, digits and the row's own answer
INVENTED = (
    "",
    "ANSWER",
    "<think>\nfirst 1 + 2 = 3\n</think>\n<answer>\nANSWER\n</answer>",
    "The answer is $\\boxed{ANSWER}$.",
    "<think>" + "but wait, " * 40,
    "3 * 4 = 12\n#### ANSWER",
    "<answer>ANSWER</answer>",
    '```json\n{"answer": "ANSWER"}\n```',
)


@agreed
def load_task(config: RunConfig, more_weights: dict[str, float] | None = None, tools: list[dict] | None = None) -> Task:
    """The task that `--task` names, with its training and evaluation rows; both are filtered in the same way.

    `more_weights` are weights of reward components that the experiment adds; `tools` are JSON schemas. Without
    `--eval-data`, a task's own data have a held-out file, and a user's `--data` may have a test file
    (`find_test_data`). Without either, `--eval-prompts` rows of `--data`, chosen by `--seed`, are held out.
    """
    judge = load_judge(config)
    functions = None
    if config.reward_functions is not None:
        from harness.data.reward_functions import RewardFunctions  # not at the top: few runs need it

        functions = RewardFunctions(config.reward_functions)
        if taken := {"total", PREFERENCE, *(more_weights or {})} & set(functions.names):
            raise UserError(f"--reward-functions: the name {min(taken)!r} is taken: give the function another one")
    added = dict.fromkeys(functions.names if functions else [], 1.0) | ({PREFERENCE: 1.0} if judge else {})
    task = import_task(config, (more_weights or {}) | added)
    task.tools = tools
    source, eval_source = find_sources(config, task)
    train_rows = load_rows(source, config, task)
    if eval_source is not None:
        eval_rows = load_rows(eval_source, config, task)[: config.eval_prompts]
    elif len(train_rows) <= config.eval_prompts:
        raise UserError(
            f"{shown(source)} has {len(train_rows)} rows, and --eval-prompts takes {config.eval_prompts} of them: "
            "lower it, or give --eval-data"
        )
    else:
        train_rows, eval_rows = hold_out(train_rows, config.eval_prompts, config.seed)
    if len(train_rows) > (config.max_prompts or len(train_rows)):
        say(f"{shown(source)}: the first {config.max_prompts} of {len(train_rows)} training rows are used")
        train_rows = train_rows[: config.max_prompts]
    prompts_per_step = getattr(config, "prompts_per_step", 1)
    if len(train_rows) < prompts_per_step:
        raise UserError(f"--prompts-per-step {prompts_per_step} exceeds the {len(train_rows)} training rows")
    if known := sum(map(len, shared_questions(train_rows, eval_rows))):
        say(f"{known} of the {len(eval_rows)} held-out questions are training questions as well: they test no learning")
    try_solutions(task, [*train_rows, *eval_rows], config.task)  # before a model is loaded
    task.try_out(train_rows[0])
    if note := task.note():
        say(f"{task}: {note}", sys.stderr)
    for name, (set_source, renamed) in _find_sets(config).items():
        rows = read_renamed(set_source, task, renamed)[: config.eval_prompts]
        if known := sum(map(len, shared_questions(train_rows, rows))):
            say(f"{known} of the {len(rows)} questions of {name} are training questions as well")
        try_solutions(task, rows, config.task)
        task.eval_sets[name], task.eval_sources[name] = rows, set_source
    task.data, task.held_out_data = source, eval_source
    task.train_rows, task.eval_rows = train_rows, eval_rows
    task.judge = judge  # not before: the solutions of all rows were tried above
    if functions is not None:
        task.functions, task.asked_with = functions, config.system_prompt or ""
        _try_functions(config, task)  # before a model is loaded
    return task


def _try_functions(config: RunConfig, task: Task) -> None:
    """Tell the reward functions what all rows have, and call them on invented completions of some rows."""
    functions, known = task.functions, [task.train_rows, task.eval_rows, *task.eval_sets.values()]
    functions.columns = list(dict.fromkeys(key for rows in known for row in rows for key in row))
    functions.state.max_steps = num_steps(config, len(task.train_rows))
    group_size = getattr(config, "group_size", 1)
    count = min(max(2, -(-len(INVENTED) // group_size)), len(task.train_rows))  # of groups
    rows = [task.train_rows[index * len(task.train_rows) // count] for index in range(count)]
    rows = [row for row in rows for _ in range(group_size)]
    answers = [str(task.right_answer(row)) for row in rows]
    texts = [INVENTED[index % len(INVENTED)].replace("ANSWER", answer) for index, answer in enumerate(answers)]
    functions.check([task.messages(row, task.asked_with) for row in rows], rows, texts)


def num_steps(config: RunConfig, num_rows: int) -> int:
    """The steps of a run: `--steps`, or `--epochs` passes over the training rows."""
    if getattr(config, "epochs", None) is None:
        return getattr(config, "steps", 1)
    return config.epochs * (num_rows // config.prompts_per_step)


def load_held_out_task(config: AskedConfig) -> Task:
    """The task that `--task` names, with its own questions; `--data` holds something else, which is trained on."""
    task = load_task(
        RunConfig(task=config.task, seed=config.seed, eval_prompts=config.eval_prompts, device=config.device)
    )
    task.data, task.held_out_data = config.data, config.eval_data  # of the run
    return task


def find_sources(config: RunConfig, task: Task) -> tuple[str, str | None]:
    """The sources of the training rows and of the evaluation rows; the latter is None if rows are held out."""
    source = config.data if config.data is not None else task.train_data
    if source is None:
        raise UserError(f"{task} names no data: give --data")
    eval_source = task.eval_data if config.data is None and config.eval_data is None else config.eval_data
    return source, find_test_data(source) if eval_source is None else eval_source


def _find_sets(config: RunConfig) -> dict[str, tuple[str, dict[str, str]]]:
    """The sources of the further held-out questions by their names, with the task's names for their fields."""
    sets = {name: (source, {}) for name, source in parse_sources("--eval-sets", config.eval_sets).items()}
    if config.eval_suite is None:
        return sets
    from harness.evaluation.suite import SUITES  # not at the top: few runs need it

    task, benchmarks = SUITES[config.eval_suite]
    if config.task != task:
        raise UserError(f"--eval-suite {config.eval_suite} is asked by --task {task}, not by {config.task}")
    return {name: (found.hub, dict(found.renamed)) for name, found in benchmarks.items()} | sets


def read_renamed(source: str, task: Task, renamed: dict[str, str]) -> list[Row]:
    """All rows of a source, with their questions; `renamed`: fields of the data, and the task's names for them."""
    rows = read_rows(source, {})
    for row in rows:
        for published, name in renamed.items():
            if published in row:
                row[name] = row.pop(published)
        if (problem := read_as(row, task.fields, not task.is_bundled)[0]) is not None:
            raise FieldsError(row, problem)
        row.question = task.question(row)
    return rows


def read_rows(source: str, fields: Fields, is_own: bool = False) -> list[Row]:
    """The rows of a local file, or of a hub dataset `owner/name[:subset[:split]]`; each gets `fields` by `read_as`."""
    rows = []
    for row in scan_rows(source, fields, is_own):
        if isinstance(row, UserError):
            raise row
        rows.append(row)
    if not rows:
        raise UserError(f"{shown(source)} has no rows")
    return rows


def scan_rows(source: str, fields: Fields, is_own: bool = False) -> Iterator[Row | UserError]:
    """The same, but an unusable row yields its error."""
    path = local_path(source, "the data file")
    if is_hub_source(source):
        rows = (placed(row, f"{source}, row {number}") for number, row in enumerate(read_split(source), start=1))
    else:
        rows = read_file(path)
    notes = Counter()
    for row in rows:
        problem, note = (None, "") if isinstance(row, UserError) else read_as(row, fields, is_own)
        notes[note] += 1
        yield row if problem is None else FieldsError(row, problem)
    for note, count in notes.items():
        if note:
            say(f"{shown(source)}: {count} of {notes.total()} rows by another schema (docs/data.md): {note}")


def find_test_data(source: str) -> str | None:
    """`test.*` next to a file `train.*`, or the split "test" of a hub dataset given without a split."""
    if is_hub_source(source):
        found = find_test_split(source)
    else:
        path = local_path(source, "the data file")
        of_train = re.fullmatch(r"train((?:-00000-of-00001)?\.\w+)", path.name)  # also as the hub names it
        beside = path.with_name(f"test{of_train[1]}") if of_train else path
        found = str(beside) if of_train and beside.is_file() else None
    if found is not None:
        say(f"evaluated on {shown(found)}, which comes with {shown(source)} (--eval-data names another)")
    return found


def load_rows(source: str, config: RunConfig, task: Task) -> list[Row]:
    """The rows of a source that pass the filters, with a hint if they belong to another task."""
    try:
        rows = read_rows(source, task.fields, not task.is_bundled)
    except FieldsError as error:
        raise UserError(f"{error}{suggest_task(error.row, config.task)}") from None
    rows = filter_rows(rows, config, task, source)
    tell_unpaid(task, rows, config.task)
    return rows


def filter_rows(rows: list[Row], config: RunConfig, task: Task, source: str) -> list[Row]:
    """Keep the rows that pass `--at-most` and `--max-question-length`, and attach the task's question to each."""
    kept, passed = rows, []
    for field, most in parse_numbers("--at-most", config.at_most).items():
        kept = [row for row in kept if _number(row, field) <= most]
        passed.append(f"{len(kept)} --at-most {field}={most:g}")
    for row in kept:  # all of them, also to check that each can be asked
        row.question = task.question(row)
        if not row.question.strip():
            raise FieldsError(row, "its question is empty: remove the row")
    if config.max_question_length is not None:
        kept = [row for row in kept if len(row.question) <= config.max_question_length]
        passed.append(f"{len(kept)} --max-question-length {config.max_question_length}")
    if not kept:
        raise UserError(
            f"none of the {len(rows)} rows of {shown(source)} passes the filters (--at-most, --max-question-length)"
        )
    if passed:
        say(f"{shown(source)}: of {len(rows)} rows pass " + ", then ".join(passed))
    return kept


def _number(row: Row, field: str) -> float:
    value = row.get(field)
    with suppress(TypeError, ValueError):
        if isinstance(value, int | float | (str if row.is_table else int)) and not isinstance(value, bool):
            return float(value)
    raise UserError(f"--at-most {field}: {row.place} has no number in a field {field!r}")


def prompts_of_step(num_rows: int, prompts_per_step: int, step: int, seed: int) -> list[int]:
    """This process's part of the step's rows, see `all_prompts_of_step`; alone, all of them."""
    return own_part(all_prompts_of_step(num_rows, prompts_per_step, step, seed))


def all_prompts_of_step(num_rows: int, prompts_per_step: int, step: int, seed: int) -> list[int]:
    """The rows that step 1, 2, ... trains on: a new permutation of all rows every epoch, keyed by (seed, epoch).

    An epoch ends before a step that it could not fill, so that no step holds a prompt twice.

    >>> first, second = (set(all_prompts_of_step(5, 2, step, seed=0)) for step in (1, 2))
    >>> len(first), len(second), first & second
    (2, 2, set())
    """
    steps_per_epoch = num_rows // prompts_per_step
    epoch, position = divmod(step - 1, steps_per_epoch)
    order = keyed_generator("data order", seed, epoch).permutation(num_rows)
    return order[position * prompts_per_step : (position + 1) * prompts_per_step].tolist()
