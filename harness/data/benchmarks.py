"""Published benchmarks: where the hub has them, and their fields."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    title: str
    hub: str  # the source of its published form
    renamed: tuple[tuple[str, str], ...] = ()  # fields of the published form, and the task's names for them


# By suite: the task that asks, and its benchmarks by the names of their files without .jsonl
SUITES: dict[str, tuple[str, dict[str, Benchmark]]] = {
    "math": (
        "math",
        {
            "math500": Benchmark("MATH-500", "HuggingFaceH4/MATH-500::test"),
            "aime24": Benchmark("AIME 2024", "HuggingFaceH4/aime_2024::train"),
            "amc": Benchmark("AMC", "AI-MO/aimo-validation-amc::train"),
            "minerva": Benchmark("Minerva", "math-ai/minervamath::test", (("question", "problem"),)),
            "olympiad_bench": Benchmark(
                "OlympiadBench",
                "Hothan/OlympiadBench:OE_TO_maths_en_COMP:train",
                (("question", "problem"), ("final_answer", "answer")),
            ),
        },
    ),
    "ifeval": ("instructions", {"ifeval": Benchmark("IFEval", "google/IFEval::train")}),
}
