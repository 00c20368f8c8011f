"""Evaluation: pass@k is unbiased, and every metric is computed from the sampled completions."""

import dataclasses
import itertools
import json
import re
from statistics import fmean
from types import SimpleNamespace

import pytest

from common.chat import decode, encode_prompt
from common.evaluate import EVALUATION, Answer, Evaluation, Greedy, evaluate, pass_at_k
from common.sampling import sample
from common.trajectory import Trajectory
from tasks import arithmetic

from harness.base.config import RunConfig
from harness.evaluation.held_out import evaluate_held_out
from harness.logs.summary import divide_gain
from harness.models.loading import load_policy
from harness.run.start import start_run
from harness.task.task import load_task


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_equals_an_enumeration_of_all_choices(n):
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            choices = [any(choice) for choice in itertools.combinations(samples, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(choices) / len(choices))
    with pytest.raises(ValueError, match=f"pass@{n + 1} needs at least {n + 1} samples, not {n}"):
        pass_at_k(n=n, c=1, k=n + 1)


ROWS = [{"question": f"What is {number}+{number}?", "answer": str(2 * number)} for number in range(1, 11)]

# A random policy never answers right; the rewards of this task depend on the length of its text.
LENGTH_TASK = SimpleNamespace(
    messages=arithmetic.messages,
    reward=lambda row, text: {"correct": float(len(text) % 3 == int(row["answer"]) % 3), "brief": 1 / (1 + len(text))},
    describe=lambda row, text: {"even": float(len(text) % 2 == 0), "odd": float(len(text) % 2), "count": len(text) % 2},
)


@pytest.fixture(scope="module")
def policy(make_policy, tokenizer):
    return make_policy(
        1024, end_of_turn_ids=(tokenizer.eos_token_id,), pad_id=tokenizer.pad_token_id, tokenizer=tokenizer
    )


def test_all_metrics_are_those_of_the_sampled_completions(policy):
    num_samples, budget = 4, 150
    metrics, greedy, sampled_answers = evaluate(
        policy, ROWS, LENGTH_TASK, max_new_tokens=budget, num_samples=num_samples, seed=3, system_prompt="Think."
    )
    prompts = [encode_prompt(policy.tokenizer, arithmetic.messages(row, "Think.")) for row in ROWS]
    for mode, group_size in (("greedy", 1), ("sampled", num_samples)):
        trajectories = sample(
            policy, prompts, group_size, max_new_tokens=budget, key=(3, EVALUATION), greedy=mode == "greedy"
        )
        texts = [decode(policy.tokenizer, row.completion_ids) for row in trajectories]
        if mode == "greedy":
            assert [answer.text for answer in greedy] == texts
        asked = [ROWS[row.prompt_index] for row in trajectories]
        right = [LENGTH_TASK.reward(row, text)["correct"] for row, text in zip(asked, texts, strict=True)]
        even = [len(text) % 2 == 0 for text in texts]
        expected = {
            "accuracy": fmean(right),
            "even": fmean(even),
            "odd": 1 - fmean(even),
            "count": 1 - fmean(even),  # an int is not a flag, and has no accuracy
            "reward_brief": fmean(1 / (1 + len(text)) for text in texts),
            "length": fmean(len(row.completion_ids) for row in trajectories),
            "stopped": fmean(row.finish_reason == "stop" for row in trajectories),
        }
        for name, is_even in (("accuracy_even", True), ("accuracy_odd", False)):
            if among := [c for c, e in zip(right, even, strict=True) if e == is_even]:
                expected[name] = fmean(among)
        if mode == "sampled":
            groups = [right[i : i + group_size] for i in range(0, len(right), group_size)]
            expected[f"pass@{group_size}"] = fmean(any(group) for group in groups)
            assert expected.keys() >= {"accuracy_even", "accuracy_odd"}  # the texts are varied enough
            assert 0 < expected["accuracy"] < expected["pass@4"] < 1
            assert 0 < expected["stopped"] < 1
            described = [LENGTH_TASK.describe({}, text) for text in texts]
            questions = [row.prompt_index for row in trajectories]
            assert sampled_answers == list(map(Answer, questions, right, described))
        found = {name: value for name, value in metrics.items() if name.startswith(f"{mode}/")}
        assert found == {f"{mode}/{name}": pytest.approx(value) for name, value in expected.items()}


def test_pass_at_k_is_over_the_samples_of_one_question(policy):
    task = SimpleNamespace(
        messages=arithmetic.messages,
        reward=lambda row, text: {"correct": float(int(row["answer"]) <= 6)},
        describe=lambda row, text: {},
    )
    metrics = evaluate(policy, ROWS, task, max_new_tokens=2, num_samples=4).metrics
    assert metrics["sampled/pass@4"] == pytest.approx(0.3)
    assert metrics["sampled/accuracy"] == metrics["greedy/accuracy"] == pytest.approx(0.3)


def test_conversations_are_asked_for_and_measured_like_answers(policy):
    asked = []

    def converse(rows, indices, group_size, key, greedy):
        asked.append((indices, group_size, key, greedy))
        turns = [("assistant", "a"), ("tool", "b"), ("assistant", "c")]
        talks = [(turns, {"correct": 1.0}), (turns[:1], {"correct": 0.0})]
        return [
            Trajectory([5, 6], 1, [0, 1], [0.0, -1.0], index, turns=talks[index][0], rewards=talks[index][1])
            for index in indices
            for _ in range(group_size)
        ]

    settings = {"max_new_tokens": 9, "num_samples": 2, "seed": 3, "generation_batch_size": 2}
    done: list[int] = []
    found = evaluate(policy, ROWS[:2], LENGTH_TASK, converse=converse, progress=done.append, **settings)
    key = (3, EVALUATION)
    assert asked == [([0, 1], 1, key, True), ([0], 2, key, False), ([1], 2, key, False)]
    assert done == [2, 2, 2]
    for mode in ("greedy", "sampled"):
        assert [found.metrics[f"{mode}/{name}"] for name in ("turns", "accuracy", "length")] == [1.5, 0.5, 1]
    assert [(len(answer.turns), answer.rewards["correct"]) for answer in found.greedy] == [(3, 1.0), (1, 0.0)]


def test_a_prefix_begins_all_completions_and_is_not_counted(policy):
    metrics, greedy, _ = evaluate(policy, ROWS[:3], arithmetic, max_new_tokens=10, prefix="<think>")
    texts = [answer.text for answer in greedy]
    assert all(text.startswith("<think>") for text in texts)
    assert metrics["greedy/length"] <= 10
    forced = policy.tokenizer.encode("<think>", add_special_tokens=False)
    prompts = [encode_prompt(policy.tokenizer, arithmetic.messages(row)) + forced for row in ROWS[:3]]
    rows = sample(policy, prompts, 1, max_new_tokens=10, key=(0,), greedy=True)
    assert texts == ["<think>" + decode(policy.tokenizer, row.completion_ids) for row in rows]


def test_a_task_without_correct_has_rewards_and_no_accuracy(policy):
    task = SimpleNamespace(
        messages=arithmetic.messages, reward=lambda row, text: {"brief": 1.0}, describe=lambda *_: {}
    )
    metrics, _, answers = evaluate(policy, ROWS[:2], task, max_new_tokens=4, num_samples=2)
    assert {name.partition("/")[2] for name in metrics} == {"reward_brief", "length", "stopped"}
    assert answers == []


# The gain, divided --------------------------------------------------------------------------------------------------

STYLES = {True: {"reasoned": 1.0, "direct": 0.0, "steps": 3.0}, False: {"reasoned": 0.0, "direct": 1.0, "steps": 0.0}}


def answers(question: int, reasoned: tuple[int, int], direct: tuple[int, int]) -> list[Answer]:
    """Answers to a question: (right, of how many) among the reasoned ones, and among the direct ones."""
    return [
        Answer(question, float(index < right), STYLES[how])
        for how, (right, total) in ((True, reasoned), (False, direct))
        for index in range(total)
    ]


KINDS = [(2, 1), (4, 2)]  # for questions 0 and 1


@pytest.mark.parametrize("reasoned", [(2, 9), (0, 7), (3, 10), (0, 10), (10, 0), (0, 0)])
def test_the_parts_of_a_gain_add_up_to_it(reasoned):
    before, after = (
        answers(0, (share // 2, share), ((10 - share) // 3, 10 - share)) + answers(1, (1, 4), (1, 6))
        for share in reasoned
    )
    gain = sum(answer.correct for answer in after) / 20 - sum(answer.correct for answer in before) / 20
    parts = divide_gain(before, after, KINDS)
    assert list(parts) == ["choice of style", "better if reasoned", "better if direct"]
    assert sum(parts.values()) == pytest.approx(gain)


def test_reasoning_on_hard_questions_is_not_mistaken_for_skill():
    before = answers(0, (10, 10), (0, 0)) + answers(1, (1, 2), (0, 8))
    after = answers(0, (10, 10), (0, 0)) + answers(1, (5, 10), (0, 0))
    assert divide_gain(before, after, KINDS) == pytest.approx(
        {"choice of style": 0.2, "better if reasoned": 0.0, "better if direct": 0.0}
    )


@pytest.mark.parametrize("description", [{}, {"reasoned": 1.0, "checked": 1.0}, {"steps": 3.0}, {"a": 1, "b": 0}])
def test_a_gain_without_styles_or_across_a_changed_task_is_not_divided(description):
    some, reasoned = [Answer(0, 1.0, description)], [Answer(0, 1.0, STYLES[True])]
    for before, after in ((some, some), ([], []), (reasoned, []), (reasoned, [Answer(0, 1.0, {"short": 1.0})])):
        assert divide_gain(before, after, KINDS) == {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RunConfig):
    steps: int = 1
    max_new_tokens: int = 12


def test_a_run_asks_held_out_questions_with_its_settings():
    policy = load_policy(RunConfig(device="cpu"))
    config = Settings(eval_prompts=4, max_new_tokens=8, seed=3, system_prompt="Be brief.")
    task = load_task(config)
    settings = {"max_new_tokens": 8, "system_prompt": "Be brief.", "num_samples": 2, "seed": 3}
    found = evaluate_held_out(config, task, policy, num_samples=2)
    assert found == evaluate(policy, task.eval_rows, task, **settings)
    for other in ({"max_new_tokens": 3}, {"system_prompt": ""}, {"seed": 4}, {"num_samples": 1}):
        assert found != evaluate(policy, task.eval_rows, task, **(settings | other))
    assert found != evaluate(policy, task.train_rows[:4], task, **settings)


def gain(style: str) -> tuple[Evaluation, Evaluation]:
    """An evaluation in which an answer of this style is wrong, and one in which it is right."""
    return tuple(
        Evaluation({"greedy/accuracy": accuracy}, [Greedy("", [], {})], [Answer(0, correct, {style: 1.0})])
        for accuracy, correct in ((0.25, 0.0), (0.75, 1.0))
    )


def test_a_run_compares_with_its_evaluation_before_training(tmp_path, capsys):
    config = Settings(eval_prompts=1, dtype="float32", threads=1, device="cpu", runs_dir=str(tmp_path), name="mine")
    before, after = gain("reasoned")
    with start_run(config, load_task(config)) as run:
        run.log_before(before)
        run.finish(after)
    summary = json.loads((run.directory / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.75)
    assert (summary["before"], summary["after"]) == (before.metrics, after.metrics)
    assert summary["gain"] == {"choice of style": 0.0, "better if reasoned": 1.0}
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert first == __doc__.partition("\n")[0]
    assert second == "policy tiny on cpu (1 thread, float32); seed 0; task arithmetic; 1 step"
    assert re.fullmatch(r"settings: .*\beval_prompts=1 .*  \(--verbose shows all\)", third)
    assert "runs_dir" not in third  # said elsewhere
    with start_run(dataclasses.replace(config, verbose=True, name="other"), load_task(config)):
        printed = capsys.readouterr().out
    assert re.search(
        r"^settings:\n  algorithm +steps=1  max_new_tokens=12\n  policy +model=tiny", printed, re.MULTILINE
    )
    assert "lora_rank" not in printed  # off by default
