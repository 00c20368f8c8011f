"""The page of the laboratory: one HTML file in which the bundled policy learns, in the reader's browser.

Its own scripts and styles are in this directory; curves, tokens and their colours are those of the page of a run. It
loads nothing, and a Content-Security-Policy allows no request, so a reward that came with a link can send nothing.
"""

import ast
import os
import re
import textwrap
import tomllib
from pathlib import Path

from viewer.bands import WINDOW
from viewer.groups import series
from viewer.lab.contents import lab_data, worker_script
from viewer.panels import heading
from viewer.report import encode_panel, hash_of, own_text, to_json
from viewer.results import read_runs
from viewer.runs import RunError, rolling_means

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHARED = ("1_basics.js", "3_plots.js", "4_tokens.js", "5_group.js")  # of the page of a run
CURVES = {  # by key: the title, and what it shows
    "reward/correct": ("Right answers", "Share of the answers of a step."),
    "completion/reasoned": ("Reasoned answers", "Share of the answers that begin with a thought."),
    "completion/length": ("Length", "Tokens of an answer, mean."),
    "reward/total": ("Reward", "What an answer is paid, mean."),
    "policy/entropy": ("Entropy", "How undecided the policy is about a token, in nats."),
    "loss/kl": ("KL to the start", "How far the policy has moved, in nats per token."),
}
SETTINGS = ("group_size", "prompts_per_step", "max_new_tokens", "temperature", "lr", "kl_weight", "epochs_per_step")
SETTINGS += ("minibatch_size", "steps")
ALGORITHMS = {
    "grpo": "experiment_base",
    "drgrpo": "experiment_drgrpo",
    "rloo": "policy_gradients/rloo",
    "maxrl": "policy_gradients/maxrl",
    "gspo": "policy_gradients/gspo",
    "cispo": "policy_gradients/cispo",
    "reinforce": "policy_gradients/reinforce",
    "reinforce_baseline": "policy_gradients/reinforce",
}
CHECKSUM = "77e899d6"  # of the weights after ten steps with the default settings, in every browser


def write_lab(path: Path) -> Path:
    """Write the page, whose links lead to the files of this repository."""
    if path.suffix != ".html" or path.is_dir():
        raise RunError(f"{path} cannot be the page: give the name of a file that ends in .html")
    base = Path(os.path.relpath(ROOT, path.parent.resolve())).as_posix()
    path.write_text(render(f"{base}/"), encoding="utf-8", newline="\n")
    return path


def render(base: str = "", is_book: bool = False) -> str:
    """The page; `base`: where its links to files of the repository begin; `is_book`: their pages are HTML."""
    import jinja2

    script = "".join(own_text(HERE.parent / "page" / name) for name in SHARED)
    script += "".join(own_text(HERE / name) for name in ("settings.js", "guide.js", "page.js"))
    uplot_js = own_text(HERE.parent / "vendor" / "uPlot.iife.min.js")
    styles = [HERE.parent / "vendor" / "uPlot.min.css", HERE.parent / "page" / "report.css", HERE / "lab.css"]
    css = "".join(map(own_text, styles))
    rules = ["default-src 'none'", f"style-src {hash_of(css)}", "img-src data:", "worker-src blob:"]
    rules += [f"script-src {hash_of(script)} {hash_of(uplot_js)} 'wasm-unsafe-eval' 'unsafe-eval'"]  # eval: rewards
    rules += ["base-uri 'none'", "form-action 'none'"]
    parts = {"css": css, "script": script, "uplot_js": uplot_js, "csp": "; ".join(rules)}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    data = page_data() | {"base": base, "isBook": is_book}
    return environment.from_string(own_text(HERE / "lab.html.jinja")).render(
        **parts, data=to_json(data), checksum=CHECKSUM
    )


def page_data() -> dict:
    """What the scripts of the page read, and what they send to the worker (`load`, `worker`)."""
    load = lab_data()
    runs = [
        run for name, run in read_runs(ROOT / "experiment_base" / "results").items() if re.fullmatch(r"seed\d", name)
    ]
    panels = []
    for key, (title, about) in CURVES.items():
        curves = [rolling_means(list(series(run, key).values()), WINDOW) for run in runs]
        band = {"lowest": [*map(min, *curves)], "highest": [*map(max, *curves)]}
        panel = encode_panel(heading(key)[1], {})
        panels.append(panel | {"key": key, "title": title, "about": about, "band": band})
    return {
        "load": load,
        "texts": tomllib.loads(own_text(HERE / "texts.toml")),
        "worker": worker_script(),
        "tokenTexts": load["data"].pop("token_texts"),
        "titles": {"kl": heading("loss/kl")[1].title},
        "panels": panels,
        "seeds": [run.config["seed"] for run in runs],
        "window": WINDOW,
        "defaults": {name: runs[0].config[name] for name in SETTINGS},
        "lines": {name: lesson(experiment) for name, experiment in ALGORITHMS.items()},
        "checksum": CHECKSUM,
    }


def lesson(experiment: str) -> dict:
    """The advantage and the loss of an experiment's train.py: [[line, whether experiment_base lacks it]]."""
    base = [line.strip() for line in own_text(ROOT / "experiment_base" / "train.py").splitlines()]
    text = own_text(ROOT / experiment / "train.py")
    advantage = re.search(r"^ *# 3 advantage.*?(?=\n *run\.lap)", text, re.DOTALL | re.MULTILINE)[0]
    (loss,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == "policy_loss"]
    first = [line for line in advantage.splitlines() if "experience = collate" not in line]
    lines = [*textwrap.dedent("\n".join(first)).splitlines(), "", *text.splitlines()[loss.lineno - 1 : loss.end_lineno]]
    return {
        "file": f"{experiment}/train.py",
        "lines": [[line, bool(line.strip()) and line.strip() not in base] for line in lines],
    }
