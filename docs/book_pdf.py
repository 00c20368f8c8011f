"""The book as one PDF, printed by Chromium.

    mkdocs build -f docs/mkdocs.yml && python docs/book_pdf.py build/book.pdf

Needs the extras book and browser, and Chromium (the variable CHROMIUM names another one).
"""

import http.server
import os
import sys
import threading
from functools import partial
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

SITE = Path(__file__).resolve().parent.parent / "build" / "book"
FOOTER = '<div style="font-size: 7pt; width: 100%; text-align: center"><span class="pageNumber"></span></div>'


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


def write_pdf(site: Path, output: Path, browser: Browser) -> None:
    """Print the page print.html of the site: bookmarks are its headings, and links between pages stay links."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.set_default_timeout(600_000)
        page.goto(f"http://127.0.0.1:{server.server_port}/print.html")
        page.evaluate("MathJax.startup.promise")  # the equations are set
        margin = dict.fromkeys(("top", "bottom", "left", "right"), "18mm")
        edges = {"display_header_footer": True, "header_template": "<span></span>", "footer_template": FOOTER}
        page.pdf(path=output, format="A4", margin=margin, outline=True, tagged=True, print_background=True, **edges)
        page.close()
        server.shutdown()


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (SITE / "print.html").is_file():
        sys.exit("build the site first (mkdocs build -f docs/mkdocs.yml), and name the PDF to write")
    with sync_playwright() as playwright:
        chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        write_pdf(SITE, Path(sys.argv[1]), browser)
