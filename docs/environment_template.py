"""Your own world: copy this file, change it, and train on it. docs/environments.md explains it.

python agents/world/train.py --environment my_world.py

A number from 1 to 100 is to be found in seven guesses; the world answers higher or lower.
"""

REWARD_WEIGHTS = {"correct": 1.0}  # optional: the name of an episode's return, the sum of its rewards
SYSTEM_PROMPT = "Guess a number from 1 to 100. Write only the number."  # optional; the bundled policies get none


class Environment:
    """One object for each episode."""

    def reset(self, row: dict, seed: int) -> str:
        """Begin; the first observation. Use the seed for everything that is random."""
        self.secret, self.low, self.high = row["secret"], 1, 100
        return "A number from 1 to 100."

    def step(self, action: str) -> tuple[str, float, bool]:
        """What the policy sees next, the reward of this turn, and whether the episode is over. Any text can come."""
        try:
            guess = int(action.strip())
        except ValueError:
            return "That is no number.", 0.0, False
        if guess == self.secret:
            return "Right.", 1.0, True
        self.low, self.high = (guess + 1, self.high) if guess < self.secret else (self.low, guess - 1)
        return "Higher." if guess < self.secret else "Lower.", 0.0, False

    def state(self) -> str:
        """Optional: what identifies the present state, for --credit; without it, the observation."""
        return f"{self.low} to {self.high}"

    def potential(self) -> float:
        """Optional: how near the goal is, for --credit progress and potential."""
        return -float(self.high - self.low)

    def describe(self) -> dict[str, float]:
        """Optional: other values to log for an episode."""
        return {"narrowed": float(self.high - self.low < 10)}


def rows(split: str) -> list[dict]:
    """Optional: the rows, if they are in no file; `split` is "train" or "eval"."""
    return [{"secret": number, "max_turns": 7} for number in range(1, 101) if (number % 5 == 0) == (split == "eval")]
