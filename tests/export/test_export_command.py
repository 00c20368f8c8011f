"""export.py: its output loads, answers and describes itself; a failed or interrupted export leaves nothing.

--push, to a stand-in for the hub: the uploads, byte by byte, and the refusals. The model card holds hostile
names and texts, but no paths of this machine.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from common.chat import decode, encode_prompt
from common.errors import UserError
from common.sampling import sample

from harness.base.config import BUNDLED, RESOLVED, ROOT, TINY_POLICY, ModelConfig
from harness.base.places import in_experiments
from harness.cli.parse import parse_config
from harness.exporting.card import Card, public_command
from harness.exporting.source import Source
from harness.exporting.upload import push
from harness.exporting.writing import Questions
from harness.models.loading import load_policy
from harness.run.settings import describe_settings
from harness.run.start import run_main

pytestmark = pytest.mark.drawn


def card_of(directory: Path) -> tuple[dict, str]:
    """The front matter and the text of a model card."""
    _, front, text = (directory / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def change(path: Path, **settings) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.slow
def test_a_full_run_loads_answers_and_is_described(runs, export, tmp_path):
    """The card's own code runs, and prints the greedy answer of the run's final policy."""
    export(runs / "full")
    written = tmp_path / "exports/full"
    found, trained = (load_file(path / "model.safetensors") for path in (written, runs / "full/final"))
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name]) for name in trained)
    fields, text = card_of(written)
    assert fields["library_name"] == "transformers"
    assert "4 of 4 greedy answers" in text
    assert re.search(r"greedy accuracy \| \d\.\d{3} \[\d\.\d{3}-\d\.\d{3}\]", text)
    assert (written / "curve.png").read_bytes() == (runs / "full/curve.png").read_bytes()
    printed = io.StringIO()
    with contextlib.chdir(tmp_path / "exports"), contextlib.redirect_stdout(printed):
        exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    policy = load_policy(ModelConfig(model=str(runs / "full/final"), device="cpu"))
    question = json.loads(re.search(r"messages = (.*)", text)[1])
    settings = {"max_new_tokens": 12, "key": (0, 0), "greedy": True}
    (answer,) = sample(policy, [encode_prompt(policy.tokenizer, question)], 1, **settings)
    assert printed.getvalue() == decode(policy.tokenizer, answer.completion_ids) + "\n"


@pytest.mark.slow
def test_no_file_names_a_place_of_this_machine(runs, export, tmp_path, capsys):
    """An adapter run, whose adapter_config.json contains the absolute path of its base; the adapter is merged."""
    export(runs / "lora")
    assert "evaluate it with: python evaluate.py --model exports/lora --task arithmetic\n" in capsys.readouterr().out
    written = tmp_path / "exports/lora"
    assert not (written / "adapter_config.json").exists()
    for path in written.iterdir():
        content = path.read_bytes()
        for place in (tmp_path.parent, Path.home(), runs, Path(__file__).parents[2]):
            assert str(place).encode() not in content, path
    assert {path.name for path in written.iterdir()} == {
        *("README.md", "chat_template.jinja", "config.json", "curve.png", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }


@pytest.mark.slow
def test_an_adapter_of_a_hub_model_is_kept(copied, export, tmp_path, monkeypatch):
    """The base is in the hub's cache, under its id."""
    from huggingface_hub import constants

    cache = tmp_path / "cache/models--owner--base"
    shutil.copytree(TINY_POLICY, cache / "snapshots/1")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    run = copied("lora")
    change(run / "final/adapter_config.json", base_model_name_or_path="owner/base")
    export(run, "--license", "apache-2.0")
    fields, _ = card_of(tmp_path / "exports/lora")
    assert (fields["base_model"], fields["license"]) == ("owner/base", "apache-2.0")
    assert (fields["library_name"], fields["base_model_relation"]) == ("peft", "adapter")
    assert (tmp_path / "exports/lora/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("bits", ["4bit", pytest.param("8bit", marks=pytest.mark.slow)])
def test_a_checkpoint_is_quantised(runs, export, tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    export(runs / "full/checkpoints/step_1", "--quantize", bits)
    written = tmp_path / f"exports/full-step1-{bits}"
    assert "quantization_config" in json.loads((written / "config.json").read_text())
    fields, text = card_of(written)
    assert bits.replace("bit", "-bit") in fields["tags"]
    assert "at the checkpoint of step 1 of" in text
    assert re.search(r"[0-4] of 4 greedy answers", text)


@pytest.mark.slow
def test_a_base_held_in_4_bits_is_compared_as_it_was(copied, export, tmp_path, load_script, monkeypatch):
    pytest.importorskip("bitsandbytes")
    run = copied("lora")
    change(run / "config.json", load_in="4bit")
    module = load_script("export.py")
    load, loaded = module.load_policy, []
    monkeypatch.setattr(module, "load_policy", lambda *given: loaded.append(load(*given)) or loaded[-1])
    export(run)
    assert any("4bit" in type(layer).__name__ for layer in loaded[0].modules())
    _, text = card_of(tmp_path / "exports/lora")
    assert "The trained policy held its base in 4 bits; here it is not quantised so." in text


def test_other_answers_are_an_error(runs, export, tmp_path, load_script, monkeypatch):
    """The weights are changed while they are written."""

    def write(source, directory, dtype):
        write_model(source, directory, dtype)
        weights = load_file(directory / "model.safetensors")
        weights["model.norm.weight"] = -weights["model.norm.weight"]
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    module = load_script("export.py")
    write_model = module.write_model
    monkeypatch.setattr(module, "write_model", write)
    with pytest.raises(UserError, match="4 of 4 greedy answers differ from the trained policy's"):
        export(runs / "full")
    assert list((tmp_path / "exports").iterdir()) == []


def test_interrupted_or_without_space_it_leaves_nothing(runs, export, tmp_path, load_script, monkeypatch, capsys):
    resource = pytest.importorskip("resource")
    mine = tmp_path / "exports/full.partial/mine.txt"  # not made by export.py
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"exports/full could not be written .*nothing was exported"):
            export(runs / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "exports").iterdir()) == [mine.parent]
    monkeypatch.setattr(load_script("export.py"), "written_answers", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        run_main(lambda: export(runs / "full"))
    assert end.value.code == 130
    assert capsys.readouterr().err.strip() == "interrupted; nothing was exported"
    assert list((tmp_path / "exports").iterdir()) == [mine.parent]
    assert mine.read_text() == "mine"


# --push ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(load_script, monkeypatch):
    """A hub that the library talks to with its token, using the Git LFS protocol."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    module = load_script("tests/export/hub_stand_in.py")
    server = module.Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", module.TOKEN)
    _http.close_session()
    yield server
    _http.close_session()
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_every_byte_arrives_and_nothing_else(runs, export, tmp_path, hub, capsys):
    export(runs / "full", "--push", "me/small", "--private", "--output", "out")
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files.keys() == written.keys()
    assert hub.files == written
    assert written["model.safetensors"] in hub.blobs.values()  # by the storage protocol, the small ones in the commit
    assert hub.repositories == {"me/small": True}
    assert 'name = "me/small"' in written["README.md"].decode()
    assert f"uploaded to {hub.url}/me/small" in capsys.readouterr().out


@pytest.mark.parametrize(("fault", "sentence"), [
    ("token", r"the hub refuses the token \(401\)"),
    ("public", "--private: me/small exists already, and is public; nothing was uploaded to it"),
    ("network", r"the hub could not be used .*the export is complete.* hf upload me/small"),
])  # fmt: skip
def test_what_fails_is_told_and_the_export_kept(tmp_path, hub, monkeypatch, fault, sentence):
    (tmp_path / "README.md").write_text("---\nlibrary_name: transformers\n---\n")
    if fault == "token":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    elif fault == "public":
        hub.repositories["me/small"] = False
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=sentence):
        push(tmp_path, "me/small", fault == "public")
    assert hub.files == {}


@pytest.mark.parametrize("name", [x if x == "tiny" else pytest.param(x, marks=pytest.mark.slow) for x in BUNDLED])
def test_a_bundled_policy_is_uploaded_with_its_card(export, hub, name, capsys, monkeypatch):
    """The code of its card prints what the card says; a dry run needs no token, and sends nothing."""
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    directory = BUNDLED[name]
    fields, text = card_of(directory)
    assert fields["license"] == "apache-2.0"
    export(directory, "--push", f"me/{name}", "--dry-run")
    printed = capsys.readouterr().out
    assert f"these files would be uploaded to me/{name}" in printed
    assert all(f"  {path.name}  {path.stat().st_size:,} bytes" in printed for path in directory.iterdir())
    assert hub.repositories == {}
    code, expected = (
        re.search(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1] for kind in ("python", "text")
    )
    with contextlib.chdir(directory.parents[2]):
        exec(code, {})
    assert capsys.readouterr().out == expected
    with pytest.raises(UserError, match="is a bundled policy, which can only be uploaded as it is: omit --merge"):
        export(directory, "--push", f"me/{name}", "--merge", "--dry-run")


# The model card -------------------------------------------------------------------------------------------------------

HOSTILE = "x`\n---\nlicense: mit\n```\n# Big <script>alert(1)</script> | [a](b) \x1b[31m\u202e"


@pytest.fixture
def card(tmp_path):
    """A card that has only hostile texts."""
    settings = {"experiment": HOSTILE, "task": f"/home/ada/{HOSTILE}", "model": f"/home/ada/{HOSTILE}", "command": []}
    settings |= {"commit": HOSTILE, "versions": {HOSTILE: HOSTILE}, "machine": HOSTILE, "completion_prefix": HOSTILE}
    settings |= {"system_prompt": HOSTILE, "seed": HOSTILE, "about": HOSTILE}
    settings["command"] = [HOSTILE, "--model", HOSTILE, f"--system-prompt={HOSTILE}", "--task", "x"]
    source = Source(run=tmp_path, weights=tmp_path, step=None, settings=settings)
    texts = {"title": HOSTILE, "loads_as": HOSTILE, "answer": HOSTILE, "dtype": "float32", "quantize": "none"}
    figures = {"merged": False, "license": None, "equal": 1, "prompts_equal": 1, "has_curve": False}
    asked = Questions([[{"role": "user", "content": HOSTILE}]], [[1]], 8)
    return Card(source=source, questions=asked, **texts, **figures)


def test_hostile_text_stays_text(card):
    text = card.text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front).keys() == {"library_name", "pipeline_tag", "tags"}
    assert "/home/ada" not in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", body, flags=re.MULTILINE | re.DOTALL)
    outside = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", outside)
    assert "<script>" not in outside
    assert "[a](b)" not in outside
    headings = re.findall(r"^#+ \w.*$", outside, re.MULTILINE)
    assert [line for line in headings if line.startswith("## ")] == [
        *("## How to use it", "## Training", "## Evaluation", "## Check of the export", "## Limits"),
    ]
    compile(re.search(r"^(`{3,})python\n(.*?)^\1$", text, re.MULTILINE | re.DOTALL)[2], "card", "exec")


def test_the_command_names_no_place_and_no_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"experiment": "engine", "model": "/home/ada/models/llama", "data": "owner/rows:main"}
    settings |= {"eval_data": str(tmp_path / "secret/test.jsonl"), "engine_start": "env KEY=sk-1 /home/ada/python"}
    settings |= {"engine_url": "http://ada:pw@host", "runs_dir": "/home/ada/runs", "name": "ada's", "lr": 1e-05}
    settings |= {"wandb": True, "save_merged": True, "variant": "mine", "reward_model": "owner/judge", "top_p": 1.0}
    settings |= {"system_prompt": "Say\n`it`.", "at_most": ["num_terms=2"], "eval_sets": ["a=/home/ada/a.jsonl"]}
    settings |= {"tools": "/home/ada/b=c.py", "answer_begins": "/home/ada/my judge"}
    settings |= {"changed": [name for name in settings if name not in ("experiment", "top_p")]}
    assert public_command(settings) == (
        "python scale/engine/train.py --model llama --data owner/rows:main --eval-data test.jsonl "
        "--engine-start PYTHON --engine-url URL --lr 1e-05 --save-merged --variant mine --reward-model owner/judge "
        "--system-prompt 'Say\n`it`.' --at-most num_terms=2 --eval-sets a=a.jsonl --tools b=c.py "
        "--answer-begins 'my judge'"
    )
    of_an_older_run = {name: value for name, value in settings.items() if name != "changed"}
    assert public_command(of_an_older_run) == public_command(settings).replace(" --system", " --top-p 1.0 --system")


EXPERIMENTS = sorted(path.parent.relative_to(ROOT).as_posix() for path in in_experiments("train.py"))
FIRST = ("experiment_multiturn_tool_calling", "imitation/sft", "policy_gradients/ppo", "scale/engine")  # slow: others


@pytest.mark.parametrize(
    "experiment", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in EXPERIMENTS]
)
def test_the_command_has_every_setting_of_the_run(load_script, tmp_path, monkeypatch, experiment):
    """Each number and switch of the algorithm is another one, some from a file of settings; both give one config."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def short(completions, **_):\n    return [0.0 for _ in completions]\n")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / experiment)
    train = load_script(f"{experiment}/train.py")
    usual, defaults = train.Config(), getattr(train, "RESOLVED", RESOLVED)
    own = inspect.get_annotations(train.Config).keys() - {"model", "runs_dir", "tool_seconds", "top_p"}
    values = {name: value for name in own if isinstance(value := getattr(usual, name), int | float)}
    other = {bool: lambda switch: not switch, int: lambda count: 2 * count, float: lambda number: number / 2}
    file = {name: other[type(value)](value) for name, value in values.items()}
    file |= {"name": "first", "lr": 3e-4, "seed": 7, "keep_checkpoints": 5, "dtype": "bfloat16", "runs_dir": "runs_2"}
    more = {"reward_functions": "mine.py", "reward_weight": ["short=2"], "task": "countdown", "system_prompt": "-x\n y"}
    more |= {} if hasattr(usual, "max_turns") else {"stop": ["-x", "/y=\n"]}
    file |= {name: value for name, value in more.items() if hasattr(usual, name) and experiment != "imitation/sft"}
    Path("settings.yaml").write_text(yaml.safe_dump(file))
    words = ["--engine-start", "PYTHON"] if experiment == "scale/engine" else []
    config = parse_config(train.Config, [*words, "--config", "settings.yaml"], "", defaults)
    settings = json.loads(json.dumps(describe_settings(config, {})))
    command = shlex.split(public_command(settings))
    assert command[:2] == ["python", f"{experiment}/train.py"]
    assert not {"--device", "--name", "--runs-dir", "--config"} & {*command}
    again = parse_config(train.Config, command[2:], "", defaults)
    assert again == dataclasses.replace(config, config=None, name=None, runs_dir=usual.runs_dir)


def test_a_base_of_the_hub_is_named_with_its_relation(card):
    settings = card.source.settings | {"model": "Qwen/Qwen2.5-0.5B-Instruct"}
    hub = dataclasses.replace(card, source=dataclasses.replace(card.source, settings=settings), quantize="4bit")
    fields = yaml.safe_load(hub.text().split("---\n")[1])
    assert fields["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert fields["base_model_relation"] == "finetune"
    assert "Qwen/Qwen2.5-0.5B-Instruct has a licence of its own" in hub.text()
