"""Published benchmarks: where the hub has them, and how their rows become rows of a task."""

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
}
