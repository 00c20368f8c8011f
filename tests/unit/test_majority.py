"""rewards/majority: the reward against a slow count, no right answer in it, and tasks whose answers cannot be read."""

import random

import pytest
from run_files import contents, read_lines, rows_of, write_rows

from common.errors import UserError
from tasks import arithmetic

from harness.task.row_checks import check_votes
from harness.task.task_file import TaskFile, import_file, import_named

SCRIPT = "rewards/majority/train.py"
FLAGS = "--device cpu --steps 3 --prompts-per-step 2 --group-size 4 --max-new-tokens 32 --eval-prompts 1 --eval-every 0"


def slow_agreement(group: list[str | None]) -> list[float]:
    """Each answer is compared with every other one; who has fewer votes than another answer, or as many, loses."""
    votes = [sum(other == answer for other in group) for answer in group]
    return [
        float(
            answer is not None and all(other in (answer, None) or votes[i] > votes[j] for j, other in enumerate(group))
        )
        for i, answer in enumerate(group)
    ]


def test_the_reward_equals_a_slow_count(load_script):
    """Of random groups, also in another order; and of the groups at the edge."""
    agreement, rng, earned = load_script(SCRIPT).agreement, random.Random(0), []
    for _ in range(300):
        groups = [rng.choices(["1", "2", "3", "", None], k=6) for _ in range(3)]
        expected = [slow_agreement(group) for group in groups]
        assert agreement([*groups[0], *groups[1], *groups[2]], 6) == [*expected[0], *expected[1], *expected[2]]
        order = rng.sample(range(6), k=6)
        assert agreement([groups[0][i] for i in order], 6) == [expected[0][i] for i in order]
        earned += map(sum, expected)
    assert {0.0, 2.0, 5.0} <= set(earned)
    assert agreement(["1", "1", "2", "2"], 4) == agreement([None] * 4, 4) == [0.0] * 4  # a tie; nobody votes
    assert agreement(["1", None, None, None], 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.fixture(scope="module")
def runs(load_script, tmp_path_factory):
    """Two runs on eight questions: with their right answers, and with others."""
    place, rows = tmp_path_factory.mktemp("runs"), read_lines(arithmetic.TRAIN_DATA)[:8]
    for name, answers in (("true", [row["answer"] for row in rows]), ("false", [f"{n}00" for n in range(2, 10)])):
        data = place / f"{name}.jsonl"
        write_rows(data, [row | {"answer": answer} for row, answer in zip(rows, answers, strict=True)])
        flags = f"{FLAGS} --data {data} --eval-data {data} --runs-dir {place} --name {name}"
        load_script(SCRIPT).main(flags.split())
    return {name: place / "majority" / name for name in ("true", "false")}


def test_no_right_answer_reaches_the_reward(runs):
    """With other answers in the data, the same completions earn the same, and the weights are the same, bit for bit."""
    weights = [contents(directory)["final/model.safetensors"] for directory in runs.values()]
    assert weights[0] == weights[1]
    true, false = (rows_of(directory, "samples") for directory in runs.values())
    assert [row["return"] for row in true] == [row["return"] for row in false]
    assert len({row["return"] for row in true}) == 2
    assert sum(row["rewards"]["correct"] for row in true) > sum(row["rewards"]["correct"] for row in false) == 0


def test_what_is_logged_is_the_slow_count_of_the_samples(runs):
    samples, num_right = rows_of(runs["true"], "samples"), 0
    steps = [row for row in rows_of(runs["true"]) if "reward/agreement" in row]
    for metrics in steps:
        rows = [row for row in samples if row["step"] == metrics["step"]]
        groups = [rows[start : start + 4] for start in range(0, 8, 4)]
        agreed = [slow_agreement([arithmetic.given_answer(row["text"]) for row in group]) for group in groups]
        assert [row["return"] for row in rows] == [*agreed[0], *agreed[1]]
        right = [
            any(agrees and row["rewards"]["correct"] for agrees, row in zip(of, group, strict=True))
            for of, group in zip(agreed, groups, strict=True)
        ]
        assert metrics["reward/total"] == metrics["reward/agreement"] == sum(map(sum, agreed)) / 8
        assert metrics["group/majority_right"] == sum(right) / 2
        num_right += sum(right)
    assert len(steps) == 3
    assert 0 < num_right < 6


BUNDLED = {  # a row of each bundled task with answers
    "arithmetic": {"question": "1+1", "answer": "2"},
    "calculator": {"question": "1+1", "answer": "2"},
    "countdown": {"nums": [3, 5], "target": 8},
    "gsm8k": {"question": "1+1", "answer": "#### 2"},
    "math": {"problem": "1+1", "solution": r"\\boxed{2}"},
    "qa": {"question": "Who?", "answer": ["I"]},
    "typed_answers": {"question": "1+1", "answer_type": "choice", "choices": ["1", "2"], "answer": "B"},
}


@pytest.mark.parametrize("name", BUNDLED)
def test_answers_of_bundled_tasks_can_be_read(name):
    file = TaskFile(import_named(name), name)
    check_votes(file, [BUNDLED[name]])
    text = file.solution(BUNDLED[name])
    assert text is None or file.vote(BUNDLED[name], text) is not None


A_TASK = """
REWARD_WEIGHTS = {"format": 0.0}
def messages(row, system_prompt): return [{"role": "user", "content": row["question"]}]
def reward(row, text): return {"format": 0.0}
"""
IN_TAGS = "def solution(row): return '<answer>2</answer>'\n"
AS_TEXT = "def solution(row): return '#### 2'\n"


@pytest.mark.parametrize(
    ("more", "is_readable"),
    [
        ("", True),
        (AS_TEXT, False),
        (IN_TAGS, True),
        ("def vote(row, text): return text or None\n", True),
        (AS_TEXT + "def vote(row, text): return text or None\n", True),
        (AS_TEXT + "def vote(row, text): return None\n", False),
    ],
)
def test_a_task_is_refused_if_its_answers_cannot_be_read(tmp_path, more, is_readable, capsys):
    (tmp_path / "my_task.py").write_text(A_TASK + more)
    file = TaskFile(import_file(tmp_path / "my_task.py", "task", "my_task.py")[0], "my_task.py")
    if is_readable:
        check_votes(file, [{"question": "?"}])
        assert ("the text in its only <answer>" in capsys.readouterr().out) == (more == "")
        return
    with pytest.raises(UserError, match=r"^--task my_task\.py: its answers cannot be read.* define vote\(row, text\)"):
        check_votes(file, [{"question": "?"}])
