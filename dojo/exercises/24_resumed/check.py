"""A run without a stop is as it was; a run with a stop has the same numbers."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dojo.judge import Call, perform

CALLS = [
    Call(
        "train",
        {"seed": 0, "steps": 5},
        about="a run without a stop, which was right; if both runs agree only because this one has changed, then the "
        "symptom is gone and the cause is not",
    ),
    Call(
        "train",
        {"seed": 0, "steps": 5, "stop_after": 3},
        about="every number must be that of the run without a stop; if only the jump after the stop is smaller, then "
        "the symptom is gone and the cause is not",
    ),
    Call("train", {"seed": 1, "steps": 4, "stop_after": 1}, about="stopped after the first step"),
]


def returned_by(name: str, *changes: tuple[str, str]) -> Callable[[Call], Any]:
    """What one of the files here returns, with some changes."""

    def function(call: Call) -> Any:
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        for old, new in changes:
            text = text.replace(old, new)
        module = ModuleType("run_24")
        exec(text, module.__dict__)
        return perform(module, call)

    return function


def expected(call: Call) -> dict:
    """The run that was never stopped."""
    whole = Call("train", {name: x for name, x in call.arguments.items() if name != "stop_after"})
    return returned_by("solution.py")(whole)


MOMENTS = "[optimizer.state[table][key] for key in ('exp_avg', 'exp_avg_sq')]"
AGAIN = "optimizer.state[table] = dict(zip(('step', 'exp_avg', 'exp_avg_sq'), state, strict=True))"

MISTAKES = {
    "As before: the run goes on with the same samples, but its first steps after the stop move the table too far.": (
        returned_by("start.py")
    ),
    "The moments are back, but not the number of steps: AdamW's correction of the bias begins again.": returned_by(
        "start.py",
        ('"table": table.detach(),', f'"table": table.detach(), "moments": {MOMENTS},'),
        (
            "    generator.set_state(",
            f"    state = [torch.tensor(0.0), *checkpoint['moments']]\n    {AGAIN}\n    generator.set_state(",
        ),
    ),
    "The optimizer is back, but the generator is not: the samples after the stop are others.": returned_by(
        "solution.py", ('    generator.set_state(checkpoint["generator"])\n', "")
    ),
}
