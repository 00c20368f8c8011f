"""Published benchmarks: where the hub has them, and how their rows become rows of a task."""

import json
import string
from collections.abc import Callable
from typing import NamedTuple

# Brings a row, in place, from its published form to that of the task; returns whether it is asked
Read = Callable[[dict], bool]


class Benchmark(NamedTuple):
    title: str
    hub: str  # the source of its published form
    read: Read | None = None  # None: it has the fields of the task


def renamed(**fields: str) -> Read:
    """The reader of rows that lack fields of the task, which they have under other names: `problem="question"`."""

    def read(row: dict) -> bool:
        for name, published in fields.items():
            if name not in row and published in row:
                row[name] = row.pop(published)
        return True

    return read


def _mmlu_redux(row: dict) -> bool:
    """Only questions without an error: the corrections of the others are written in many ways."""
    row.update(answer_type="choice", answer=string.ascii_uppercase[int(row["answer"])])
    return row.get("error_type", "ok") == "ok"


def _popqa(row: dict) -> bool:
    row.update(answer_type="exact", answer=json.loads(row["possible_answers"]))
    return True


def _zebra_logic(row: dict) -> bool:
    """A grid as `{"House 1": {"Name": "Eric", ...}, ...}`; hidden solutions are written as ___."""
    names, rows = row["solution"]["header"][1:], [cells[1:] for cells in row["solution"]["rows"]]
    grid = {f"House {number}": dict(zip(names, cells, strict=True)) for number, cells in enumerate(rows, start=1)}
    row.update(question=row["puzzle"], answer_type="json", answer=json.dumps(grid))
    return not any("___" in cells for cells in rows)


# By suite: the task that asks, and its benchmarks by the names of their files without .jsonl
SUITES: dict[str, tuple[str, dict[str, Benchmark]]] = {
    "math": (
        "math",
        {
            "math500": Benchmark("MATH-500", "HuggingFaceH4/MATH-500::test"),
            "aime24": Benchmark("AIME 2024", "HuggingFaceH4/aime_2024::train"),
            "amc": Benchmark("AMC", "AI-MO/aimo-validation-amc::train"),
            "minerva": Benchmark("Minerva", "math-ai/minervamath::test", renamed(problem="question")),
            "olympiad_bench": Benchmark(
                "OlympiadBench",
                "Hothan/OlympiadBench:OE_TO_maths_en_COMP:train",
                renamed(problem="question", answer="final_answer"),
            ),
        },
    ),
    "ifeval": ("instructions", {"ifeval": Benchmark("IFEval", "google/IFEval::train")}),
    "mmlu_redux": (
        "typed_answers",
        {"mmlu_redux": Benchmark("MMLU-Redux", "edinburgh-dawg/mmlu-redux-2.0:*:test", _mmlu_redux)},
    ),
    "popqa": ("typed_answers", {"popqa": Benchmark("PopQA", "akariasai/PopQA::test", _popqa)}),
    "zebra_logic": (
        "typed_answers",
        {"zebra_logic": Benchmark("ZebraLogic", "WildEval/ZebraLogic:grid_mode:test", _zebra_logic)},
    ),
}
