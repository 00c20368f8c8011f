"""Prompts without a right answer: only a reward model judges (`--reward-model`, `--reward-model-url`).

A row is `{"prompt": "Write a poem about the sea."}`, or `{"prompt": [messages]}` with earlier turns. Turns of the
assistant at the end are dropped: the policy writes its own. Other fields are ignored, so preference data can be used.
"""

FIELDS = {"prompt": (str, list)}
REWARD_WEIGHTS = {"answered": 0.0}
SYSTEM_PROMPT = (
    "Before you answer, think about what is asked, and plan your answer, inside <think> and </think>. The user sees "
    "only the text after </think>."
)


def messages(row: dict, system_prompt: str = "") -> list[dict]:
    """The conversation up to the turn that the policy writes, with a system turn unless `system_prompt` is empty.

    >>> answered = {"prompt": [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]}
    >>> messages(answered), messages({"prompt": "Hi!"}, "Be brief.")[0]["content"]
    ([{'role': 'user', 'content': 'Hi!'}], 'Be brief.')
    """
    prompt = row["prompt"]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    has_system = bool(turns) and turns[0]["role"] == "system"
    return [{"role": "system", "content": system_prompt}, *turns] if system_prompt and not has_system else turns


def reward(row: dict, text: str) -> dict[str, float]:
    """Whether there is any text; the weight is 0.

    >>> reward({}, "Hello."), reward({}, " ")
    ({'answered': 1.0}, {'answered': 0.0})
    """
    return {"answered": float(bool(text.strip()))}
