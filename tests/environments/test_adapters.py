"""Environments and tasks of other packages, played and asked with the real packages."""

import contextlib
import random
import socket
import subprocess
import sys
import time

import pytest
from run_files import json_of, rows_of

from common.errors import UserError

from harness.base.config import RunConfig
from harness.environments import other_packages as adapters
from harness.environments.other_packages import load_adapter
from harness.task.task import load_task

LAKE = "gymnasium:FrozenLake-v1?is_slippery=False"


def play(environment, actions: list[str], seed: int = 3) -> list[tuple[str, float, bool, str]]:
    """The first observation, and what each action leads to, with the state after it, until the end."""
    turns = [(environment.reset({"seed": seed}, 0), 0.0, False, environment.state())]
    for action in actions:
        turns.append((*environment.step(action), environment.state()))
        if turns[-1][2]:
            break
    return turns


def needs(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")


# Without any package --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gym:Taxi-v4", "--task gym:Taxi-v4: there is no adapter 'gym', but gymnasium, "),
        ("textarena:", "name an environment after the colon"),
        ("textarena:Wordle-v0", 'needs the package absent_package: pip install -e ".[environments]"'),
    ],
)
def test_a_name_without_an_adapter_or_a_package_is_one_sentence(monkeypatch, name, sentence):
    absent = adapters.ADAPTERS["textarena"]._replace(package="absent_package")
    monkeypatch.setitem(adapters.ADAPTERS, "textarena", absent)
    with pytest.raises(UserError) as caught:
        load_adapter(name)
    assert sentence in str(caught.value)


OWN = """
REWARD_WEIGHTS = {"correct": 1.0}
FIELDS = {"question": str}
def messages(row, system_prompt):
    return [{"role": "user", "content": row["question"]}]
def reward(row, text):
    return {"correct": float(text == row["question"])}
def rows(split):
    return [{"question": f"{split} {number}"} for number in range(6)]
"""


def test_rows_that_a_file_makes_are_used_without_data(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    task = load_task(RunConfig(task=str(path), eval_prompts=2, max_prompts=4))
    assert [row.question for row in task.train_rows] == [f"train {number}" for number in range(4)]
    assert [row.question for row in task.eval_rows] == ["eval 0", "eval 1"]
    assert task.train_rows[0].place.endswith("own.py, row 1 of train")
    (tmp_path / "given.jsonl").write_text('{"question": "given"}\n{"question": "held out"}\n')
    given = load_task(RunConfig(task=str(path), data=str(tmp_path / "given.jsonl"), eval_prompts=1))
    assert {row.question for row in (*given.train_rows, *given.eval_rows)} == {"given", "held out"}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("return []", "rows of 'train' must return a list of dicts"),
        ("return [1]", "rows of 'train' must return a list of dicts"),
        ("return [{'text': 'x'}]", "row 1 of train: the field 'question' is missing"),
        ("raise KeyError('x')", "rows of 'train' raised KeyError"),
    ],
)
def test_a_mistake_in_rows_is_one_sentence(tmp_path, rows, sentence):
    path = tmp_path / "own.py"
    path.write_text(OWN.partition("def rows")[0] + f"def rows(split):\n    {rows}\n")
    with pytest.raises(UserError) as caught:
        load_task(RunConfig(task=str(path)))
    assert sentence in str(caught.value)


# Mistakes in names ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gymnasium:FrozenLak-v1", "has no 'FrozenLak-v1'; the closest are FrozenLake-v1"),
        ("gymnasium:Taxi-v3", "deprecated. Please use `Taxi-v4`"),
        ("gymnasium:Pendulum-v1", "its actions are Box(-2.0, 2.0, (1,), float32), which a policy cannot name"),
        ("gymnasium:FrozenLake-v1?ice=1", "it cannot be made: FrozenLakeEnv.__init__() got an unexpected keyword"),
        ("gymnasium:FrozenLake-v1?actions=a,b", "actions must name 4 actions, not 2"),
        ("gymnasium:FrozenLake-v1?rows=0", "rows must be a positive whole number, not 0"),
        ("gymnasium:FrozenLake-v1?rows", "'rows' is not NAME=VALUE"),
        ("textarena:GuessTheNumbers", "the closest are GuessTheNumber-v0"),
        ("textarena:TicTacToe-v0", "it cannot be played alone"),
        ("textarena:QuantumTicTacToe-v0", "it cannot be played alone: it is a game of several players"),
        ("textarena:Klondike-v0", "cannot compile its file: invalid syntax"),
        ("reasoning_gym:chainsum", "the closest are chain_sum"),
        ("reasoning_gym:chain_sum?min_trms=1", "it has no setting 'min_trms', but allow_negation, "),
        ("reasoning_gym:chain_sum?min_terms=0", "its settings are refused: min_terms must be positive"),
        ("reasoning_gym:game_of_life_halting", "its verifier accepts any answer"),
        ("openenv:http://127.0.0.1:9", "no OpenEnv server answers there"),
        ("verifiers:absent", "it cannot be loaded: taskset 'absent' not found"),
        ("verifiers:textarena?game=Wordle-v0", "an environment of its own, which plays several turns or agents"),
    ],
)
def test_a_mistake_is_one_sentence(name, sentence):
    needs(name.partition(":")[0])
    if name.startswith("verifiers:textarena"):
        needs("textarena")
    with pytest.raises(UserError) as caught:
        load_adapter(name)
    assert str(caught.value).startswith(f"--task {name}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_image_is_no_observation():
    needs("gymnasium")
    import gymnasium
    from gymnasium import spaces

    class Picture(gymnasium.Env):
        observation_space, action_space = spaces.Dict(image=spaces.Box(0, 255, (8, 9))), spaces.Discrete(2)

    gymnasium.register("Picture-v0", entry_point=Picture)
    try:
        with pytest.raises(UserError, match=r"its observation is no text, but 72 numbers \(at most 64\)"):
            load_adapter("gymnasium:Picture-v0")
    finally:
        del gymnasium.registry["Picture-v0"]


@pytest.mark.slow
def test_a_game_without_its_word_lists_is_one_sentence(monkeypatch):
    needs("textarena")
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *arguments, **options: False)
    with pytest.raises(UserError, match=r"it needs word lists, .* run python -m nltk.downloader words$"):
        load_adapter("textarena:Wordle-v0")


# Whole episodes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_frozen_lake_is_a_text_world():
    """An action is a name, a number or a sentence with one of them; any other text costs the turn."""
    needs("gymnasium")
    environment = load_adapter(LAKE).Environment()
    turns = play(environment, ["right", "left or right", "", "I go Right.", "1", "down", " Down ", "2", "left"])
    assert turns[0][0] == "[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up."
    assert turns[1][0] == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    assert [turn[0] for turn in turns[2:4]] == ["This is no action. Actions: left, down, right, up."] * 2
    assert [turn[1:] for turn in turns] == [
        *((0.0, False, state) for state in ("0", "1", "1", "1", "2", "6", "10", "14")),
        (1.0, True, "15"),
    ]
    assert environment.describe() == {"no_actions": 2.0}
    environment.close()


@pytest.mark.slow
def test_the_limit_of_an_environment_ends_an_episode():
    needs("gymnasium")
    turns = play(load_adapter("gymnasium:FrozenLake-v1?max_episode_steps=3").Environment(), ["left"] * 9)
    assert len(turns) == 4
    assert turns[-1][1:3] == (0.0, True)


@pytest.mark.slow
def test_colors_become_text():
    needs("gymnasium")
    first = play(load_adapter("gymnasium:Taxi-v4").Environment(), [])[0][0].splitlines()
    assert first[1] == "|R: |[ ]: :G|"
    assert first[-2] == "R is blue, [ ] is yellow, Y is magenta"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "action", "first"),
    [
        ("CartPole-v1?actions=left,right", "left", "-0.041 -0.026 0.03 0.008"),
        ("Blackjack-v1", "stick", "7 10 0"),
    ],
)
def test_numbers_are_one_line(name, action, first):
    needs("gymnasium")
    turns = play(load_adapter(f"gymnasium:{name}").Environment(), [action])
    assert turns[0][0].splitlines()[0] == first
    assert len(turns) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("gymnasium:FrozenLake-v1", ["down", "right"] * 8),
        ("textarena:Minesweeper-v0-small", ["[2 2]", "[0 0]", "[4 4]", "[0 4]"]),
        ("textarena:2048-v0-ultra-easy", ["[up]", "[left]", "[down]", "[right]"] * 4),
        ("textarena:Blackjack-v0", ["[hit]", "[stand]"] * 5),
    ],
)
def test_an_episode_can_be_replayed(name, actions):
    """Also while another one is played in between, and whatever Python's global random numbers are."""
    needs(name.partition(":")[0])
    adapted = load_adapter(name)
    first = play(adapted.Environment(), actions)
    assert len(first) > 2
    others = [adapted.Environment() for _ in range(len(actions) + 1)]

    class Disturbed(adapted.Environment):
        def step(self, action):
            random.random()
            others.pop().reset({"seed": len(others)}, 0)
            return super().step(action)

    assert play(Disturbed(), actions) == first
    assert any(play(adapted.Environment(), actions, seed) != first for seed in range(4, 9))


@pytest.mark.slow
def test_a_game_leaves_the_global_random_numbers_and_the_terminal_alone(capfd):
    needs("textarena")
    adapted = load_adapter("textarena:RushHour-v0")
    random.seed(5)
    expected = [random.random(), random.random()]
    random.seed(5)
    found = [random.random()]
    play(adapted.Environment(), ["[x]"])
    assert [*found, random.random()] == expected
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_a_game_is_solved_by_what_it_says():
    needs("textarena")
    environment = load_adapter("textarena:GuessTheNumber-v0").Environment()
    observation = environment.reset({"seed": 11}, 0)
    assert "guess the number between 1 and 20" in observation
    low, high, done, rewards = 1, 20, False, []
    while not done:
        middle = (low + high) // 2
        observation, reward, done = environment.step(f"[{middle}]")
        assert "You have to guess" not in observation  # only what is new
        low, high = (middle + 1, high) if "higher" in observation else (low, middle - 1)
        rewards.append(reward)
    assert (sum(rewards), rewards[-1]) == (1.0, 1.0)
    assert observation.startswith("Congratulations")
    assert environment.describe() == {"solved": 1.0, "invalid_moves": 0.0}


@pytest.mark.slow
def test_an_invalid_move_is_answered_and_the_second_ends_the_game():
    needs("textarena")
    environment = load_adapter("textarena:FrozenLake-v0").Environment()
    turns = play(environment, ["[jump]", "[jump]", "[down]"])
    assert [turn[2] for turn in turns] == [False, False, True]
    assert "You attempted an invalid move" in turns[1][0]
    assert environment.describe() == {"solved": 0.0, "invalid_moves": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gymnasium:FrozenLake-v1?rows=300", "textarena:GuessTheNumber-v0?rows=300"])
def test_the_seeds_of_the_splits_differ(name):
    needs(name.partition(":")[0])
    train, held_out = (load_adapter(name).rows(split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (300, 256)
    assert len({row["seed"] for row in (*train, *held_out)}) == 556


# Tasks of one turn ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_generated_questions_are_rewarded_by_their_verifier():
    needs("reasoning_gym")
    task = load_adapter("reasoning_gym:chain_sum?rows=40&min_terms=2&max_terms=2&min_digits=1&max_digits=1")
    train, held_out = task.rows("train"), task.rows("eval")
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert len(held_out) == 40
    assert 0 < len(train) < 40  # there are only 200 such questions, so that some are drawn in both splits
    for row in train:
        assert task.reward(row, task.solution(row)) == {"correct": 1.0}
        assert task.reward(row, f"<think>{task.solution(row)}</think>") == {"correct": 0.0}
        assert task.reward(row, row["answer"]) == {"correct": 0.0}
        assert task.reward(row, f"<answer>{int(row['answer']) + 1}</answer>")["correct"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["list_functions", "rearc", "letter_jumble"])
def test_generated_questions_are_the_same_in_every_run(name):
    needs("reasoning_gym")
    questions = []
    for start in range(2):
        load_adapter.cache_clear()
        random.seed(start)
        questions.append([row["question"] for row in load_adapter(f"reasoning_gym:{name}?rows=9").rows("train")])
    assert questions[0] == questions[1]


ATTACKS = ["__import__('pathlib').Path({!r}).touch()", "[__import__('pathlib').Path({!r}).touch()]"]
ATTACKS += ["__import__('pathlib').Path({!r}).touch()!", "(lambda: open({!r}, 'w'))()", "open({!r}, 'w')"]
BOMBS = ["9**9**9**9", "[0]*10**10", "'%999999999d' % 1", "(9**99)**99"]
EVALUATING = ["binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"]
EVALUATING += ["puzzle24", "simple_integration", "spiral_matrix", "string_insertion"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EVALUATING)
def test_an_answer_is_never_run_as_code(tmp_path, name):
    """These verifiers call `eval` or SymPy's `parse_expr`, which runs code."""
    needs("reasoning_gym")
    task, marker = load_adapter(f"reasoning_gym:{name}?rows=4"), tmp_path / "it_ran"
    [row, *_] = task.rows("train")
    for attack in (*ATTACKS, *BOMBS):
        assert task.reward(row, f"<answer>{attack.format(str(marker))}</answer>")["correct"] < 0.2
    assert not marker.exists()
    assert any(task.solution(row) is not None for row in task.rows("train"))  # right answers pass


@pytest.mark.slow
def test_all_verifiers_that_evaluate_are_known():
    needs("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    from harness.environments.reasoning_gym_adapter import evaluator

    assert [name for name in sorted(DATASETS) if evaluator(DATASETS[name][0])] == EVALUATING


@pytest.mark.slow
def test_an_exception_of_a_verifier_is_no_reward():
    needs("reasoning_gym")
    task = load_adapter("reasoning_gym:prime_factorization?rows=1")
    assert task.reward(task.rows("train")[0], "<answer>a word</answer>") == {"correct": 0.0}


@pytest.mark.slow
def test_a_run_is_trained_and_evaluated_on_generated_questions(load_script, tmp_path, capsys):
    needs("reasoning_gym")
    flags = ["--task", "reasoning_gym:chain_sum?rows=12", "--steps", "1", "--prompts-per-step", "2"]
    flags += ["--group-size", "2", "--eval-prompts", "3", "--max-new-tokens", "24", "--device", "cpu"]
    load_script("experiment_base/train.py").main([*flags, "--runs-dir", str(tmp_path), "--name", "run"])
    directory = tmp_path / "experiment_base" / "run"
    assert json_of(directory / "config.json")["task"] == "reasoning_gym:chain_sum?rows=12"
    assert json_of(directory / "summary.json")["steps"] == 1
    assert any("reward/correct" in row for row in rows_of(directory))
    asked = ["--task", "reasoning_gym:chain_sum?rows=12", "--limit", "3", "--num-samples", "0", "--device", "cpu"]
    load_script("evaluate.py").main([*asked, "--output", str(tmp_path / "evaluation")])
    assert "3 questions of reasoning_gym:chain_sum?rows=12" in capsys.readouterr().out


TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class Tool(Sum):
    @classmethod
    def toolsets(cls, config):
        return [object()]

class Boxed(Sum):
    async def setup(self, trace, runtime):
        pass

class Config(vf.TasksetConfig):
    size: int = 10
    kind: str = "Sum"

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for number in range(self.config.size):
            data = Data(prompt=f"{number}+{number}?", answer=str(2 * number), system_prompt="Add.")
            yield globals()[self.config.kind](data, self.config.task)

__all__ = ["Sums"]
"""


@pytest.fixture
def taskset(tmp_path, monkeypatch) -> str:
    needs("verifiers.v1")
    (tmp_path / "my_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    yield "verifiers:my-sums"
    sys.modules.pop("my_sums", None)
    load_adapter.cache_clear()


@pytest.mark.slow
def test_a_taskset_is_rewarded_by_its_own_functions(taskset):
    task = load_adapter(f"{taskset}?size=20")
    train, held_out = task.rows("train"), task.rows("eval")
    assert [len(train), len(held_out)] == [16, 4]
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "4+4?"}]
    assert task.messages(train[0]) == turns
    assert task.messages(train[0], "Be brief.") == [{"role": "system", "content": "Be brief."}, turns[1]]
    assert task.REWARD_WEIGHTS == {"correct": 2.0, "length": 0.0}
    assert [task.reward(train[0], text) for text in ("8", "10")] == [
        {"correct": 1.0, "length": 1.0},
        {"correct": 0.0, "length": 2.0},
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("size=1", "it has 1 tasks"),
        ("sizes=1", "validation error"),
        ("kind=Tool", "have tools"),
        ("kind=Boxed", "container"),
    ],
)
def test_a_taskset_of_other_needs_is_refused(taskset, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        load_adapter(f"{taskset}?{settings}")


SERVER = """
import random, sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    number: int

class Hint(Observation):
    text: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.number = random.Random(seed).randint(1, 9)
        return Hint(text="Guess.")

    def step(self, action, timeout_s=None, **options):
        if action.number == self.number:
            return Hint(text="Right.", done=True, reward=1.0)
        return Hint(text="Lower." if action.number > self.number else "Higher.")

    @property
    def state(self):
        return State()

app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def server(tmp_path) -> str:
    needs("openenv")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    (tmp_path / "server.py").write_text(SERVER)
    process = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)])
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield f"openenv:http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_server_is_played(server):
    adapted = load_adapter(server)
    one, two = adapted.Environment(), adapted.Environment()
    try:
        assert [one.reset({"seed": 1}, 0), two.reset({"seed": 2}, 0)] == ["Guess."] * 2
        assert one.step("three") == ("This is no action: it must be one value, integer", 0.0, False)
        assert one.step("3.5")[0].startswith("This is no action: Server error")
        assert one.describe() == {"no_actions": 2.0}
        # random.Random(1) draws 3 from 1 to 9, and random.Random(2) draws 1
        assert [one.step("9"), two.step("1"), one.step(" 3 ")] == [
            ("Lower.", 0.0, False),
            ("Right.", 1.0, True),
            ("Right.", 1.0, True),
        ]
        third = adapted.Environment()
        with pytest.raises(RuntimeError, match="Server at capacity"):
            third.reset({"seed": 1}, 0)
        third.close()
    finally:
        one.close()
        two.close()
    with pytest.raises(UserError, match="its actions have no field 'move', but number"):
        load_adapter(f"{server}?action=move")
