"""Promises that one line keeps: each test fails without it."""

import json
from types import ModuleType

import pytest
from transformers import AutoTokenizer, GenerationConfig

from common.errors import UserError
from common.evaluate import evaluate
from common.search import Hit, share_retrieved
from common.tools import parse_calls
from tasks import arithmetic

from harness.base.checks import check_texts
from harness.base.config import TINY_POLICY, RunConfig
from harness.data import row_checks
from harness.data.row_checks import try_solutions
from harness.data.task import Row, Task, import_file
from harness.exporting.exported_weights import write_generation_config
from harness.exporting.source import Source
from harness.models.loading import load_policy


def test_a_name_with_a_hash_of_its_own_is_found_by_its_chunks():
    hits = [Hit("notes/c#.md#2", "text", 1.0)]
    assert share_retrieved({"supporting": ["notes/c#.md"]}, hits) == 1
    assert share_retrieved({"supporting": ["notes/c"]}, hits) == 0


def test_a_solution_that_loops_is_stopped(tmp_path, monkeypatch):
    file = tmp_path / "loops.py"
    file.write_text(
        "REWARD_WEIGHTS = {'correct': 1.0}\n"
        "def messages(row, system_prompt=''): return [{'role': 'user', 'content': 'x'}]\n"
        "def reward(row, text): return {'correct': 1.0}\n"
        "def solution(row):\n    while True: pass\n"
    )
    monkeypatch.setattr(row_checks, "PATIENCE", 0.3)
    row = Row({})
    row.place = "rows.jsonl:1"
    with pytest.raises(UserError, match=r"^rows\.jsonl:1: solution\(row\) of --task loops has not ended"):
        try_solutions(Task(import_file(file, "task", "loops")[0], "loops"), [row], "loops")


@pytest.mark.parametrize("name", ["model", "data", "eval_data"])
def test_an_empty_path_is_refused_by_its_flag(name):
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} is empty"):
        check_texts(RunConfig(**{name: ""}))


def test_a_number_of_thousands_of_digits_is_a_malformed_call():
    """Python's own message would name one of its functions to the policy."""
    (call,), _ = parse_calls('<tool_call>{"name": "f", "arguments": {"x": %s}}</tool_call>' % ("9" * 5000), "hermes")
    assert call.error == "a number has more than 1000 digits"


def test_half_a_point_is_no_right_answer_in_pass_at_k():
    """A task may reward in parts: correct = 0.5 is not a solved question."""

    task = ModuleType("half")
    vars(task).update(vars(arithmetic))
    task.reward, task.describe = lambda row, text: {"correct": 0.5}, lambda row, text: {}
    rows = [{"question": "What is 1 plus 1?", "answer": "2"}]
    metrics = evaluate(
        load_policy(RunConfig(device="cpu")), rows, task, max_new_tokens=2, num_samples=4, seed=0
    ).metrics
    assert metrics["sampled/pass@4"] == 0
    assert metrics["sampled/accuracy"] == 0.5


def test_the_card_of_a_checkpoint_shows_no_later_figures(tmp_path):
    lines = [{"step": step, "eval/greedy/accuracy": step / 10} for step in (0, 2, 4, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text(json.dumps({"after": {"greedy/accuracy": 0.9}}))
    source = Source.__new__(Source)
    for name, value in {"run": tmp_path, "step": 4}.items():
        object.__setattr__(source, name, value)
    assert source.figures()[1] == {"greedy/accuracy": 0.4}


def test_all_end_of_turn_ids_are_exported(tmp_path):
    """Llama 3 has several; generation that knows one of them runs on to its limit."""
    AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(tmp_path)
    own = AutoTokenizer.from_pretrained(TINY_POLICY).eos_token_id
    GenerationConfig(eos_token_id=[own, 7], repetition_penalty=1.2).save_pretrained(tmp_path)
    write_generation_config(tmp_path)
    written = GenerationConfig.from_pretrained(tmp_path)
    assert written.eos_token_id == sorted([own, 7])
    assert written.repetition_penalty in (None, 1.0)
