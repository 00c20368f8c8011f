"""Committed results: what is kept of runs comes back, and no path of a machine is in it."""

import json
import re
from pathlib import Path

import pytest

from viewer.compare import main as compare
from viewer.results import ROOT, keep_runs, main, read_json, read_runs, relative_paths, write_json

ROWS = [
    {"step": 0, "eval/greedy/accuracy": 0.23828125},
    {"step": 1, "loss/total": 4.470348358154297e-08, "memory/peak_bytes": 642572288, "policy/ratio": 1.0000312},
    {"step": 2, "loss/total": -123456.78, "loss/kl": float("nan")},
    {"step": 2, "eval/greedy/accuracy": 0.984375},
]


@pytest.fixture
def make_run(tmp_path):
    def make(name: str, rows: list[dict], **settings) -> Path:
        place = tmp_path / "runs" / "experiment_base" / name
        place.mkdir(parents=True, exist_ok=True)
        config = {"experiment": "experiment_base", "commit": "abc", "runs_dir": str(tmp_path / "runs"), **settings}
        (place / "config.json").write_text(json.dumps(config))
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / "summary.json").write_text(json.dumps({"seconds": 1.5, "commit": "abc"}))
        return place

    return make


def test_runs_come_back_with_five_digits(make_run, tmp_path):
    folder = tmp_path / "results"
    main([str(folder), str(make_run("b", ROWS, model=str(tmp_path / "runs/x/final"))), str(make_run("a", ROWS[:1]))])
    runs = read_runs(folder)
    assert list(runs) == ["a", "b"]
    assert repr(runs["b"].metrics.rows) == repr([
        {"step": 0, "eval/greedy/accuracy": 0.23828},
        {"step": 1, "loss/total": 4.4703e-08, "memory/peak_bytes": 642572288, "policy/ratio": 1.0000312},
        {"step": 2, "loss/total": -123460.0, "loss/kl": float("nan")},
        {"step": 2, "eval/greedy/accuracy": 0.98438},
    ])  # fmt: skip
    assert runs["b"].summary == {"seconds": 1.5, "commit": "abc"}
    assert (runs["b"].config["model"], runs["b"].config["runs_dir"]) == ("runs/x/final", "runs")
    written = [(folder / name).read_bytes() for name in ("metrics.csv", "runs.json")]
    keep_runs(folder, [])
    assert written == [(folder / name).read_bytes() for name in ("metrics.csv", "runs.json")]


def test_a_run_made_again_replaces_its_own_rows_only(make_run, tmp_path):
    folder = tmp_path / "results"
    main([str(folder), str(make_run("a", ROWS)), str(make_run("b", ROWS))])
    main([str(folder), str(make_run("a", ROWS[::-1], seed=3)), "--columns", "loss/total", "--every", "2"])
    runs = read_runs(folder)
    assert runs["a"].metrics.rows == [{"step": 2}, {"step": 2, "loss/total": -123460.0}, {"step": 0}]
    assert len(runs["b"].metrics.rows) == len(ROWS)
    assert (runs["a"].config["seed"], "seed" in runs["b"].config) == (3, False)


def test_no_path_of_the_machine_is_written(tmp_path):
    found = {
        f"{ROOT}/data/math_tasks.jsonl": "data/math_tasks.jsonl",
        "/x/runs/a": "runs/a",
        "--model=/x/runs/experiment_base/a/final": "--model=runs/experiment_base/a/final",
        "python /opt/venv/bin/python '/etc/y/z.json'": "python bin/python 'y/z.json'",
        "http://127.0.0.1:8000/v1 a/b </think> /no_think": "http://127.0.0.1:8000/v1 a/b </think> /no_think",
    }
    assert relative_paths([*found], "/x/runs") == [*found.values()]
    write_json(tmp_path / "a.json", {"x": 1 / 3, "n": 1, "path": f"{ROOT}/data"}, entry="first")
    write_json(tmp_path / "a.json", {"x": ["y" * 10] * 20_000}, entry="second")
    text = (tmp_path / "a.json").read_text()
    assert text.splitlines()[1] == '"first":{"x":0.33333333,"n":1,"path":"data"},'
    assert json.loads(text)["second"]["x"][-1] == "y" * 10
    assert read_json(tmp_path / "a.json", "first") == {"x": 0.33333333, "n": 1, "path": "data"}
    assert read_json(tmp_path / "a.json", "third") == read_json(tmp_path / "b.json", "first") == {}


def test_runs_of_both_kinds_are_compared(make_run, tmp_path, capsys):
    rows = [{"step": step, "reward/correct": 0.5, "time/step": 1.0} for step in range(1, 7)]
    folder, real = tmp_path / "results", make_run("seed1", rows)
    main([str(folder), str(make_run("seed0", rows)), str(make_run("b", rows))])
    for argument in (folder, f"{folder}/*", f"{tmp_path}/res*/*"):
        compare([str(argument), str(real), "--output", str(tmp_path / "a.png")])
        assert re.findall(r"^(seed\*|b|  2 runs)", capsys.readouterr().out, re.MULTILINE) == ["b", "seed*", "  2 runs"]
    with pytest.raises(SystemExit, match=r"^error: \S+/results holds no run seed9, but for example b, seed0$"):
        compare([f"{folder}/seed9"])
