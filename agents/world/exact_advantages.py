"""The exact advantage of every turn in tasks/thin_ice.py: what the other answers of turn_credit.py try to estimate.

The world is small and has no chance in it, so the values of the present policy can be computed instead of sampled:

    V(s, n) = sum_a pi(a | s) Q(s, a, n)        Q(s, a, n) = 1 if a pays in s, 0 in the water, else V(s', n-1)

for n turns that are left, V(s, 0) = 0. Then A_k = Q(s_k, a_k, n_k) - V(s_k, n_k).

pi(a | s) is the probability of the action's first token; the six are different, and what follows them is nearly
certain. A policy that reads the conversation
remembers more than the state, so its probabilities depend on the way to s, too. For states that the group has visited,
the mean over the visits is taken, and otherwise that of an episode that begins in s; the turn itself has the
probabilities that it had. Exact is the result for a policy without a memory, and a test compares it with Monte Carlo
for the bundled one.
"""

from collections import defaultdict

import torch

from common.chat import encode_prompt
from common.policy import Policy
from common.sampling import left_pad
from common.trajectory import Trajectory
from tasks.thin_ice import ACTIONS, PAID, SUNK, State, start_of, states_of, transition, view

ROWS = 64  # trajectories per forward pass


def exact_advantages(policy: Policy, trajectories: list[Trajectory]) -> list[list[float]]:
    """A_k of every turn of the trajectories' episodes, in units of reward, in float64."""
    episodes = [row.episode for row in trajectories]
    probabilities = acting_probabilities(policy, trajectories)  # of each episode and turn: one per action
    by_row = defaultdict(list)
    for number, row in enumerate(trajectories):
        by_row[row.prompt_index].append(number)
    advantages: list[list[float]] = [[] for _ in episodes]
    for numbers in by_row.values():
        row, visits = episodes[numbers[0]].row, defaultdict(list)
        walked = {number: walk(row, episodes[number].actions) for number in numbers}
        for number in numbers:
            for state, own in zip(walked[number], probabilities[number], strict=True):
                visits[state].append(own)
        table = fresh_probabilities(policy, row)
        table |= {state: torch.stack(own).mean(dim=0) for state, own in visits.items()}
        values = state_values(row, table, max(episodes[number].max_turns for number in numbers))
        for number in numbers:
            turns = zip(walked[number], episodes[number].actions, probabilities[number], strict=True)
            for turn, (state, action, own) in enumerate(turns):
                left = episodes[number].max_turns - turn
                q = action_values(row, state, values[left - 1])
                stays = values[left - 1][state]  # after any text that is no action
                expected = float(own @ q + (1 - own.sum()) * stays)
                name = action.strip()
                advantages[number].append((float(q[ACTIONS.index(name)]) if name in ACTIONS else stays) - expected)
    return advantages


def walk(row: dict, actions: list[str]) -> list[State]:
    """The state before each of the actions."""
    states = [start_of(row)]
    for action in actions:
        states.append(transition(row, states[-1], action.strip()))
    return states[:-1]


def action_values(row: dict, state: State, after: dict[State, float]) -> torch.Tensor:
    """Q of every action, from the values of what follows: (actions,)."""
    ends = [transition(row, state, action) for action in ACTIONS]
    return torch.tensor(
        [1.0 if end == PAID else 0.0 if end == SUNK else after[end] for end in ends], dtype=torch.float64
    )


def state_values(row: dict, table: dict[State, torch.Tensor], max_turns: int) -> list[dict[State, float]]:
    """V(s, n) for n = 0..max_turns, by the equation above; the rest of the probability changes nothing."""
    values = [dict.fromkeys(states_of(row), 0.0)]
    for _ in range(max_turns):
        before = values[-1]
        values.append({
            state: float(table[state] @ action_values(row, state, before) + (1 - table[state].sum()) * before[state])
            for state in before
        })  # fmt: skip
    return values


@torch.no_grad()
def fresh_probabilities(policy: Policy, row: dict) -> dict[State, torch.Tensor]:
    """pi(a | s) of every state, in an episode that begins there: (actions,) each."""
    states = states_of(row)
    asked = [[{"role": "user", "content": view(row, state)}] for state in states]
    prompts = [tuple(encode_prompt(policy.tokenizer, messages)) for messages in asked]
    inputs = dict(zip(("input_ids", "attention_mask"), left_pad(prompts, policy.pad_id, policy.device), strict=True))
    with policy.inference(), policy.autocast():
        logits = policy.next_logits(None, **inputs, position_ids=_positions(inputs["attention_mask"]))
    return dict(zip(states, _of_actions(policy, logits), strict=True))


@torch.no_grad()
def acting_probabilities(policy: Policy, trajectories: list[Trajectory]) -> list[torch.Tensor]:
    """pi(a | everything before) at every turn: (turns, actions) for each trajectory."""
    found = []
    for start in range(0, len(trajectories), ROWS):
        rows = trajectories[start : start + ROWS]
        ids, mask = left_pad([tuple(row.ids) for row in rows], policy.pad_id, policy.device)
        with policy.inference(), policy.autocast():
            logits = policy.model(input_ids=ids, attention_mask=mask, position_ids=_positions(mask)).logits
        for row, own in zip(rows, logits, strict=True):
            bits, shift = row.action_mask, ids.shape[1] - len(row.ids)
            starts = [shift + place for place, bit in enumerate(bits) if bit and not bits[place - 1]]
            found.append(_of_actions(policy, own[[place - 1 for place in starts]]))
    return found


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def _of_actions(policy: Policy, logits: torch.Tensor) -> torch.Tensor:
    """The probabilities of the actions' first tokens: (rows, actions) in float64, for logits (rows, V)."""
    first = [policy.tokenizer.encode(action, add_special_tokens=False)[0] for action in ACTIONS]
    return (logits.float() / policy.temperature).softmax(dim=-1)[:, first].double().cpu()
