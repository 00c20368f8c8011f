r"""Thousands of generated answers, right ones and near misses, against judges that share no code with the tasks.

    python benchmarks/many_answers.py --answers 20000

The generator knows the exact value of its answers. It prints how many wrong answers earn a reward, and which right ones
are refused. The slow tests ask for 1,000 answers. Countdown's expressions are in tests/unit/test_countdown_task.py.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from unittest import mock

import tyro

from tasks import gsm8k, qa
from tasks import math as mathematics
from tasks.verdicts.judge import Judge

Verdict = tuple[bool, bool, str, str]  # whether an answer is right and rewarded, its form, and what is shown of it

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
            forms = f"{sign}${digits}|${sign}{digits}|{sign}$ {digits}|{text} $|${text}$|{text}\u20ac"
            return gold, rng.choice(forms.split("|")), value, "currency"
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
            odd = f"{n}, {n}|{n} or {n}x|{n[:1]},{n[1:]}0|about {n}|{fullwidth}||{n}/{n}0|{n} {n}"
            return gold, rng.choice(odd.split("|")), None, "odd"
        case _:
            return gold, f"<answer>{text}</answer><answer>{text}</answer>", None, "two answers"


def of_answers_to_gsm8k(count: int) -> list[Verdict]:
    rng, verdicts = random.Random(0), []
    for _ in range(count):
        gold, text, value, form = of_gsm8k(rng)
        answer = text if "<" in text else f"<answer>{text}</answer>"
        row = {"answer": f"It is so.\n#### {gold.numerator:,}" if gold.denominator == 1 else f"{float(gold):.2f}"}
        rewarded = gsm8k.reward(row, rng.choice(THINKS) + answer)["correct"] == 1
        verdicts.append((value == gold, rewarded, form, f"{gold}: {text}"))
    return verdicts


# Questions about documents -------------------------------------------------------------------------------------------

# What stands between two numbers, in all its spellings; equal digits with another one are another answer
BETWEEN = (("",), (".",), ("/", "\u2215"), (":",), ("-", "\u2013", "\u2010"), ("+",), ("^",), ("'",), (", ",), ("*",))
AROUND = """N; N km; $N million; N%; about N people; N.; the N; a score of N; N degrees; (N); \u201cN\u201d; version N
John\u2019s N; caf\xe9 N; N\xa0a.m.; #N; N-year-old"""


def of_qa(rng: random.Random) -> tuple[str, str, bool, str]:
    """Gold, answer, whether it is right, and the form's name. Half of the near misses have the same digits."""
    a, b, around = rng.randrange(1, 1000), rng.randrange(1, 100), rng.choice(re.split("; |\n", AROUND))
    sign, between = rng.choice(("", "", "-")), rng.randrange(len(BETWEEN))
    gold = around.replace("N", f"{sign}{a}{BETWEEN[between][0]}{b}")
    other = rng.choice([(sign, a, between)] * 5 + [
        ("" if sign else "-", a, between), (sign, a + 1, between), *[(sign, a, rng.randrange(len(BETWEEN)))] * 4
    ])  # fmt: skip
    text = f"{other[0]}{other[1]}{rng.choice(BETWEEN[other[2]])}{b}"
    if between == other[2] == 0 and rng.random() < 0.5:
        text = f"{other[0]}{int(text.lstrip('-')):,}"
    text = text if other[0] == "" or rng.random() < 0.5 else text.replace("-", "\u2212", 1)
    answer = around.replace("N", text)
    for spelling in (("\u2019", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\xe9", "e\u0301"), ("\xa0", " "), ("$", "")):
        answer = answer.replace(*spelling) if rng.random() < 0.5 else answer
    return gold, answer, other == (sign, a, between), f"{BETWEEN[between][0]} in {around}"


def of_answers_to_qa(count: int) -> list[Verdict]:
    rng, verdicts = random.Random(0), []
    for _ in range(count):
        gold, answer, is_right, form = of_qa(rng)
        rewards = qa.reward({"answer": gold}, f"<answer>{answer}</answer>")
        verdicts.append((is_right, rewards["correct"] == 1, form, f"{gold}: {answer}"))
    return verdicts


# Mathematics ---------------------------------------------------------------------------------------------------------


WITH_UNITS = r"""N \, \mathrm{m/s^2}; N\ \text{N}\cdot\text{m}; N\text{ kg m}^{-3}; N\,\mathrm{kg\,m^{-3}}; N °C; N m/s²
N kg m^{-3}; N N·m; N\text{ J·s}; N^\circ\text{C}; N\ \mathrm{km/h}; N km/h; N\text{ m s}^{-1}; N\text{ cm³}
N\,\mathrm{W/(m\cdot K)}; N\ \frac{\text{m}}{\text{s}^2}; N\;{\rm m/s^2}; N\,\mu\text{m}
N\ \frac{\mathrm{kg}\,\mathrm{m}}{\mathrm{s}^2}"""
GROUPED = (r"\,", r"\ ", "~", "\u2009", "\u202f", "{,}", r"{\,}")


def repeating(value: Fraction) -> tuple[str, str] | None:
    """The digits before the repeated ones, and these, by long division."""
    digits, rests, rest = "", [], value.numerator % value.denominator
    while rest and rest not in rests:
        rests.append(rest)
        digits += str(10 * rest // value.denominator)
        rest = 10 * rest % value.denominator
    start = rests.index(rest) if rest else 0
    return (f"{value.numerator // value.denominator}.{digits[:start]}", digits[start:]) if rest else None


def latex(rng: random.Random, value: Fraction) -> str:
    """One of the usual ways to write an exact number in LaTeX."""
    sign, a, b = ("-" if value < 0 else ""), abs(value.numerator), value.denominator
    if b == 1:
        forms = [rng.choice(re.split(r"; |\n", WITH_UNITS)).replace("N", f"{a}", 1)] * 3
        if a > 999:
            forms += [f"{a:,}".replace(",", rng.choice(GROUPED))] * 2
        forms += [f"{a}", f"{a:,}", f"{a:,}".replace(",", ",\\!"), f"{a}.0", f"\\frac{{{2 * a}}}{{2}}", f"{{{a}}}"]
        forms += [f"{a}\\text{{ {rng.choice(['cm', 'dollars', 'square units', 'm/s'])}}}", f"\\${a}", f"{a}^\\circ"]
        if a and a % 1000 == 0:
            forms += [f"{a // 1000} thousand", f"{a // 1000} \\times 10^{{3}}", f"{a // 1000}\\text{{ thousand}}"]
        return sign + rng.choice(forms)
    forms = [f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}", f"{a}/{b}", f"\\frac{{{3 * a}}}{{{3 * b}}}"]
    if a > b:
        forms.append(f"{a // b}\\frac{{{a % b}}}{{{b}}}")
    if (10**4 * value).denominator == 1:
        forms.append(f"{float(abs(value)):g}")
    elif found := repeating(abs(value)):
        repeated = (r"I\overline{B}", r"I\bar{B}", "I(B)", r"IB\overline{B}")
        forms += [form.replace("I", found[0]).replace("B", found[1]) for form in repeated]
    return sign + rng.choice(forms)


# N is the number, which keeps its value in these forms, but not in the others
PRESENTED = r"N; $N$; N.; \text{N}; = N; \approx N; **N**; The answer is N.; \textcolor{blue}{N}; \boldsymbol{N}; x = N"
CHANGED = r"""N\text{ million}; N\mathrm{i}; N\text{ or more}; N\text{0}; N\text{.5}; N\ldots; Nx; N0; N\pi; N!; N, 2;
N\text{ or }2; N\text{ hundredths}; N\text{ squared}; 1N; N\sqrt{2}; N\text{ dozen}; N^2; -N; N+1; \sqrt{N}; (N, 1);
N\text{ plus or minus one}; N\%\cdot 3; N\,\mathrm{m/s^2}+1; N\text{ k}m; N\text{ m}/2\text{ s}; N g h; Nm; Nm/s; N N;
N\,\mathrm{x/y}; N\text{ dozen/s}; N\text{ thousand m/s}; N N\cdot x; N\text{ m or 4 m}; N\text{ m}^{12};
N^2\text{ m}; N\ \frac{\text{m}}{2}; N/\text{dozen}; N\cdot 2\text{ m}; N\,000; 1\,N; N\,5; N\,N; N.\overline{3};
\overline{N}x; x < N; 0.\overline{N}; N\quad 345; \textbf{(E)}\ 1N; (E) N or (D) N; N\text{ s}^{-1}\text{ squared};
N\,\mathrm{k}; [N, N+1]; N\,\mathrm{n^2}; N\ \text{mil/s}"""


def of_math(rng: random.Random) -> tuple[str, str, bool, str]:
    """Gold, answer, whether it is right, and the form's name."""
    value = Fraction(rng.choice([rng.randrange(3, 100), rng.randrange(3, 10**5), 1000 * rng.randrange(3, 999)]))
    if rng.random() < 0.4:
        value = Fraction(rng.randrange(25, 60), rng.randrange(2, 13))
    gold = f"{value.numerator}" if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    if value.denominator == 1 and rng.random() < 0.35:
        form = rng.choice(re.split(r";\s", CHANGED))
        return gold, form.replace("N", gold), False, f"changed: {form}"
    if (found := repeating(value)) and len("".join(found)) < 7 and rng.random() < 0.2:
        form = rng.choice(("IB", r"I\overline{B0}", r"I0\overline{B}", r"I\overline{B}x"))
        return gold, form.replace("I", found[0]).replace("B", found[1]), False, "not repeated"
    other = value
    if rng.random() < 0.3:
        other = rng.choice([value + 1, 1 / value, -value, value * 10, value + Fraction(1, 7), value / 100])
    text, form = latex(rng, other), rng.choice(re.split(r";\s", PRESENTED))
    if "{N}" in form and ("text" in text or "frac" in text):
        form = "N"
    return gold, form.replace("N", text), other == value, f"{form} of {re.sub('[0-9]+', 'n', text)}"


# Gold; right; wrong
EXPRESSIONS = r"""Ax+B; B+Ax; Bx+A
(x+A)^2; x^2+2\cdot Ax+A^2; x^2+A^2
A\sqrt{B}; \sqrt{B}\cdot A; \sqrt{B+A}
(A,B); \left(A, B\right); (B,A+1)
A,B; \{B, A\}; A
\frac{\pi}{A}; \pi/A; \frac{A}{\pi}
[A,\infty); \left[A, \infty\right); (A,\infty)
A \pm \sqrt{B}; A+\sqrt{B}, A-\sqrt{B}; A+\sqrt{B}
2^{A}; 2\cdot 2^{A-1}; 2^{A+1}
\frac{x}{A}; x/A; \frac{A}{x}
E; \textbf{(E)}\ A; \textbf{(D)}\ A
E; (E)\ \frac{A}{B}; (E)\text{ or }(D)
E; \text{E. }A\text{ cm}; A
\textbf{(E)}\ A; E; D
\textbf{(E)}\ A; A.0; 1A
\textbf{(E)}\ A; (E) A; (E) 1A
A; \textbf{(E) }A; \textbf{(E) }B1
\sqrt{A}; \textbf{(D)}\ \sqrt{A}; \textbf{(D)}\ \sqrt{B}
[A,1B0]; A \le x \le 1B0; A \le x < 1B0
[-\frac{A}{2},B]; B \ge x \geqslant -A/2; B \ge x \ge A
A<x<1B0; (A,1B0); A,1B0
A \le t < 1B0; [A,1B0); [A,1B0]
(-\infty,A); x<A; x \le A
x \in [A,\infty); A \leq x; x \le A
x > \frac{1}{A}; (\frac{1}{A}, \infty); (A, \infty)
(-\infty,A)\cup(1B0,\infty); x<A\text{ or }x>1B0; x<A\text{ and }x>1B0
[A,1B0]; \{x \mid A \le x \le 1B0\}; \{A,1B0\}
[2\sqrt{A},1B0]; \sqrt{A} \cdot 2 \leqslant x \leqslant 1B0.0; 2\sqrt{A} \le 2x \le 1B0
x<A; A>x; y<A"""


def an_expression_of_math(rng: random.Random) -> tuple[str, str, bool, str]:
    a, b = map(str, rng.sample((3, 5, 7, 11, 13), 2))
    forms = rng.choice(EXPRESSIONS.splitlines()).replace("A", a).replace("B", b)
    gold, right, wrong = forms.split("; ")
    is_right = rng.random() < 0.5
    return gold, right if is_right else wrong, is_right, "expression"


def of_answers_to_math(count: int) -> list[Verdict]:
    rng, judge = random.Random(0), Judge()
    cases = [(an_expression_of_math if rng.random() < 0.2 else of_math)(rng) for _ in range(count)]
    rows = [{"answer": gold} for gold, *_ in cases]
    texts = [rng.choice(("", "<think>\\boxed{5}</think>", "So ")) + f"\\boxed{{{answer}}}" for _, answer, *_ in cases]
    with mock.patch.object(mathematics, "_JUDGE", judge):
        try:
            mathematics.prepare(rows, texts)
            paid = [mathematics.reward(row, text)["correct"] == 1 for row, text in zip(rows, texts, strict=True)]
        finally:
            judge.close()
    return [(x[2], is_paid, x[3], f"{x[0]}: {x[1]}") for x, is_paid in zip(cases, paid, strict=True)]


TASKS = {"gsm8k": of_answers_to_gsm8k, "qa": of_answers_to_qa, "math": of_answers_to_math}


def mistakes(verdicts: list[Verdict]) -> tuple[list[str], Counter[str]]:
    """The wrong answers that earn a reward, and the forms of the right ones that do not."""
    accepted = [shown for right, rewarded, _, shown in verdicts if rewarded and not right]
    return accepted, Counter(form for right, rewarded, form, _ in verdicts if right and not rewarded)


@dataclass(frozen=True, kw_only=True)
class Config:
    answers: int = 1000  # for each task


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    for name, generate in TASKS.items():
        found = generate(config.answers)
        accepted, refused = mistakes(found)
        print(f"{name}: {len(found)} answers, {sum(right for right, *_ in found)} right; "
              f"earned by wrong ones: {len(accepted)}, refused: {dict(refused)}")  # fmt: skip


if __name__ == "__main__":
    main()
