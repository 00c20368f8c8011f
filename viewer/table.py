"""The table of a comparison: the results and the costs of each group of runs. See viewer/compare.py."""

from collections.abc import Callable
from functools import partial
from statistics import NormalDist, fmean

from viewer.groups import Groups, differences, plain, series, setting
from viewer.runs import Run, number

from harness.logs.headings import METRICS

Z = NormalDist().inv_cdf(0.975)
LAST = 5  # steps whose mean is the value at the start, or at the end
MISSING = "-"
QUESTIONS = ("eval_data", "data", "eval_prompts", "at_most", "max_question_length")  # settings that decide on them


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` questions; the formula is in viewer/compare.py.

    >>> [round(bound, 4) for bound in wilson(0.5, 100)]
    [0.4038, 0.5962]
    """
    middle = share + Z**2 / (2 * count)
    radius = Z * (share * (1 - share) / count + Z**2 / (4 * count**2)) ** 0.5
    return tuple((middle + sign * radius) / (1 + Z**2 / count) for sign in (-1, 1))


# Values of a run; None if it has none


def held_out(run: Run, name: str, is_after: bool, kind: str = "greedy") -> float | None:
    """The greedy accuracy before training or at the last evaluation; imitation/sft has it only in its summary."""
    points = series(run, f"eval/{kind}/{name}")
    if not is_after:
        return points.get(0)
    points.pop(0, None)
    return points[max(points)] if points else number((run.summary or {}).get(f"eval/{kind}/{name}"))


def mean_of_steps(run: Run, key: str, is_after: bool = True) -> float | None:
    """The mean over the first or the last few steps."""
    values = list(series(run, key).values())
    return fmean(values[-LAST:] if is_after else values[:LAST]) if values else None


def seconds(run: Run) -> float | None:
    return _recorded(run, "seconds", sum(series(run, "time/step").values()))


def tokens_per_second(run: Run) -> float | None:
    rates, times = series(run, "time/tokens_per_second"), series(run, "time/step")
    num_tokens = sum(rates[step] * times[step] for step in rates.keys() & times.keys())
    return _recorded(run, "tokens_per_second", num_tokens / (sum(times.values()) or 1))


def peak_gigabytes(run: Run) -> float | None:
    peak = _recorded(run, "peak_memory_bytes", max(series(run, "memory/peak_bytes").values(), default=0))
    return None if peak is None else peak / 1e9


def _recorded(run: Run, name: str, logged: float) -> float | None:
    """From the summary of a finished run, else as logged; 0 means that it was not measured."""
    return number((run.summary or {}).get(name)) or logged or None


def steps(run: Run) -> int:
    return max(series(run, "step"))


# Cells


def over_runs(value: Callable[[Run], float | None], form: str, is_end: bool = False) -> Callable[[list[Run]], str]:
    """A cell: the mean of the runs, with the lowest and the highest; final values are of finished runs, if any."""

    def cell(runs: list[Run]) -> str:
        found = _values(runs, value, is_end)
        if not found:
            return MISSING
        low, high = format(min(found), form), format(max(found), form)
        return low if low == high else f"{fmean(found):{form}} ({low}-{high})"

    return cell


def accuracy(is_after: bool) -> Callable[[list[Run]], str]:
    """A cell: the same, and for a value without a range its interval over the questions."""

    def cell(runs: list[Run]) -> str:
        found = _values(runs, lambda run: held_out(run, "accuracy", is_after), is_end=is_after)
        text = over_runs(lambda run: held_out(run, "accuracy", is_after), ".3f", is_end=is_after)(runs)
        counts = {number(run.config.get("eval_prompts")) for run in runs}
        if len(set(found)) != 1 or len(counts) != 1 or not (count := counts.pop()) or not 0 <= found[0] <= 1:
            return text
        if abs(found[0] * count - round(found[0] * count)) > 6e-6 * count:  # committed results have five digits
            return text
        low, high = wilson(found[0], count)
        return f"{text} [{low:.3f}-{high:.3f}]"

    return cell


def _values(runs: list[Run], value: Callable[[Run], float | None], is_end: bool) -> list[float]:
    finished = [run for run in runs if run.is_finished]
    found = [value(run) for run in (finished or runs if is_end else runs)]
    return [entry for entry in found if entry is not None]


def progress(runs: list[Run]) -> str:
    planned = runs[0].config.get("steps")
    if len(runs) == 1 and not runs[0].is_finished and number(planned):
        return f"{steps(runs[0])} of {planned}"
    return over_runs(steps, ".0f")(runs)


def label_cell(label: str, runs: list[Run], width: int) -> str:
    """The label; and below it how many runs there are, and whether they are finished."""
    open_runs = sum(not run.is_finished for run in runs)
    count = f"{len(runs)} runs" if len(runs) > 1 else ""
    state = "not finished" if open_runs == len(runs) else f"{open_runs} not finished" if open_runs else ""
    name = plain(label)
    lines = [name if len(name) <= width else name.replace("/", "/\n", 1), ", ".join(filter(None, (count, state)))]
    return "\n  ".join(filter(None, lines))


Columns = dict[str, Callable[[list[Run]], str]]
ACCURACY: Columns = {
    "accuracy\nbefore": accuracy(is_after=False),
    "accuracy\nafter": accuracy(is_after=True),
}
SAMPLED: Columns = {
    "sampled\nbefore": over_runs(lambda run: held_out(run, "accuracy", False, "sampled"), ".3f"),
    "sampled\nafter": over_runs(lambda run: held_out(run, "accuracy", True, "sampled"), ".3f", is_end=True),
}
REWARD: Columns = {  # in the place of accuracy, where a task has none
    "reward\nat first": over_runs(lambda run: mean_of_steps(run, "reward/total", False), ".3f"),
    "reward\nat last": over_runs(lambda run: mean_of_steps(run, "reward/total"), ".3f", is_end=True),
}
LENGTH: Columns = {
    "length\nbefore": over_runs(lambda run: held_out(run, "length", False), ".1f"),
    "length\nafter": over_runs(lambda run: held_out(run, "length", True), ".1f", is_end=True),
    METRICS["loss/kl"].short: over_runs(lambda run: mean_of_steps(run, "loss/kl"), ".2g", is_end=True),
}
COST: Columns = {
    "steps": progress,
    "seconds": over_runs(seconds, ".0f"),
    "tokens\nper second": over_runs(tokens_per_second, ".0f"),
    "memory\n(GB)": over_runs(peak_gigabytes, ".2f"),
}


def print_table(rows: Groups, left_out: list[str]) -> None:
    """Print a row for each group of runs: results, costs, and the settings that differ; then remarks.

    These are several tables if the terminal is too narrow for one.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)
    starts = {label.partition("/")[0] for label in rows}
    if len(starts) == 1 and all("/" in label for label in rows):  # the experiment once, instead of in every row
        console.print(plain(*starts), markup=False)
        rows = {label.partition("/")[2]: runs for label, runs in rows.items()}
    has_accuracy = all(cell(runs) != MISSING for cell in ACCURACY.values() for runs in rows.values())
    parts: list[Columns] = []
    different = [name for name in differences([run for runs in rows.values() for run in runs]) if name != "steps"]
    settings = [{plain(name): partial(setting, name=name)} for name in different]
    for part in (ACCURACY, SAMPLED, {} if has_accuracy else REWARD, LENGTH, COST, *settings):
        part = {heading: cell for heading, cell in part.items() if any(cell(runs) != MISSING for runs in rows.values())}
        wider = _table(rows, (parts[-1] if parts else {}) | part, console.width)
        if parts and Measurement.get(console, console.options.update_width(10_000), wider).maximum <= console.width:
            parts[-1] |= part
        elif part:
            parts.append(part)
    for part in parts:
        console.print(_table(rows, part, console.width))
        console.print()
    measured = {heading: cell for part in parts for heading, cell in part.items() if heading not in different}
    explained = how_to_read([*measured], [cell(runs) for cell in measured.values() for runs in rows.values()])
    for sentence in [explained, *remarks(rows), *(f"Left out: {reason}." for reason in left_out)]:
        console.print(plain(sentence), markup=False)


def _table(rows: Groups, columns: Columns, width: int):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for heading in columns:
        table.add_column(heading, justify="right", overflow="fold")
    for label, runs in rows.items():
        cells = [label_cell(label, runs, width // 3), *(cell(runs) for cell in columns.values())]
        table.add_row(*map(Text, cells))  # text, not rich's markup
    return table


def how_to_read(headings: list[str], cells: list[str]) -> str:
    text = "".join(cells)
    parts = ["Accuracy and length: greedy answers to held-out questions"]
    parts += ["sampled: accuracy of sampled answers, mean of 8 per question"] if {*headings} & SAMPLED.keys() else []
    parts += ["in brackets: 95 % interval over the questions"] if "[" in text else []
    parts += ["in parentheses: lowest and highest run"] if "(" in text else []
    return "; ".join([*parts, f"KL and reward: means over {LAST} steps"]) + "."


def remarks(rows: Groups) -> list[str]:
    """A sentence for each reason not to compare rows: other questions, another machine."""
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


def _questions(run: Run) -> dict[str, object]:
    """The settings that decide which questions are held out; for a file its checksum, if it was recorded."""
    found = {name: run.config.get(name) for name in QUESTIONS}
    if recorded := run.config.get("sources", {}).get("eval_data"):
        found["eval_data"] = recorded["content"]
    if found["eval_data"] is not None:
        found["data"] = None  # of training only
    return found


def _different(runs: list[Run], value: Callable[[Run], object]) -> list[str]:
    """The values, if there are several among the runs that have recorded one; older runs have not recorded all."""
    found = {plain(value(run)) for run in runs if value(run) is not None}
    return sorted(found) if len(found) > 1 else []
