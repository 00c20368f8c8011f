"""Plays the episodes of one environment's class, in this process or in a worker that imports little else.

An environment is a Python object, which cannot be sent to another process or saved. What can be is the play: a row, a
seed and the actions. A process that does not know an episode therefore repeats its actions, so that an environment
whose process has crashed costs its own episode only.
"""

import math
import traceback

KEPT = 1000  # episodes that can go on without being repeated; older ones are closed


class Player:
    """The environments of the present episodes; `path` is the file of their class, for messages."""

    def __init__(self, environment: type, path: str):
        self._environment, self._path = environment, path
        self._kept: dict[int, tuple[object, int]] = {}  # by episode: the environment, and how many actions it has seen

    def play(self, episode: int, row: dict, seed: int, actions: list[str], seen: str) -> dict:
        """Take the last of the actions, after which `seen` was seen, or reset without any; what is shown then.

        Raises:
            RuntimeError: a function of the environment raised or returned something else, or a repeated play shows
                something else; in one sentence.
        """
        environment, taken = self._kept.pop(episode, (None, -1))
        if taken != len(actions) - 1 or not actions:  # new, or another process has played it so far
            environment, shown = self._reset(row, seed)
            for action in actions[:-1]:
                shown = self._step(environment, action)
            if actions and shown["observation"] != seen:
                raise RuntimeError("its process ended, and played again in another one it shows something else")
        if actions:
            shown = self._step(environment, actions[-1])
        shown |= self._ask(environment, shown["observation"])
        if shown["done"]:
            self._close(environment)
        else:
            self._kept[episode] = environment, len(actions)
            if len(self._kept) > KEPT:
                self._close(self._kept.pop(next(iter(self._kept)))[0])
        return shown

    def _reset(self, row: dict, seed: int) -> tuple[object, dict]:
        environment = self._call("Environment", None)
        observation = self._call("reset", environment, row, seed)
        if not isinstance(observation, str):
            raise RuntimeError(f"reset must return an observation, a str, not {_short(observation)}")
        return environment, {"observation": observation, "reward": 0.0, "done": False}

    def _step(self, environment: object, action: str) -> dict:
        found = self._call("step", environment, action)
        is_triple = isinstance(found, tuple | list) and len(found) == 3
        if not is_triple or not isinstance(found[0], str) or not _is_number(found[1]) or not _is_truth(found[2]):
            raise RuntimeError(f"step must return observation, finite reward and done (a bool), not {_short(found)}")
        observation, reward, done = found
        return {"observation": observation, "reward": float(reward), "done": bool(done)}

    def _ask(self, environment: object, observation: str) -> dict:
        """What an environment need not define."""
        state = str(self._call("state", environment)) if hasattr(environment, "state") else observation
        potential = self._call("potential", environment) if hasattr(environment, "potential") else None
        if potential is not None and not _is_number(potential):
            raise RuntimeError(f"potential must return a finite number, not {_short(potential)}")
        found = self._call("describe", environment) if hasattr(environment, "describe") else {}
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise RuntimeError(f"describe must return a dict of numbers, not {_short(found)}")
        for name, value in found.items():
            if not _is_number(value):
                raise RuntimeError(f"describe gives {name!r} the value {_short(value)}, which is not a number")
        found = {name: value if type(value) is int else float(value) for name, value in found.items()}
        return {"state": state, "potential": None if potential is None else float(potential), "description": found}

    def _close(self, environment: object) -> None:
        if hasattr(environment, "close"):
            self._call("close", environment)

    def _call(self, function: str, environment: object | None, *arguments):
        try:
            return (self._environment if environment is None else getattr(environment, function))(*arguments)
        except (Exception, SystemExit) as error:  # user code can raise anything
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == self._path]
            place = f" (line {lines[-1]})" if lines else ""
            raise RuntimeError(f"{function} raised {type(error).__name__}: {error}{place}") from error


def _is_number(value: object) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(float(value))  # also of numpy
    except (TypeError, ValueError):
        return False


def _is_truth(value: object) -> bool:
    return type(value).__name__ in ("bool", "bool_")  # the second is numpy's


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
