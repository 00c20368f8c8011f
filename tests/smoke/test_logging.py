"""Ten steps of a run: what its logs keep of which step; TensorBoard, traces, and W&B, whose faults end no run.

What every run's logs hold, of all experiments: golden/test_golden.py.
"""

import gzip
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from run_files import read_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.logs.clock import StepTrace
from harness.logs.metrics import MetricsLog

GROUPS, GROUP_SIZE = 3, 2


@pytest.fixture(scope="module")
def ten_steps(load_script, tmp_path_factory) -> Path:
    """The directory of a run of ten steps."""
    place = tmp_path_factory.mktemp("ten_steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "stdout", output := io.StringIO())
        load_script("experiment_base/train.py").main(
            [
                *("--steps", "10", "--prompts-per-step", str(GROUPS), "--group-size", str(GROUP_SIZE)),
                *("--max-new-tokens", "12", "--checkpoint-every", "0", "--eval-prompts", "1", "--eval-every", "0"),
                *("--temperature", "1.3", "--device", "cpu", "--name", "x"),
            ]
        )
    directory = place / "runs" / "experiment_base" / "x"
    (directory / "output.txt").write_text(output.getvalue(), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def samples(ten_steps) -> list[dict]:
    return read_lines(ten_steps / "samples.jsonl")


def test_findings_are_kept_for_every_step_that_they_hold_at(ten_steps):
    lines = read_lines(ten_steps / "diagnosis.jsonl")
    cut_off = [line["step"] for line in lines if line["finding"] == "completions are cut off"]
    shares = [row["completion/truncated"] for row in read_lines(ten_steps / "metrics.jsonl") if "loss/total" in row]
    assert cut_off == [step for step in range(5, 11) if sum(shares[step - 5 : step]) / 5 > 0.2]
    assert cut_off
    assert all(line["sentence"].endswith("raise --max-new-tokens, now 12") for line in lines if line["step"] in cut_off)


def test_most_steps_keep_two_groups_and_every_tenth_all_rows(samples):
    for step in range(1, 11):
        rows = [(entry["prompt_index"], entry["completion_index"]) for entry in samples if entry["step"] == step]
        num_groups = GROUPS if step == 10 else 2
        assert len(set(rows)) == len(rows) == num_groups * GROUP_SIZE
        assert len({prompt for prompt, _ in rows}) == num_groups
        assert {completion for _, completion in rows} == set(range(GROUP_SIZE))


def test_tensorboard_shows_the_first_group_of_step_1_and_of_every_tenth_step(ten_steps, samples):
    """Also in a run that is resumed, which writes all events anew. The texts are code: markup in them does nothing."""
    shown = texts_of(ten_steps)
    assert list(shown) == [1, 10]
    for step, text in shown.items():
        group = [entry for entry in samples if entry["step"] == step][:GROUP_SIZE]
        assert text.startswith(f"    {group[0]['question']}\n\n")
        assert [line[4:] for line in text.split("\n\n")[2::2]] == [entry["text"] for entry in group]
        assert f"return {group[0]['return']}, {group[0]['finish_reason']}" in text


def texts_of(directory: Path) -> dict[int, str]:
    events = EventAccumulator(str(directory)).Reload().Tensors("samples/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events}


def test_samples_are_shown_again_in_a_resumed_run(ten_steps, tmp_path):
    history = read_lines(ten_steps / "metrics.jsonl")[:-1]
    shutil.copy(ten_steps / "samples.jsonl", tmp_path)
    log = MetricsLog(tmp_path, history, None, print)
    log.write(11, {"loss/total": 0.0})
    log.close()
    assert texts_of(tmp_path) == texts_of(ten_steps)


def test_a_run_without_tensorboard_says_so_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it raises an ImportError
    told: list[str] = []
    log = MetricsLog(tmp_path, [], None, told.append)
    for step in (1, 2):
        log.write(step, {"loss/total": 1.0})
    log.show_samples(1, ['{"question": "?", "text": "!", "return": 1, "prompt_index": 0}'])
    log.close()
    assert len(told) == 1
    assert told[0].startswith("the package tensorboard is not installed: the run goes on")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_step_that_does_not_end_is_in_the_trace(tmp_path, capfd):
    """As after Ctrl-C. The profiler itself prints nothing."""
    told: list[str] = []
    trace = StepTrace(tmp_path / "trace.json.gz", range(2, 3), told.append)
    trace.begin_step(2)
    trace.lap("sample")
    torch.ones(2) + 1
    trace.write()
    trace.write()  # at the end of the run
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {"step 2", "sample", "unfinished", "aten::add"} <= {event["name"] for event in events}
    assert (len(told), capfd.readouterr()) == (1, ("", ""))


@pytest.mark.slow
def test_wandb_without_a_key_logs_offline(load_script, tmp_path, monkeypatch, capsys):
    """On a machine without a login."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no ~/.netrc
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    sizes = "--steps 1 --prompts-per-step 2 --group-size 2 --max-new-tokens 6 --eval-prompts 2 --checkpoint-every 0"
    load_script("experiment_base/train.py").main([*sizes.split(), "--device", "cpu", "--wandb", "--name", "x"])
    wandb.teardown()  # its service would keep the settings and the directory of this test
    directory = tmp_path / "runs" / "experiment_base" / "x"
    assert [entry["step"] for entry in read_lines(directory / "metrics.jsonl")] == [0, 1, 1]
    assert capsys.readouterr().out.count("--wandb: no key is set") == 1
    assert list(directory.glob("wandb/offline-run-*/*.wandb"))


def test_completions_are_printed_at_step_1_and_every_tenth_step(ten_steps, samples):
    """The best and the worst of a group, with their question and rewards."""
    lines = (ten_steps / "output.txt").read_text(encoding="utf-8").splitlines()
    shown = [index for index, line in enumerate(lines) if line.endswith(", best of 2)")]
    assert [lines[index - 1].split(":")[0] for index in shown] == ["step 1", "step 10"]
    for index in shown:
        assert (lines[index - 1], lines[index]) in [
            (
                f"step {entry['step']}: {entry['question']}",
                f"  -> {' '.join(entry['text'].split())} (reward {entry['rewards']['correct']:g}, best of 2)",
            )
            for entry in samples
        ]
