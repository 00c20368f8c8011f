"""The page of a run in a real browser: its numbers are those of the run, and text of a model stays text.

Whatever page is opened, at its end there was no error, no dialog, and no request but its own (`open_page`).
"""

import json
import math
import shutil
import threading
from pathlib import Path

import pytest

from viewer.report import describe_loss, write_report
from viewer.sampled import encode_step
from viewer.serve import Server

HOSTILE = '</script><img src=x onerror="window.hacked=1;alert(1)"><script>window.hacked=1</script>{{7*7}}\u202e\ud800'
SHOWN = (
    '</script><img src=x onerror="window.hacked=1;alert(1)"><script>window.hacked=1</script>{{7*7}}\u2039U+202E\u203a'
)


def read(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text(encoding="utf-8").splitlines()]


def logged(directory: Path, key: str) -> dict[int, float]:
    return {row["step"]: row[key] for row in read(directory, "metrics.jsonl") if key in row}


def row_sum(row: dict, config: dict) -> float:
    """What a row of samples.jsonl adds to the logged loss: a slow loop over its updates and its tokens."""
    num_rows = config["prompts_per_step"] * config["group_size"]
    size = config["minibatch_size"] or num_rows
    is_drgrpo = config.get("critic_type") == "drgrpo"
    low, high = 1 - config["clip_eps"], 1 + config["clip_eps"]
    total = 0.0
    for update in row["updates"]:
        for t, sampled in enumerate(row["action_mask"]):
            if sampled:
                now, old, reference = update["log_probs"][t], row["old_log_probs"][t], row["log_probs_ref"][t]
                ratio = math.exp(now - old)
                advantage = row["advantage"] * row.get("importance_weights", row["action_mask"])[t]
                surrogate = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
                kl = math.exp(reference - now) - (reference - now) - 1
                term = surrogate + config["kl_weight"] * kl
                term /= config["max_new_tokens"] if is_drgrpo else sum(row["action_mask"])
                total += term / min(size, num_rows - update["minibatch"] * size)
    return total / config["epochs_per_step"] / math.ceil(num_rows / size)


def choose_step(page, step: int) -> None:
    page.select_option("#step", str(step))
    page.wait_for_function("step => report.chosen().step === step && document.querySelector('.completion')", arg=step)


def shown_row(page, directory: Path, rank: int) -> dict:
    """The row of samples.jsonl whose completion is shown in this place."""
    completion = int(page.locator(f".completion[data-rank='{rank}']").get_attribute("data-completion"))
    prompt = int(page.locator("input[name=prompt]:checked").get_attribute("data-prompt"))
    key = {"step": int(page.input_value("#step")), "prompt_index": prompt, "completion_index": completion}
    (row,) = [row for row in read(directory, "samples.jsonl") if key.items() <= row.items()]
    return row


def assert_shows_token(page, row: dict, place: int) -> None:
    """The panel shows the numbers of a row's token, counted from the first after the prompt."""
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
    if "importance_weights" in row:
        seen = [float(page.inner_text(f"#readout [data-key={key}]")) for key in ("weight", "difference")]
        apart = row["old_log_probs"][t] - row["sampler_log_probs"][t]
        assert seen == pytest.approx([row["importance_weights"][t], apart], abs=1e-9)
    else:
        assert page.locator("#readout :is([data-key=weight], [data-key=difference])").count() == 0
    seen = page.locator("#readout tr [data-key=log_prob]").all_inner_texts()
    expected = [update["log_probs"][t] for update in row["updates"]]
    assert list(map(float, seen)) == pytest.approx(expected, abs=1e-9)
    ratios = page.locator("#readout tr [data-key=ratio]").all_inner_texts()
    assert list(map(float, ratios)) == pytest.approx(
        [math.exp(x - row["old_log_probs"][t]) for x in expected], abs=1e-6
    )


def tab_to(page, selector: str) -> None:
    """Press the tab key until something that matches has the focus."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    pytest.fail(f"the tab key does not reach {selector}")


# The loss


@pytest.mark.parametrize("name", ["base", "drgrpo"])
def test_the_terms_of_a_step_add_up_to_the_logged_loss(runs, open_page, name):
    """With KL and clipped ratios, over two minibatches and two epochs."""
    directory = runs[name]
    config = json.loads((directory / "config.json").read_text())
    rows, loss = read(directory, "samples.jsonl"), logged(directory, "loss/total")
    assert max(logged(directory, "policy/clipped").values()) > 0
    assert {(u["epoch"], u["minibatch"]) for row in rows for u in row["updates"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    page = open_page(directory / "report.html")
    for step in (1, 2):
        choose_step(page, step)
        check = page.locator("#loss-check")
        assert check.get_attribute("data-state") == "equal"
        total = float(check.get_attribute("data-sum"))
        assert abs(loss[step]) > 1e-4  # else 1e-5 would not say much
        assert total == pytest.approx(loss[step], abs=1e-5)
        assert total == pytest.approx(sum(row_sum(row, config) for row in rows if row["step"] == step), abs=1e-9)
        assert f"{abs(loss[step]):.6f}" in check.inner_text()
        for rank in range(4):
            card = page.locator(f".completion[data-rank='{rank}']")
            expected = row_sum(shown_row(page, directory, rank), config)
            assert float(card.get_attribute("data-sum")) == pytest.approx(expected, abs=1e-9)
            assert float(card.locator("[data-key=terms] b").text_content()) == pytest.approx(expected, abs=1e-8)
        assert "importance" not in check.text_content()  # this run has no weights


@pytest.mark.slow
def test_terms_with_importance_weights_are_the_loss(runs, open_page, tmp_path):
    """A run whose every token has a weight, and which logged the loss with it; what is damaged is not a weight of 1."""
    directory = tmp_path / "x"
    shutil.copytree(runs["base"], directory)
    config = json.loads((directory / "config.json").read_text()) | {"importance_cap": 2.0}
    (directory / "config.json").write_text(json.dumps(config))
    rows = read(directory, "samples.jsonl")
    for row in rows:
        places = zip(row["action_mask"], row["sampler_log_probs"], strict=True)
        row["importance_weights"] = [round(bit * min(math.exp(-x) / 2, 2.0), 6) for bit, x in places]
        places = zip(row["action_mask"], row["old_log_probs"], strict=True)
        row["old_log_probs"] = [round(x - 0.01 * bit, 6) for bit, x in places]
    losses = {step: sum(row_sum(row, config) for row in rows if row["step"] == step) for step in (1, 2)}
    more = {"policy/importance_weight": 0.9, "policy/importance_capped": 0.0, "time/weights": 0.1}
    more |= {"time/generation": 0.2, "policy/sampling_log_prob_difference_max": 0.3}
    metrics = [
        line | more | {"loss/total": losses[line["step"]]} if "loss/total" in line else line
        for line in read(directory, "metrics.jsonl")
    ]

    def write(name: str, lines: list[dict]) -> None:
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    write("samples.jsonl", rows)
    write("metrics.jsonl", metrics)
    page = open_page(write_report(directory))
    for step in (1, 2):
        choose_step(page, step)
        check = page.locator("#loss-check")
        assert check.get_attribute("data-state") == "equal"
        assert float(check.get_attribute("data-sum")) == pytest.approx(losses[step], abs=1e-9)
        assert losses[step] != pytest.approx(logged(runs["base"], "loss/total")[step], abs=1e-3)
        assert "advantage \u00d7 importance weight" in check.text_content()
        assert "p_engine(token), 2)" in check.text_content()
    page.locator(".completion[data-rank='1'] .token").nth(1).click()
    assert_shows_token(page, shown_row(page, directory, 1), 1)
    assert "importance weight" in page.inner_text("#token-status")
    titles = page.locator(".panel").evaluate_all("panels => panels.map((panel) => panel.dataset.panel)")
    assert {"Importance weight", "Importance weight at its cap", "Sampling against training, largest"} <= {*titles}
    labels = page.inner_text("[data-panel='Seconds by phase'] .legend")
    assert "weights into the engine" in labels
    assert "answers of the engine" in labels
    rows[0]["importance_weights"] = [None, "<img src=x onerror=alert(1)>"]
    write("samples.jsonl", rows)
    assert open_page(write_report(directory)).locator("#loss-check").get_attribute("data-state") == "missing"


def test_a_step_that_is_not_all_there_is_no_sum(runs, open_page):
    page = open_page(runs["turns"] / "report.html")
    assert page.locator("#loss-check").get_attribute("data-state") == "part"
    assert "8 of 16 rows" in page.inner_text("#loss-check")


@pytest.mark.parametrize("kind", ["grpo", "drgrpo"])
def test_terms_of_a_smaller_minibatch_and_a_tool(runs, open_page, kind):
    """Three rows, the last one in a minibatch of its own; a token of a tool; ratios beyond both limits."""
    config = {"prompts_per_step": 1, "group_size": 3, "minibatch_size": 2, "epochs_per_step": 2, "kl_weight": 0.1}
    config |= {"critic_type": kind, "clip_eps": 0.2, "max_new_tokens": 8}
    rows = []
    for completion, advantage in enumerate((1.0, -0.5, 2.0)):
        row = {"prompt_index": 4, "completion_index": completion, "prompt_length": 1, "ids": [1, 2, 3, 4, 5]}
        row |= {"action_mask": [0, 1, 0, 1, 1], "advantage": advantage, "log_probs_ref": [0, -2.0, 0, -1.0, -0.5]}
        row |= {"sampler_log_probs": [0, -1.5, 0, -1.0, -0.9], "old_log_probs": [0, -1.51, 0, -1.0, -0.9]}
        passes = enumerate(([0, -1.5, 0, -1.0, -0.9], [0, -1.0, 0, -1.5, -0.95]))
        updates = [{"epoch": epoch, "minibatch": completion // 2, "log_probs": now} for epoch, now in passes]
        rows.append(row | {"updates": updates})
    page = open_page(runs["base"] / "report.html")
    groups, loss = encode_step(rows)["groups"], describe_loss(config)
    step = page.evaluate("([groups, loss]) => report.stepLoss(groups, loss)", [groups, loss])
    assert step["total"] == pytest.approx(sum(row_sum(row, config) for row in rows), abs=1e-9)
    seen = [(update["epoch"], update["minibatch"], update["rows"]) for update in step["updates"]]
    assert seen == [(0, 0, 2), (0, 1, 1), (1, 0, 2), (1, 1, 1)]
    clipped = "([row, loss]) => report.tokenTerms(row, loss)[1].clipped"
    seen = [page.evaluate(clipped, [row, loss]) for row in groups[0]["rows"]]
    assert seen == [[True, False, False], [False, True, False], [True, False, False]]

    def state(groups: list[dict], loss: dict, logged: float | None = 0) -> str:
        return page.evaluate("([...a]) => report.checkLoss(...a, true).state", [groups, loss, logged])

    assert state(groups, loss | {"kind": None}) == "unknown"
    assert state(groups, loss, logged=None) == "missing"
    unknown = page.evaluate("([row, loss]) => report.rowLoss(row, loss)", [groups[0]["rows"][0], loss | {"kind": None}])
    assert math.isnan(unknown)
    for damage in ({"advantage": None}, {"log_probs_ref": [None] * 5}):
        assert state(encode_step([*rows[:2], rows[2] | damage])["groups"], loss) == "missing"


def test_a_loss_that_differs_is_said(runs, open_page):
    """To 1e-5, of the loss itself where it is large."""
    page = open_page(runs["base"] / "report.html")
    loss = {"kind": "grpo", "clip_eps": 0.2, "kl_weight": 0, "rows": 1, "minibatch_size": 1, "epochs": 1}
    updates = [{"epoch": 0, "minibatch": 0, "log_probs": [0]}]
    for total, logged, state in (
        (0.5, 0.500009, "equal"),
        (0.5, 0.500011, "differs"),
        (3e5, 300_002.9, "equal"),
        (3e5, 300_003.1, "differs"),
    ):
        row = {"mask": [1], "sampler": [0], "old": None, "ref": None, "advantage": -total, "updates": updates}
        arguments = [[{"rows": [row]}], loss, logged, True]
        assert page.evaluate("arguments => report.checkLoss(...arguments).state", arguments) == state


# A step, a prompt, a token


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "turns"])
def test_a_token_is_chosen_by_mouse(runs, open_page, name):
    directory = runs[name]
    page = open_page(directory / "report.html")
    page.click("#step-next")
    page.wait_for_function("() => report.chosen().step === 2")
    other = page.locator("input[name=prompt]:not(:checked)").first.get_attribute("data-prompt")
    page.click(f"label:has(input[data-prompt='{other}'])")
    returns = [float(text) for text in page.locator(".completion [data-key=return] b").all_inner_texts()]
    assert returns == sorted(returns, reverse=True)
    for rank in (0, 3):
        row = shown_row(page, directory, rank)
        assert row["prompt_index"] == int(other)
        assert float(page.inner_text(f".completion[data-rank='{rank}'] [data-key=return] b")) == row["return"]
        tokens = page.locator(f".completion[data-rank='{rank}'] .token")
        assert tokens.count() == len(row["ids"]) - row["prompt_length"]
        for place in (0, tokens.count() - 1):
            tokens.nth(place).hover()
            assert_shows_token(page, row, place)
    page.locator(".prompt .token").first.click()
    assert "part of the prompt, not in the loss" in page.inner_text("#readout")


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
    page.keyboard.press("End")
    assert page.evaluate("report.chosen().by") == "term"
    tab_to(page, ".completion .token")
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft"):
        page.keyboard.press(key)
    row = shown_row(page, directory, 0)
    place = len(row["ids"]) - row["prompt_length"] - 2
    assert_shows_token(page, row, place)
    assert f"{row['sampler_log_probs'][-2]:.6f}" in page.inner_text("#token-status")  # for a screen reader
    page.keyboard.press("PageDown")
    assert page.evaluate("document.activeElement.closest('.completion').dataset.rank") == "1"
    page.keyboard.press("Escape")
    assert page.locator(".completion[data-rank='1'] [aria-selected=true]").count() == 0


@pytest.mark.slow
def test_the_values_of_a_curve_are_those_of_the_run(runs, open_page):
    directory = runs["base"]
    page = open_page(directory / "report.html")
    panel = page.locator("[data-panel='Entropy']")
    panel.locator(".plot").focus()
    entropy = logged(directory, "policy/entropy")
    for key, step in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2)):
        page.keyboard.press(key)
        assert panel.locator(".at").inner_text() == f"step {step}"
        text = panel.locator("output").inner_text()
        assert text == "\u2013" if step == 0 else float(text) == pytest.approx(entropy[step], rel=1e-3)
    page.keyboard.press("Enter")
    page.wait_for_function("() => report.chosen().step === 2")
    page.locator("[data-panel='Gradient norm'] .plot").hover()
    assert "step" in page.inner_text("[data-panel='Entropy'] .at")


@pytest.mark.slow
def test_two_runs_are_laid_over_each_other(runs, open_page, tmp_path):
    path = write_report(runs["base"], runs["drgrpo"], tmp_path / "both.html")
    page = open_page(path)
    for number, name in enumerate(("base", "drgrpo")):
        text = page.inner_text(f"[data-panel='Loss'] output[data-run='{number}']")
        assert float(text) == pytest.approx(logged(runs[name], "loss/total")[2], rel=1e-2)
    assert "experiment_drgrpo/x" in page.inner_text("#runs")


# Whose text it is, and where it is shown


@pytest.fixture(scope="module")
def planted(runs, tmp_path_factory) -> Path:
    """The page of a copy of the run with conversations, with a script wherever a file of a run holds text."""
    directory = tmp_path_factory.mktemp("planted") / "<b onclick=hacked()>"
    shutil.copytree(runs["turns"], directory)
    texts = {"question": HOSTILE, "answer": HOSTILE, "text": HOSTILE, "finish_reason": HOSTILE}
    texts |= {"turns": [["assistant", HOSTILE], ["tool", f"<tool_call>{HOSTILE}"]], "rewards": {HOSTILE: 1.0}}
    changes = {"samples.jsonl": texts, "tokens.jsonl": {"text": HOSTILE}, "metrics.jsonl": {f"reward/{HOSTILE}": 0.5}}
    for name, change in changes.items():
        rows = [row | change for row in read(directory, name)]
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    finding = {"step": 1, "finding": HOSTILE, "sentence": HOSTILE}
    (directory / "diagnosis.jsonl").write_text(json.dumps(finding) + "\n")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"task": HOSTILE, HOSTILE: HOSTILE}))
    return write_report(directory)


@pytest.mark.parametrize("bypass_csp", [True, False])
def test_a_script_in_a_text_is_shown_and_does_not_run(planted, open_page, bypass_csp):
    """Nor would it run if the page allowed all scripts: it is escaped."""
    page = open_page(planted, bypass_csp=bypass_csp)
    page.wait_for_selector(".completion")
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    page.locator(".completion .token").first.click()
    for place in ("#findings", "#runs", ".question", ".completion .token >> nth=0", ".prompt", "#readout"):
        assert SHOWN[:60] in page.inner_text(place), place
    page.check("input[name=view][value=turns]")
    assert SHOWN in page.inner_text(".turn.tool >> nth=0")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, iframe, body script:not([type])").count() == 1  # uPlot's


def test_the_page_runs_no_script_that_is_put_into_it(runs, open_page):
    """The second line of defence: its Content-Security-Policy."""
    page = open_page(runs["base"] / "report.html")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x onerror=hacked=1>')")
    assert page.evaluate("window.hacked") is None
    assert all("violates the following Content Security Policy" in fault for fault in page.faults)
    assert len(page.faults) >= 2
    page.faults.clear()


@pytest.mark.slow
def test_runs_without_samples_or_steps_have_a_page(runs, open_page, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    page = open_page(write_report(tmp_path))
    assert "the run has logged no step yet" in page.inner_text("#curves")
    assert "There are no samples" in page.inner_text("#samples")
    exploded = json.dumps({"step": 3, "loss/grad_norm": 4e7})
    (tmp_path / "metrics.jsonl").write_text((runs["base"] / "metrics.jsonl").read_text() + exploded + "\n")
    (tmp_path / "samples.jsonl").write_bytes((runs["base"] / "samples.jsonl").read_bytes()[:-50])
    page = open_page(write_report(tmp_path))
    assert "The last line is not complete" in page.inner_text("#samples-note")
    assert page.locator(".completion").count() == 4
    assert page.locator("#loss-check").get_attribute("data-state") == "unknown"
    plot, area = (page.locator(f"[data-panel='Gradient norm'] .{name}").bounding_box() for name in ("plot", "u-over"))
    assert area["x"] - plot["x"] > 6 * len("40,000,000")  # pixels for the largest number at the axis


@pytest.mark.slow
def test_a_phone_needs_no_sideways_scrolling(runs, open_page):
    for name in ("base", "turns"):
        page = open_page(runs[name] / "report.html", viewport={"width": 400, "height": 800}, has_touch=True)
        page.locator(".completion .token").first.tap()
        page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        if name == "turns":
            page.check("input[name=view][value=turns]")
            assert page.evaluate("document.documentElement.scrollWidth") == 400


def serious(found) -> list[tuple[str, str]]:
    """What axe found: the rule, and the first element that breaks it."""
    violations = [entry for entry in found.response["violations"] if entry["impact"] != "minor"]
    return [(entry["id"], entry["nodes"][0]["html"]) for entry in violations]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), [("base", "light"), ("turns", "dark")])
def test_axe_finds_nothing_serious(runs, open_page, name, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(runs[name] / "report.html", color_scheme=scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, background.strip("rgb()").split(",")))
    assert brightness > 600 if scheme == "light" else brightness < 150
    page.locator(".completion .token").first.click()
    assert serious(Axe().run(page)) == []
    if name == "turns":
        page.check("input[name=view][value=turns]")
        assert serious(Axe().run(page, context="#group")) == []


@pytest.mark.slow
def test_the_live_page_follows_a_run(runs, open_page, tmp_path):
    directory = tmp_path / "x"
    shutil.copytree(runs["base"], directory, ignore=shutil.ignore_patterns("summary.json", "final", "*.html"))
    later = {}
    for name in ("metrics.jsonl", "samples.jsonl"):
        rows = read(directory, name)
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] < 2))
        later[name] = "".join(json.dumps(row) + "\n" for row in rows if row["step"] == 2)
    with Server([directory], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            page = open_page(f"http://127.0.0.1:{server.server_port}/")
            page.wait_for_selector(".completion")
            page.check("#follow")
            assert page.locator("#step option").all_inner_texts() == ["1 (all rows)"]
            assert "not finished" in page.inner_text("#runs")
            shutil.copy(runs["base"] / "summary.json", directory)
            for name, text in later.items():
                with (directory / name).open("a") as file:
                    file.write(text)
            page.wait_for_function(
                "() => report.chosen().step === 2 && document.querySelectorAll('#step option').length === 2"
            )
            is_there = "loss => { const { state, logged } = document.getElementById('loss-check').dataset;"
            is_there += " return state === 'equal' && Math.abs(logged - loss) < 1e-7 }"
            page.wait_for_function(is_there, arg=logged(directory, "loss/total")[2])
            assert page.locator("[data-state=finished]").count() == 1
            directory.rename(tmp_path / "y")
            page.wait_for_function("() => document.getElementById('live').textContent.includes('is gone')")
            page.faults.clear()  # the browser reports the answer 503 as an error
        finally:
            server.shutdown()
            thread.join()
