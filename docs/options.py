"""Every option of every program, from the fields of their settings: prints a page, which docs/book.py adds to the book.

python docs/options.py
"""

import dataclasses
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, NoneType
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from harness.base.flags import REPEATED, flag, option_hint, read_comment, read_marks
from harness.base.places import in_experiments

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = (
    *("evaluate.py", "export.py", "chat.py", "viewer/__main__.py", "viewer/compare.py"),
    *("viewer/diff.py", "viewer/results.py"),
    *("doctor/__main__.py", "tasks/audit/__main__.py", "recipes/math_levels.py", "recipes/smollm2.py"),
    "imitation/tiny_policy/make_policy.py",
)
HEAD = """# All options

Made by `python docs/options.py` from the programs, whose `--help-all` shows the same. Each program has the options
in its own table, and the options of the shared settings that are named above the table.
"""


def page() -> str:
    scripts = sorted(path for path in in_experiments("*.py") if "runpy" not in path.read_text("utf-8"))
    scripts = [path for path in scripts if "(Config" in path.read_text(encoding="utf-8")]  # it parses a command line
    scripts.sort(key=lambda path: (path.parent.name, path.name != "train.py", path.name))
    paths = [*scripts, *(ROOT / name for name in PROGRAMS)]
    programs = {path.relative_to(ROOT).as_posix(): load(path) for path in paths}
    shared: dict[type, None] = {}  # in the order of their first use
    parts = ["\n## Programs\n"]
    for name, module in programs.items():
        own = getattr(module, "Config", None) or module.Command
        bases = [base for base in own.__mro__[1:] if dataclasses.is_dataclass(base)]
        parents = [sys.modules[base.__module__].__file__ for base in bases if base.__name__ == own.__name__]  # programs
        bases = [base for base in bases if base.__name__ != own.__name__]
        shared |= dict.fromkeys(reversed(bases))
        parts.append(f"\n### {name}\n\n{(module.__doc__ or '').strip().partition(chr(10))[0]}\n")
        if bases:
            links = [f"`{Path(file).relative_to(ROOT).as_posix()}`" for file in parents]
            links += [f"[{base.__name__}](#{base.__name__.lower()})" for base in bases]
            parts.append(f"\nAlso the options of {', '.join(links)}.\n")
        parts.append(table(own))
    classes = ["\n## Classes of settings\n"]
    for kind in shared:
        classes.append(f"\n### {kind.__name__}\n\n{inspect.getdoc(kind)}\n{table(kind)}")
    return "".join([HEAD, *classes, *parts])


def table(kind: type) -> str:
    """The options that a class declares itself, new ones and inherited ones with another help or default."""
    fields, marks = {field.name: field for field in dataclasses.fields(kind)}, read_marks(kind)
    types = get_type_hints(kind, include_extras=True)
    rows = []
    for name in inspect.get_annotations(kind):
        if name not in fields:
            continue
        text, _, resolved = read_comment(kind, name).partition("None: ")
        default = fields[name].default
        hint = "required" if default is dataclasses.MISSING else option_hint(marks[name], default, resolved)
        cells = [
            f"`{flag(name)}{' TEXT' if name in REPEATED else _value(types[name])}`",
            text.rstrip("; ") or resolved,
            hint.replace(f"{ROOT}/", ""),
        ]
        rows.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n")
    return "\n| option | | default |\n|---|---|---|\n" + "".join(rows) if rows else "\nNo others.\n"


def _value(kind: object) -> str:
    """How the value of an option is written: nothing for a switch, else its choices or its kind."""
    words = {int: "N", float: "X", Path: "PATH", tuple: "NAME ..."}
    found = [
        *(str(choice) for part in _parts(kind) if get_origin(part) is Literal for choice in get_args(part)),
        *(
            "NAME ..." if get_origin(part) is tuple else words.get(part, "TEXT")
            for part in _parts(kind)
            if _is_open(part)
        ),
    ]
    return "" if bool in _parts(kind) else " " + "|".join(dict.fromkeys(found))


def _is_open(kind: object) -> bool:
    return get_origin(kind) is not Literal and kind is not NoneType


def _parts(kind: object) -> list[object]:
    """The types in a union, without what `Annotated` adds to them."""
    if get_origin(kind) in (None, Literal, tuple):
        return [kind]
    parts = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    return [inner for part in parts for inner in _parts(part)]


def load(path: Path) -> ModuleType:
    """The module of a program; modules beside it are loaded when it asks for them."""
    spec = importlib.util.spec_from_file_location(f"options_of_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as missing:
        beside = path.parent / f"{missing.name}.py"
        if not beside.exists():
            raise
        sys.modules[missing.name] = load(beside)
        return load(path)
    return module


if __name__ == "__main__":
    sys.stdout.buffer.write(page().encode())
