"""A real browser, and runs from short real trainings."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
QUIET = ("--disable-gpu", "--disable-background-networking", "--no-first-run", "--no-sandbox")  # root has no sandbox

# Two steps; the learning rate and the narrow clip make ratios differ from 1 in the later updates, and clip some.
SMALL = (
    *("--steps", "2", "--group-size", "4", "--eval-prompts", "2", "--eval-every", "0", "--checkpoint-every", "0"),
    *("--device", "cpu", "--seed", "5", "--lr", "3e-5", "--name", "x"),
)
UPDATES = ("--prompts-per-step", "2", "--epochs-per-step", "2", "--minibatch-size", "4", "--clip-eps", "0.02")
RUNS = {
    "base": ("experiment_base", (*UPDATES, "--max-prompts", "2")),  # both steps ask the same questions
    "turns": ("experiment_multiturn_tool_calling", ("--prompts-per-step", "4")),  # two of four groups are written
    "mine": ("policy_gradients/mine", UPDATES),
}


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Closed after the file: it keeps an event loop running, which would keep later tests from starting one."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the extra browser")
    pytest.importorskip("axe_playwright_python", reason="axe is not installed: the extra browser")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}; CHROMIUM can name another one")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable]:
    """Open an address: a page with the lists `faults` (errors, dialogs) and `requests`; tests can inspect both.

    At the end no page may have had a fault or a request elsewhere.
    """
    opened = []

    def open_at(address: Path | str, **context):
        page = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | context)).new_page()
        page.set_default_timeout(60_000)
        page.faults, page.requests = [], []
        page.on("console", lambda message: page.faults.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("dialog", lambda dialog: (page.faults.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("requestfailed", lambda request: request.failure == "csp" and page.requests.remove(request.url))
        address = address.as_uri() if isinstance(address, Path) else address
        opened.append((page, address))
        page.goto(address)
        return page

    yield open_at
    for page, address in opened:
        page.context.close()
        assert page.faults == []
        if address.startswith("file:"):
            assert page.requests == [address]
        else:
            assert all(url.startswith(address) for url in page.requests)


@pytest.fixture(scope="module")
def runs(browser, load_script, experiment_mine, tmp_path_factory) -> dict[str, Path]:
    """The directories of runs, by their names in RUNS; `browser` comes first because nothing is needed without it."""
    from viewer.report import write_report

    place = tmp_path_factory.mktemp("runs")
    directories = {}
    for name, (experiment, flags) in RUNS.items():
        script = experiment_mine if name == "mine" else load_script(f"{experiment}/train.py")
        script.main([*SMALL, *flags, "--runs-dir", str(place)])
        directories[name] = place / Path(experiment).name / "x"
        write_report(directories[name])
    return directories
