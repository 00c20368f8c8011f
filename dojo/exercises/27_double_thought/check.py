"""The template stays; the turn is read tag by tag, from the header on."""

from collections.abc import Callable

from dojo.judge import Call

EXAMPLE = {"role": "system", "content": "Write <think>a thought</think><answer>a number</answer>"}
USER = {"role": "user", "content": "2 + 3?"}
EARLIER = {"role": "assistant", "content": "<think>1 more</think><answer>5</answer>"}


def score(completion: str, about: str, *before: dict) -> Call:
    return Call("score", {"messages": [*before, USER], "completion": completion, "gold": "5"}, about=about)


CALLS = [
    Call("render", {"messages": [USER], "add_generation_prompt": True}, about="the template belongs to the model"),
    Call("render", {"messages": [USER, EARLIER], "add_generation_prompt": False}, about="a whole conversation"),
    score("so 5</think><answer>5</answer>", "a thought, then the answer"),
    score("so 6</think><answer>6</answer>", "the right form and a wrong answer"),
    score("it is 5", "the system message has an example of the form; the completion has no form", EXAMPLE),
    score("<think>so 5</think><answer>5</answer>", "after the prompt, this opens a second thought"),
    score("so 5</think>5", "an earlier turn of the assistant had the form; this one has no answer", EARLIER, USER),
    score("so 5</think><answer>5</answer>", "the fourth message, with the right form", EXAMPLE, USER, EARLIER),
    score("</think><answer>5</answer>", "an empty thought"),
    score("so 5<answer>5</answer>", "the thought is not closed"),
    score("so</think>5</think><answer>5</answer>", "the thought is closed twice"),
    score("so 5</think><answer>5</answer>!", "something comes after the answer"),
    score("so 5</think>so<answer>5</answer>", "something comes between the thought and the answer"),
]

GENERATION_PROMPT = "<|assistant|><think>"


def pieces(text: str) -> list[str]:
    """Tags, and the texts between them."""
    found = [""]
    for character in text:
        if character == "<" or found[-1].endswith(">"):
            found.append("")
        found[-1] += character
    return [piece for piece in found if piece]


def expected(call: Call) -> str | dict:
    if call.function == "render":
        return rendered(call, GENERATION_PROMPT)
    turn = pieces("<think>" + call.arguments["completion"])
    form = ["<think>", "", "</think>", "<answer>", "", "</answer>"]
    is_form = len(turn) == len(form) and all(
        piece == tag if tag else not piece.startswith("<") for piece, tag in zip(turn, form, strict=True)
    )
    answers = [turn[i + 1] for i, piece in enumerate(turn[:-1]) if piece == "<answer>"]
    return {"format": float(is_form), "correct": float(answers == [call.arguments["gold"]])}


def rendered(call: Call, generation_prompt: str) -> str:
    text = ""
    for message in call.arguments["messages"]:
        text += "<|" + message["role"] + "|>" + message["content"] + "<|end|>"
    return text + (generation_prompt if call.arguments["add_generation_prompt"] else "")


def gives(index: int, value: float) -> Callable[[Call], dict | None]:
    """An answer whose format reward is wrong in this call, where it was right in all calls before."""
    return lambda call: expected(call) | {"format": value} if call is CALLS[index] else None


MISTAKES = {
    "The prompt has changed: the model was trained with a template that opens the thought, and never saw this one. "
    "The reward must fit the template, and not the template the reward.": lambda call: rendered(call, "<|assistant|>"),
    "As before: a turn of the right form earns 0, because its <think> is in the prompt and not in the completion.": (
        gives(2, 0.0)
    ),
    "A good turn is paid now, and so is a turn that opens the thought twice. The symptom is gone and the cause is not: "
    "the parser still does not know who writes the first <think>.": gives(5, 1.0),
    "The form is found in another message: parse the assistant's last turn only, and all of it.": gives(4, 1.0),
}
