"""The laboratory in a real browser: it trains, shows what the loss sees, and survives what a reader may do.

As for the page of a run, no page may have a fault or a request (`open_page`).
"""

import json
import re

import pytest

from viewer.lab.build import ALGORITHMS, CHECKSUM, ROOT, SETTINGS, lesson, write_lab
from viewer.results import read_runs

SMALL = "prompts_per_step=2&group_size=4&steps=3&max_new_tokens=24"  # a step takes a tenth of a second


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    return write_lab(tmp_path_factory.mktemp("lab") / "lab.html")


@pytest.fixture
def open_lab(lab, open_page):
    """Open the page with the settings of a link; a worker's address is no request."""

    def open_at(settings: str = SMALL, **context):
        page = open_page(lab, **context)
        page.on("request", lambda request: request.url.startswith("blob:") and page.requests.remove(request.url))
        page.evaluate("settings => location.hash = settings", settings)
        return page

    return open_at


def wait_for(page, condition: str, timeout: int = 60_000) -> None:
    page.wait_for_function(f"() => {{ const {{ run }} = lab.state(); return {condition}; }}", timeout=timeout)


def train(page, steps: int = 3) -> None:
    page.click("#train")
    wait_for(page, f"run && !run.until && run.points.length === {steps}")


def wait_for_text(page, selector: str, text: str) -> None:
    page.locator(selector, has_text=text).wait_for()


def write_reward(page, source: str) -> None:
    page.locator("#form summary", has_text="Reward").evaluate("summary => summary.parentNode.open = true")
    page.select_option("#setting-reward", "own")
    page.fill("#setting-reward_source", source)


def test_it_trains_and_shows_the_numbers_of_a_token(open_lab):
    page = open_lab()
    train(page)
    assert page.inner_text("#train") == "20 more steps"
    points = page.evaluate("lab.state().run.points.map(point => point['reward/correct'])")
    assert f"{round(points[-1] * 8)} of 8 answers right" in page.inner_text("#progress")
    panel = page.locator("[data-panel='Right answers']")
    assert float(panel.locator("output").first.inner_text()) == pytest.approx(sum(points) / 3, abs=1e-4)
    page.locator(".completion[data-rank='0'] .token").nth(1).click()
    assert not page.is_checked("#follow")
    page.wait_for_selector("#readout [data-key=after]")
    row = page.evaluate(
        """() => { const { shown, newest } = lab.state(), { rows } = newest.groups[shown.index];
            return rows.toSorted((a, b) => b.return - a.return || a.completion_index - b.completion_index)[0]; }"""
    )
    pushes = row["updates"][0]["push"]
    numbers = {"sampler": row["log_probs"][1], "advantage": row["advantage"], "push-total": pushes[1]}
    for key, value in numbers.items():
        assert float(page.inner_text(f"#readout [data-key={key}]")) == pytest.approx(value, abs=2e-6)
    page.click("#reset")  # as before training: both answers are the same
    page.click("#ask-form button")
    page.wait_for_selector("#answers:not([hidden])")
    assert page.inner_text("#answer-before") == page.inner_text("#answer-now")
    assert re.fullmatch(r"(<think>.*</think>)?<answer>-?\d+</answer>", page.inner_text("#answer-now"))


def test_a_link_holds_all_settings_and_bad_ones_are_said(open_lab):
    link = "algorithm=gspo&lag=4&seed=7&group_size=4&lr=0.0001&minibatch_size=8&reward=long&mistake=batch"
    page = open_lab(link)
    wait_for_text(page, "#progress", "GSPO")
    page.focus("#skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "curves"
    chosen = dict(part.split("=") for part in link.split("&"))
    assert {name: page.input_value(f"#setting-{name}") for name in chosen} == chosen
    assert dict(part.split("=") for part in page.evaluate("location.hash.slice(1)").split("&")) == chosen
    page.evaluate("location.hash = 'lag=9.5&algorithm=ppo&nonsense=1&lr=NaN&seed=3'")
    for text in ("from 0 to 16", "choose one of grpo", "no setting nonsense", "number from 1e-7 to 1"):
        wait_for_text(page, "#message", text)
    values = [page.input_value(f"#setting-{name}") for name in ("lag", "algorithm", "lr", "seed")]
    assert values == ["0", "grpo", "0.00005", "3"]
    page.fill("#setting-group_size", "1")
    page.click("#train")
    wait_for_text(page, "#message", "nothing to compare")
    assert page.evaluate("lab.state().run") is None


def test_the_lines_of_an_algorithm_are_those_of_its_train_py():
    for name, experiment in ALGORITHMS.items():
        shown, text = lesson(experiment), (ROOT / experiment / "train.py").read_text(encoding="utf-8")
        assert all(line.strip() in text for line, _ in shown["lines"])
        assert "policy_loss" in str(shown["lines"])
        assert any(is_new for _, is_new in shown["lines"]) == (name != "grpo")


def test_defaults_are_those_of_the_band(lab):
    text = lab.read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="run-data">(.*?)</script>', text, re.DOTALL)[1])
    results = read_runs(ROOT / "experiment_base" / "results")
    runs = [run for name, run in results.items() if re.fullmatch(r"seed\d", name)]
    assert [run.config["seed"] for run in runs] == data["seeds"] == [0, 1, 2, 3, 4]
    for run in runs:
        assert {name: run.config[name] for name in SETTINGS} == data["defaults"]


# Slow: what a reader may do


@pytest.mark.slow
def test_ten_default_steps_give_the_promised_weights_and_a_hidden_tab_waits(open_lab):
    page = open_lab("steps=10")
    page.click("#train")
    wait_for(page, "run?.points.length === 2", 60_000)
    hide = "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    page.evaluate(hide + " document.dispatchEvent(new Event('visibilitychange')); }", True)
    wait_for_text(page, "#message", "waits while this tab is hidden")
    page.wait_for_timeout(8_000)  # a step that has begun may end
    assert page.evaluate("[lab.state().run.until, lab.state().run.points.length <= 3]") == [0, True]
    page.evaluate(hide + " document.dispatchEvent(new Event('visibilitychange')); }", False)
    wait_for(page, "run.points.length === 10 && !run.until", 120_000)
    assert page.inner_text("#checksum") == "This browser has computed the same."
    assert CHECKSUM in page.inner_text("#promise")


@pytest.mark.slow
def test_a_reward_that_cannot_be_used_is_said_and_training_goes_on_with_another(open_lab):
    page = open_lab()
    sources = {"throw new Error('no')": "no", "return (": "The reward is no JavaScript"}
    sources |= {f"return {value}": "give a finite number" for value in ("'x'", "NaN", "Infinity", "1e300")}
    for source, words in sources.items():
        write_reward(page, source)
        page.click("#train")
        wait_for_text(page, "#message", words)
        page.wait_for_timeout(200)  # no second fault takes the place of the first
        assert words in page.inner_text("#message")
        assert page.inner_text("#train") == "New run with these settings"
    write_reward(page, "while (true) {}")
    page.click("#check")
    wait_for_text(page, "#checked", "three seconds")
    page.click("#train")
    wait_for_text(page, "#message", "was stopped")
    write_reward(page, "return text.length")
    page.click("#check")
    wait_for_text(page, "#checked", "An example answer gets 42")
    train(page)
    assert page.evaluate("lab.state().run.points.at(-1)['reward/total']") > 5
    write_reward(page, "close(); return 1")  # ends the worker: a reset makes another one
    page.click("#train")
    page.select_option("#setting-reward", "correct")
    page.click("#reset")
    train(page)


@pytest.mark.slow
def test_a_run_that_breaks_says_so_repeats_its_steps_after_a_rewind_and_another_is_beside_it(open_lab):
    page = open_lab(SMALL.replace("steps=3", "steps=7") + "&lr=1")
    train(page, 7)
    wait_for_text(page, "#message", "No answer of the last five steps was right")
    points = page.evaluate("lab.state().run.points")
    page.fill("#rewind-step", "6")
    page.click("#rewind")
    wait_for(page, "run.points.length === 6 && !run.until")
    assert page.inner_text("#train") == "Continue"
    train(page, 7)
    assert page.evaluate("lab.state().run.points") == points
    page.evaluate("settings => location.hash = settings", SMALL)
    wait_for_text(page, "#train", "New run with these settings")
    train(page)
    assert page.evaluate("lab.state().run.points.some(point => point['reward/correct'] > 0)")
    assert page.locator("[data-panel='Right answers'] .legend li").count() == 2


@pytest.mark.slow
def test_a_guided_experiment_asks_for_a_prediction_and_then_shows_what_was_measured(open_lab):
    page = open_lab("")
    page.evaluate("lab.data.texts.guide.at(-1).runs.forEach(({ settings }) => Object.assign(settings, { steps: 1 }))")
    page.locator("#guide-list button", has_text="One wrong line").click()
    runs = page.locator("#guide-open .bar button")
    assert runs.first.is_disabled()
    page.check("#prediction-2")
    for i in range(2):
        runs.nth(i).click()
        wait_for_text(page, "#message button", "Back to “One wrong line”")
        assert page.locator(".happened").count() == i
    assert page.input_value("#setting-mistake") == "mask"
    assert "As you predicted" in page.inner_text(".happened")
    assert page.locator(".happened a").get_attribute("href").endswith("docs/traps.md#off_by_one")


@pytest.mark.slow
def test_a_browser_without_simd_gets_one_sentence(open_lab):
    page = open_lab()
    page.add_init_script("WebAssembly.validate = () => false")
    page.reload()
    page.requests.pop()
    assert "SIMD" in page.inner_text("#message")
    assert page.locator("#train").is_disabled()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 400)])
def test_axe_finds_nothing_and_a_phone_scrolls_one_way(open_lab, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    page = open_lab(color_scheme=scheme, viewport={"width": width, "height": 800})
    train(page)
    page.locator("#guide-list button").first.click()
    page.check("#prediction-1")
    page.locator(".completion .token").first.click()
    page.evaluate("document.querySelectorAll('#form details').forEach(details => details.open = true)")
    found = [entry for entry in Axe().run(page).response["violations"] if entry["impact"] != "minor"]
    assert [(entry["id"], entry["nodes"][0]["html"]) for entry in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
