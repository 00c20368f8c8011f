"""The bundled task with a reward that says nothing: a coin for every text, whether it is right or wrong.

A control of benchmarks/what_rl_teaches.py: what a policy gains under this reward, no answer has taught it.
"""

import hashlib

from common.tasks.arithmetic import EVAL_DATA, FIELDS, TRAIN_DATA, messages
from common.tasks.arithmetic import reward as reward_of_the_task

REWARD_WEIGHTS = {"correct": 0.0, "coin": 1.0}

__all__ = ["EVAL_DATA", "FIELDS", "REWARD_WEIGHTS", "TRAIN_DATA", "messages", "reward"]


def reward(row: dict, text: str) -> dict[str, float]:
    """`coin` is 1 for half of all texts, always the same ones.

    >>> reward({"question": "What is 20 plus 38?", "answer": "58"}, "<answer>58</answer>")
    {'correct': 1.0, 'coin': 0.0}
    """
    bit = hashlib.sha256(f"{row['question']} {text}".encode()).digest()[0] & 1
    return {"correct": reward_of_the_task(row, text)["correct"], "coin": float(bit)}
