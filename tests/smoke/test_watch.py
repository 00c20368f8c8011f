"""--watch: real runs with their live page, and a program in place of the browser."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from run_files import ROOT, finished, metrics_of, wait_until

from tasks.arithmetic import EVAL_DATA

SCRIPT = str(ROOT / "experiment_base" / "train.py")
FLAGS = ["--prompts-per-step", "2", "--group-size", "2", "--eval-prompts", "1", "--eval-every", "0", "--device", "cpu"]
FLAGS += ["--max-new-tokens", "8", "--data", str(EVAL_DATA), "--eval-data", str(EVAL_DATA)]  # faster to read
BROWSER = """
import sys, time, urllib.request
def get(path):
    with urllib.request.urlopen(sys.argv[1] + path) as answer:
        return answer.read().decode()
get("")
while get("version") != "over":
    time.sleep(0.1)
with open(sys.argv[2], "w") as file:
    file.write(get(""))
"""
PORT = 8008


def said_address(output: str) -> str:
    return re.search(r"the run's page, live: (http://127\.0\.0\.1:\d+/)", output)[1]


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=20) as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


def test_a_browser_gets_the_page_until_the_run_ends_and_then_one_that_needs_no_server(tmp_path, load_script):
    """On another port if the usual one is taken; the numbers are those of a run that nobody watches."""
    flags = [*FLAGS, "--steps", "2", "--runs-dir", str(tmp_path)]
    (tmp_path / "browser.py").write_text(BROWSER)
    browser = f"{sys.executable} {tmp_path / 'browser.py'} %s {tmp_path / 'last.html'}"
    with socket.socket() as other, suppress(OSError):  # somebody else may have the port
        other.bind(("127.0.0.1", PORT))
        other.listen()
        result = finished(SCRIPT, *flags, "--name", "seen", "--watch", cwd=ROOT, env=os.environ | {"BROWSER": browser})
    assert result.returncode == 0, result.stderr
    address = said_address(result.stdout)
    assert f":{PORT}/" not in address
    assert not answers(address)
    page = (tmp_path / "last.html").read_text(encoding="utf-8")
    assert 'id="samples-2"' in page
    assert "after 2 steps" in page
    assert "data-version" not in page

    load_script("experiment_base/train.py").main([*flags, "--name", "unseen"])
    seen, unseen = (metrics_of(tmp_path / "experiment_base" / name) for name in ("seen", "unseen"))
    assert seen == unseen


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a browser would open")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_server_does_not_outlive_a_run_that_is_stopped(tmp_path, number):
    """Without a screen only the address is printed."""
    environment = {name: os.environ[name] for name in os.environ.keys() - {"BROWSER", "DISPLAY", "WAYLAND_DISPLAY"}}
    command = [sys.executable, SCRIPT, *FLAGS, "--steps", "9999", "--name", "x", "--runs-dir", str(tmp_path), "--watch"]
    metrics = tmp_path / "experiment_base" / "x" / "metrics.jsonl"
    with (tmp_path / "output").open("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        wait_until(lambda: metrics.exists() and "reward/total" in metrics.read_text(), process)
        said = Path(output.name).read_text()
        address = said_address(said)
        assert f"{address} (from your own computer: ssh -L {address.split(':')[2][:-1]}:127.0.0.1:" in said
        assert answers(address)
        process.send_signal(number)
        assert process.wait(timeout=60) == (130 if number == signal.SIGINT else -number)
    deadline = time.monotonic() + 20  # if the run was killed, a browser may still ask for the last page
    while number == signal.SIGKILL and answers(address) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not answers(address)
