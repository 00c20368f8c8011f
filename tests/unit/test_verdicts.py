"""Verdicts on answers: text, numbers, and the math-verify processes, whatever happens to them."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tasks.verdicts import judge as judge_module
from tasks.verdicts.answer_text import as_number, changes_number, normalize
from tasks.verdicts.judge import Judge, expression, has_library, is_too_large, num_workers, quick_verdict

from harness.workers.tool_processes import Workers

needs_library = pytest.mark.skipif(not has_library(), reason="math-verify is not installed")
MINUS, PI, ROOT_SIGN = "\u2212", "\u03c0", "\u221a"


@pytest.fixture(scope="module")
def judge():
    """With one process for all tests of the file, and enough time for a slow processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge_module, "HUNG_SECONDS", 300.0)
        patch.setattr(judge_module, "num_workers", lambda: 1)
        shared = Judge()
        yield shared
        shared.close()


@pytest.fixture
def text_judge(monkeypatch) -> Judge:
    """Without math-verify."""
    monkeypatch.setattr(judge_module, "has_library", lambda: False)
    return Judge()


def worker_of(judge: Judge) -> psutil.Process:
    judge.verdict(["2y"], "y+y")
    return psutil.Process(judge._workers._idle[0]._process.pid)


SPELLINGS = [
    (r"\dfrac{1}{2}", r"\frac12"), (r"\frac 59", r"\tfrac{5}{9}"), (r"11\sqrt2", r"11\sqrt{2}"), ("{5}", "5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"), ("x^{2} + a_{1}", "x^2+a_1"), (r"\textbf{(C)}", "C"),
    (r"90^{\circ}", r"90^\circ"), (r"$2^{1009}$", "2^{1009}."), (r"\text{Evelyn}", "evelyn"),
    (r"\text{both even}", "Both even"), (r"x \leqslant 4", r"x\le4"), (f"{MINUS}2{PI}", r"-2\pi"),
    (f"{ROOT_SIGN}3", r"\sqrt{3}"), (r"E_{1},E_{2}", "E_1, E_2"), (r"\textcolor{blue}{\sqrt 2}", r"**\sqrt{2}**"),
    ("The final answer is x+1.", "= x + 1"),
]  # fmt: skip
OTHERS = [
    ("1 2", "12"), (r"\pi n", r"\pin"), ("AB", "ab"), ("x^2", "x^3"), ("x_12", "x_1"), ("(3,4]", "[3,4]"),
    (r"\{1\}", "1"), ("**5** or **6**", "5"), (r"\text{5}\text{6}", "5"),
]  # fmt: skip


def test_spellings_of_one_answer_are_equal_as_text_and_different_answers_are_not():
    assert [pair for pair in SPELLINGS if normalize(pair[0]) != normalize(pair[1])] == []
    assert [pair for pair in OTHERS if normalize(pair[0]) == normalize(pair[1])] == []


NUMBERS = {
    "-2469/2": ("-1,234.50",), "2": ("+2",), "21/312500": (".0000672",), "32348": (r"\$32,\!348",),
    "10080": ("10{,}080",), "9/5": (r"1\frac{4}{5}",), "275/2": ("137 1/2",), "43/48": ("43/48",),
    "-1/3": (r"-\frac{1}{3}",), "4500": ("4.5e3",), "1/1000": ("10^{-3}",), "870000000": (r"8.7 \times 10^{8}",),
    "270/7": (r"\frac{270}7\text{ degrees}",), "864": (r"864 \mbox{ inches}^2",),
    "15000": (r"15000 \text{ kcal m}^{-2} \text{yr}^{-1}",), "5": ("5 square feet", "x = 5", r"5\text{ m}",),
    "1950": (r"1950^\circ C",), "3": ("\u0663",), "2000000": (r"2\text{ million}",),
    "3000000": (r"\$3\text{ million dollars}",), "5000": ("5 thousand",), "12": (r"1\text{ dozen}",),
    "300000": (r"3\text{ hundred thousand}",),
    "36": (
        r"36 \, \mathrm{m/s^2}", r"36\ \text{N}\cdot\text{m}", r"36\,\mathrm{kg\,m^{-3}}", "36 kg m^{-3}", "36 N·m",
        "36°C", r"36\text{ J·s}", r"36{}^\circ\text{C}", r"36\text{ m s}^{-1}", "36 m/s²", "36km/h",
        r"36\,\mathrm{W/(m\cdot K)}", r"36\ \frac{\text{m}}{\text{s}^2}", r"36\;{\rm m/s^2}", r"36\,\mu\text{m}",
        "36\u2103", r"36\ \frac{\text{kg}\cdot\text{m}}{\text{s}^2}", r"36\text{ J/K}",
    ),
    "12345": (
        r"12\,345", r"12\thinspace 345", "12\u2009345", "12\xa0345", r"12\ 345", "12{,}345",
        r"12{\,}345", "12~345\\text{ m}",
    ),
    "98764321/8000": (r"12\,345.540\,125",),
    "1/6": (r"0.1\overline{6}", r"0.1\bar{6}", r"0.1\dot{6}", "0.1(6)", r".1\overline{66}\text{ cm}"),
    "1/7": (r"0.\overline{142857}", r"0.\dot{1}4285\dot{7}"),
    "none": (
        "3, 500", "1,2", "137 5", "1/0", "1e999999999", "x == 5", "2x", "52_8", "nan", "inf", "1_000",
        r"3\mathrm{i}", r"3\mathrm{x}", r"3\mathrm{n}", r"5\text{ + y}",
        r"807\text{.5}", r"239\text{0}", r"5\text{ or }6", r"5\text{ or more}",
        r"672\text{ or 694}", r"5\text{ squared}", r"5\text{ to }9", r"18\text{ half}", r"627\ldots",
        "1 000", r"1\,00", r"1\,2345", r"1\quad 000", r"0.\overline{3}x", "5m", "5m/s", "5 g h", r"5\text{ k}m",
        "5 x/y", r"5\text{ m}/2\text{ s}", r"5\,\mathrm{x^2}", r"5\text{ dozen/s}", r"5\ \frac{\text{m}}{2}",
        r"5/\text{dozen}", "5 s^{-1}",
    ),
}  # fmt: skip


def test_exact_numbers_are_read():
    for value, texts in NUMBERS.items():
        for text in texts:
            number = as_number(text)
            assert (str(number.value) if number else "none") == value, text


UNITS = "eggs, miles per hour, km/h, dollars left, fifth graders, more eggs, times, degrees, seconds, percent, éclairs"
CHANGES = (
    "thousand, thousands, millions, milliards, bn, mil, k, dozen, hundredths, quarters, half, thirds, third of it"
    ", a fifth, squared, cubed, times two, divided by two, maybe twenty, more than twelve, at least, or more, to go, pi"
    ", i, ½, ², 百, 万, Ⅷ, ٣, 천, 個, π, grand, score, less one"
)


def test_what_changes_a_number_is_no_unit():
    assert [unit for unit in UNITS.split(", ") if changes_number(unit)] == []
    assert [words for words in CHANGES.split(", ") if not changes_number(words)] == []


QUICK = {
    True: [
        ("3.61e-10", r"3.61 \times 10^{-10}"), ("2/3", "0.666667"), ("0.5%", "0.005"), ("50%", "50%"), ("932", "= 932"),
        ("33", "**33**"), ("5", r"\underline{5}"), ("5", r"\textcolor{blue}{5}"), ("5", "The answer is 5."),
        ("807", r"\approx 807"), ("E", r"\textbf{(E)}\ 12"), ("E", "(E) 12"), ("E", r"$\textbf{(E)}$ 12"),
        ("E", r"{\bf (E)}12"), ("E", "(E)12"), (r"\text{(E)}", r"\textbf{E.}~-12\text{ cm}"),
        (r"\textbf{(E)}\ 12", "E"), (r"\textbf{(E)}\ 12", "12"), ("12", r"\textbf{(E) }12.0"),
        ("C", r"(C) \text{Evelyn}"), ("[-2,7]", r"-2 \le x \le 7"), (r"7 \ge x \ge -2", "[-2,7]"),
        (r"x \in (-\infty,3)", "x<3"), ("x<3", "3 > x"), (r"[0.5,\infty)", r"x \geqslant \frac12"),
        (r"(-\infty,2)\cup[3,\infty)", r"x \ge 3\text{ or }x<2"), ("(2,4)", "2<t<4"),
        ("[-2,7]", r"\{x \mid -2 \le x \le 7\}"), (r"0<\theta<\pi", r"(0,\pi)"),
        ("0.05", "0.0500005"),  # five digits of the answer, but not of the right one
    ],
    False: [
        ("3.61e-10", "1.39e-10"),  # both are 0 at six decimals
        (r"\frac{m}{M}", r"\frac{M}{m}"),  # math-verify considers these equal
        ("2/3", "0.666666"), ("9.6", "9.58"), ("50%", "0.5%"), ("5", "the answer that we have found is five"),
        ("2x", "x" * 301), ("2x", "}{"), ("", ""), ("807", r"\approx 808"), ("5", r"5\text{ or more}"),
        ("E", "(D) 12"), ("12", "(E) 13"), (r"\textbf{(E)}\ 12", "(E) 13"), (r"\textbf{(E)}\ 12", "D"),
        ("E", r"\textbf{(E)}\text{ or }\textbf{(D)}"),
        ("[-2,7]", r"-2 < x \le 7"), ("[-2,7]", r"7 \le x \le -2"),
        ("[-2,7]", r"x \le 7"), ("2<x<4", "2,4"), ("2<x<4", "[2,4]"), ("2<x<4", r"x \in \{2,4\}"),
        (r"(-\infty,2)\cup(3,\infty)", r"x<2\text{ and }x>3"), (r"(-\infty,3)", r"x \le 3"),
        ("(2,3)", r"x<2\text{ or }x>3"), ("627", r"627\ldots"), (r"2\pi", r"2\pi\text{ or more}"),
        (r"2\pi", r"2\pi\text{ million}"), ("x<3", "y<3"), (r"x<2\text{ or }x>3", r"x<2\text{ and }x>3"),
    ],
    None: [
        ("x=5", "y=5"), (r"[2\sqrt{2},7]", r"\sqrt{8} \le x \le 7"), (r"\sqrt{8}", r"2\sqrt{2}"),
        (r"2\sqrt{2}", r"(B) \sqrt{8}"),
    ],
}  # fmt: skip


def test_quick_verdicts():
    for verdict, cases in QUICK.items():
        assert [case for case in cases if quick_verdict(*case) is not verdict] == []


def test_the_library_is_given_no_text_that_it_would_leave_out():
    assert [expression(text) for text in (r"2\pi\text{ cm}^2", r"x=1\text{ or }x=-2")] == [r"2\pi", "x=1,x=-2"]
    assert expression(r"3\sqrt2\mathrm{i}") == r"3\sqrt2 i "
    assert not any(map(expression, (r"2\pi\text{ to 4}", r"1,2,\dots,n", r"\frac{1}{2")))


EQUAL = [
    ("(x+1)^2", "x^2+2x+1"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{2}{\sqrt{2}}", r"\sqrt2"), ("1,-2", r"\{-2,1\}"),
    ("(a+5)(b+2)", "ab+2a+5b+10"), (r"e^{-2t}\cdot e^{t}", "e^{-t}"), ("x=5", "5"), ("52_8", "52"),
    (r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 0.5 \\ 2 \end{bmatrix}"), ("(2,4)", "2,4"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19},1-\sqrt{19}"), (r"\pi", "3.141593"), ("f(x)=2x", "2x"), ("M", "m"),
    (r"\frac{1}{b-a}(e^{-at}-e^{-bt})", r"\frac{e^{-at}-e^{-bt}}{b-a}"), (r"\sin 2x", r"\sin(2x)"),
    (r"2^{1009}", r"2^{1008}\cdot 2"), (r"x \in [-2,7]", "[-2,7]"), (r"(5,\infty)", r"(5, \infty)"),
    ("x=5,x=-2", r"x=-2\text{ or }x=5"), (r"2\pi", r"2\pi\text{ radians}"),
    (r"[2\sqrt{2},7]", r"\sqrt{8} \le x \le 7"), (r"2\sqrt{2}", r"(B) \sqrt{8}"),
    (r"2\pi", r"2\pi\ \text{rad}/\text{s}"), (r"\sqrt{2}", r"\sqrt{2}\,\mathrm{m/s^2}"),
    (r"12345\pi", r"\pi \cdot 12\,345"), ("x<3", "x-3<0"),
]  # fmt: skip
DIFFERENT = [
    (r"3\sqrt{13}", r"3\sqrt{14}"), ("x^2", "x^2+C"), ("2k+2", "2n+2"), ("(3,4]", "(3,5]"), ("1,-2", "1,-2,3"),
    (r"\frac{e^{at}-e^{-at}}{2a}", r"\frac{e^{at}-e^{-at}}{3a}"), (r"\ln 2 + i\pi", r"\ln 3 + i\pi"), ("2", "2c"),
    ("(1,2),(3,4)", "(1,2),(3,5)"), ("52_8", "42"), ("a_{1}", "a_{2}"), ("5", r"x+5"), (r"\alpha", r"\beta"),
    ("3", r"3\mathrm{i}"), ("5", r"5\text{ or }6"), (r"2\pi", r"2\pi d"), ("5,6", "5"),
    ("E", "12"), ("E", "E = 12"), ("E", "(E), (D)"), ("A", "(A) - 4"), ("A", "(A)(B+1)"), ("E", "not (E) 12"),
    ("12", "A:12"), ("x<3", "x<3,x>2"), (r"[2\sqrt{2},7]", r"\sqrt{6} \le x \le 7"), (r"2\sqrt{2}", r"(B) \sqrt{6}"),
]  # fmt: skip


@pytest.mark.slow
@needs_library
def test_the_library_tells_equal_and_different_expressions_apart(judge, monkeypatch):
    judge.prepare(([gold], answer) for gold, answer in EQUAL + DIFFERENT)
    assert [pair for pair in EQUAL if judge.verdict([pair[0]], pair[1]) is not True] == []
    assert [pair for pair in DIFFERENT if judge.verdict([pair[0]], pair[1]) is not False] == []


@needs_library
def test_a_verdict_is_kept_and_shared_by_spellings(judge):
    assert judge.verdict(["7z", "3z+z"], "4z") is True
    asked = judge.num_asked
    assert judge.verdict(["7z", "3z+z"], "4z") is True
    assert judge.verdict(["7z"], "4z") is False
    assert judge.num_asked == asked


@pytest.mark.slow
@needs_library
def test_slow_answers_take_nothing_from_others(judge, tmp_path, monkeypatch):
    """Each has its own time limit, in one process."""
    compare = tmp_path / "compare.py"
    compare.write_text(judge_module.COMPARE.read_text("utf-8").replace("SECONDS = 1.0", "SECONDS = 0.2"), "utf-8")
    monkeypatch.setattr(judge_module, "COMPARE", compare)
    judge = Judge()
    right = [([f"{number}y+y"], f"{number + 1}y") for number in range(2, 66)]
    slow = [(["x^2"], f"(x+{number})^{{10000}}") for number in range(1, 13)]
    cases = [case for index, pair in enumerate(right) for case in (*slow[index : index + 1], pair)]
    judge.prepare(cases)
    asked = judge.num_asked
    assert [judge.verdict(*case) for case in right] == [True] * 64
    assert [judge.verdict(*case) for case in slow] == [None] * 12
    assert judge.num_asked == asked
    judge.close()


@needs_library
def test_cheap_verdicts_do_not_wait_for_the_library(judge):
    cases = [([r"\frac{1}{2}"], "0.5"), (["5"], "6")]
    with ThreadPoolExecutor(1) as pool, judge._lock:  # a waiting verdict ends when the lock is released
        found = pool.submit(lambda: [judge.verdict(*case) for case in cases])
        assert found.result(timeout=60) == [True, False]


@pytest.mark.slow
@needs_library
def test_a_computation_in_c_that_takes_too_long_is_undecided(judge, monkeypatch):
    """A signal ends it, as the process's timer does. Another process is started, and continues."""
    before = worker_of(judge)
    os.kill(before.pid, signal.SIGVTALRM)
    monkeypatch.setattr(Workers, "_take", lambda self: self._idle.pop())  # also if it has already ended
    assert judge.verdict(["3y"], "y+2y") is None
    monkeypatch.undo()
    assert judge.verdict(["5y"], "2y+3y") is True
    assert worker_of(judge) != before


def test_huge_numbers_are_not_computed():
    huge = ["9^9^9^9", "10^{10^{10}}", "2^{1000000}", "99999!", "((3!)!)!!"]
    assert [is_too_large(text) for text in huge] == [True] * len(huge)
    assert not any(map(is_too_large, ["2^{1009}", "10^{100}", r"\frac{100!}{2^{50}}", "x^{2^{n}}", "e^{-2t}"]))


@pytest.mark.slow
@needs_library
def test_a_worker_that_is_killed_is_replaced_and_asked_again(judge, monkeypatch):
    worker_of(judge).kill()  # during a request
    take, once = Workers._take, []
    monkeypatch.setattr(Workers, "_take", lambda self: take(self) if once else (once.append(1), self._idle.pop())[1])
    assert judge.verdict(["11w"], "5w+6w") is True


@needs_library
def test_hostile_texts_are_judged_by_the_worker_too(judge):
    worker = worker_of(judge)
    for answer in ("\ud800", "a\0b", "a\nb", "\\", "\\" * 299, "{" * 149 + "}" * 149, "^" * 50, "\u202e5"):
        assert judge._workers.ask("equal", {"gold": "x+1", "answer": answer}) in ("false", "null")
    assert worker_of(judge) == worker


@needs_library
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_a_worker_is_alone(judge):
    worker = worker_of(judge)
    assert os.getsid(worker.pid) != os.getsid(0)
    assert "torch" not in Path(f"/proc/{worker.pid}/maps").read_text()
    limits = Path(f"/proc/{worker.pid}/limits").read_text()
    assert str(2 << 30) in next(line for line in limits.splitlines() if "address space" in line)


def test_without_the_library_text_and_numbers_decide(text_judge):
    text_judge.prepare([(["2y"], "y+y")])
    cases = (("2y", "y+y"), ("1/2", "0.5"), (r"\sqrt2", r"\sqrt{2}"))
    assert [text_judge.verdict([gold], answer) for gold, answer in cases] == [False, True, True]
    assert text_judge._workers is None


def test_workers_share_the_cores_with_the_processes_of_a_run(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    found = []
    for processes in ("1", "4", "8", "64", "", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        found.append(num_workers())
    assert found == [4, 4, 2, 1, 4, 4]


def test_kept_verdicts_are_bounded(text_judge, monkeypatch):
    monkeypatch.setattr(judge_module, "MOST_KEPT", 10)
    assert all(text_judge.verdict([str(number)], f"{number}.0") for number in range(50))
    assert len(text_judge._kept) <= 10


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gsm8k", "qa", pytest.param("math", marks=needs_library)])
def test_generated_answers_are_judged_as_their_generator_knows(load_script, task):
    """No wrong answer earns a reward, and at most one right answer in a hundred is refused."""
    benchmark = load_script("benchmarks/many_answers.py")
    verdicts = benchmark.TASKS[task](1000)
    accepted, refused = benchmark.mistakes(verdicts)
    num_right = sum(right for right, *_ in verdicts)
    assert accepted == []
    assert refused.total() <= 0.01 * num_right
    assert 200 < num_right < 800
