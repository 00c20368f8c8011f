"""Verdicts on answers: text, numbers, values, and the processes that ask math-verify, whatever is done to them."""

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.tasks.verdicts import judge as judge_module
from common.tasks.verdicts import workers
from common.tasks.verdicts.judge import Judge, has_library
from common.tasks.verdicts.quick import is_too_large, quick_verdict
from common.tasks.verdicts.text import as_number, normalize
from common.tasks.verdicts.values import values_differ

ROOT = Path(__file__).resolve().parents[2]
needs_library = pytest.mark.skipif(not has_library(), reason="math-verify is not installed")
MINUS, PI, ROOT_SIGN = "\u2212", "\u03c0", "\u221a"


@pytest.fixture(scope="module")
def judge():
    """With one process for all tests of the file, and time enough for a slow processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "VERDICT_SECONDS", 30.0)
        patch.setattr(workers, "SECONDS_PER_THOUSAND", 300.0)
        shared = Judge(number_of_workers=1)
        yield shared
        shared.close()


def ids_of_workers(judge: Judge) -> list[int]:
    return [worker.process.pid for worker in judge._workers._workers]


def is_running(process: int) -> bool:
    """A process that has ended and that nobody has waited for is not running."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\dfrac{1}{2}", r"\frac12"),
        (r"\frac 59", r"\tfrac{5}{9}"),
        (r"11\sqrt2", r"11\sqrt{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        ("x^{2} + a_{1}", "x^2+a_1"),
        (r"90^{\circ}", r"90^\circ"),
        (r"$2^{1009}$", "2^{1009}."),
        (r"\text{Evelyn}", "evelyn"),
        (r"\textbf{(C)}", "C"),
        (r"x \leqslant 4", r"x\le4"),
        ("{5}", "5"),
        (f"{MINUS}2{PI}", r"-2\pi"),
        (f"{ROOT_SIGN}3", r"\sqrt{3}"),
        (r"E_{1},E_{2}", "E_1, E_2"),
    ],
)
def test_spellings_of_one_answer_are_equal_as_text(one, other):
    assert normalize(one) == normalize(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1 2", "12"),
        (r"\pi n", r"\pin"),
        ("AB", "ab"),
        ("x^2", "x^3"),
        ("x_12", "x_1"),
        ("(3,4]", "[3,4]"),
        (r"\{1\}", "1"),
    ],
)
def test_different_answers_are_not_equal_as_text(one, other):
    assert normalize(one) != normalize(other)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1,234.50", "-2469/2"),
        ("+2", "2"),
        (".0000672", "21/312500"),
        (r"\$32,\!348", "32348"),
        ("10{,}080", "10080"),
        (r"1\,000", None),  # a thin space, or one and a thousand
        ("3, 500", None),
        ("1,2", None),
        (r"1\frac{4}{5}", "9/5"),
        ("137 1/2", "275/2"),
        ("43/48", "43/48"),
        ("137 5", None),
        (r"-\frac{1}{3}", "-1/3"),
        ("1/0", None),
        ("4.5e33", str(45 * 10**32)),
        (r"10^{-3}", "1/1000"),
        (r"8.7 \times 10^{8}", "870000000"),
        ("1e999999999", None),
        (r"\frac{270}7\text{ degrees}", "270/7"),
        (r"864 \mbox{ inches}^2", "864"),
        (r"15000 \text{ kcal m}^{-2} \text{yr}^{-1}", "15000"),
        ("5 square feet", "5"),
        ("5 million", None),
        (r"1950^\circ C", "1950"),
        ("x = 5", "5"),
        ("x == 5", None),
        ("2x", None),
        (r"5\text{ or }6", None),
        ("52_8", None),
        ("nan", None),
        ("inf", None),
        ("1_000", None),
        ("\u0663", "3"),  # a digit of another script, which Python reads too
    ],
)
def test_exact_numbers_are_read(text, value):
    number = as_number(text)
    assert (str(number.value) if number else None) == value


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("3.61e-10", "1.39e-10", False),  # both are 0 at six decimals
        ("3.61e-10", r"3.61 \times 10^{-10}", True),
        ("2/3", "0.666667", True),
        ("2/3", "0.666666", False),
        ("9.6", "9.58", False),
        ("0.5%", "0.005", True),
        ("50%", "50%", True),
        ("50%", "0.5%", False),
        (r"\text{Navin}", "17", False),
        ("5", "the answer that we have found is five", False),
        (r"\frac{m}{M}", r"\frac{M}{m}", False),  # which math-verify takes for the same
        ("2x", "x" * 301, False),
        ("2x", "}{", False),
        ("", "", False),
        ("x=5", "y=5", None),
        (r"\sqrt{8}", r"2\sqrt{2}", None),
    ],
)
def test_quick_verdicts(gold, answer, verdict):
    assert quick_verdict(gold, answer) is verdict


EQUAL = [
    ("(x+1)^2", "x^2+2x+1"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{2}{\sqrt{2}}", r"\sqrt2"), ("1,-2", r"\{-2,1\}"),
    ("(a+5)(b+2)", "ab+2a+5b+10"), (r"e^{-2t}\cdot e^{t}", "e^{-t}"), ("x=5", "5"), (r"\cos(2t)", r"2\cos(t)^2-1"),
    (r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}", r"\begin{bmatrix} 0.5 \\ 2 \end{bmatrix}"), ("i^2", "-1"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19},1-\sqrt{19}"), ("52_8", "52"), (r"\pi", "3.141593"), ("f(x)=2x", "2x"),
    (r"\frac{1}{b-a}(e^{-at}-e^{-bt})", r"\frac{e^{-at}-e^{-bt}}{b-a}"), (r"\sin 2x", r"\sin(2x)"), ("M", "m"),
    (r"2^{1009}", r"2^{1008}\cdot 2"), ("(2,4)", "2,4"), (r"x \in [-2,7]", "[-2,7]"), ("(5,\\infty)", r"(5, \infty)"),
]  # fmt: skip
BEYOND_THE_LIBRARY = [(r"\cos(2t)", r"2\cos(t)^2-1"), ("i^2", "-1")]
DIFFERENT = [
    (r"3\sqrt{13}", r"3\sqrt{14}"), ("x^2", "x^2+C"), ("2k+2", "2n+2"), ("(3,4]", "(3,5]"), ("1,-2", "1,-2,3"),
    (r"\frac{e^{at}-e^{-at}}{2a}", r"\frac{e^{at}-e^{-at}}{3a}"), (r"\ln 2 + i\pi", r"\ln 3 + i\pi"),
    ("(1,2),(3,4)", "(1,2),(3,5)"), ("52_8", "42"), ("a_{1}", "a_{2}"), ("5", r"x+5"), (r"\alpha", r"\beta"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_values_of_equal_expressions_never_differ(gold, answer):
    assert not values_differ(gold, answer)
    assert not values_differ(answer, gold)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_values_tell_different_expressions_apart(gold, answer):
    assert values_differ(gold, answer)


@pytest.mark.slow
@needs_library
def test_the_library_says_the_same(judge):
    """Of equal ones, and of different ones without the values that refuse them."""
    equal = [pair for pair in EQUAL if pair not in BEYOND_THE_LIBRARY]
    judge.prepare(([gold], answer) for gold, answer in equal)
    assert [pair for pair in equal if judge.verdict([pair[0]], pair[1]) is not True] == []
    assert [pair for pair, verdict in judge._workers.judge(DIFFERENT)[0].items() if verdict is not False] == []


@needs_library
def test_a_verdict_is_kept_and_shared_by_spellings(judge):
    assert judge.verdict(["7z", "3z+z"], "4z") is True
    process = ids_of_workers(judge)
    judge._workers._workers[0].ask(("busy", "busy"))  # whoever asked it now would get another's verdict
    try:
        assert judge.verdict(["7z", "3z+z"], "4z") is True
        assert judge.verdict(["7z"], "4z") is False
    finally:
        while judge._workers._workers[0].receive() is None:
            pass
        judge._workers._workers[0].pair = None
    assert ids_of_workers(judge) == process


@pytest.mark.slow
@needs_library
def test_a_verdict_that_takes_too_long_is_undecided(judge, monkeypatch):
    """The worker interrupts itself and goes on; if it cannot, a signal ends it, and another one is started."""
    with monkeypatch.context() as patch:
        patch.setattr(workers, "VERDICT_SECONDS", 0.5)
        impatient = Judge(number_of_workers=1)
        impatient.start()
    impatient.verdict(["2y"], "y+y")
    before = ids_of_workers(impatient)
    assert impatient.verdict(["x^2"], "(x+1)^{10000}") is None
    assert ids_of_workers(impatient) == before
    impatient.close()
    judge.verdict(["2y"], "y+y")
    before = ids_of_workers(judge)
    os.kill(before[0], signal.SIGVTALRM)  # as its timer does when the library computes in C for too long
    verdicts, _ = judge._workers.judge([("3y", "y+2y")])
    assert verdicts == {("3y", "y+2y"): None}
    assert ids_of_workers(judge) != before
    assert judge.verdict(["5y"], "2y+3y") is True


def test_huge_numbers_are_not_computed():
    huge = ["9^9^9^9", "10^{10^{10}}", "2^{1000000}", "99999!", "((3!)!)!!"]
    assert [is_too_large(text) for text in huge] == [True] * len(huge)
    assert not any(map(is_too_large, ["2^{1009}", "10^{100}", r"\frac{100!}{2^{50}}", "x^{2^{n}}", "e^{-2t}"]))


@needs_library
def test_a_worker_that_is_killed_is_replaced_and_asked_again(judge):
    judge.verdict(["2y"], "y+y")
    replaced, (process,) = judge._workers.num_replaced, ids_of_workers(judge)
    os.kill(process, signal.SIGKILL)
    assert judge.verdict(["9w"], "4w+5w") is True
    assert judge._workers.num_replaced == replaced + 1


@needs_library
def test_the_allowance_of_a_rollout_ends(judge, monkeypatch):
    """What is left counts as undecided until the next rollout, and is not asked one by one."""
    cases = [(["11y"], "5y+6y"), (["13y"], "6y+7y")]
    with monkeypatch.context() as patch:
        patch.setattr(workers, "SECONDS_PER_THOUSAND", 0.0)
        judge.prepare(cases)
    assert [judge.verdict(*case) for case in cases] == [None, None]
    judge.prepare(cases)
    assert [judge.verdict(*case) for case in cases] == [True, True]


@needs_library
def test_verdicts_in_threads(judge):
    """The library itself refuses to work outside of the main thread."""
    cases = [([f"{number}v+v"], f"{number + 1}v") for number in range(2, 10)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda case: judge.verdict(*case), cases)) == [True] * len(cases)


@needs_library
@pytest.mark.parametrize(
    "answer", ["\ud800", "a\0b", "a\nb", "\\", "\\" * 299, "{" * 149 + "}" * 149, "^" * 50, "\u202e5"]
)
def test_hostile_texts_are_judged_by_the_worker_too(judge, answer):
    verdicts, _ = judge._workers.judge([("x+1", answer)])
    assert verdicts == {("x+1", answer): False} or verdicts == {("x+1", answer): None}
    assert judge.verdict(["2x"], "x+x") is True


@needs_library
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_a_worker_is_alone_and_leaves_ctrl_c_to_the_run(judge):
    judge.verdict(["2y"], "y+y")
    (process,) = ids_of_workers(judge)
    os.kill(process, signal.SIGINT)
    assert judge.verdict(["17y"], "8y+9y") is True
    assert ids_of_workers(judge) == [process]
    assert os.getsid(process) != os.getsid(0)
    assert "torch" not in Path(f"/proc/{process}/maps").read_text()
    assert sorted(os.listdir(f"/proc/{process}/fd"), key=int)[:3] == ["0", "1", "2"]
    shown = [os.readlink(f"/proc/{process}/fd/{number}") for number in (1, 2)]
    assert shown == ["/dev/null"] * 2
    limits = Path(f"/proc/{process}/limits").read_text()
    assert str(2 << 30) in next(line for line in limits.splitlines() if "address space" in line)


@needs_library
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_workers_end_with_a_parent_that_is_killed():
    program = (
        "from common.tasks.verdicts.workers import Workers\n"
        "workers = Workers(2)\n"
        "print(*[worker.process.pid for worker in workers._workers], flush=True)\n"
        "input()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, **streams) as parent:
        processes = [int(number) for number in parent.stdout.readline().split()]
        assert len(processes) == 2
        assert all(map(is_running, processes))
        parent.kill()
    deadline = time.monotonic() + 60
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, processes))


def test_without_the_library_text_and_numbers_decide():
    judge = Judge(uses_library=False)
    judge.prepare([(["2y"], "y+y")])
    found = [
        judge.verdict([gold], answer) for gold, answer in (("2y", "y+y"), ("1/2", "0.5"), (r"\sqrt2", r"\sqrt{2}"))
    ]
    assert found == [False, True, True]
    assert judge._workers is None


def test_a_missing_parser_is_a_missing_library(monkeypatch):
    monkeypatch.setattr(judge_module, "find_spec", lambda name: None if name == "antlr4" else object())
    assert not has_library()


def test_workers_share_the_cores_with_the_processes_of_a_run(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    found = []
    for processes in ("1", "4", "8", "64", "", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        found.append(workers.num_workers())
    assert found == [4, 4, 2, 1, 4, 4]


def test_kept_verdicts_are_bounded(monkeypatch):
    monkeypatch.setattr(judge_module, "MOST_KEPT", 10)
    judge = Judge(uses_library=False)
    assert all(judge.verdict([str(number)], f"{number}.0") for number in range(50))
    assert len(judge._kept) <= 10


@needs_library
def test_an_answer_that_was_read_late_counts(judge):
    """As after Ctrl-Z, or a long first rollout: the worker was ready, or had answered, while nobody looked."""
    judge.verdict(["2y"], "y+y")
    (worker,), replaced = judge._workers._workers, judge._workers.num_replaced
    worker.ask(("29y", "28y+y"))
    worker.since -= workers.HUNG_SECONDS + 1
    select.select([worker.process.stdout], [], [])
    verdicts = {}
    judge._workers._receive(verdicts, {}, Counter())
    assert verdicts == {("29y", "28y+y"): True}
    assert judge._workers.num_replaced == replaced
