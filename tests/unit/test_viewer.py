"""`viewer.compare` draws committed runs, with the requested panels."""

from pathlib import Path

import pytest

from viewer.compare import main

RESULTS = Path(__file__).resolve().parents[2] / "experiment_base" / "results"


def test_runs_are_compared_in_the_panels_asked_for(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("viewer.compare._draw_band", lambda axes, curves, label, color: drawn.append((label, curves)))
    picture = tmp_path / "a.png"
    groups = [f"five={RESULTS}/seed*", f"one={RESULTS}/broken_mask"]
    main([str(picture), *groups, "--panels", "reward/correct", "loss/grad_norm"])
    assert [(label, len(curves)) for label, curves in drawn] == [("five", 5), ("one", 1)] * 2
    assert all(len(curve) == 80 for _, curves in drawn for curve in curves)
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["x=nowhere/*"]])
def test_what_cannot_be_drawn_is_reported_in_a_sentence(tmp_path, arguments):
    with pytest.raises(SystemExit, match=r"^error: .*LABEL=RUN_DIRECTORIES"):
        main([str(tmp_path / "a.png"), *arguments])
