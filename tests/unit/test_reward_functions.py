"""`--reward-functions`: files as people write them for TRL give the values that TRL would give them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.trajectory import Trajectory

from harness.base.config import RunConfig
from harness.data.rows import Row, placed
from harness.logs.statistics import rollout_metrics
from harness.task.reward_functions import RewardFunctions
from harness.task.task import Task, load_task

# Two questions, three completions each; the first and the third are equal, and only the second row has a bonus
FOUR, SEVEN = {"question": "What is 2+2?", "answer": "4"}, {"question": "What is 3+4?", "answer": "7", "bonus": 0.5}
ROWS: list[Row] = [placed(row, f"rows.jsonl:{number}") for number, row in ((1, FOUR), (2, SEVEN)) for _ in range(3)]
PROMPTS = [[{"role": "system", "content": "Think."}, {"role": "user", "content": row["question"]}] for row in ROWS]
ANSWER = "<answer>{}</answer>"
TEXTS = [ANSWER.format(4), ANSWER.format(5), ANSWER.format(4), "<think>3+4</think>" + ANSWER.format(7), "seven", ""]
IDS = [[1] * length for length in (5, 6, 7, 8, 2, 1)]

RIGHT, LENGTHS, TAGGED, NUM_IDS = [1, 0, 1, 1, 0, 0], [18, 18, 18, 36, 5, 0], [1, 1, 1, 1, 0, 0], [5, 6, 7, 8, 2, 1]
# C: the completions' texts; J: whether each is right
SHAPES = {
    # their parameters
    "messages, columns": ("def f(prompts, completions, answer, **kwargs): return J", RIGHT),
    "no **kwargs": ("def f(completions, answer): return J", RIGHT),
    "keyword-only": ("def f(*, completions, answer, **_): return J", RIGHT),
    "a default": ("def f(completions, answer, scale=2, **_): return [scale * x for x in J]", [2, 0, 2, 2, 0, 0]),
    "**kwargs alone": ("def f(**kw): return [len(m[0]['content']) for m in kw['completions']]", LENGTHS),
    "the question": ("def f(prompts, completions, **_): return [p[-1]['content'].count('2') for p in prompts]",
                     [2, 2, 2, 0, 0, 0]),
    "a rare column": ("def f(completions, bonus, **_): return [b or 0 for b in bonus]", [0, 0, 0, 0.5, 0.5, 0.5]),
    "token ids": ("def f(completion_ids, **_): return [len(ids) for ids in completion_ids]", NUM_IDS),
    "the state": ("def f(completions, trainer_state, **_):\n"
                  "    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]", [0.25] * 6),
    "a log": ("def f(completions, log_extra, log_metric=None, **_):\n"
              "    log_extra('n', C), log_metric('m', 0.5)\n    return [1.0 for _ in completions]", [1] * 6),
    # what they return
    "a tensor": ("import torch\ndef f(completion_ids, **_): return torch.tensor([[len(x)] for x in completion_ids])",
                 NUM_IDS),
    "mixed": ("import torch, numpy\ndef f(completions, **_):\n"
              "    return torch.tensor(1.0), numpy.float32(0.5), numpy.ones(1), True, 3, 4.0", [1, 0.5, 1, 1, 3, 4]),
    "an array": ("import numpy\ndef f(completions, **_): return numpy.array([len(x) for x in C])", LENGTHS),
    "None": ("def f(completions, **_): return [len(x) if '<' in x else None for x in C]", [18, 18, 18, 36, None, None]),
    "a generator": ("def f(completions, **_): yield from map(len, C)", LENGTHS),
    "async": ("import asyncio\nlock = asyncio.Lock()\nasync def one(text):\n"
              "    async with lock: await asyncio.sleep(0)\n    return len(text)\n"
              "async def f(completions, **_): return await asyncio.gather(*map(one, C))", LENGTHS),
    # by position
    "first copies": ("def f(completions, **_):\n    seen = set()\n"
                     "    return [float(not (x in seen or seen.add(x))) for x in C]", [1, 1, 0, 1, 1, 1]),
    "ranks": ("def f(completions, **_): return range(len(completions))", [0, 1, 2, 3, 4, 5]),
    # made in other ways
    "a factory": ("def make(k):\n    def inner(completions, **_): return [k * len(x) for x in C]\n    return inner\n"
                  "f = make(k=1)", LENGTHS),
    "partial": ("import functools\ndef base(completions, k, **_): return [k * len(x) for x in C]\n"
                "f = functools.partial(base, k=1)", LENGTHS),
    "a partial that is named": ("import functools\ndef base(completions, k, **_): return [k * len(x) for x in C]\n"
                                "f = functools.update_wrapper(functools.partial(base, k=1), base)", LENGTHS),
    "an object": ("class Length:\n    def __call__(self, completions, **_): return [len(x) for x in C]\nf = Length()",
                  LENGTHS),
    "decorated": ("def later(g):\n    def wrapper(*a, **k): return g(*a, **k)\n    return wrapper\n"
                  "@later\ndef f(completions, answer): return J", RIGHT),
    "an alias": ("f = lambda completions, **_: [len(x) for x in C]\nsame = f", LENGTHS),
    "a helper": ("def texts(completions): return C\ndef f(completions, **_): return [*map(len, texts(completions))]",
                 LENGTHS),
    "REWARDS": ("def f(completions, **_): return [len(x) for x in C]\ndef g(completions): return f(completions)\n"
                "REWARDS = ['f']", LENGTHS),
    "either form": ("def f(completions, **_):\n"
                    "    return [len(c if isinstance(c, str) else c[0]['content']) for c in completions]", LENGTHS),
    # of texts
    "len": ("def f(completions, **_): return [len(c) for c in completions]", LENGTHS),
    "a search": ("import re\ndef f(completions, answer, **_):\n"
                 "    return [float(bool(re.search(f'>{a}<', c))) for c, a in zip(completions, answer)]", RIGHT),
    "in": ("def f(completions, **_): return [float('<answer>' in c) for c in completions]", TAGGED),
    "str": ("def f(completions, **_): return [float(str(c)[:1] == '<') for c in completions]", TAGGED),
    "try": ("import re\ndef one(c):\n    try: return float(bool(re.search('<answer>', c)))\n"
            "    except Exception: return 0\ndef f(completions, **_): return [*map(one, completions)]", TAGGED),
    "a text question": ("def f(prompts, completions): return [len(p + c) for p, c in zip(prompts, completions)]",
                        [30, 30, 30, 48, 17, 12]),
}  # fmt: skip
OF_TEXTS = [*SHAPES][-6:]


@pytest.fixture
def read(tmp_path):
    """Write a file of rewards, and read it."""

    def read(text: str) -> RewardFunctions:
        texts = "[m[0]['content'] for m in completions]"
        text = re.sub(r"\bJ\b", "[float('>' + a + '<' in text) for text, a in zip(C, answer)]", text)
        (tmp_path / "rewards.py").write_text(re.sub(r"\bC\b", texts, text))
        functions = RewardFunctions(str(tmp_path / "rewards.py"))
        functions.columns = ["question", "answer", "bonus"]
        functions.state = SimpleNamespace(global_step=5, max_steps=20)
        return functions

    return read


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reward_of_trl_works_unchanged(read, shape, capsys):
    text, expected = SHAPES[shape]
    functions = read(text)
    functions.check(PROMPTS, ROWS, TEXTS)
    assert ("as texts" in capsys.readouterr().out) == (shape in OF_TEXTS)
    for _ in range(2):
        rewards, logged = zip(*functions.score(PROMPTS, ROWS, TEXTS, IDS), strict=True)
        assert list(rewards) == [{} if value is None else {"f": value} for value in expected]
        assert all(type(value) is float for entry in rewards for value in entry.values())
        assert list(logged) == [{"n": text, "m": 0.5} if shape == "a log" else {} for text in TEXTS]


def test_rewards_of_trl_itself_work(read):
    pytest.importorskip("trl.rewards")
    functions = read("from trl.rewards import accuracy_reward, think_format_reward\n")
    row, text = Row({"problem": "1+1?", "solution": r"$2$"}), r"<think>one more</think> It is $\boxed{2}$."
    ((rewards, _),) = functions.score([[{"role": "user", "content": "1+1?"}]], [row], [text], [[1]])
    assert rewards == {"accuracy_reward": 1.0, "think_format_reward": 1.0}


def test_a_function_is_called_as_seldom_as_possible(read, tmp_path):
    """Once with messages, and once more if it needs texts; what it is given is its own."""
    count = f"open({str(tmp_path / 'calls')!r}, 'a').write('x')"
    functions = read(
        f"def f(completions, **_):\n    {count}\n    return [len(c) for c in completions]\n"
        f"def g(completions, answer, **_):\n    {count}\n    answer.clear()\n    return map(len, C)"
    )
    functions.check(PROMPTS, ROWS, TEXTS)
    assert len((tmp_path / "calls").read_text()) == 3
    for calls in (5, 7):
        assert functions.score(PROMPTS, ROWS, TEXTS, IDS)[3] == ({"f": 36.0, "g": 36.0}, {})
        assert len((tmp_path / "calls").read_text()) == calls


def test_the_form_can_be_found_in_a_later_batch(read):
    """The first batch has no row to which the function applies."""
    functions = read(
        "def f(completions, bonus, **_): return [b and len(c.strip()) for c, b in zip(completions, bonus)]"
    )
    functions.check(PROMPTS[:3], ROWS[:3], TEXTS[:3])
    assert [rewards for rewards, _ in functions.score(PROMPTS, ROWS, TEXTS, IDS)] == [{}] * 3 + [
        {"f": length} for length in LENGTHS[3:]
    ]


def test_what_other_rewards_call_is_left_out_with_a_word(read, capsys):
    method = "def format(completions): return map(len, C)\ndef f(completions): return [len('{}'.format(x)) for x in C]"
    assert read(method).names == ["format", "f"]  # str.format is another one
    text = "def a(completions): return map(len, C)\ndef b(completions): return a(completions)\nPARTS = [b]\n"
    assert read(f"{text}def c(completions): return PARTS[0](completions)").names == ["c"]
    assert "the rewards are c, without a (called by c), b (called by c)" in capsys.readouterr().out
    assert read("def f(completions): return map(len, C)\ndef timed(*a, **k): return f(*a, **k)").names == ["f"]
    assert read(f"{text}REWARDS = (a, 'b')").names == ["a", "b"]


# In a run


@pytest.fixture
def load(tmp_path, monkeypatch, read):
    """Load the bundled task with a file of rewards, and 40 rows; every fourth one has a bonus."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(40)]
    rows = [row | ({} if n % 4 else {"bonus": 1.0}) for n, row in enumerate(rows)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(text: str, **settings) -> Task:
        read(text)
        return load_task(RunConfig(data="rows.jsonl", eval_prompts=8, reward_functions="rewards.py", **settings))

    return load


def test_returned_values_are_logged_at_their_position(load, capsys):
    task = load(
        SHAPES["first copies"][0].replace("def f", "def first")
        + "\ndef rare(completions, bonus, **_): return [b and len(x) for x, b in zip(C, bonus)]"
        + "\ndef told(completions, log_metric, **_):\n    log_metric('texts', len(set(C)))\n    return [0] * len(C)",
        reward_weight=("correct=0", "first=0", "told=0"),
    )
    with_bonus = sorted(task.train_rows, key=lambda row: "bonus" not in row)
    rows, texts = [row for row in (with_bonus[0], with_bonus[-1]) for _ in range(3)], ["ab", "c", "ab", "d", "d", "d"]
    completions = [Trajectory([1, 2], 1, [0, 1], [0.0, 0.0]) for _ in rows]
    found = task.reward_all(rows, texts, completions)
    assert [rewards["first"] for rewards in found] == [1, 1, 0, 1, 0, 0]
    assert [rewards.get("rare") for rewards in found] == [2, 1, 2, None, None, None]
    assert capsys.readouterr().err.count(f"every reward of {rows[3].place} that has a weight is None") == 1
    for completion, rewards in zip(completions, found, strict=True):
        completion.rewards = rewards
    metrics = rollout_metrics(completions, torch.zeros(2, 3))
    assert (metrics["reward/first"], metrics["reward_std/first"]) == (0.5, 0.5)
    assert (metrics["reward/rare"], metrics["reward_std/told"]) == (pytest.approx(5 / 3), 0.0)
    assert (metrics["logged/texts"], task.scorer.paid) == (3, ["rare"])


def test_a_column_of_some_rows_is_given_in_every_batch(load):
    """None where it is absent, also for an optional parameter, and in a batch without it."""
    task = load("def f(completions, **kwargs): return [2.0 if b is None else b for b in kwargs['bonus']]")
    lacks = [row for row in task.train_rows if "bonus" not in row][:3]
    has = next(row for row in task.train_rows if "bonus" in row)
    for rows, expected in ((lacks, [2, 2, 2]), ([lacks[0], has, lacks[1]], [2, 1, 2])):
        completions = [Trajectory([1], 1, [0], [0.0]) for _ in rows]
        assert [rewards["f"] for rewards in task.reward_together(rows, [""] * 3, completions)] == expected
