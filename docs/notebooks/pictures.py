"""Tables and pictures of tokens for one_grpo_step.ipynb. The notebook itself computes the numbers.

A policy's text is data: tables escape it, and pictures draw it letter by letter, never as formulas.
"""

import html
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib import colormaps
from matplotlib.colors import Normalize, TwoSlopeNorm
from PIL import Image

PUSHED_DOWN, PUSHED_UP = "#b35806", "#542788"  # orange and purple, which nearly everyone can tell apart


class Table:
    """Rows of values under a head; numbers are rounded, so that another processor shows the same digits."""

    def __init__(self, head: str, rows: Iterable[Sequence]):
        """`head` holds the names of the columns, divided by `|`."""
        rows = list(rows)
        self.head = [name.strip() for name in head.split("|")]
        self.rows = [[_shown(value) for value in row] for row in rows]
        self.is_text = [any(isinstance(value, str) for value in column) for column in zip(*rows, strict=True)]

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        return "\n".join("  ".join(self._aligned(row, widths)).rstrip() for row in [self.head, *self.rows])

    def _aligned(self, row: list[str], widths: list[int]) -> list[str]:
        cells = zip(row, widths, self.is_text, strict=True)
        return [text.ljust(width) if is_text else text.rjust(width) for text, width, is_text in cells]

    def _repr_html_(self) -> str:
        head = "".join(map(self._cell, self.head, self.is_text, ["th"] * len(self.head)))
        rows = "".join(f"<tr>{''.join(map(self._cell, row, self.is_text))}</tr>\n" for row in self.rows)
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>"

    def _cell(self, text: str, is_text: bool, tag: str = "td") -> str:
        escaped, side = html.escape(text), "left" if is_text else "right"
        content = f"<code>{escaped}</code>" if is_text and tag == "td" else escaped
        return f'<{tag} style="text-align: {side}">{content}</{tag}>'


def visible(text: str) -> str:
    """A token's text, with marks for invisible characters.

    >>> visible(" is"), visible("\\n")
    ('␣is', '↵')
    """
    return text.replace(" ", "␣").replace("\n", "↵")


def draw_tokens(texts: list[list[str]], values: list[list[float]], label: str, signed: bool = True) -> None:
    """Draw every row's tokens one after the other, each on the color of its value.

    Args:
        texts, values: of the tokens of each row.
        label: what the values are, for the color bar.
        signed: orange below 0 and purple above it; otherwise from dark at the lowest to bright at the highest.
    """
    rows = [list(zip(*row, strict=True)) for row in zip(texts, values, strict=True)]
    lowest, highest = min(map(min, values)), max(map(max, values))
    largest = max(-lowest, highest)
    scale = TwoSlopeNorm(0.0, -largest, largest) if signed else Normalize(lowest, highest)
    colors = colormaps["PuOr" if signed else "cividis"]
    gap, length = 0.9, max(sum(len(text) + 0.9 for text, _ in row) for row in rows)
    figure, axes = plt.subplots(figsize=(1.6 + 0.112 * length, 0.55 + 0.29 * len(rows)))
    for number, row in enumerate(rows):
        left = 0.0
        for text, value in row:
            color, width = colors(scale(value)), len(text) + gap
            axes.add_patch(plt.Rectangle((left, number - 0.42), width - 0.12, 0.84, color=color, linewidth=0))
            ink = "white" if 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] < 0.55 else "black"
            style = {"family": "monospace", "fontsize": 9, "parse_math": False}
            axes.text(left + width / 2 - 0.06, number, text, color=ink, ha="center", va="center", **style)
            left += width
    axes.set(xlim=(0, length), ylim=(len(rows) - 0.5, -0.5), xticks=[], yticks=range(len(rows)))
    axes.set_yticklabels([f"row {number}" for number in range(len(rows))], fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(plt.cm.ScalarMappable(scale, colors), ax=axes, fraction=0.03, pad=0.01)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    said = "; ".join(f"row {number}: {_in_words(row, largest)}" for number, row in enumerate(rows))
    show(figure, f"Tokens colored by {' '.join(label.split())}. {said}.")


def draw_clip(points: dict[str, list[tuple[float, bool]]], advantages: dict[str, float], clip_eps: float) -> None:
    """Draw the loss of a token against its ratio, with the tokens of right and of wrong completions on their curves.

    Args:
        points: ratios and whether the token is clipped, by the name of the curve.
        advantages: of the same curves.
    """
    figure, panels = plt.subplots(1, len(points), figsize=(9.2, 3.1), sharex=True)
    for axes, (name, tokens), color in zip(panels, points.items(), (PUSHED_DOWN, PUSHED_UP), strict=True):
        advantage = advantages[name]
        ratios = [index / 100 for index in range(10, 241)]
        axes.plot(ratios, [_surrogate(ratio, advantage, clip_eps) for ratio in ratios], color=color, linewidth=1.5)
        for is_clipped, marker, face in ((False, "o", color), (True, "s", "white")):
            xs = [ratio for ratio, clipped in tokens if clipped == is_clipped]
            ys = [_surrogate(ratio, advantage, clip_eps) for ratio in xs]
            kind = "clipped: no gradient" if is_clipped else "has a gradient"
            style = {"marker": marker, "color": face, "edgecolor": color, "zorder": 3}
            axes.scatter(xs, ys, label=f"{len(xs)} tokens, {kind}", **style)
        for bound in (1 - clip_eps, 1 + clip_eps):
            axes.axvline(bound, color="gray", linestyle=":", linewidth=1)
        axes.set(title=f"{name}: A = {advantage:.2f}", xlabel="ratio p / p_old")
        axes.legend(fontsize=8, loc="upper left" if advantage < 0 else "upper right")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss of the token")
    figure.tight_layout()
    said = []
    for name, tokens in points.items():
        ratios = sorted({f"{ratio:.2f}{' clipped' * is_clipped}" for ratio, is_clipped in tokens})
        said.append(f"{name}: {', '.join(ratios)}")
    bounds = f"{1 - clip_eps:g} and {1 + clip_eps:g}"
    show(figure, f"Loss of a token against its ratio, with the bounds {bounds}. Ratios of {'; '.join(said)}")


def draw_bars(names: list[str], bars: dict[str, list[float]], label: str) -> None:
    """Draw groups of horizontal bars, one group for each name, one bar of it for each kind."""
    figure, axes = plt.subplots(figsize=(7.2, 0.8 + 0.27 * len(names) * len(bars)))
    height = 0.8 / len(bars)
    for number, ((kind, values), hatch) in enumerate(zip(bars.items(), ("", "///", "..."), strict=False)):
        places = [index + (number - (len(bars) - 1) / 2) * height for index in range(len(names))]
        color = (PUSHED_UP, "#f1a340", "#998ec3")[number]
        drawn = axes.barh(places, values, height * 0.92, label=kind, color=color, hatch=hatch, edgecolor="white")
        axes.bar_label(drawn, [_shown(value) for value in values], padding=3, fontsize=8)
    axes.set(yticks=range(len(names)), xlabel=label)
    axes.set_yticklabels(names, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.legend(fontsize=8, ncols=len(bars), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    said = "; ".join(
        f"{name}: " + ", ".join(f"{kind} {_shown(values[index])}" for kind, values in bars.items())
        for index, name in enumerate(names)
    )
    show(figure, f"Bars, {label}. {said}")


def show(figure: plt.Figure, alt: str) -> None:
    """Display a figure as a small PNG, with a description in words for readers who cannot see it."""
    drawn, image = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    with Image.open(drawn) as pixels:  # a palette takes a quarter of the room
        pixels.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(image, "png", optimize=True)
    said = {"image/png": {"alt": alt}, "vscode_altText": alt}  # read by nbconvert; by VS Code
    display({"image/png": image.getvalue(), "text/plain": alt}, metadata=said, raw=True)


def _surrogate(ratio: float, advantage: float, clip_eps: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - clip_eps), 1 + clip_eps) * advantage)


def _in_words(row: list[tuple[str, float]], largest: float) -> str:
    """The most common value of a row's tokens, in steps of about a hundredth of the largest, and the other tokens.

    >>> _in_words([("a", 0.998), ("b", 0.25), ("c", 1.0), ("d", 0.999)], largest=1.0)
    '1.00, but b 0.25'
    """
    decimals = max(0, 2 - math.floor(math.log10(largest)))
    shown = [(text, f"{round(value, decimals) + 0.0:.{decimals}f}") for text, value in row]
    common, _ = Counter(value for _, value in shown).most_common(1)[0]
    others = ", ".join(f"{text} {value}" for text, value in shown if value != common)
    return f"{common}, but {others}" if others else f"all {common}"


def _shown(value: object) -> str:
    """A number that is not whole with three significant digits; anything else as it is.

    >>> _shown(0.28049), _shown(1.0), _shown(-0.0), _shown(4.7e-6), _shown(3), _shown("3")
    ('0.280', '1', '0', '4.70e-06', '3', '3')
    """
    if not isinstance(value, float):
        return str(value)
    return str(round(value)) if value.is_integer() else f"{value:#.3g}"
