r"""Thousands of generated answers, right ones and near misses, against judges that share no code with the tasks.

    ANSWERS=20000 python -m pytest -n 0 -m slow -s tests/unit/test_many_answers.py

The generator knows the exact value of its answers. No wrong answer may earn a reward, and at most one right answer in a
hundred may be refused. Countdown's expressions are in test_countdown_task.py.
"""

import os
import random
import re
from collections import Counter
from fractions import Fraction

import pytest

from tasks import gsm8k
from tasks import math as mathematics
from tasks.verdicts.judge import Judge, has_library

pytestmark = pytest.mark.slow
ANSWERS = int(os.environ.get("ANSWERS", 1000))  # for each task

# The units in GSM8K's questions
UNITS = """dollars, cents, miles, hours, minutes, days, weeks, years, pounds, ounces, feet, inches, apples, cookies,
students, pages, books, points, eggs, cups, gallons, liters, slices, flowers, marbles, tickets, people, times, each,
left, total, pieces, pencils, cards, kg, km, %, percent, mph, miles per hour, square feet, more eggs, years old,
fewer apples, pairs of socks, cents each, fifth graders, people in all, days a week, hours per day, of the cookies,
pieces left over, feet tall, dollars more, km/h, dollars per hour, pounds of meat, kids' tickets, bags (small)"""
# Words that change a number: the factor, if there is one, and the words
CHANGES = """1000: thousand, thousands, k, K, grand, e3, \u5343, \ucc9c; 10: tens; 12: dozen, dozens; 20: score
144: gross; 100: hundred, hundreds, hundred eggs, \u767e; 10000: \u4e07, \ub9cc; 100000: lakh; 10000000: crore
1000000: million, millions, mil, mio, million dollars; 1000000000: bn, billion; 1/10: tenths; 1/100: hundredths
1/4: quarters; 1/3: thirds; 1/2: halves, divided by two, halved, / 2; 2: times two, times 2, * 2, doubled; -1: negative
: squared, cubed, factorial, !, \u00bd, \u00b2, and a half, and 1/2, plus one, less one, minus three, + 1, - 1, mod five
: or twenty, or 20, or more, and twenty, to twenty, at least, at most, more than twelve, maybe twenty, point five, - 20
: :30, to the power of two, not, no or twenty"""
THINKS = ("", "<think>9 * 2</think>", "<think>\n5, or 6?</think>\n", "So: ")


def a_change(rng: random.Random) -> tuple[Fraction | None, str]:
    lines = [line.partition(": ") for line in CHANGES.replace("\n", "; ").split("; ")]
    factor, words = rng.choice([(factor, word) for factor, _, words in lines for word in words.split(", ")])
    return Fraction(factor) if factor else None, words


def number_text(rng: random.Random, value: Fraction) -> str:
    """One of the usual ways to write a whole number or a decimal."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    if size.denominator > 1:
        return f"{sign}{float(size):.2f}"
    return sign + rng.choice([f"{size.numerator}", f"{size.numerator:,}"]) + rng.choice(["", "", "", ".0", ".00"])


def of_gsm8k(rng: random.Random) -> tuple[Fraction, str, Fraction | None, str]:
    """Gold, the text between the tags, its value (None: not a single number), and the form's name."""
    gold = Fraction(rng.choice([rng.randrange(1, 100), rng.randrange(-50, 5000), rng.randrange(10**6)]))
    if rng.random() < 0.1:
        gold += Fraction(rng.randrange(1, 100), 100)
    value = gold
    if rng.random() < 0.3:
        value = rng.choice([gold + 1, -gold, gold * 10, round(gold / 10, 2), gold + Fraction(1, 2), gold * 1000])
    text = number_text(rng, value)
    sign, digits = text[: text.startswith("-")], text.lstrip("-")
    match rng.randrange(10):
        case 0 | 1:
            return gold, text, value, "bare"
        case 2 | 3:
            unit = rng.choice(UNITS.replace("\n", " ").split(", "))
            return gold, f"{text} {unit}{rng.choice(['', '.'])}", value, "unit"
        case 4:
            forms = [
                f"{sign}${digits}",
                f"${sign}{digits}",
                f"{sign}$ {digits}",
                f"{text} $",
                f"${text}$",
                f"{text}\u20ac",
            ]
            return gold, rng.choice(forms), value, "currency"
        case 5:
            forms = [f"{text}%", f" {text}\n", text.replace("-", "\u2212"), f"{text}."]
            return gold, rng.choice(forms), value, "spelling"
        case 6 | 7:
            factor, words = a_change(rng)
            changed = value * factor if factor else None
            return gold, f"{text} {words}", None if changed == gold else changed, f"changed: {words}"
        case 8:
            n = str(abs(value.numerator))
            fullwidth = "".join(chr(0xFF10 + int(digit)) for digit in n)
            odd = [
                f"{n}, {n}",
                f"{n} or {n}x",
                f"{n[:1]},{n[1:]}0",
                f"about {n}",
                fullwidth,
                "",
                f"{n}/{n}0",
                f"{n} {n}",
            ]
            return gold, rng.choice(odd), None, "odd"
        case _:
            return gold, f"<answer>{text}</answer><answer>{text}</answer>", None, "two answers"


def report(name: str, verdicts: list[tuple[bool, bool, str, str]]) -> None:
    """Print and check the rewards: (right, rewarded, form, shown) for each answer."""
    accepted = [shown for right, rewarded, _, shown in verdicts if rewarded and not right]
    refused = Counter(form for right, rewarded, form, _ in verdicts if right and not rewarded)
    num_right = sum(right for right, *_ in verdicts)
    print(f"\n{name}: {len(verdicts)} answers, {num_right} right; earned by wrong ones: {len(accepted)}, "
          f"refused: {dict(refused)}")  # fmt: skip
    assert accepted == []
    assert refused.total() <= 0.01 * num_right
    assert 0.2 < num_right / len(verdicts) < 0.8


def test_gsm8k():
    rng, verdicts = random.Random(0), []
    for _ in range(ANSWERS):
        gold, text, value, form = of_gsm8k(rng)
        answer = text if "<" in text else f"<answer>{text}</answer>"
        row = {"answer": f"It is so.\n#### {gold.numerator:,}" if gold.denominator == 1 else f"{float(gold):.2f}"}
        rewarded = gsm8k.reward(row, rng.choice(THINKS) + answer)["correct"] == 1
        verdicts.append((value == gold, rewarded, form, f"{gold}: {text}"))
    report("gsm8k", verdicts)


# Mathematics ---------------------------------------------------------------------------------------------------------


def latex(rng: random.Random, value: Fraction) -> str:
    """One of the usual ways to write an exact number in LaTeX."""
    sign, a, b = ("-" if value < 0 else ""), abs(value.numerator), value.denominator
    if b == 1:
        forms = [f"{a}", f"{a:,}", f"{a:,}".replace(",", ",\\!"), f"{a}.0", f"\\frac{{{2 * a}}}{{2}}", f"{{{a}}}"]
        forms += [f"{a}\\text{{ {rng.choice(['cm', 'dollars', 'square units', 'm/s'])}}}", f"\\${a}", f"{a}^\\circ"]
        if a and a % 1000 == 0:
            forms += [f"{a // 1000} thousand", f"{a // 1000} \\times 10^{{3}}", f"{a // 1000}\\text{{ thousand}}"]
        return sign + rng.choice(forms)
    forms = [f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}", f"{a}/{b}", f"\\frac{{{3 * a}}}{{{3 * b}}}"]
    if a > b:
        forms.append(f"{a // b}\\frac{{{a % b}}}{{{b}}}")
    if (10**4 * value).denominator == 1:
        forms.append(f"{float(abs(value)):g}")
    return sign + rng.choice(forms)


# N is the number, which keeps its value in these forms, but not in the others
PRESENTED = r"N; $N$; N.; \text{N}; = N; \approx N; **N**; The answer is N.; \textcolor{blue}{N}; \boldsymbol{N}; x = N"
CHANGED = r"""N\text{ million}; N\mathrm{i}; N\text{ or more}; N\text{0}; N\text{.5}; N\ldots; Nx; N0; N\pi; N!; N, 2;
N\text{ or }2; N\text{ hundredths}; N\text{ squared}; 1N; N\sqrt{2}; N\text{ dozen}; N^2; -N; N+1; \sqrt{N}; (N, 1);
N\text{ plus or minus one}; N\%\cdot 3"""


def of_math(rng: random.Random) -> tuple[str, str, bool, str]:
    """Gold, answer, whether it is right, and the form's name."""
    value = Fraction(rng.choice([rng.randrange(3, 100), rng.randrange(3, 10**5), 1000 * rng.randrange(3, 999)]))
    if rng.random() < 0.4:
        value = Fraction(rng.randrange(25, 60), rng.randrange(2, 13))
    gold = f"{value.numerator}" if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    if value.denominator == 1 and rng.random() < 0.35:
        form = rng.choice(re.split(r";\s", CHANGED))
        return gold, form.replace("N", gold), False, f"changed: {form}"
    other = value
    if rng.random() < 0.3:
        other = rng.choice([value + 1, 1 / value, -value, value * 10, value + Fraction(1, 7), value / 100])
    text, form = latex(rng, other), rng.choice(re.split(r";\s", PRESENTED))
    if "{N}" in form and ("text" in text or "frac" in text):
        form = "N"
    return gold, form.replace("N", text), other == value, f"{form} of {re.sub('[0-9]+', 'n', text)}"


# Gold; right; wrong: math-verify agrees with each
EXPRESSIONS = r"""Ax+B; B+Ax; Bx+A
(x+A)^2; x^2+2\cdot Ax+A^2; x^2+A^2
A\sqrt{B}; \sqrt{B}\cdot A; \sqrt{B+A}
(A,B); \left(A, B\right); (B,A+1)
A,B; \{B, A\}; A
\frac{\pi}{A}; \pi/A; \frac{A}{\pi}
[A,\infty); \left[A, \infty\right); (A,\infty)
A \pm \sqrt{B}; A+\sqrt{B}, A-\sqrt{B}; A+\sqrt{B}
2^{A}; 2\cdot 2^{A-1}; 2^{A+1}
\frac{x}{A}; x/A; \frac{A}{x}"""


def an_expression_of_math(rng: random.Random) -> tuple[str, str, bool, str]:
    a, b = map(str, rng.sample((3, 5, 7, 11, 13), 2))
    forms = rng.choice(EXPRESSIONS.splitlines()).replace("A", a).replace("B", b)
    gold, right, wrong = forms.split("; ")
    is_right = rng.random() < 0.5
    return gold, right if is_right else wrong, is_right, "expression"


@pytest.mark.skipif(not has_library(), reason="math-verify is not installed")
def test_math(monkeypatch):
    rng, judge = random.Random(0), Judge()
    monkeypatch.setattr(mathematics, "_JUDGE", judge)
    cases = [(an_expression_of_math if rng.random() < 0.1 else of_math)(rng) for _ in range(ANSWERS)]
    rows = [{"answer": gold} for gold, *_ in cases]
    texts = [rng.choice(("", "<think>\\boxed{5}</think>", "So ")) + f"\\boxed{{{answer}}}" for _, answer, *_ in cases]
    try:
        mathematics.prepare(rows, texts)
        paid = [mathematics.reward(row, text)["correct"] == 1 for row, text in zip(rows, texts, strict=True)]
    finally:
        judge.close()
    report("math", [(x[2], is_paid, x[3], f"{x[0]}: {x[1]}") for x, is_paid in zip(cases, paid, strict=True)])
