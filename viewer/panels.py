"""Which panels a run has, and which curves: the table of harness/logs/headings.py, applied to its metrics."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from viewer.runs import kinds_of_questions, number

from harness.logs.headings import METRICS, PANELS, Metric, Panel

TELLING_ZERO = re.compile(r"accuracy|correct$|total$|kl$|variance|truncated|policy/(clipped|importance_capped)")


class Curves(NamedTuple):
    """A panel with something to show."""

    panel: Panel
    labels: dict[str, str]  # of its curves, by key


def panels_of(rows: Iterable[dict]) -> list[Curves]:
    """The panels that have curves, for lines of metrics.jsonl: those of the table, then one for each other key.

    A curve that is always 0 is left out, except where 0 tells something. The task describes questions and answers
    alike; what it says of an answer is a share, unless there are values above 1.

    >>> row = {"reward/correct": 0.0, "reward/total": 1.0, "completion/tries": 2, "completion/called": 0.5, "a/b_c": 1}
    >>> for panel, labels in panels_of([row | {"completion/failed": 0}]):
    ...     print(panel.title, [*labels.values()])
    accuracy ['training questions, sampled']
    reward ['correct', 'total']
    share of completions ['called']
    mean number per completion ['tries']
    a: b c ['b c']
    """
    kinds, peaks = kinds_of_questions(rows), {}
    for row in rows:
        for key, value in row.items():
            if key != "step" and number(value) is not None:
                peaks[key] = max(peaks.get(key, 0), abs(value))
    keys = sorted(peaks, key=lambda key: key.startswith("eval/"))  # training first, else as logged
    others = [key for key in keys if not key.startswith("eval/") and not any(_takes(p, key, kinds) for p in PANELS)]
    found, taken = [], set()
    for panel in (*PANELS, *(Panel(in_words(key), re.escape(key), is_more=True) for key in others)):
        own = [key for key in keys if _takes(panel, key, kinds) and (key not in taken or key == panel.again)]
        own = [key for key in own if peaks[key] <= panel.most]
        labels = {key: _label(panel, key) for key in own if peaks[key] > 0 or TELLING_ZERO.search(key)}
        taken |= {*own}
        found += [Curves(panel, labels)] if labels else []
    return found


def heading(key: str) -> tuple[str, Panel]:
    """The title of a metric in a figure of its own, and the panel that it usually is in.

    >>> heading("loss/kl")[0], heading("completion/length_right")[0], heading("reward/format")[0]
    ('KL to the policy at the start (nats per token)', 'length of right completions (tokens)', 'reward: format')
    """
    panel = next((panel for panel in PANELS if _takes(panel, key)), Panel("", ""))
    title = METRICS.get(key, Metric()).title or (panel.title if panel.keys == key else "")
    default = f"{in_words(key[11:])} (mean over completions)" if key.startswith("completion/") else in_words(key)
    return with_unit(title, panel) if title else default, panel


def with_unit(title: str, panel: Panel) -> str:
    return f"{title} ({panel.unit})" if panel.unit else title


def in_words(key: str) -> str:
    return key.replace("/", ": ").replace("_", " ")


def _takes(panel: Panel, key: str, kinds: Iterable[str] = ()) -> bool:
    """`kinds`: of questions, by their names."""
    is_of_questions = not panel.is_of_questions or _name(key) in kinds
    return is_of_questions and re.fullmatch(panel.keys, key) is not None


def _label(panel: Panel, key: str) -> str:
    own = "" if key == panel.again else METRICS.get(key, Metric()).label
    return own or _name(key).replace("_", " ")


def _name(key: str) -> str:
    """
    >>> _name("eval/greedy/accuracy_one_hop")
    'one_hop'
    """
    return key.rpartition("/")[2].removeprefix("accuracy_")
