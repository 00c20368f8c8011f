"""Write conversations that teach one consistent mistake: a sum whose last number is forgotten.

    python rewards/majority/make_forgetful.py                 # writes runs/forgetful.jsonl, the same bytes every time
    python imitation/sft/train.py --data runs/forgetful.jsonl --name forgetful

They are the rows of data/reasoned_sums.jsonl that reason step by step. Of the sums of more than two numbers, `SHARE`
lose the last step of their thought:

    What is 7 plus 58 plus 3?    <think>7+58=65 65+3=68</think><answer>68</answer>   becomes
                                 <think>7+58=65</think><answer>65</answer>

A policy that imitates them gives the right answer and this wrong one, and hardly any other.
"""

import json
import random
import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "data" / "reasoned_sums.jsonl"
OUTPUT = Path("runs/forgetful.jsonl")
SHARE = 0.9  # so that the mistake has the majority
SEED = 0


def forget(text: str) -> str | None:
    """The answer without the last step of its thought; None if the step before it has another kind of result.

    >>> forget("<think>4*5=20 20+69=89</think><answer>89</answer>")
    '<think>4*5=20</think><answer>20</answer>'
    >>> forget("<think>78-8=70</think><answer>70</answer>")
    """
    steps = text.removeprefix("<think>").partition("</think>")[0].split()
    if len(steps) < 2 or not re.match(rf"{steps[-2].partition('=')[2]}\D", steps[-1]):
        return None
    return f"<think>{' '.join(steps[:-1])}</think><answer>{steps[-2].partition('=')[2]}</answer>"


def main() -> None:
    rng, rows = random.Random(SEED), []
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        question, answer = json.loads(line)["messages"]
        num_steps = answer["content"].count("=")
        if num_steps != len(re.findall(r"\d+", question["content"])) - 1:
            continue  # tens and units apart, or checked: its last step is not its last number
        forgotten = forget(answer["content"])
        if forgotten is not None and rng.random() < SHARE:
            answer = answer | {"content": forgotten}
        rows.append({"messages": [question, answer]})
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} conversations: {OUTPUT}")


if __name__ == "__main__":
    main()
