"""TextArena's games for one player: `--task textarena:GuessTheNumber-v0`.

The first observation has the game's rules; each further one has only what is new, because the conversation holds the
rest. The reward comes at the end: 1 for a solved game, in many games a part of it otherwise.

https://github.com/LeonGuertler/TextArena
"""

import contextlib
import io
import platform
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace

import textarena
from textarena.envs.registration import ENV_REGISTRY

from common.errors import UserError

from harness.environments.other_packages import one_line, pop_rows, seeded_rows, split_settings, unknown


def load(name: str) -> SimpleNamespace:
    """The game with this name; the rest of the name is given to `textarena.make`.

    Raises UserError for an unknown name, for a game of several players, and for one that lacks data or a key.
    """
    game, settings = split_settings(name)
    numbers = pop_rows(settings)
    if game not in ENV_REGISTRY:
        plain = [known for known in ENV_REGISTRY if not known.endswith(("-raw", "-train"))]
        raise unknown(game, plain)

    class Environment(TextArenaEnvironment):
        make = staticmethod(lambda: _make(game, settings))

    first = Environment()
    try:
        first.reset({"seed": 0}, 0)
    except Exception as error:  # each game refuses a wrong number of players in its own way
        raise UserError(f"it cannot be played alone: {one_line(error)}") from error
    if not isinstance(first._game.state, textarena.SinglePlayerState):
        raise UserError("it cannot be played alone: it is a game of several players")
    return SimpleNamespace(Environment=Environment, rows=lambda split: seeded_rows(split, numbers))


class TextArenaEnvironment:
    """One game of TextArena; `load` makes a subclass for each name.

    TextArena draws from Python's global random numbers: each game gets its own, so that games that are played in turns
    do not change each other, and other code is not changed by a game.
    """

    make = None

    def __init__(self):
        self._random, self._reward, self._invalid = random.Random(0).getstate(), 0.0, 0
        with self._alone():
            self._game = self.make()

    def reset(self, row: dict, seed: int) -> str:
        self._random = random.Random(row["seed"]).getstate()
        with self._alone():
            self._game.reset(num_players=1, seed=row["seed"])
        return self._new_messages()

    def step(self, action: str) -> tuple[str, float, bool]:
        with self._alone():
            done, _ = self._game.step(action)
        state, reward = self._game.state, 0.0
        self._invalid += state.error_count > 0 or state.game_info[0]["invalid_move"]
        observation = self._new_messages()
        if done:
            rewards, info = state.close()
            # ThreeCardMonte gives the reason of an invalid move where the reward belongs
            reward = self._reward = float(rewards[0]) if isinstance(rewards[0], int | float) else 0.0
            observation = f"{observation}\n{info[0].get('reason', '')}".strip()
        return observation, reward, bool(done)

    def state(self) -> str:
        """All that the game remembers, also what the player does not see; without addresses in memory."""
        return re.sub(r" at 0x[0-9a-f]+", "", f"{self._game.state.turn} {self._game.state.game_state}")

    def describe(self) -> dict[str, float]:
        """`solved`: whether the whole reward was earned; `invalid_moves`: turns that were no valid move."""
        return {"solved": float(self._reward == 1), "invalid_moves": float(self._invalid)}

    def _new_messages(self) -> str:
        """What the game has said since the last turn; not the player's own moves."""
        own = textarena.ObservationType.PLAYER_ACTION
        messages = self._game.state.get_current_player_observation()
        # Countdown, Cryptarithm and Slitherlink record a move as (receiver, player's number, text)
        return "\n".join(text for _, text, kind in messages if kind != own and isinstance(text, str))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Give the block this game's random numbers, and keep what games print out of the terminal."""
        outside = random.getstate()
        random.setstate(self._random)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)


def _make(game: str, settings: dict[str, object]) -> textarena.Env:
    try:
        return textarena.make(game, **settings)
    except SyntaxError as error:
        raise UserError(f"Python {platform.python_version()} cannot compile its file: {one_line(error)}") from error
    except Exception as error:  # wrong settings, a missing package or file, or no key for a judge
        if missing := re.search(r"nltk\.download\('([\w-]+)'\)", str(error)):  # it tried to download them
            raise UserError(
                "it needs word lists, and there is no network to download them: on a machine with a network, run "
                f"python -m nltk.downloader {missing[1]}"
            ) from error
        raise UserError(f"it cannot be made: {one_line(error)}") from error
