"""The flags of a command line, as the fields of a `Config` declare them: groups, ranges, and what `--help` shows."""

import dataclasses
import functools
import inspect
import math
import operator
import textwrap
from collections.abc import Iterator
from typing import Annotated, get_args, get_origin, get_type_hints

from harness.base.config import Group, IsPath
from harness.base.terminal import say

REPEATED = ("stop",)  # flags with one value each time, which may begin with a dash
WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}  # by their names in annotated_types


@dataclasses.dataclass
class Marks:
    """The information about a flag in its field's type; the field may belong to the class itself or to a base class."""

    group: Group | None = None
    path: IsPath | None = None
    limits: dict[str, float] = dataclasses.field(default_factory=dict)  # by the names of WORDS

    def __contains__(self, value: float) -> bool:
        is_within = all(getattr(operator, name)(value, end) for name, end in self.limits.items())
        return is_within and (isinstance(value, int) or math.isfinite(value))

    @property
    def range(self) -> str:
        """
        >>> Marks(limits={"gt": 0, "le": 1}).range, Marks(limits={"ge": 1}).range
        ('above 0 and at most 1', 'at least 1')
        """
        return " and ".join(f"{WORDS[name]} {end:g}" for name, end in self.limits.items())


def read_marks(config_class: type) -> dict[str, Marks]:
    """The marks of every field. A class's own declaration overrides an inherited one."""
    found = {field.name: Marks() for field in dataclasses.fields(config_class)}
    for parent in reversed(config_class.__mro__):
        for name in found.keys() & inspect.get_annotations(parent).keys():
            marks = found[name]
            for mark in _metadata(inspect.get_annotations(parent)[name]):
                if isinstance(mark, Group):
                    marks.group = mark
                elif isinstance(mark, IsPath):
                    marks.path = mark
                else:
                    ends = {word: getattr(mark, word, None) for word in WORDS}
                    marks.limits |= {word: end for word, end in ends.items() if end is not None}
    return found


def _metadata(hint: object) -> Iterator[object]:
    """The metadata of every `Annotated` in a type."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
        hint = hint.__origin__
    for argument in get_args(hint):
        yield from _metadata(argument)


def flag(name: str) -> str:
    """
    >>> flag("max_new_tokens")
    '--max-new-tokens'
    """
    return "--" + name.replace("_", "-")


def group_fields(config: object) -> dict[str, list[dataclasses.Field]]:
    """The fields of `config` in the groups of `--help`; the experiment's own come first."""
    marks, first = read_marks(type(config)), getattr(config, "FIRST_GROUP", "algorithm")
    grouped: dict[str, list] = {first: [], **{group.value: [] for group in Group}}
    for field in dataclasses.fields(config):
        group = marks[field.name].group
        grouped[first if group is None else group.value].append(field)
    return {name: fields for name, fields in grouped.items() if fields}


def make_flags(config: object, grouped: dict[str, list[dataclasses.Field]]) -> type:
    """The flags in their groups, a dataclass of dataclasses for tyro, with the values of `config` as the defaults."""
    import tyro

    types, marks = get_type_hints(type(config)), read_marks(type(config))
    groups = []
    for name, fields in grouped.items():
        flags = []
        for field in fields:
            text, _, resolved = read_comment(type(config), field.name).partition("None: ")
            default, takes_many = getattr(config, field.name), types[field.name] == tuple[str, ...]
            is_positional = field.name in getattr(config, "POSITIONAL", ())
            metavar = None
            if takes_many:
                metavar = f"{text.partition(':')[0]} ..." if text.startswith("NAME=") else "NAME ..."
            if field.name in REPEATED:
                metavar = "TEXT"
            argument = tyro.conf.arg(
                help=text.rstrip("; ") or resolved,
                help_behavior_hint=f"({option_hint(marks[field.name], default, resolved)})",
                aliases=getattr(config, "ALIASES", {}).get(field.name),
                metavar=field.name.upper() if is_positional else metavar,
            )
            flag_type = Annotated[types[field.name], argument]
            if field.name in REPEATED:
                flag_type = tyro.conf.UseAppendAction[flag_type]
            if is_positional:
                flag_type = tyro.conf.Positional[flag_type]
            flags.append((field.name, flag_type, dataclasses.field(default=default)))
        group = dataclasses.make_dataclass("Group", flags, kw_only=True)
        groups.append((name.replace(" ", "_"), Annotated[group, tyro.conf.arg(name=name, help="")]))
    return dataclasses.make_dataclass("Flags", groups, kw_only=True)


@functools.cache
def read_comment(config_class: type, name: str) -> str:
    """The comment beside a field or above it, as tyro reads it where fields are in no groups."""
    from tyro._docstrings import get_field_docstring

    return get_field_docstring(config_class, name, ()) or ""


def option_hint(marks: Marks, default: object, resolved: str) -> str:
    """The range and the default of a flag, as `--help` shows them after its comment."""
    if isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        values = default if isinstance(default, tuple) else (default,)
        shown = resolved if default is None else " ".join(map(str, values))
    return (f"{marks.range}; " if marks.limits else "") + f"default: {shown or 'none'}"


def show_description(text: str, width: int) -> None:
    """Print the description of a program, wrapped except for indented lines; tyro would join the lines."""
    for paragraph in text.strip("\n").split("\n\n"):
        say((paragraph if paragraph.startswith(" ") else textwrap.fill(paragraph, min(width, 120))) + "\n")


def show_names(grouped: dict[str, list[dataclasses.Field]], width: int) -> None:
    """Print which flags there are besides those that `--help` explains."""
    say("--help-all also explains the other flags:\n")
    for group, fields in grouped.items():
        names = " ".join(map(flag, (field.name for field in fields)))
        say(textwrap.fill(f"{group}: {names}", width, subsequent_indent="    ", break_on_hyphens=False))
