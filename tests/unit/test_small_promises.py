"""Promises that a single line of code keeps: each test fails without that line."""

import json
import math
import os
from types import ModuleType, SimpleNamespace

import pytest
from transformers import AutoTokenizer, GenerationConfig

from common.errors import UserError
from common.evaluate import evaluate
from common.search import Hit, share_retrieved
from common.tools import parse_calls
from common.trajectory import Trajectory
from tasks import arithmetic

from harness.base.config import TINY_POLICY, RunConfig
from harness.data.rows import Row
from harness.evaluation.figures import Answer, Answers
from harness.evaluation.session import results_of
from harness.exporting.source import Source
from harness.exporting.writing import write_generation_config
from harness.logs import clock as step_clock
from harness.logs.samples import describe_best
from harness.models.loading import load_policy
from harness.search.documents import Document, read_corpus
from harness.search.remote_index import read_answer
from harness.search.sqlite_index import SqliteIndex, build_sqlite
from harness.task import row_checks
from harness.task.row_checks import try_solutions
from harness.task.scorer import Scorer
from harness.task.task import Task
from harness.task.task_file import TaskFile, import_file


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
        try_solutions(Scorer(TaskFile(import_file(file, "task", "loops")[0], "loops")), [row])


def test_a_number_of_thousands_of_digits_is_a_malformed_call():
    """Python's own message would mention one of its functions to the policy."""
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
    """Llama 3 has several; generation with only one of them runs on to its limit."""
    AutoTokenizer.from_pretrained(TINY_POLICY).save_pretrained(tmp_path)
    own = AutoTokenizer.from_pretrained(TINY_POLICY).eos_token_id
    GenerationConfig(eos_token_id=[own, 7], repetition_penalty=1.2).save_pretrained(tmp_path)
    write_generation_config(tmp_path)
    written = GenerationConfig.from_pretrained(tmp_path)
    assert written.eos_token_id == sorted([own, 7])
    assert written.repetition_penalty in (None, 1.0)


def own_task(**functions) -> Task:
    """The arithmetic task with other functions."""
    module = ModuleType("own")
    vars(module).update(vars(arithmetic) | functions)
    return Task(Scorer(TaskFile(module, "own")))


def test_a_solution_that_earns_half_is_refused():
    task = own_task(reward=lambda row, text: {"correct": 0.5, "format": 1.0})
    with pytest.raises(UserError, match="no completion can be right"):
        try_solutions(task.scorer, [Row({"question": "1+1", "answer": "2"})])


def test_a_judge_sees_no_system_turn():
    """It is meant for the policy."""
    asked = []
    judge = SimpleNamespace(
        weights={"preference": 1.0}, score=lambda prompts, texts: asked.extend(prompts) or [{"preference": 0.5}]
    )
    scorer = Scorer(TaskFile(arithmetic, "arithmetic"), judges=[judge], system_prompt="Be brief.")
    assert scorer.reward_together([Row({"question": "1+1", "answer": "2"})], ["2"], []) == [{"preference": 0.5}]
    assert [message["role"] for message in asked[0]] == ["user"]


def test_a_component_without_weight_may_be_no_number(capsys):
    """The component is only logged, and no update is skipped because of it."""
    row = Row({"question": "1+1", "answer": "2"})
    own_task(reward=lambda row, text: {"correct": 1.0, "format": math.nan}).reward(row, "")
    assert "skipped" not in capsys.readouterr().err
    own_task(reward=lambda row, text: {"correct": math.nan, "format": 0.0}).reward(row, "")
    assert "skipped" in capsys.readouterr().err


def test_documents_are_indexed_in_the_form_in_which_queries_are_searched(tmp_path):
    """Full-width letters and ligatures become ordinary letters, in documents and in queries."""
    documents = [Document("1", "the ship \uff26\uff41\uff52\uff44\uff49\uff4c"), Document("2", "other")]
    build_sqlite(tmp_path / "index", documents, "a hash")
    answers = SqliteIndex(tmp_path / "index", 5, "").search_all(["fardil", "\uff26ardil"], 2)
    assert [[hit.document for hit in hits] for hits in answers] == [["1"], ["1"]]


def test_the_completions_that_are_printed_are_the_best_and_the_worst_of_their_group():
    task = own_task()
    task.train_rows = [Row({"question": "What is 1+1?", "answer": "2"})]
    group = [Trajectory([1, 2], 1, [0, 1], [0.0, 0.0], 0) for _ in range(3)]
    for row, text, correct in zip(group, ("low", "high", "middle"), (0.0, 1.0, 0.5), strict=True):
        row.text, row.rewards = text, {"correct": correct, "format": 0.0}
    shown = ["What is 1+1?", "  -> high (reward 1, best of 3)", "  -> low (reward 0, the worst)"]
    assert describe_best(task, group).splitlines() == shown


def test_costs_are_of_all_processes(monkeypatch):
    """Memory comes from the process that needs most, and tokens are divided by seconds."""
    monkeypatch.setattr(step_clock, "gather", lambda own: [own, (60, 0.5, {}, 2**50)])
    clock = step_clock.StepClock("cpu")
    clock._began -= 10
    costs = clock.costs(num_tokens=40)
    assert costs["memory/peak_bytes"] == 2**50
    assert costs["time/tokens_per_second"] == pytest.approx(10, rel=0.01)
    assert costs["time/waiting"] == pytest.approx(0.25, rel=0.01)


def test_a_server_that_gives_more_hits_than_asked_for_is_cut():
    hit = {"document": {"id": "d", "contents": "text"}, "score": 1.0}
    assert [len(hits) for hits in read_answer(json.dumps({"result": [[hit] * 5]}).encode(), 1, 2)] == [2]


def test_half_a_point_is_no_right_sample_in_an_evaluations_results():
    task = own_task()
    row = Row({"question": "What is 1+1?", "answer": "2"})
    row.question, task.eval_rows, task.sources = row["question"], [row], {"data": "rows.jsonl"}
    half, right = Answer(0.5, "2", 3, False, {}), Answer(1.0, "2", 3, False, {})
    results = results_of(task, Answers([half], ["2"], [[half, right]]), seed=0)
    assert results["questions"][0]["right"] == 1


def test_directories_of_a_corpus_are_read_in_the_order_of_their_names(tmp_path, monkeypatch):
    """In whatever order a file system lists them: the ids of results and the content hash depend on the order."""
    walk = os.walk

    def backwards(*arguments, **settings):
        for folder, folders, names in walk(*arguments, **settings):
            folders.sort(reverse=True)
            yield folder, folders, names

    monkeypatch.setattr(os, "walk", backwards)
    for name in ("b", "a", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(f"text of {name}")
    found = [document.id for document in read_corpus(str(tmp_path), 100, 0)]
    assert found == ["a/x.txt#1", "b/x.txt#1", "c/x.txt#1"]
