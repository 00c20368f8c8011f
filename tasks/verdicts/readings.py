r"""Answers that are written in two ways: a choice with its value, `(E)\ 12`, and an interval as an inequality."""

import re

from tasks.verdicts.answer_text import LONGEST, SPACE, TEXTS, bare, clean, is_balanced, normalize

_TEXT = rf"\\(?:{'|'.join(TEXTS)})\s*\{{{SPACE}*+"
_CHOICE = re.compile(  # in \textbf{}, or with a parenthesis, full stop or colon and a space; then its value
    rf"(?:\(?{_TEXT}\(?([A-J])[.:)]*{SPACE}*+\}}\)?[.:]?{SPACE}*+(?=[-(\[\w.\\])"
    rf"|\(?([A-J])[.:)]+(?:{SPACE}++|(?<=\))(?=\d))(?=-?[\d.\\]|[A-Za-z]{{3}}))"
    r"(?!\\(?:cdot|times|div|pm|to|neq?|[lg]eq?|in|mid|c[au]p|subset(?:eq)?|setminus)(?![a-z]))(.+)",
    re.DOTALL,
)
_OTHER_CHOICE = re.compile(rf"{_TEXT}[A-J]\W|\([A-J]\)|\b[A-J]\)|\b(?i:or|and|not|nor|but|except|wrong|incorrect)\b")
_RELATION = re.compile(r"\\[lg]e(?![a-z])|[<>]=?")
_NAME = r"(?:[A-Za-z](?:_\w|_\{\w+\})?(?:\([a-z]\))?|\\(?!pi|infty)[a-z]+)"
_SET = re.compile(rf"^\\\{{{_NAME} ?(?:\\in ?\\mathbb ?\{{?R\}}? ?)?(?:\\mid|:|\|)(.+)\\\}}$")  # {x : x < 3}
_INTERVAL = re.compile(rf"(?:({_NAME}) ?\\in ?)?([\[(])([^,;]+),([^,;]+)([\])])")
_OR = re.compile(r"\\text\{or\}| or\b|\\(?:lor|vee|cup)(?![a-z])")
Interval = tuple[str, str, str]  # its brackets, such as "[)", and its ends


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
    ranges = _intervals(gold), _intervals(answer)
    num_inequalities = sum(_RELATION.search(clean(text)) is not None for text in (gold, answer))
    if ranges == (None, None) or num_inequalities == 0:
        return [(gold, answer)]
    if None in ranges:  # the library compares x - 3 < 0, but reads "and" as "or"
        return [(gold, answer)] if num_inequalities == 2 and not re.search(r"\band\b", gold + answer) else None
    (name, wanted), (other_name, found) = ranges
    if (name and other_name and name != other_name) or [each[0] for each in wanted] != [each[0] for each in found]:
        return None
    return [pair for a, b in zip(wanted, found, strict=True) for pair in zip(a[1:], b[1:], strict=True)]


def _choice(text: str) -> tuple[str, str]:
    """The letter and the value of a choice, each of which can be empty."""
    found = _CHOICE.fullmatch(bare(re.sub(r"(?<!\\)\$", "", text)))
    if found and not _OTHER_CHOICE.search(found[3]) and is_balanced(found[3]):
        return found[1] or found[2], found[3].strip()
    letter = normalize(text)
    return (letter, "") if re.fullmatch("[A-J]", letter) else ("", text)


def _intervals(text: str) -> tuple[str, list[Interval]] | None:
    """The name and the union of intervals that an answer states; None if it states something else."""
    found = [_interval(part.strip()) for part in _OR.split(_SET.sub(r"\1", clean(text, keeps_words=True)))]
    if None in found:
        return None
    names = {name for name, _ in found} - {""}
    intervals = sorted((interval for _, interval in found), key=lambda each: each[1] != r"-\infty")
    return ("".join(names), intervals) if len(names) < 2 else None


def _interval(text: str) -> tuple[str, Interval] | None:
    """The name and the interval of one inequality, or of an interval in brackets."""
    if found := _INTERVAL.fullmatch(text):
        name, opening, low, high, closing = found.groups("")
    else:
        signs = [sign.replace(r"\le", "<=").replace(r"\ge", ">=") for sign in _RELATION.findall(text)]
        terms = [term.strip() for term in _RELATION.split(text)]
        if len({sign[0] for sign in signs}) != 1:
            return None
        if signs[0][0] == ">":
            terms, signs = terms[::-1], signs[::-1]
        is_name = [re.fullmatch(_NAME, term) is not None for term in terms]
        if is_name == [True, False]:
            terms, signs = [r"-\infty", *terms], ["", *signs]
        elif is_name == [False, True]:
            terms, signs = [*terms, r"\infty"], [*signs, ""]
        elif len(terms) != 3 or not is_name[1]:
            return None
        low, name, high = terms
        opening, closing = "[" if "=" in signs[0] else "(", "]" if "=" in signs[1] else ")"
    if not low or not high or re.search(r"[,;=|]|\\(?:ne|in)(?![a-z])", low + high):
        return None
    return name, (opening + closing, low.removeprefix("+"), high.removeprefix("+"))
