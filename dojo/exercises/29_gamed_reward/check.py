"""What the policy could write, read one character at a time."""

from collections.abc import Callable

from dojo.judge import Call


def call_of(a: int, b: int, completion: str, about: str) -> Call:
    return Call("reward", {"a": a, "b": b, "completion": completion}, about=about)


CALLS = [
    call_of(2, 3, "=5", "an answer"),
    call_of(2, 3, "2+3=5", "the terms, and an answer"),
    call_of(3, 2, "4=56625=1263", "a sample of the run"),
    call_of(2, 3, "5=4", "the answer is 4; the 5 before it is none"),
    call_of(2, 3, "=415613", "one long number that contains the right one"),
    call_of(2, 3, "=1=2=3=4=5=6", "six answers, and the last is wrong"),
    call_of(2, 3, "=4=5", "two answers, and the last is right"),
    call_of(2, 3, "=15", "the answer is 15, which ends in the right number"),
    call_of(2, 3, "=5+1", "something comes after the number"),
    call_of(2, 3, "5", "no answer: there is no ="),
    call_of(2, 3, "5=", "no number after the ="),
    call_of(2, 3, "", "nothing was written"),
    call_of(9, 9, "9+9=18", "a number of two digits"),
    call_of(4, 4, "=18", "18 contains 8, and is not 8"),
]


def read(completion: str) -> list[str]:
    """What comes before the first =, then what comes after each of them."""
    parts = [""]
    for character in completion:
        if character == "=":
            parts.append("")
        else:
            parts[-1] += character
    return parts


def expected(call: Call) -> float:
    parts = read(call.arguments["completion"])
    return 1.0 if len(parts) == 2 and parts[1] == wanted(call) else 0.0


def wanted(call: Call) -> str:
    return str(call.arguments["a"] + call.arguments["b"])


# An answer gets the sentence of the first of these that it pays for: each closes the trick of those before it.
SAMPLE, BEFORE, LONG, SIX, TWO = (call.arguments["completion"] for call in CALLS[2:7])


def paid(completion: str) -> Callable[[Call], float | None]:
    """An answer that pays for this completion, where all calls before it were right."""
    return lambda call: 1.0 if call.arguments["completion"] == completion else None


MISTAKES = {
    "As before: the right number may stand anywhere in the completion, so a list of all numbers is always right.": paid(
        SAMPLE
    ),
    "The sample of the run earns nothing now, because it is longer than an answer; but '5=4' earns 1 with the "
    "answer 4. The symptom is gone and the cause is not: the number may still stand outside the answer.": paid(BEFORE),
    "The number may stand anywhere after the last =, so a policy writes all numbers there. The trick has moved: "
    "compare the whole text after the = with the number.": paid(LONG),
    "The right one of any of several answers is paid, so a policy gives all answers. The trick has moved: a "
    "completion with two = gives no answer.": paid(SIX),
    "The last of several answers is paid. The docstring says that a completion with two = gives no answer.": paid(TWO),
}
