"""The tables of decisions in the docstrings of tasks."""

import re
from collections.abc import Iterator
from types import ModuleType


def decisions(task: ModuleType, num_columns: int = 2) -> Iterator[tuple[str, str, int]]:
    """For each answer in the table: the first column, the answer, and the index of its column (0: right)."""
    for line in task.__doc__.splitlines():
        first, *columns = [re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:-1]] or [[]]
        if first and len(columns) >= num_columns:
            for index, answers in enumerate(columns[:num_columns]):
                yield from ((first[0], answer, index) for answer in answers)


def tagged(answer: str) -> str:
    """A completion with this answer; an answer with tags is already complete."""
    return answer if "<" in answer else f"<answer>{answer}</answer>"
