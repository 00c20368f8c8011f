"""Gymnasium's environments with discrete actions: `--task gymnasium:FrozenLake-v1`.

An observation is the environment's own text rendering if it has one (`render_mode="ansi"`: FrozenLake, Taxi,
CliffWalking), otherwise its text or its numbers. Gymnasium gives the seed of a row to `reset`: it decides on the start
and on all chance after it, so that the completions of a group play the same world.

https://gymnasium.farama.org/api/env/
"""

import math
import re
import warnings
from types import SimpleNamespace

import gymnasium
import numpy
from gymnasium import spaces

from common.errors import UserError

from harness.environments.other_packages import one_line, pop_rows, seeded_rows, split_settings, unknown

MOST_NUMBERS = 64  # of an observation: more, such as the pixels of an image, are no text for a policy
MOST_ACTIONS = 100
SYSTEM_PROMPT = "You act in an environment. Answer each observation with one of the actions, and nothing else."
# Worlds that render themselves as text, but do not name their actions (from their documentation)
NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}

_COLOR = re.compile(r"\x1b\[(\d+)(?:;1)?m(.*?)\x1b\[0m", re.DOTALL)
_COLOR_NAMES = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def load(name: str) -> SimpleNamespace:
    """The environment that `name` registers; the rest of the name is given to `gymnasium.make`.

    `actions=left,right` names the actions, `rows=200` sets the number of rows. Raises UserError for an unknown name,
    for settings that the environment does not have, for actions that are not discrete, and for an observation that
    cannot be text.
    """
    env_id, settings = split_settings(name)
    numbers, given = pop_rows(settings), settings.pop("actions", None)
    env = _make(env_id, settings)
    names = _action_names(env, given)
    if env.render_mode != "ansi" and (size := _count(env.observation_space)) > MOST_NUMBERS:
        raise UserError(f"its observation is no text, but {size} numbers (at most {MOST_NUMBERS})")
    env.close()

    class Environment(GymnasiumEnvironment):
        make, action_names = staticmethod(lambda: _make(env_id, settings)), names

    return SimpleNamespace(
        Environment=Environment, rows=lambda split: seeded_rows(split, numbers), SYSTEM_PROMPT=SYSTEM_PROMPT
    )


class GymnasiumEnvironment:
    """One episode of an environment of Gymnasium, in text; `load` makes a subclass for each name.

    An action is the name or the number of an action, or a text that mentions exactly one. A text that is no action
    changes nothing, has reward 0, and is answered with the list of actions.
    """

    make, action_names = None, ()

    def __init__(self):
        self._env, self._observation = self.make(), None
        self._no_actions = 0
        self._first = int(self._env.action_space.start)
        self._indices = {name: index for index, name in enumerate(self.action_names)}
        self._indices |= {str(self._first + index): index for index in range(len(self.action_names))}

    def reset(self, row: dict, seed: int) -> str:
        self._observation, _ = self._env.reset(seed=row["seed"])
        return f"{self._text()}\n{self._listed()}"

    def step(self, action: str) -> tuple[str, float, bool]:
        index = self._read(action)
        if index is None:
            self._no_actions += 1
            return f"This is no action. {self._listed()}", 0.0, False
        self._observation, reward, terminated, truncated, _ = self._env.step(self._first + index)
        return self._text(), float(reward), bool(terminated or truncated)

    def state(self) -> str:
        """The observation without its rendering, which can name the last action as well."""
        return as_text(self._observation)

    def describe(self) -> dict[str, float]:
        """`no_actions`: the number of turns that were no action."""
        return {"no_actions": float(self._no_actions)}

    def close(self) -> None:
        self._env.close()

    def _text(self) -> str:
        return plain(self._env.render()) if self._env.render_mode == "ansi" else as_text(self._observation)

    def _listed(self) -> str:
        return f"Actions: {', '.join(self.action_names)}."

    def _read(self, action: str) -> int | None:
        text = action.strip().lower()
        if text in self._indices:
            return self._indices[text]
        found = {self._indices[word] for word in re.findall(r"[\w-]+", text) if word in self._indices}
        return found.pop() if len(found) == 1 else None


def as_text(observation: object) -> str:
    """An observation in one line: text as it is, numbers with at most 3 decimals.

    >>> as_text((20, numpy.int64(7), 0)), as_text({"position": numpy.array([0.12345, 2])}), as_text("You see a door.")
    ('20 7 0', 'position: 0.123 2', 'You see a door.')
    """
    if isinstance(observation, str):
        return observation
    if isinstance(observation, dict):
        return ", ".join(f"{key}: {as_text(value)}" for key, value in observation.items())
    if isinstance(observation, tuple | list):
        return " ".join(map(as_text, observation))
    return " ".join(f"{number + 0.0:.3f}".rstrip("0").rstrip(".") for number in numpy.ravel(observation).tolist())


def plain(rendered: str) -> str:
    r"""Replace the colors of a rendering: a highlight becomes brackets; a last line names what has which color.

    >>> print(plain("\n\x1b[41mS\x1b[0mFFF\nFHFH\n"))
    [S]FFF
    FHFH
    >>> print(plain("|\x1b[35mR\x1b[0m: :\x1b[43m \x1b[0m|\n"))
    |R: :[ ]|
    R is magenta, [ ] is yellow
    """
    colored = []

    def mark(match: re.Match) -> str:
        code = int(match[1])
        text = f"[{match[2]}]" if code >= 40 else match[2]
        colored.append(f"{text} is {_COLOR_NAMES[code % 10]}")
        return text

    text = _COLOR.sub(mark, rendered).strip("\n")
    return text if len(colored) < 2 else f"{text}\n{', '.join(colored)}"


def _make(env_id: str, settings: dict[str, object]) -> gymnasium.Env:
    try:
        spec = gymnasium.spec(env_id)
    except gymnasium.error.DeprecatedEnv as error:
        raise UserError(one_line(error)) from None
    except gymnasium.error.Error:
        raise unknown(env_id, list(gymnasium.registry)) from None
    try:
        with warnings.catch_warnings():  # of the checks that it makes of an environment, and of old versions
            warnings.simplefilter("ignore")
            env = gymnasium.make(spec, **settings)
            if "ansi" in env.metadata.get("render_modes", ()):
                env.close()
                env = gymnasium.make(spec, **settings | {"render_mode": "ansi"})
    except Exception as error:  # what the environment raises in its __init__, and packages that it lacks
        raise UserError(f"it cannot be made: {one_line(error)}") from error
    return env


def _action_names(env: gymnasium.Env, given: object) -> tuple[str, ...]:
    """The names of the actions: those given, those that the environment tells (as Atari's do), or numbers."""
    space = env.action_space
    if not isinstance(space, spaces.Discrete) or space.n > MOST_ACTIONS:
        raise UserError(f"its actions are {space}, which a policy cannot name")
    if given is None and hasattr(env.unwrapped, "get_action_meanings"):
        given = ",".join(env.unwrapped.get_action_meanings())
    if given is None:
        given = ",".join(NAMES.get(re.split("-v", env.spec.id)[0], map(str, range(space.start, space.start + space.n))))
    names = tuple(str(given).lower().split(","))
    if len(set(names)) != space.n:
        raise UserError(f"actions must name {space.n} actions, not {len(set(names))}")
    return names


def _count(space: spaces.Space) -> float:
    """The number of values in an observation; infinite if they are of no fixed number."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(map(_count, space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces))
    return 1 if isinstance(space, spaces.Text) else math.inf if space.shape is None else math.prod(space.shape)
