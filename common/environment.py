"""The policy's environment: tools that it may call turn after turn, and rewards at the end.

One plain function per turn, `env_step(state, action_text) -> (observation | None, rewards, done)`. A turn that calls no
tool is the answer, and ends the conversation. Every other case has an outcome too, which the metrics count:

    several calls in one turn    are executed in their order, up to MAX_CALLS; each gets its own answer
    a malformed call             gets a message that names the mistake, so that the policy can try again
    an unknown tool              gets a message that names the known tools; it earns nothing
    a call that fails            gets the error's message
    a call within <think>        is a thought, and no call
    a call in the last turn      is not executed, since the policy could not read the result: `unanswered`. So are calls
                                 in a turn that has used up the token budget. Calls without end lead here.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from common.tools import ToolCall, call_tool, parse_calls

MAX_CALLS = 8  # executed per turn
OUTCOMES = ("malformed", "unknown", "failed", "unanswered")  # of calls that did not succeed
# Reward components besides the task's: the shares of a conversation's calls that were well-formed and that were
# executed without an error (0 without a call), and the number of calls. A negative weight on the number is a price.
CALL_WEIGHTS = {"well_formed_calls": 0.0, "executed_calls": 0.0, "calls": 0.0}


@dataclass
class State:
    """One conversation, as its environment sees it."""

    task: object  # its `reward` and `describe` judge the policy's text
    row: dict  # of the task's data: the question
    tools: dict[str, Callable[..., str]]  # by name
    call_form: str  # how calls are written, see `common.tools.call_form`
    is_last_turn: bool = False  # the caller sets it if this turn has used up the turns or the tokens
    is_over: bool = False
    said: list[str] = field(default_factory=list)  # by the policy, turn by turn, without its calls
    outcomes: Counter[str] = field(default_factory=Counter)  # of its calls

    @property
    def text(self) -> str:
        """The policy's text in all turns."""
        return "\n".join(self.said)

    def execute(self, call: ToolCall) -> tuple[str, bool]:
        """A tool's answer to a call, and whether the call succeeded."""
        return call_tool(self.tools, call)

    def rewards(self) -> dict[str, float]:
        """The components of the task and of the calls."""
        num_calls, outcomes = self.outcomes.total(), self.outcomes
        return self.task.reward(self.row, self.text) | {
            "well_formed_calls": 1 - outcomes["malformed"] / num_calls if num_calls else 0.0,
            "executed_calls": outcomes["executed"] / num_calls if num_calls else 0.0,
            "calls": float(num_calls),
        }

    def describe(self) -> dict[str, float]:
        """More values to log; none of them is rewarded."""
        called = float(self.outcomes.total() > 0)
        counts = {f"{outcome}_calls": self.outcomes[outcome] for outcome in OUTCOMES}
        return {"called": called, "unaided": 1 - called} | counts | self.task.describe(self.row, self.text)


def env_step(state: State, action_text: str) -> tuple[list[str] | None, dict[str, float], bool]:
    """Take one turn of the policy: execute its calls, or, if there are none, end the conversation and reward it.

    Args:
        action_text: the text that the policy has sampled in this turn.

    Returns:
        observation: the tools' answers, one text per call; None at the end.
        rewards: the components earned in this turn; all of them are earned at the end.
        done: whether the conversation has ended.
    """
    calls, said = parse_calls(action_text, state.call_form)
    state.said.append(said)
    observation = [_answer(state, call, number) for number, call in enumerate(calls)]
    if calls and not state.is_last_turn:
        return observation, {}, False
    state.is_over = True
    return None, state.rewards(), True


def _answer(state: State, call: ToolCall, number: int) -> str:
    """Execute a turn's call of this number, and count its outcome."""
    text, is_executed = "", False
    if number >= MAX_CALLS:
        text = f"error: at most {MAX_CALLS} calls per turn"
    elif not state.is_last_turn:
        text, is_executed = state.execute(call)
    if call.error is not None:
        outcome = "malformed"
    elif state.is_last_turn:
        outcome = "unanswered"
    elif call.name not in state.tools:
        outcome = "unknown"
    else:
        outcome = "executed" if is_executed else "failed"
    state.outcomes[outcome] += 1
    return text
