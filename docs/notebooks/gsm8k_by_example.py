"""GSM8K for models that cannot keep to a form that is only described: three worked examples come before the question.

    python experiment_base/train.py --task docs/notebooks/gsm8k_by_example.py --data data/gsm8k_easy.jsonl \
        --eval-data data/gsm8k_easy_heldout.jsonl --model smollm2

Everything else is tasks/gsm8k.py. gsm8k_smollm2.ipynb uses this file.
"""

from tasks.gsm8k import (  # noqa: F401
    EVAL_DATA,
    FIELDS,
    REWARD_WEIGHTS,
    SYSTEM_PROMPT,
    TRAIN_DATA,
    describe,
    reward,
    solution,
    vote,
)

EXAMPLES = {
    "Tom has 3 bags with 4 nuts each. He eats 2. How many are left?": (
        "<think>3 * 4 = 12, 12 - 2 = 10</think><answer>10</answer>"
    ),
    "Ann reads 20 pages a day. How many pages does she read in a week?": (
        "<think>20 * 7 = 140</think><answer>140</answer>"
    ),
    "A book costs $9, a pen $7 less. What do they cost together?": (
        "<think>9 - 7 = 2, 9 + 2 = 11</think><answer>11</answer>"
    ),
}


def messages(row: dict, system_prompt: str = "") -> list[dict]:
    """The conversation: the examples as earlier turns, then the question."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    turns = [
        {"role": role, "content": content}
        for example in EXAMPLES.items()
        for role, content in zip(("user", "assistant"), example, strict=True)
    ]
    return [*system, *turns, {"role": "user", "content": row["question"]}]
