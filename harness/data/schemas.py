"""The schemas of published data: one table, which docs/data.md shows with an example each.

A row that has the fields that are asked for stays as it is. Otherwise they are found by the paths of this table, and
added. No other field is removed: reward functions may want it.
"""

import json
import re
from typing import NamedTuple

from common.messages import check_message

from harness.base.terminal import short
from harness.data.rows import Fields, Row, find_problem


class Schema(NamedTuple):
    name: str
    # what is read, and where: "a.b" is the field b of a; "a + b" are two texts, of which the second may be missing
    reads: dict[str, str]


SCHEMAS = (
    Schema("verl", {"question": "extra_info.question", "prompt": "prompt", "answer": "reward_model.ground_truth"}),
    Schema(
        "verl, Countdown",
        {"nums": "reward_model.ground_truth.numbers", "target": "reward_model.ground_truth.target"},
    ),
    Schema("verl, SFT", {"prompt": "prompt", "completion": "response"}),
    Schema("TRL, solution", {"prompt": "prompt", "answer": "solution"}),
    Schema("TRL, ground truth", {"prompt": "prompt", "answer": "ground_truth"}),
    Schema("TRL, completion", {"prompt": "prompt", "completion": "completion"}),
    Schema("TRL, implicit prompt", {"history": "chosen"}),
    Schema("HH", {"history": "chosen"}),
    Schema("OpenRLHF", {"prompt": "input", "answer": "label"}),
    Schema("OpenRLHF, SFT", {"prompt": "input", "completion": "output"}),
    Schema("Search-R1", {"question": "question", "answer": "golden_answers"}),
    Schema("MATH", {"prompt": "problem"}),
    Schema("ShareGPT", {"system": "system", "messages": "conversations"}),
    Schema("Alpaca", {"system": "system", "prompt": "instruction + input", "completion": "output"}),
    Schema("Orca DPO", {"system": "system", "prompt": "question"}),
    Schema("OpenOrca", {"system": "system_prompt", "prompt": "question", "completion": "response"}),
    Schema("OpenAI", {"messages": "messages"}),
)
# The speakers of ShareGPT, and their roles
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
ROLES |= {"tool": "tool", "observation": "tool", "function_call": "assistant"}

_PATHS = {  # by what is read
    kind: list(dict.fromkeys(schema.reads[kind] for schema in SCHEMAS if kind in schema.reads))
    for kind in {kind for schema in SCHEMAS for kind in schema.reads}
}
CONVERT = "datasets.load_dataset('json', data_files=FILE, split='train').{}.to_json('rows.jsonl')"
MORE = "; docs/data.md shows what is read, and how to convert the rest"
_WITH_TURNS = {"messages", "prompt", "chosen", "rejected"}
_ANSWER = (str, int, float, list)
_SHORT = re.compile(r"\s*(?:\$([^$]+)\$|(\S+))\s*")  # a solution that is only the answer
_HH = re.compile(r"\s*Human:.*?\n\nAssistant:", re.DOTALL)


def read_as(row: Row, fields: Fields, is_own: bool = False) -> tuple[str | None, str]:
    """Add the fields that a row has under other names, and bring turns to role and content.

    Args:
        is_own: a user's own task asks for the fields: what it can use stays as it is.

    Returns:
        The problem of a row that cannot be read, which is then unchanged; and where the fields were found, as text.
    """
    problem = find_problem(row, fields)
    lacks_answer = "problem" in fields and not is_own and _lacks_answer(row)
    if problem is None and not lacks_answer and (is_own or _WITH_TURNS.isdisjoint(fields)):
        return None, ""
    if "problem" in fields and "####" in str(row.get("answer")):  # GSM8K's, which no answer of MATH equals
        return problem, ""
    found, notes = {}, []
    try:
        if problem is None and not lacks_answer and _is_done(row, fields):
            return None, ""
        for field, wanted in (fields | ({"answer": _ANSWER} if lacks_answer else {})).items():
            kinds = wanted if isinstance(wanted, tuple) else (wanted,)
            own_problem = find_problem(row, {field: wanted})
            if own_problem is None and (is_own or field not in {"answer", *_WITH_TURNS}):
                continue
            value, path = _find(row, field, kinds)
            value = _decoded(row, value, kinds)
            if value is None and field == "answer" and "problem" in fields:
                continue  # the task will say so
            if value is None:
                return own_problem + (MORE if field not in row and not is_own else ""), ""
            if (problem := find_problem({field: value}, {field: wanted})) is not None:
                return problem, ""
            if value is not row.get(field):
                found[field] = value
                notes += [f"{field} from {path}"] if path != field else []
        if "messages" in fields and isinstance(row.get("tools"), str):
            found["tools"] = _parsed(row["tools"] or "[]")
            if not isinstance(found["tools"], list):
                raise ValueError('"tools" is not a list of JSON schemas')
    except ValueError as error:
        return str(error), ""
    row.update(found)
    return None, ", ".join(notes)


def _lacks_answer(row: Row) -> bool:
    """Whether task math finds no answer, although its FIELDS do not ask for one: a boxed solution has one."""
    return row.get("answer") is None and not re.search(r"\\(boxed|fbox)", str(row.get("solution")))


def _is_done(row: Row, fields: Fields) -> bool:
    """Whether all turns are plain, as in most rows."""
    is_plain = all(plain(row[field]) is row[field] for field in _WITH_TURNS if field in fields)
    return is_plain and not isinstance(row.get("tools"), str) and not ("prompt" in fields and _systems(row))


def _find(row: Row, field: str, kinds: tuple[type, ...]) -> tuple[object, str]:
    """The value for a field and the path where it was found; None if there is none."""
    value = row.get(field)
    if field == "answer":
        return _answer(row, kinds)
    if field in ("question", "problem") and value is None:
        return _question(row, field)
    if field == "prompt":
        return _prompt(row, kinds)
    if field == "messages":
        return _conversation(row)
    if field in ("chosen", "rejected"):
        if value is None and _is_verdict(row):
            raise ValueError(f"a completion with a label (KTO) is no pair{MORE}")
        return plain(value), field
    paths = [field, *_PATHS.get(field, ())]
    return next(((found, path) for path in paths if (found := _at(row, path)) is not None), (None, field))


def _question(row: Row, field: str) -> tuple[object, str]:
    """The question as it was before a prompt was made of it, else the only turn of a prompt."""
    asked = _candidates(row, "prompt", but=("question", "problem"))
    for path in _PATHS["question"]:
        if isinstance(text := _at(row, path), str) and text.strip():
            for name, prompt in asked.items():
                last = as_turns(prompt, "user")[-1:]
                if not last or " ".join(text.split()) not in " ".join(str(last[0].get("content")).split()):
                    raise _differ("questions", path, name)
            return text, path + ("".join(f" (without what {name} adds)" for name in asked if asked[name] != text))
    prompt, path = _agreed(asked, "questions", lambda prompt: as_turns(prompt, "user"))
    turns = as_turns(prompt, "user")
    if prompt is not None and [turn["role"] for turn in turns] != ["user"]:
        convert = CONVERT.format(f"map(lambda row: {{{field!r}: row[{path!r}][-1]['content']}})")
        said = ", ".join(turn["role"] for turn in turns)
        raise ValueError(
            f"{path!r} has the turns {said}, and a question is one turn of the user: {convert} keeps the last one "
            "(--system-prompt gives all questions a system turn)"
        )
    return turns[0]["content"] if turns else None, path


def _prompt(row: Row, kinds: tuple[type, ...]) -> tuple[object, str]:
    """The prompt: text if it is one turn of the user, else turns up to the last one that is not the assistant's."""
    own = plain(row.get("prompt"))
    found = _candidates(row, "prompt") if own is None else {"prompt": own}
    prompt, path = _agreed(found, "prompts", lambda prompt: as_turns(prompt, "user"))
    if prompt is None:
        paths = [*_PATHS["messages"], *(_PATHS["history"] if row.get("rejected") is not None else ())]
        path = next((path for path in paths if isinstance(plain(row.get(path)), list)), "prompt")
        prompt = list(plain(row.get(path)) or ())
        while prompt and prompt[-1]["role"] == "assistant":
            prompt.pop()
    asked = as_turns(prompt, "user")
    turns = _with_system(row, asked)
    is_question = [turn["role"] for turn in turns] == ["user"]
    if turns is not asked:
        own, path = None, f"system and {path}"
    elif is_question and (list not in kinds or (own is None and str in kinds)):
        return turns[0]["content"], path
    return (own or turns or None), path


def _answer(row: Row, kinds: tuple[type, ...]) -> tuple[object, str]:
    """The gold answer; a verdict on a completion is none."""
    found = {path: _gold(_at(row, path)) for path in dict.fromkeys(["answer", *_PATHS["answer"]])}
    found = {path: gold for path, gold in found.items() if gold is not None}
    solution = found.pop("solution", None)
    if not found and isinstance(solution, str) and (only := _SHORT.fullmatch(solution)):
        found["solution"] = (only[1] or only[2]).strip()
    gold, path = _agreed(found, "answers", _compared)
    if gold is None and isinstance(row.get("label"), bool):
        raise ValueError(f"'label' is true or false, as in KTO, which is no answer{MORE}")
    if isinstance(gold, list) and len(gold) == 1 and list not in kinds and path != "answer":
        gold = gold[0]
    return gold, path


def _gold(value: object) -> object:
    if isinstance(value, dict) and [name for name, part in value.items() if part is not None] == ["target"]:
        value = value["target"]  # Search-R1 in verl's schema
    if isinstance(value, str) and value.startswith('["'):
        value = _parsed(value) or value
    return None if isinstance(value, bool | dict) else value


def _compared(gold: object) -> object:
    """What two spellings of an answer must have in common: GSM8K's worked answer has it after ####."""
    if isinstance(gold, list):
        return _compared(gold[0]) if len(gold) == 1 else sorted(map(str, gold))
    return str(gold).rpartition("####")[2].strip()


def _conversation(row: Row) -> tuple[object, str]:
    """The conversation to learn from."""
    if row.get("messages") is not None:
        return plain(row["messages"]), "messages"
    found = {}
    for schema in SCHEMAS:
        path = schema.reads.get("messages")
        if path is not None and row.get(path) is not None:
            turns = plain(row[path])
            found[path] = _with_system(row, turns) if isinstance(turns, list) else turns
        elif "completion" in schema.reads:
            paths = schema.reads["prompt"], schema.reads["completion"]
            prompt, completion = (_at(row, path) for path in paths)
            if prompt is None or completion is None or (paths[0] == "input" and "instruction" in row):
                continue
            if _is_verdict(row):
                good = CONVERT.format("filter(lambda row: row['label']).remove_columns('label')")
                raise ValueError(f"a completion with a label (KTO) may be a bad one: {good} keeps the good ones")
            if lost := [name for name in ("history", "context") if row.get(name)]:
                raise ValueError(f"the field {lost[0]!r} would be left out{MORE}")
            turns = [*as_turns(prompt, "user"), *as_turns(completion, "assistant")]
            found[" and ".join(paths)] = _with_system(row, turns)
    return _agreed(found, "conversations")


def _is_verdict(row: Row) -> bool:
    return row.get("completion") is not None and str(row.get("label")).lower() in ("true", "false", "0", "1")


def _agreed(found: dict[str, object], what: str, compared=lambda value: value) -> tuple[object, str]:
    """The first of several values, which must all be the same."""
    for path, value in list(found.items())[1:]:
        if compared(value) != compared(next(iter(found.values()))):
            raise _differ(what, next(iter(found)), path)
    return next(((value, path) for path, value in found.items()), (None, ""))


def _differ(what: str, path: str, other: str) -> ValueError:
    keep = CONVERT.format(f"remove_columns({other.partition('.')[0]!r})")
    return ValueError(f"{path!r} and {other!r} are different {what}: {keep} keeps the first")


def _candidates(row: Row, kind: str, but: tuple[str, ...] = ()) -> dict[str, object]:
    found = {path: _at(row, path) for path in _PATHS[kind] if path not in but}
    found = {path: plain(value) for path, value in found.items() if value not in (None, "")}
    parts = {part for path in found if "+" in path for part in path.split(" + ")}
    return {path: value for path, value in found.items() if path not in parts}


def _at(row: dict, path: str) -> object:
    """The value at a path; None where there is nothing."""
    if "+" in path:
        first, second = (row.get(part) for part in path.split(" + "))
        is_text = isinstance(first, str) and isinstance(second, str | None)
        return "\n\n".join(filter(None, (first, second))) if is_text else None
    value: object = row
    for key in path.split("."):
        value = _parsed(value) if isinstance(value, str) else value  # a dict in a CSV file
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _decoded(row: Row, value: object, kinds: tuple[type, ...]) -> object:
    """A list, or a number of a CSV file, that is written as text where no text is wanted."""
    if isinstance(value, str) and str not in kinds:
        parsed = _parsed(value)
        if isinstance(parsed, list | dict) or (row.is_table and type(parsed) in (*kinds, int)):
            return parsed
    return value


# Turns ---------------------------------------------------------------------------------------------------------------


def as_turns(value: object, role: str) -> list[dict]:
    """Turns by `plain`, of which a text is one of `role`."""
    value = plain(value)
    return [{"role": role, "content": value}] if isinstance(value, str) else value if isinstance(value, list) else []


def _with_system(row: Row, turns: list[dict]) -> list[dict]:
    texts = _systems(row)
    is_needed = bool(turns and texts) and turns[0]["role"] != "system"
    return [{"role": "system", "content": texts[0]}, *turns] if is_needed else turns


def _systems(row: Row) -> list[str]:
    return [row[path] for path in ("system", "system_prompt") if isinstance(row.get(path), str) and row[path].strip()]


def plain(value: object) -> object:
    r"""Turns with role and content, from ShareGPT's, from parts of text, from HH's or JSON's text; other text as it is.

    >>> plain([{"from": "human", "value": "Hi!"}]), plain("Hi!")
    ([{'role': 'user', 'content': 'Hi!'}], 'Hi!')
    >>> plain("\n\nHuman: Hi!\n\nAssistant: Hello.")
    [{'role': 'user', 'content': 'Hi!'}, {'role': 'assistant', 'content': 'Hello.'}]

    Raises:
        ValueError: a speaker is unknown, or a part is no text.
    """
    if isinstance(value, str):
        parsed = _parsed(value) if value.lstrip().startswith("[{") else None
        if isinstance(parsed, list) and all(
            isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in parsed
        ):
            value = parsed
        elif _HH.match(value):
            _, *parts = re.split(r"\n\n(Human|Assistant):", "\n\n" + value.lstrip())
            roles = [{"Human": "user", "Assistant": "assistant"}[name] for name in parts[::2]]
            turns = [{"role": role, "content": text.strip()} for role, text in zip(roles, parts[1::2], strict=True)]
            return turns if turns[-1]["content"] else turns[:-1]  # a prompt ends where the answer begins
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or all(map(_is_plain, value)):
        return value
    turns = [_plain_turn(turn, position) for position, turn in enumerate(value)]
    return value if turns == value else turns


def _is_plain(turn: object) -> bool:
    """Whether there is nothing to do, as for most turns."""
    is_usual = isinstance(turn, dict) and len(turn) == 2 and isinstance(turn.get("content"), str)
    return is_usual and turn.get("role") in ("user", "assistant", "system", "tool")


def _plain_turn(turn: object, position: int) -> object:
    if isinstance(turn, dict):
        of_sharegpt, content = turn.get("from") is not None, turn.get("content")
        speaker = turn["from"] if of_sharegpt else turn.get("role")
        if of_sharegpt:
            content, turn = turn.get("value"), {name: turn[name] for name in turn.keys() - {"from", "value"}}
        if of_sharegpt and speaker not in list(ROLES):
            raise ValueError(
                f"message {position} is from {short(speaker)}, and not from one of {', '.join(ROLES)}{MORE}"
            )
        if isinstance(content, list):
            content = "".join(_text_of(part, position) for part in content)
        if speaker == "function_call":
            calls = _parsed(content) if isinstance(content, str) else None
            calls = calls if isinstance(calls, list) else [calls]
            if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
                raise ValueError(f"message {position} is a call that is no JSON with a name")
            turn, content = turn | {"tool_calls": [{"type": "function", "function": call} for call in calls]}, ""
        is_known = of_sharegpt or speaker in ("human", "gpt")
        turn = (
            turn
            | ({"role": ROLES[speaker]} if is_known else {})
            | ({"content": content} if content is not None else {})
        )
    check_message(turn, position)
    return turn


def _text_of(part: object, position: int) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise ValueError(f"message {position} has a part that is no text: only text is read")
    return text
