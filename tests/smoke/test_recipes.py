"""Every recipe trains a small model of its architecture for two steps, on real rows, with the recipe's settings.

A program that replaces Python records what a recipe starts, and the training then runs in this process: its imports
take longer than two steps. One recipe is run as users run it, in two processes.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from transformers import AutoTokenizer

from common.chat import begin_completions, decode, encode_prompt
from common.chat_template import apply_template
from common.stop_texts import ends_turn
from tasks import countdown

from harness.data.thoughts import answer_of, read_format
from harness.run.settings import read_settings

ROOT = Path(__file__).resolve().parents[2]
CHAT = "think_and_chat.sh"  # a recipe of fourteen runs
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.sh") if path.name not in ("common.sh", CHAT))
README = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
CHATS = {  # the rows of README's table, by the words of each run
    words: line.strip("| ").split(" | ")
    for line in README.splitlines()
    for words in re.findall(r"`(\w+ (?:warm|zero) \w+ (?:grpo|ppo))`", line.partition(" | ")[0])
    if line.startswith("| ")
}
BASE, ACCELERATE = "experiment_base/train.py", "experiment_accelerate/train.py"
NOTE_ARGUMENTS = '#!/bin/sh\nprintf "%s\\0" "$@" >"$ARGUMENTS"\n'
SHORT = (
    *("--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "8", "--eval-prompts", "2"),
    *("--eval-every", "0", "--checkpoint-every", "0", "--device", "cpu", "--name", "x"),
)

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
each_chat = pytest.mark.parametrize("words", CHATS, ids=lambda words: words.replace(" ", "-"))


@pytest.fixture(scope="module")
def models(load_script, tmp_path_factory) -> Path:
    """A directory with a small "qwen2" and a small "llama"."""
    savers, folder = load_script("tests/models/conftest.py"), tmp_path_factory.mktemp("models")
    savers.save_qwen2(folder / "qwen2")
    savers.save_llama(folder / "llama")
    make = load_script("rewards/reward_model/train.py").main
    flags = ("--max-pairs", "32", "--eval-prompts", "2", "--device", "cpu", "--name", "x", "--runs-dir", str(folder))
    make(["--model", str(folder / "llama"), *flags])
    (folder / "reward_model" / "x" / "final").rename(folder / "judge")
    return folder


def call(recipe: Path | str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "CDPATH": "/usr"} | environment
    command = ["bash", os.path.relpath(ROOT / "recipes" / recipe), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=120)


@pytest.fixture
def started_by(tmp_path) -> Callable[..., list[str]]:
    """The arguments that a recipe gives to Python."""
    program, arguments = tmp_path / "python", tmp_path / "arguments"
    program.write_text(NOTE_ARGUMENTS, encoding="utf-8")
    program.chmod(0o755)

    def start(recipe: Path | str, *flags: str, **environment: str) -> list[str]:
        result = call(recipe, *flags, PYTHON=str(program), ARGUMENTS=str(arguments), **environment)
        given = arguments.read_text(encoding="utf-8").split("\0")[:-1]
        assert (result.returncode, result.stdout) == (0, "")
        assert result.stderr.startswith(f"command: {program} ")
        shown = subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {result.stderr[9:]}"], capture_output=True, text=True
        ).stdout
        assert shown.split("\0")[1:-1] == given  # it can be pasted into a shell
        return given

    return start


def small(recipe: Path, models: Path) -> list[str]:
    """Flags that make a recipe short: a model of its architecture, and rows of its task."""
    task = recipe.stem.partition("_")[0]
    rows = str(ROOT / ("data/instructions_short.jsonl" if task == "instructions" else f"tests/data/{task}.jsonl"))
    model = str(models / ("qwen2" if "qwen2" in recipe.stem else "llama"))
    minibatch = ("--minibatch-size", "2") if "--minibatch-size" in recipe.read_text(encoding="utf-8") else ()
    return ["--model", model, "--data", rows, "--eval-data", rows, *minibatch, *SHORT]


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@each_recipe
def test_a_recipe_trains_for_two_steps(recipe, load_script, started_by, models, tmp_path, monkeypatch):
    if "4bit" in recipe.stem and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    monkeypatch.chdir(tmp_path)
    script, *argv = started_by(recipe, "--", *small(recipe, models))
    experiment = "experiment_drgrpo" if "drgrpo" in recipe.stem else "experiment_base"
    assert script == str(ROOT / experiment / "train.py")
    load_script(f"{experiment}/train.py").main(argv)
    run = tmp_path / "runs" / Path(experiment).name / "x"
    metrics, summary = read_metrics(run), json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert {entry["step"] for entry in metrics} == {0, 1, 2}
    assert len([entry for entry in metrics if "loss/grad_norm" in entry and "reward/total" in entry]) == 2
    assert (summary["trained_parameters"] == summary["parameters"]) == recipe.stem.endswith(("full", "drgrpo", "135m"))
    settings = read_settings(run)
    assert settings["task"] == recipe.stem.partition("_")[0]
    assert settings["gradient_checkpointing"] == ("smollm2" not in recipe.stem)
    assert settings["load_in"] == ("4bit" if "4bit" in recipe.stem else None)


@each_chat
def test_a_chat_has_the_settings_of_the_table(words, started_by):
    script, *given = started_by(CHAT, *words.split())
    model, start, thoughts, method = words.split()
    title, *cells = CHATS[words]
    flags = dict(pairwise(given))
    prompts, group = flags["--prompts-per-step"], flags["--group-size"]
    rows = flags.get("--minibatch-size", str(int(prompts) * int(group)))
    sampling = f"{flags['--temperature']}, {flags['--top-p']}"
    found = [flags["--steps"], f"{prompts} x {group}", rows, flags["--lr"], flags["--kl-weight"], sampling]
    assert [*found, flags["--max-question-length"]] == cells
    assert script == str(ROOT / ("policy_gradients/ppo/train.py" if method == "ppo" else BASE))
    assert [name for name in ("--strict", "--value-clip") if name in given] == re.findall(r"`(--[\w-]+)", title)
    tags = str(ROOT / "recipes/longcot_config.json") if start == "zero" else "</think>"
    assert flags.get("--answer-begins") == (tags if (start, thoughts) != ("warm", "nothink") else None)
    template = str(ROOT / f"recipes/prompted_{thoughts}.jinja")
    stops = (template, "</response>") if start == "zero" else (None, None)
    assert (flags.get("--chat-template"), flags.get("--stop")) == stops
    ids = {"llama_base": "meta-llama/Llama-3.1-8B", "qwen_base": "Qwen/Qwen2.5-7B"}
    assert flags["--model"] == (ids[model] if start == "zero" else f"warm_{model}_{thoughts}")


@pytest.mark.slow
@each_chat
def test_a_chat_trains_for_two_steps(words, load_script, started_by, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs, group = str(ROOT / "data/preference_pairs_heldout.jsonl"), "1" if words.endswith("ppo") else "2"
    model, judge = models / ("qwen2" if "qwen" in words else "llama"), models / "judge"
    given = ["--model", str(model), "--reward-model", str(judge), "--data", pairs, "--eval-data", pairs]
    given += [*SHORT, "--group-size", group]
    given += ["--minibatch-size", "2"] if CHATS[words][2].startswith("128") else []
    script, *argv = started_by(CHAT, *words.split(), "--", *given)
    load_script(str(Path(script).relative_to(ROOT))).main(argv)
    run = tmp_path / "runs" / Path(script).parent.name / "x"
    steps = [entry for entry in read_metrics(run) if "loss/total" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert all("reward/preference" in entry for entry in steps)
    assert ("loss/kl" in steps[-1], "critic/value" in steps[-1]) == (group == "2", group == "1")
    chosen = read_settings(run)["chat_template"]
    assert (chosen is not None) == ("zero" in words)


@pytest.mark.slow
def test_a_recipe_runs_from_anywhere_in_two_processes(models, monkeypatch):
    """As users run it, with a path relative to the current directory."""
    monkeypatch.chdir(models)
    recipe = ROOT / "recipes" / "gsm8k_qwen2.5_0.5b_full.sh"
    result = call(recipe, "--", *small(recipe, Path(".")), NUM_PROCESSES="2")
    assert result.returncode == 0, result.stderr
    steps = [entry["step"] for entry in read_metrics(models / "runs/experiment_base/x") if "loss/total" in entry]
    assert steps == [1, 2]
    assert json.loads((models / "runs/experiment_base/x/config.json").read_text())["processes"] == 2


def test_flags_reach_the_training_as_they_are(started_by):
    recipe = "gsm8k_qwen2.5_0.5b_full.sh"
    odd = ["--system-prompt", "two words, *, $HOME; \n `id`", "--", ""]
    for flags in (odd, ["--", *odd]):  # the first -- is optional
        assert started_by(recipe, *flags)[-4:] == odd
    assert started_by(recipe, "--") == started_by(recipe)


def test_words_before_the_flags_start_the_training(started_by, tmp_path):
    """As with `bash recipes/X.sh torchrun --nproc-per-node 2 -- --steps 5`."""
    runner = (str(tmp_path / "python"), "--nproc-per-node", "2")
    words = started_by("gsm8k_qwen2.5_0.5b_full.sh", *runner, "--", "--steps", "5")
    assert words[:3] == ["--nproc-per-node", "2", str(ROOT / BASE)]
    assert words[3:] == [*started_by("gsm8k_qwen2.5_0.5b_full.sh")[1:], "--steps", "5"]


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (("torchrun", "--steps", "5"), {}, "torchrun: end the words of a launcher with --, and .*"),
        (("no-runner", "--"), {}, "no-runner: there is no such command"),
        (("env", "--"), {"NUM_PROCESSES": "2"}, "NUM_PROCESSES and CONFIG make .*"),
    ],
)
def test_words_that_start_nothing_are_refused(words, environment, sentence):
    result = call("gsm8k_qwen2.5_0.5b_full.sh", *words, **environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(rf"error: {sentence}\n", result.stderr)


@pytest.mark.parametrize(
    "words",
    [
        *("", "llama_base", "llama_base zero think ppo", "qwen_base warm think ppo", "qwen_instruct zero think grpo"),
        *("llama_base cold think grpo", "llama_base zero think grpo2", "--steps 5", "a[$(id)] zero think \x1b[31m"),
    ],
)
def test_words_that_name_none_of_the_chats_are_refused(words):
    result = call(CHAT, *words.split(), "--steps", "5")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"error: [ -~]+: give llama_base or qwen_base and .*\n", result.stderr)


def test_a_launcher_follows_the_words_of_a_chat(started_by, tmp_path):
    launcher = (str(tmp_path / "python"), "-x", "--")
    words = started_by(CHAT, "llama_base", "zero", "think", "grpo", *launcher, "--steps", "5")
    assert (words[:2], words[-2:]) == (["-x", str(ROOT / BASE)], ["--steps", "5"])


@pytest.mark.parametrize(
    ("recipe", "config", "train"),
    [
        ("gsm8k_llama3.2_3b_full.sh", "", BASE),
        ("gsm8k_llama3.2_3b_full.sh", "fsdp2", BASE),
        ("gsm8k_llama3.2_3b_full.sh", "deepspeed_zero2", ACCELERATE),  # DeepSpeed needs its backward
        ("math_qwen2.5_math_1.5b_drgrpo.sh", "", "experiment_drgrpo/train.py"),
        ("math_qwen2.5_math_1.5b_drgrpo.sh", "multi_gpu", "experiment_drgrpo/train.py"),
    ],
)
def test_several_processes_are_launched(started_by, recipe, config, train):
    words = started_by(recipe, "--steps", "3", NUM_PROCESSES="4", CONFIG=config)
    script = words.index(str(ROOT / train))
    assert words[-2:] == ["--steps", "3"]
    if not config:
        assert words[:script] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        return
    assert words[:2] == ["-m", "accelerate.commands.launch"]
    args = launch_command_parser().parse_args(words[2:])
    assert args.config_file == str(ROOT / f"recipes/accelerate_configs/{config}.yaml")
    assert (args.num_processes, args.main_process_port) == (4, 0)
    assert [args.training_script, *args.training_script_args] == words[script:]


@pytest.mark.parametrize(
    ("recipe", "environment", "sentence"),
    [
        *(
            ("gsm8k_qwen2.5_3b_lora.sh", {"NUM_PROCESSES": number}, r"NUM_PROCESSES=\S+ must be 1 to 9999")
            for number in ("0", "two", "10000", "2;id", "a[$(id)]", "\x1b[31m")
        ),
        ("gsm8k_qwen2.5_3b_lora.sh", {"CONFIG": "none"}, "CONFIG=none is not a file of recipes/accelerate_configs/"),
        ("gsm8k_qwen2.5_3b_lora.sh", {"PYTHON": "no-python"}, "PYTHON=no-python: there is no such command"),
    ],
)
def test_what_cannot_be_launched_is_refused(recipe, environment, sentence):
    result = call(recipe, **environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(rf"error: {sentence}\n", result.stderr)


def test_a_base_model_is_asked_in_plain_text(models, started_by):
    words = started_by("countdown_qwen2.5_3b_full.sh")
    template, prefix = (words[words.index(flag) + 1] for flag in ("--chat-template", "--completion-prefix"))
    tokenizer = AutoTokenizer.from_pretrained(models / "qwen2")
    tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    begin_completions(tokenizer, prefix)
    messages = countdown.messages({"nums": [3, 5], "target": 2}, "Solve it.")
    assert tokenizer.decode(encode_prompt(tokenizer, messages)) == (
        "A conversation between User and Assistant. The Assistant thinks first, and then gives the answer.\n"
        "Solve it.\nUser: Make 2 from 3, 5.\nAssistant: Let me solve this step by step.\n<think>"
    )
    answer = tokenizer.encode("5-3 </think><answer>5-3</answer>", add_special_tokens=False)
    assert countdown.reward({"nums": [3, 5], "target": 2}, decode(tokenizer, answer))["correct"] == 1


PROMPTED = {  # the bytes that the published models were trained with
    "think": "A conversation between User and Assistant. Following the User's query, the Assistant first plans a "
    "response, and then provides the response. The internal reasoning process is enclosed within <think> </think> tags "
    "and the response is enclosed within <response> </response> tags, i.e., in the format <think> reasoning process "
    "here </think> <response> response here </response>.\n\n",
    "nothink": "A conversation between User and Assistant. The user asks a question, and the assistant provides a "
    "response. The response is enclosed within <response> </response> tags, i.e., <response> response </response>.\n\n",
}


@pytest.mark.parametrize("thoughts", PROMPTED)
@pytest.mark.parametrize(("name", "begins"), [("llama", "<|begin|>"), ("qwen2", "")])
def test_a_prompted_base_model_is_asked_in_the_published_bytes(models, thoughts, name, begins):
    tokenizer = AutoTokenizer.from_pretrained(models / name)
    tokenizer.bos_token = begins or None  # Qwen2's has none
    tokenizer.chat_template = (ROOT / f"recipes/prompted_{thoughts}.jinja").read_text(encoding="utf-8")
    turns = [("user", " Hi\n\nthere \n"), ("assistant", "<response> Hello </response>\n"), ("user", "Bye")]
    messages = [{"role": role, "content": content} for role, content in turns]
    prompt = f"{begins}{PROMPTED[thoughts]}User: <query>Hi\n\nthere</query>\n"
    assert tokenizer.decode(encode_prompt(tokenizer, messages[:1])) == f"{prompt}Assistant:"
    whole = f"{prompt}Assistant: <response> Hello </response>User: <query>Bye</query>\n"
    assert tokenizer.decode(encode_prompt(tokenizer, messages)) == f"{whole}Assistant:"
    assert apply_template(tokenizer, messages, add_generation_prompt=False) == whole


@pytest.mark.parametrize(
    ("said", "text", "answer", "strictly"),
    [
        (" <think>a</think> <response>b</response>\nUser:", " <think>a</think> <response>b</response>", "b", "b"),
        (" <response> b </response>c", " <response> b </response>", "b", "b"),
        (" <response>b</response>!c", " <response>b</response>!", "b", None),  # ">!" is one token
        (" <think>a</think> <response>b", None, "b", "b"),  # cut off
        (" <think>a</think> b", None, None, None),
        (" <think><response>b</response>", None, "b", "b"),
        (" b", None, "b", None),
    ],
)
def test_the_judge_sees_the_response_of_a_prompted_base_model(models, said, text, answer, strictly):
    tokenizer = AutoTokenizer.from_pretrained(models / "qwen2")
    tokenizer.add_tokens([">!"])
    ids = tokenizer.encode(said, add_special_tokens=False)
    end = next((n for n in range(1, len(ids)) if ends_turn(tokenizer, ids[:n], ["</response>"])), len(ids))
    completion, tags = decode(tokenizer, ids[:end]), read_format(str(ROOT / "recipes/longcot_config.json"))
    assert completion == (text or said)
    assert (answer_of(completion, tags), answer_of(completion, tags, strict=True)) == (answer, strictly)


def test_the_questions_of_chosen_levels_are_written(load_script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    levels = ["Level 1", "Level 3", "Level 5", "Level ?", 4]
    rows = [{"problem": f"{n}?", "level": level, "solution": rf"\boxed{{{n}}}"} for n, level in enumerate(levels)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]), encoding="utf-8")
    Path("b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[3:]), encoding="utf-8")
    make = load_script("recipes/math_levels.py").main
    make(["--output", "chosen.jsonl", "--data", "a.jsonl", "b.jsonl"])
    written = Path("chosen.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in written.splitlines()] == [rows[1], rows[2], rows[4]]
    assert capsys.readouterr().out == "chosen.jsonl: 3 of 5 questions\n"
