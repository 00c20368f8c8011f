"""Calls are read and answered whatever the policy writes, in the form of its tokenizer's template.

`env_step`: every kind of turn has the outcome that the table in common/environment.py gives it.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest
from chat_templates import CHATML, LLAMA, QWEN
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from common.environment import CALL_WEIGHTS, MAX_CALLS, OUTCOMES, State, env_step
from common.errors import UserError
from common.tools import (
    MAX_CALL,
    MAX_DEPTH,
    MAX_RESULT,
    ToolCall,
    calculator,
    call_form,
    call_tool,
    parse_calls,
    schemas,
)
from tasks import calculator as calculator_task

from harness.base.config import TINY_POLICY
from harness.task.scorer import Scorer
from harness.task.task import Task
from harness.task.task_file import TAKEN, TaskFile

CALL = '{"name": "calculator", "arguments": {"expression": "17*23"}}'
LLAMA_CALL = CALL.replace("arguments", "parameters")
PARSED = ToolCall("calculator", {"expression": "17*23"})
FORMS = ("hermes", "llama3")


def hermes(*calls: str) -> str:
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def reason_of(body: str) -> str | None:
    """Why a call with this JSON is malformed; both forms agree if the text begins as a call does."""
    [call], rest = parse_calls(f"a{hermes(body)}b", "hermes")
    assert rest == "ab"
    assert call.error is None or (call.name, call.arguments) == ("", {})
    if body.startswith('{"name"'):
        assert parse_calls(body, "llama3") == ([call], "")
    return call.error


# The Hermes form ------------------------------------------------------------------------------------------------------


def test_hermes_calls_are_read_in_order():
    other = ToolCall("look_up", {"n": [1, {"a": None}]})
    text = f"First {hermes(CALL)} and\n<tool_call>\n{json.dumps(other._asdict())}\n</tool_call>{hermes(CALL)}."
    assert parse_calls(text, "hermes") == ([PARSED, other, PARSED], "First  and\n.")
    assert parse_calls("no call </tool_call> here", "hermes") == ([], "no call </tool_call> here")


def test_a_thought_in_a_call_is_an_argument():
    arguments = {"expression": "<think>1"}
    text = hermes(json.dumps({"name": "calculator", "arguments": arguments})) + hermes(CALL)
    assert parse_calls(text, "hermes") == ([ToolCall("calculator", arguments), PARSED], "")


def test_an_unclosed_call_is_malformed():
    unclosed = ToolCall("", {}, "it is not closed")
    assert parse_calls(f"a{hermes(CALL)}<tool_call>{CALL}", "hermes") == ([PARSED, unclosed], "a")
    assert parse_calls("a<tool_call>", "hermes") == ([unclosed], "a")
    [call], rest = parse_calls(f"<tool_call>{CALL}{hermes(CALL)}b", "hermes")
    assert (call.error, rest) == ("something follows its JSON", "b")


# The JSON of a call ---------------------------------------------------------------------------------------------------


START = '{"name": "f", "arguments": '
MALFORMED_CALLS = {
    "it is not valid JSON": [
        "", "calculator(17)", START + "{}", "{'name': 'f', 'arguments': {}}", START + '{"a": "\n"}}',
        START + '{"a": 1,}}', START + '"17*23"}',
    ],
    "it is not a JSON object with a name": [
        "17*23", "[]", f"[{CALL}]", '"calculator"', "null", "{}", '{"arguments": {}}',
        '{"name": null, "arguments": {}}', '{"name": ["f"], "arguments": {}}',
    ],
    "something follows its JSON": [START + "{}} and more", START + "{}}}"],
    "its arguments are not a JSON object": ['{"name": "f"}', START + "null}", START + "[1]}", START + '"[1]"}'],
    "a key appears twice": [
        '{"name": "f", "name": "g", "arguments": {}}', START + '{"a": 1, "a": 1}}',
        START + '{"a": [{"b": 1, "b": 2}]}}', START + '"{\\"a\\": 1, \\"a\\": 2}"}',
    ],
    "a number is not finite": [
        START + '{"a": NaN}}', START + '{"a": -Infinity}}', START + '{"a": 1e999}}', START + '"{\\"a\\": NaN}"}',
    ],
    "it is nested too deeply": [
        START + "[" * 9000, START + '{"a":' * 1500, START + json.dumps('{"a":' * 101 + "1" + "}" * 101) + "}",
        START + '{"a":' * MAX_DEPTH + "1" + "}" * (MAX_DEPTH + 1),
    ],
    f"it has more than {MAX_CALL} characters": [START + "[" * 1_000_000, START + "9" * 100_000 + "}"],
}  # fmt: skip


@pytest.mark.parametrize("reason", MALFORMED_CALLS)
def test_a_malformed_call_says_why(reason):
    for body in MALFORMED_CALLS[reason]:
        assert reason_of(body) == reason, body[:60]


def test_how_deep_a_call_may_be_does_not_depend_on_pythons_own_limit():
    deepest = START + '{"a":' * (MAX_DEPTH - 1) + '"[[{{"' + "}" * MAX_DEPTH
    limit = sys.getrecursionlimit()
    try:
        for more in (0, 20_000):  # hypothesis raises it, for example
            sys.setrecursionlimit(limit + more)
            assert reason_of(deepest) is None
            assert reason_of(deepest.replace('"[[{{"', "[1]")) == "it is nested too deeply"
            assert reason_of(MALFORMED_CALLS["it is nested too deeply"][1]) == "it is nested too deeply"
    finally:
        sys.setrecursionlimit(limit)


def test_arguments_may_be_an_object_in_a_string_and_what_else_an_object_holds_is_ignored():
    in_a_string = json.dumps({"name": "calculator", "arguments": json.dumps(PARSED.arguments)})
    with_more = json.dumps({"type": "function", "id": "1", **json.loads(LLAMA_CALL)})
    for text in (in_a_string, with_more):
        assert parse_calls(hermes(text), "hermes") == parse_calls(text, "llama3") == ([PARSED], "")


# The form of Llama 3 --------------------------------------------------------------------------------------------------


def test_llama3_calls_are_the_whole_text():
    for before, after in (("", ""), ("\n ", "\n"), ("<|python_tag|>", ""), (" <|python_tag|> ", "")):
        for call in (CALL, LLAMA_CALL):
            assert parse_calls(f"{before}{call}{after}", "llama3") == ([PARSED], "")
    for separator in (";", "\n", " ;\n ", "; ", "\n\n"):
        assert parse_calls(separator.join([LLAMA_CALL] * 3), "llama3") == ([PARSED] * 3, ""), separator
    thought = "<think>{}; a </think>"
    assert parse_calls(f"{thought}\n{LLAMA_CALL}{thought}", "llama3") == ([PARSED], thought * 2)


@pytest.mark.parametrize("text", [
    "", "391", f"I call {LLAMA_CALL}", f"<think>{LLAMA_CALL}</think>", f"<think>{LLAMA_CALL}", f"[{LLAMA_CALL}]",
    '{"answer": 391}', '{"answer": ', "{}", "1;2", hermes(CALL), "[" * 100_000,
])  # fmt: skip
def test_llama3_text_that_is_no_call_stays(text):
    assert parse_calls(text, "llama3") == ([], text)


@pytest.mark.parametrize("text", [
    LLAMA_CALL + " is my call", LLAMA_CALL + LLAMA_CALL, LLAMA_CALL + "; " + LLAMA_CALL[:-1], LLAMA_CALL + ";1",
    LLAMA_CALL[:-2], '{"name"', '{ "name": "Ada"}', '<|python_tag|>{"name": 1',
])  # fmt: skip
def test_llama3_text_that_begins_as_a_call_is_one(text):
    [call], rest = parse_calls("<think>a</think>" + text, "llama3")
    assert call.error
    assert rest == "<think>a</think>"


# Whatever the policy writes -------------------------------------------------------------------------------------------

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
PIECES = (*TAGS, CALL, LLAMA_CALL, *"{[;\na")


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12))
def test_any_text_is_read(pieces):
    """In both forms every call can be answered; and the Hermes form agrees with a slow reader."""
    text = "".join(pieces)
    for form in FORMS:
        calls, rest = parse_calls(text, form)
        assert calls or rest == text
        assert all(call == PARSED or call.error for call in calls)
        assert all(call_tool({"calculator": calculator}, call)[1] is (call == PARSED) for call in calls)
    bodies, expected_rest, unread = [], "", text
    while unread:
        if unread.startswith("<tool_call>"):
            body, end, unread = unread.removeprefix("<tool_call>").partition("</tool_call>")
            bodies.append(body.strip() + end)
        elif unread.startswith("<think>"):
            thought, end, unread = unread.partition("</think>")
            expected_rest += thought + end
        else:
            expected_rest, unread = expected_rest + unread[0], unread[1:]
    calls, rest = parse_calls(text, "hermes")
    assert rest == expected_rest
    well_formed = [body in (f"{CALL}</tool_call>", f"{LLAMA_CALL}</tool_call>") for body in bodies]
    assert [call == PARSED for call in calls] == well_formed


@pytest.mark.parametrize("piece", [*PIECES, '{"name"', '{"a":', "<tool_call></tool_call>", "<think></think>", "\\"])
def test_a_third_of_a_megabyte_of_anything_is_read(piece):
    """In linear time: in quadratic time this would not end."""
    text = piece * (300_000 // len(piece))
    for form in FORMS:
        for start in ("", "<tool_call>", "<think>", '{"name": "', "<|python_tag|>"):
            calls, rest = parse_calls(start + text, form)
            assert calls or rest == start + text


# Calling --------------------------------------------------------------------------------------------------------------


def measure(width: int, height: float, unit: str = "m", exact: bool = False, tags: list[str] | None = None) -> Any:
    """Measure something.

    Args:
        width: Its width.
        height: Its height.
        unit: The unit.
        exact: Whether not to round.
        tags: More about it.
    """
    return [width, height, unit, exact, tags]


def answering(value: object):
    """Call a tool that returns `value`, or raises it."""

    def tool() -> object:
        if isinstance(value, BaseException):
            raise value
        return value

    return call_tool({"tool": tool}, ToolCall("tool", {}))


def test_a_tool_that_fits_is_called():
    offered = {"calculator": calculator, "measure": measure}
    assert call_tool(offered, ToolCall("calculator", {"expression": "1/0"})) == ("error: division by zero", False)
    arguments = {"width": 1, "height": 2, "unit": "é", "exact": True, "tags": ["a"]}
    assert call_tool(offered, ToolCall("measure", arguments)) == ('[1, 2, "é", true, ["a"]]', True)
    assert call_tool(offered, ToolCall("measure", {"width": 1, "height": 0.5})) == ('[1, 0.5, "m", false, null]', True)
    assert call_tool(offered, ToolCall("measure", {"width": 1, "height": 2, "tags": None}))[1]


FIT = {"width": 1, "height": 1}


@pytest.mark.parametrize(("call", "said"), [
    (ToolCall("", {}, "it is not closed"), "malformed call: it is not closed"),
    (ToolCall("__import__", {}), "unknown tool '__import__'; known tools: tool, calculator"),
    (ToolCall("a\n\ud800" * 99, {}), "unknown tool 'a\\n\\ud800a\\n"),
    (ToolCall("calculator", {"expression": 17}), "calculator: expression must be str"),
    ({}, "tool: missing a required argument: 'width'"), ({"width": 1}, "tool: missing a required argument: 'height'"),
    (FIT | {"depth": 1}, "tool: got an unexpected keyword argument 'depth'"),
    *((FIT | {"width": value}, "tool: width must be int") for value in ("1", 1.0, True, None)),
    *((FIT | {"height": value}, "tool: height must be float") for value in (False, "1")),
    *((FIT | {"unit": value}, "tool: unit must be str") for value in (1, ["m"])),
    *((FIT | {"exact": value}, "tool: exact must be bool") for value in (1, "true")),
    (FIT | {"tags": {}}, "tool: tags must be list[str] | None"),
    *((FIT | {"side": value}, "tool: side must be Literal['left', 1]") for value in ("top", True)),
    (FIT | {"count": "1"}, "tool: count must be int"),
])  # fmt: skip
def test_a_call_that_does_not_fit_is_an_error(call, said):
    """And the tool is not called."""
    num_calls = []

    def tool(
        width: int, height: float, unit: str = "m", exact: bool = False, tags: list[str] | None = None,
        side: Literal["left", 1] = "left", count: "int" = 1,
    ) -> None:  # fmt: skip
        num_calls.append(1)

    call = ToolCall("tool", call) if isinstance(call, dict) else call
    text, executed = call_tool({"tool": tool, "calculator": calculator}, call)
    assert text.startswith("error: " + said)
    assert not executed
    assert not num_calls


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("no process for tools can be started")])
def test_what_is_meant_for_people_passes(error):
    with pytest.raises(type(error)):
        answering(error)


@pytest.mark.parametrize(("value", "text", "executed"), [
    ("error: not found", "error: not found", False), ({"a": [1, "é"]}, '{"a": [1, "é"]}', True),
    ((1, None), "[1, null]", True), *((value, str(value), True) for value in (None, True, 1.5)),
    ({"a": {1}}, "error: TypeError: Object of type set is not JSON serializable", False), ("a\ud800b", "a?b", True),
    ("x" * MAX_RESULT, "x" * MAX_RESULT, True), ("x" * (MAX_RESULT + 1), "x" * (MAX_RESULT - 10) + " ... (cut)", True),
    (ValueError("no\nsuch thing"), "error: ValueError: no\nsuch thing", False),
    (SystemExit(3), "error: SystemExit: 3", False), (TypeError("in the tool"), "error: TypeError: in the tool", False),
])  # fmt: skip
def test_every_result_and_exception_is_a_short_text(value, text, executed):
    assert answering(value) == (text, executed)


# Schemas and templates ------------------------------------------------------------------------------------------------


def test_schemas_come_from_types_and_docstrings():
    first, second = (schema["function"] for schema in schemas({"calculator": calculator, "gauge": measure}))
    assert first["parameters"]["properties"]["expression"]["type"] == "string"
    assert (second["name"], second["parameters"]["required"]) == ("gauge", ["width", "height"])


def test_a_function_that_describes_nothing_is_refused():
    def undocumented(a: int) -> int:
        return a

    def unexplained(a: int) -> int:
        """Do."""
        return a

    for tool in (undocumented, unexplained, max):
        with pytest.raises(UserError, match=r"^no JSON schema can be made of the tool mine \(.*\): give it"):
            schemas({"mine": tool})


@pytest.fixture(scope="module")
def bundled():
    return AutoTokenizer.from_pretrained(TINY_POLICY)


@pytest.fixture(scope="module")
def with_template(load_script):
    make = load_script("tests/models/conftest.py").byte_tokenizer
    specials = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "[TOOL_CALLS]"]
    return lambda template: make(specials, eos_token="<|im_end|>", chat_template=template)


def test_the_form_is_that_of_the_template(with_template, bundled):
    assert call_form(bundled) == "hermes"
    assert call_form(with_template(QWEN)) == "hermes"
    assert call_form(with_template(LLAMA)) == "llama3"
    tagged = LLAMA.replace("""{"name": "'""", """<|python_tag|>{"name": "'""")
    assert call_form(with_template(tagged)) == "llama3"


@pytest.mark.parametrize(("template", "said"), [
    (CHATML, "leaves tool calls out"), (QWEN.replace("message.tool_calls or", "[] or"), "leaves tool calls out"),
    ("{{ raise_exception('no tools here') }}", r"refuses tool calls \(no tools here\)"),
    ("{{ messages[1].tool_calls[0].function.arguments + 'a' }}", "refuses tool calls"), ("{% if", "refuses tool calls"),
    (None, "refuses tool calls"),
    (QWEN.replace("tool_call>", "call>"), r"writes a tool call as '<call>\\n\{.*, which is not known"),
])  # fmt: skip
def test_a_form_that_is_not_known_is_refused(with_template, template, said):
    with pytest.raises(UserError, match=f"^the chat template {said}"):
        call_form(with_template(template))


# The environment ------------------------------------------------------------------------------------------------------

ROW = {"question": "What is 17 times 23?", "answer": "391", "kind": "product"}
WHOLE = hermes(CALL)
FAILING = WHOLE.replace("17*23", "1/0")
UNKNOWN = WHOLE.replace("calculator", "search")
MALFORMED = WHOLE.replace('"17*23"', "17*23")  # no JSON
UNCLOSED = WHOLE.removesuffix("</tool_call>")
THOUGHT = f"<think>{WHOLE}</think>"
ANSWER = "<answer>391</answer>"


@pytest.fixture
def make_state() -> Callable[..., State]:
    task = Task(Scorer(TaskFile(calculator_task, "calculator"), more_weights=CALL_WEIGHTS))

    def make(form: str = "hermes", **tools: Callable[..., str]) -> State:
        return State(task, ROW, {"calculator": calculator} | tools, form)

    return make


def converse(state: State, *turns: str) -> tuple[list, dict[str, float]]:
    """The tools' answers to all turns but the last, and the rewards of the last one, which ends it."""
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
    """The nonzero counts."""
    described = state.describe()
    counts = {name: described[f"{name}_calls"] for name in OUTCOMES}
    return {name: count for name, count in counts.items() if count}


def test_no_description_of_a_task_is_named_like_one_of_the_environment():
    assert {f"{name}_calls" for name in OUTCOMES} <= TAKEN


# Turns, the answers to all but the last, the outcomes of calls that were not executed, and the rewards for right
# answer, well-formed, executed and all calls
CONVERSATIONS = {
    "no call": ([ANSWER], [], {}, (1, 0, 0, 0)),
    "one call": ([WHOLE, ANSWER], ["391"], {}, (1, 1, 1, 1)),
    "no JSON": ([MALFORMED, WHOLE, ANSWER], ["error: malformed call: ", "391"], {"malformed": 1}, (1, 0.5, 0.5, 2)),
    "not closed": ([UNCLOSED, WHOLE, ANSWER], ["error: malformed call: ", "391"], {"malformed": 1}, (1, 0.5, 0.5, 2)),
    "unknown": ([UNKNOWN, WHOLE, ANSWER], ["error: unknown tool 'search'", "391"], {"unknown": 1}, (1, 1, 0.5, 2)),
    "failing": ([FAILING, WHOLE, ANSWER], ["error: division by zero", "391"], {"failed": 1}, (1, 1, 0.5, 2)),
    "argument": ([WHOLE.replace("expression", "x"), ANSWER], ["error: calculator: "], {"failed": 1}, (1, 1, 0, 1)),
    "in a thought": ([THOUGHT + FAILING, THOUGHT + ANSWER], ["error: division"], {"failed": 1}, (1, 1, 0, 1)),
    "a second answer is one too many": ([ANSWER + WHOLE, ANSWER], ["391"], {}, (0, 1, 1, 1)),
    "an answer beside a call": ([ANSWER + WHOLE, "Done."], ["391"], {}, (1, 1, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_have_the_outcomes_of_the_table(make_state, name):
    turns, said, unexecuted, figures = CONVERSATIONS[name]
    state = make_state()
    observations, rewards = converse(state, *turns)
    assert all(text.startswith(start) for (text,), start in zip(observations, said, strict=True))
    assert outcomes(state) == unexecuted
    assert tuple(rewards[key] for key in ("correct", "well_formed_calls", "executed_calls", "calls")) == figures
    called = rewards["calls"] > 0
    assert (state.describe()["called"], state.describe()["unaided"]) == (called, not called)


def test_parallel_calls_are_executed_in_their_order_up_to_the_limit_of_a_turn(make_state):
    heard = []
    state = make_state(tell=lambda text: heard.append(text) or text.upper())
    tell = '<tool_call>{"name": "tell", "arguments": {"text": "%s"}}</tool_call>'
    many = tell % "c" * (MAX_CALLS + 2)
    observations, rewards = converse(state, f"{tell % 'a'} and {WHOLE}\n{tell % 'b'}", many, tell % "d", ANSWER)
    limit = [f"error: at most {MAX_CALLS} calls per turn"] * 2
    assert observations == [["A", "391", "B"], ["C"] * MAX_CALLS + limit, ["D"]]
    assert heard == ["a", "b", *"c" * MAX_CALLS, "d"]
    assert outcomes(state) == {"failed": 2}
    assert rewards["executed_calls"] == (MAX_CALLS + 4) / (MAX_CALLS + 6)
    assert (state.said[0], state.said[-1]) == (" and \n", ANSWER)


@pytest.mark.parametrize(("turn", "outcome"), [(WHOLE, "unanswered"), (UNKNOWN, "unanswered"), (UNCLOSED, "malformed")])
def test_calls_of_the_last_turn_are_not_executed(make_state, turn, outcome):
    """Nor are the calls of a truncated turn, whose last call may be unfinished; an answer next to them counts."""
    executed = []
    state = make_state(count=lambda: executed.append(1) or "x")
    env_step(state, WHOLE)
    state.is_last_turn = True
    _, rewards = converse(state, f'{ANSWER}<tool_call>{{"name": "count", "arguments": {{}}}}</tool_call>{turn}')
    assert not executed
    assert outcomes(state) == ({"unanswered": 2} if outcome == "unanswered" else {"unanswered": 1, outcome: 1})
    assert (rewards["calls"], rewards["executed_calls"], rewards["correct"]) == (3, pytest.approx(1 / 3), 1)


def test_llama_calls_are_the_whole_turn(make_state):
    observations, rewards = converse(make_state("llama3"), f"{THOUGHT}{LLAMA_CALL}; {LLAMA_CALL}", ANSWER)
    assert observations == [["391", "391"]]
    assert (rewards["calls"], rewards["correct"]) == (2, 1)
    _, rewards = converse(make_state("llama3"), f"{ANSWER} {LLAMA_CALL}")
    assert (rewards["calls"], rewards["correct"]) == (0, 1)
