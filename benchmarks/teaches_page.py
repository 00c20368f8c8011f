"""The figure and the tables of docs/what_rl_teaches.md, from what what_rl_teaches.py has measured.

pass@k is the unbiased estimate of common/evaluate.py from 256 samples of each question, averaged over the questions.
"""

import json
from pathlib import Path

import numpy as np

from common.evaluate import pass_at_k

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "what_rl_teaches"
PICTURE = ROOT / "docs" / "what_rl_teaches.png"
KS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHOWN = (1, 4, 16, 64, 256)  # in tables
NUM_RESAMPLES = 4000

Result = dict  # of one policy: counts per question by name, and "about"
Results = dict[str, dict[str, list[Result]]]  # by case, and by name without its seed


def read_results() -> Results:
    results: Results = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        name = path.stem.rstrip("0123456789").rstrip("-")
        results.setdefault(path.parent.name, {}).setdefault(name, []).append(json.loads(path.read_text("utf-8")))
    return results


class Group:
    """The same policy with several seeds, on some of its questions."""

    def __init__(self, results: list[Result], terms: range | None = None):
        self.results = results
        numbers = np.array(results[0]["num_terms"])
        self.mask = np.isin(numbers, terms) if terms is not None else np.ones(len(numbers), dtype=bool)

    def counts(self, name: str) -> np.ndarray:
        """(seeds, questions); 0 where nothing was counted."""
        return np.array([result.get(name, [0] * len(self.mask)) for result in self.results])[:, self.mask]

    def total(self, *names: str) -> np.ndarray:
        """(seeds,) the sum over questions."""
        return sum(self.counts(name).sum(axis=1) for name in names)

    def passes(self, k: int, name: str = "right") -> np.ndarray:
        """(seeds, questions): pass@k of each question, of what `name` counts as a success."""
        n = self.results[0]["about"]["samples"]
        of_count = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
        return of_count[self.counts(name)]

    @property
    def samples(self) -> int:
        return self.results[0]["about"]["samples"] * int(self.mask.sum())


def cell(values: np.ndarray, digits: int = 3) -> str:
    """Of one policy its value, of several seeds the mean and the range.

    >>> cell(np.array([0.5])), cell(np.array([0.5, 0.7]))
    ('0.500', '0.600 (0.500 to 0.700)')
    """
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({values.min():.{digits}f} to {values.max():.{digits}f})"


def difference(before: np.ndarray, after: np.ndarray) -> str:
    """Of means over questions, (seeds, questions) each, with a 95 % interval from drawing the questions again."""
    values = after.mean(axis=0) - before.mean(axis=0)
    drawn = np.random.default_rng(0).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), (0.025, 0.975))
    return f"{values.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pass_table(groups: dict[str, Group], compare: tuple[str, str]) -> str:
    """Greedy accuracy and pass@k of every group, and the difference of two of them."""
    first, second = (groups[name] for name in compare)
    rows = [
        ["greedy accuracy", *(cell(group.counts("greedy/right").mean(axis=1)) for group in groups.values()),
         difference(first.counts("greedy/right"), second.counts("greedy/right"))]
    ]  # fmt: skip
    for k in SHOWN:
        cells = [cell(group.passes(k).mean(axis=1)) for group in groups.values()]
        label = "sampled accuracy (pass@1)" if k == 1 else f"pass@{k}"
        rows.append([label, *cells, difference(first.passes(k), second.passes(k))])
    return markdown(["", *groups, f"{compare[1]}, minus {compare[0]}"], rows)


def by_length(groups: dict[str, list[Result]], measure) -> str:
    """One row per number of terms, one column per group."""
    rows = []
    for terms in range(5, 11):
        rows.append(
            [str(terms), *(cell(measure(Group(results, range(terms, terms + 1)))) for results in groups.values())]
        )
    return markdown(["numbers", *groups], rows)


def changes(groups: dict[str, Group]) -> str:
    """What the sampled completions of sums are like; shares are of all completions, unless said."""

    def share(*names: str):
        return lambda group: group.total(*names) / group.samples

    def ratio(part: str, whole: str):
        return lambda group: group.total(part) / group.total(whole)

    rows = {
        "wrong steps, of all steps": (ratio("steps/wrong", "steps"), 4),
        "first mistake: a wrong result": (share("mistake/arithmetic"), 3),
        "first mistake: another number than the question's": (share("mistake/operand"), 3),
        "first mistake: not carried on from the last result": (share("mistake/carried"), 3),
        "first mistake: numbers left out at the end": (share("mistake/left out"), 3),
        "first mistake: another answer than the last result": (share("mistake/answer"), 3),
        "first mistake: none or several answers": (share("mistake/form"), 3),
        "right, in spite of a mistake": (share("right/with mistake"), 3),
        "step by step": (share("style/step by step"), 3),
        "careful": (share("style/careful"), 3),
        "mixed": (share("style/mixed"), 3),
        "checks per completion": (share("checks"), 3),
        "length (tokens)": (share("length"), 1),
        "cut off": (share("cut_off"), 4),
    }
    lines = [[name, *(cell(f(group), digits) for group in groups.values())] for name, (f, digits) in rows.items()]
    return markdown(["", *groups], lines)


STYLES = ("step by step", "careful", "mixed", "neither", "direct")


def divide(before: list[Result], after: list[Result], terms: range) -> dict[str, np.ndarray]:
    """The gain in sampled accuracy as choice of style and accuracy within styles, per number of terms, then averaged.

        choice first:   sum_s (w'_s - w_s) a_s,   then within: sum_s w'_s (a'_s - a_s)
        choice last:    sum_s (w'_s - w_s) a'_s

    w is the share and a the accuracy of a style; a prime means after. Two orders, because neither is the right one.
    """
    parts: dict[str, list[np.ndarray]] = {"gain": [], "choice, first": [], "choice, last": []}
    for number in terms:
        old, new = (Group(results, range(number, number + 1)) for results in (before, after))
        first = last = 0.0
        for style in STYLES:
            w, w_new = (x.total(f"style/{style}") / x.samples for x in (old, new))
            right, right_new = (x.total(f"style/{style}/right") / x.samples for x in (old, new))
            a, a_new = (np.divide(r, s, out=np.zeros_like(s), where=s > 0) for r, s in ((right, w), (right_new, w_new)))
            first, last = first + (w_new - w) * a, last + (w_new - w) * a_new
        parts["gain"].append(new.total("right") / new.samples - old.total("right") / old.samples)
        parts["choice, first"].append(first)
        parts["choice, last"].append(last)
    return {name: np.mean(values, axis=0) for name, values in parts.items()}


SHORT, MIDDLE, LONG = range(2, 5), range(5, 8), range(8, 11)  # numbers in a sum: of the bundled task, and beyond it
TITLES = {
    "bundled": "the bundled task: two to four numbers",
    "middle": "sums of five to seven numbers",
    "long": "sums of eight to ten numbers",
    "countdown": "Countdown",
}


def groups_of(results: Results) -> dict[str, dict[str, Group]]:
    """What is compared, by panel of the figure and by label; what has not been measured is left out."""
    bundled, long, longer = (results.get(case, {}) for case in ("bundled", "long_sums", "longer_sums"))
    sums = {
        "before": long.get("before"),
        "before, colder": long.get("before-colder"),
        "after, trained on 5 to 7": long.get("after"),
        "after, trained on 5 to 10": longer.get("after"),
        "lesson 2 again": long.get("lesson-again"),
        "lesson 2 again, longer": long.get("lesson-again-longer"),
    }
    short = {
        "before": bundled.get("before"),
        "made to think": bundled.get("made-to-think"),
        "after": bundled.get("after"),
    }
    panels = {"bundled": (short, None), "middle": (sums, MIDDLE), "long": (sums, LONG)}
    found = {
        panel: {label: Group(each, terms) for label, each in wanted.items() if each}
        for panel, (wanted, terms) in panels.items()
    }
    return {panel: groups for panel, groups in found.items() if groups}


def tables(results: Results) -> dict[str, str]:
    """All tables of the page, by name."""
    panels = groups_of(results)
    made = {}
    if "bundled" in panels:
        made["bundled"] = pass_table(panels["bundled"], ("before", "after")) + "\n" + answers(panels["bundled"])
    for panel, after in (("middle", "after, trained on 5 to 7"), ("long", "after, trained on 5 to 10")):
        if after in panels.get(panel, ()):
            made[panel] = pass_table(panels[panel], ("before", after))
            made[f"{panel}: completions"] = changes(panels[panel])
            made[f"{panel}: found and lost"] = found_and_lost(panels[panel])
    return made


def answers(groups: dict[str, Group]) -> str:
    """The rows about the style of answers to bundled questions; their last cell, the difference, is empty."""
    reasoned = [f"style/{style}" for style in STYLES if style != "direct"]

    def accuracy(group: Group, names: list[str]) -> str:
        asked = group.total(*names)
        return cell(group.total(*(f"{name}/right" for name in names)) / asked) if asked.all() else "-"

    rows = {
        "share of reasoned answers": lambda group: cell(group.total(*reasoned) / group.samples),
        "accuracy of reasoned answers": lambda group: accuracy(group, reasoned),
        "accuracy of direct answers": lambda group: accuracy(group, ["style/direct"]),
        "length (tokens)": lambda group: cell(group.total("length") / group.samples, 1),
    }
    lines = [[name, *(measure(group) for group in groups.values()), ""] for name, measure in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def found_and_lost(groups: dict[str, Group]) -> str:
    """How many questions have a right answer among the 256 samples, beside the policy before training."""
    before = groups["before"].counts("right")[0] > 0
    rows = []
    for label, group in groups.items():
        has = group.counts("right") > 0
        values = [has.sum(axis=1), (has & ~before).sum(axis=1), (~has & before).sum(axis=1)]
        rows.append([label, *(", ".join(str(number) for number in value) for value in values)])
    return markdown([f"of {len(before)} questions", "with a right answer", "found", "lost"], rows)


COLORS = {
    "before": "0.25", "after": "#0072B2", "made to think": "#CC79A7", "before, colder": "0.6",
    "after, trained on 5 to 7": "#0072B2", "after, trained on 5 to 10": "#D55E00",
    "lesson 2 again": "#009E73", "lesson 2 again, longer": "#8a6d00",
}  # fmt: skip


def draw(results: Results) -> None:
    """One panel per case: pass@k over k, a line for the mean of the seeds and a band from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    panels = groups_of(results)
    figure, places = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.4), squeeze=False)
    for axes, (panel, groups) in zip(places[0], panels.items(), strict=True):
        for label, group in groups.items():
            curves = np.array([group.passes(k).mean(axis=1) for k in KS]).T  # (seeds, K)
            style = "--" if label.startswith(("lesson", "made", "before, colder")) else "-"
            axes.plot(KS, curves.mean(axis=0), style, color=COLORS[label], label=label, linewidth=2)
            axes.fill_between(KS, curves.min(axis=0), curves.max(axis=0), color=COLORS[label], alpha=0.2, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(KS, [str(k) for k in KS])
        axes.set_title(TITLES[panel], fontsize=12)
        axes.set_xlabel("k: attempts per question")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    places[0, 0].set_ylabel("pass@k, held-out questions")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=100)
    plt.close(figure)
