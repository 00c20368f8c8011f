"""A running OpenEnv server as an environment: `--task openenv:http://127.0.0.1:8000`.

Each episode is a session of its own, so the server must allow as many sessions as there are episodes at a time. The
server gets the seed of a row; a server that ignores it plays other episodes when a run is resumed. An action goes into
the one field that the server's actions have, or into `?action=FIELD`; with several fields, it is a JSON object.

https://huggingface.co/docs/openenv
"""

import json
import re
import urllib.request
from types import SimpleNamespace

from openenv.core import GenericEnvClient

from common.errors import UserError

from harness.environments.other_packages import one_line, pop_rows, seeded_rows, split_settings

TIMEOUT = 10  # seconds for the first answer
_OTHER_FIELDS = {"metadata", "done", "reward"}  # which every action or observation of OpenEnv has


def load(name: str) -> SimpleNamespace:
    """The environment that the server at an address plays.

    Raises UserError if no OpenEnv server answers there, or if its actions have no field of the given name.
    """
    address, settings = split_settings(name)
    numbers, field = pop_rows(settings), settings.pop("action", None)
    if settings:
        raise UserError(f"it has no setting {sorted(settings)[0]!r}, but action and rows")
    fields = _action_fields(address)
    if field is not None and field not in fields:
        raise UserError(f"its actions have no field {field!r}, but {', '.join(fields)}")

    class Environment(OpenEnvEnvironment):
        url, field_types = address, fields if field is None else {field: fields[field]}

    return SimpleNamespace(Environment=Environment, rows=lambda split: seeded_rows(split, numbers))


class OpenEnvEnvironment:
    """One episode on a server; `load` makes a subclass for each address.

    An action that the server does not accept, for instance a word for a number, has reward 0, and is answered with the
    server's reason.
    """

    url, field_types = "", {}

    def __init__(self):
        self._client = GenericEnvClient(base_url=self.url).sync().connect()
        self._no_actions = 0

    def reset(self, row: dict, seed: int) -> str:
        return as_text(self._client.reset(seed=row["seed"]).observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        try:
            result = self._client.step(as_action(action, self.field_types))
        except (ValueError, RuntimeError) as error:  # RuntimeError is the client's for any error of the server
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                raise
            self._no_actions += 1
            return f"This is no action: {one_line(error)}", 0.0, False
        return as_text(result.observation), float(result.reward or 0.0), bool(result.done)

    def describe(self) -> dict[str, float]:
        """`no_actions`: the number of turns that were no action."""
        return {"no_actions": float(self._no_actions)}

    def close(self) -> None:
        self._client.close()


def as_action(text: str, field_types: dict[str, str]) -> dict:
    """The fields of an action; ValueError if several are needed, and the text is no JSON object, or for a wrong number.

    >>> as_action("up", {"move": "string"}), as_action(" 3 ", {"cell": "integer"})
    ({'move': 'up'}, {'cell': 3})
    >>> as_action('{"x": 1, "y": 2}', {"x": "integer", "y": "integer"})
    {'x': 1, 'y': 2}
    """
    if len(field_types) == 1:
        [(field, kind)] = field_types.items()
        return {field: text if kind == "string" else _from_json(text, f"one value, {kind}")}
    found = _from_json(text, what := f"a JSON object with {', '.join(field_types)}")
    if not isinstance(found, dict):
        raise ValueError(f"it must be {what}")
    return found


def as_text(observation: dict) -> str:
    """The only field of an observation, or a line for each.

    >>> as_text({"board": "X..", "done": False, "reward": None}), as_text({"board": "X..", "turn": 2})
    ('X..', 'board: X..\\nturn: 2')
    """
    fields = {name: value for name, value in observation.items() if name not in _OTHER_FIELDS}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    return "".join(texts.values()) if len(texts) < 2 else "\n".join(f"{name}: {text}" for name, text in texts.items())


def _from_json(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"it must be {what}") from error


def _action_fields(address: str) -> dict[str, str]:
    """The fields of the server's actions with their types, those that it requires if it requires any."""
    if not re.match(r"https?://", address):
        raise UserError("name a server's address, like openenv:http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/schema", timeout=TIMEOUT) as answer:
            action = json.load(answer)["action"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"no OpenEnv server answers there ({one_line(error)})") from error
    fields = {name: value.get("type", "any") for name, value in action["properties"].items()}
    fields = {name: kind for name, kind in fields.items() if name not in _OTHER_FIELDS}
    required = [name for name in fields if name in action.get("required", ())]
    return {name: fields[name] for name in required or fields}
