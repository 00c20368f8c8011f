"""Countdown's problems and the lessons about them: true line by line, disjoint, the same every time, and weighted."""

import importlib.util
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import cross_entropy

from common.evaluate import evaluate
from common.policy import Policy
from tasks import countdown
from tasks.grammars.countdown_grammar import MAX_TARGET, Problem, pool, tries

from harness.base.config import BUNDLED, PolicyConfig
from harness.data.data import read_rows
from harness.models.loading import load_policy

pytestmark = pytest.mark.all_questions

ROOT = Path(__file__).resolve().parents[2]
ASKED = re.compile(r"(Make|Try) (\d+) from (\d+), (\d+), (\d+)\.")
NUM_ROWS = 250  # of each lesson


@pytest.fixture(scope="module")
def train(load_script) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "experiment_sft")
        return load_script("experiment_sft/train.py")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(PolicyConfig(device="cpu"))


@pytest.fixture(scope="module")
def rows(train) -> list[dict]:
    """`NUM_ROWS` of each lesson: verb, problem, and what the assistant says."""
    found = []
    for row in train.countdown_conversations(NUM_ROWS, NUM_ROWS, NUM_ROWS, seed=1):
        user, assistant = row["messages"]
        verb, target, *nums = ASKED.fullmatch(user["content"]).groups()
        problem = Problem(tuple(map(int, nums)), int(target))
        found.append({"verb": verb, "problem": problem, "said": assistant["content"]})
    return found


def read_line(line: str, problem: Problem) -> tuple[str, int, str]:
    """Expression, value and relation of a try; everything that it says has been checked by another evaluator."""
    expression, step, value, relation, target = re.fullmatch(r"([^=]+)=([^=]+)=(\d+)([<>=])(\d+)", line).groups()
    exact, used = countdown.read_expression(expression)
    assert sorted(used) == sorted(problem.nums)
    assert exact == int(value) == countdown.evaluate_expression(step)
    inner = re.search(r"\((\d+)([-+*/])(\d+)\)", expression)[0]
    assert expression.replace(inner, str(countdown.evaluate_expression(inner))) == step
    assert int(target) == problem.target
    assert {"<": int(value) < int(target), ">": int(value) > int(target), "=": value == target}[relation]
    return expression, int(value), relation


def test_every_line_of_the_lessons_is_true(rows):
    relations = Counter()
    for row in rows[:NUM_ROWS]:
        assert row["verb"] == "Try"
        relations[read_line(row["said"], row["problem"])[2]] += 1
    assert min(relations.values()) > NUM_ROWS / 5  # each of < > = is taught
    num_tries = Counter()
    for row in rows[NUM_ROWS:]:
        problem, (thought, end, answer) = row["problem"], row["said"].removeprefix("<think>").partition("</think>")
        lines = [read_line(line, problem) for line in thought.split()]
        assert row["verb"] == "Make"
        assert len({value for _, value, _ in lines}) == len(lines)  # nothing is tried twice
        assert "=" not in [relation for *_, relation in lines[:-1]]
        num_tries[len(lines)] += 1
        reward = countdown.reward({"nums": problem.nums, "target": problem.target}, row["said"])
        if end:
            assert answer == f"<answer>{lines[-1][0]}</answer>"
            assert reward["correct"] == 1
        else:  # cut off
            assert len(lines) == 8
            assert lines[-1][2] != "="
            assert reward["answered"] == 0
    assert set(num_tries) == set(range(1, 9))


def test_problems_of_the_files_and_the_lessons_are_disjoint(rows):
    files = [countdown.TRAIN_DATA, countdown.EVAL_DATA]
    sets = []
    for file, only_pool in zip(files, ("train", "heldout"), strict=True):
        problems = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found = {(tuple(sorted(row["nums"])), row["target"]) for row in problems}
        assert len(found) == len(problems)
        assert all(1 <= row["target"] <= MAX_TARGET and row["num_numbers"] == 3 for row in problems)
        assert {pool(Problem(tuple(row["nums"]), row["target"])) for row in problems} == {only_pool}
        assert all(row["target"] in tries(tuple(row["nums"])) for row in problems)
        sets.append(found)
    assert [len(found) for found in sets] == [2048, 512]
    sets.append({(tuple(sorted(row["problem"].nums)), row["problem"].target) for row in rows})
    assert all(first.isdisjoint(second) for first, second in itertools.combinations(sets, 2))


def test_the_data_files_are_those_that_the_script_writes(tmp_path):
    path = tmp_path / "make_countdown_tasks.py"  # it writes beside itself
    path.write_bytes((ROOT / "data" / path.name).read_bytes())
    spec = importlib.util.spec_from_file_location("make_countdown_tasks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    for name in ("countdown_tasks.jsonl", "countdown_tasks_heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (ROOT / "data" / name).read_bytes()


def test_verdicts_and_answers_are_emphasised(train, policy):
    texts = {
        "(7*5)+2=35+2=37<100": ["37<100"],
        "<think>12-(5*2)=12-10=2<24 (12*5)-2=60-2=58=58</think><answer>(12*5)-2</answer>": ["2<24", "58=58"],
    }
    for text, verdicts in texts.items():
        messages = [{"role": "user", "content": "Make 37<55 from 1."}, {"role": "assistant", "content": text}]
        (row,) = train.encode_rows(train.Config(lessons="countdown"), policy, [{"messages": messages}])
        pieces = [policy.tokenizer.decode([token]) for token in row.ids]
        weighted = list(zip(pieces, row.weights, row.action_mask, strict=True))
        assert "".join(piece for piece, weight, _ in weighted if weight == 5) == "".join(verdicts)
        answer = "".join(piece for piece, weight, _ in weighted if weight == 2)
        assert answer == re.sub(r"^.*</think>|^[^<]+<\d+$", "", text)
        assert {weight for _, weight, flag in weighted if not flag} == {1}
        assert ("<|im_end|>", 1, 1) in weighted
    messages[1]["content"] = "<think>12-(5*2)=12-10=2<24 "
    (row,) = train.encode_rows(train.Config(lessons="countdown"), policy, [{"messages": messages}])
    unlearned = [token for token, weight in zip(row.ids, row.weights, strict=True) if weight == 0]
    assert policy.tokenizer.decode(unlearned) == " <|im_end|>"


@pytest.fixture
def weighted_rows(train, policy, rows):
    messages = [
        [{"role": "user", "content": "Try it."}, {"role": "assistant", "content": row["said"]}]
        for row in (*rows[:2], *rows[NUM_ROWS : NUM_ROWS + 4])
    ]
    return train.encode_rows(train.Config(lessons="countdown"), policy, [{"messages": turns} for turns in messages])


def gradient_of(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.grad.double().flatten() for parameter in policy.parameters()])


@pytest.mark.parametrize("micro_batch_size", [4, 256])
def test_the_update_is_a_weighted_mean(train, policy, weighted_rows, micro_batch_size):
    policy.zero_grad()
    total = weights = 0.0
    for row in weighted_rows:
        logits = policy.model(torch.tensor([row.ids])).logits[0]
        for position in range(1, len(row.ids)):
            if row.action_mask[position]:
                loss = cross_entropy(logits[position - 1], torch.tensor(row.ids[position]))
                total, weights = total + row.weights[position] * loss, weights + row.weights[position]
    expected = total / weights
    expected.backward()
    gradient = gradient_of(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    config = train.Config(micro_batch_size=micro_batch_size, max_grad_norm=1e9)
    metrics = train.update(config, policy, optimizer, train.collate_weighted(weighted_rows, policy.pad_id, "cpu"))
    assert metrics["loss/total"] == pytest.approx(expected.item(), rel=1e-5)
    assert (gradient_of(policy) - gradient).norm() < 1e-5 * gradient.norm()


def test_weights_of_1_change_no_bit(train, policy, weighted_rows):
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    results = []
    for are_given in (True, False):
        for row in weighted_rows:
            row.weights = [1.0] * len(row.ids) if are_given else []
        batch = train.collate_weighted(weighted_rows, 0, "cpu")
        metrics = train.update(train.Config(micro_batch_size=4), policy, optimizer, batch)
        results.append((metrics, gradient_of(policy)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.slow
def test_lessons_of_countdown_run_and_are_examined(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ("--num-copying", "20", "--num-reasoning", "20", "--num-answering", "0", "--tokens-per-batch", "2048")
    flags = ("--lr", "1e-4", "--eval-prompts", "2", "--device", "cpu", "--name", "a")
    train.main(["--model", "tiny", "--lessons", "countdown", *sizes, *flags])
    directory = tmp_path / "runs" / "experiment_sft" / "a"
    losses = [json.loads(line)["loss/total"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3
    assert max(losses) < 10
    summary = json.loads((directory / "summary.json").read_text())
    assert 0 <= summary["eval/sampled/pass@8"] <= 1
    assert not any(name.startswith("eval_forced") for name in summary)
    renewed = load_policy(PolicyConfig(device="cpu", model=str(directory / "final")))
    embeddings = renewed.model.get_input_embeddings().weight
    less, more = renewed.tokenizer.encode("<>", add_special_tokens=False)
    assert torch.cosine_similarity(embeddings[less], embeddings[more], dim=0) < 0.5  # they were 0.99


@pytest.mark.slow
def test_the_bundled_policy_searches():
    directory, tiny = BUNDLED["tiny_countdown"], BUNDLED["tiny"]
    assert (directory / "model.safetensors").stat().st_size < 4_000_000
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert (directory / name).read_bytes() == (tiny / name).read_bytes()
    policy = load_policy(PolicyConfig(device="cpu", model="tiny_countdown"))
    rows = read_rows(str(countdown.EVAL_DATA), countdown.FIELDS)[:24]
    metrics = evaluate(policy, rows, countdown, max_new_tokens=96, num_samples=2, generation_batch_size=64).metrics
    assert 0.2 < metrics["sampled/accuracy"] < 0.7  # there is something to train on, and something to learn
    assert metrics["sampled/false_claim"] < 0.1
