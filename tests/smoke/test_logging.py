"""A run's logs: the schema of samples.jsonl, the same values everywhere, and W&B, whose faults end no run."""

import gzip
import io
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from run_files import read_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.chat import encode_prompt
from common.policy import Policy
from tasks import arithmetic
from tasks.arithmetic import TRAIN_DATA

from harness.base.config import RunConfig
from harness.logs.clock import StepTrace
from harness.logs.metrics import MetricsLog
from harness.models.loading import load_policy

pytestmark = pytest.mark.all_questions

LISTS_OF_A_ROW = ("action_mask", "sampler_log_probs", "old_log_probs", "log_probs_ref", "entropy")
LISTS_OF_AN_UPDATE = ("log_probs", "terms", "push", "ratio", "clipped", "kl")
STRINGS, NUMBERS = ("question", "answer", "text", "finish_reason"), ("return", "advantage")
INDICES = ("step", "prompt_index", "completion_index", "prompt_length")
LISTS = ("ids", *LISTS_OF_A_ROW, "updates")
SCHEMA = {"rewards": dict, **dict.fromkeys(STRINGS, str), **dict.fromkeys(NUMBERS, float)}
SCHEMA |= dict.fromkeys(INDICES, int) | dict.fromkeys(LISTS, list)
GROUPS, GROUP_SIZE = 3, 4


@pytest.fixture(scope="module")
def ten_steps(load_script, tmp_path_factory) -> Path:
    """The directory of a run of ten steps, with two epochs over three minibatches of one group each."""
    place = tmp_path_factory.mktemp("ten_steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "stdout", output := io.StringIO())
        load_script("experiment_base/train.py").main(
            [
                *("--steps", "10", "--prompts-per-step", str(GROUPS), "--group-size", str(GROUP_SIZE)),
                *("--epochs-per-step", "2", "--minibatch-size", str(GROUP_SIZE), "--max-new-tokens", "12"),
                *("--eval-prompts", "2", "--eval-every", "5", "--temperature", "1.3", "--device", "cpu", "--name", "x"),
            ]
        )
    directory = place / "runs" / "experiment_base" / "x"
    (directory / "output.txt").write_text(output.getvalue(), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def samples(ten_steps) -> list[dict]:
    return read_lines(ten_steps / "samples.jsonl")


@pytest.fixture(scope="module")
def start_policy() -> Policy:
    """The policy at the beginning of the run."""
    return load_policy(RunConfig(device="cpu", dtype="float32", attn_implementation="sdpa"), temperature=1.3)


def scored(policy: Policy, entry: dict) -> tuple[list[float], list[float]]:
    """Log-probabilities and entropy at a row's action tokens, in the layout of samples.jsonl."""
    with torch.no_grad():
        output = policy(torch.tensor([entry["ids"]]), torch.tensor([entry["action_mask"][1:]]))
    return tuple([0.0, *values[0].tolist()] for values in (output.log_probs, output.entropy))


@pytest.mark.slow
def test_the_text_of_every_sampled_token_is_known(ten_steps, samples, start_policy):
    """Each id occurs once; together they spell the samples."""
    lines = read_lines(ten_steps / "tokens.jsonl")
    texts = {line["id"]: line["text"] for line in lines}
    assert len(texts) == len(lines)
    tokenizer, ends = start_policy.tokenizer, start_policy.end_of_turn_ids
    assert [line["id"] for line in lines if line.get("end_of_turn")] == ends
    assert {line["id"] for line in lines if line.get("special")} <= set(tokenizer.added_tokens_decoder)
    for entry in samples:
        assert "".join(texts[i] for i in entry["ids"]) == tokenizer.decode(entry["ids"])


def test_findings_are_kept_for_every_step_that_they_hold_at(ten_steps):
    lines = read_lines(ten_steps / "diagnosis.jsonl")
    cut_off = [line["step"] for line in lines if line["finding"] == "completions are cut off"]
    shares = [row["completion/truncated"] for row in read_lines(ten_steps / "metrics.jsonl") if "loss/total" in row]
    assert cut_off == [step for step in range(5, 11) if sum(shares[step - 5 : step]) / 5 > 0.2]
    assert cut_off
    assert all(line["sentence"].endswith("raise --max-new-tokens, now 12") for line in lines if line["step"] in cut_off)


def test_a_sample_has_all_fields_and_one_entry_per_token(samples):
    """Every list of a row is as long as its ids."""
    for entry in samples:
        assert {name: type(value) for name, value in entry.items()} == SCHEMA
        assert len(entry["updates"]) == 2
        assert all(update.keys() == {"epoch", "minibatch", *LISTS_OF_AN_UPDATE} for update in entry["updates"])
        lists = [entry[name] for name in LISTS_OF_A_ROW]
        lists += [update[name] for update in entry["updates"] for name in LISTS_OF_AN_UPDATE]
        assert {len(values) for values in lists} == {len(entry["ids"])}


def test_only_sampled_tokens_have_nonzero_entries(samples):
    for entry in samples:
        prompt_length, mask = entry["prompt_length"], entry["action_mask"]
        assert mask == [0] * prompt_length + [1] * (len(mask) - prompt_length)
        lists = [entry[name] for name in LISTS_OF_A_ROW[1:]] + [update["log_probs"] for update in entry["updates"]]
        for values in lists:
            assert any(values[prompt_length:])
        lists += [update[name] for update in entry["updates"] for name in LISTS_OF_AN_UPDATE]
        for values in lists:
            assert not any(values[:prompt_length])
            assert all(map(math.isfinite, values))
        assert all(value < 0 for value in entry["sampler_log_probs"][prompt_length:] if value)
        assert all(value >= 0 for value in entry["entropy"])


def test_the_fields_of_a_sample_agree(samples, start_policy):
    """Ids, text, question, rewards and finish reason."""
    rows = read_lines(TRAIN_DATA)
    for entry in samples:
        row, tokenizer = rows[entry["prompt_index"]], start_policy.tokenizer
        assert (entry["question"], entry["answer"]) == (row["question"], row["answer"])
        prompt, completion = entry["ids"][: entry["prompt_length"]], entry["ids"][entry["prompt_length"] :]
        assert prompt == encode_prompt(tokenizer, arithmetic.messages(row))
        assert entry["text"] == tokenizer.decode(completion, skip_special_tokens=True)
        assert entry["rewards"] == arithmetic.reward(row, entry["text"])
        has_stopped = completion[-1] in start_policy.end_of_turn_ids
        assert entry["finish_reason"] == ("stop" if has_stopped else "length")
        assert len(completion) <= 12
        assert has_stopped or len(completion) == 12


def test_most_steps_keep_two_groups_and_every_tenth_all_rows(samples):
    for step in range(1, 11):
        rows = [(entry["prompt_index"], entry["completion_index"]) for entry in samples if entry["step"] == step]
        num_groups = GROUPS if step == 10 else 2
        assert len(set(rows)) == len(rows) == num_groups * GROUP_SIZE
        assert len({prompt for prompt, _ in rows}) == num_groups
        assert {completion for _, completion in rows} == set(range(GROUP_SIZE))


def test_the_first_update_of_a_step_sees_the_policy_that_sampled(samples):
    first = [entry for entry in samples if entry["updates"][0]["minibatch"] == 0]
    assert {entry["step"] for entry in first} > {10}
    for entry in first:
        assert entry["updates"][0]["log_probs"] == pytest.approx(entry["sampler_log_probs"], abs=1e-4)
        assert entry["old_log_probs"] == pytest.approx(entry["sampler_log_probs"], abs=1e-4)


def test_each_epoch_updates_every_row_once_in_its_own_order(samples):
    """And each epoch sees another policy than the previous one."""
    for entry in samples:
        assert [update["epoch"] for update in entry["updates"]] == [0, 1]
    places = {tuple(update["minibatch"] for update in entry["updates"]) for entry in samples}
    assert {place for both in places for place in both} == set(range(GROUPS))
    assert any(first != second for first, second in places)
    pairs = [(entry["updates"][1]["log_probs"], entry["old_log_probs"]) for entry in samples]
    assert max(abs(x - y) for new, old in pairs for x, y in zip(new, old, strict=True)) > 1e-3


def test_log_probs_and_entropies_can_be_recomputed_from_the_initial_policy(samples, start_policy):
    """The sampler's and the first update's for the rows that this policy sampled, and the reference's for all rows."""
    rows = [entry for entry in samples if entry["step"] == 1 and entry["updates"][0]["minibatch"] == 0]
    assert rows
    for entry in rows:
        log_probs, entropy = scored(start_policy, entry)
        for name in ("sampler_log_probs", "old_log_probs", "log_probs_ref"):
            assert entry[name] == pytest.approx(log_probs, abs=1e-4)
        assert entry["entropy"] == pytest.approx(entropy, abs=1e-5)
    log_probs, _ = scored(start_policy, samples[-1])
    assert samples[-1]["log_probs_ref"] == pytest.approx(log_probs, abs=1e-4)
    assert samples[-1]["sampler_log_probs"] != pytest.approx(log_probs, abs=1e-3)  # the policy has changed


def test_tensorboard_holds_the_values_of_metrics_jsonl(ten_steps):
    events = EventAccumulator(str(ten_steps), size_guidance={"scalars": 0}).Reload()
    shown = {(name, event.step, event.value) for name in events.Tags()["scalars"] for event in events.Scalars(name)}
    written = {
        (name, entry["step"], torch.tensor(value).float().item())  # TensorBoard has single precision
        for entry in read_lines(ten_steps / "metrics.jsonl")
        for name, value in entry.items()
        if name != "step"
    }
    assert len({name for name, _, _ in written}) > 20
    assert shown == written


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
    shown = [index for index, line in enumerate(lines) if line.endswith(", best of 4)")]
    assert [lines[index - 1].split(":")[0] for index in shown] == ["step 1", "step 10"]
    for index in shown:
        assert (lines[index - 1], lines[index]) in [
            (
                f"step {entry['step']}: {entry['question']}",
                f"  -> {' '.join(entry['text'].split())} (reward {entry['rewards']['correct']:g}, best of 4)",
            )
            for entry in samples
        ]
