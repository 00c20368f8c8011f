"""The gain of a run: the figures of summary.json, and the tables at the end of a run."""

import json
from pathlib import Path

from common.evaluate import Answer, Evaluation, Greedy, mean

from harness.base.machine import peak_memory_bytes
from harness.base.terminal import printable, say
from harness.logs.samples import END, turn_lines
from harness.task.task import Task

SHOWN = {  # metrics of evaluate() that the closing table shows first, and their labels
    "greedy/accuracy": "greedy accuracy",
    "sampled/accuracy": "sampled accuracy (mean@8)",
    "sampled/pass@8": "at least one of 8 right (pass@8)",
    "sampled/length": "completion length (tokens)",
}


def read_before(path: Path) -> Evaluation | None:
    """The evaluation before training, as the run saved it; None if it did not."""
    if not path.exists():
        return None
    metrics, greedy, answers = json.loads(path.read_text(encoding="utf-8"))
    # older runs saved only the texts
    greedy = [Greedy(answer, [], {}) if isinstance(answer, str) else Greedy(*answer) for answer in greedy]
    return Evaluation(metrics, greedy, [Answer(*answer) for answer in answers])


def summarise_steps(steps: list[dict], device: str) -> dict:
    """Duration, speed and memory, from the lines of metrics.jsonl."""
    timed = [row for row in steps if "time/step" in row]
    seconds = sum(row["time/step"] for row in timed)
    num_tokens = sum(row["time/tokens_per_second"] * row["time/step"] for row in timed)
    return {
        "steps": max((row["step"] for row in timed), default=0),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(num_tokens / seconds, 1) if timed else 0.0,
        "peak_memory_bytes": max([row["memory/peak_bytes"] for row in timed] + [peak_memory_bytes(device)]),
    }


def summarise_gain(task: Task, before: Evaluation, after: Evaluation) -> dict:
    """Accuracy before and after, all metrics of both evaluations, and the sources of the gain."""
    kinds = [task.file.kind(row) for row in task.eval_rows]
    return {
        "num_questions": len(task.eval_rows),
        "accuracy_before": before.metrics.get("greedy/accuracy"),
        "accuracy_after": after.metrics.get("greedy/accuracy"),
        "before": before.metrics,
        "after": after.metrics,
        "gain": divide_gain(before.answers, after.answers, kinds),
    }


def divide_gain(before: list[Answer], after: list[Answer], kinds: list[tuple]) -> dict[str, float]:
    """How much of the gain in sampled accuracy comes from other styles of answer, and how much from better answers.

        accuracy = sum_s w_s a_s,      w_s: share of the answers in style s;  a_s: their accuracy
        gain     = sum_s (w_s' - w_s) a_s  +  sum_s w_s' (a_s' - a_s)
                   choice of style            better answers, style by style

    The styles are the first names that the task describes as 0 or 1 so that exactly one of them is 1 in every answer:
    for the bundled task `reasoned` and `direct`. If there are none, the result is empty. The gain is divided for every
    kind of question separately, and then averaged: over all kinds together, a change in their mix would look like
    skill. If no answer of a kind has a style, the missing accuracy is taken from the other evaluation.

    >>> styles = ({"reasoned": 1.0, "direct": 0.0}, {"reasoned": 0.0, "direct": 1.0})
    >>> before = [Answer(0, 1.0, styles[0]), Answer(0, 0.0, styles[1])]
    >>> divide_gain(before, after=[Answer(0, 1.0, styles[0]), Answer(0, 1.0, styles[0])], kinds=[(3, 2)])
    {'choice of style': 0.5, 'better if reasoned': 0.0, 'better if direct': 0.0}
    """
    styles = _styles(before + after) if before and after else []
    parts = {"choice of style": 0.0, **{f"better if {style}": 0.0 for style in styles}} if styles else {}
    for kind in {kinds[answer.question] for answer in before}:
        old, new = ([answer for answer in side if kinds[answer.question] == kind] for side in (before, after))
        for style in styles:
            share, share_after = (mean([answer.description[style] for answer in side]) for side in (old, new))
            rights = ([answer.correct for answer in side if answer.description[style]] for side in (old, new))
            correct, correct_after = rights
            accuracy = mean(correct or correct_after or [0.0])
            accuracy_after = mean(correct_after) if correct_after else accuracy
            weight = len(old) / len(before)
            parts["choice of style"] += weight * (share_after - share) * accuracy
            parts[f"better if {style}"] += weight * share_after * (accuracy_after - accuracy)
    return parts


def _styles(answers: list[Answer]) -> list[str]:
    if any(answer.description.keys() != answers[0].description.keys() for answer in answers):
        return []  # the task was changed between two parts of a run
    names = [name for name, value in answers[0].description.items() if isinstance(value, float)]  # an int is a count
    flags = [name for name in names if {answer.description[name] for answer in answers} <= {0.0, 1.0}]
    for styles in (*(flags[:end] for end in range(2, len(flags))), flags):
        if all(sum(answer.description[name] for name in styles) == 1 for answer in answers):
            return styles
    return []


def describe_gain(before: Evaluation, after: Evaluation, gain: dict[str, float]) -> str:
    """One sentence: what has become of the accuracy, and why, if one part of the gain explains most of it.

    A difference within two standard errors, of either accuracy, is none.

    >>> then, now = ({"greedy/accuracy": g, "sampled/accuracy": s, "sampled/reasoned": r} for g, s, r in (
    ...     (0.24, 0.4, 0.25), (0.98, 0.94, 0.99)
    ... ))
    >>> before, after = Evaluation(then, [None] * 256, []), Evaluation(now, [None] * 256, [])
    >>> describe_gain(before, after, {"choice of style": 0.54, "better if reasoned": 0.0})
    'Greedy accuracy rose from 24 % to 98 %: the share of answers that are reasoned rose from 25 % to 99 %.'
    >>> describe_gain(before, before, {})
    'Greedy accuracy is 24 % as before, as far as 256 questions can tell.'
    """
    old, new = (side.metrics.get("greedy/accuracy") for side in (before, after))
    if old is None or new is None:
        return ""
    number = len(after.greedy)
    if abs(new - old) <= 2 * sum(p * (1 - p) / number for p in (old, new)) ** 0.5:
        change = f"{old:.0%} before and {new:.0%} now" if old != new else f"{new:.0%} as before"
        return f"Greedy accuracy is {change}, as far as {number} questions can tell.".replace("%", " %")
    sentence = f"Greedy accuracy {'rose' if new > old else 'fell'} from {old:.0%} to {new:.0%}"
    return (sentence + _reason(before, after, gain, new - old)).replace("%", " %") + "."


def _reason(before: Evaluation, after: Evaluation, gain: dict[str, float], change: float) -> str:
    """The part of the gain in sampled accuracy that is most of it, if it goes the way of the greedy `change`."""
    total = sum(gain.values())
    part = max(gain, key=lambda name: abs(gain[name]), default=None)
    if part is None or gain[part] * change <= 0 or abs(gain[part]) < abs(total) * 2 / 3:
        return ""
    if part != "choice of style":
        style = part.removeprefix("better if ")
        return f": answers that are {style} are right {'more' if change > 0 else 'less'} often"
    names = [name.removeprefix("better if ") for name in gain if name != part]
    shares = {name: [side.metrics.get(f"sampled/{name}", 0.0) for side in (before, after)] for name in names}
    style, (then, now) = max(shares.items(), key=lambda item: item[1][1] - item[1][0])
    return f": the share of answers that are {style} rose from {then:.0%} to {now:.0%}"


def show_gain(directory: Path, task: Task, before: Evaluation, after: Evaluation, gain: dict) -> None:
    """Print held-out figures before and after, three questions answered before and after, and where to look next."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title=f"{len(task.eval_rows)} held-out questions")
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    sampled = (name for name in before.metrics | after.metrics if name.startswith("sampled/"))
    further = (name for name in before.metrics if name.endswith("/greedy/accuracy"))  # of --eval-sets
    for name in dict.fromkeys([*SHOWN, *further, *sampled]):
        values = [side.metrics.get(name) for side in (before, after)]
        if values != [None, None]:
            words = name.removeprefix("sampled/").replace("accuracy_", "accuracy if ").replace("_", " ")
            cells = ["-" if value is None else f"{value:.3f}" for value in values]
            if name in SHOWN or "accuracy" in name or cells[0] != cells[1]:  # unchanged others are not interesting
                table.add_row(Text(printable(SHOWN.get(name, words), 60)), *cells)
    if sentence := describe_gain(before, after, gain):
        say(printable(sentence, 400) + "\n")
    console.print(table)
    if any(gain.values()):
        say("the gain in sampled accuracy: " + ", ".join(f"{part} {value:+.3f}" for part, value in gain.items()))
        say("(choice of style: how often each is used; better if: how often its answers are right; docs/metrics.md)\n")

    table = Table(title="Greedy answers", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for row, *answers in list(zip(task.eval_rows, before.greedy, after.greedy, strict=True))[:3]:
        right = task.file.right_answer(row)
        table.add_row("question", Text(printable(task.file.question(row), 400)))  # text, not rich's markup
        table.add_row("right answer", Text("" if right is None else printable(str(right), 400)))
        for heading, answer in zip(("before", "after"), answers, strict=True):
            table.add_row(heading, Text("\n".join(_lines(task, answer))))
        table.add_section()
    console.print(table)
    say(
        f"run:          {directory}\n"
        f"curve:        {directory / 'curve.png'}\n"
        f"page:         {directory / 'report.html'}\n"
        f"TensorBoard:  tensorboard --logdir {directory.parent}"
    )


def _lines(task: Task, answer: Greedy) -> list[str]:
    """The reward of an answer and the answer itself: one line, or one for each turn."""
    if "correct" in answer.rewards:
        verdict = "right" if answer.rewards["correct"] == 1 else "wrong"
    else:
        verdict = f"reward {task.total_reward(answer.rewards):g}" if answer.rewards else "reward not kept"
    if not answer.turns:
        return [f"{verdict}: {printable(answer.text, 400, END)}"]
    return [f"{verdict}:", *map(str.strip, turn_lines(answer.turns))]
