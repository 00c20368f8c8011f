"""An environment as its file defines it (docs/environments.md): a task whose rewards come from playing it."""

import itertools
import json
import sys
from types import ModuleType

from common.episode import Episode
from common.errors import UserError

from harness.base.terminal import printable, say, short
from harness.data.rows import Row
from harness.task.task_file import TaskError, TaskFile
from harness.workers.playing import Player
from harness.workers.tool_processes import NUM_WORKERS, NoAnswerError, Workers, in_threads

MOST_FAULTS = 5  # different ones that are said
LONGEST = 100_000  # characters of what an environment shows, with its state and description
_PLAYER = "\nfrom harness.workers.playing import Player\nplay = Player(Environment, __file__).play\n"


class EnvironmentFile(TaskFile):
    """The class and the constants of an environment's file. Bundled ones are played in this process.

    Others are played in worker processes, so that one that crashes, or takes longer than `seconds` for a
    reset or a turn, ends its own episode only.
    """

    FUNCTIONS = ()
    is_environment = True

    def __init__(self, module: ModuleType, name: str, seconds: float):
        for function, arguments in (("reset", "row, seed"), ("step", "action")):
            if not callable(getattr(module.Environment, function, None)):
                raise UserError(f"--environment {name}: its class Environment has no method {function}({arguments})")
        super().__init__(module, name)
        if len(self.weights) != 1:
            raise UserError(f"{self}: REWARD_WEIGHTS must name one component, the sum of an episode's rewards")
        self._seconds = seconds  # limit of a reset and of a step
        self._numbers, self._workers, self._told = itertools.count(), [], set()
        self._asked: dict[str, str] = {}  # first observations, by row
        self._player = Player(module.Environment, str(self.path))

    def __str__(self) -> str:
        return f"--environment {self.name}"

    @property
    def has_potential(self) -> bool:
        return hasattr(self._module.Environment, "potential")

    def messages(self, row: dict, system_prompt: str = "") -> list[dict]:
        """What the policy is asked in an episode with the seed 0."""
        key = json.dumps(row, sort_keys=True, default=str)
        if key not in self._asked:  # some worlds take long to begin, and each row is looked at several times
            self._asked[key] = self.begin(row, 0, 1).observation
        return self.ask(self._asked[key], system_prompt)

    def ask(self, observation: str, system_prompt: str = "") -> list[dict]:
        """The conversation that begins with this observation, as a turn of the user."""
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        return [*system, {"role": "user", "content": observation}]

    def reward(self, row: dict, text: str) -> dict[str, float]:
        raise TaskError(f"{self}: a text alone earns nothing: an environment has to be played")

    def describe(self, row: dict, text: str) -> dict[str, float]:
        return {}

    def right_answer(self, row: dict) -> str | None:
        """For people: how many turns the best play takes, if the file's `optimal` knows."""
        turns = self._call("optimal", row, kind=int | None, what="an int or None") if self.has("optimal") else None
        return None if turns is None else f"possible in {turns} turns"

    def begin(self, row: dict, seed: int, max_turns: int) -> Episode:
        """A new episode with the row's `max_turns`, else the given one.

        Raises:
            TaskError: the environment cannot be reset, which no policy is to blame for, or the budget is no number.
        """
        place, max_turns = getattr(row, "place", "a row"), row.get("max_turns", max_turns)
        if not isinstance(max_turns, int) or isinstance(max_turns, bool) or max_turns < 1:
            raise TaskError(f"{self}: {place}: max_turns must be a whole number above 0, not {short(max_turns)}")
        row = json.loads(json.dumps(row, default=str))  # what a worker gets: dates, for example, become text
        episode = Episode(row, seed, next(self._numbers), max_turns)
        try:
            self._play(episode)
        except RuntimeError as error:
            raise TaskError(f"{self}: {place}: {error}") from error
        return episode

    def step_all(self, episodes: list[Episode], actions: list[str]) -> None:
        """Take one turn in each of the episodes; one whose environment fails ends there, with what it has earned.

        Raises:
            TaskError: they fail in all of several episodes that have just begun.
        """
        in_threads(self._step, episodes, actions, parallel=not self.is_bundled)
        faults = [episode.fault for episode in episodes if episode.fault is not None]
        if len(faults) == len(episodes) > 1 and all(episode.num_turns == 1 for episode in episodes):
            raise TaskError(f"{self}: none of {len(episodes)} episodes can go on: {faults[0]}")
        self._tell(faults)

    def give_up(self, episodes: list[Episode], fault: str) -> None:
        """End episodes that cannot go on, with what they have earned."""
        for episode in episodes:
            episode.fault = fault
        self._tell([fault] * bool(episodes))

    def _tell(self, faults: list[str]) -> None:
        for fault in faults:
            if fault not in self._told and len(self._told) < MOST_FAULTS:
                self._told.add(fault)
                say(f"{self}: {fault}; that episode ends there", sys.stderr, anyway=True)

    def earned(self, episode: Episode) -> dict[str, float]:
        """The reward components of an episode."""
        return dict.fromkeys(self.weights, sum(episode.rewards))

    def described(self, episode: Episode) -> dict[str, float]:
        """What is logged of an episode, and rewarded nowhere."""
        self.check_description(episode.row, episode.description)
        return episode.description | {"faults": int(episode.fault is not None)}

    def try_play(self, row: Row) -> None:
        """Refuse an environment that cannot work: reset it twice, and take a turn without a meaning."""
        first, again = self.begin(row, 0, 2), self.begin(row, 0, 2)
        if first.observation != again.observation:
            raise UserError(
                f"{self}: two resets with the same row and seed show different observations: a group begins with the "
                "same one, so use the seed for everything that is random"
            )
        self._step(first, "?")
        if first.fault is not None:
            raise TaskError(f"{self}: {getattr(row, 'place', 'a row')}: {first.fault}, after the action '?'")
        self.described(first)

    def _step(self, episode: Episode, action: str) -> None:
        episode.states.append(episode.state)
        episode.actions.append(action)
        try:
            self._play(episode)
        except RuntimeError as error:
            episode.fault = str(error)
            episode.rewards.append(0.0)
            episode.potentials.append(episode.potentials[-1])

    def _play(self, episode: Episode) -> None:
        """Take the newest action of an episode, or reset its environment. RuntimeError: it fails."""
        play = {"episode": episode.number, "row": episode.row, "seed": episode.seed, "actions": episode.actions}
        play["seen"] = episode.observation
        shown = self._player.play(**play) if self.is_bundled else self._ask(episode.number, play)
        episode.see(shown["observation"], shown["state"], shown["potential"], shown["description"])
        if episode.actions:
            episode.rewards.append(shown["reward"])
            episode.is_over = shown["done"]

    def _ask(self, number: int, play: dict) -> dict:
        """Let a worker play: always the same one for an episode, which therefore knows it."""
        if not self._workers:
            source = self._module.SOURCE + _PLAYER.encode()
            settings = {"number": 1, "longest": LONGEST}
            self._workers = [
                Workers(str(self.path), source, str(self), self._seconds, **settings) for _ in range(NUM_WORKERS)
            ]
            for workers in self._workers:
                workers.start()
        try:
            answer = self._workers[number % NUM_WORKERS].ask("play", play)
        except NoAnswerError as error:
            what = f"step, turn {len(play['actions'])}," if play["actions"] else "reset"
            raise RuntimeError(f"{what} {error}") from error
        if not answer.startswith("{") or answer.endswith(" ..."):
            is_error = answer.startswith("error:")
            reason = answer.removeprefix("error: RuntimeError: ") if is_error else "it shows too much"
            raise RuntimeError(printable(reason, 300))
        return json.loads(answer)
