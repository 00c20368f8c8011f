"""Draw what runs have written into their directories. Imports nothing of the training code."""

from pathlib import Path


def draw_run(directory: Path) -> None:
    """Write `curve.png` and `report.html` into a run's directory."""
    from viewer.curve import draw_curve
    from viewer.report import write_report

    draw_curve(directory)
    write_report(directory)
