"""The book: its site is complete, loads nothing from elsewhere, and can be read by key and on a phone."""

import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from harness.base.places import CHAPTERS, in_experiments

ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(
    r'<(?:script|img|iframe|source|link rel="(?:stylesheet|icon|preconnect|preload)")[^>]*?(?:src|href)="?([^"> ]+)'
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    """The folder of the site."""
    for module in ("material", "mathjax"):
        pytest.importorskip(module, reason="the extra book is not installed")
    site = tmp_path_factory.mktemp("book") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "-f", "docs/mkdocs.yml", "--strict", "--quiet"]
    command += ["--site-dir", str(site)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return site


@pytest.fixture(scope="module")
def pages(book) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in book.rglob("*.html")}


@pytest.fixture(scope="module")
def address(book) -> Iterator[str]:
    """python -m http.server in the folder."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(book))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_the_book_on_paper_has_every_chapter(book, browser, load_script, tmp_path):
    """One PDF, whose links lead to places in it."""
    text = (book / "print.html").read_text(encoding="utf-8")
    ids = set(re.findall(r' id="([^"]+)"', text))
    links = re.findall(r' href="#([^"]+)"', text)
    assert len(links) > 500
    assert [link for link in links if unquote(link) not in ids] == []
    for page in ("experiment_base: GRPO", "Letters and words", "scale/mesh"):
        assert page in text
    load_script("docs/book_pdf.py").write_pdf(book, tmp_path / "book.pdf", browser)
    pages = re.findall(rb"/Type /Page\b", (tmp_path / "book.pdf").read_bytes())
    assert 200 < len(pages) < 600


def test_every_link_leads_to_a_file_and_to_a_place_in_it(book, pages):
    """Also the links to lines of source files, and those in the committed Markdown."""
    anchors = {path: set(re.findall(r'\b(?:id|name)="?([^"> ]+)', text)) for path, text in pages.items()}
    lost, lines = [], 0
    for path, text in pages.items():
        for link in set(re.findall(r'<(?:a|link)\b[^>]*? href="?([^"> ]+)', text)):
            scheme, host, target, _, place = urlsplit(unescape(link))
            if scheme or host or path.name in ("404.html", "report.html"):
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            lines += bool(re.fullmatch(r"L\d+", place))
            if not file.exists() or (place and file in anchors and unquote(place) not in anchors[file]):
                lost.append((path.relative_to(book).as_posix(), link))
    assert lost == []
    assert lines > 100


def test_nothing_is_loaded_from_elsewhere(pages):
    loaded = {address for text in pages.values() for address in LOADED.findall(text)}
    assert len(loaded) > 50
    assert [address for address in loaded if re.match(r"(https?:)?//", address)] == []


def test_a_train_py_follows_its_page_and_shows_what_differs_from_its_parent(pages, book):
    readme, source = (pages[book / "experiment_drgrpo" / name] for name in ("index.html", "train.py.html"))
    assert re.search(r'href="train.py.html"[^>]*class="md-footer__link md-footer__link--next"', readme)
    marked = [re.sub("<.*?>", "", unescape(line)) for line in re.findall(r'<span class="hll">(.*?)\n</span>', source)]
    old, new = ((ROOT / name / "train.py").read_text("utf-8") for name in ("experiment_base", "experiment_drgrpo"))
    code = new.split('"""\n', 1)[1].splitlines()
    assert marked == [line for line in code if line not in old.splitlines()]
    assert 'if config.critic_type in ("grpo", "std"):' in " ".join(marked)


def test_the_navigation_has_the_chapters_and_experiments_in_the_reading_order(pages, book):
    page = pages[book / "experiment_base" / "index.html"]
    links = re.findall(r'<a [^>]*href="?([^" >]*)index\.html"?[^>]*md-nav__link', page)
    places = [os.path.normpath(os.path.join("experiment_base", link)) for link in links]
    table = (ROOT / "README.md").read_text("utf-8").partition("## The curriculum")[2].partition("\n## ")[0]
    rows = re.findall(r"\]\(([\w/]+)/README\.md\)", table)
    assert [place for place in places if place in rows] == rows
    assert len(rows) == len(in_experiments("train.py")) + len(CHAPTERS)


def test_papers_are_found_at_the_lines_that_cite_them(pages, book):
    """Every paper of the page has a place, and a cited line has its number."""
    rows = re.findall(
        r"<tr>\n<td><a href=\"https://arxiv.org/abs/([\d.]+)\">(.*?)</tr>",
        pages[book / "docs" / "papers.html"],
        re.DOTALL,
    )
    assert len(rows) > 50
    assert re.search(r"common/loss\.py:\d+</a> \(equation 7\)", dict(rows)["1707.06347"])  # the clipped surrogate
    for number, row in rows:
        places = re.findall(r'<a href="[^"]+">([^<]+)</a>', row)
        assert places, number
        for file, line in re.findall(r">([\w/]+\.py):(\d+)</a>", row):
            assert number in (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_equations_search_and_the_page_of_a_run_work(address, open_page):
    page = open_page(address)
    page.goto(f"{address}experiment_base/index.html")
    page.wait_for_selector("mjx-container")
    assert page.locator(".arithmatex").count() == page.locator("mjx-container").count() > 3
    assert page.locator("mjx-merror").count() == 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('.md-skip')")
    page.keyboard.press("/")
    page.keyboard.type("loss.py")  # a source file is found by its name
    page.wait_for_selector(".md-search-result__link[href*='common/loss.py']")
    page.goto(f"{address}book/run.html")
    page.frame_locator("iframe").locator(".completion .token").first.wait_for()


@pytest.mark.parametrize(("query", "page"), [
    ("entropy", "docs/glossary.html"),
    ("learning rate", "docs/hyperparameters.html"),
    ("advantage", "docs/glossary.html"),
    ("KL", "docs/hyperparameters.html"),
    ("clip", "docs/glossary.html"),
    ("mask", "docs/glossary.html"),
    ("baseline", "docs/what_is_rl.html"),
    ("reward model", "rewards/reward_model/index.html"),
    ("resume", "docs/runs.html"),
    ("staleness", "docs/glossary.html"),
    ("critic", "policy_gradients/ppo/index.html"),
    ("tool", "experiment_multiturn_tool_calling/index.html"),
])  # fmt: skip
def test_the_search_finds_pages_before_source_files(address, open_page, query, page):
    found = open_page(address)
    found.goto(f"{address}index.html?q={query}")
    found.wait_for_selector(".md-search-result__item")
    links = found.eval_on_selector_all(".md-search-result__item > a:first-child", "all => all.map(each => each.href)")
    names = [link.removeprefix(address).partition("?")[0] for link in links]
    assert page in names[:3]
    are_sources = [name.endswith((".py.html", "/files.html")) for name in names]
    assert are_sources == sorted(are_sources)


@pytest.mark.parametrize(("name", "scheme", "width"), [
    ("index", "light", 1280),
    ("experiment_base/index", "dark", 400),
    ("experiment_drgrpo/train.py", "light", 400),
    ("docs/metrics", "dark", 1280),
    ("book/dojo", "light", 400),
])  # fmt: skip
def test_axe_finds_nothing_and_a_phone_scrolls_one_way(address, open_page, name, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(address, color_scheme=scheme, viewport={"width": width, "height": 800})
    page.goto(f"{address}{name}.html")
    page.wait_for_load_state("networkidle")
    found = [(entry["id"], entry["nodes"][0]["html"]) for entry in Axe().run(page).response["violations"]]
    assert found == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_tab_key_reaches_search_navigation_and_text(address, open_page):
    page = open_page(address)
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.closest('.md-skip, .md-search, .md-tabs, article')?.className"))
    assert any("md-search" in str(each) for each in seen)
    assert any("md-tabs" in str(each) for each in seen)
    assert any("md-content" in str(each) for each in seen)


def test_the_dojo_remembers_what_is_solved(open_page, address):
    page = open_page(address)
    page.goto(f"{address}book/dojo.html")
    boxes = page.locator("input[data-exercise]")
    assert boxes.count() == len([*(ROOT / "dojo" / "exercises").glob("*/page.md")])
    boxes.nth(1).check()
    page.reload()
    assert [boxes.nth(index).is_checked() for index in (0, 1)] == [False, True]
    assert page.locator("#dojo-count").inner_text() == f"1 of {boxes.count()}"


def test_hints_and_solutions_of_the_dojo_are_folded_and_have_no_pages(pages, book):
    assert [path for path in pages if "exercises" in path.relative_to(book).as_posix()] == []
    text = pages[book / "book" / "dojo.html"]
    assert text.count("<summary>Solution</summary>") == len([*(ROOT / "dojo" / "exercises").glob("*/page.md")])
