"""The order of rows: those of each step, and those that are held out."""

from common.keyed import keyed_generator
from common.parallel import own_part

from harness.base.config import RunConfig
from harness.data.rows import Row


def prompts_of_step(num_rows: int, prompts_per_step: int, step: int, seed: int) -> list[int]:
    """This process's part of the step's rows, see `all_prompts_of_step`; alone, all of them."""
    return own_part(all_prompts_of_step(num_rows, prompts_per_step, step, seed))


def all_prompts_of_step(num_rows: int, prompts_per_step: int, step: int, seed: int) -> list[int]:
    """The rows that step 1, 2, ... trains on: a new permutation of all rows every epoch, keyed by (seed, epoch).

    An epoch ends before a step that it could not fill, so that no step holds a prompt twice.

    >>> first, second = (set(all_prompts_of_step(5, 2, step, seed=0)) for step in (1, 2))
    >>> len(first), len(second), first & second
    (2, 2, set())
    """
    steps_per_epoch = num_rows // prompts_per_step
    epoch, position = divmod(step - 1, steps_per_epoch)
    order = keyed_generator("data order", seed, epoch).permutation(num_rows)
    return order[position * prompts_per_step : (position + 1) * prompts_per_step].tolist()


def num_steps(config: RunConfig, num_rows: int) -> int:
    """The steps of a run: `--steps`, or `--epochs` passes over the training rows."""
    if getattr(config, "epochs", None) is None:
        return getattr(config, "steps", 1)
    return config.epochs * (num_rows // config.prompts_per_step)


def hold_out(rows: list[Row], num_held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Divide rows into training rows and held-out rows, which the seed selects."""
    order = keyed_generator("split", seed).permutation(len(rows))
    rows = [rows[index] for index in order]
    return rows[num_held_out:], rows[:num_held_out]
