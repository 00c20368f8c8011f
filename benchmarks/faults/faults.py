"""Plants the faults of faults.csv, one at a time, and records which test notices each.

    git worktree add --detach ../planted COMMIT
    python benchmarks/faults/faults.py --tree ../planted --results before.csv
    python benchmarks/faults/faults.py --tree ../planted --results after.csv --noticed before.csv

The script changes files of the worktree, and resets them. A test runs only if it reaches the function with the fault;
which functions a test reaches is measured when its file is first needed. A run that was ended continues where it ended.
"""

import ast
import contextlib
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

HERE = Path(__file__).resolve().parent
STATE = HERE.parents[1] / "build" / "faults"  # what was measured, by commit
RESULT = (
    "fault",
    "noticed_by",
    "seconds",
    "tests",
)  # seconds of the processor; tests that passed
FILES = 3  # that name the faulted module, without --wide; and those that other faults needed
TEXTUAL = {"tests/unit/test_siblings.py"}  # compares texts: it notices every change, be it a fault or not
# These start programs, and some depend on the load of the machine: they come last, and must fail twice.
SLOW = tuple(f"tests/{name}/" for name in ("browser", "engine", "gloo", "learning", "resume", "smoke"))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}  # as in conftest.py


@dataclass(frozen=True, kw_only=True)
class Config:
    results: Path  # a table of tests and seconds, which is continued
    tree: Path | None = None  # a worktree for this script alone; without it, the results are only counted
    noticed: Path | None = None  # other results: plant only the faults that were noticed there
    cap: float = 100.0  # processor seconds for each fault
    wide: bool = False  # also run test files that do not name the faulted module
    slow: bool = False  # also run tests of the slow tier


class Study:
    """The tests of a commit: the files of the first tier, and what is known about their tests."""

    def __init__(self, tree: Path, is_slow: bool):
        self.tree, commit = tree, git(tree, "rev-parse", "--short=12", "HEAD").strip()
        self.path = STATE / f"{commit}{'-slow' * is_slow}.json"
        self.known = json.loads(self.path.read_text()) if self.path.exists() else {"files": {}, "done": {}}
        self.sources = [name for name in git(tree, "ls-files", "*.py", "*.js").splitlines() if name[:6] != "tests/"]
        tests = [name for name in git(tree, "ls-files", "tests/*/test_*.py").splitlines() if name not in TEXTUAL]
        self.texts = {name: (tree / name).read_text("utf-8") for name in tests}
        from forks import Runs  # beside this file: it imports what it finds in `tree`

        self.runs = Runs(tree, STATE, is_slow)

    def save(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.known))
        new.replace(self.path)

    def measure(self, file: str) -> dict[str, list[str]]:
        """{test that passes without a fault: functions that it reaches} of a test file."""
        if file not in self.known["files"]:
            found, _ = self.runs.run([file], 0, is_traced=True)
            print(f"measured {file}: {len(found)} tests, {self.runs.seconds:.0f} s", flush=True)
            reached = {test: set() for test, (outcome, _) in found.items() if outcome == "passed"}
            for test, phase, functions in map(json.loads, self.runs.trace.read_text("utf-8").splitlines()):
                for each in reached if phase == "setup" else {test} & set(reached):  # tests share fixtures
                    reached[each].update(functions)
            self.known["files"][file] = {test: sorted(functions) for test, functions in reached.items()}
            self.save()
        return self.known["files"][file]

    def batches(self, path: str, line: int, is_wide: bool) -> Iterator[list[str]]:
        """The tests that reach a line, in batches of files: those that name its module or function come first.

        In processes that end in another way than programs, calls are not recorded. So if no test reaches the function,
        those that reach its module count, or else its package.
        """
        function = function_at(self.tree / path, line)
        package, _, stem = path.removesuffix(".py").rpartition("/")
        module = f"{package}.{stem}".replace("/", ".").strip(".")
        words = [path, module, rf"from {package.replace('/', '.')} import .*\b{stem}", *[package] * (stem == "train")]
        name, ranked = function.rpartition(".")[2], []
        for file, text in self.texts.items():
            score = 4 * any(re.search(rf"\b{word}\b", text) for word in words)
            score += 3 * bool(len(name) > 4 and re.search(rf"\b{name}\b", text))
            score += 2 * (stem in file) + 9 * (stem == "train" and file.endswith("/test_replay.py"))
            ranked.append((score < 9 and file.startswith(SLOW), -score, len(text), file))
        named = [file for is_slow, score, _, file in sorted(ranked) if score and not is_slow][:FILES]
        known = [file for *_, file in sorted(ranked) if is_wide or file in self.known["files"]]
        page = "viewer/report.py:"  # it writes the page, with its scripts
        for part in [page] if path.endswith(".js") else [f"{path}:{function}", f"{path}:", f"{package}/"]:
            batch, num_tests = [], 0
            for number, file in enumerate(dict.fromkeys(named + known)):
                if batch and (file not in self.known["files"] or number % 4 == 0):
                    yield batch
                    batch = []
                batch += [test for test, functions in self.measure(file).items() if reaches(functions, part)]
                num_tests += len(batch)
            yield batch
            if num_tests or not is_wide:
                return

    def examine(self, fault: dict, at: tuple[str, int], cap: float, is_wide: bool, hint: str) -> tuple[str, float]:
        """The test that notices a fault ("" for none), and the seconds."""
        seconds, done = 0.0, self.known["done"].setdefault(fault["fault"], [])
        if hint and (self.tree / hint.partition("::")[0]).exists():
            noticed, seconds = self.try_tests(fault, at[0], [hint], cap, [])
            if noticed and self.runs.run([noticed], cap)[0].get(noticed, ["gone"])[0] == "passed":  # without the fault
                return noticed, seconds
        for batch in self.batches(*at, is_wide):
            if seconds < cap:
                noticed, used = self.try_tests(fault, at[0], batch, cap - seconds, done)
                seconds += used
                if noticed:
                    return noticed, seconds
        return "", seconds

    def try_tests(self, fault: dict, path: str, batch: list[str], cap: float, done: list[str]) -> tuple[str, float]:
        """As `examine`, with a batch of tests. Adds those that notice nothing to `done`."""
        seconds, ended = 0.0, ""
        while not ended and (tests := [test for test in batch if test not in set(done)]):
            with planted(self.tree / path, fault):
                found, ended = self.runs.run(tests, cap - seconds)
                seconds += self.runs.seconds
                failed = next((test for test, (outcome, _) in found.items() if outcome in ("failed", "started")), "")
                is_chance = bool(failed) and not ended and failed.startswith(SLOW) and "::" in failed
                if is_chance:
                    again, _ = self.runs.run([failed], 60)
                    seconds += self.runs.seconds
                    is_chance = again.get(failed, ["failed"])[0] == "passed"
            if failed and ended != "cap" and not is_chance:
                return failed + f" ({ended})" * bool(ended), seconds
            passed = [test for test, (outcome, _) in found.items() if outcome == "passed"]
            done += [*passed, failed] if is_chance else passed if ended else tests  # what is gone has other parameters
        return "", seconds


def reaches(functions: list[str], part: str) -> bool:
    """Whether one of the functions is the part, or is in it, if it is a module or a package."""
    return any(each == part or (part[-1] in ":/" and each.startswith(part)) for each in functions)


def function_at(path: Path, line: int) -> str:
    """The qualified name of the innermost function with a line, as code objects have it; "" outside of functions."""
    if path.suffix != ".py":
        return ""
    found, nodes = "", [("", ast.parse(path.read_text("utf-8")))]
    while nodes:
        prefix, node = nodes.pop()
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{prefix}{child.name}." + "<locals>." * (not isinstance(child, ast.ClassDef))
                if child.lineno <= line <= child.end_lineno and not isinstance(child, ast.ClassDef):
                    found = prefix + child.name
            nodes.append((inner, child))
    return found


def place(tree: Path, sources: list[str], fault: dict) -> tuple[str, int] | None:
    """Where a fault's old text is: once in its file, or else once in all others; and the number of its last line."""
    for paths in ([fault["path"]], sources):
        found = []
        for path in paths:
            text = "\n" + ((tree / path).read_text("utf-8") if (tree / path).exists() else "")
            before, *after = text.split(f"\n{fault['old']}\n")
            found += [(path, before.count("\n") + 1 + fault["old"].count("\n"))] * len(after)
        if len(found) == 1:
            return found[0]
    return None


@contextlib.contextmanager
def planted(file: Path, fault: dict) -> Iterator[None]:
    """Write a fault into its file, with times of change for which no bytecode of another version can be taken."""
    text = file.read_text("utf-8")

    def write(new: str, seconds: float) -> None:
        file.write_text(new, encoding="utf-8")
        os.utime(file, (seconds, seconds))
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    try:
        new = f"\n{text}".replace(f"\n{fault['old']}\n", f"\n{fault['new']}\n", 1)
        write(new[1:], 1e9 + int(fault["fault"]))
        yield
    finally:
        write(text, 1e9)


def git(tree: Path, *words: str) -> str:
    return subprocess.check_output(["git", "-C", str(tree), *words], text=True)


def read(path: Path | None) -> dict[str, dict[str, str]]:
    """The rows of a table by the number of the fault; none if there is no file."""
    if path is None or not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row["fault"]: row for row in csv.DictReader(file)}


def run(tree: Path, results: Path, noticed_before: Path | None, cap: float, is_wide: bool, is_slow: bool) -> None:
    git(tree, "checkout", "--force", "--quiet", "HEAD", "--", ".")  # removes what a run that was ended has planted
    study, rows, before = Study(tree, is_slow), read(results), read(noticed_before)
    moved = read(HERE / "moved.csv")
    for number, fault in read(HERE / "faults.csv").items():
        row, hint = rows.get(number, {}), before.get(number, {}).get("noticed_by", "").partition(" (")[0]
        seconds = float(row.get("seconds", 0))
        if row.get("noticed_by") or seconds >= cap or (before and not hint):
            continue
        if (at := place(tree, study.sources, fault)) is None and number in moved:
            at = place(tree, study.sources, fault := moved[number])
        if at is None:
            print(f"{number}: its line is gone; write what it is now into moved.csv", flush=True)
            continue
        noticed, used = study.examine(fault, at, cap - seconds, is_wide, hint)
        num_tests = len(study.known["done"][number])
        rows[number] = dict(zip(RESULT, (number, noticed, f"{seconds + used:.0f}", num_tests), strict=True))
        print(f"{number} {at[0]}:{at[1]}", *list(rows[number].values())[1:], flush=True)
        with results.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, RESULT, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(rows.values(), key=lambda row: int(row["fault"])))
        study.save()


def print_table(paths: list[Path]) -> None:
    faults, results = read(HERE / "faults.csv"), [read(path) for path in paths]
    noticed = [{number for number, row in rows.items() if row["noticed_by"]} for rows in results]
    print("| area | faults |", *(f"{path.stem} |" for path in paths))
    print("|---|---|" + "---|" * len(paths))
    for area in [*dict.fromkeys(fault["area"] for fault in faults.values()), "all"]:
        numbers = {number for number, fault in faults.items() if area in (fault["area"], "all")}
        print(f"| {area} | {len(numbers)} |", *(f"{len(numbers & found)} |" for found in noticed))
    lost = sorted(noticed[0] - noticed[-1], key=int)
    print(f"\nNoticed in {paths[0].stem}, and not in {paths[-1].stem}: {', '.join(lost) or 'none'}")


if __name__ == "__main__":
    config = tyro.cli(Config, description=__doc__)
    if config.tree is not None:
        environment = {"PYTHONPATH": str(config.tree.resolve())} | ENVIRONMENT
        if not environment.items() <= os.environ.items():  # again, with an environment that is read only once
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)
        STATE.mkdir(parents=True, exist_ok=True)
        run(config.tree.resolve(), config.results, config.noticed, config.cap, config.wide, config.slow)
    print_table([path for path in (config.noticed, config.results) if path])
