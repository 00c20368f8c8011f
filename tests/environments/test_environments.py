"""Environments of a user's own: what is wrong with one is said in a sentence, and a broken one costs its episode."""

import datetime
import itertools
import json
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import UserError
from common.keyed import keyed_generator

from harness.base.config import TINY_POLICY
from harness.data.rows import Row
from harness.logs.samples import turn_lines
from harness.models.loading import load_policy
from harness.task.named_task import task_of
from harness.workers.playing import KEPT, Player

WALK = """
import os, signal, time

class Environment:
    def reset(self, row, seed):
        self.at, self.seed = row.get("at", 0), seed
        return f"at {self.at}"

    def step(self, action):
        if action == "hang":
            time.sleep(60)
        if action == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "fork" and os.fork() == 0:
            time.sleep(0.2)
            raise SystemExit
        if action == "raise":
            raise KeyError("no such way")
        self.at += 1
        return f"at {self.at}", self.at / 4, self.at >= 3

    def describe(self):
        return {"far": float(self.at > 1)}
"""


@pytest.fixture
def world(tmp_path):
    """The environment that a text defines."""

    def load(text: str = WALK, seconds: float = 5.0):
        path = tmp_path / "walk.py"
        path.write_text(text)
        return task_of(str(path), seconds)

    return load


def test_an_episode_is_a_record_of_its_turns(world):
    walk = world()
    one, other = (walk.begin(Row(at=at), seed=0, max_turns=2) for at in (0, 1))
    walk.step_all([one, other], ["N", "E"])
    walk.step_all([one, other], ["S", "W"])
    assert (one.states, one.actions, one.rewards) == (["at 0", "at 1"], ["N", "S"], [0.25, 0.5])
    assert (one.is_over, one.has_ended, other.is_over) == (False, True, True)
    assert walk.earned(other) == {"reward": 1.25}
    assert walk.described(other) == {"far": 1.0, "faults": 0}
    other.settle(3.0)
    assert other.rewards == [0.5, 2.5]


def test_a_long_play_is_printed_with_its_beginning_and_its_end(world):
    lines = turn_lines([("assistant" if turn % 2 else "user", str(turn)) for turn in range(30)])
    assert [line.split()[-1] for line in lines] == ["0", "1", "2", "3", "4", "5", "...", "25", "26", "27", "28", "29"]
    walk = world(WALK + "\ndef optimal(row):\n    return 3 - row['at']\n")
    assert walk.right_answer({"at": 1}) == "possible in 2 turns"


@pytest.mark.parametrize(("action", "sentence"), [
    ("hang", "step, turn 2, gave no answer within 1 s"),
    ("crash", "step, turn 2, ended its process (Killed)"),
    ("raise", "step raised KeyError: 'no such way' (line 18)"),
])  # fmt: skip
def test_a_broken_environment_ends_its_own_episode_only(world, capsys, action, sentence):
    """Those whose process is gone with it are repeated in another one, and go on where they were."""
    walk = world(seconds=1.0)
    episodes = [walk.begin(Row(at=0), seed=0, max_turns=5) for _ in range(6)]
    walk.step_all(episodes, ["N"] * 6)
    began = time.monotonic()
    walk.step_all(episodes, [action, *["N"] * 5])
    assert time.monotonic() - began < 20
    assert (episodes[0].fault, episodes[0].has_ended, walk.described(episodes[0])["faults"]) == (sentence, True, 1)
    assert sentence in capsys.readouterr().err
    walk.step_all(episodes[1:], ["N"] * 5)
    assert [(episode.observation, episode.is_over) for episode in episodes[1:]] == [("at 3", True)] * 5
    assert episodes[0].rewards == [0.25, 0.0]


def test_a_row_may_hold_what_json_does_not(world):
    walk = world(changed('row.get("at", 0)', 'len(row["day"])'))
    assert walk.begin(Row(day=datetime.date(2026, 11, 28)), seed=0, max_turns=1).observation == "at 10"


def test_an_environment_that_forks_is_played_on_by_one_process(world):
    walk = world()
    episodes = [walk.begin(Row(at=0), seed=0, max_turns=5) for _ in range(4)]
    for _ in range(2):
        walk.step_all(episodes, ["fork"] * 4)
    time.sleep(0.4)  # the children end
    walk.step_all(episodes, ["N"] * 4)
    assert [episode.observation for episode in episodes] == ["at 3"] * 4


def test_an_environment_that_always_fails_ends_the_run(world):
    """But not because the last two episodes fail."""
    walk = world()
    late = [walk.begin(Row(), seed=0, max_turns=5) for _ in range(2)]
    walk.step_all(late, ["N", "N"])
    walk.step_all(late, ["raise", "raise"])
    assert [episode.has_ended for episode in late] == [True, True]
    episodes = [walk.begin(Row(), seed=0, max_turns=5) for _ in range(2)]
    with pytest.raises(UserError, match="none of 2 episodes can go on: step raised KeyError"):
        walk.step_all(episodes, ["raise"] * 2)


def changed(old: str, new: str) -> str:
    assert old in WALK
    return WALK.replace(old, new)


STEP = 'return f"at {self.at}", self.at / 4, self.at >= 3'


@pytest.mark.parametrize(("text", "sentence"), [
    ("x = 1", "it defines no class Environment"),
    (changed("def step", "def steps"), r"its class Environment has no method step\(action\)"),
    (changed("(self, row, seed)", "(self, row)"), r"reset raised TypeError: .*takes 2 positional arguments"),
    (changed('return f"at {self.at}"\n', "return self.at\n"), "reset must return an observation, a str, not 0"),
    (changed('row.get("at", 0)', 'row["place"]'), r"reset raised KeyError: 'place' \(line 6\)"),
    (changed(STEP, "return 1"), "step must return observation, finite reward and done .*, not 1"),
    (changed("self.at / 4", "float('nan')"), "step must return observation, finite reward and done"),
    (changed("self.at >= 3", "self.at"), "step must return observation, finite reward and done"),
    (changed("self.at += 1", "self.at += self.ways[action]"), r"step raised AttributeError.*after the action '\?'"),
    (changed("float(self.at > 1)", "'yes'"), "describe gives 'far' the value 'yes', which is not a number"),
    (changed('"far"', '"turns"'), "cannot use the name 'turns'"),
    (changed('f"at {self.at}"\n', 'f"at {id(self)}"\n'), "two resets with the same row and seed show different"),
    (changed("self.at += 1", "time.sleep(60)"), "step, turn 1, gave no answer within 1 s"),
    (changed("import os", "REWARD_WEIGHTS = {'a': 1, 'b': 2}\nimport os"), "REWARD_WEIGHTS must name one component"),
    (changed("import os", "1 / 0\nimport os"), "cannot be imported: ZeroDivisionError"),
])  # fmt: skip
def test_each_mistake_in_an_environment_is_one_sentence(world, text, sentence):
    with pytest.raises(UserError, match=sentence) as found:
        world(text, seconds=1.0).try_play(Row())
    assert "\n" not in str(found.value)
    assert str(found.value).startswith(("--environment", "--task"))


@pytest.mark.parametrize("budget", [0, "5", 2.5, True, None])
def test_a_budget_of_turns_is_a_whole_number(world, budget):
    with pytest.raises(UserError, match="a row: max_turns must be a whole number above 0, not"):
        world().begin(Row(max_turns=budget), 0, 3)


def test_an_environment_is_no_task_and_a_task_no_environment(world, tmp_path):
    world()
    with pytest.raises(UserError, match=r"is an environment of many turns: agents/world/train.py plays it"):
        task_of(str(tmp_path / "walk.py"))
    with pytest.raises(UserError, match="--environment gsm8k: it defines no class Environment"):
        task_of("gsm8k", 5.0)


def test_a_player_forgets_the_oldest_episodes_and_can_repeat_them():
    closed = []

    class Count:
        def reset(self, row, seed):
            self.number = 0
            return "0"

        def step(self, action):
            self.number += 1
            return str(self.number), 0.0, action == "end"

        def close(self):
            closed.append(self.number)

    player = Player(Count, "")
    for episode in range(KEPT + 2):
        player.play(episode, {}, 0, [], "")
    assert closed == [0, 0]
    with pytest.raises(RuntimeError, match="played again in another one it shows something else"):
        player.play(1, {}, 0, ["a", "b", "end"], "7")
    assert player.play(0, {}, 0, ["a", "b", "end"], "2")["observation"] == "3"
    assert closed[2:] == [3]


def test_spread_gives_a_turn_s_tokens_its_advantage(load_script):
    spread = load_script("agents/world/train.py").spread
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 1, 0], [1, 0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]])
    found = spread([[1.0, 2.0, 3.0], [-1.0, 0.5], []], mask)
    assert found.tolist() == [[0, 1, 1, 0, 0, 2, 0, 3, 0], [-1, 0, 0.5, 0.5, 0.5, 0, 0, 0, 0], [0.0] * 9]


def test_long_rows_have_the_log_probs_of_plain_transformers(load_script, tmp_path):
    """Ten turns, some of them cut off by their budget: every sampled token from the complete row, to 2e-5."""
    train = load_script("agents/world/train.py")
    path, rows = tmp_path / "walk.py", tmp_path / "rows.jsonl"
    path.write_text(WALK.replace("self.at >= 3", "False"))
    rows.write_text("".join(json.dumps({"at": at}) + "\n" for at in range(3)))
    flags = f"--environment {path} --data {rows} --eval-prompts 1 --prompts-per-step 2 --model tiny"
    flags += " --max-turns 10 --max-turn-tokens 5 --temperature 0.9"
    config = train.parse_config(train.Config, flags.split(), "", train.RESOLVED)
    task, policy = train.load_task(config), load_policy(config, config.temperature)
    played = train.converse(config, task, policy, task.train_rows, [0, 1], 2, key=(0, 1))
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=torch.float32)
    for row in played:
        assert row.episode.num_turns == row.num_turns == 10
        with torch.no_grad():
            logits = model(torch.tensor([row.ids])).logits[0] / 0.9
        log_probs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(row.ids)[1:, None])[:, 0]
        for place, (is_action, recorded) in enumerate(zip(row.action_mask, row.sampler_log_probs, strict=True)):
            assert recorded == (pytest.approx(log_probs[place - 1].item(), abs=2e-5) if is_action else 0.0)
        assistant, user = "<|im_start|>assistant\n{}<|im_end|>\n", "<|im_start|>user\n{}<|im_end|>\n"
        seen = [text for role, text in row.turns if role == "user"]
        said = [user.format(f"at {row.episode.row['at']}"), *map(assistant.format, row.episode.actions)]
        expected = "".join(itertools.chain(*itertools.zip_longest(said, ["", *map(user.format, seen)], fillvalue="")))
        assert policy.tokenizer.decode(row.ids) == expected[: -1 if row.finish_reason == "stop" else -11]
        ends = [place for place, i in enumerate(row.ids) if i in policy.end_of_turn_ids and row.action_mask[place - 1]]
        assert {row.action_mask[place] for place in ends} == {0, 1}  # some turns are ended for the policy
        assert keyed_generator("world", 0, 1, row.prompt_index).integers(2**31) == row.episode.seed


def test_an_episode_whose_texts_fill_the_context_ends_and_says_so(load_script, tmp_path, capsys):
    train = load_script("agents/world/train.py")
    path = tmp_path / "walk.py"
    path.write_text(changed(STEP, 'return "word " * 2000, 0.5, False') + "def rows(split): return [{}, {}, {}, {}]")
    flags = f"--environment {path} --model tiny --eval-prompts 1 --prompts-per-step 2 --max-turns 4"
    config = train.parse_config(train.Config, flags.split(), "", train.RESOLVED)
    task, policy = train.load_task(config), load_policy(config, config.temperature)
    played = train.converse(config, task, policy, task.train_rows, [0], 2, key=(0, 1))
    assert [(row.episode.num_turns, row.rewards, row.description["faults"]) for row in played] == [
        (1, {"reward": 0.5}, 1)
    ] * 2
    assert len(played[0].ids) == 1024
    assert capsys.readouterr().err.count("the model's context is full of what the world has shown") == 1
