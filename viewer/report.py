"""One page for a run: its curves, its messages, and its samples with everything that the loss sees.

The page is one file that loads nothing: data, scripts and styles are inside it, and a Content-Security-Policy lets it
run these scripts only. Text of models, data sets and tools is JSON, where no tag can begin, or escaped.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from viewer.groups import experiment_of, series
from viewer.panels import heading, panels_of
from viewer.results import open_run
from viewer.runs import Run, RunError, number, ranges, step_of
from viewer.sampled_rows import Kept, describe, keep_steps

from harness.logs.headings import Panel

HERE = Path(__file__).resolve().parent
METRICS_PAGE = HERE.parent / "docs" / "metrics.md"
MOST_POINTS = 2000  # lines of metrics.jsonl in a page, which is more than a screen has columns
SHOWN_FLAGS = (
    *("model", "task", "steps", "prompts_per_step", "group_size", "max_new_tokens", "lr", "kl_weight"),
    *("beta", "pairs_per_step", "epochs"),
    *("epochs_per_step", "minibatch_size", "lag", "correction", "importance_cap", "steps_ahead", "push_every"),
    *("temperature", "seed"),
)
_UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}  # json.dumps escapes all beyond ASCII


def write_report(directory: Path, output: Path | None = None) -> Path:
    """Write the page of a run, by default report.html in `directory`, and return its path."""
    run = open_run(directory)
    path = run.directory / "report.html" if output is None else Path(output)
    if path.suffix != ".html" or path.is_dir():
        raise RunError(f"{path} cannot be the page: give the name of a file that ends in .html")
    if output is None:
        run.directory.mkdir(exist_ok=True)  # that of a kept run is only a name
    metrics_page = os.path.relpath(METRICS_PAGE, path.parent.resolve()) if METRICS_PAGE.exists() else None
    path.write_text(whole_page(run, directory, metrics_page), encoding="utf-8", errors="replace", newline="\n")
    return path


def whole_page(run: Run, directory: Path, metrics_page: str | None = None) -> str:
    """The page with samples inside it; `directory`: the run, as a command names it."""
    kept = keep_steps(run.samples, count_rows_per_step(run.config))
    return render(run, kept, f"python -m viewer {quote(str(directory))} --serve", metrics_page=metrics_page)


def live_page(run: Run, version: str) -> str:
    """The page for a server: it asks for the samples of each step, and for the version of the run's files."""
    return render(run, Kept({step: run.samples.num_rows(step) for step in run.samples.steps}), version=version)


def render(run: Run, kept: Kept, command: str = "", metrics_page: str | None = None, version: str | None = None) -> str:
    """The page, from viewer/page/ and viewer/vendor/.

    Args:
        command: that shows more samples than those that are kept.
        metrics_page: relative address of docs/metrics.md; None: the page names it only.
        version: of the run's files, for a page that is served.
    """
    import jinja2

    script = "".join(own_text(path) for path in sorted((HERE / "page").glob("*.js")))
    css, uplot_css = own_text(HERE / "page" / "report.css"), own_text(HERE / "vendor" / "uPlot.min.css")
    uplot_js = own_text(HERE / "vendor" / "uPlot.iife.min.js")
    rules = ["default-src 'none'", f"script-src {hash_of(script)} {hash_of(uplot_js)}"]
    rules += [f"style-src {hash_of(css)} {hash_of(uplot_css)}", "img-src data:"]
    rules += ["connect-src 'self'"] if version is not None else []
    rules += ["base-uri 'none'", "form-action 'none'"]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    return environment.from_string(own_text(HERE / "page" / "report.html.jinja")).render(
        **{"css": css, "script": script, "uplot_css": uplot_css, "uplot_js": uplot_js, "csp": "; ".join(rules)},
        **{"version": version, "metrics_page": metrics_page, "run": run},
        experiment=experiment_of(run),
        introduction=" ".join(_introduction(run)),
        compares=compares_groups(run.config),
        flags={name: _setting(value) for name, value in run.config.items()},
        shown_flags=[name for name in SHOWN_FLAGS if name in run.config],
        findings=_findings(run.diagnosis.rows),
        note=describe(run.samples, kept, command),
        data=_page_data(run, kept),
        chunks=sorted(kept.chunks.items()),
        has_samples=bool(kept.num_rows),
    )


def _page_data(run: Run, kept: Kept) -> str:
    """What the scripts of the page read, as JSON without any `<`, `>` or `&`."""
    of = count_rows_per_step(run.config)
    rows = [row for row in run.metrics.rows if step_of(row) is not None]
    data = {
        "finished": run.is_finished,
        "metrics": _series(rows),
        "panels": [encode_panel(*curves) for curves in panels_of(rows)],
        "titles": {"kl": _capitalised(heading("loss/kl")[1].title)},  # of measurements of tokens
        "tokenTexts": _token_texts(run.token_texts.rows, kept.token_ids),
        "steps": [
            {"step": step, "rows": kept.num_rows[step], "of": of, "prompts": kept.prompts.get(step, [])}
            for step in sorted(kept.num_rows)
        ],
    }
    return to_json(data)


def to_json(data: dict) -> str:
    """JSON without any `<`, `>` or `&`, which may be inside a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def encode_panel(panel: Panel, labels: dict[str, str]) -> dict:
    """A panel as viewer/page/ reads it."""
    floor, ceiling = panel.axis
    about = panel.about or (f"{_capitalised(panel.unit)}." if panel.unit else "")
    entry = {"title": _capitalised(panel.title), "about": about, "floor": floor, "ceiling": ceiling}
    return entry | {"isMore": panel.is_more, "scale": panel.scale, "labels": labels}


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def count_rows_per_step(config: dict) -> int | None:
    """Completions, or answers of pairs, per step, of all processes; None for a run with neither."""
    if "pairs_per_step" in config:
        return 2 * config["pairs_per_step"]
    return config["prompts_per_step"] * config["group_size"] if "prompts_per_step" in config else None


def compares_groups(config: dict) -> bool:
    """Whether advantages compare a group's completions: not with a teacher, a critic, or a mean of earlier steps."""
    return config.get("group_size", 1) > 1 and not config.keys() & {"teacher", "hint", "gae_lambda", "baseline"}


def visible(text: object) -> str:
    """The text with every invisible character written out, as the scripts of the page do it.

    >>> visible("a\\u202eb").encode("ascii", "xmlcharrefreplace")
    b'a&#8249;U+202E&#8250;b'
    """
    shown = (c if c.isprintable() or c in "\n\t" else f"\u2039U+{ord(c):04X}\u203a" for c in str(text))
    return "".join(shown)


def _setting(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _introduction(run: Run) -> list[str]:
    """The run in sentences: its policy, data and duration, the accuracy before and after, and the costs."""
    config, summary = run.config, run.summary or {}
    done, planned, model = max(series(run, "step").values(), default=0), config.get("steps"), config.get("model")
    policy = {None: "a policy", "new": "a new policy"}.get(model, f"the policy {model}")
    task = f" on the task {config['task']}" if config.get("task") and "pairs_per_step" not in config else ""
    is_paired = "pairs_per_step" in config
    data = f" {'on the pairs' if is_paired else 'with the questions'} of {config['data']}" if config.get("data") else ""
    steps = f"{done} of {planned} steps" if planned and done != planned else f"{done} step{'s' if done != 1 else ''}"
    each = f", each with {config['prompts_per_step']} questions and" if "prompts_per_step" in config else ""
    size = config.get("group_size")
    each += f" {size} completion{'s' if size != 1 else ''} of every question" if each else ""
    sentences = [f"{experiment_of(run)} trained {policy}{task}{data} for {steps}{each}."]
    sentences += [] if run.is_finished else ["The run is not finished."]
    count = number(summary.get("num_questions"))
    answers = {"greedy": f"greedy answers to {count or ''} held-out questions".replace("  ", " ")}
    for kind, which in (answers | {"sampled": "sampled answers, eight to each question"}).items():
        points = series(run, key := f"eval/{kind}/accuracy")
        if not points and (share := number(summary.get(key))) is not None:  # of imitation/sft
            points = {done: share}
        ends = sorted({min(points), max(points)}) if points else []
        times = [f"after {step} steps" if step else "before training" for step in ends]
        shares = [f"{100 * points[step]:.3g} % {time}" for step, time in zip(ends, times, strict=True)]
        if shares:
            right = " and ".join(shares).replace("%", "% were right", 1)
            sentences.append(f"Of its {which}, {right}.")
    if seconds := number(summary.get("seconds")):
        time = f"{seconds:.4g} s" if seconds < 90 else f"{seconds / 60:.1f} min"
        sentences.append(f"Training took {time}.")
    if peak := number(summary.get("peak_memory_bytes")):
        sentences.append(f"It needed at most {peak / 1e9:.3g} GB of memory.")
    return sentences


def _series(rows: list[dict]) -> dict:
    """Each metric's value in every line. Very many lines are thinned evenly, evaluations by themselves."""
    evaluations = [place for place, row in enumerate(rows) if any(key.startswith("eval/") for key in row)]
    kept = [rows[place] for place in sorted({*_evenly(range(len(rows))), *_evenly(evaluations)})]
    series: dict[str, list[float | None]] = {}
    for place, row in enumerate(kept):
        for key, value in row.items():
            if key != "step" and number(value) is not None:
                if key not in series:
                    series[key] = [None] * len(kept)
                series[key][place] = value if type(value) is int else float(f"{value:.7g}")  # float32's digits
    return {"steps": [row["step"] for row in kept], "series": series}


def _evenly(places: Sequence[int]) -> list[int]:
    """At most MOST_POINTS of the places, and the last."""
    stride = max(1, math.ceil(len(places) / MOST_POINTS))
    return [*places[::stride], *places[-1:]]


def _findings(rows: list[dict]) -> list[dict]:
    """The findings in the order of their first steps, each with its last sentence and its ranges of steps."""
    found: dict[str, dict] = {}
    for row in rows:
        entry = found.setdefault(row["finding"], {"finding": row["finding"], "steps": []})
        entry["sentence"] = row["sentence"]
        entry["steps"].append(row["step"])
    return [entry | {"ranges": ranges(entry["steps"])} for entry in found.values()]


def _token_texts(rows: list[dict], token_ids: set[int]) -> dict[str, list]:
    """[text, flags] by id; the flags are 1 for a special token plus 2 for one that ends a turn."""
    return {
        str(row["id"]): [row["text"], row.get("special", False) + 2 * row.get("end_of_turn", False)]
        for row in rows
        if not token_ids or row["id"] in token_ids  # a server's page needs all
    }


def own_text(path: Path) -> str:
    """A file of this repository."""
    return path.read_text(encoding="utf-8")


def hash_of(text: str) -> str:
    """The source of a script or style that a Content-Security-Policy allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
