r"""Compare two answers without a library: as text in one spelling, or as exact numbers.

Words after a number are a unit, which is left out, unless they change the number. Such words are either a known factor
(`2\text{ million}`), or the answer is not read as a number at all. Letters without `\text` or `\mathrm` are symbols,
except for units after a space (`5 m`, `5 N·m`) and those of two letters (`5km/h`).
"""

import itertools
import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 2000  # characters; a longer text is compared as it is
LARGEST_EXPONENT = 400  # of 10, in scientific notation
MOST_UNIT_WORDS = 4

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+|\s+|.", re.DOTALL)
_UNICODE = {  # by code point, because some look alike
    0x2212: "-", 0x2013: "-", 0xD7: r"\times ", 0xB7: r"\cdot ", 0xF7: "/", 0x3C0: r"\pi ", 0xB0: r"^\circ ",
    0x221E: r"\infty ", 0x2264: r"\le ", 0x2265: r"\ge ", 0x2260: r"\ne ", 0x222A: r"\cup ", 0x2229: r"\cap ",
    0x2208: r"\in ", 0xB1: r"\pm ", 0x221A: r"\sqrt ", 0xB2: "^2", 0xB3: "^3", 0xFF05: "%", 0xFF0C: ",",
    0xA0: " ", 0x2009: " ", 0x202F: " ", 0x22C5: r"\cdot ", 0x2A7D: r"\le ", 0x2A7E: r"\ge ", 0xB5: r"\mu ",
    0x3BC: r"\mu ", 0x2103: r"^\circ C",
}  # fmt: skip
_SPACES = {r"\ ", r"\,", r"\:", r"\;", r"\!", "\\\n", r"\thinspace", r"\quad", r"\qquad", "~"}
_NOTHING = {"$", r"\$", r"\(", r"\)", r"\[", r"\]", r"\left", r"\right", r"\displaystyle", r"\textstyle", r"\limits"}
_NOTHING |= {rf"\{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r", "m")}
TEXTS = ("text", "textrm", "mbox", "textbf", "textit", "mathrm", "mathbf", "rm")
_SAME = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\leq": r"\le", r"\leqslant": r"\le",
    r"\geq": r"\ge", r"\geqslant": r"\ge", r"\lt": "<", r"\gt": ">", r"\neq": r"\ne",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\%": "%",
    r"\degree": r"^\circ", r"\operatorname": r"\text", r"\boxed": "", r"\fbox": "",
} | {rf"\{name}": r"\text" for name in TEXTS}  # fmt: skip
_BRACED = (  # LaTeX reads these alike with and without braces
    (re.compile(r"\\frac([0-9A-Za-z])(?=[0-9A-Za-z{\\])"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\{[^{}]*+\})([0-9A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\sqrt([0-9A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"([_^])\{([0-9A-Za-z]|\\circ)\}"), r"\1\2"),
)
_TEXT = re.compile(r"\\text\{([^{}]*+)\}")
_THIN = r"(?:[~\xa0\u2007-\u200a\u202f]|\\[ ,:;!]|\\thinspace\s*|\{\\,\})"  # a space that is written on purpose
_GROUPED = re.compile(  # 12\,345.678\,9
    rf"(?:(?<![\d.,_^A-Za-z])[1-9]\d{{,2}}(?:{_THIN}\d{{3}})+|(?<=\d\.)(?:\d{{3}}{_THIN})+\d{{1,3}})(?!{_THIN}?\d|/)"
)
_ROMAN = re.compile(r"\{\\(?:rm|bf)(?![a-zA-Z])((?:[^{}]|\{[^{}]*+\})*+)\}")
_PRESENTED = re.compile(  # the whole answer in bold, coloured, underlined; "The answer is", = or \approx before it
    rf"\*\*((?:(?!\*\*).)++)\*\*|\\(?:underline|boldsymbol|(?:text)?color\s*\{{[^{{}}]*+\}}|{'|'.join(TEXTS)})\s*\{{(.++)"
    r"(?<=\})|(?:(?:so |the |final )*+answer(?: is\b|:)|=|\\approx(?![a-zA-Z])|\u2248)(.++)",
    re.DOTALL | re.IGNORECASE,
)

_FACTORS = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NAME = re.compile(r"([A-Za-z](?:_\w|_\{\w+\}|\([a-z]\))?)=(?!=)")
_UNITS = (
    "degrees? cents? dollars? units? inch(?:es)? in ft feet foot yards? miles? mph mm cm m km meters? seconds? "
    "minutes? hours? days? weeks? months? years? grams? g kg pounds? ounces? liters? square sq cubic"
).replace(" ", "|")
_POWER = r"(?:\^(?:-?\d|\{\s*-?\d\s*\})|[\xb2\xb3])"
SPACE = r"(?:[\s~]|\\[ ,:;!]|\\q?quad(?![a-z]))"
_COMMANDS = rf"\\(?:{'|'.join(TEXTS)}|operatorname)\s*+"
_INNER = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+"
_UNIT = re.compile(  # the last factor
    rf"(?<![\s~]){SPACE}*+(?P<sign>(?:\\cdot(?![a-z])|[/*\xb7\u22c5]){SPACE}*+)?(?:\\mu{SPACE}*+)?{_COMMANDS}"
    rf"\{{(?P<words>{_INNER})\}}\s*+{_POWER}?\s*+$"
)
_UNITS_IN_TEXT = rf"((?:(?:\\cdot(?![a-z])|{SPACE})*+{_COMMANDS}\{{[^{{}}]*+\}}{_POWER}?)++)"
_FRACTION_OF_UNITS = re.compile(rf"\\[dt]?frac\s*\{{{_UNITS_IN_TEXT}\}}\s*\{{{_UNITS_IN_TEXT}\}}\s*$")
_SIGNS_OF_UNIT = re.compile(rf"(?<=[A-Za-z]){_POWER}|\\(?:cdot|frac|mu)(?![a-z])|\\[ ,:;!]|\^\\circ|[/()~{{}}]")
_SYMBOL = rf"(?:[kcm]?m|k?g|k?Hz|k?Pa|k?[JWV]|[mk]?mol|rad|[kM]?eV|ft|mi|lb|m?s|m?L|N|A|K|C|h)(?![A-Za-z]){_POWER}?"
_BARE_UNIT = re.compile(  # without \text: words after a space, a name of two letters, m/s and N·m, kg m^{-3}
    rf"(?<=\d)(?: (?:(?:{'|'.join(_FACTORS)}|{_UNITS}) ?)+(?:\^[23])?|(?=[A-Za-z]{{2}})(?:{_UNITS})(?:\^[23])?"
    rf"|(?: |(?=[A-Za-z]{{2}})){_SYMBOL}(?:(?:(?:\\cdot ?|/){_SYMBOL})+|(?: {_SYMBOL})++(?:(?<=\^-\d)|(?<=-\d\}}))))$"
)
_LETTERS_OF_UNITS = set("mgshlLNJWVAKCF")  # i and x, for example, are not units
# Words that change a number: numerals, multiples, fractions, constants, operations, comparisons, alternatives
_NUMERALS = (
    "zero two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty "
    "ninety dozen doz score hundred thousand grand lakh lac crore k mil mn mio bn tn gross pi i e"
).replace(" ", "|")
_ORDINALS = (
    r"(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|\w+(?:teen|tie|dred|sand|llion)th)"
)
_CHANGING = re.compile(
    rf"\b(?:(?:{_NUMERALS})s?|\w+teen|(?:m|b|tr|quadr)ill?i(?:on|ard)\w*|hal(?:f|ves)|quarters?|{_ORDINALS}s"
    rf"|{_ORDINALS}(?=\W*$| of\b)|squared|cubed|doubled?|tripled?|halved|twice|thrice|multiplied|divided|plus|minus"
    r"|negative|factorial|mod|and|or|to|not|than|least|most|point|x|(?:less|away|by|over) one)\b"
)


@dataclass(frozen=True)
class Number:
    """An exact number as an answer writes it; `name` is x in x = 5."""

    value: Fraction
    is_percent: bool = False
    is_decimal: bool = False
    name: str = ""


def changes_number(text: str) -> bool:
    """Whether the text after a number changes the number, so that it is no unit.

    It does if it contains a numeral, a fraction or multiple, an operation, a comparison, or an alternative. Words in
    non-Latin letters count as such, because the lists here cannot tell them from units.

    >>> [text for text in ("miles per hour", "km/h", "éclairs", "more eggs", "fifth graders") if changes_number(text)]
    []
    >>> texts = ("thousands", "bn", "\u00bd", "\u767e", "quarters", "squared", "times two", "or more", "than twelve")
    >>> [text for text in texts if not changes_number(text)]
    []
    """
    if any(unicodedata.numeric(letter, None) is not None or _is_foreign(letter) for letter in text):
        return True
    return _CHANGING.search(text.lower()) is not None


def _is_foreign(letter: str) -> bool:
    return letter.isalpha() and not unicodedata.name(letter, "").startswith("LATIN")


def normalize(text: str) -> str:
    r"""Bring an answer to one spelling: no spacing or sizes, `\frac{1}{2}` for `\frac12` and `\dfrac`, bare words.

    >>> normalize(r"$\left( 3, \dfrac\pi 2 \right)$"), normalize(r" \text{(C)}. "), normalize("x^{2} + 1")
    ('(3,\\frac\\pi2)', 'C', 'x^2+1')
    """
    if len(text) > LONGEST:
        return text.strip()
    text = _without_outer_braces(_TEXT.sub(r"\1", clean(text)))
    if re.fullmatch(r"\([A-Za-z]\)", text):  # a choice
        return text[1]
    return text.lower() if re.fullmatch(r"[A-Za-z]{3,}", text) else text


def clean(text: str, keeps_words: bool = False) -> str:
    """The same, but it keeps `\\text` and, after a number, the space before a word or another number.

    Args:
        keeps_words: keep the spaces between words, too.
    """
    tokens = _TOKEN.findall(bare(text).translate(_UNICODE))
    cleaned, has_space = [""], False
    for token in tokens:
        if token.isspace() or token in _SPACES:
            has_space = True
            continue
        if token in _NOTHING:
            continue
        token = _SAME.get(token, token)
        last = cleaned[-1]
        if token[:1].isalpha():
            needs_space = (last[:1] == "\\" and last[1:].isalpha()) or (
                has_space and (last[-1:].isdigit() or (keeps_words and (last[-1:].isalnum() or last == "}")))
            )
        else:
            needs_space = has_space and token[:1].isdigit() and last[-1:].isdigit()
        cleaned.append(" " + token if needs_space else token)
        has_space = False
    text = "".join(cleaned).strip(" ").rstrip(".,;:").strip()
    for pattern, replacement in _BRACED:
        text = pattern.sub(replacement, text)
    return _without_outer_braces(text)


def bare(text: str) -> str:
    r"""An answer without its presentation, and numbers without spaces between groups of three digits.

    >>> [bare(text) for text in ("**33**", r"\textcolor{blue}{5}", "= 932", "The answer is 5", r"\underline{\text{5}}")]
    ['33', '5', '932', '5', '5']
    >>> [bare(text) for text in (r"12\,345.678\,9\,x", "12 345", r"12\,34")]
    ['12345.6789\\,x', '12 345', '12\\,34']
    """
    text = _ROMAN.sub(r"\\mathrm{\1}", text.strip())
    while found := _PRESENTED.fullmatch(text):
        inner = found[1] or (found[2] or "}")[:-1] or found[3] or ""
        if not inner.strip() or not is_balanced(inner):
            break
        text = inner.strip()
    return _GROUPED.sub(lambda number: re.sub(_THIN, "", number[0]), text)


def is_balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def _without_outer_braces(text: str) -> str:
    while re.fullmatch(r"\{[^{}]*+\}", text):
        text = text[1:-1]
    return text


def as_number(text: str) -> Number | None:
    r"""The exact number that an answer states, if it states nothing else; currency signs and units are left out.

    >>> [str(as_number(text).value) for text in (r"\$32,\!348", r"1\frac{4}{5}", r"8.7 \times 10^{2}", "-.50", "x=3/6")]
    ['32348', '9/5', '870', '-1/2', '1/2']
    >>> [str(as_number(text).value) for text in (r"2\text{ million}", "5 thousand dollars", r"5.4 \text{ cents}")]
    ['2000000', '5000', '27/5']
    >>> [str(as_number(text).value) for text in (r"36\ \text{N}\cdot\text{m}", "5 km/h", r"0.1\overline{6}", "0.(3)")]
    ['36', '5', '1/6', '1/3']
    >>> [as_number(text) for text in ("3, 500", "2\\pi", r"5\text{ or }6", r"3\mathrm{i}", r"5\text{ or more}")]
    [None, None, None, None, None]
    """
    if len(text) > LONGEST:
        return None
    has_list = re.search(r"\d,\s+\d", text) is not None
    text = clean(text, keeps_words=True).lstrip("€£¥")
    named = _NAME.match(text)
    name, text = (named[1], text[named.end() :]) if named else ("", text)
    text, factor = without_units(_DEGREES.sub("", text))
    text, factor = without_units(text, _BARE_UNIT) if factor == 1 else (text, factor)
    is_percent = text.endswith("%") or text.endswith(" percent")
    text = text.removesuffix("%").removesuffix(" percent") if is_percent else text
    value = _value(text.replace("{,}", ","), has_list)
    is_decimal = "." in text and not _REPEATING.fullmatch(text)
    return None if value is None else Number(value * factor, is_percent, is_decimal, name)


def without_units(text: str, units: re.Pattern = _UNIT) -> tuple[str, int]:
    r"""An answer without the units after it, and the factor of words after it such as million.

    >>> [without_units(x) for x in (r"3\text{ million dollars}", r"\pi\ \text{cm}^2/\text{s}", r"3\text{ dozen or 4}")]
    [('3', 1000000), ('\\pi', 1), ('3\\text{ dozen or 4}', 1)]
    """
    text, factor = _FRACTION_OF_UNITS.sub(r"\1/\2", text), 1
    for _ in range(2 * MOST_UNIT_WORDS):  # each search can take as long as the text
        found = units.search(text)
        if not found or found.start() == 0:
            break
        parts = {"words": found[0], "sign": ""} | found.groupdict()
        words = parts["words"].split()
        unit = words if parts["sign"] else list(itertools.dropwhile(_FACTORS.__contains__, words))
        if not is_unit(" ".join(unit)):
            break
        factor *= math.prod(_FACTORS[word] for word in words[: len(words) - len(unit)])
        text = text[: found.start()].rstrip()
    return text, factor


def is_unit(words: str) -> bool:
    r"""Whether words are a unit, and do not change the number before them.

    >>> [is_unit(words) for words in ("square feet", "kg m^{-3}", r"W/(m\cdot K)", "i", "a/b", "or more", "million")]
    [True, True, True, False, False, False, False]
    """
    words = words.translate(_UNICODE)
    signs = _SIGNS_OF_UNIT.findall(words)
    names = [name for name in _SIGNS_OF_UNIT.sub(" ", words).split() if not (signs and name == "K")]  # or a thousand
    is_letter = any(len(name) == 1 and name not in _LETTERS_OF_UNITS for name in names) and (signs or len(names) == 1)
    words = " ".join(names)
    return not (
        is_letter or len(names) > MOST_UNIT_WORDS or re.search(r"[\d,;:=+*<>\\^]", words) or changes_number(words)
    )


def _value(text: str, has_list: bool) -> Fraction | None:
    if match := _NUMBER.fullmatch(text):
        value = Fraction(match[2])
    elif (match := _THOUSANDS.fullmatch(text)) and not has_list:
        value = Fraction(match[2].replace(",", "") + (match[3] or ""))
    elif match := _REPEATING.fullmatch(text):
        before, block = match[2] + match[3], re.sub(r"\D", "", match[4])
        value = Fraction(int(before + block) - int(before or 0), 10 ** len(match[3]) * (10 ** len(block) - 1))
    elif match := _SCIENTIFIC.fullmatch(text):
        exponent = next(group for group in match.groups()[2:] if group)
        if len(exponent) > 4 or abs(int(exponent)) > LARGEST_EXPONENT:
            return None
        value = Fraction(match[2] or 1) * Fraction(10) ** int(exponent)
    elif match := _FRACTION.fullmatch(text):
        over, under = (Fraction(match[3] or match[5]), Fraction(match[4] or match[6]))
        if under == 0 or (match[2] and min(over, under) < 0):
            return None
        value = Fraction(match[2] or 0) + over / under
    else:
        return None
    return -value if match[1] == "-" else value


_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"([+-]?)({_DECIMAL})")
_THOUSANDS = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+)(\.\d+)?")
_REPEATING = re.compile(  # 0.1\overline{6}, 0.(3), 0.\dot{1}4285\dot{7}
    r"([+-]?)(\d*)\.(\d*)(\\(?:overline|bar)(?:\{\d+\}|\d)|\(\d+\)|\\dot\{?\d\}?(?:\d*\\dot\{?\d\}?)?)"
)
_DEGREES = re.compile(r"(?:\{\})?\^(?:\\circ|\{\\circ\}) ?(?:[CFK]|\\text\{[CFK]\})?$")
_SCIENTIFIC = re.compile(
    rf"([+-]?)(?:({_DECIMAL})(?:[eE]([+-]?\d+)|(?:\\times|\\cdot|\*|x)10\^(?:\{{([+-]?\d+)\}}|([+-]?\d+)))"
    r"|10\^(?:\{([+-]?\d+)\}|([+-]?\d+)))"
)
_MIXED = r"(?:(\d++)(?: (?=\d+/)| ?(?=\\frac)))?"
_FRACTION = re.compile(
    rf"([+-]?){_MIXED}(?:\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}}|({_DECIMAL})/({_DECIMAL}))"
)


def same_number(gold: Number, answer: Number) -> bool | None:
    """Whether two numbers are equal; None if they are values of different names (x = 5, y = 5).

    They are compared exactly. If one of them is a decimal, six decimals are enough, as long as they are five digits of
    the number. A percent sign is a factor of 1/100, or a unit that the other number leaves out.

    >>> pairs = (("1/2", "0.5"), ("72", "72%"), ("0.72", "72%"), ("1/3", "0.33"))
    >>> [same_number(as_number(gold), as_number(answer)) for gold, answer in pairs]
    [True, True, True, False]
    """
    if gold.name and answer.name and gold.name != answer.name:
        return None
    is_rounded = gold.is_decimal or answer.is_decimal
    if gold.is_percent == answer.is_percent:
        return _agree(gold.value, answer.value, is_rounded)
    part, whole = (gold.value, answer.value) if gold.is_percent else (answer.value, gold.value)
    return _agree(part, whole, is_rounded) or _agree(part / 100, whole, is_rounded)


def _agree(a: Fraction, b: Fraction, is_rounded: bool) -> bool:
    if a == b or not is_rounded:
        return a == b
    return abs(a - b) * 100_000 < abs(b) and round(a, 6) == round(b, 6)
