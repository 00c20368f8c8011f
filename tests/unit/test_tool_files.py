"""A user's tools, in real processes: whatever their code does becomes a text, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from transformers.utils import get_json_schema

from common.errors import UserError

from harness.tools.tool_files import load_tools
from harness.workers import tool_processes
from harness.workers.tool_processes import close, in_threads

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 30  # longer than a call takes on the busiest machine
TOOLS = '''
import json, multiprocessing, os, re, signal, statistics, subprocess, sys, threading, time
from pathlib import Path

HELD = []

def echo(value: str, times: int = 1) -> str:
    """Say it again.

    Args:
        value: what
        times: how often
    """
    return value * times

def evaluate(code: str) -> str:
    """Run Python.

    Args:
        code: an expression
    """
    return eval(code)

def count() -> int:
    """Count the calls that this process has had."""
    HELD.append(1)
    return len(HELD)

def process() -> int:
    """The number of the process."""
    return os.getpid()

def _private(): pass
'''


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "my_tools.py"
    path.write_text(TOOLS)
    yield load_tools(str(path), SECONDS)
    close()


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load tools from the text of a file."""
    monkeypatch.chdir(tmp_path)

    def load(text: str, seconds: float = SECONDS, **settings):
        Path("my_tools.py").write_text(text)
        return load_tools("my_tools.py", seconds, **settings)

    close()
    yield load
    close()


def test_a_tool_is_described_as_its_function(tools):
    assert list(tools) == ["echo", "evaluate", "count", "process"]
    schema = get_json_schema(tools["echo"])["function"]
    assert (schema["name"], schema["description"]) == ("echo", "Say it again.")
    assert schema["parameters"]["properties"]["times"] == {"type": "integer", "description": "how often"}
    assert schema["parameters"]["required"] == ["value"]


def test_arguments_and_answers_are_passed_on(tools):
    assert tools["echo"](value="ab", times=2) == "abab"
    assert tools["echo"]("é 😀\n\0 <|im_end|>") == "é 😀\n\0 <|im_end|>"
    assert tools["evaluate"](code="statistics.__file__") != str(ROOT / "harness/logs/statistics.py")
    assert tools["evaluate"](code="Path(__file__).name") == "my_tools.py"


@pytest.mark.parametrize(("code", "answer"), [
    ("{'a': [1, None, 'é']}", '{"a": [1, null, "é"]}'), ("7", "7"), ("None", "null"), ("{1, 1}", "{1}"),
    ("'\\ud83d'", "?"), ("'a' * 10**7", "a" * 4000 + " ..."), ("[7] * 10**6", "[" + "7, " * 1333 + " ..."),
    ("sys.stdin.read()", ""), ("os.fork() == 0", "false"),  # the child gives no answer
    ("(limits := __import__('resource')).getrlimit(limits.RLIMIT_CORE)", "[0, 0]"),  # a crash leaves no file
    # a pool ends its processes by a signal
    ("[pool := multiprocessing.get_context('fork').Pool(1), pool.map(str, [5]), pool.terminate()][1]", '["5"]'),
])  # fmt: skip
def test_every_result_becomes_text_of_bounded_length(tools, code, answer):
    assert tools["evaluate"](code=code) == answer


@pytest.mark.parametrize(("code", "answer"), [
    ("1 / 0", "error: ZeroDivisionError: division by zero"), ("{}['\\x1b[31m\\n']", "error: KeyError: '\\x1b[31m\\n'"),
    ("exec('raise ValueError(chr(27) + \"[31m\\\\n\" * 2)')", "error: ValueError: \ufffd[31m [31m"),
    ("exec('raise ValueError(\"a\" * 10**6)')", "error: ValueError: aaa"),
    ("exec('raise ValueError')", "error: ValueError"), ("sys.exit('bye')", "error: SystemExit: bye"),
    ("exec('raise KeyboardInterrupt')", "error: KeyboardInterrupt"),
    ("exec('def f(): f()\\nf()', {})", "error: RecursionError: maximum recursion depth exceeded"),
    ("bytearray(1 << 60)", "error: MemoryError"),
    ("10 ** 5000", "error: ValueError: Exceeds the limit (4300 digits) for integer string conversion"),
    ("exec('class E(Exception):\\n  def __str__(self): return 1 / 0\\nraise E')", "error: E"),
])  # fmt: skip
def test_an_exception_becomes_one_harmless_line(tools, code, answer):
    """The process continues: it is still the same one."""
    before = tools["process"]()
    got = tools["evaluate"](code=code)
    assert got.startswith(answer)
    assert got.isprintable()
    assert len(got) < 400
    assert tools["process"]() == before


@pytest.mark.parametrize("code", ["time.sleep(60)", "9 ** 9 ** 9"], ids=["sleep", "C"])
def test_a_slow_answer_becomes_an_error(load, code):
    """Its process is replaced by another, even if it never lets Python run."""
    tools = load(TOOLS, seconds=0.1)
    (first,) = tool_processes._running
    for _ in range(2):
        assert tools["evaluate"](code=code) == "error: evaluate gave no answer within 0.1 s"
        assert not tool_processes._running
    assert not psutil.pid_exists(first._process.pid)


@pytest.mark.parametrize(("code", "how"), [
    ("os._exit(3)", "status 3"), ("os.kill(os.getpid(), signal.SIGSEGV)", "Segmentation fault"),
    ("os.closerange(3, 256)", ""),  # without its files it can end in several ways
])  # fmt: skip
def test_a_crash_becomes_an_error(tools, code, how):
    answer = tools["evaluate"](code=code)
    assert answer.startswith("error: evaluate ended its process (")
    assert how in answer
    assert tools["count"]() == "1"


def test_what_a_tool_started_ends_with_its_process(tools, tmp_path):
    file = tmp_path / "number"
    code = f"(print(subprocess.Popen(['sleep', '60']).pid, file=open({str(file)!r}, 'w')), os._exit(0))"
    assert tools["evaluate"](code=code) == "error: evaluate ended its process (status 0)"
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(file.read_text())).wait(timeout=30)


def test_a_process_that_was_killed_while_idle_is_replaced(tools):
    process = psutil.Process(int(tools["process"]()))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # until all its threads have ended, too
    assert tools["echo"](value="a") == "a"


def test_signals_for_the_run_do_not_end_a_tool(tools):
    """Ctrl-C in the terminal does not reach its session, and a batch system's SIGTERM to all processes is ignored."""
    number = int(tools["process"]())
    assert os.getsid(number) == number
    for name in (signal.SIGINT, signal.SIGTERM):
        os.kill(number, name)
    assert tools["process"]() == str(number)


def test_what_a_tool_prints_is_harmless(load, capfd):
    """It appears on stderr, disturbs no answer, and cannot control the terminal."""
    tools = load(TOOLS)
    assert capfd.readouterr().out.endswith("the policy may call echo, evaluate, count, process\n")
    prints = "print('\\x1b[31mred'), sys.stderr.write('no end of line'), os.write(1, b'raw'), os.system('echo child')"
    assert tools["evaluate"](code=f"[{prints}][3]") == "0"
    assert capfd.readouterr() == ("", "\ufffd[31mred\nno end of line")


def test_calls_of_several_threads_run_at_the_same_time(tools, tmp_path):
    others = f"[time.sleep(0.001) for _ in iter(lambda: len(os.listdir({str(tmp_path)!r})), 4)]"
    meet = f"(Path({str(tmp_path)!r}, str(os.getpid())).touch(), {others})"
    answers = in_threads(lambda _: tools["evaluate"](code=meet), range(4), parallel=True)
    assert [answer for answer in answers if answer.startswith("error")] == []
    # other tests can leave workers that wait
    assert {str(worker._process.pid) for worker in tool_processes._running} >= set(os.listdir(tmp_path))
    assert len(os.listdir(tmp_path)) == 4


def test_ctrl_c_ends_calls_in_threads_at_once(load):
    """The calls would take a minute, and two of them have not begun."""
    tools, before = load(TOOLS, 60), threading.enumerate()  # other tests can leave threads that wait
    interrupt = f"os.kill({os.getpid()}, signal.SIGINT)"
    codes = ["time.sleep(60)", "9 ** 9 ** 9", "time.sleep(60)", f"({interrupt}, time.sleep(60))", "1", "1"]
    with pytest.raises(KeyboardInterrupt):
        in_threads(lambda code: tools["evaluate"](code=code), codes, parallel=True)
    new = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in new if name.startswith("ThreadPool")] == []
    assert not tool_processes._running
    assert tools["echo"](value="a") == "a"


@pytest.mark.parametrize("parallel", [False, True])
def test_a_map_keeps_the_order_and_passes_errors_on(parallel):
    names = in_threads(lambda _: threading.current_thread().name, range(9), parallel=parallel)
    assert ({threading.current_thread().name} == set(names)) is not parallel
    assert in_threads(str, range(9), parallel=parallel) == list("012345678")
    assert in_threads(str, [], parallel=parallel) == []
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda number: 1 // number, [1, 0, 2], parallel=parallel)


PROGRAM = """
import sys
from pathlib import Path
from harness.workers.tool_processes import Workers, in_threads
path = sys.argv[1]
workers = Workers(path, Path(path).read_bytes(), path, seconds=60)
codes = ["(print(os.getpid()), time.sleep(60))", "(print(os.getpid()), 9 ** 9 ** 9)",
         "(print(os.getpid()), print(subprocess.Popen(['sleep', '60']).pid), time.sleep(60))"]
in_threads(lambda code: workers.call("evaluate", {"code": code}), codes, parallel=True)
"""


def test_no_process_is_left_when_the_run_is_killed(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(TOOLS)
    command = [sys.executable, "-c", PROGRAM, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as run:
        left = [psutil.Process(int(run.stderr.readline())) for _ in range(4)]
        run.kill()
        assert psutil.wait_procs(left, timeout=30)[1] == []
        assert run.stderr.read() == ""


def test_a_process_uses_the_file_as_the_run_has_read_it(load):
    """Even if the file has changed when a process is replaced."""
    tools = load(TOOLS)
    Path("my_tools.py").write_text("syntax error")
    assert tools["evaluate"](code="os._exit(0)").startswith("error:")
    assert tools["echo"](value="a") == "a"


GOOD = 'def good(a: int) -> int:\n    """Good.\n\n    Args:\n        a: a\n    """\n    return a\n'


def test_files_are_found_and_their_own_functions_are_tools(load):
    assert load_tools(None, SECONDS) == {}
    for name in ("nowhere.py", ".", "a\0b"):
        with pytest.raises(UserError, match=r"^--tools .*(there is no such file|this path cannot be used)"):
            load_tools(name, SECONDS)
    cached = "import functools\n@functools.cache\n" + GOOD.replace("return", "print('computed')\n    return")
    assert load(cached)["good"](a=5) == "5"
    assert list(load("from __future__ import annotations\n" + GOOD + GOOD.replace("good", "more"))) == ["good", "more"]


def test_the_template_of_tools_can_be_called():
    tools = load_tools(str(ROOT / "docs" / "tools_template.py"), seconds=10)
    assert tools["convert_length"](value=3, unit="mile", to="km") == "4.82803"
    assert tools["density"](material="iron") == "7874"
    assert tools["density"](material="wood") == (
        "error: ValueError: unknown material, known are water, ice, oil, iron, copper, gold"
    )
    assert json.dumps([get_json_schema(tool) for tool in tools.values()])
