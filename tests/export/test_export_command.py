"""export.py: what it writes loads, answers and describes itself; what fails or is interrupted leaves nothing."""

import contextlib
import io
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from common.chat import decode, encode_prompt
from common.errors import UserError
from common.sampling import sample

from common.plumbing.config import ModelConfig
from common.plumbing.directory import lock_directory
from common.plumbing.loading import load_policy
from common.plumbing.start import run_main

pytestmark = pytest.mark.drawn


def card_of(directory: Path) -> tuple[dict, str]:
    """The front matter and the text of a model card."""
    _, front, text = (directory / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_full_run_loads_answers_and_is_described(runs, export, tmp_path):
    """The card's own code is run, and prints the greedy answer of the run's final policy."""
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


def test_no_file_names_a_place_of_this_machine(runs, export, tmp_path):
    """Of an adapter run, whose adapter_config.json holds the absolute path of its base; it is merged."""
    export(runs / "lora")
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


def test_an_adapter_of_a_hub_model_is_kept_or_merged(copied, export, tmp_path, monkeypatch):
    """The base is in the cache of the hub, under its id."""
    from huggingface_hub import constants

    base = Path(__file__).parents[2] / "assets/tiny_policy"
    cache = tmp_path / "cache/models--owner--base"
    shutil.copytree(base, cache / "snapshots/1")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    run = copied("lora")
    path = run / "final/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "owner/base"}))
    export(run)
    fields, _ = card_of(tmp_path / "exports/lora")
    assert fields["base_model"] == "owner/base"
    assert (fields["library_name"], fields["base_model_relation"]) == ("peft", "adapter")
    assert (tmp_path / "exports/lora/adapter_model.safetensors").is_file()
    export(run, "--merge", "--output", "merged", "--license", "apache-2.0")
    fields, _ = card_of(tmp_path / "merged")
    assert (fields["library_name"], fields["base_model_relation"]) == ("transformers", "finetune")
    assert fields["license"] == "apache-2.0"


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_checkpoint_is_quantised(runs, export, tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    export(runs / "full/checkpoints/step_1", "--quantize", bits)
    written = tmp_path / f"exports/full-step1-{bits}"
    assert "quantization_config" in json.loads((written / "config.json").read_text())
    fields, text = card_of(written)
    assert bits.replace("bit", "-bit") in fields["tags"]
    assert "at the checkpoint of step 1 of" in text
    assert re.search(r"[0-4] of 4 greedy answers", text)


def test_a_base_held_in_4_bits_is_compared_as_it_was(copied, export, tmp_path, load_script, monkeypatch):
    pytest.importorskip("bitsandbytes")
    run = copied("lora")
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"load_in": "4bit"}))
    module = load_script("export.py")
    load, loaded = module.load_trained, []
    monkeypatch.setattr(module, "load_trained", lambda *given: loaded.append(load(*given)) or loaded[-1])
    export(run)
    assert any("4bit" in type(layer).__name__ for layer in loaded[0].modules())
    _, text = card_of(tmp_path / "exports/lora")
    assert "The trained policy held its base in 4 bits; here it is not quantised so." in text


def test_other_answers_are_an_error(runs, export, tmp_path, load_script, monkeypatch):
    """The weights are changed while they are written."""

    def write(source, directory, dtype):
        write_model(source, directory, dtype)
        from safetensors.torch import save_file

        weights = load_file(directory / "model.safetensors")
        weights["model.norm.weight"] = -weights["model.norm.weight"]
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    module = load_script("export.py")
    write_model = module.write_model
    monkeypatch.setattr(module, "write_model", write)
    with pytest.raises(UserError, match="4 of 4 greedy answers differ from those of the trained policy"):
        export(runs / "full")
    assert list((tmp_path / "exports").iterdir()) == []


def test_interrupted_or_without_space_it_leaves_nothing(runs, export, tmp_path, load_script, monkeypatch, capsys):
    resource = pytest.importorskip("resource")
    (tmp_path / "exports/full.partial/unquantised").mkdir(parents=True)  # of a process that was killed
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"exports/full could not be written .*nothing was exported"):
            export(runs / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "exports").iterdir()) == []
    monkeypatch.setattr(load_script("export.py"), "written_answers", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        run_main(lambda: export(runs / "full"))
    assert end.value.code == 130
    assert capsys.readouterr().err.strip() == "interrupted; nothing was exported"
    assert list((tmp_path / "exports").iterdir()) == []


def test_two_processes_do_not_write_one_output(runs, export, tmp_path):
    (tmp_path / "exports/full.partial").mkdir(parents=True)
    lock = lock_directory(tmp_path / "exports/full.partial")
    with pytest.raises(UserError, match="in use: another process is exporting to it"):
        export(runs / "full")
    lock.release()


def test_gguf_is_left_to_the_converter_of_llama_cpp(runs, export, tmp_path):
    """Here one that fails, as the real one does for a tokenizer that it does not know."""
    converter = tmp_path / "llama.cpp/convert_hf_to_gguf.py"
    converter.parent.mkdir()
    converter.write_text("raise NotImplementedError('BPE pre-tokenizer was not recognized')\n")
    with pytest.raises(UserError, match=r"could not convert the model: .*BPE pre-tokenizer was not recognized"):
        export(runs / "full", "--quantize", "gguf", "--llama-cpp", "llama.cpp")
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ((), "RUN is missing"),
        (("nowhere",), "RUN nowhere: there is no such directory"),
        ((".",), "RUN "),
        (("full", "--output", "."), "exists already: remove it, or choose another --output"),
        (("full", "--push", "me"), "--push me: a repository of the hub is owner/name"),
        (("full", "--push", "me/it"), "--push needs a token of the hub"),
        (("full", "--private"), "--private is for --push owner/name"),
        (("full", "--quantize", "gguf"), "--quantize gguf needs convert_hf_to_gguf.py of llama.cpp"),
        (("full", "--quantize", "gguf", "--llama-cpp", "."), "--llama-cpp . holds no convert_hf_to_gguf.py"),
        (("full", "--quantize", "4bit", "--dtype", "float16"), "--dtype float16 contradicts --quantize 4bit"),
        (("full", "--license", "a: b"), "--license a: b is not an id of the hub"),
        (("full", "--device", "toaster"), "--device must be cpu"),
        (("full/checkpoints/step_9",), "RUN full/checkpoints/step_9: there is no such directory"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(runs, load_script, tmp_path, monkeypatch, capsys, argv, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    if argv and argv[0].startswith("full"):
        (tmp_path / "full").symlink_to(runs / "full")
    with pytest.raises(SystemExit) as end:
        run_main(lambda: load_script("export.py").main(list(argv)))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_a_run_that_cannot_be_exported_says_why(copied, export):
    run = copied("full")
    (run / "final").rename(run / "elsewhere")
    with pytest.raises(UserError, match=r"has not ended: its newest checkpoint is full/checkpoints/step_2, which can"):
        export(run)
    adapter = copied("lora")
    path = adapter / "final/adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"base_model_name_or_path": "/gone"}))
    with pytest.raises(UserError, match=r"RUN .* is an adapter of /gone, where there is no model"):
        export(adapter)
    shutil.copytree(Path(__file__).parents[2] / "assets/tiny_policy", adapter / "base")
    config = json.loads((adapter / "base/config.json").read_text())
    (adapter / "base/config.json").write_text(json.dumps(config | {"quantization_config": {"load_in_4bit": True}}))
    path.write_text(json.dumps(settings | {"base_model_name_or_path": str(adapter / "base")}))
    with pytest.raises(UserError, match="has trained an adapter on quantised weights"):
        export(adapter, "--merge")
