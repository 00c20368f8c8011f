"""Draws places for faults, each a small change of one line, from a seed; faults.csv is what was left after a look.

    python benchmarks/faults/draw.py >candidates.csv

A place is drawn by area, then file (longer files more often), then kind of change. Read the candidates before you run
anything, and take out those that change no behaviour or only a message: `--skip 12,40` draws others in their place.
"""

import argparse
import ast
import csv
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AREAS = {  # beginnings of paths, and the number of faults
    "common": (("common/", "fast/"), 35),
    "experiments": (("experiment_", "policy_gradients/", "rewards/", "imitation/sft/", "imitation/distill/", "scale/"), 30),
    "tasks": (("tasks/",), 20),
    "harness": (("harness/", "evaluate.py", "export.py", "chat.py"), 40),
    "viewer": (("viewer/",), 13),
    "doctor": (("doctor/",), 12),
}
COMPARED = {"Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">", "Eq": "!=", "NotEq": "=="}
COMPARED |= {"In": "not in", "NotIn": "in", "Is": "is not", "IsNot": "is"}
COMPUTED = {"Add": "-", "Sub": "+", "Mult": "/", "Div": "*", "FloorDiv": "/", "Pow": "*", "BitAnd": "|", "BitOr": "&"}
CALLED = {"sum": "mean", "mean": "sum", "min": "max", "max": "min", "any": "all", "all": "any", "exp": "log"}
CALLED |= {"argmax": "argmin", "startswith": "endswith", "endswith": "startswith", "extend": "append"}
CALLED |= {"clamp_min": "clamp_max", "clamp_max": "clamp_min", "floor": "ceil", "ceil": "floor", "lstrip": "rstrip"}
PAGE = {" && ": " || ", " || ": " && ", " < ": " <= ", " > ": " >= ", " === ": " !== ", " + ": " - ", "!": ""}  # JavaScript


def changes(tree: ast.Module, text: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Every (kind, node on one line, text of the node after the change) of a module."""

    def source(node: ast.AST) -> str:
        return ast.get_source_segment(text, node)

    def between(node: ast.AST, left: ast.AST, right: ast.AST, operator: str) -> str:
        """The node with another operator between two of its parts; their brackets stay."""
        whole, start = source(node).encode(), node.col_offset
        middle = whole[left.end_col_offset - start : right.col_offset - start].decode()
        middle = re.sub(r"[^\s()]+( in| not)?(?=[\s(]*$)", operator, middle, count=1)
        return whole[: left.end_col_offset - start].decode() + middle + whole[right.col_offset - start :].decode()

    silent = {id(part) for node in ast.walk(tree) for part in hidden(node)}
    for node in ast.walk(tree):
        if id(node) in silent or getattr(node, "lineno", 0) != getattr(node, "end_lineno", 1):
            continue
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield "comparison", node, between(node, left, right, COMPARED[type(operator).__name__])
            case ast.BinOp(left=left, op=operator, right=right) if type(operator).__name__ in COMPUTED:
                if "mask" in source(right) and isinstance(operator, ast.Mult | ast.BitAnd):
                    yield "mask", node, source(left)
                if not any(isinstance(part, ast.JoinedStr) or '"' in source(part) for part in (left, right)):
                    yield "operator", node, between(node, left, right, COMPUTED[type(operator).__name__])
            case ast.BoolOp(op=operator, values=[left, right]):
                yield "and/or", node, between(node, left, right, "or" if isinstance(operator, ast.And) else "and")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "sign", node, source(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
                yield "sign", node, source(operand)
            case ast.Subscript(value=value, slice=ast.UnaryOp(op=ast.USub())):
                yield "off by one", node, f"{source(value)}[0]"
            case ast.IfExp(test=test, body=body, orelse=other):
                yield "branch", node, f"{source(other)} if {source(test)} else {source(body)}"
            case ast.Constant(value=bool() as value):
                yield "switch", node, repr(not value)
            case ast.Constant(value=int() as value):
                yield "off by one", node, repr(value + 1)
            case ast.Constant(value=float() as value):
                yield "constant", node, repr(value * 2 if value else 0.5)
            case ast.keyword(arg="dim" | "axis", value=value):
                yield "axis", node, f"{node.arg}={'0' if source(value) != '0' else '-1'}"
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name) as called) if name in CALLED:
                if isinstance(called, ast.Attribute) or name not in ("sum", "mean", "exp", "floor", "ceil"):
                    end, whole = called.end_col_offset - node.col_offset, source(node).encode()
                    yield "function", node, (whole[: end - len(name)] + CALLED[name].encode() + whole[end:]).decode()
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assert() | ast.Delete():
                yield "statement", node, "pass"
            case ast.Call(args=[ast.Name() | ast.Attribute() as one, ast.Name() | ast.Attribute() as two, *_]):
                if not isinstance(node.func, ast.Name) or node.func.id not in ("isinstance", "min", "max", "getattr"):
                    whole, start = source(node).encode(), node.col_offset
                    a, b, c, d = (at - start for part in (one, two) for at in (part.col_offset, part.end_col_offset))
                    swapped = whole[:a] + whole[c:d] + whole[b:c] + whole[a:b] + whole[d:]
                    yield "arguments", node, swapped.decode()


def hidden(node: ast.AST) -> Iterator[ast.AST]:
    """Parts that no behaviour depends on: texts, annotations, what raises an error or is written for a person."""
    parts = [getattr(node, name) for name in ("annotation", "returns") if getattr(node, name, None)]
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
        parts.append(node)
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("print", "warn", "UserError"):
        parts.append(node)
    if isinstance(node, ast.keyword) and node.arg in ("strict", "frozen", "kw_only", "encoding", "anyway"):
        parts.append(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        parts.append(node)
    for part in parts:
        yield from ast.walk(part)


def candidates(path: str) -> dict[str, list[dict]]:
    """By kind of change: rows with the lines before and after, unique in the file (with lines before, if need be)."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines, found = text.splitlines(), defaultdict(list)
    if path.endswith(".js"):
        places = [
            ("script", number, line, line.replace(old, new, 1))
            for number, line in enumerate(lines, 1)
            for old, new in PAGE.items()
            if old in line and not line.lstrip().startswith(("//", "*", "/*"))
        ]
    else:
        places = []
        for kind, node, new in changes(ast.parse(text), text):
            at = node if hasattr(node, "lineno") else node.value
            line = lines[at.lineno - 1].encode()
            changed = line[: node.col_offset] + new.encode() + line[node.end_col_offset :]
            places.append((kind, node.lineno, line.decode(), changed.decode()))
    for kind, number, _, changed in places:
        for start in range(number - 1, max(number - 4, -1), -1):
            old = lines[start:number]
            if f"\n{text}".count("\n" + "\n".join(old) + "\n") == 1:
                row = {"path": path, "line": number, "kind": kind, "old": "\n".join(old)}
                found[kind].append(row | {"new": "\n".join([*old[:-1], changed])})
                break
    return found


def draw(seed: int, skip: set[str]) -> list[dict]:
    files = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "*.py", "*.js"], text=True).split()
    rows = []
    for area, (beginnings, count) in AREAS.items():
        random_of = random.Random(f"{seed} {area}")
        files_of_area = [path for path in files if path.startswith(beginnings) and "/vendor/" not in path]
        pool = {path: places for path in files_of_area if (places := candidates(path))}
        scripts = random_of.sample([path for path in pool if path.endswith(".js")], 3) if area == "viewer" else []
        first = scripts + [path for path in pool if path.endswith("/train.py")]  # each of these has at least one
        modules = [path for path in pool if not path.endswith(".js")]
        weights = [sum(map(len, pool[path].values())) ** 0.5 for path in modules]
        taken, tried = set(), 0
        while len(taken) < count:
            path = first.pop() if first else random_of.choices(modules, weights)[0]
            row = random_of.choice(pool[path][random_of.choice(sorted(pool[path]))])
            tried += 1
            if f"{area}-{tried}" not in skip and (path, row["line"]) not in taken:
                rows.append({"number": f"{area}-{tried}", "area": area} | row)
                taken.add((path, row["line"]))
            elif path.endswith((".js", "/train.py")) and len(taken) < 19:
                first.append(path)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", default="", help="numbers of candidates that are no faults, with commas")
    options = parser.parse_args()
    drawn = draw(options.seed, set(options.skip.split(",")))
    writer = csv.DictWriter(sys.stdout, ["number", "area", "path", "line", "kind", "old", "new"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(drawn)
