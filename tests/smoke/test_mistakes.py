"""A user's mistake is reported in one sentence, without a traceback, and destroys nothing that existed before."""

import ast
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from run_files import ROOT, finished, read_lines
from safetensors.torch import load_file
from transformers import AutoTokenizer

from common.errors import UserError
from tasks import arithmetic

from harness.base.config import TINY_POLICY
from harness.base.places import CHAPTERS
from harness.run.checkpoints import newest_checkpoint
from harness.run.start import run_main

TRAIN = "experiment_base/train.py"
QUICK = ("--steps", "1", "--max-new-tokens", "2", "--eval-prompts", "1", "--eval-every", "0", "--device", "cpu")
SMALL = ("--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "6", "--name", "x")
FEW_ROWS = ("--data", str(arithmetic.EVAL_DATA), "--eval-data", str(arithmetic.EVAL_DATA))  # faster to read and check
GOOD_ROW = '{"question": "What is 1+1?", "answer": "2"}\n'


@pytest.fixture
def train(load_script, tmp_path, monkeypatch) -> Callable[..., None]:
    """Call main() of train.py in an empty directory, with flags that keep it short if nothing is refused."""
    monkeypatch.chdir(tmp_path)
    return lambda *argv: load_script(TRAIN).main([*QUICK, *argv])


def run_directories() -> list[Path]:
    return list(Path("runs").glob("*/*"))


# Models --------------------------------------------------------------------------------------------------------------


def change(name: str, **values) -> Callable[[Path], None]:
    """Change some values of a JSON file of the model."""

    def damage(model: Path) -> None:
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | values))

    return damage


def add_token(model: Path) -> None:
    """Give the tokenizer one more token than the model has, without resizing the model."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["[NEW]"])
    tokenizer.save_pretrained(model)


def test_a_token_that_the_model_lacks_is_refused(train):
    shutil.copytree(TINY_POLICY, "model")
    add_token(Path("model"))
    with pytest.raises(UserError, match="--model model: the tokenizer's id 1024 is not among the 1024 ids"):
        train("--model", "./model", *SMALL)
    assert not run_directories()


def test_a_special_token_that_the_model_lacks_may_go_unused(train):
    """Gemma 3's text models share their tokenizer with the models that see images."""
    shutil.copytree(TINY_POLICY, "model")
    add_token(Path("model"))
    change("tokenizer_config.json", image_token="[NEW]")(Path("model"))
    train("--model", "./model", *SMALL)


CODE = """
import pathlib
pathlib.Path("it_ran").touch()
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
class MyConfig(PreTrainedConfig):
    model_type = "mine"
class MyModel(LlamaForCausalLM):
    config_class = MyConfig
class MyTokenizer(PreTrainedTokenizerFast):
    pass
"""
MY_MODEL = change(
    "config.json", model_type="mine", auto_map={"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
)
MY_TOKENIZER = change(
    "tokenizer_config.json", tokenizer_class="MyTokenizer", auto_map={"AutoTokenizer": [None, "mine.MyTokenizer"]}
)


@pytest.mark.parametrize(("change_it", "is_base"), [(MY_MODEL, False), (MY_TOKENIZER, False), (MY_MODEL, True)])
def test_code_that_comes_with_a_model_is_not_run(train, monkeypatch, capsys, change_it, is_base):
    """The user is not asked for permission: "y" on standard input is not read."""
    shutil.copytree(TINY_POLICY, "model")
    Path("model/mine.py").write_text(CODE)
    change_it(Path("model"))
    if is_base:
        Path("adapter").mkdir()
        settings = {"peft_type": "LORA", "base_model_name_or_path": str(Path("model").resolve())}
        Path("adapter/adapter_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(UserError, match="could not be loaded: it needs its own code, which is never run") as caught:
        train("--model", "./adapter" if is_base else "./model", *SMALL)
    assert "\n" not in str(caught.value)
    assert "[y/N]" not in capsys.readouterr().out
    assert sys.stdin.read() == "y\n" * 9
    assert not Path("it_ran").exists()
    assert not run_directories()


def test_a_known_architecture_needs_none_of_the_code_beside_it(train):
    shutil.copytree(TINY_POLICY, "model")
    Path("model/mine.py").write_text(CODE)
    MY_MODEL(Path("model"))
    change("config.json", model_type="llama")(Path("model"))
    train("--model", "./model", *SMALL)
    assert not Path("it_ran").exists()


def test_the_loading_script_of_a_dataset_is_not_run(train):
    pytest.importorskip("datasets")
    Path("owner/name").mkdir(parents=True)
    Path("owner/name/name.py").write_text("import pathlib\npathlib.Path('it_ran').touch()\n")
    with pytest.raises(UserError, match=r"the dataset owner/name:part could not be loaded: .*scripts .*name\.py"):
        train("--data", "owner/name:part", *SMALL)
    assert not Path("it_ran").exists()


def test_every_call_that_could_run_foreign_code_forbids_it():
    """transformers asks the user instead, unless trust_remote_code=False is passed."""
    files = [
        path
        for folder in ("common", "fast", "harness", "experiment_*", *CHAPTERS)
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    calls = [
        node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)
    ]
    names = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]
    loaders = [call for call, name in zip(calls, names, strict=True) if name in ("from_pretrained", "load_dataset")]
    assert len(loaders) >= 3
    for call in loaders:
        text = ast.unparse(call)
        assert "trust_remote_code=False" in text or text.startswith("GenerationConfig."), text


def test_a_template_without_system_turn_gets_a_suggestion(train):
    """The sentence says how to run without a system prompt."""
    shutil.copytree(TINY_POLICY, "model")
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    Path("model/chat_template.jinja").write_text(template + (TINY_POLICY / "chat_template.jinja").read_text())
    with pytest.raises(UserError, match=r"System role not supported.*--system-prompt ''"):
        train("--model", "./model", "--system-prompt", "Be brief.", *SMALL)
    train("--model", "./model", "--system-prompt", "", "--steps", "1", *SMALL)


def test_a_model_without_template_runs_with_a_given_one(train, load_script):
    """The template is saved with the policy, which then no longer needs the flag; a run cannot resume with another."""
    shutil.copytree(TINY_POLICY, "model")
    Path("model/chat_template.jinja").rename("mine.jinja")
    train("--model", "./model", "--chat-template", "mine.jinja", *SMALL)
    Path("runs").rename("before")
    train("--model", "before/experiment_base/x/final", *SMALL)
    Path("mine.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match=r"^--chat-template .*mine\.jinja has changed since"):
        load_script(TRAIN).main(["--resume", "before/experiment_base/x"])


# Tasks ---------------------------------------------------------------------------------------------------------------

FAILS_LATER = """
from tasks.arithmetic import FIELDS, REWARD_WEIGHTS, TRAIN_DATA, EVAL_DATA, messages
from tasks import arithmetic
calls = 0
def reward(row, text):
    global calls
    calls += 1
    if calls > 16 and FAILS:  # in the second step
        raise RuntimeError(f"\\x1b[31m{text}")
    return arithmetic.reward(row, text)
"""


def test_a_reward_that_raises_in_training_says_how_to_resume(train, load_script):
    """With the file and row, without control characters, and no progress is lost."""
    Path("my_task.py").write_text("FAILS = True\n" + FAILS_LATER)
    with pytest.raises(UserError) as caught:
        train("--task", "my_task.py", "--steps", "3", "--checkpoint-every", "1", *SMALL)
    place = r"--task my_task\.py: reward of .*math_tasks\.jsonl:\d+ raised RuntimeError: \ufffd\[31m"
    remedy = r"\(line 10 of my_task\.py\)\. When it is corrected, resume with: python .*/x$"
    assert re.match(f"{place}.*{remedy}", str(caught.value)), caught.value
    last = read_lines(Path("runs/experiment_base/x/metrics.jsonl"))[-1]["step"]
    assert newest_checkpoint(Path("runs/experiment_base/x/checkpoints"))[0] == last > 0

    Path("my_task.py").write_text("FAILS = False\n" + FAILS_LATER)
    load_script(TRAIN).main(["--resume", "runs/experiment_base/x"])
    assert read_lines(Path("runs/experiment_base/x/metrics.jsonl"))[-1]["step"] == 3
    Path("my_task.py").write_text("FAILS = 0\n" + FAILS_LATER)  # the run has not failed since the correction
    with pytest.raises(UserError, match=r"^--task .*my_task\.py has changed since"):
        load_script(TRAIN).main(["--resume", "runs/experiment_base/x"])


# As a program --------------------------------------------------------------------------------------------------------


def start(cwd: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess:
    """Start train.py as from a user's shell; `environment` sets HF_HUB_OFFLINE."""
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    alone = {"HF_HOME": str(cwd / "cache"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return finished(ROOT / TRAIN, *argv, cwd=cwd, env=inherited | alone | environment)


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def test_a_mistake_ends_the_program_with_one_line_and_status_2(tmp_path, cold):
    """Without the network; test_refusals.py has the other mistakes."""
    result = start(tmp_path, "--model", "owner/name", HF_ENDPOINT="http://127.0.0.1:9")  # a port where nothing listens
    assert result.returncode == 2
    assert result.stderr.startswith("error: owner/name: the hub does not answer")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stdout
    assert not list(tmp_path.glob("runs/*/*"))


def test_an_unknown_flag_is_refused_with_a_suggestion(train, capfd):
    with pytest.raises(SystemExit, match="2"):
        run_main(lambda: train("--learning-rat", "1"))
    assert "--learning-rat" in capfd.readouterr().err


# The hub -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch) -> Iterator[dict]:
    """A hub on this machine that answers every request with the dictionary's `status` and `headers`."""
    import huggingface_hub.constants

    answer = {"status": 404, "headers": {}}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer["status"])
            for name, value in {"Content-Length": "0", **answer["headers"]}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield answer
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("what", "status", "code", "sentence"),
    [
        ("model", 404, "RepoNotFound", "owner/name: the hub has no such model, or shows it to its owners only"),
        (
            "data",
            403,
            "GatedRepo",
            "owner/name: its owners ask for an agreement: .*https://huggingface.co/.*owner/name,",
        ),
        ("model", 500, "", "owner/name: the hub does not answer .*500"),
        ("data", 500, "", "owner/name: the hub does not answer .*500"),
    ],
)
def test_refusals_of_the_hub_are_reported_in_one_sentence(train, hub, what, status, code, sentence):
    hub |= {"status": status, "headers": {"X-Error-Code": code, "X-Error-Message": "no"}}
    with pytest.raises(UserError, match=sentence) as caught:
        train(f"--{what}", "owner/name", *SMALL)
    assert "\n" not in str(caught.value)
    assert not run_directories()


# Updates that are not finite -----------------------------------------------------------------------------------------


@pytest.fixture
def broken_reward(load_script, monkeypatch) -> Callable[[set[int], float], None]:
    """From now on, in the given steps, the user's reward function gives one completion a special value."""
    script = load_script(TRAIN)
    sample, reward, broken = script.sample_completions, arithmetic.reward, []

    def break_it(steps: set[int], value: float) -> None:
        def sample_and_see_the_step(config, task, policy, step):
            broken[:] = [step in steps]
            return sample(config, task, policy, step)

        def maybe_broken(row, text):
            is_broken, broken[:] = any(broken), []
            return reward(row, text) | ({"correct": value} if is_broken else {})

        monkeypatch.setattr(script, "sample_completions", sample_and_see_the_step)
        monkeypatch.setattr(arithmetic, "reward", maybe_broken)

    return break_it


@pytest.fixture
def policies(load_script, monkeypatch) -> list:
    """The policies that runs have loaded, for a look at their weights."""
    script, loaded = load_script(TRAIN), []
    load_policy = script.load_policy
    monkeypatch.setattr(script, "load_policy", lambda *arguments: loaded.append(load_policy(*arguments)) or loaded[-1])
    return loaded


def weights(path: Path) -> torch.Tensor:
    return load_file(path / "model.safetensors")["model.norm.weight"]


def test_three_steps_with_a_broken_reward_end_the_run(train, broken_reward, capsys, policies):
    """The weights and the newest checkpoint date from before the first broken step."""
    broken_reward({3, 4, 5}, math.inf)
    with pytest.raises(UserError, match=r"gives 'correct' the value inf\. When it is corrected, resume with: "):
        train("--steps", "6", "--checkpoint-every", "1", *SMALL)
    directory = Path("runs/experiment_base/x")
    assert capsys.readouterr().out.count("the gradient was not finite, and its update was skipped") == 1
    metrics = read_lines(directory / "metrics.jsonl")
    assert [entry.get("loss/skipped") for entry in metrics] == [None, 0, 0, 1, 1, 1]
    assert "reward/total" not in metrics[3]
    samples = read_lines(directory / "samples.jsonl")
    assert None in [entry["advantage"] for entry in samples if entry["step"] == 3]
    step, path, _ = newest_checkpoint(directory / "checkpoints")
    assert step == 2
    assert torch.equal(policies[0].model.get_decoder().norm.weight, weights(path))  # from before step 3


def test_a_run_continues_after_two_steps_with_a_broken_reward(train, broken_reward, capsys):
    broken_reward({2, 3, 5, 6}, math.nan)
    train("--steps", "7", *SMALL, "--lr", "1e-3", "--kl-weight", "0.1")
    assert capsys.readouterr().out.count("its update was skipped") == 1
    directory = Path("runs/experiment_base/x")
    assert [entry["loss/skipped"] for entry in read_lines(directory / "metrics.jsonl")[1:-1]] == [0, 1, 1, 0, 1, 1, 0]
    assert torch.isfinite(weights(directory / "final")).all()
    assert newest_checkpoint(directory / "checkpoints")[0] == 7


def test_rewards_that_are_no_numbers_are_a_fault_of_the_task_which_may_be_corrected(train, load_script):
    text = (
        'REWARD_WEIGHTS = {"correct": 1.0}\n'
        'def messages(row, system_prompt): return [{"role": "user", "content": row["question"]}]\n'
        'def reward(row, text): return {"correct": float("nan") if text else 0.0}\n'
    )
    Path("task.py").write_text(text)
    flags = ("--task", "task.py", *FEW_ROWS)
    with pytest.raises(UserError, match=r"gives 'correct' the value nan\. When it is corrected, resume with: "):
        train(*flags, *SMALL, "--steps", "3")
    Path("task.py").write_text(text.replace('float("nan")', "len(text) % 2"))
    load_script(TRAIN).main(["--resume", "runs/experiment_base/x"])
    assert (Path("runs/experiment_base/x") / "summary.json").exists()


@pytest.mark.slow
def test_the_checkpoint_of_a_failed_adapter_run_is_usable(train, load_script, monkeypatch):
    """The sentence explains how: --lora-rank would merge it, and train another adapter."""
    script, steps = load_script(TRAIN), iter(range(1, 99))
    monkeypatch.setattr(script, "group_advantages", lambda returns: returns * (1.0 if next(steps) == 1 else math.nan))
    with pytest.raises(UserError, match=r"--model runs/experiment_base/x/checkpoints/step_<N> without --lora-rank$"):
        train("--steps", "9", "--checkpoint-every", "1", *SMALL, "--lora-rank", "2")
    train("--model", "runs/experiment_base/x/checkpoints/step_1", *SMALL, "--name", "y")


# What is printed -----------------------------------------------------------------------------------------------------

HOSTILE = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202e"
UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ANY_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def run_and_read(capsys, load_script, *argv: str) -> str:
    """The output of train.py as a program that ends with a user's error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: load_script(TRAIN).main([*QUICK, *argv]))
    assert ended.value.code == 2
    printed = "".join(capsys.readouterr())
    assert not UNPRINTABLE.search(printed)
    assert printed.splitlines()[-1].startswith("error: ")
    assert "\ufffd]0;mine\ufffd\ufffd[2J" in printed
    return printed


def test_data_and_templates_cannot_control_the_terminal(train, load_script, monkeypatch, capsys):
    """Names of fields and files, errors of a chat template or a task, and the printed questions are all harmless."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    Path("d.jsonl").write_text(json.dumps({"question": "", HOSTILE: 1}) + "\n")
    assert "'answer' is missing" in run_and_read(capsys, load_script, "--data", "d.jsonl")
    Path(HOSTILE).write_text("[]")
    assert "has no rows" in run_and_read(capsys, load_script, "--data", f"./{HOSTILE}")
    question = f"1+1? {HOSTILE}\nerror: forged"
    Path("d.jsonl").write_text(json.dumps({"question": question, "answer": "2"} | {"num_terms": 1}) + "\n")
    shutil.copytree(TINY_POLICY, "model")
    Path("model/chat_template.jinja").write_text(
        "{% if '1+1' in messages[0].content %}{{ raise_exception(messages[0].content) }}{% endif %}a turn"
    )
    flags = ("--data", "d.jsonl", "--eval-data", "d.jsonl", *SMALL, "--prompts-per-step", "1")
    printed = run_and_read(capsys, load_script, *flags, "--model", "./model")
    assert "chat template refuses the messages: 1+1?" in printed
    assert printed.count("\nerror:") == 1
    Path("my_task.py").write_text(
        "from tasks.arithmetic import *\ndef describe(row, text): raise ValueError(row['question'])"
    )
    assert "raised ValueError: 1+1?" in run_and_read(capsys, load_script, *flags, "--task", "my_task.py")
    train(*flags)
    printed = capsys.readouterr().out
    assert "\n  -> " in printed
    assert not UNPRINTABLE.search(printed)


@pytest.mark.slow
def test_a_terminal_that_cannot_encode_the_questions_is_enough(tmp_path):
    """And files are UTF-8 in any locale."""
    rows = [{"question": f"What is {n}+1 \u2264 \U0001f600?", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.copytree(TINY_POLICY, tmp_path / "model")
    template = (TINY_POLICY / "chat_template.jinja").read_text(encoding="utf-8") + "{#- \u2264 #}"
    (tmp_path / "model/chat_template.jinja").write_text(template, encoding="utf-8")
    flags = ("--data", "d.jsonl", "--model", "./model", *QUICK, *SMALL)
    result = start(tmp_path, *flags, **OFFLINE, **ANY_LOCALE)
    assert result.returncode == 0, result.stderr
    assert r"+1 \u2264 \U0001f600?" in result.stdout.rpartition("held-out questions")[0]  # after the first step
    assert r"+1 \u2264" in result.stdout.partition("Greedy answers")[2]
    directory = tmp_path / "runs/experiment_base/x"
    assert read_lines(directory / "samples.jsonl")[0]["question"] in [row["question"] for row in rows]
    assert (directory / "final/chat_template.jinja").read_text(encoding="utf-8") == template
    for name in ("config.json", "metrics.jsonl", "summary.json", "before.json"):
        assert (directory / name).read_text(encoding="utf-8")


def start_without_reader(cwd: Path, *argv: str, lines: int) -> tuple[int, str]:
    """Exit status and stderr of train.py when nobody reads its stdout after the first `lines`, as with `| head`."""
    program = subprocess.Popen(
        [sys.executable, str(ROOT / TRAIN), *argv],
        **{"cwd": cwd, "env": {**os.environ, "PYTHONUNBUFFERED": "1"}, "text": True},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
    )
    for _ in range(lines):
        assert program.stdout.readline()
    program.stdout.close()
    errors = program.stderr.read()
    program.stderr.close()
    return program.wait(timeout=60), errors


@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise on Windows")
@pytest.mark.slow
def test_a_reader_that_is_gone_ends_a_run_with_a_checkpoint(tmp_path, cold):
    # five lines come before the first step
    status, errors = start_without_reader(tmp_path, *QUICK, "--steps", "9", *SMALL, lines=5)
    assert status == 130
    assert re.search(r"interrupted; resume with: python .* --resume runs/experiment_base/x\nits page", errors)
    assert "Traceback" not in errors
    assert newest_checkpoint(tmp_path / "runs/experiment_base/x/checkpoints")[0] == 1


@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise on Windows")
def test_help_that_nobody_reads_ends_without_a_traceback(tmp_path):
    """With the exit status of a program that SIGPIPE ends."""
    assert start_without_reader(tmp_path, "--help", lines=0) == (141, "")


def test_a_place_where_one_may_not_look_is_named(train):
    Path("closed").mkdir()
    Path("closed/rows.jsonl").write_text(GOOD_ROW * 9)
    Path("closed").chmod(0)
    try:
        if os.access("closed/rows.jsonl", os.F_OK):
            pytest.skip("this user may look everywhere")
        with pytest.raises(UserError, match=r"^--data closed/rows\.jsonl: this path cannot be used \(Permission den"):
            train("--data", "closed/rows.jsonl")
    finally:
        Path("closed").chmod(0o700)


def test_ctrl_c_during_the_imports_shows_no_traceback(tmp_path):
    """As soon as the guard has been imported, which Python reports."""
    command = [sys.executable, "-X", "importtime", str(ROOT / TRAIN), "--steps", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.rpartition("|")[2].strip() == "harness.base.interrupt":
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in output + errors
    assert not list(tmp_path.iterdir())
