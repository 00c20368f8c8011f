"""Credit over turns, against slow loops written from the papers, and exact advantages against all plays of a map."""

import itertools
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import exact_advantages as exact
import pytest
import torch
import turn_credit as credit

from common.episode import Episode
from common.errors import UserError
from common.experience import collate
from common.trajectory import Trajectory
from tasks.thin_ice import ACTIONS, PAID, SUNK, start_of, transition

GAMMA, EPS = 0.9, 1e-4
NAMES = ("episode", "reward_to_go", "gigpo", "action_mean", "walked_graph", "progress", "potential")


def played(seed: int, group_size: int = 6, is_paid: bool = True) -> list[Episode]:
    """Random walks of one to nine turns on a circle of four states; some end with a reward, others earn on the way."""
    rng, episodes = random.Random(seed), []
    for _ in range(group_size):
        length, state = rng.randint(1, 9), 0
        episode = Episode({}, 0, 0, 9, potentials=[0.0])
        for turn in range(length):
            action = rng.choice(("+", "-", "stay"))
            episode.states.append(f"s{state}")
            episode.actions.append(action)
            state = (state + {"+": 1, "-": -1, "stay": 0}[action]) % 4
            earned = rng.random() < 0.2 or (turn == length - 1 and rng.random() < 0.6)
            episode.rewards.append(float(is_paid and earned))
            episode.potentials.append(-float(state))
        episode.is_over = rng.random() < 0.5
        episodes.append(episode)
    return episodes


def advantages(name: str, episodes: list[Episode], group_size: int = 6, **settings) -> list[list[float]]:
    rows = [SimpleNamespace(episode=episode) for episode in episodes]
    usual = {"credit": name, "turn_discount": GAMMA, "group_size": group_size, "process_weight": 0.1}
    return credit.turn_advantages(SimpleNamespace(**usual | settings), None, rows)


# ---- the slow loops: one number at a time


def slow_to_go(rewards: list[float], turn: int) -> float:
    return sum(GAMMA ** (later - turn) * rewards[later] for later in range(turn, len(rewards)))


def slow_normal(value: float, among: list[float]) -> float:
    if len(among) < 2 or max(among) == min(among):
        return 0.0
    mean = sum(among) / len(among)
    return (value - mean) / (math.sqrt(sum((one - mean) ** 2 for one in among) / (len(among) - 1)) + EPS)


def slow_advantage(name: str, group: list[Episode], number: int, turn: int) -> float:
    """Before the division by the root mean square of the step, where a method has it."""
    episode = group[number]
    turns = [(one, k) for one in group for k in range(len(one.actions))]
    same_state = [(one, k) for one, k in turns if one.states[k] == episode.states[turn]]
    same_action = [(one, k) for one, k in same_state if one.actions[k] == episode.actions[turn]]

    def to_go(some: list, rewards=lambda one: one.rewards) -> list[float]:
        return [slow_to_go(rewards(one), k) for one, k in some]

    def shaped(one: Episode) -> list[float]:
        before, after = one.potentials[:-1], one.potentials[1:]
        if name == "progress":
            return [r + 0.1 * (then > now) for r, now, then in zip(one.rewards, before, after, strict=True)]
        after = [*after[:-1], 0.0]
        return [r + 0.1 * (GAMMA * then - now) for r, now, then in zip(one.rewards, before, after, strict=True)]

    own = slow_to_go(episode.rewards, turn)
    whole = slow_normal(sum(episode.rewards), [sum(one.rewards) for one in group])
    if name == "episode":
        return whole
    if name == "reward_to_go":
        return slow_normal(own, to_go(turns))
    if name == "gigpo":
        return whole + slow_normal(own, to_go(same_state))
    if name == "action_mean":
        of_action, of_state = to_go(same_action), to_go(same_state)
        return sum(of_action) / len(of_action) - sum(of_state) / len(of_state)
    return slow_normal(slow_to_go(shaped(episode), turn), to_go(turns, shaped))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "walked_graph"])
def test_the_advantages_of_turns_are_those_of_slow_loops(name):
    groups = [played(seed) for seed in range(4)]
    found = advantages(name, [episode for group in groups for episode in group])
    slow = [
        [slow_advantage(name, group, number, turn) for turn in range(len(group[number].actions))]
        for group in groups
        for number in range(len(group))
    ]
    scale = 1.0
    if name == "action_mean":
        flat = [value for row in slow for value in row]
        scale = math.sqrt(sum(value * value for value in flat) / len(flat))
    for row, expected in zip(found, slow, strict=True):
        assert row == pytest.approx([value / scale for value in expected], abs=1e-12)


def test_the_walked_graph_has_the_values_of_its_linear_equations():
    """V = r + gamma P V over the visits, solved at once instead of sweep by sweep."""
    group = played(3, group_size=8)
    states = sorted({state for episode in group for state in episode.states})
    visits = {state: [] for state in states}
    for episode in group:
        for turn, state in enumerate(episode.states):
            after = episode.states[turn + 1] if turn + 1 < len(episode.states) else None
            visits[state].append((episode.rewards[turn], after))
    moves, rewards = torch.zeros(len(states), len(states), dtype=torch.float64), torch.zeros(len(states)).double()
    for here, state in enumerate(states):
        for reward, after in visits[state]:
            rewards[here] += reward / len(visits[state])
            if after is not None:
                moves[here, states.index(after)] += GAMMA / len(visits[state])
    values = dict(
        zip(states, torch.linalg.solve(torch.eye(len(states)).double() - moves, rewards).tolist(), strict=True)
    )
    for episode, row in zip(group, credit.walked_graph(group, GAMMA), strict=True):
        following = [*(GAMMA * values[state] for state in episode.states[1:]), 0.0]
        worth = [values[state] for state in episode.states]
        expected = [r + then - now for r, then, now in zip(episode.rewards, following, worth, strict=True)]
        assert row == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("progress", "potential")])
def test_without_a_difference_nothing_is_trained(name):
    assert not any(value for row in advantages(name, played(1, is_paid=False)) for value in row)
    single = [Episode({}, 0, 0, 1, states=["a"], actions=["b"], rewards=[0.3], potentials=[0.0, 0.0]) for _ in range(3)]
    assert advantages(name, single, group_size=3) == [[0.0], [0.0], [0.0]]


def test_a_farm_pays_a_process_reward_and_no_potential():
    """A straight way to the reward in two turns, and forty turns of one step back and one forward, without it."""

    def episode(states: list[int], is_paid: bool) -> Episode:
        turns = len(states) - 1
        rewards = [0.0] * (turns - 1) + [float(is_paid)]
        return Episode({}, 0, 0, 40, states=list(map(str, states[:-1])), actions=["go"] * turns, rewards=rewards,
                       potentials=[float(state) for state in states])  # fmt: skip

    straight, circle = episode([-2, -1, 0], is_paid=True), episode([-2, -1] * 20 + [-2], is_paid=False)
    farmed, goal = (sum(credit.progress_rewards([one], 0.1)[0]) for one in (circle, straight))
    assert farmed == pytest.approx(2.0)
    assert goal == pytest.approx(1.2)
    first = [
        credit.rewards_to_go([one], 0.95, credit.potential_rewards([one], 0.1, 0.95))[0][0]
        for one in (circle, straight)
    ]
    assert first == pytest.approx([0.2, 0.95 + 0.2])  # the reward to go minus the potential of the start, -0.2


def test_potential_shaping_is_a_baseline_for_each_state():
    group = played(5)
    shaped = credit.rewards_to_go(group, GAMMA, credit.potential_rewards(group, 0.1, GAMMA))
    for episode, plain, row in zip(group, credit.rewards_to_go(group, GAMMA), shaped, strict=True):
        expected = [value - 0.1 * now for value, now in zip(plain, episode.potentials[:-1], strict=True)]
        assert row == pytest.approx(expected)


@pytest.mark.parametrize(("credit_name", "log_exact", "sentence"), [
    ("progress", False, "--credit progress: --environment walk.py defines no method potential()"),
    ("exact", False, "--credit exact: exact advantages can be computed in the bundled world only"),
    ("gigpo", True, "--log-exact: exact advantages can be computed in the bundled world only"),
])  # fmt: skip
def test_a_credit_is_refused_where_it_cannot_be_computed(credit_name, log_exact, sentence):
    class World(SimpleNamespace):
        def __str__(self):
            return f"--environment {self.name}"

    config = SimpleNamespace(credit=credit_name, log_exact=log_exact)
    credit.check_credit(config, World(name="thin_ice", has_potential=True))
    with pytest.raises(UserError, match=re.escape(sentence)):
        credit.check_credit(config, World(name="walk.py", has_potential=False))


def test_a_turn_s_reward_is_at_its_last_token(load_script):
    """As agents/critic puts it, for a world that pays on the way."""
    critic, rng = load_script("agents/critic/train.py"), random.Random(0)
    for _ in range(50):
        lengths = [[rng.randint(1, 4) for _ in range(rng.randint(1, 5))] for _ in range(3)]
        earned = [[rng.random() for _ in turns] for turns in lengths]
        mask, expected = torch.zeros(3, 40), torch.zeros(3, 40)
        for row, turns in enumerate(lengths):
            place = rng.randint(0, 2)
            for length, reward in zip(turns, earned[row], strict=True):
                mask[row, place : place + length] = 1
                expected[row, place + length - 1] = reward
                place += length + rng.randint(1, 3)
        assert torch.equal(critic.spread(earned, mask.long()) * critic.ends_turn(mask.long()), expected)


# ---- exact advantages


ROW = {"size": 2, "at": [1, 1], "has": False, "coin": [1, 2], "bridge": [2, 2], "ice": [[2, 1]], "max_turns": 5}


def test_echo_trains_each_token_that_the_world_has_shown(load_script):
    """Against a slow loop: -lambda / tokens of the world in the row / rows, also where nothing was earned."""
    world = load_script("agents/world/train.py")
    config = world.Config(observation_weight=0.3, steps=1)
    rows = []
    for length, turns in ((2, [(3, 4), (1, 0)]), (4, [(1, 2), (2, 3), (1, 0)]), (1, [(2, 0)])):
        row = Trajectory([1] * length, length, [0] * length, [0.0] * length, prompt_index=len(rows))
        for acted, shown in turns:
            for _ in range(acted):
                row.ids.append(2)
                row.action_mask.append(1)
                row.sampler_log_probs.append(-1.0)
            row.observe([3] * shown)
        rows.append(row)
    micro = collate(rows, 0)
    micro.advantages = torch.tensor([[1.0], [0.0], [0.0]])
    log_probs = torch.rand(micro.action_mask.shape, generator=torch.Generator().manual_seed(0)).log().requires_grad_()
    terms, diagnostics = world.policy_loss(config, log_probs, micro, num_rows=3)
    terms.sum().backward()
    for i, row in enumerate(rows):
        shown = [t for t, id_ in enumerate(row.ids) if id_ == 3]
        acted = [t for t, id_ in enumerate(row.ids) if id_ == 2]
        for t in range(1, micro.sequences.shape[1]):
            wanted = -0.3 / len(shown) / 3 if t in shown else 0.0
            wanted -= micro.advantages[i, 0].item() / len(acted) / 3 if t in acted else 0.0
            assert log_probs.grad[i, t - 1].item() == pytest.approx(wanted), (i, t)
        surprise = -sum(log_probs[i, t - 1].item() for t in shown) / max(1, len(shown))
        assert diagnostics["surprise"][i].item() == pytest.approx(surprise)


def test_with_echo_a_play_without_a_reward_still_teaches(load_script, tmp_path):
    """No group has a difference: GRPO's gradient is 0, and ECHO's isn't."""
    world, norms = load_script("agents/world/train.py"), {}
    for weight in ("0", "0.1"):
        flags = ["--steps", "1", "--runs-dir", str(tmp_path), "--name", weight, "--data", str(drowned(tmp_path))]
        flags += ["--prompts-per-step", "1", "--group-size", "2", "--eval-every", "0", "--eval-prompts", "1"]
        world.main([*flags, "--observation-weight", weight])
        (metrics,) = tmp_path.glob(f"*/{weight}/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        (norms[weight],) = [row["loss/grad_norm"] for row in rows if "loss/grad_norm" in row]
    assert norms["0"] == 0 < norms["0.1"]


def drowned(folder: Path) -> Path:
    """Two maps on which two turns are too few."""
    path = folder / "drowned.jsonl"
    row = {"size": 4, "at": [1, 1], "has": False, "coin": [4, 4], "bridge": [1, 4], "ice": [[2, 2]], "max_turns": 2}
    path.write_text("".join(json.dumps(row | {"ice": [[2, y]]}) + "\n" for y in (2, 3)))
    return path


def test_exact_values_are_the_means_of_all_plays(monkeypatch):
    """Every play of five turns on a small map, with its probability, for a policy that is a table of states."""
    draws = torch.Generator().manual_seed(0)
    states = exact.states_of(ROW)
    table = {state: 0.95 * torch.rand(6, generator=draws, dtype=torch.float64).softmax(0) for state in states}
    worth = 0.0
    for actions in itertools.product(range(7), repeat=5):  # the last is any text that is no action
        state, chance = start_of(ROW), 1.0
        for action in actions:
            if state not in (PAID, SUNK):
                chance *= float(table[state][action]) if action < 6 else 1 - float(table[state].sum())
                state = transition(ROW, state, ACTIONS[action]) if action < 6 else state
            else:
                chance /= 7  # what would follow an end
        worth += chance * (state == PAID)
    values = exact.state_values(ROW, table, 5)
    assert values[5][start_of(ROW)] == pytest.approx(worth, abs=1e-12)

    episode = Episode(
        ROW, 0, 0, 5, actions=["N", "what", "take", "E", "pay"], states=[""] * 5, rewards=[0.0] * 4 + [1.0]
    )
    walked = exact.walk(ROW, episode.actions)
    monkeypatch.setattr(exact, "fresh_probabilities", lambda policy, row: table)
    monkeypatch.setattr(exact, "acting_probabilities", lambda *_: [torch.stack([table[state] for state in walked])])
    [found] = exact.exact_advantages(None, [SimpleNamespace(episode=episode, prompt_index=0)])
    for turn, (state, action) in enumerate(zip(walked, episode.actions, strict=True)):
        left = 5 - turn
        after = transition(ROW, state, action)
        q = 1.0 if after == PAID else values[left - 1][after]
        assert found[turn] == pytest.approx(q - values[left][state], abs=1e-12)
    assert sum(found) == pytest.approx(1 - values[5][start_of(ROW)], abs=1e-12)  # no chance is left but the policy's


def test_probabilities_are_those_of_the_policy_before_each_turn(load_script):
    """Of the sampled actions: what the sampler has recorded, in first turns and later ones."""
    policy, played = play_the_bundled_world(load_script, maps=[0, 5], group_size=4)
    first = [policy.tokenizer.encode(action, add_special_tokens=False)[0] for action in ACTIONS]
    assert len(set(first)) == len(ACTIONS)
    for row, found in zip(played, exact.acting_probabilities(policy, played), strict=True):
        starts = [place for place, bit in enumerate(row.action_mask) if bit and not row.action_mask[place - 1]]
        assert found.shape == (row.episode.num_turns, len(ACTIONS)) == (len(starts), 6)
        for place, action, own in zip(starts, row.episode.actions, found, strict=True):
            if action in ACTIONS:
                recorded = math.exp(row.sampler_log_probs[place])
                assert own[ACTIONS.index(action)].item() == pytest.approx(recorded, rel=1e-4)
        fresh = exact.fresh_probabilities(policy, row.episode.row)[start_of(row.episode.row)]
        assert found[0].tolist() == pytest.approx(fresh.tolist(), rel=1e-4)


@pytest.mark.slow
def test_exact_advantages_of_first_turns_equal_monte_carlo(load_script):
    """E[R | a_0] - E[R] over 1,024 plays of a map, to four standard errors and what memory may add."""
    policy, played = play_the_bundled_world(load_script, maps=[1], group_size=1024)
    found, clear = exact.exact_advantages(policy, played), 0
    returns = torch.tensor([sum(row.episode.rewards) for row in played]).double()
    for action in {row.episode.actions[0] for row in played}:
        chosen = torch.tensor([row.episode.actions[0] == action for row in played])
        if (count := int(chosen.sum())) >= 50:
            worth = returns[chosen].mean().item()
            error = 4 * (max(worth * (1 - worth), 0.01) / count) ** 0.5 + 0.02
            advantage = found[chosen.nonzero()[0].item()][0]
            assert worth - returns.mean().item() == pytest.approx(advantage, abs=error)
            clear += abs(advantage) > error
    assert clear  # otherwise the comparison shows nothing


def play_the_bundled_world(load_script, maps: list[int], group_size: int) -> tuple:
    train = load_script("agents/world/train.py")
    config = train.parse_config(train.Config, ["--eval-prompts", "1"], "", train.RESOLVED)
    task, policy = train.load_task(config), train.load_policy(config, config.temperature)
    return policy, train.converse(config, task, policy, task.train_rows, maps, group_size, key=(0, 1))
