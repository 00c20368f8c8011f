"""The viewer draws a run."""

import json

import pytest

import viewer.curve


@pytest.mark.parametrize(("component", "drawn"), [("correct", "reward/correct"), ("short", "reward/total")])
def test_a_run_is_drawn_by_accuracy_or_else_by_its_total_reward(tmp_path, monkeypatch, component, drawn):
    """And what its task describes has a panel, also if it is called like one of our own metrics, or negative."""
    lines = []
    draw_line = viewer.curve._line
    monkeypatch.setattr(
        "viewer.curve._line",
        lambda axes, entries, key, **style: lines.append(key) or draw_line(axes, entries, key, **style),
    )
    described = {"completion/length": 3, "completion/length_right": 3, "completion/length_of_proof": -1}
    rows = [{"step": step, f"reward/{component}": 0.5, "reward/total": 0.7, **described} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert viewer.curve.draw_curve(tmp_path).stat().st_size > 1000
    assert lines[0] == drawn
    assert [key for key in lines if key.startswith("completion/")] == [
        "completion/length",
        "completion/length_of_proof",
    ]


def test_kinds_of_questions_have_accuracies_and_no_shares(tmp_path, monkeypatch):
    """What is the same in every evaluation says nothing of the answers."""
    lines, draw_line = [], viewer.curve._line
    monkeypatch.setattr(
        "viewer.curve._line",
        lambda axes, entries, key, **style: lines.append(key) or draw_line(axes, entries, key, **style),
    )
    rows = [{"reward/total": 0.5, "completion/one_hop": 0.5, "completion/called": 0.5}]
    for called in (0.2, 0.9):
        shares = {"eval/greedy/one_hop": 0.3, "eval/greedy/called": called, "eval/greedy/unknown_calls": 0.0}
        rows.append(shares | {f"eval/greedy/accuracy_{name}": 0.5 for name in ("one_hop", "called")})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": 1} | row) + "\n" for row in rows))
    viewer.curve.draw_curve(tmp_path)
    assert "eval/greedy/accuracy_one_hop" in lines
    assert "completion/called" in lines
    assert not {"completion/one_hop", "eval/greedy/accuracy_called", "eval/greedy/accuracy_unknown_calls"} & set(lines)
