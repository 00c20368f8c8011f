"""Comparing runs: how they form groups, the table and the figure; a single run; and the data that are kept."""

import json
import re
import shlex
from pathlib import Path
from statistics import fmean

import matplotlib
import pytest
from matplotlib.figure import Figure

import viewer.bands
import viewer.curve
from viewer.compare import main
from viewer.groups import plain, read_groups
from viewer.report import write_report
from viewer.results import keep_runs, read_json, read_runs, relative_paths, write_json
from viewer.results import main as keep
from viewer.table import Z, print_table, wilson

from harness.base.places import in_experiments

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiment_base" / "results"
KEPT = read_runs(RESULTS)
SUMMARIES = [KEPT[f"seed{seed}"].summary for seed in range(5)]


@pytest.fixture
def make_run(tmp_path):
    """A run with the first `lines` lines of a committed run, or with its own rows."""

    def make(name: str, lines: int = 12, rows: list | None = None, summary: dict | None = None, **settings) -> Path:
        place = tmp_path / "runs" / "experiment_base" / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(KEPT["seed0"].config | settings))
        rows = KEPT["seed0"].metrics.rows[:lines] if rows is None else rows
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if summary:
            (place / "summary.json").write_text(json.dumps(summary))
        return place

    return make


@pytest.fixture
def table(monkeypatch, capsys):
    """The printed table for these arguments, on a wide terminal."""

    def show(*arguments: Path | str, width: int = 300) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(*read_groups([str(argument) for argument in arguments]))
        return capsys.readouterr().out

    return show


def test_runs_are_compared_in_the_panels_asked_for(tmp_path, capsys):
    picture = tmp_path / "a.svg"
    groups = [f"five={RESULTS}/seed*", f"one={RESULTS}/broken_mask"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        main([*groups, "--panels", "reward/correct", "loss/grad_norm", "--output", str(picture)])
    drawn = picture.read_text(encoding="utf-8")
    assert all(text in drawn for text in ("five (5 runs)", "one (1 run)", "sampled accuracy", "norm of the gradient"))
    assert f"figure: {picture}" in capsys.readouterr().out


def test_seeds_are_a_row_with_mean_lowest_and_highest(table):
    narrow = table(f"{RESULTS}/*", width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "\u2026" not in narrow  # nothing is cut off
    text = table(f"{RESULTS}/*")
    (row,) = re.findall(r"^seed\* .*", text, re.MULTILINE)
    forms = {"accuracy_after": ".3f", "seconds": ".0f", "tokens_per_second": ".0f", "peak_memory_bytes": ".2f"}
    for key, form in forms.items():
        values = [summary[key] / (1e9 if "bytes" in key else 1) for summary in SUMMARIES]
        assert f" {fmean(values):{form}} ({min(values):{form}}-{max(values):{form}})" in row
    for name in [*(name for name in KEPT if "seed" not in name), "second_policy_seed0"]:
        accuracy = KEPT[name].summary["accuracy_after"]
        low, high = wilson(accuracy, 256)
        assert re.search(rf"^{name} .* {accuracy:.3f} \[{low:.3f}-{high:.3f}\]", text, re.MULTILINE)


@pytest.mark.parametrize(("share", "count"), [(0.0, 256), (61 / 256, 256), (1.0, 10)])
def test_the_interval_is_that_of_wilson(share, count):
    """At its bounds b the share is Z standard errors away, with the standard error of a share of b."""
    for bound in wilson(share, count):
        assert (share - bound) ** 2 == pytest.approx(Z**2 * bound * (1 - bound) / count, abs=1e-12)


def test_tables_are_printed_as_before(make_run, table, tmp_path):
    """In tables.txt: unknown numbers of questions, differing settings and files, unfinished and unequal runs."""
    first, last = KEPT["seed0"].metrics.rows[0], KEPT["seed0"].metrics.rows[-1] | {"eval/greedy/accuracy": 0.984}
    files = {name: {"data": "rows.jsonl", "sources": {"data": {"content": name * 64}}} for name in "ab"}
    a, b = (make_run(name, rows=[first, last | {"eval/sampled/accuracy": sampled}], lr=lr, threads=7, **files[name])
            for name, lr, sampled in (("a", 5e-5, 0.893), ("b", 2e-4, 0.756)))  # fmt: skip
    finished = make_run("seed1", lines=90, seed=1, summary=KEPT["seed0"].summary)
    cut_off = make_run("seed0", lines=11, seed=0)
    with (cut_off / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss/to')
    early = make_run("early", lines=10)
    (tmp_path / "empty").mkdir()
    other, two = make_run("other", task="qa", machine="Linux x86_64, 2 thread(s)"), make_run("two", processes=2)
    more = make_run("c", eval_data=None), make_run("d", sources={}, seed=1)
    compared = [
        (make_run("as_recorded"),), (make_run("fewer", eval_prompts=200),), (make_run("unknown", eval_prompts=None),),
        (a, b), (cut_off, finished), (cut_off,), (early, early), (a, other, tmp_path / "empty"), (two, early), more,
    ]  # fmt: skip
    lines = "\n".join(table(*runs) for runs in compared).replace(str(tmp_path), "...").splitlines()
    printed = "".join(f"{line.rstrip()}\n" for line in lines)
    (tmp_path / "tables.txt").write_text(printed, encoding="utf-8")  # to copy, if it should be another one
    assert printed == Path(__file__).with_name("tables.txt").read_text(encoding="utf-8")


def test_runs_without_a_name_are_grouped_by_settings(make_run):
    for number, settings in enumerate([{}, {"kl_weight": 0.0}]):
        for seed in (0, 1):
            same = {"micro_batch_size": 64 + seed, "model": f"/{seed}", "sources": {"model": {"content": "a checksum"}}}
            make_run(f"2026010{number}-12000{seed}-seed{seed}", seed=seed, threads=1 + seed, **same, **settings)
    again = make_run("20260103-120000-seed0", **same | {"seed": 0})  # a group contains a seed once
    groups, _ = read_groups([f"{again.parent}/*"] * 2)  # and a run once
    assert [(label, len(runs)) for label, runs in groups.items()] == [
        ("experiment_base, kl_weight=0.02", 2),
        ("experiment_base, kl_weight=0.0", 2),
        (str(again), 1),
    ]


def test_runs_with_equal_names_and_other_settings_are_apart(make_run, tmp_path):
    """Whether they are kept or not."""
    places = [make_run(f"seed{seed}", seed=seed, lr=1e-3 if seed > 1 else 5e-5) for seed in (0, 1, 2, 10)]
    groups, _ = read_groups([f"{make_run('a').parent}/*"])
    assert {label: [run.directory.name for run in runs] for label, runs in groups.items()} == {
        "experiment_base/a": ["a"],
        "experiment_base/seed*, lr=5e-05": ["seed0", "seed1"],
        "experiment_base/seed*, lr=0.001": ["seed2", "seed10"],
    }
    keep([str(tmp_path / "results"), str(places[0])])
    for argument in ("results", "results/*", "res*/*"):
        assert [len(runs) for runs in read_groups([f"{tmp_path}/{argument}", str(places[1])])[0].values()] == [2]


@pytest.mark.parametrize("experiment", ["experiment_base", "policy_gradients/gspo"])  # the second has no kept runs
def test_seeds_of_a_new_prefix_change_no_committed_file(make_run, load_script, tmp_path, monkeypatch, experiment):
    for seed in (0, 1):
        make_run(f"mine{seed}", lines=90, summary=KEPT["seed0"].summary, minibatch_size=32, epochs_per_step=4)
    (tmp_path / "runs/experiment_base").rename(tmp_path / "runs" / Path(experiment).name)
    committed = [path for path in (ROOT / experiment).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    before, legends = [path.read_bytes() for path in committed], []
    monkeypatch.setattr(viewer.bands, "_add_legend", lambda figure: legends.append(
        figure.axes[0].get_legend_handles_labels()[1]) or 0.9)  # fmt: skip
    flags = ["--prefix", "mine", "--seeds", "0", "1", "--runs-dir", str(tmp_path / "runs")]
    load_script("benchmarks/seeds.py").main([experiment, *flags])
    assert (tmp_path / "runs" / Path(experiment).name / "mine_curve.png").stat().st_size > 1000
    assert [path.read_bytes() for path in committed] == before
    assert f"{Path(experiment).name}/mine*, updates per step: 16 (2 runs)" in legends[0]
    assert "experiment_base, updates per step: 1 (5 runs)" in legends[0]


def test_names_control_neither_terminal_nor_figure(make_run, monkeypatch, capsys, tmp_path):
    hostile = "[red]x\x1b[31m\u202e$\\frac{$"
    run = make_run(hostile)
    main([str(run), f"_[b]={run}", "--panels", "loss/total", "--output", str(tmp_path / "a.svg"), "--each"])
    printed = capsys.readouterr().out
    assert plain(hostile) in printed
    assert not set(printed) & {"\x1b", "\u202e"}
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_each_run_has_a_row_and_panels_need_no_names(capsys, tmp_path):
    runs = [f"{RESULTS}/seed0", f"again={RESULTS}/seed[01]", f"{ROOT}/experiment_drgrpo/results/seed0"]
    main([*runs, "--each", "--output", str(tmp_path / "a.png")])
    found = re.findall(r"^experiment_(\w+/\w+)", capsys.readouterr().out, re.MULTILINE)
    assert found[:3] == ["base/seed0", "drgrpo/seed0", "base/seed1"]


def test_a_line_is_the_mean_in_a_band_of_all_runs():
    axes = Figure().subplots()
    viewer.bands._draw_band(axes, [{1: 1.0, 2: 0.0, 3: 5.0}, {1: 3.0, 2: 6.0}, {1: 2.0, 2: 3.0}], "a", 0)
    assert axes.lines[0].get_xydata().tolist() == [[1, 2], [2, 3]]  # no step that only one run has
    corners = axes.collections[0].get_paths()[0].vertices.tolist()
    assert {tuple(corner) for corner in corners} == {(1, 1), (2, 0), (2, 6), (1, 3)}
    assert viewer.bands._smooth({1: 1.0, 2: 2.0, 5: 6.0}) == {1: 1.0, 2: 1.5, 5: 3.0}


def test_figures_of_the_pages_are_made_from_runs_that_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    figures = {}
    for page in sorted(in_experiments("README.md")):
        text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
        for command in re.findall(r"python -m viewer\.compare ([^\n#]*--output [^\n#]*)", text):
            *words, _, figure = shlex.split(command)
            groups, left_out = read_groups(words[: words.index("--panels")])
            keys = [[{key for row in run.metrics.rows for key in row} for run in runs] for runs in groups.values()]
            logged = set().union(*(set.intersection(*of_runs) for of_runs in keys))  # a group can lack a metric
            assert set(words[words.index("--panels") + 1 :]) <= logged | {"loss/kl"}, figure
            assert not left_out
            assert (ROOT / figure).parent == page.parent
            figures[figure] = (ROOT / figure).is_file()
    assert len(figures) > 4
    assert all(figures.values())


# One run --------------------------------------------------------------------------------------------------------------


def test_kinds_of_questions_have_accuracies_and_no_shares(tmp_path, monkeypatch):
    keys, draw_line = [], viewer.curve._line
    monkeypatch.setattr("viewer.curve._line", lambda *args, **style: keys.append(args[2]) or draw_line(*args, **style))
    rows = [{"reward/total": 0.5, "completion/one_hop": 0.5, "completion/called": 0.5}]
    for called in (0.2, 0.9):
        shares = {"eval/greedy/one_hop": 0.3, "eval/greedy/called": called, "eval/greedy/unknown_calls": 0.0}
        rows.append(shares | {f"eval/greedy/accuracy_{name}": 0.5 for name in ("one_hop", "called")})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": 1} | row) + "\n" for row in rows))
    assert viewer.curve.draw_curve(tmp_path).stat().st_size > 1000
    assert keys[0] == "reward/total"  # there is no accuracy
    assert {"eval/greedy/accuracy_one_hop", "completion/called"} < {*keys}
    axes = Figure().subplots()
    for steps in (1, 2, 3):  # two points are no trend
        draw_line(axes, [{"step": step, "eval/x": 1} for step in range(steps)], "eval/x")
    assert [line.get_linestyle() for line in axes.lines] == ["None", "None", "-"]
    shown = viewer.curve._panels([{"reward/total": 0, "completion/called": 0.5, "completion/failed_calls": 0.5}])
    assert [panel.title for panel, _ in shown] == ["reward", "share of completions", "mean number per completion"]
    assert not {"completion/one_hop", "eval/greedy/accuracy_called", "eval/greedy/accuracy_unknown_calls"} & {*keys}


def test_a_metric_has_one_title_wherever_it_is_shown(make_run, tmp_path):
    """In the picture and the page of its run, in a comparison, and in the colours of tokens."""
    run = make_run("a", lines=40)
    of_picture = viewer.curve._panels(KEPT["seed0"].metrics.rows)
    (title,) = {panel.title for panel, labels in of_picture if "loss/kl" in labels}
    page = json.loads(re.search(r'id="run-data">(.*?)</script>', write_report(run).read_text(encoding="utf-8"))[1])
    of_page = {panel["title"] for panel in page["panels"] if "loss/kl" in panel["labels"]}
    assert of_page == {page["titles"]["kl"]} == {title}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        main([str(run), "--panels", "loss/kl", "memory/peak_bytes", "--output", str(tmp_path / "a.svg")])
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert f"{title} (nats per token)" in drawn
    assert "memory (GB)" in drawn


# Committed results ----------------------------------------------------------------------------------------------------

ROWS = [
    {"step": 0, "eval/greedy/accuracy": 0.23828125},
    {"step": 1, "loss/total": 4.470348358154297e-08, "memory/peak_bytes": 642572288, "policy/ratio": 1.0000312},
    {"step": 2, "loss/total": -123456.78, "loss/kl": float("nan")},
    {"step": 2, "eval/greedy/accuracy": 0.984375},
]


def test_runs_come_back_with_five_digits_and_a_run_made_again_replaces_its_own_rows(make_run, tmp_path):
    folder, own = tmp_path / "results", {"summary": {"seconds": 1.5, "commit": "abc"}, "commit": "abc"}
    own |= {"runs_dir": str(tmp_path / "runs"), "model": str(tmp_path / "runs/x/final")}
    keep([str(folder), str(make_run("b", rows=ROWS, **own)), str(make_run("a", rows=ROWS[:1], **own))])
    runs = read_runs(folder)
    assert list(runs) == ["a", "b"]
    assert repr(runs["b"].metrics.rows) == repr([
        {"step": 0, "eval/greedy/accuracy": 0.23828},
        {"step": 1, "loss/total": 4.4703e-08, "memory/peak_bytes": 642572288, "policy/ratio": 1.0000312},
        {"step": 2, "loss/total": -123460.0, "loss/kl": float("nan")},
        {"step": 2, "eval/greedy/accuracy": 0.98438},
    ])  # fmt: skip
    assert json.loads((folder / "runs.json").read_text())["b"]["summary"] == {"seconds": 1.5}
    assert {"seconds": 1.5, "commit": "abc"}.items() <= runs["b"].summary.items()
    assert (runs["b"].config["model"], runs["b"].config["runs_dir"]) == ("runs/x/final", "runs")
    written = [(folder / name).read_bytes() for name in ("metrics.csv", "runs.json")]
    keep_runs(folder, [])
    assert written == [(folder / name).read_bytes() for name in ("metrics.csv", "runs.json")]
    again = make_run("a", rows=ROWS[::-1], seed=3, **own)
    keep([str(folder), str(again), "--columns", "loss/total", "--every", "2"])
    runs = read_runs(folder)
    assert runs["a"].metrics.rows == [{"step": 2}, {"step": 2, "loss/total": -123460.0}, {"step": 0}]
    assert (len(runs["b"].metrics.rows), runs["a"].config["seed"]) == (len(ROWS), 3)


def test_no_path_of_the_machine_is_written(tmp_path):
    found = {
        f"{ROOT}/data/math_tasks.jsonl": "data/math_tasks.jsonl",
        "--model=/x/runs/experiment_base/a/final": "--model=runs/experiment_base/a/final",
        "python /opt/venv/bin/python '/etc/y/z.json'": "python bin/python 'y/z.json'",
        "http://127.0.0.1:8000/v1 a/b </think> /no_think": "http://127.0.0.1:8000/v1 a/b </think> /no_think",
    }
    assert relative_paths([*found], "/x/runs") == [*found.values()]
    write_json(tmp_path / "a.json", {"x": 1 / 3, "n": 1, "path": f"{ROOT}/data"}, entry="first")
    write_json(tmp_path / "a.json", {"x": ["y" * 10] * 20_000}, entry="second")
    assert (tmp_path / "a.json").read_text().splitlines()[1] == '"first":{"x":0.33333333,"n":1,"path":"data"},'
    assert read_json(tmp_path / "a.json", "second")["x"][-1] == "y" * 10
    assert read_json(tmp_path / "a.json", "third") == read_json(tmp_path / "b.json", "first") == {}
