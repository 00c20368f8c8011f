"""`--reward-functions`: files as people write them for TRL give the values that TRL would give them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError
from common.trajectory import Trajectory

from harness.base.config import RunConfig
from harness.data.data import load_task
from harness.data.reward_functions import RewardFunctions
from harness.data.rows import Row, placed
from harness.data.task import TaskError
from harness.logs.statistics import rollout_metrics

REPORTS = Path(__file__).resolve().parents[3] / "shared" / "reports"

# Two questions, three completions each; the first and the third are equal, and only the second row has a bonus
FOUR, SEVEN = {"question": "What is 2+2?", "answer": "4"}, {"question": "What is 3+4?", "answer": "7", "bonus": 0.5}
ROWS: list[Row] = [placed(row, f"rows.jsonl:{number}") for number, row in ((1, FOUR), (2, SEVEN)) for _ in range(3)]
PROMPTS = [[{"role": "system", "content": "Think."}, {"role": "user", "content": row["question"]}] for row in ROWS]
ANSWER = "<answer>{}</answer>"
TEXTS = [ANSWER.format(4), ANSWER.format(5), ANSWER.format(4), "<think>3+4</think>" + ANSWER.format(7), "seven", ""]
IDS = [[1] * length for length in (5, 6, 7, 8, 2, 1)]

RIGHT, LENGTHS, TAGGED = [1, 0, 1, 1, 0, 0], [18, 18, 18, 36, 5, 0], [1, 1, 1, 1, 0, 0]
READ = "[m[0]['content'] for m in completions]"
JUDGE = f"[float('>' + a + '<' in text) for text, a in zip({READ}, answer)]"
LATER = "def later(function):\n    def wrapper(*args, **kwargs):\n        return function(*args, **kwargs)\n    return wrapper\n"

SHAPES = {
    # parameters
    "messages and columns": (f"def f(prompts, completions, answer, **kwargs): return {JUDGE}", RIGHT),
    "no **kwargs": (f"def f(completions, answer): return {JUDGE}", RIGHT),
    "keyword-only": (f"def f(*, completions, answer, **_): return {JUDGE}", RIGHT),
    "a default": (f"def f(completions, answer, scale=2, **_): return [scale * x for x in {JUDGE}]", [2, 0, 2, 2, 0, 0]),
    "**kwargs alone": ("def f(**kwargs): return [len(m[0]['content']) for m in kwargs['completions']]", LENGTHS),
    "the question": ("def f(prompts, completions, **_): return [p[-1]['content'].count('2') for p in prompts]",
                     [2, 2, 2, 0, 0, 0]),
    "a column of some rows": ("def f(completions, bonus, **_): return [b or 0 for b in bonus]", [0, 0, 0, 0.5, 0.5, 0.5]),
    "token ids": ("def f(completion_ids, **_): return [-len(ids) for ids in completion_ids]", [-5, -6, -7, -8, -2, -1]),
    "the state": ("def f(completions, trainer_state, **_): return [trainer_state.global_step / trainer_state.max_steps]"
                  " * len(completions)", [0.25] * 6),
    "its own log": ("def f(completions, log_extra=None, log_metric=None, **_):\n    log_extra('n', [1] * len(completions))\n"
                    "    log_metric('m', 0.5)\n    return [1.0] * len(completions)", [1] * 6),
    # what they return
    "a tensor": ("import torch\ndef f(completion_ids, **_): return torch.tensor([[len(x)] for x in completion_ids])",
                 [5, 6, 7, 8, 2, 1]),
    "tensors and arrays": ("import torch, numpy\ndef f(completions, **_): return [torch.tensor(1.0), numpy.float32(0.5),"
                           " numpy.array([2.0]), True, 3, 4.0]*(len(completions)//6)", [1, 0.5, 2, 1, 3, 4]),
    "an array": (f"import numpy\ndef f(completions, **_): return numpy.array([len(x) for x in {READ}])", LENGTHS),
    "None": (f"def f(completions, **_): return [len(x) if '<' in x else None for x in {READ}]",
             [18, 18, 18, 36, None, None]),
    "a generator": (f"def f(completions, **_): yield from (len(x) for x in {READ})", LENGTHS),
    "async": ("import asyncio\nlock = asyncio.Lock()\nasync def one(m):\n    async with lock: await asyncio.sleep(0)\n"
              "    return len(m[0]['content'])\n"
              "async def f(completions, **_): return await asyncio.gather(*map(one, completions))", LENGTHS),
    # by position
    "the first copy": (f"def f(completions, **_):\n    seen = set()\n"
                       f"    return [float(not (x in seen or seen.add(x))) for x in {READ}]", [1, 1, 0, 1, 1, 1]),
    "the rank in the batch": ("def f(completions, **_): return list(range(len(completions)))", [0, 1, 2, 3, 4, 5]),
    # made in other ways
    "a factory": ("def make(scale):\n    def inner(completions, **_):\n"
                  f"        return [scale * len(x) for x in {READ}]\n    return inner\nf = make(1)", LENGTHS),
    "partial": (f"import functools\ndef base(completions, k, **_): return [k * len(x) for x in {READ}]\n"
                "f = functools.partial(base, k=1)", LENGTHS),
    "an object": (f"class Length:\n    def __call__(self, completions, **_): return [len(x) for x in {READ}]\n"
                  "f = Length()", LENGTHS),
    "decorated": (f"{LATER}@later\ndef f(completions, answer): return {JUDGE}", RIGHT),
    "a lambda with an alias": (f"f = lambda completions, **_: [len(x) for x in {READ}]\nsame = f", LENGTHS),
    "a helper": (f"def texts(completions): return {READ}\ndef f(completions, **_): return [*map(len, texts(completions))]",
                 LENGTHS),
    "REWARDS": (f"def f(completions, **_): return [len(x) for x in {READ}]\ndef g(completions): return f(completions)\n"
                "REWARDS = ['f']", LENGTHS),
    # of texts
    "len of a text": ("def f(completions, **_): return [len(c) for c in completions]", LENGTHS),
    "a search": ("import re\ndef f(completions, answer, **_):\n"
                 "    return [float(bool(re.search(f'>{a}<', c))) for c, a in zip(completions, answer)]", RIGHT),
    "a tag in a text": ("def f(completions, **_): return [float('<answer>' in c) for c in completions]", TAGGED),
    "str of it": ("import re\ndef f(completions, **_): return [float(bool(re.match('<', str(c)))) for c in completions]",
                  TAGGED),
    "errors swallowed": ("def f(completions, **_):\n    def one(c):\n        try: return c.count('<')\n"
                         "        except Exception: return 0\n    return [one(c) for c in completions]",
                         [2, 2, 2, 4, 0, 0]),
    "a text and its question": ("def f(prompts, completions): return [len(p + c) for p, c in zip(prompts, completions)]",
                                [30, 30, 30, 48, 17, 12]),
    "either": ("def f(completions, **_): return [len(c if isinstance(c, str) else c[0]['content']) for c in completions]",
               LENGTHS),
}  # fmt: skip
OF_TEXTS = [*SHAPES][[*SHAPES].index("len of a text") : [*SHAPES].index("either")]


@pytest.fixture
def read(tmp_path):
    """Write a file of rewards, and read it."""

    def read(text: str) -> RewardFunctions:
        (tmp_path / "rewards.py").write_text(text)
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
        rewards, logged = functions.score(PROMPTS, ROWS, TEXTS, IDS)
        assert rewards == [{} if value is None else {"f": value} for value in expected]
        assert all(type(value) is float for entry in rewards for value in entry.values())
        assert logged == [{"n": 1, "m": 0.5} if shape == "its own log" else {}] * 6


