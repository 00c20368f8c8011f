"""evaluate.py as users run it: killed, interrupted and continued; adapters, suites, comparisons, and mistakes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_files import ROOT, json_of, read_lines, wait_until
from safetensors.torch import load_file, save_file

import common.sampling
from common.errors import UserError
from common.policy import Policy

from harness.base.config import PolicyConfig
from harness.evaluation.completions import Completions
from harness.models.loading import load_policy
from harness.run.start import run_main

SHORT = ("--device", "cpu", "--max-new-tokens", "8")


@pytest.fixture
def evaluate(load_script, tmp_path, monkeypatch):
    """Call main() of evaluate.py in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return lambda *argv: load_script("evaluate.py").main([*SHORT, *argv])


def start(*argv: str, folder: Path) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "evaluate.py"), *SHORT, *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_killed_and_interrupted_it_ends_as_if_nothing_was(evaluate, tmp_path, capsys, monkeypatch):
    """Killed, interrupted, then continued: every byte of the completions equals an uninterrupted run's."""
    flags = ("--limit", "12", "--num-samples", "2", "--generation-batch-size", "2")
    evaluate(*flags, "--output", "whole")
    whole = (tmp_path / "whole/completions.jsonl").read_bytes()
    path = tmp_path / "out/completions.jsonl"

    process = start(*flags, "--output", "out", folder=tmp_path)
    wait_until(lambda: path.exists() and path.stat().st_size > 1_000, process)
    process.send_signal(signal.SIGSTOP)  # it keeps its lock
    with pytest.raises(UserError, match="in use: another process is writing an evaluation there"):
        evaluate(*flags, "--output", "out")
    process.kill()
    process.communicate()
    assert 0 < path.stat().st_size < len(whole)
    os.truncate(path, path.stat().st_size - 5)  # as after a kill within the last line of a batch

    def interrupt_after_three(completions: Completions, answers: list) -> None:
        add(completions, answers)
        if completions.num_batches % 3 == 0:
            signal.raise_signal(signal.SIGINT)

    add = Completions.add
    with monkeypatch.context() as patch:
        patch.setattr(Completions, "add", interrupt_after_three)
        patch.setattr(sys, "argv", ["evaluate.py", *flags])
        with pytest.raises(SystemExit) as end:
            run_main(lambda: evaluate(*flags, "--output", "out"))
    assert end.value.code == 130
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("interrupted; continue with: python evaluate.py --limit 12 ")
    assert error.endswith(" --output out")
    assert path.stat().st_size < len(whole)

    capsys.readouterr()
    evaluate(*flags, "--output", "out")
    assert " of 36 completions are there already" in capsys.readouterr().out
    assert path.read_bytes() == whole
    found, expected = (json_of(tmp_path / name / "results.json") for name in ("out", "whole"))
    for section in ("greedy", "sampled", "questions"):
        assert found[section] == expected[section]
    assert (tmp_path / "out/failures.txt").read_bytes() == (tmp_path / "whole/failures.txt").read_bytes()


def test_where_memory_runs_out_it_says_what_helps(evaluate, monkeypatch):
    monkeypatch.setattr(common.sampling, "next_logits", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(UserError, match=r"^memory ran out .*what helps: --generation-batch-size 64, a smaller model$"):
        evaluate("--limit", "2", "--num-samples", "0")


def test_answers_end_at_stop_texts(evaluate, tmp_path, capsys):
    """A directory of an older version, which had none, is continued."""
    evaluate("--limit", "6", "--num-samples", "2", "--output", "usual")
    evaluate("--limit", "6", "--num-samples", "2", "--stop", "1", "--stop=2", "--output", "out", "--compare", "usual")
    assert '--stop ["1", "2"], there []' in capsys.readouterr().out
    usual, found = (read_lines(tmp_path / name / "completions.jsonl") for name in ("usual", "out"))
    for line, longer in zip(found, usual, strict=True):
        ends = [place for place, letter in enumerate(longer["text"]) if letter in "12"]
        assert line["text"] == longer["text"][: ends[0] + 1 if ends else None]
        assert line["finish_reason"] == ("stop" if ends else longer["finish_reason"])
    assert any(line["text"] != longer["text"] for line, longer in zip(found, usual, strict=True))
    settings = json_of(tmp_path / "usual/config.json")
    assert settings.pop("stop") == []
    assert settings.pop("strict") is False
    (tmp_path / "usual/config.json").write_text(json.dumps(settings), encoding="utf-8")
    evaluate("--limit", "6", "--num-samples", "2", "--output", "usual")


def test_an_adapter_is_evaluated_with_what_it_adds(evaluate, tmp_path, capsys):
    """With B = 0 it changes nothing; the same adapter with another B changes answers, and --compare names them."""
    policy = load_policy(PolicyConfig(device="cpu", lora_rank=2))
    policy.model.save_pretrained(tmp_path / "adapter")
    flags = ("--limit", "12", "--num-samples", "0")
    evaluate(*flags, "--output", "base")
    evaluate(*flags, "--model", "adapter", "--output", "same")
    assert "adapter is a LoRA adapter of rank 2" in capsys.readouterr().out
    texts = {name: (tmp_path / name / "completions.jsonl").read_text() for name in ("base", "same")}
    assert texts["same"] == texts["base"]
    weights = load_file(tmp_path / "adapter/adapter_model.safetensors")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(weight.shape, generator=generator) * 0.3 if "lora_B" in name else weight
        for name, weight in weights.items()
    }
    save_file(weights, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(UserError, match=r"--model .*adapter has changed since same began"):
        evaluate(*flags, "--model", "adapter", "--output", "same")
    evaluate(*flags, "--model", "adapter", "--output", "other", "--compare", "base")
    printed = capsys.readouterr().out
    assert "difference to base/results.json, over 12 questions that both asked" in printed
    comparison = json_of(tmp_path / "other/results.json")["comparison"]
    greedy = comparison["differences"]["greedy accuracy"]
    assert greedy["value"] == pytest.approx((len(comparison["became_right"]) - len(comparison["became_wrong"])) / 12)
    assert greedy["low"] <= greedy["value"] <= greedy["high"]


def test_a_suite_prints_one_table(evaluate, tmp_path, capsys, monkeypatch):
    """Five files of one row each; the second time it asks nothing, and does not load the model."""
    (tmp_path / "data").mkdir()
    row = json.dumps({"problem": "What is $1+1$?", "answer": "2"}) + "\n"
    for name in ("math500", "aime24", "amc", "minerva", "olympiad_bench"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(row)
    flags = ("--suite", "math", "--data", "data", "--num-samples", "2", "--output", "out")
    evaluate(*flags)
    first = capsys.readouterr().out
    for title in ("MATH-500", "AIME 2024", "AMC", "Minerva", "OlympiadBench", "average"):
        assert title in first
    monkeypatch.setattr(Policy, "__init__", lambda *_: pytest.fail("the model is loaded"))
    evaluate(*flags, "--compare", "out")
    second = capsys.readouterr().out
    assert second.count("difference to ") == 5
    assert second.count("greedy accuracy              +0.000 [+0.000, +0.000]") == 5
    table = json_of(tmp_path / "out/results.json")["table"]
    assert list(table) == ["greedy", "mean@2", "pass@2", "maj@2"]
    assert table["greedy"]["average"]["value"] in (0.0, 1.0)
    assert (tmp_path / "out/amc/failures.txt").is_file()


def test_the_suite_of_one_benchmark_has_one_directory_and_its_own_figures(evaluate, tmp_path, capsys):
    ids = ["punctuation:no_comma", "startend:quotation"]
    row = json.dumps({"prompt": "Describe bread.", "instruction_id_list": ids, "kwargs": [{}, {}]}) + "\n"
    (tmp_path / "prompts.jsonl").write_text(row * 2)
    flags = ("--suite", "ifeval", "--num-samples", "0", "--data")
    evaluate(*flags, "prompts.jsonl", "--output", "out")
    found, printed = json_of(tmp_path / "out/results.json")["greedy"], capsys.readouterr().out
    assert all(name in printed for name in found["shares"])
    assert found["shares"]["inst_level_strict_acc"]["value"] == found["means"]["reward_followed"]
    assert found["shares"]["prompt_level_loose_acc"]["value"] == found["means"]["reward_loose"]
    with pytest.raises(UserError, match=r"--data .* has no file ifeval\.jsonl, which --suite ifeval needs"):
        evaluate(*flags, ".", "--compare", "out")


@pytest.mark.parametrize(("suite", "figures"), [
    ("mmlu_redux", set()),
    ("popqa", {"contained"}),
    ("zebra_logic", {"puzzle_acc", "cell_acc"}),
])  # fmt: skip
def test_published_rows_of_typed_answers_are_asked(evaluate, tmp_path, capsys, suite, figures):
    """From a file, or from the directory that holds it, which is the same."""
    flags = ("--suite", suite, "--limit", "2", "--num-samples", "1", "--output", "out")
    evaluate(*flags, "--data", str(ROOT / f"tests/data/{suite}.jsonl"))
    printed, results = capsys.readouterr().out, json_of(tmp_path / "out/results.json")
    assert (results["num_questions"], results["task"]) == (2, "typed_answers")
    assert set(results["greedy"]["shares"]) == figures
    assert all(name in printed for name in ("accuracy", "partial", *figures))
    evaluate(*flags, "--data", str(ROOT / "tests/data"), "--compare", "out")
    assert "over 2 questions that both asked" in capsys.readouterr().out
