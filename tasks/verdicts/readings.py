r"""Answers that are written in two ways: a choice with its value, `(E)\ 12`, and an interval as an inequality."""

import re
from typing import NamedTuple

from tasks.verdicts.answer_text import LONGEST, TEXTS, as_number, bare, clean, is_balanced, normalize

_SPACE = r"(?:[\s~]|\\[ ,:;]|\\q?quad(?![a-z]))"
_TEXT = rf"\\(?:{'|'.join(TEXTS)})\s*\{{{_SPACE}*+"
_CHOICE = re.compile(  # in \textbf{}, or with a parenthesis, full stop or colon and a space; then its value
    rf"(?:\(?{_TEXT}(?:\(([A-J])\)|([A-J])[.:)]?){_SPACE}*+\}}\)?[.:]?{_SPACE}*+(?=[-(\[\w.$\\])"
    rf"|(?:\(([A-J])\)(?:{_SPACE}++|(?=\d))|([A-J])[.:)]{_SPACE}++)(?=-?[\d.$]|-?\\(?:\$|[dt]?frac|sqrt|pi|left|{'|'.join(TEXTS)})|[A-Za-z]{{3}}))"
    r"(?!\\(?:cdot|times|le|ge|leq|geq|in|cup|cap|pm|to|ne|neq|mid)(?![a-z]))(.+)",
    re.DOTALL,
)
_OTHER_CHOICE = re.compile(rf"{_TEXT}[A-J]\W|\([A-J]\)|\b[A-J]\)|\b(?i:or|and|not|nor|but|except|wrong|incorrect)\b")
_RELATION = re.compile(r"(\\[lg]e(?![a-z])|[<>]=?)")
_HAS_RELATION = re.compile(r"[<>\u2264\u2265\u2a7d\u2a7e]|\\[lg](?:e|t|eq|eqslant)(?![a-z])")
_NAME = r"(?:[A-Za-z](?:_\w|_\{\w+\})?(?:\([a-z]\))?|\\(?!pi|infty)[a-z]+)"
_IN = re.compile(rf"({_NAME}) ?\\in ?(?=[\[(])")
_SUCH_THAT = re.compile(rf"\\\{{({_NAME}) ?(?:\\in ?\\mathbb ?\{{?R\}}? ?)?(?:\\mid ?|:|\|)(.+)\\\}}")
_INTERVAL = re.compile(r"([\[(])([^,;]+),([^,;]+)([\])])")
_OR = re.compile(r" ?or (?=[A-Za-z\d\\-])|\\text\{or\}|\\lor ?|\\vee ?|\\cup ?")
_AND = re.compile(r" ?and (?=[A-Za-z\d\\-])|\\text\{and\}|\\land ?|\\wedge ?")


class Interval(NamedTuple):
    """From `low` to `high`, as text; an end belongs to it or not."""

    low: str
    has_low: bool
    high: str
    has_high: bool


class Ranges(NamedTuple):
    """The union of intervals. `name` is x in x < 3, or empty."""

    name: str
    is_inequality: bool
    intervals: list[Interval]


def comparable(gold: str, answer: str) -> list[tuple[str, str]] | None:
    r"""The pairs of texts that must be equal if the answer is right; None if it is wrong.

    A choice counts by its letter and, if both have one, its value. An interval and an inequality have the same ends.

    >>> comparable("E", r"\textbf{(E)}\ 12"), comparable("12", r"\textbf{(E)}\ 12"), comparable("(E) 12", "(D) 12")
    ([('E', 'E')], [('12', '12')], None)
    >>> comparable("[-2,7]", r"7 \ge x \ge -2"), comparable("(3,5)", r"3 \le x < 5"), comparable("x+1", "1+x")
    ([('-2', '-2'), ('7', '7')], None, [('x+1', '1+x')])
    """
    if max(len(gold), len(answer)) > LONGEST:
        return [(gold, answer)]
    (letter, gold), (given, answer) = _choice(gold), _choice(answer)
    if letter and given and (letter != given or not (gold and answer)):
        return [(letter, given)] if letter == given else None
    gold, answer = gold or letter, answer or given
    if not _HAS_RELATION.search(gold + answer):
        return [(gold, answer)]
    ranges = as_ranges(gold), as_ranges(answer)
    if None in ranges:
        known, other = (ranges[0], answer) if ranges[0] else (ranges[1], gold)
        is_list = (
            known is not None
            and known.is_inequality
            and not re.search(r"[<>|]|\\(?:mid|cup|cap|ne|setminus|text)(?![a-z])", clean(other))
        )
        return None if is_list else [(gold, answer)]
    if ranges[0].name and ranges[1].name and ranges[0].name != ranges[1].name:
        return [(gold, answer)]
    wanted, found = (_in_order(given.intervals) for given in ranges)
    kinds = [[(each.has_low, each.has_high) for each in given] for given in (wanted, found)]
    if kinds[0] != kinds[1]:
        return None
    return [pair for a, b in zip(wanted, found, strict=True) for pair in ((a.low, b.low), (a.high, b.high))]


def _choice(text: str) -> tuple[str, str]:
    """The letter and the value of a choice, each of which can be empty."""
    if not re.search("[A-J]", text):
        return "", text
    found = _CHOICE.fullmatch(bare(re.sub(r"(?<!\\)\$", "", text)))
    if found and not _OTHER_CHOICE.search(found[5]) and is_balanced(found[5]):
        return next(letter for letter in found.groups() if letter), found[5].strip()
    letter = normalize(text)
    return (letter, "") if re.fullmatch("[A-J]", letter) else ("", text)


def as_ranges(text: str) -> Ranges | None:
    r"""The intervals that an answer states, in brackets or by inequalities; None if it states something else.

    >>> [list(each) for each in as_ranges(r"x<2\text{ or }x \ge 3").intervals]
    [['-\\infty', False, '2', False], ['3', True, '\\infty', False]]
    """
    text = clean(text, keeps_words=True)
    if found := _SUCH_THAT.fullmatch(text) or _IN.match(text):
        text = found[2] if found.re is _SUCH_THAT else text[found.end() :]
    names, intervals = {found[1]} if found else set(), []
    for part in _OR.split(text):
        bounds = [_bounds(each) for each in _AND.split(part)]
        if None in bounds or len(bounds) > 2:
            return None
        names |= {name for name, _ in bounds}
        low, high = bounds[0][1], bounds[-1][1]
        if len(bounds) == 2 and low.low == r"-\infty":
            low, high = high, low
        if len(bounds) == 2 and (low.high, high.low) != (r"\infty", r"-\infty"):
            return None
        intervals.append(Interval(low.low, low.has_low, high.high, high.has_high))
    names = {name.strip() for name in names if name}
    return Ranges("".join(names), _RELATION.search(text) is not None, intervals) if len(names) < 2 else None


def _bounds(text: str) -> tuple[str, Interval] | None:
    """The name and the interval of one inequality, or of an interval in brackets."""
    if found := _INTERVAL.fullmatch(text):
        (first, low, high, last), name = found.groups(), ""
        has_low, has_high = first == "[", last == "]"
    else:
        parts = [part.strip() for part in _RELATION.split(text)]
        terms, signs = parts[::2], parts[1::2]
        if len({sign[0] == ">" or sign[1:2] == "g" for sign in signs}) != 1 or len(terms) > 3:
            return None
        if signs[0][0] == ">" or signs[0][1:2] == "g":
            terms, signs = terms[::-1], signs[::-1]
        if len(terms) == 2 and (_is_name(terms[0]) != _is_name(terms[1])):
            is_below = _is_name(terms[0])
            terms, signs = ([r"-\infty", *terms], ["<", *signs]) if is_below else ([*terms, r"\infty"], [*signs, "<"])
        if len(terms) != 3 or not _is_name(terms[1]):
            return None
        low, name, high = terms
        has_low, has_high = ("=" in sign or "e" in sign for sign in signs)
    low, high = low.strip().removeprefix("+"), high.strip().removeprefix("+")
    if not (_is_end(low, name) and _is_end(high, name)):
        return None
    return name, Interval(low, has_low and low != r"-\infty", high, has_high and high != r"\infty")


def _is_name(text: str) -> bool:
    return re.fullmatch(_NAME, text) is not None


def _is_end(text: str, name: str) -> bool:
    """Whether a text can be the end of an interval: one expression without the variable."""
    is_whole = all(text.count(first) == text.count(last) for first, last in ("()", "[]", "{}"))
    has_name = name and re.search(rf"(?<![A-Za-z\\]){re.escape(name)}(?![A-Za-z])", text)
    return bool(text) and is_whole and not has_name and not re.search(r"[,;=|]|\\(?:ne|in)(?![a-z])", text)


def _in_order(intervals: list[Interval]) -> list[Interval]:
    """By their lower ends, if these are numbers."""
    lows = [0 if each.low == r"-\infty" else as_number(each.low) for each in intervals]
    if None in lows:
        return intervals
    return sorted(
        intervals, key=lambda each: (each.low != r"-\infty", each.low != r"-\infty" and as_number(each.low).value)
    )
