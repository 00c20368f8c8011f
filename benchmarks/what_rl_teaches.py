"""The figure and the tables of docs/what_rl_teaches.md, from the measurements (see benchmarks/README.md).

    python benchmarks/what_rl_teaches.py

pass@k is the unbiased estimate of common/evaluate.py from 256 samples of each question, averaged over the questions.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.evaluate import pass_at_k
from viewer.results import read_json
from viewer.save_figure import save_figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "what_rl_teaches"
COUNTS = RESULTS / "counts.json"
PICTURE = ROOT / "docs" / "what_rl_teaches.png"
KS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHOWN = (1, 4, 16, 64, 256)  # in tables
NUM_RESAMPLES = 4000

Result = dict  # for one policy: counts per question by name, and "about"
Results = dict[str, dict[str, list[Result]]]  # by case, and by name without its seed


def read_results() -> Results:
    results: Results = {}
    for policy, result in sorted(json.loads(COUNTS.read_text("utf-8")).items()):
        case, _, name = policy.partition("/")
        if name:  # skip the results of forgotten.py and countdown_search.py
            results.setdefault(case, {}).setdefault(name.rstrip("0123456789").rstrip("-"), []).append(result)
    return results


class Group:
    """The same policy with several seeds, on some of its questions."""

    def __init__(self, results: list[Result], terms: range | None = None):
        self.results = results
        numbers = np.array(results[0]["num_terms"])
        self.mask = np.isin(numbers, terms) if terms is not None else np.ones(len(numbers), dtype=bool)

    def counts(self, name: str) -> np.ndarray:
        """(seeds, questions); 0 where nothing was counted. "sound": right answers with a correct thought."""
        if name == "sound":
            return self.counts("right") - self.counts("right/with mistake")
        return np.array([result.get(name, [0] * len(self.mask)) for result in self.results])[:, self.mask]

    def total(self, *names: str) -> np.ndarray:
        """(seeds,) the sum over questions."""
        return sum(self.counts(name).sum(axis=1) for name in names)

    def passes(self, k: int, name: str = "right") -> np.ndarray:
        """(seeds, questions): pass@k of each question, if `name` counts the successes."""
        n = self.results[0]["about"]["samples"]
        of_count = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
        return of_count[self.counts(name)]

    @property
    def samples(self) -> int:
        return self.results[0]["about"]["samples"] * int(self.mask.sum())


def cell(values: np.ndarray, digits: int = 3) -> str:
    """The value of one policy, or the mean and the range of several seeds.

    >>> cell(np.array([0.5])), cell(np.array([0.5, 0.7]))
    ('0.500', '0.600 (0.500 to 0.700)')
    """
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({values.min():.{digits}f} to {values.max():.{digits}f})"


def difference(before: np.ndarray, after: np.ndarray) -> str:
    """The difference of means over questions, (seeds, questions) each; a 95 % interval from redrawing the questions."""
    values = after.mean(axis=0) - before.mean(axis=0)
    drawn = np.random.default_rng(0).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), (0.025, 0.975))
    return f"{values.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pass_table(groups: dict[str, Group], pairs: list[tuple[str, str]], success: str = "right") -> str:
    """Greedy accuracy and pass@k of every group, and the differences of pairs: the second minus the first."""
    pairs = [pair for pair in pairs if set(pair) <= groups.keys()]
    rows = {"greedy accuracy": lambda group: group.counts("greedy/right")} if success == "right" else {}
    for k in SHOWN:
        name = "sampled accuracy (pass@1)" if k == 1 and success == "right" else f"pass@{k}"
        rows[name] = lambda group, k=k: group.passes(k, success)
    lines = []
    for name, measure in rows.items():
        cells = [cell(measure(group).mean(axis=1)) for group in groups.values()]
        differences = [difference(measure(groups[first]), measure(groups[second])) for first, second in pairs]
        lines.append([name, *cells, *differences])
    return markdown(["", *groups, *(f"{second}, minus {first}" for first, second in pairs)], lines)


def by_length(groups: dict[str, Group]) -> str:
    """Greedy and sampled accuracy, and the share of right thoughts: means over the seeds, a row per number of terms."""
    rows = []
    for terms in range(5, 11):
        parts = [Group(group.results, range(terms, terms + 1)) for group in groups.values()]
        measured = ((x.counts("greedy/right"), x.passes(1), x.passes(1, "sound")) for x in parts)
        rows.append([str(terms), *(", ".join(f"{values.mean():.3f}" for values in part) for part in measured)])
    return markdown(["numbers", *groups], rows)


def changes(groups: dict[str, Group]) -> str:
    """Properties of the sampled completions of sums; shares are of all completions, unless stated otherwise."""

    def share(*names: str):
        return lambda group: group.total(*names) / group.samples

    def ratio(part: str, whole: str):
        return lambda group: group.total(part) / group.total(whole)

    def accuracy(style: str):
        return ratio(f"style/{style}/right", f"style/{style}")

    rows = {
        "wrong steps, of all steps": (ratio("steps/wrong", "steps"), 4),
        "first mistake: a wrong result": (share("mistake/arithmetic"), 3),
        "first mistake: a number that is not asked for": (share("mistake/operand"), 3),
        "first mistake: a number left out": (share("mistake/left out"), 3),
        "other mistakes": (share("mistake/carried", "mistake/answer", "mistake/form"), 3),
        "right, in spite of a mistake": (share("right/with mistake"), 4),
        "no mistake, but another order": (share("another order"), 3),
        "share of step by step": (share("style/step by step"), 3),
        "share of careful": (share("style/careful"), 3),
        "accuracy of step by step": (accuracy("step by step"), 3),
        "accuracy of careful": (accuracy("careful"), 3),
        "checks per completion": (share("checks"), 3),
        "length (tokens)": (share("length"), 1),
        "cut off": (share("cut_off"), 4),
    }
    lines = [[name, *(cell(f(group), digits) for group in groups.values())] for name, (f, digits) in rows.items()]
    return markdown(["", *groups], lines)


STYLES = ("step by step", "careful", "mixed", "neither", "direct")


def divide(before: list[Result], after: list[Result], terms: range) -> dict[str, np.ndarray]:
    """Divide the gain in sampled accuracy into choice of style and accuracy within styles, averaged over term counts.

        choice first:   sum_s (w'_s - w_s) a_s,   then within: sum_s w'_s (a'_s - a_s)
        choice last:    sum_s (w'_s - w_s) a'_s

    w is the share and a the accuracy of a style; a prime means after. Both orders, because neither is more right.
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


def divided(results: Results, labels: list[str], terms: range) -> str:
    before = results["long_sums"]["before"]
    found = {label: divide(before, results[LABELS[label][0]][LABELS[label][1]], terms) for label in labels}
    rows = [[part, *(cell(parts[part]) for parts in found.values())] for part in next(iter(found.values()))]
    return markdown(["of sampled accuracy", *found], rows)


MIDDLE, LONG = range(5, 8), range(8, 11)  # numbers in a sum: lengths in the warm start, and new ones
THEN = "lesson 2 again, then RL on 5 to 10"
LABELS = {
    "before": ("long_sums", "before"),
    "lesson 2 again": ("long_sums", "lesson-again"),
    "RL on 5 to 7": ("long_sums", "after"),
    "RL on 5 to 10": ("longer_sums", "after"),
    THEN: ("longer_sums", "lesson-again-then"),
}
UP_TO_7 = ("before", "lesson 2 again", "RL on 5 to 7")
UP_TO_10 = tuple(LABELS)


def sums(results: Results, labels: Iterable[str], terms: range | None) -> dict[str, Group]:
    """The measurements on longer sums, by label."""
    found = {label: results.get(LABELS[label][0], {}).get(LABELS[label][1]) for label in labels}
    return {label: Group(each, terms) for label, each in found.items() if each}


def bundled(results: Results) -> dict[str, Group]:
    names = {"before": "before", "made to think": "made-to-think", "after RL": "after"}
    return {label: Group(results["bundled"][name]) for label, name in names.items()}


def searches(results: Results) -> dict[str, Group]:
    """The Countdown policies, with the budget of the training."""
    found = results["countdown_56"]
    return {label: Group(found[name]) for label, name in (("before", "before"), ("after RL", "after")) if name in found}


def tries(groups: dict[str, Group]) -> str:
    """The table rows about the completions of Countdown; their last cell, the difference, is empty."""
    names = {"tries": "tries", "false claims": "false_claim", "giving up": "gives_up", "cut off": "cut_off"}
    rows = [[shown, *(cell(x.total(name) / x.samples) for x in groups.values()), ""] for shown, name in names.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def tries_of_searches() -> str:
    """The counts of countdown_search.py with room for seven tries: before RL, and over the seeds."""
    found = read_json(COUNTS, "search")["policies"]
    after = [policy for name, policy in sorted(found.items()) if name.startswith("seed")]
    rows = {
        "sampled accuracy": ("completions", "correct"),
        "tries per completion": ("completions", "tries"),
        "tries that hit the target": ("tries", "is_hit"),
        "tries within 10 of the target": ("tries", "is_near"),
        "tries made before in the same completion": ("tries", "is_repeated"),
        "tries whose value is right": ("tries", "is_computed"),
        "false claims": ("completions", "false_claim"),
        "cut off": ("completions", "cut_off"),
    }
    lines = []
    for shown, (kind, name) in rows.items():
        values = np.array([policy[kind][name] for policy in after])
        lines.append([shown, cell(np.array([found["before"][kind][name]])), cell(values)])
    return markdown(["", "before", "after RL"], lines)


def tables(results: Results) -> dict[str, str]:
    """All tables of the page, by name."""
    short = bundled(results)
    middle = sums(results, UP_TO_7, MIDDLE)
    long = sums(results, UP_TO_10, LONG)
    again = "lesson 2 again"
    pairs = [(again, "RL on 5 to 10"), (again, THEN)]
    search = searches(results)
    return {
        "countdown": pass_table(search, [("before", "after RL")]) + "\n" + tries(search),
        "countdown: tries": tries_of_searches(),
        "bundled": pass_table(short, [("before", "after RL")]) + "\n" + answers(short),
        "5 to 7": pass_table(middle, [("before", "RL on 5 to 7"), (again, "RL on 5 to 7")]),
        "5 to 7: completions": changes(middle),
        "5 to 7: styles": divided(results, [label for label in middle if label != "before"], MIDDLE),
        "8 to 10: answers": pass_table(long, [("before", "RL on 5 to 7"), *pairs]),
        "8 to 10: thoughts": pass_table(long, [(again, "RL on 5 to 7"), *pairs], "sound"),
        "8 to 10: completions": changes(long),
        "8 to 10: styles": divided(results, [label for label in long if label != "before"], LONG),
        "forgotten": forgotten(),
        "8 to 10: found and lost": found_and_lost(long),
        "by length": by_length(sums(results, LABELS, None)),
    }


def forgotten() -> str:
    """The losses of forgotten.py, in nats per token."""
    losses = read_json(COUNTS, "forgotten")["loss"]
    names = {"at the end of lesson 2": "at the end of lesson 2", "bundled": "the bundled policy"}
    names |= {"long_sums-lesson-again": "after lesson 2 again", "long_sums-after-0": "after RL on 5 to 7, seed 0"}
    rows = [
        [shown, *(f"{losses[name][kind]:.4f}" for kind in ("long sums", "others"))] for name, shown in names.items()
    ]
    return markdown(["nats per token", "sums of five to seven numbers", "others"], rows)


def answers(groups: dict[str, Group]) -> str:
    """The table rows about the style of answers to bundled questions; their last cell, the difference, is empty."""
    reasoned = [f"style/{style}" for style in STYLES if style != "direct"]

    def accuracy(group: Group, names: list[str]) -> str:
        asked = group.total(*names)
        is_rare = asked.min() < group.samples / 1000
        return "-" if is_rare else cell(group.total(*(f"{name}/right" for name in names)) / asked)

    rows = {
        "share of reasoned answers": lambda group: cell(group.total(*reasoned) / group.samples),
        "accuracy of reasoned answers": lambda group: accuracy(group, reasoned),
        "accuracy of direct answers": lambda group: accuracy(group, ["style/direct"]),
        "length (tokens)": lambda group: cell(group.total("length") / group.samples, 1),
    }
    lines = [[name, *(measure(group) for group in groups.values()), ""] for name, measure in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def found_and_lost(groups: dict[str, Group]) -> str:
    """How many questions have a success among 256 samples: of those with one before training, and of the others."""
    rows = []
    for label, group in groups.items():
        cells = [label]
        for success in ("right", "sound"):
            before, has = groups["before"].counts(success)[0] > 0, group.counts(success) > 0
            values = [has.sum(axis=1), (has & ~before).sum(axis=1), (~has & before).sum(axis=1)]
            cells += ["-" if label == "before" and value is not values[0] else number(value) for value in values]
        rows.append(cells)
    header = [f"of {int(groups['before'].mask.sum())} questions", "a right answer", "gained", "lost"]
    return markdown([*header, "a right thought", "gained", "lost"], rows)


def number(values: np.ndarray) -> str:
    """The mean of whole numbers, and the range if there are several."""
    return str(values[0]) if len(values) == 1 else f"{values.mean():.1f} ({values.min()} to {values.max()})"


COLORS = {
    "before": "0.2", "after RL": "#0072B2", "made to think": "#CC79A7",
    "RL on 5 to 7": "#0072B2", "RL on 5 to 10": "#D55E00",
    "lesson 2 again": "#009E73", THEN: "#CC79A7",
}  # fmt: skip


def draw(results: Results) -> None:
    """One panel per case: pass@k over k, with a line for the mean of the seeds and a band for their range."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    long = sums(results, UP_TO_10, LONG)
    middle = sums(results, UP_TO_7, MIDDLE)
    panels = [
        ("the bundled task: two to four numbers", bundled(results), "right"),
        ("sums of five to seven numbers", middle, "right"),
        ("sums of eight to ten numbers: right answers", long, "right"),
        ("sums of eight to ten numbers: right thoughts", long, "sound"),
        ("Countdown, with room for two tries", searches(results), "right"),
    ]
    figure, places = plt.subplots(3, 2, figsize=(11, 12.2))
    draw_lengths(places[-1, 1], sums(results, LABELS, None))
    for axes, (title, groups, success) in zip(places.flat, panels, strict=False):
        draw_panel(axes, groups, success)
        axes.set_title(title, fontsize=12)
    for axes in places[:, 0]:
        axes.set_ylabel("pass@k, held-out questions")
    for axes in (places[-1, 0], places[-2, 1]):
        axes.set_xlabel("k: attempts per question")
    figure.tight_layout()
    save_figure(figure, PICTURE, dpi=100)


def is_control(label: str) -> bool:
    """Whether the label names a control policy, which had no RL; it gets a broken line."""
    return label in ("made to think", "lesson 2 again")


def draw_panel(axes, groups: dict[str, Group], success: str) -> None:
    is_high = groups["before"].passes(KS[-1], success).mean() > 0.9
    place = "lower right" if is_high else "upper left"
    for label, group in groups.items():
        curves = np.array([group.passes(k, success).mean(axis=1) for k in KS]).T  # (seeds, K)
        style = {"linestyle": "--", "zorder": 3} if is_control(label) else {}
        axes.plot(KS, curves.mean(axis=0), color=COLORS[label], label=label, linewidth=2, **style)
        axes.fill_between(KS, curves.min(axis=0), curves.max(axis=0), color=COLORS[label], alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(KS, [str(k) for k in KS])
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9.5, loc=place)


def draw_lengths(axes, groups: dict[str, Group]) -> None:
    """The share of right thoughts by the number of terms in a sum."""
    lengths = range(5, 11)
    for label, group in groups.items():
        parts = [Group(group.results, range(length, length + 1)) for length in lengths]
        shares = np.array([part.passes(1, "sound").mean(axis=1) for part in parts]).T  # (seeds, lengths)
        style = {"linestyle": "--"} if is_control(label) else {}
        axes.plot(lengths, shares.mean(axis=0), marker="o", markersize=4, color=COLORS[label], label=label, **style)
        axes.fill_between(lengths, shares.min(axis=0), shares.max(axis=0), color=COLORS[label], alpha=0.2, linewidth=0)
    axes.set_title("right thoughts in one attempt", fontsize=12)
    axes.set_xlabel("numbers in the sum")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9.5, loc="lower left")


if __name__ == "__main__":
    results = read_results()
    draw(results)
    for name, lines in tables(results).items():
        print(f"{name}\n\n{lines}\n")
