"""The page of a run in a real browser: its numbers equal the run's, and a model's text stays text.

Every page that a test opens must end without an error, a dialog, or a request to anything else (`open_page`).
"""

import json
import re
import shutil
import threading
from pathlib import Path

import pytest

from viewer.report import write_report
from viewer.serve import Server

HOSTILE = '</script><img src=x onerror="window.hacked=1;alert(1)"><script>window.hacked=1</script>{{7*7}}\u202e\ud800'
SHOWN = HOSTILE.replace("\u202e\ud800", "\u2039U+202E\u203a")


def read(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text(encoding="utf-8").splitlines()]


def logged(directory: Path, key: str) -> dict[int, float]:
    return {row["step"]: row[key] for row in read(directory, "metrics.jsonl") if key in row}


def row_sum(row: dict) -> float:
    """The sum of a samples.jsonl row's terms over all its updates."""
    return sum(sum(update["terms"]) for update in row["updates"])


def choose_step(page, step: int) -> None:
    page.select_option("#step", str(step))
    page.wait_for_function("step => report.chosen().step === step && document.querySelector('.completion')", arg=step)


def shown_row(page, directory: Path, rank: int) -> dict:
    """The row of samples.jsonl whose completion is shown at this place."""
    completion = int(page.locator(f".completion[data-rank='{rank}']").get_attribute("data-completion"))
    prompt = int(page.locator("input[name=prompt]:checked").get_attribute("data-prompt"))
    key = {"step": int(page.input_value("#step")), "prompt_index": prompt, "completion_index": completion}
    (row,) = [row for row in read(directory, "samples.jsonl") if key.items() <= row.items()]
    return row


def assert_shows_token(page, row: dict, place: int) -> None:
    """The panel shows the numbers of a row's token; tokens count from the first after the prompt."""
    t = row["prompt_length"] + place
    values = {name: page.inner_text(f"#readout [data-key={name}]") for name in ("id", "position")}
    assert values == {"id": str(row["ids"][t]), "position": str(t)}
    if not row["action_mask"][t]:
        assert "not in the loss" in page.inner_text("#readout [data-key=role]")
        return
    lists = {"sampler": "sampler_log_probs", "old": "old_log_probs", "ref": "log_probs_ref", "entropy": "entropy"}
    for key, name in lists.items():
        assert float(page.inner_text(f"#readout .numbers [data-key={key}]")) == pytest.approx(row[name][t], abs=1e-9)
    assert float(page.inner_text("#readout [data-key=advantage]")) == pytest.approx(row["advantage"], abs=1e-6)
    names = {"log_prob": "log_probs"} | {name: name for name in ("terms", "push", "ratio", "clipped", "kl")}
    for key, name in names.items():
        seen = page.locator(f"#readout tr [data-key={key}]").all_inner_texts()
        expected = [update[name][t] for update in row["updates"]]
        assert list(map(float, seen)) == pytest.approx(expected, abs=1e-9 if name in ("terms", "push") else 1e-6)
    for key, name in {"total": "terms", "push-total": "push"}.items():
        expected = sum(update[name][t] for update in row["updates"])
        assert float(page.inner_text(f"#readout [data-key={key}]")) == pytest.approx(expected, abs=1e-9)


def tab_to(page, selector: str) -> None:
    """Press the tab key until a matching element has the focus."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    pytest.fail(f"the tab key does not reach {selector}")


# The loss


@pytest.mark.parametrize("name", ["base", "mine"])
def test_the_terms_of_a_step_add_up_to_the_logged_loss(runs, open_page, name):
    """Over two minibatches and two epochs, also with a loss that the viewer does not know."""
    directory = runs[name]
    rows, loss = read(directory, "samples.jsonl"), logged(directory, "loss/total")
    assert max(logged(directory, "policy/clipped").values()) > 0
    assert {(u["epoch"], u["minibatch"]) for row in rows for u in row["updates"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    page = open_page(directory / "report.html")
    for step in (1, 2):
        choose_step(page, step)
        check = page.locator("#loss-check")
        assert check.get_attribute("data-state") == "equal"
        total = float(check.get_attribute("data-sum"))
        assert abs(loss[step]) > 1e-4  # otherwise 1e-5 would not say much
        assert total == pytest.approx(loss[step], abs=1e-6)
        assert total == pytest.approx(sum(row_sum(row) for row in rows if row["step"] == step) / 4, abs=1e-9)
        assert f"{abs(loss[step]):.6f}" in check.inner_text()
        for rank in (0, 3):
            card, row = page.locator(f".completion[data-rank='{rank}']"), shown_row(page, directory, rank)
            assert float(card.get_attribute("data-sum")) == pytest.approx(row_sum(row), abs=1e-9)
            assert float(card.locator("[data-key=terms] b").text_content()) == pytest.approx(row_sum(row), abs=1e-8)
            card.locator(".token").first.click()
            assert_shows_token(page, row, 0)
    formula = {"base": "tokens of its row / num_rows", "mine": "of REINFORCE"}[name]
    assert formula in check.text_content()


def test_mean_and_spread_beside_a_question_give_its_advantages(runs, open_page):
    """The spread divides by G - 1, as experiment_base does, so that a reader can calculate with it."""
    directory = runs["base"]
    page = open_page(directory / "report.html")
    texts = page.locator("#prompt-list .note").all_inner_texts()
    shown = [tuple(map(float, re.findall(r"mean (\S+), spread (\S+)", text)[0])) for text in texts if "spread" in text]
    rows = [row for row in read(directory, "samples.jsonl") if row["advantage"] and row["step"] == 1]
    assert shown
    assert rows
    for row in rows:
        assert any(abs((row["return"] - mean) / spread - row["advantage"]) < 0.01 for mean, spread in shown)


def test_tokens_are_coloured_by_what_the_loss_says(runs, open_page):
    """By push at first; a choice offers the loss's own values, too; an unknown name in an address is ignored."""
    page = open_page(runs["mine"] / "report.html")
    choices = page.locator("#color option").evaluate_all("options => options.map((option) => option.value)")
    assert choices[:2] == ["push", "terms"]
    assert {"ratio", "clipped", "kl", "surprise", "advantage", "entropy", "sampled", "mask"} <= {*choices}
    assert page.evaluate("report.chosen().by") == page.input_value("#color") == "push"
    row = shown_row(page, runs["mine"], 0)
    pushes = [sum(update["push"][t] for update in row["updates"]) for t in range(row["prompt_length"], len(row["ids"]))]
    below = page.locator(".completion[data-rank='0'] .token").evaluate_all("all => all.map((x) => x.matches('.below'))")
    assert below == [push < 0 for push in pushes]
    page.select_option("#color", "surprise")
    assert page.inner_text("#scale").startswith("Scale:")
    page.evaluate("location.hash = location.hash.replace('surprise', 'toString')")
    page.wait_for_function("() => document.getElementById('color').value === 'push'")


def test_a_loss_that_differs_is_said(runs, open_page):
    """To 1e-5, relative to a large loss; an incomplete step has no sum."""
    page = open_page(runs["turns"] / "report.html")
    assert page.locator("#loss-check").get_attribute("data-state") == "part"
    assert "8 of 16 rows" in page.inner_text("#loss-check")

    def check(terms: list, logged: float | None) -> dict:
        place = {"minibatch": 0, "log_probs": [0]}
        updates = [place | {"epoch": n, "measurements": {"terms": x}} for n, x in enumerate(terms)]
        groups = [{"rows": [{"mask": [1], "sampler": [0], "updates": updates}, {"updates": []}]}]
        return page.evaluate("([...a]) => report.checkLoss(...a, true)", [groups, logged])

    for total, tolerance in ((0.5, 1e-5), (3e5, 3)):
        for factor, state in ((0.9, "equal"), (1.1, "differs")):
            assert check([[total]], total + factor * tolerance)["state"] == state
            assert check([[2 * total], [0]], total + factor * tolerance)["state"] == state  # the mean over two updates
    assert check([[0.5]], None)["state"] == "missing"
    assert check([[0.5], [None]], 0.25)["state"] == "missing"
    assert check([], 0.25)["state"] == "unknown"  # from an older version, or without an update
    assert [update["total"] for update in check([[0.5], [0.25]], 0)["updates"]] == [0.5, 0.25]


# A step, a prompt, a token


def test_completions_are_filtered(runs, open_page):
    """By return, length, end and text; prompts without one that passes go away."""
    directory = runs["turns"]
    page = open_page(directory / "report.html")
    choose_step(page, 2)
    rows = [row for row in read(directory, "samples.jsonl") if row["step"] == 2]
    page.locator("#filter summary").click()
    middle = sorted(sum(row["action_mask"]) for row in rows)[len(rows) // 2]
    word = rows[0]["text"].split()[0]
    filters = {
        "least-return": ("1", lambda row: row["return"] >= 1),
        "most-return": ("0.5", lambda row: row["return"] <= 0.5),
        "least-length": (str(middle), lambda row: sum(row["action_mask"]) >= middle),
        "most-length": (str(middle), lambda row: sum(row["action_mask"]) <= middle),
        "end": ("length", lambda row: row["finish_reason"] == "length"),
        "text": (word.upper(), lambda row: word in "\n".join([row["text"], *(text for _, text in row["turns"])])),
    }
    for name, (value, passes) in filters.items():
        control = page.locator(f"#filter-{name}")
        control.select_option(value) if name == "end" else control.fill(value)
        passing = [row for row in rows if passes(row)]
        assert page.inner_text("#filter-status") == f"{len(passing)} of {len(rows)} completions"
        asked = {row["prompt_index"] for row in passing}
        assert page.locator("input[name=prompt]").count() == len(asked) or not asked
        assert page.locator("#group").is_visible() == bool(asked)
        if asked:
            prompt = int(page.locator("input[name=prompt]:checked").get_attribute("data-prompt"))
            shown = page.locator("#completions .completion:visible").evaluate_all(
                "all => all.map(x => +x.dataset.completion)"
            )
            assert {*shown} == {row["completion_index"] for row in passing if row["prompt_index"] == prompt}
        page.click("#filter-clear")
        assert page.locator("#completions .completion:visible").count() == 4
    row = shown_row(page, directory, 0)
    assert (
        page.inner_text(".completion[data-rank='0'] [data-key=trajectory]")
        == f"with prompt and tools {len(row['ids'])}"
    )


def test_two_steps_of_one_question_are_side_by_side(runs, open_page):
    directory = runs["base"]
    page = open_page(directory / "report.html")
    choose_step(page, 1)
    prompt = int(page.locator("input[name=prompt]:checked").get_attribute("data-prompt"))
    assert page.locator("#beside option").all_inner_texts() == ["none", "2"]
    assert not page.locator("#other").is_visible()
    page.select_option("#beside", "2")
    page.wait_for_selector("#other .completion")
    rows = [row for row in read(directory, "samples.jsonl") if (row["step"], row["prompt_index"]) == (2, prompt)]
    rows.sort(key=lambda row: (-row["return"], row["completion_index"]))
    assert page.locator("#other .said").all_inner_texts() == [row["text"] for row in rows]
    left, right = (page.locator(place).bounding_box() for place in ("#completions", "#other"))
    assert left["x"] + left["width"] <= right["x"]
    choose_step(page, 2)
    assert not page.locator("#other").is_visible()


@pytest.mark.slow
def test_a_token_is_chosen_by_keyboard_alone(runs, open_page):
    directory = runs["base"]
    page = open_page(directory / "report.html")
    tab_to(page, ".skip")
    page.keyboard.press("Enter")
    tab_to(page, "#step")
    page.keyboard.press("ArrowDown")
    page.wait_for_function("() => report.chosen().step === 2")
    tab_to(page, "input[name=prompt]")
    before = page.locator("input[name=prompt]:checked").get_attribute("data-prompt")
    page.keyboard.press("ArrowDown")
    assert page.locator("input[name=prompt]:checked").get_attribute("data-prompt") != before
    tab_to(page, "#color")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("report.chosen().by") == "terms"
    tab_to(page, ".completion .token")
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft"):
        page.keyboard.press(key)
    row = shown_row(page, directory, 0)
    place = len(row["ids"]) - row["prompt_length"] - 2
    assert_shows_token(page, row, place)
    assert f"{row['sampler_log_probs'][-2]:.6f}" in page.inner_text("#token-status")  # for screen readers
    page.keyboard.press("PageDown")
    assert page.evaluate("document.activeElement.closest('.completion').dataset.rank") == "1"
    page.keyboard.press("Escape")
    assert page.locator(".completion[data-rank='1'] [aria-selected=true]").count() == 0


@pytest.mark.slow
def test_the_values_of_a_curve_are_those_of_the_run(runs, open_page):
    directory = runs["base"]
    page = open_page(directory / "report.html")
    panel = page.locator("[data-panel='Policy: entropy']")
    panel.locator("summary").click()
    panel.locator("tr").nth(2).wait_for()  # the table is drawn after the browser's `toggle` event
    assert panel.locator("tr").count() == 3  # the header, and the two steps
    panel.locator(".plot").focus()
    entropy = logged(directory, "policy/entropy")
    for key, step in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2)):
        page.keyboard.press(key)
        assert panel.locator(".at").inner_text() == f"step {step}"
        text = panel.locator("output").inner_text()
        assert text == "\u2013" if step == 0 else float(text) == pytest.approx(entropy[step], rel=1e-3)
    page.keyboard.press("Enter")
    page.wait_for_function("() => report.chosen().step === 2")
    page.locator("[data-panel='Norm of the gradient before clipping'] .plot").hover()
    assert "step" in page.inner_text("[data-panel='Policy: entropy'] .at")


# Text from others, and where it is shown


@pytest.fixture(scope="module")
def planted(runs, tmp_path_factory) -> Path:
    """The page of a copy of the run with conversations, with a script wherever a file of a run contains text."""
    directory = tmp_path_factory.mktemp("planted") / "<b onclick=hacked()>"
    shutil.copytree(runs["turns"], directory)
    texts = {"question": HOSTILE, "answer": HOSTILE, "text": HOSTILE, "finish_reason": HOSTILE}
    texts |= {"turns": [["assistant", HOSTILE], ["tool", f"<tool_call>{HOSTILE}"]], "rewards": {HOSTILE: 1.0}}
    changes = {"samples.jsonl": texts, "tokens.jsonl": {"text": HOSTILE}, "metrics.jsonl": {f"reward/{HOSTILE}": 0.5}}
    for name, change in changes.items():
        rows = [row | change for row in read(directory, name)]
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    finding = {"step": 2, "finding": HOSTILE, "sentence": HOSTILE}
    (directory / "diagnosis.jsonl").write_text(json.dumps(finding) + "\n")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"task": HOSTILE, "loss": HOSTILE, HOSTILE: HOSTILE}))
    return write_report(directory)


def test_a_script_in_a_text_is_shown_and_does_not_run(planted, open_page):
    """Even if the page allowed all scripts: the text is escaped."""
    page = open_page(planted, bypass_csp=True)
    page.wait_for_selector(".completion")
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    page.locator(".completion .token").first.click()
    places = ("#diagnosis", "header", ".formula", ".question", ".completion .token >> nth=0", ".prompt", "#readout")
    for place in places:
        assert SHOWN[:60] in page.inner_text(place), place
    page.click("#diagnosis a >> nth=0")  # a finding links to its step
    page.wait_for_function("() => report.chosen().step === 2")
    page.check("input[name=view][value=turns]")
    assert SHOWN in page.inner_text(".turn.tool >> nth=0")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, iframe, body script:not([type])").count() == 1  # uPlot's


def test_the_page_runs_no_script_that_is_put_into_it(runs, open_page):
    """The second line of defence: the Content-Security-Policy."""
    page = open_page(runs["base"] / "report.html")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x onerror=hacked=1>')")
    assert page.evaluate("window.hacked") is None
    assert all("violates the following Content Security Policy" in fault for fault in page.faults)
    assert len(page.faults) >= 2
    page.faults.clear()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
def test_axe_finds_nothing_serious_and_a_phone_scrolls_one_way(runs, open_page, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(runs["turns"] / "report.html", color_scheme=scheme, viewport={"width": width, "height": 800})
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, background.strip("rgb()").split(",")))
    assert brightness > 600 if scheme == "light" else brightness < 150
    page.locator(".completion .token").first.click()
    for view in ("tokens", "turns"):
        page.check(f"input[name=view][value={view}]")
        found = [entry for entry in Axe().run(page).response["violations"] if entry["impact"] != "minor"]
        assert [(entry["id"], entry["nodes"][0]["html"]) for entry in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.slow
def test_the_live_page_follows_a_run_until_something_is_chosen(runs, open_page, tmp_path):
    directory = tmp_path / "x"
    shutil.copytree(runs["base"], directory, ignore=shutil.ignore_patterns("summary.json", "final", "*.html"))
    rows = read(directory, "samples.jsonl")

    def write(steps: set[int]) -> None:
        kept = [row for row in rows if row["step"] in steps]
        (directory / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))

    write({1})
    with Server(directory, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            page = open_page(f"http://127.0.0.1:{server.server_port}/")
            page.wait_for_selector(".completion")
            assert page.locator("#step option").all_inner_texts() == ["1 (all rows)"]
            assert "not finished" in page.inner_text("header")
            write({1, 2})
            page.wait_for_function("() => window.report?.chosen().step === 2")
            page.wait_for_function("() => document.getElementById('loss-check').dataset.state === 'equal'")
            page.locator(".completion .token").first.click()
            assert not page.is_checked("#follow")
            shutil.copy(runs["base"] / "summary.json", directory)
            said = "text => document.getElementById('news').textContent.includes(text)"
            page.wait_for_function(said, arg="The run has gone on.")
            assert page.locator(".token[aria-selected=true]").count() == 1
            page.check("#follow")
            page.wait_for_function(said, arg="The run is finished.")
            page.locator(".completion .token").first.click()
            page.locator("#reading summary").click()
            server.is_over = True  # the last page comes although something is chosen, which it keeps
            page.wait_for_function("() => !document.documentElement.dataset.version && window.report")
            page.wait_for_selector(".token[aria-selected=true]")
            assert page.locator("#reading[open]").count() == 0
            server.is_over = False
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.wait_for_function(said, arg="The run is finished.")
            directory.rename(tmp_path / "y")
            page.wait_for_function(said, arg="is gone")
            page.faults.clear()  # the browser reports the answer 503 as an error
        finally:
            server.shutdown()
            thread.join()
