"""An exercise is a folder of dojo/exercises: a page, a file to begin with, hints, a check, a solution and its reason.

page.md       `key: value` lines (title, chapter, kind, minutes), an empty line, and the text
start.py      what the reader completes or repairs; of a prediction, answer.txt
hints.md      three hints, divided by lines of ---
check.py      what is called, and what must come out: see dojo/judge.py
solution.py   a solution; of a prediction, the choice is in check.py
reason.md     why, with links
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "exercises"
KINDS = ("implement", "find the bug", "predict")
NUM_HINTS = 3


class DojoError(Exception):
    """What the reader has to change, in one sentence."""


@dataclass(frozen=True)
class Exercise:
    folder: Path

    @property
    def name(self) -> str:
        """For example 07_clipped_surrogate."""
        return self.folder.name

    @property
    def number(self) -> int:
        return int(self.name.partition("_")[0])

    @cached_property
    def _page(self) -> tuple[dict[str, str], str]:
        head, _, text = self.read("page.md").partition("\n\n")
        return dict(line.split(": ", 1) for line in head.splitlines()), text

    @property
    def facts(self) -> dict[str, str]:
        """title, chapter, kind and minutes."""
        return self._page[0]

    @property
    def text(self) -> str:
        """What the reader reads first, in Markdown."""
        return f"# {self.number}. {self.facts['title']}\n\n{self._page[1]}"

    @property
    def kind(self) -> str:
        return self.facts["kind"]

    @property
    def place(self) -> str:
        """The reader's folder; the name of a bug would give it away."""
        return f"{self.number:02}_find_the_bug" if self.kind == "find the bug" else self.name

    @property
    def answer(self) -> str:
        """The name of the file that the reader writes."""
        if self.kind == "implement":
            return f"{self.name.partition('_')[2]}.py"
        return "answer.txt" if self.kind == "predict" else "program.py"

    @property
    def start(self) -> str:
        """What that file contains at first."""
        return "write a, b or c here, and nothing else\n" if self.kind == "predict" else self.read("start.py")

    @property
    def hints(self) -> list[str]:
        return [hint.strip() for hint in self.read("hints.md").split("\n---\n")]

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


def all_exercises() -> list[Exercise]:
    """In the order of their numbers, which is that of the curriculum."""
    folders = [path for path in FOLDER.iterdir() if (path / "page.md").is_file()]
    return sorted(map(Exercise, folders), key=lambda exercise: exercise.number)


def by_chapter() -> dict[str, list[Exercise]]:
    """The chapters in the order of their first exercises."""
    found: dict[str, list[Exercise]] = {}
    for exercise in all_exercises():
        found.setdefault(exercise.facts["chapter"], []).append(exercise)
    return found


def find_exercise(number: int) -> Exercise:
    found = [exercise for exercise in all_exercises() if exercise.number == number]
    if not found:
        raise DojoError(f"there is no exercise {number}: python -m dojo lists them")
    return found[0]
