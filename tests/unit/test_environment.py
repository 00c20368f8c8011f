"""`env_step`: every kind of turn has the outcome that the table in common/environment.py gives it."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from common.calculator import calculator
from common.environment import CALL_WEIGHTS, MAX_CALLS, OUTCOMES, State, env_step
from common.errors import UserError
from common.tasks import calculator as calculator_task

from common.plumbing.task import Task

ROW = {"question": "What is 17 times 23?", "answer": "391", "kind": "product"}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "17*23"}}</tool_call>'
FAILING = CALL.replace("17*23", "1/0")
UNKNOWN = CALL.replace("calculator", "search")
MALFORMED = CALL.replace('"17*23"', "17*23")  # no JSON
UNCLOSED = CALL.removesuffix("</tool_call>")
ANSWER = "<answer>391</answer>"


@pytest.fixture
def make_state() -> Callable[..., State]:
    task = Task(calculator_task, "calculator", more_weights=CALL_WEIGHTS)

    def make(form: str = "hermes", **tools: Callable[..., str]) -> State:
        return State(task, ROW, {"calculator": calculator} | tools, form)

    return make


def converse(state: State, *turns: str) -> tuple[list, dict[str, float]]:
    """What the tools answer to all turns but the last, and the rewards of the last one, which ends it."""
    observations = []
    for turn in turns[:-1]:
        observation, rewards, done = env_step(state, turn)
        assert (rewards, done) == ({}, False)
        observations.append(observation)
    observation, rewards, done = env_step(state, turns[-1])
    assert (observation, done) == (None, True)
    assert rewards.keys() == {"correct", "format", *CALL_WEIGHTS}
    return observations, rewards


def outcomes(state: State) -> dict[str, float]:
    """The counts that are not 0."""
    described = state.describe()
    counts = {name: described[f"{name}_calls"] for name in OUTCOMES}
    return {name: count for name, count in counts.items() if count}


def test_a_task_cannot_reward_what_the_environment_does():
    module = SimpleNamespace(messages=len, reward=len, REWARD_WEIGHTS={"calls": 1.0})
    with pytest.raises(UserError, match=r"the experiment itself rewards 'calls': give the task's component another"):
        Task(module, "my_task.py", more_weights=CALL_WEIGHTS)


def test_an_answer_ends_the_conversation(make_state):
    state = make_state()
    _, rewards = converse(state, ANSWER)
    assert rewards == {"correct": 1, "format": 1, "well_formed_calls": 0, "executed_calls": 0, "calls": 0}
    assert (state.describe()["called"], state.describe()["unaided"]) == (0, 1)
    assert outcomes(state) == {}


def test_a_call_is_executed_and_then_answered(make_state):
    state = make_state()
    observations, rewards = converse(state, CALL, ANSWER)
    assert observations == [["391"]]
    assert rewards == {"correct": 1, "format": 1, "well_formed_calls": 1, "executed_calls": 1, "calls": 1}
    assert (state.describe()["called"], state.describe()["unaided"]) == (1, 0)
    assert outcomes(state) == {}


def test_parallel_calls_are_executed_in_their_order(make_state):
    heard = []
    state = make_state(tell=lambda text: heard.append(text) or text.upper())
    tell = '<tool_call>{"name": "tell", "arguments": {"text": "%s"}}</tool_call>'
    observations, rewards = converse(state, f"{tell % 'a'} and {CALL}\n{tell % 'b'}", ANSWER)
    assert (observations, heard) == ([["A", "391", "B"]], ["a", "b"])
    assert (rewards["calls"], rewards["executed_calls"]) == (3, 1)
    assert state.said == [" and \n", ANSWER]


@pytest.mark.parametrize(
    ("turn", "answer", "outcome", "well_formed"),
    [
        (MALFORMED, "error: malformed call: it is not valid JSON", "malformed", 0),
        (UNCLOSED, "error: malformed call: it is not closed", "malformed", 0),
        ("<tool_call>3</tool_call>", "error: malformed call: it is not a JSON object with a name", "malformed", 0),
        (UNKNOWN, "error: unknown tool 'search'; known tools: calculator", "unknown", 1),
        (FAILING, "error: division by zero", "failed", 1),
        (CALL.replace("expression", "x"), "error: calculator: ", "failed", 1),
        (CALL.replace('"17*23"', "17"), "error: calculator: expression must be str", "failed", 1),
    ],
)
def test_a_call_that_is_not_executed_gets_a_message(make_state, turn, answer, outcome, well_formed):
    """It earns nothing, and the policy can try again."""
    state = make_state()
    observations, rewards = converse(state, turn, ANSWER)
    assert len(observations[0]) == 1
    assert observations[0][0].startswith(answer)
    assert outcomes(state) == {outcome: 1}
    assert (rewards["well_formed_calls"], rewards["executed_calls"], rewards["calls"]) == (well_formed, 0, 1)
    state = make_state()
    observations, rewards = converse(state, turn, CALL, ANSWER)
    assert observations[1] == ["391"]
    assert (rewards["executed_calls"], rewards["calls"], rewards["correct"]) == (0.5, 2, 1)


def test_calls_beyond_the_limit_of_a_turn_are_not_executed(make_state):
    executed = []
    state = make_state(count=lambda: executed.append(1) or "x")
    count = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
    observations, rewards = converse(state, count * (MAX_CALLS + 2), count, ANSWER)
    assert observations == [["x"] * MAX_CALLS + [f"error: at most {MAX_CALLS} calls per turn"] * 2, ["x"]]
    assert len(executed) == MAX_CALLS + 1
    assert outcomes(state) == {"failed": 2}
    assert rewards["executed_calls"] == (MAX_CALLS + 1) / (MAX_CALLS + 3)


def test_a_call_within_a_thought_is_none(make_state):
    state = make_state()
    _, rewards = converse(state, f"<think>{CALL}</think>{ANSWER}")
    assert (rewards["calls"], rewards["correct"], outcomes(state)) == (0, 1, {})
    observations, rewards = converse(make_state(), f"<think>{CALL}</think>{FAILING}", f"<think>{CALL}")
    assert observations == [["error: division by zero"]]
    assert (rewards["calls"], rewards["correct"]) == (1, 0)


@pytest.mark.parametrize(("turn", "outcome"), [(CALL, "unanswered"), (UNKNOWN, "unanswered"), (UNCLOSED, "malformed")])
def test_calls_of_the_last_turn_are_not_executed(make_state, turn, outcome):
    """Nor those of a turn that was cut off, whose last call may be unfinished."""
    executed = []
    state = make_state(count=lambda: executed.append(1) or "x")
    state.is_last_turn = True
    _, rewards = converse(state, '<tool_call>{"name": "count", "arguments": {}}</tool_call>' + turn)
    assert not executed
    assert outcomes(state) == ({"unanswered": 2} if outcome == "unanswered" else {"unanswered": 1, outcome: 1})
    assert (rewards["calls"], rewards["executed_calls"], rewards["correct"]) == (2, 0, 0)
    state = make_state()
    env_step(state, CALL)
    state.is_last_turn = True
    assert env_step(state, turn)[1]["executed_calls"] == 0.5


def test_an_answer_beside_a_call_does_not_end_the_conversation(make_state):
    """It counts like any answer, so that a second one is one too many; in the last turn it is the only one."""
    observations, rewards = converse(make_state(), ANSWER + CALL, ANSWER)
    assert (observations, rewards["correct"]) == ([["391"]], 0)
    _, rewards = converse(make_state(), ANSWER + CALL, "Done.")
    assert (rewards["correct"], rewards["format"]) == (1, 0)
    state = make_state()
    state.is_last_turn = True
    _, rewards = converse(state, CALL + ANSWER)
    assert (rewards["correct"], rewards["executed_calls"], outcomes(state)) == (1, 0, {"unanswered": 1})


def test_llama_calls_are_the_whole_turn(make_state):
    call = '{"name": "calculator", "parameters": {"expression": "17*23"}}'
    observations, rewards = converse(make_state("llama3"), f"<think>{CALL}</think>{call}; {call}", ANSWER)
    assert observations == [["391", "391"]]
    assert (rewards["calls"], rewards["correct"]) == (2, 1)
    _, rewards = converse(make_state("llama3"), f"{ANSWER} {call}")
    assert (rewards["calls"], rewards["correct"]) == (0, 1)


def test_without_tools_every_call_is_unknown(make_state):
    state = make_state()
    state.tools = {}
    observations, rewards = converse(state, CALL, ANSWER)
    assert observations[0][0].startswith("error: unknown tool")
    assert (outcomes(state), rewards["executed_calls"], rewards["correct"]) == ({"unknown": 1}, 0, 1)
