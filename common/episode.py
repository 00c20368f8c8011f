"""One play of an environment, turn by turn, as training and the page of a run see it."""

from dataclasses import dataclass, field

CONTEXT_IS_FULL = "the model's context is full of what the world has shown"


@dataclass
class Episode:
    """A record of n turns. The environment itself lives elsewhere, see harness/task/environment_file.py.

    >>> play = Episode({"at": [1, 1]}, seed=0, number=0, max_turns=2, state="1 1", states=["1 1"], rewards=[0.0])
    >>> play.actions.append("N")
    >>> play.num_turns, play.has_ended
    (1, False)
    """

    row: dict  # of the data: what the environment was reset with
    seed: int
    number: int  # names the episode within this process
    max_turns: int  # its budget
    observation: str = ""  # the newest
    state: str = ""  # the present one
    states: list[str] = field(default_factory=list)  # before each action
    actions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of each action
    # before each action and after the last one: how near the goal is, if the environment says so
    potentials: list[float | None] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)  # of each action, as it is trained
    exact: list[float] = field(default_factory=list)  # the same, exactly, where that is computed
    is_over: bool = False  # ended by the environment, not by a budget
    fault: str | None = None  # why the environment could not go on
    description: dict[str, float] = field(default_factory=dict)  # only logged

    @property
    def num_turns(self) -> int:
        return len(self.actions)

    @property
    def has_ended(self) -> bool:
        return self.is_over or self.fault is not None or self.num_turns >= self.max_turns

    def by_turn(self) -> dict[str, list]:
        """What is known of each turn, to be logged."""
        known = {"states": self.states, "rewards": self.rewards, "advantages": self.advantages, "exact": self.exact}
        return {name: values for name, values in known.items() if values}

    def see(self, observation: str, state: str, potential: float | None, description: dict[str, float]) -> None:
        """What the environment shows after its reset, and after each action."""
        self.observation, self.state, self.description = observation, state, description
        self.potentials.append(potential)

    def settle(self, total: float) -> None:
        """Let the rewards of the turns add up to `total`: what other components have earned comes with the last one."""
        if self.rewards:
            self.rewards[-1] += total - sum(self.rewards)
