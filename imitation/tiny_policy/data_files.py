"""Writing the bundled data files, for the scripts beside this file."""

import json
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "data"


def write_rows(files: dict[str, list[dict]]) -> None:
    """Write each file's rows, by its name without .jsonl."""
    for name, rows in files.items():
        path = DATA / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")
