"""DAPO's dynamic sampling and its punishment of overlong completions, in runs of the bundled policy."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from run_files import metrics_of, write_rows

from common.trajectory import Trajectory

QUESTIONS, GROUP_SIZE = 4, 4
FLAGS = (
    f"--steps 2 --prompts-per-step {QUESTIONS} --group-size {GROUP_SIZE} --minibatch-size 8 --epochs-per-step 2 "
    "--max-new-tokens 40 --eval-prompts 2 --samples-every 0 --name x"
)
A_TASK = """
REWARD_WEIGHTS = {"correct": 1.0}
def messages(row, system_prompt):
    return [{"role": "user", "content": row["question"]}]
def reward(row, text):
    return {"correct": 1.0}
"""


@pytest.fixture
def train(load_script) -> ModuleType:
    return load_script("policy_gradients/dapo/train.py")


@pytest.fixture
def run(train, tmp_path, monkeypatch) -> Callable[[str], SimpleNamespace]:
    """Train with further flags; returns metrics, the rounds of each step, and what each step trained on."""

    def run(flags: str = "") -> SimpleNamespace:
        monkeypatch.chdir(tmp_path)
        rounds, trained = [], []
        with monkeypatch.context() as patch:
            sample, collate = train.sample_completions, train.collate

            def sample_and_note(*arguments, **settings):
                rounds.append(sample(*arguments, **settings))
                return rounds[-1]

            patch.setattr(train, "sample_completions", sample_and_note)
            patch.setattr(train, "collate", lambda rows, *others: trained.append(rows) or collate(rows, *others))
            train.main([*FLAGS.split(), *flags.split()])
        metrics = [row for row in metrics_of(tmp_path / "runs" / "dapo" / "x") if "loss/total" in row]
        per_step, left = [], iter(rounds)
        for row in metrics:
            per_step.append([next(left) for _ in range(row["sampling/groups"] // QUESTIONS)])
        assert not list(left)
        return SimpleNamespace(metrics=metrics, rounds=per_step, trained=trained)

    return run


def has_signal(rows: list[Trajectory]) -> list[bool]:
    correct = torch.tensor([row.rewards["correct"] for row in rows]).view(-1, GROUP_SIZE)
    return [0 < group.sum() < GROUP_SIZE for group in correct]


def names(rows: list[Trajectory]) -> list[tuple[int, int]]:
    return [(row.prompt_index, row.completion_index) for row in rows]


def test_each_step_trains_on_groups_that_are_neither_all_right_nor_all_wrong(run):
    result = run("--max-rounds 6")
    for metrics, rounds, trained in zip(result.metrics, result.rounds, result.trained, strict=True):
        assert has_signal(trained) == [True] * QUESTIONS
        everything = [row for rows in rounds for row in rows]
        groups = [everything[start : start + GROUP_SIZE] for start in range(0, len(everything), GROUP_SIZE)]
        wanted = [group for group, kept in zip(groups, has_signal(everything), strict=True) if kept][:QUESTIONS]
        assert names(trained) == names([row for group in wanted for row in group])  # the first ones
        assert not any(sum(map(sum, map(has_signal, rounds[:count]))) >= QUESTIONS for count in range(len(rounds)))
        assert len({row.prompt_index for row in everything}) == len(groups)  # no question twice
        # What is not trained on counts as cost, and in the accuracy: that of kept groups alone is near one half
        assert metrics["sampling/tokens"] == sum(row.num_action_tokens for row in everything)
        assert metrics["reward/correct"] == pytest.approx(
            sum(row.rewards["correct"] for row in everything) / len(everything)
        )
        assert metrics["sampling/groups_without_signal"] == 0
    assert max(len(rounds) for rounds in result.rounds) > 1


@pytest.mark.slow
def test_with_one_round_every_group_is_kept(run):
    result = run("--max-rounds 1")
    assert [names(rows) for rows in result.trained] == [names(rows) for (rows,) in result.rounds]
    unequal = [sum(has_signal(rows)) for rows in result.trained]
    assert [row["sampling/groups_without_signal"] for row in result.metrics] == [QUESTIONS - kept for kept in unequal]
    assert min(unequal) < QUESTIONS


def test_a_search_without_end_is_bounded(run, tmp_path, capsys):
    """All rewards are equal: the step ends after its rounds, says so once, and changes nothing."""
    (tmp_path / "task.py").write_text(A_TASK)
    write_rows(tmp_path / "rows.jsonl", [{"question": f"{n} + 1"} for n in range(13)])
    data = "--data rows.jsonl --eval-data rows.jsonl --reward-weight overlong=0"
    result = run(f"--task task.py {data} --max-rounds 9")
    assert [len(rounds) for rounds in result.rounds] == [3, 3]  # of 13 questions, three rounds of four
    for metrics, rounds, trained in zip(result.metrics, result.rounds, result.trained, strict=True):
        assert metrics["sampling/groups_without_signal"] == QUESTIONS
        assert names(trained) == names(rounds[0])
        assert metrics["loss/grad_norm"] == 0
    assert "".join(capsys.readouterr()).count("have completions of equal rewards") == 1


@pytest.mark.parametrize(("length", "expected"), [(1, 0.0), (80, 0.0), (85, -0.25), (99, -0.95), (100, -1.0)])
def test_the_punishment_grows_over_the_last_part_of_the_budget(train, monkeypatch, length, expected):
    row = Trajectory([1] + [5] * length, 1, [0] + [1] * length, [0.0] * (length + 1))
    task = SimpleNamespace(
        train_rows=[{}], reward_all=lambda rows, *_: [{"correct": 1.0} for _ in rows], describe=lambda *_: {},
        total_reward=lambda rewards: sum(rewards.values()),
    )  # fmt: skip
    config = train.Config(group_size=2, max_new_tokens=100, overlong_buffer=0.2)
    monkeypatch.setattr(train, "decode", lambda *_: "")
    before = train.reward(config, task, SimpleNamespace(tokenizer=None), [row, row])
    assert before.tolist() == [[1.0, 1.0]]  # which groups are kept does not depend on lengths
    assert row.rewards["overlong"] == pytest.approx(expected)
    assert train.returns_of(config, task, [row, row]).tolist() == [[pytest.approx(1 + expected)] * 2]
