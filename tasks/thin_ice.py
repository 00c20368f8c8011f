"""A small world with a state: fetch the coin, pay it at the bridge, and do not step on thin ice.

A map of size x size cells has a coin, a bridge and some cells of thin ice. Each turn is one action, a word by itself:

    N E S W    go to the next cell; a step off the map changes nothing
    take       pick the coin up, where it lies
    pay        pay it at the bridge: reward 1, and the episode ends

Anything else is an error, which costs its turn. A step on thin ice ends the episode, and nothing can mend it: that is
what makes some turns matter more than others. The policy sees in which directions the coin lies (later the bridge), and
which neighbouring cells are ice:

    N E coin, ice W        the coin lies to the north-east, and the cell to the west is thin ice
    bridge                 the coin is in hand, and here is the bridge

A state is (x, y, has the coin), and no chance is left after the reset, so that everything can be computed:
agents/world/exact_advantages.py does. A row is a map with its start, the smallest number of turns to the reward
(`optimal`), and the budget of turns, three more (`max_turns`). imitation/tiny_policy/make_thin_ice.py writes them.
"""

from collections import deque

REWARD_WEIGHTS = {"correct": 1.0}
TRAIN_DATA, EVAL_DATA = "../data/thin_ice.jsonl", "../data/thin_ice_heldout.jsonl"
FIELDS = {"size": int, "at": list, "coin": list, "bridge": list, "ice": list, "has": bool, "max_turns": int}
KIND_FIELDS = ("optimal",)

MOVES = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}
ACTIONS = (*MOVES, "take", "pay")
PAID, SUNK = "paid", "sunk"  # the two ends

State = tuple[int, int, bool] | str  # x and y from 1, and whether the coin is in hand; or an end


class Environment:
    def reset(self, row: dict, seed: int) -> str:
        self.row, self.here, self.errors, self.turns_left = row, start_of(row), 0, distances(row)
        if self.here not in self.turns_left:
            raise ValueError(f"no way leads from {row['at']} to the reward")
        return view(row, self.here)

    def step(self, action: str) -> tuple[str, float, bool]:
        action = action.strip()
        self.errors += action not in ACTIONS
        self.here = transition(self.row, self.here, action)
        if self.here in (PAID, SUNK):
            return self.here, float(self.here == PAID), True
        error = "" if action in ACTIONS else "error, "
        return error + view(self.row, self.here), 0.0, False

    def state(self) -> str:
        return self.here if self.here in (PAID, SUNK) else " ".join(str(int(part)) for part in self.here)

    def potential(self) -> float:
        """Minus the number of turns that the best policy still needs; an end is as far as nothing on the map."""
        return -float(self.turns_left.get(self.here, 2 * self.row["size"] ** 2))

    def describe(self) -> dict[str, float]:
        optimal = self.turns_left[start_of(self.row)]
        lengths = {"near": optimal <= 3, "middle": 4 <= optimal <= 6, "far": optimal >= 7}
        return {"sunk": float(self.here == SUNK), "errors": self.errors} | {k: float(v) for k, v in lengths.items()}


def optimal(row: dict) -> int | None:
    """The number of turns that the best policy needs; None if there is no way."""
    return distances(row).get(start_of(row))


def start_of(row: dict) -> State:
    return (*row["at"], bool(row["has"]))


def transition(row: dict, state: State, action: str) -> State:
    """The state after an action."""
    x, y, has = state
    if action in MOVES:
        x, y = x + MOVES[action][0], y + MOVES[action][1]
        if not (1 <= x <= row["size"] and 1 <= y <= row["size"]):
            return state
        return SUNK if [x, y] in row["ice"] else (x, y, has)
    if action == "take" and [x, y] == row["coin"]:
        return (x, y, True)
    return PAID if action == "pay" and has and [x, y] == row["bridge"] else state


def view(row: dict, state: State) -> str:
    """What the policy sees in a state that is no end."""
    x, y, has = state
    goal_x, goal_y = row["bridge" if has else "coin"]
    ways = ["N"] * (goal_y > y) + ["S"] * (goal_y < y) + ["E"] * (goal_x > x) + ["W"] * (goal_x < x)
    ice = [name for name, (dx, dy) in MOVES.items() if [x + dx, y + dy] in row["ice"]]
    return " ".join([*ways, "bridge" if has else "coin"]) + (f", ice {' '.join(ice)}" if ice else "")


def states_of(row: dict) -> list[State]:
    """All states but the ends, reachable or not."""
    places = range(1, row["size"] + 1)
    return [(x, y, has) for has in (False, True) for x in places for y in places if [x, y] not in row["ice"]]


def distances(row: dict) -> dict[State, int]:
    """The smallest number of turns to the reward, from every state that has a way: breadth first, backwards."""
    before: dict[State, list[State]] = {}
    for state in states_of(row):
        for action in ACTIONS:
            before.setdefault(transition(row, state, action), []).append(state)
    found, queue = {PAID: 0}, deque([PAID])
    while queue:
        state = queue.popleft()
        for previous in before.get(state, []):
            if previous not in found:
                found[previous] = found[state] + 1
                queue.append(previous)
    return found
