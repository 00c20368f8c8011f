"""One page for a run: its curves, what it said about itself, and its samples with everything that the loss sees.

The page is one file that loads nothing: data, scripts and styles are inside it, and a Content-Security-Policy lets it
run these scripts only. Text of a model, a data set or a tool is JSON in it, in which no tag can begin.
"""

import base64
import hashlib
import json
import math
import os
from pathlib import Path
from shlex import quote as quote_for_shell
from urllib.parse import quote

from viewer.growing import step_of
from viewer.results import open_run
from viewer.runs import Run, RunError, clean, number, printable, ranges
from viewer.thinning import describe_all, describe_kept, keep_steps

HERE = Path(__file__).resolve().parent
METRICS_PAGE = HERE.parent / "docs" / "metrics.md"
ANCHOR = "#why-is-my-loss-0-and-why-is-my-reward-flat"  # of the table of findings
MOST_POINTS = 2000  # lines of metrics.jsonl in a page, which is more than a screen has columns
_UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}  # json.dumps escapes all beyond ASCII


def write_report(directory: Path, other: Path | None = None, output: Path | None = None) -> Path:
    """Write the page of a run, and return where it is.

    Args:
        directory: of the run.
        other: of a second run, whose curves and findings are laid over the first one's.
        output: the file; by default report.html in `directory`.

    Raises:
        RunError: a directory is not a run's or cannot be read, or the output is no page.
        OSError: the file cannot be written.
    """
    runs = [open_run(path) for path in (directory, other) if path is not None]
    for run in runs:
        run.update()
    if output is None:
        runs[0].directory.mkdir(exist_ok=True)  # that of a kept run is only a name
    path = runs[0].directory / "report.html" if output is None else Path(output)
    if path.suffix != ".html" or path.is_dir():
        raise RunError(f"{path} cannot be the page: give the name of a file that ends in .html")
    first = runs[0]
    rows_per_step = count_rows_per_step(first.config)
    kept = keep_steps(first.samples, rows_per_step)
    samples = describe_kept(
        kept, first.samples, rows_per_step, f"python -m viewer {quote_for_shell(str(directory))} --serve"
    )
    data = page_data(runs, samples, kept.token_ids, _relative(METRICS_PAGE, path.parent))
    chunks = [(f"samples-{step}", kept.chunks[step]) for step in sorted(kept.chunks)]
    _replace(path, render(data, title_of(runs), chunks))
    return path


def page_data(runs: list[Run], samples: dict, token_ids: set[int] | None, metrics_page: str | None) -> str:
    """What the page shows, as JSON without any `<`, `>` or `&`.

    Args:
        samples: `describe_kept` or `describe_all`, of the first run.
        token_ids: whose texts are needed; None: all.
        metrics_page: relative address of docs/metrics.md; None: the page names it only.
    """
    data = {
        "runs": [_describe_run(run, metrics_page) for run in runs],
        "metrics_page": metrics_page,
        "tokens": _token_texts(runs[0].tokens.rows, token_ids),
        "samples": samples,
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def live_data(runs: list[Run]) -> str:
    """The same for a page that is served: it asks for the samples of each step by itself."""
    return page_data(runs, describe_all(runs[0].samples, count_rows_per_step(runs[0].config)), None, None)


def render(data: str, title: str, chunks: list[tuple[str, str]] = (), live: bool = False) -> str:
    """The page, from viewer/page/ and viewer/vendor/."""
    import jinja2

    script = "".join(_own_text(path) for path in sorted((HERE / "page").glob("*.js")))
    css, uplot_css = _own_text(HERE / "page" / "report.css"), _own_text(HERE / "vendor" / "uPlot.min.css")
    uplot_js = _own_text(HERE / "vendor" / "uPlot.iife.min.js")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)} {_hash(uplot_js)}",
            f"style-src {_hash(css)} {_hash(uplot_css)}",
            "img-src data:",
            *(["connect-src 'self'"] if live else []),
            "base-uri 'none'; form-action 'none'",
        ]
    )
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string(_own_text(HERE / "page" / "report.html.jinja"))
    return template.render(
        title=title,
        css=css,
        script=script,
        uplot_css=uplot_css,
        uplot_js=uplot_js,
        data=data,
        chunks=chunks,
        live=live,
        csp=policy,
    )


def title_of(runs: list[Run]) -> str:
    return " and ".join(printable(f"{_experiment(run)}/{run.directory.name}") for run in runs)


def count_rows_per_step(config: dict) -> int | None:
    """Completions per step, of all processes; None if the run's flags do not say it."""
    prompts, group_size = _positive(config.get("prompts_per_step")), _positive(config.get("group_size"))
    return prompts * group_size if prompts and group_size else None


def _describe_run(run: Run, metrics_page: str | None) -> dict:
    return {
        "name": printable(run.directory.name),
        "experiment": _experiment(run),
        "state": "finished" if run.is_finished else "not finished",
        "config": clean(run.config),
        "summary": clean(run.summary),
        "metrics": _series([row for row in run.metrics.rows if step_of(row) is not None]),
        "diagnosis": _findings(run.diagnosis.rows, metrics_page),
    }


def _experiment(run: Run) -> str:
    experiment = run.config.get("experiment")
    return experiment if isinstance(experiment, str) else printable(run.directory.parent.name)


def _series(rows: list[dict]) -> dict:
    """Each metric's value in every line; of very many lines evenly spaced ones, the last, and those that evaluate."""
    stride = math.ceil(len(rows) / MOST_POINTS)
    kept = [
        row
        for place, row in enumerate(rows)
        if stride <= 1 or place % stride == 0 or row is rows[-1] or any(key.startswith("eval/") for key in row)
    ]
    series: dict[str, list[float | None]] = {}
    for place, row in enumerate(kept):
        for key, value in row.items():
            if key != "step" and number(value) is not None:
                value = value if type(value) is int else float(f"{value:.7g}")  # what a float32 holds
                series.setdefault(key, [None] * len(kept))[place] = value
    return {"steps": [row["step"] for row in kept], "series": series}


def _findings(rows: list[dict], metrics_page: str | None) -> list[dict]:
    """The findings in the order in which they first held, each with its last sentence and its ranges of steps."""
    found: dict[str, dict] = {}
    for row in rows:
        finding, sentence, step = row.get("finding"), row.get("sentence"), step_of(row)
        if isinstance(finding, str) and isinstance(sentence, str) and step is not None:
            entry = found.setdefault(finding, {"finding": finding, "steps": []})
            entry["sentence"] = sentence
            entry["steps"].append(step)
    link = None if metrics_page is None else metrics_page + ANCHOR
    return [entry | {"steps": ranges(entry["steps"]), "link": link} for entry in found.values()]


def _token_texts(rows: list[dict], token_ids: set[int] | None) -> dict[str, list]:
    """[text, flags] by id; the flags are 1 for a special token plus 2 for one that ends a turn."""
    return {
        str(row["id"]): [row["text"], (row.get("special") is True) + 2 * (row.get("end_of_turn") is True)]
        for row in rows
        if type(row.get("id")) is int and isinstance(row.get("text"), str)
        if token_ids is None or row["id"] in token_ids
    }


def _positive(value: object) -> int | None:
    return value if type(value) is int and 0 < value < 10**9 else None


def _own_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _relative(path: Path, start: Path) -> str | None:
    """The address of `path` in a page in `start`, if there is such a file."""
    try:
        return quote(Path(os.path.relpath(path, start.resolve())).as_posix()) if path.exists() else None
    except ValueError:  # on another drive
        return None


def _replace(path: Path, text: str) -> None:
    """Write a file beside the old one, then take its place: nobody sees half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            beside.write_text(text, encoding="utf-8", errors="replace", newline="\n")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # not the one beside it
