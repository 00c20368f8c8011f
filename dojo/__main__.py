"""Thirty exercises that check themselves: write a function, find a bug, predict a curve.

    python -m dojo                   # all exercises, and which you have solved
    python -m dojo 7                 # begin: dojo_work/07_.../ gets a page and a file
    python -m dojo 7 --check         # judge the file
    python -m dojo 7 --hint          # one hint, then one more: there are three
    python -m dojo 7 --solution      # what a solution changes, why, and where to read on

For teachers:

    python -m dojo --export class    # all exercises, without hints and solutions
    python -m dojo --grade answers   # a table, of a folder with a folder like dojo_work for each student

Nothing leaves this machine. An answer runs in a process of its own, with limits. Exit status: 0, 1 for a wrong answer,
2 if something has to be changed first.
"""

import csv
import difflib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.table import Table

from dojo.exercise import NUM_HINTS, DojoError, Exercise, all_exercises, by_chapter, find_exercise

PROGRESS = "progress.json"


@dataclass(frozen=True)
class Config:
    number: tyro.conf.Positional[int | None] = None  # of an exercise
    check: bool = False  # judge your answer
    hint: bool = False  # show the next hint
    solution: bool = False  # show a solution, and the reason
    work: Path = Path("dojo_work")  # your own directory
    export: Path | None = None  # write all exercises for a class
    grade: Path | None = None  # judge the answers of a class


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    config = tyro.cli(Config, args=arguments, description=__doc__, prog="python -m dojo")
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    try:
        if config.export or config.grade:
            export(config.export, console) if config.export else grade(config.grade, console)
            return 0
        if config.number is None:
            if config.check or config.hint or config.solution:
                raise DojoError("name an exercise: python -m dojo 1 --check")
            list_exercises(config.work, console)
            return 0
        exercise = find_exercise(config.number)
        if config.check:
            return 0 if check(exercise, config.work, console) else 1
        if config.hint:
            show_hint(exercise, config.work, console)
        elif config.solution:
            show_solution(exercise, config.work, console)
        else:
            begin(exercise, config.work, console)
    except (DojoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


# The reader's directory -----------------------------------------------------------------------------------------------


def read_progress(work: Path) -> dict[str, dict]:
    """Of each exercise by its name: whether it is `solved`, and how many `hints` were shown."""
    path = work / PROGRESS
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise DojoError(f"{path} is damaged ({error}): correct it, or delete it to begin again") from error


def note(work: Path, exercise: Exercise, **values: bool | int) -> None:
    progress = read_progress(work)
    progress[exercise.name] = progress.get(exercise.name, {}) | values
    work.mkdir(parents=True, exist_ok=True)
    (work / PROGRESS).write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")


def list_exercises(work: Path, console: Console) -> None:
    progress, exercises = read_progress(work), all_exercises()
    solved = [exercise for exercise in exercises if progress.get(exercise.name, {}).get("solved")]
    for chapter, some in by_chapter().items():
        table = Table(title=chapter, title_justify="left", title_style="bold", box=None, show_header=False, width=96)
        for column in ({"width": 3}, {"width": 3, "justify": "right"}, {"ratio": 1}, {"width": 13}, {"width": 8}):
            table.add_column(**column)
        for exercise in some:
            mark = "[green]x[/]" if exercise in solved else "-"
            facts = exercise.facts
            table.add_row(mark, str(exercise.number), facts["title"], facts["kind"], f"{facts['minutes']} min")
        console.print(table)
    console.print(
        f"\n{len(solved)} of {len(exercises)} solved. Begin one: python -m dojo {next_number(exercises, solved)}"
    )


def next_number(exercises: list[Exercise], solved: list[Exercise]) -> int:
    return next((exercise.number for exercise in exercises if exercise not in solved), 1)


def begin(exercise: Exercise, work: Path, console: Console) -> None:
    """Write the page and the file, unless the reader already has one."""
    folder = work / exercise.place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(exercise.text, encoding="utf-8")
    answer = folder / exercise.answer
    if not answer.exists():
        answer.write_text(exercise.start, encoding="utf-8")
    console.print(Markdown(exercise.text))
    console.print(f"\nYour file: {answer}\nCheck it:  python -m dojo {exercise.number} --check")


def find_answer(exercise: Exercise, folder: Path) -> Path:
    answer = folder / exercise.place / exercise.answer
    if not answer.is_file():
        raise DojoError(f"there is no {answer}: begin with python -m dojo {exercise.number}")
    return answer


def check(exercise: Exercise, work: Path, console: Console) -> bool:
    from dojo.judge import judge  # only here: torch takes seconds

    verdict = judge(exercise, find_answer(exercise, work))
    if not verdict.is_right:
        console.print("[bold red]not yet[/]")
        console.print(f"{verdict.sentence}\nA hint: python -m dojo {exercise.number} --hint", markup=False)
        return False
    note(work, exercise, solved=True)
    console.print(f"[bold green]right[/]\nWhy, and where to read on: python -m dojo {exercise.number} --solution")
    return True


def show_hint(exercise: Exercise, work: Path, console: Console) -> None:
    shown = min(read_progress(work).get(exercise.name, {}).get("hints", 0) + 1, NUM_HINTS)
    note(work, exercise, hints=shown)
    for number, hint in enumerate(exercise.hints[:shown], start=1):
        console.print(Markdown(f"**Hint {number} of {NUM_HINTS}.** {hint}"))
    if shown == NUM_HINTS:
        console.print(f"\nThat was the last one: python -m dojo {exercise.number} --solution")


def show_solution(exercise: Exercise, work: Path, console: Console) -> None:
    if exercise.kind != "predict":
        before, after = exercise.start.splitlines(), exercise.read("solution.py").splitlines()
        lines = list(difflib.unified_diff(before, after, "start", "solution", lineterm="", n=2))
        console.print(Syntax("\n".join(lines), "diff", background_color="default", word_wrap=True))
    console.print(Markdown(exercise.read("reason.md")))


# For teachers ---------------------------------------------------------------------------------------------------------


def export(folder: Path, console: Console) -> None:
    """Every page and every file to begin with."""
    for exercise in all_exercises():
        begin(exercise, folder, Console(quiet=True))
    console.print(f"{folder}: {len(all_exercises())} exercises, without hints and solutions")


def grade(folder: Path, console: Console) -> None:
    """A folder for each student, with the folders of exercises; also written as grades.csv."""
    students = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not students:
        raise DojoError(f"{folder} has no folder of a student: it needs {folder}/NAME/{all_exercises()[0].place}/...")
    rows = [list(grades_of(student)) for student in students]
    names = [str(exercise.number) for exercise in all_exercises()]
    table = Table(box=None, padding=(0, 1, 0, 0))  # thirty columns in a line of 120
    for name in ("student", "right", *names):
        table.add_column(name, no_wrap=True)
    with (folder / "grades.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["student", "right", *names])
        for student, marks in zip(students, rows, strict=True):
            row = [student.name, str(marks.count("x")), *marks]
            table.add_row(*row)
            writer.writerow(row)
    console.print(table)
    console.print(f"x right, - wrong, empty: no answer, or the file as it was given; also in {folder / 'grades.csv'}")


def grades_of(student: Path) -> Iterator[str]:
    from dojo.judge import judge

    for exercise in all_exercises():
        answer = student / exercise.place / exercise.answer
        given = answer.read_text(encoding="utf-8", errors="replace") if answer.is_file() else exercise.start
        yield "" if given == exercise.start else "x" if judge(exercise, answer).is_right else "-"


if __name__ == "__main__":
    sys.exit(main())
