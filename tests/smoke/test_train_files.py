"""Every train.py as users run it: in its own process, for two steps, on a CPU."""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from run_files import ROOT, finished, json_of, rows_of, write_rows

import viewer
from common.errors import UserError
from tasks.arithmetic import EVAL_DATA, TRAIN_DATA

from harness.base.checks import check_ranges, flag
from harness.base.config import LORA_LR_FACTOR, RESOLVED
from harness.base.flags import read_marks
from harness.base.places import in_experiments
from harness.cli.parse import with_absolute_paths
from harness.data.thoughts import LONGCOT, ThoughtFormat, answer_of, read_format

pytestmark = pytest.mark.drawn

TRAIN_FILES = sorted(in_experiments("train.py"))
STAND_IN = ROOT / "tests" / "engine" / "stand_in"  # a package vllm


def run_here(path: Path, *arguments: str, **environment: str) -> str:
    """The output of `python <path> <arguments>` as a program in this process, which need not repeat the imports."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.syspath_prepend(path.parent)
        for name, value in environment.items():
            patch.setenv(name, value)
        runpy.run_path(str(path), run_name="__main__")
    return output.buffer.getvalue().decode()


@functools.cache
def help_of(path: Path, columns: int = 100, flag: str = "--help-all") -> str:
    return run_here(path, flag, COLUMNS=str(columns))


@functools.cache
def groups_of(path: Path) -> dict[str, dict[str, str]]:
    """The output of --help-all: by group and flag the text, and in its last parentheses unit, range and default."""
    groups = {}
    for title, box in re.findall(r"╭─ (.+?) ─+╮\n(.*?)╰─+╯", help_of(path), re.DOTALL):
        lines = [line.strip("│ ") if line.startswith("│ -") else "  " + line.strip("│ ") for line in box.splitlines()]
        options = [" ".join(option.split()) for option in re.split(r"\n(?=-)", "\n".join(lines))]
        options = [re.sub(r"^--[a-z-]+ [A-Z]+, (?=--)", "", option) for option in options]  # another name of the flag
        texts = {re.match(r"--?[a-z-]+", option)[0]: option for option in options}
        assert len(texts) == len(options)
        groups[title] = texts
    return groups


def hints_of(path: Path) -> dict[str, str]:
    """By flag: unit, range and default."""
    flags = {name: text for texts in groups_of(path).values() for name, text in texts.items() if name != "-h"}
    return {name: re.search(r"\(([^()]*default: .*)\)$", text)[1] for name, text in flags.items()}


@pytest.fixture
def config_of(load_script) -> Callable[..., object]:
    return lambda path: load_script(path.relative_to(ROOT).as_posix()).Config


each_train_file = pytest.mark.parametrize("path", TRAIN_FILES, ids=lambda path: path.parent.name)


@each_train_file
def test_help_explains_every_flag_in_one_group(path, config_of):
    """The algorithm's group comes first, and holds the flags that an experiment teaches."""
    groups, marks = groups_of(path), read_marks(config_of(path))
    assert list(groups)[:2] == ["options", "algorithm options"]
    assert list(groups["options"]) == ["-h"]
    expected = {}
    for name, of in marks.items():  # in the order of the fields
        expected.setdefault("algorithm" if of.group is None else of.group.value, []).append(flag(name))
    assert {title: list(texts) for title, texts in list(groups.items())[1:]} == {
        f"{title} options": names for title, names in expected.items()
    }
    own = config_of(path).__annotations__.keys() & marks.keys()
    assert set(expected["algorithm"]) == {flag(name) for name in own if marks[name].group is None}
    assert ("search options" in groups) == (path.parent.name == "experiment_multiturn_qa")
    for name, hint in hints_of(path).items():
        text = next(texts[name] for texts in groups.values() if name in texts)
        words = re.sub(r"^--\S+( \S+)?", "", text.removesuffix(f"({hint})")).split()
        assert len(words) >= 2, name


@each_train_file
def test_help_explains_the_flags_of_the_experiment_and_names_the_others(path):
    """By group; `--help-all` explains them."""
    text, (_, own, *others) = help_of(path, flag="--help"), groups_of(path).items()
    start, sentence, names = text.partition("--help-all also explains the other flags:\n\n")
    assert sentence
    assert start.partition("usage:")[0] == help_of(path).partition("usage:")[0]
    assert re.findall(r"(?m)^│ (--[a-z-]+)", re.sub(r"--[a-z-]+ [A-Z]+, (?=--)", "", start)) == list(own[1])
    lines = re.sub(r"\n +", " ", names).splitlines()
    assert lines == [f"{title.removesuffix(' options')}: {' '.join(flags)}" for title, flags in others]


PROGRAMS = ("evaluate.py", "chat.py", "export.py", *(f"imitation/sft/{name}_chats.py" for name in ("make", "format")))
PROGRAMS += tuple(f"rewards/reward_model/{name}.py" for name in ("sample_responses", "score_responses", "make_pairs"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_explains_all_of_few_flags(program):
    assert help_of(ROOT / program, flag="--help") == help_of(ROOT / program)


@each_train_file
def test_the_ranges_of_help_are_those_that_are_checked(path, config_of):
    """The ends of a range are accepted, values beyond them are not. Every number has a range."""
    config, hints = config_of(path)(), hints_of(path)
    numbers = [field.name for field in dataclasses.fields(config) if re.search(r"\b(int|float)\b", str(field.type))]
    assert len(numbers) > 12
    for name in numbers:
        (word, end), *_ = re.findall(r"(above|at least) (\S+?)[ ;]", hints[flag(name)])
        end, step = float(end), 1 if "int" in str(type(config).__dataclass_fields__[name].type) else 1e-6
        check_ranges(dataclasses.replace(config, **{name: end if word == "at least" else end + step}))
        for value in (end if word == "above" else end - step, math.nan, math.inf):
            with pytest.raises(UserError, match=f"^{flag(name)} must be {word}"):
                check_ranges(dataclasses.replace(config, **{name: value}))


@each_train_file
def test_help_shows_defaults_as_they_are_resolved(path, load_script, config_of):
    """The values of RESOLVED, in the order of the table, and never None."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_of(path))}
    table = getattr(load_script(path.relative_to(ROOT).as_posix()), "RESOLVED", RESOLVED)
    hints = hints_of(path)
    for name in next(iter(table.values())).keys() & defaults.keys():
        *others, last = (values[name] for values in table.values())
        shown = hints[flag(name)].partition("default: ")[2]
        numbers = [float(x) for x in re.findall(r"[\d.]+(?:e-\d+)?(?= for )|(?<=else )[\d.]+(?:e-\d+)?", shown)]
        assert numbers == [*others, last], shown
        assert defaults.pop(name) is None
    for name, default in defaults.items():
        shown = hints[flag(name)].partition("default: ")[2]
        if not isinstance(default, bool | tuple | None):
            assert shown == str(default)
    assert "None" not in help_of(path)
    if "ten times that with --lora-rank" in help_of(path):
        assert LORA_LR_FACTOR == 10


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal(columns, flag):
    text = help_of(ROOT / "experiment_base" / "train.py", columns, flag)
    boxes = text.partition("usage: ")[2]
    assert {len(line) for line in boxes.splitlines() if line.startswith("│")} == {columns}
    prose = [line for line in text.partition("usage: ")[0].splitlines() if not line.startswith(" ")]
    assert max(map(len, [*prose, *text.rpartition("╯")[2].splitlines()])) <= columns
    assert "\x1b" not in text  # it is piped


def test_help_is_colored_on_a_terminal():
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [sys.executable, str(ROOT / "experiment_base" / "train.py"), "--help"]
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    process = subprocess.Popen(command, stdout=theirs, cwd=ROOT, env=inherited)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # at the end of a terminal
        while part := os.read(ours, 10_000):
            text += part
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"--temperature" in text
    assert b"\x1b[" in text


@pytest.mark.parametrize("name", ["experiment_base", pytest.param("scale/engine", marks=pytest.mark.slow)])
def test_two_steps_leave_a_complete_run(tmp_path, name):
    """As a program in another directory. What the files hold: golden/test_golden.py."""
    has_engine = name == "scale/engine"
    result = finished(
        ROOT / name / "train.py",
        *("--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--eval-prompts", "1", "--name", "smoke"),
        *(("--engine-start", sys.executable) if has_engine else ()),
        cwd=tmp_path,
        env=os.environ | ({"PYTHONPATH": os.pathsep.join(map(str, (STAND_IN, ROOT)))} if has_engine else {}),
    )
    assert result.returncode == 0, result.stderr
    directory = tmp_path / "runs" / Path(name).name / "smoke"
    assert (directory / "curve.png").stat().st_size > 1000
    assert (directory / "report.html").exists()
    summary, config = json_of(directory / "summary.json"), json_of(directory / "config.json")
    assert summary["steps"] == 2
    assert summary["peak_memory_bytes"] > 1e8
    assert config["max_new_tokens"] is not None  # as resolved
    assert "held-out questions" in result.stdout
    assert "tensorboard --logdir" in result.stdout
    assert (directory / "engine.log").exists() == has_engine
    assert not (directory / "engine").exists()  # the weights for the engine


@pytest.mark.parametrize(
    "name", ["experiment_multiturn_tool_calling", pytest.param("scale/engine", marks=pytest.mark.slow)]
)
def test_a_copy_of_the_template_is_trained_and_evaluated(tmp_path, monkeypatch, load_script, name, request):
    """As in docs/your_task.md, with a changed weight."""
    engine = ("--engine-url", request.getfixturevalue("stand_in")().url) if name == "scale/engine" else ()
    shutil.copy(ROOT / "docs" / "task_template.py", tmp_path / "my_task.py")
    monkeypatch.chdir(tmp_path)
    load_script(f"{name}/train.py").main(
        [
            *("--task", "my_task.py", "--data", str(TRAIN_DATA), "--eval-data", str(EVAL_DATA)),
            *("--reward-weight", "short=0.3", "--steps", "2", "--prompts-per-step", "2", "--group-size", "4"),
            *("--max-new-tokens", "24", "--eval-prompts", "4", "--name", "mine", *engine),
        ]
    )
    directory = tmp_path / "runs" / Path(name).name / "mine"
    before, *steps, after = rows_of(directory)
    for entry in (before, after):
        assert {"eval/sampled/accuracy", "eval/sampled/reward_short", "eval/sampled/thinks"} <= entry.keys()
    for entry in steps:
        expected = entry["reward/correct"] + 0.3 * entry["reward/short"]
        assert entry["reward/total"] == pytest.approx(expected)
        assert 0 <= entry["completion/thinks"] <= 1
    summary = json_of(directory / "summary.json")
    styles = ("called", "unaided") if "completion/called" in steps[0] else ("thinks", "answers_directly")
    assert list(summary["gain"]) == ["choice of style", *(f"better if {style}" for style in styles)]
    gain = summary["after"]["sampled/accuracy"] - summary["before"]["sampled/accuracy"]
    assert sum(summary["gain"].values()) == pytest.approx(gain)
    assert (directory / "curve.png").stat().st_size > 1000


def test_a_task_without_correct_is_trained_and_drawn(tmp_path, monkeypatch, load_script):
    text = (ROOT / "docs" / "task_template.py").read_text()
    text = text.replace('"correct": 1.0, ', "").replace('"correct": float(is_correct), ', "")
    (tmp_path / "my_task.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    load_script("experiment_base/train.py").main(
        [
            *("--task", "my_task.py", "--data", str(TRAIN_DATA), "--steps", "1", "--prompts-per-step", "2"),
            *("--group-size", "2", "--max-new-tokens", "8", "--eval-prompts", "2", "--name", "mine"),
        ]
    )
    directory = tmp_path / "runs" / "experiment_base" / "mine"
    summary = json_of(directory / "summary.json")
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (None, None)
    assert "sampled/reward_short" in summary["after"]
    assert (directory / "curve.png").stat().st_size > 1000


@pytest.mark.slow
def test_experiment_base_trains_a_new_policy(tmp_path, load_script):
    """The policy is loaded from the directory final/."""
    lessons = ("--num-copying", "60", "--num-reasoning", "30", "--num-answering", "30")
    result = finished(
        str(ROOT / "imitation" / "tiny_policy" / "make_policy.py"),
        *(*lessons, "--eval-prompts", "1", "--name", "smoke", "--save-dtype", "bfloat16"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    policy = tmp_path / "runs" / "tiny_policy" / "smoke" / "final"
    load_script("experiment_base/train.py").main(
        [
            *("--model", str(policy), "--steps", "1", "--prompts-per-step", "2", "--group-size", "2"),
            *("--max-new-tokens", "8", "--eval-prompts", "1", "--name", "smoke", "--runs-dir", str(tmp_path)),
        ]
    )
    assert (tmp_path / "experiment_base" / "smoke" / "summary.json").exists()


@pytest.mark.slow
def test_sft_lowers_the_loss_on_a_users_data(tmp_path, monkeypatch, load_script):
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": str(n)}]}
        for n in range(200)
    ]
    write_rows(tmp_path / "chats.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    load_script("imitation/sft/train.py").main(
        ["--model", "tiny", "--data", "chats.jsonl", "--epochs", "4", "--name", "smoke", "--warmup-steps", "2"]
    )
    directory = tmp_path / "runs" / "sft" / "smoke"
    metrics = rows_of(directory)
    assert metrics[-2]["loss/total"] < 0.5 * metrics[1]["loss/total"]
    assert json_of(directory / "summary.json")["eval/loss"] < 0.5 * metrics[0]["eval/loss"]


def test_sft_writes_the_tags_of_the_thoughts_that_it_has_learned(tmp_path, monkeypatch, load_script):
    answer = {"role": "assistant", "content": "<think>1+1=2</think><answer>2</answer>"}
    write_rows(
        tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": f"Say {n}"}, answer]} for n in "23"]
    )
    monkeypatch.chdir(tmp_path)
    flags = ("--lora-rank", "2", "--save-merged", "--name", "smoke")
    load_script("imitation/sft/train.py").main(["--model", "tiny", "--data", "chats.jsonl", *flags])
    run = tmp_path / "runs" / "sft" / "smoke"
    for name in ("final", "final_merged"):
        assert read_format(str(run / name)) == ThoughtFormat("<think>", "</think>")


@pytest.mark.parametrize(("form", "tags"), [
    ("think", ThoughtFormat()),
    ("think-response", ThoughtFormat("<think>", "<response>", answer_ends="</response>")),
    ("answer", None),
    ("response", None),
])  # fmt: skip
def test_every_form_of_thoughts_is_learned_and_its_tags_are_read(tmp_path, monkeypatch, load_script, form, tags):
    """One command makes the file, two steps learn it, and --answer-begins reads the tags of the policy."""
    monkeypatch.chdir(tmp_path)
    answers = [{"role": "assistant", "content": str(n), "thinking": "1+1=2"} for n in range(8)]
    write_rows("thoughts.jsonl", [{"messages": [{"role": "user", "content": "Say it"}, answer]} for answer in answers])
    load_script("imitation/sft/format_chats.py").main(
        ["--data", "thoughts.jsonl", "--form", form, "--output", "chats.jsonl"]
    )
    flags = ("--data", "chats.jsonl", "--epochs", "2", "--name", "smoke")
    load_script("imitation/sft/train.py").main(["--model", "tiny", *flags])
    run = tmp_path / "runs" / "sft" / "smoke"
    assert json_of(run / "summary.json")["steps"] == 2
    if tags is None:
        assert not (run / "final" / LONGCOT).exists()
        return
    learned = json.loads(Path("chats.jsonl").read_text().splitlines()[5])["messages"][-1]["content"]
    judge = load_script("experiment_base/train.py").Config(answer_begins="runs/sft/smoke/final")
    assert read_format(with_absolute_paths(judge).answer_begins) == tags
    assert answer_of(learned, tags) == answer_of(learned, tags, strict=True) == "5"


def test_make_policy_only_examines_a_model_without_lessons(tmp_path, monkeypatch, load_script):
    """As its README says; there is no step, and therefore no curve."""
    monkeypatch.chdir(tmp_path)
    lessons = ("--num-copying", "0", "--num-reasoning", "0", "--num-answering", "0")
    flags = ("--model", "tiny", *lessons, "--eval-prompts", "2", "--name", "smoke")
    load_script("imitation/tiny_policy/make_policy.py").main([*flags])
    directory = tmp_path / "runs" / "tiny_policy" / "smoke"
    summary = json_of(directory / "summary.json")
    assert summary["steps"] == 0
    assert {"eval/greedy/accuracy", "eval_forced/greedy/accuracy"} <= summary.keys()
    assert (directory / "final" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem == "train_accelerate" else pytest.mark.slow, id=path.stem)
        for path in sorted(in_experiments("train_*.py"))
    ],
)
def test_a_published_name_runs_the_train_file_beside_it(path, tmp_path, monkeypatch):
    """Its run is the experiment's, and is resumed under either name."""
    monkeypatch.setattr(viewer, "draw_run", lambda _: None)
    flags = "--steps 1 --prompts-per-step 2 --group-size 2 --max-new-tokens 4 --eval-prompts 1 --device cpu --name x"
    run_here(path, *flags.split(), "--runs-dir", str(tmp_path))
    run = tmp_path / path.parent.name / "x"
    assert json_of(run / "config.json")["command"][0] == str(path.with_name("train.py"))
    assert "after step 1" in run_here(path, "--resume", str(run), "--steps", "2")
    assert [row["step"] for row in rows_of(run) if "loss/total" in row] == [1, 2]


def test_the_four_published_names_are_there():
    names = {"accelerate", "accelerate_ddp", "multiturn_qa", "multiturn_calc_tool_calling"}
    assert {path.stem for path in in_experiments("train_*.py")} == {f"train_{name}" for name in names}


# What --help of experiment_base must not import: it is imported where it is used
LATER = {"transformers", "tokenizers", "accelerate", "peft", "datasets", "huggingface_hub"}
LATER |= {"rich", "matplotlib", "wandb"}
LATER |= {"torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy"}
LATER |= {"common.calculator_tool", "common.critic", "common.observations", "common.preferences", "common.reward_model"}
LATER |= {"common.search", "common.tools", "harness.logs.metrics", "harness.run.checkpoints", "harness.run.settings"}
LATER |= {"fast.cache", "fast.decoding", "fast.kept_rows"}
LATER |= {"harness.engines", "harness.exporting", "harness.search", "harness.tools", "viewer"}


def test_help_imports_little(cold):
    code = "import runpy, sys; sys.argv = [sys.argv[1], '--help']\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "finally: print(*(f'{name}={getattr(module, \"__file__\", None)}' for name, module in sys.modules.items()))"
    train = ROOT / "experiment_base" / "train.py"
    result = subprocess.run([sys.executable, "-c", code, str(train)], capture_output=True, text=True, timeout=120)
    loaded = dict(word.split("=", 1) for word in result.stdout.splitlines()[-1].split(" ") if "=" in word)
    assert "common.sampling" in loaded, result.stderr
    assert LATER & loaded.keys() == set()
