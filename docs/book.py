"""The book: a hook of MkDocs that makes a site of the repository's Markdown, source files and notebooks.

    mkdocs serve -f docs/mkdocs.yml                                # http://127.0.0.1:8000
    mkdocs build -f docs/mkdocs.yml --strict                       # build/book, which python -m http.server can serve

Every page has the path of its file in the repository, so a link between files is a link between pages. A source file
becomes a page if a page links to it, and each train.py does; it shows the lines that differ from its parent's. The page
of a run comes from a short run of experiment_base, which is kept in build/.
"""

import ast
import difflib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File, Files

import common

from harness.base.places import in_experiments

ROOT = Path(__file__).resolve().parent.parent
MATHJAX = Path(importlib.util.find_spec("mathjax").origin).parent / "static/mathjax/es5"  # django-static-mathjax
NOT_OURS = {"runs", "exports", "build", "smollm2", "wandb", "dojo_work"}
EXERCISES = ROOT / "dojo" / "exercises"  # hints and solutions are folded, on one page
SHOWN = {
    ".py": "python",
    ".sh": "bash",
    ".yaml": "yaml",
    ".toml": "toml",
    ".patch": "diff",
    ".jinja": "jinja",
    "": "text",
}
BIG = 100_000  # bytes of a source file from which on it is offered as a file
PART = r"(?:equation|section|appendix)s? \w(?:[\w.]*\w)?(?: (?:and|to) [\d.]*\d)?"
PAPER = re.compile(rf"\b(\d{{4}}\.\d{{5}})\b(?:\]\(\S+?\))?[),]*\s*({PART}|)")
LIST_ITEM, FENCE = re.compile(r"(?:[-*]|\d+\.) "), re.compile(r" *(```|~~~)")
TRANSLATION = re.compile(r"docs/README\.(\w+)\.md")
# The search: pages that explain a term come first; after the other pages those of lists and tests, and then sources
BOOST = {"docs/glossary.md": 100, "docs/metrics.md": 3, "docs/hyperparameters.md": 2}
BOOST |= dict.fromkeys(("docs/papers.md", "tests/README.md", "docs/claims.md", "docs/options.md"), 0.1)
BOOST |= {"book/dojo.md": 0.01}  # thirty headings, and a word counts 1000 times there
SOURCE_BOOST = 1e-7  # the name of a file is its tag, and a tag counts a million times
UNSEARCHED = ("docs/export_card.md", "CHANGELOG.md", "AGENTS.md")  # a sample, news, and the pages' short form
SHORT_RUN = (
    "--steps 10 --prompts-per-step 8 --eval-prompts 32 --eval-every 0 --checkpoint-every 0 --device cpu --name x"
)
RUN_PAGE = """# A run, to explore

This is the page that every run ends with, here of a short one ([alone](report.html)): `experiment_base` with 10 steps
of 8 prompts. Choose a step, a prompt and a token. [What the loss sees](../docs/viewer.md) explains the page.

<iframe src="report.html" title="the page of a short run of experiment_base"></iframe>
"""


DOJO_PAGE = """# The dojo

Thirty exercises. They check themselves on your computer ([how](../docs/dojo.md)); here you can read them, and note what
you have solved. Your browser keeps it.

<progress id="dojo" aria-label="solved exercises" max="1" value="0"></progress> <span id="dojo-count"></span>"""


PRINTED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><link rel="stylesheet" href="print.css">
<script>MathJax = {{options: {{ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex"}}}};</script>
<script src="mathjax/tex-chtml.js"></script></head><body><h1>{title}</h1>
<p>Version {version}</p>
<ol>
{contents}
</ol>
{pages}
</body></html>
"""


class Shown(File):
    """A file that is not Markdown, or a directory, shown as a page."""

    def is_documentation_page(self) -> bool:
        return True


def ours(*kinds: str) -> Iterator[Path]:
    """The repository's files of some kinds, without those of runs and environments."""
    for place in sorted(ROOT.iterdir()):
        if place.name[0] != "." and place.name not in NOT_OURS and not (place / "pyvenv.cfg").exists():
            paths = (path for path in sorted([place, *place.rglob("*")]) if path.suffix in kinds)
            yield from (path for path in paths if not path.is_relative_to(EXERCISES))


# From files to Markdown -----------------------------------------------------------------------------------------------


def source_page(path: Path) -> str:
    """A source file, with the lines that differ from its parent's highlighted if it is a train.py with a parent."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    marked = before = after = ""
    parent = re.search(r"^Parent: (?!none)([\w/]+)", text, re.MULTILINE)
    if parent and path.name == "train.py":
        old, new = (ROOT / parent[1] / "train.py").read_text(encoding="utf-8").splitlines(), text.splitlines()
        docstring = ast.parse(text).body[0].end_lineno
        changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        added = (f"{a + 1}-{b}" for tag, _, _, a, b in changes if tag in ("insert", "replace") and a >= docstring)
        link = os.path.relpath(ROOT / parent[1] / "train.py", path.parent)
        marked = f' hl_lines="{" ".join(added)}"'
        before = f"""Parent: [{parent[1]}]({link}). The lines that differ are highlighted,
[this page](README.md) explains them, and [the complete diff](#diff-to-the-parent) is at the end.\n\n"""
        diff = difflib.unified_diff(old, new, f"{parent[1]}/train.py", name, n=2, lineterm="")
        after = "\n## Diff to the parent\n\n``````diff\n" + "\n".join(diff) + "\n``````\n"
    fence = f'``````{{.{SHOWN[path.suffix]} linenums="1"{marked}}}'
    return f"# {name}\n\n{before}{fence}\n{text.rstrip()}\n``````\n{after}"


def notebook_page(path: Path) -> str:
    """The cells of a notebook, with the outputs that were saved with it."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"``````python\n{text}\n``````")
        for output in cell.get("outputs", []):
            data = output.get("data") or {"text/plain": output.get("text", output.get("traceback", ""))}
            data = {kind: "".join(lines).rstrip() for kind, lines in data.items()}
            if "image/png" in data:
                parts.append(
                    f'<img alt="figure of this cell" src="data:image/png;base64,{"".join(data["image/png"].split())}">'
                )
            elif "text/html" in data:
                html = re.sub(r"<style.*?</style>|\n\s*(?=\n)", "", data["text/html"], flags=re.DOTALL)
                parts.append(f"<div>\n{html}\n</div>")
            else:
                parts.append(f"``````text\n{data['text/plain']}\n``````")
    return "\n\n".join(parts)


def members(path: Path) -> list[Path]:
    return [each for each in sorted(path.iterdir()) if each.is_file() and each.name[0] != "." and each.suffix in SHOWN]


def directory_page(path: Path) -> str:
    links = "".join(f"- [{each.name}]({path.name}/{each.name})\n" for each in members(path))
    return f"# {path.relative_to(ROOT).as_posix()}/\n\n{links}"


@functools.cache
def citations() -> dict[str, dict[tuple[str, int], str]]:
    """Where papers are cited: by number on arXiv, then by file and line (0 in a page), the equation or section."""
    found: dict[str, dict[tuple[str, int], str]] = {}
    for path in ours(".py", ".md"):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        for match in PAPER.finditer(text) if not name.startswith(("tests/", "docs/papers.md")) else ():
            place = (name, text.count("\n", 0, match.start()) + 1 if path.suffix == ".py" else 0)
            places = found.setdefault(match[1], {})
            places[place] = places.get(place) or " ".join(match[2].split())
    return found


def add_places(line: str) -> str:
    """A line of docs/papers.md; to a row of its table the places that implement or cite the paper."""
    if not (number := re.match(r"\| \[(\d{4}\.\d{5})\]", line)):
        return line + {"| arXiv": " implemented or cited in |", "|---|--": "---|"}.get(line[:7], "")
    shown = []
    for (name, row), part in citations()[number[1]].items():
        link = f"[{name}:{row}](../{name}#L{row})" if row else f"[{name.removesuffix('/README.md')}](../{name})"
        shown.append(f"{link} ({part})" if part else link)
    return f"{line} {', '.join(shown)} |"


def run_report() -> str:
    """The page of a short run of experiment_base."""
    page = ROOT / "build/book_run/experiment_base/x/report.html"
    if not page.exists():
        command = [sys.executable, "experiment_base/train.py", *SHORT_RUN.split(), "--runs-dir", "build/book_run"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    metrics = 'target="_top" href="../docs/metrics.html'
    return re.sub(r'href="[^"]*docs/metrics\.md', metrics, page.read_text(encoding="utf-8"))


@functools.cache  # a site that is served is built again and again
def laboratory() -> str:
    """The page in which the bundled policy learns; its links lead to pages of the book."""
    from viewer.lab.build import render

    return render(is_book=True)


@functools.cache
def options_page() -> str:
    """The page of all options; a program of its own imports the programs."""
    command = [sys.executable, "docs/options.py"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, encoding="utf-8").stdout


def dojo_page() -> str:
    """All exercises on one page; what is solved is kept by the reader's browser (book.js)."""
    from dojo.exercise import by_chapter

    parts = [DOJO_PAGE]
    for chapter, exercise in [(chapter, each) for chapter, some in by_chapter().items() for each in some]:
        facts, number = exercise.facts, exercise.number
        if f"## {chapter}" not in parts:
            parts.append(f"## {chapter}")
        box = f'<label><input type="checkbox" data-exercise="{exercise.name}"> solved</label>'
        parts.append(f"### {exercise.text.removeprefix('# ').replace(chr(10), f'{chr(10)}{chr(10)}{box}', 1)}")
        parts.append(f"*{facts['kind']}, {facts['minutes']} minutes*: `python -m dojo {number}`")
        parts += [folded(f"Hint {i}", hint) for i, hint in enumerate(exercise.hints, start=1)]
        code = "" if exercise.kind == "predict" else f"```python\n{exercise.read('solution.py')}```\n\n"
        parts.append(folded("Solution", code + exercise.read("reason.md")))
    return "\n\n".join(parts).replace("](../../../", "](../")


def folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text.strip()}\n\n</details>"


def list_experiments() -> list[dict]:
    """The navigation of the experiments: the table of README.md, with its headings, which are chapters."""
    groups: list[dict] = []
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"\| \| \*\*(?:\[(.+)\]\((.+)\)|(.+))\*\*", line):
            groups.append({heading[1] or heading[3]: [heading[2]] if heading[2] else []})
        elif row := re.match(r"\| (\d+) \| \[((?:\w+/)?(\w+))\]", line):
            name = row[3].removeprefix("experiment_")
            (entries,) = groups[-1].values()
            entries.append({f"{row[1]} {name}": [f"{row[2]}/README.md", {f"{name}/train.py": f"{row[2]}/train.py"}]})
    return groups


def linked_by(path: Path) -> list[Path]:
    """The files of the repository to which a page links."""
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    linked = [Path(os.path.normpath(path.parent / target)) for target in targets if "://" not in target]
    return [each for each in linked if each.exists() and each != ROOT]


# The hooks ------------------------------------------------------------------------------------------------------------


def on_files(files: Files, config) -> Files:
    """The pages, the files that they link to, what the site needs beside them, and the navigation."""
    site = Files([file for file in files if file.src_dir != config.docs_dir or file.src_uri.endswith((".css", ".js"))])
    notebooks = sorted(ROOT.glob("docs/notebooks/*.ipynb"))
    queue = [*ours(".md"), *notebooks, *(ROOT / name for places in citations().values() for name, _ in places)]
    queue += (path.with_name("train.py") for path in in_experiments("README.md"))
    queue += [target for page in EXERCISES.rglob("*.md") for target in linked_by(page)]
    for path in queue:  # which grows
        name = path.relative_to(ROOT).as_posix()
        if name in site.src_uris:
            continue
        queue += members(path) if path.is_dir() else []
        queue += linked_by(path) if path.suffix in (".md", ".ipynb") else []
        is_shown = path.suffix in SHOWN and path.stat().st_size < BIG
        if path.is_dir() or path.suffix == ".ipynb" or is_shown:
            address = f"{name}/files.html" if path.is_dir() else f"{name.removesuffix('.ipynb')}.html"
            make = directory_page if path.is_dir() else source_page if is_shown else notebook_page
            site.append(Shown(name, None, config.site_dir, False, dest_uri=address))
            site.src_uris[name].content_string = make(path)
        else:
            # beside the first page: the theme looks for a sitemap there, too
            address = f"{path.stem}.html" if TRANSLATION.fullmatch(name) else None
            site.append(File(name, str(ROOT), config.site_dir, False, dest_uri=address))
    site.append(File.generated(config, "book/run.md", content=RUN_PAGE))
    site.append(File.generated(config, "book/dojo.md", content=dojo_page()))
    site.append(File.generated(config, "book/report.html", content=run_report()))
    site.append(File.generated(config, "lab.html", content=laboratory()))
    site.append(File.generated(config, "docs/options.md", content=options_page()))
    for path in (MATHJAX / "tex-chtml.js", *MATHJAX.glob("output/chtml/fonts/woff-v2/*.woff")):
        name = f"mathjax/{path.relative_to(MATHJAX).as_posix()}"
        site.append(File.generated(config, name, abs_src_path=str(path)))

    made = {
        "experiments": list_experiments(),
        "notebooks": [path.relative_to(ROOT).as_posix() for path in notebooks],
    }
    listed = repr([config.nav, made])
    pages = sorted(file.src_uri for file in site.documentation_pages() if file.src_uri.endswith(".md"))
    made["rest"] = [name for name in pages if f"'{name}'" not in listed and not TRANSLATION.fullmatch(name)]
    for part in config.nav:
        for title, entries in part.items():
            if isinstance(entries, list):
                part[title] = [each for entry in entries for each in made.get(entry, [entry])]
    return site


def on_serve(server, config, builder) -> None:
    for path in ours(".md", ".ipynb"):
        server.watch(str(path))


def on_page_markdown(markdown: str, page, config, files) -> str:
    """GitHub's Markdown becomes MkDocs': blank lines before lists, four spaces inside them, Markdown inside HTML."""
    if page.file.src_uri == "docs/lab.md":
        markdown = markdown.replace("\n\n", '\n\n<p><a href="../lab.html">Open the laboratory</a></p>\n\n', 1)
    if page.file.src_uri == "docs/papers.md":
        markdown = "\n".join(map(add_places, markdown.splitlines()))
    if isinstance(page.file, Shown) and not page.file.src_uri.endswith(".ipynb"):
        page.meta["hide"] = ["toc"]  # room for 120 columns
        page.meta |= {"search": {"boost": SOURCE_BOOST}, "tags": [page.file.src_uri.rpartition("/")[2]]}
        return markdown
    boost = {"boost": BOOST[page.file.src_uri]} if page.file.src_uri in BOOST else {}
    page.meta["search"] = boost | {"exclude": page.file.src_uri in UNSEARCHED}
    lines, fenced, indent, start = [], False, "", 0
    for line in markdown.splitlines():
        if item := not fenced and LIST_ITEM.match(line):
            after_text = lines and lines[-1] and not LIST_ITEM.match(lines[-1])
            if indent or not after_text or item[0] in ("- ", "* ", "1. "):  # else a line of text begins with a number
                lines += [""] if after_text and (not indent or "" in lines[start:]) else []
                indent, start = " " * len(item[0]), len(lines)
        elif line and line[0] != " " and lines and not lines[-1] and not fenced:
            indent = ""
        fenced ^= bool(FENCE.match(line))
        lines.append("    " + line[len(indent) :] if indent and line.startswith(indent) else line)
    return re.sub(r"^<details>", '<details markdown="1">', "\n".join(lines), flags=re.MULTILINE)


def on_page_content(html: str, page, config, files) -> str:
    """Lines of a source file have the anchors that they have on GitHub, and an empty head of a column is no head."""
    html = html.replace("<th></th>", "<td></td>")
    if language := TRANSLATION.fullmatch(page.file.src_uri):
        html = f'<div lang="{language[1]}">{html}</div>'
    return html.replace("__codelineno-0-", "L") if page.file.src_uri.endswith(".py") else html


# The book on paper ----------------------------------------------------------------------------------------------------


def on_nav(nav, config, files) -> None:
    """Remember the order of the pages, for `on_post_build`."""
    config.extra["order"] = nav.pages


def on_post_build(config) -> None:
    """Write print.html, the pages of prose as one, of which docs/book_pdf.py makes a PDF."""
    skipped = {*UNSEARCHED, "docs/options.md", "book/run.md"}
    pages = [page for page in config.extra["order"] if page.file.src_uri.endswith((".md", ".ipynb"))]
    places = {page.file.dest_uri: f"page{n}" for n, page in enumerate(pages) if page.file.src_uri not in skipped}
    pages = [page for page in pages if page.file.dest_uri in places]
    contents = "\n".join(f'<li><a href="#{places[page.file.dest_uri]}">{page.title}</a></li>' for page in pages)
    book = {"title": config.site_name, "version": common.__version__, "contents": contents}
    text = PRINTED.format(**book, pages="\n".join(as_section(page, places) for page in pages))
    (Path(config.site_dir) / "print.html").write_text(text, encoding="utf-8")


def as_section(page, places: dict[str, str]) -> str:
    """A page as a section: its links lead to other sections, or nowhere, since source files are not on paper."""
    folder, own = os.path.dirname(page.file.dest_uri), places[page.file.dest_uri]

    def moved(match: re.Match) -> str:
        attribute, target = match[1], match[2]
        if "://" in target or target.startswith(("data:", "mailto:")):
            return match[0]
        path, _, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(folder, path)) if path else page.file.dest_uri
        if attribute == "src":
            return f'src="{path}"'
        return f'href="#{places[path]}{"-" if anchor else ""}{anchor}"' if path in places else ""

    html = re.sub(r'\bid="', f'id="{own}-', page.content).replace("<details", "<details open")
    html = re.sub(r"<iframe.*?</iframe>", "", html, flags=re.DOTALL)
    return f'<section id="{own}">' + re.sub(r'\b(href|src)="([^"]*)"', moved, html) + "</section>"
