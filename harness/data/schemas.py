"""The schemas of published data: one table, which docs/data.md shows with an example each.

A row that has the fields that are asked for stays as it is. Otherwise they are found by the paths of this table, and
added. No other field is removed: reward functions may want it.
"""

import re
from typing import NamedTuple

from harness.data.rows import Fields, Row, find_problem
from harness.data.turns import MORE, as_turns, parsed, plain


class Schema(NamedTuple):
    name: str
    # what is read, and where: "a.b" is the field b of a; "a + b" joins two texts; b can be absent
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
    Schema("DeepMath", {"question": "question", "answer": "final_answer"}),
    Schema("ShareGPT", {"system": "system", "messages": "conversations"}),
    Schema("Alpaca", {"system": "system", "prompt": "instruction + input", "completion": "output"}),
    Schema("Orca DPO", {"system": "system", "prompt": "question"}),
    Schema("OpenOrca", {"system": "system_prompt", "prompt": "question", "completion": "response"}),
    Schema("GSM8K, SFT", {"question": "question", "worked": "answer"}),
    Schema("OpenAI", {"messages": "messages"}),
)

_PATHS = {  # by what is read
    kind: list(dict.fromkeys(schema.reads[kind] for schema in SCHEMAS if kind in schema.reads))
    for kind in {kind for schema in SCHEMAS for kind in schema.reads}
}
CONVERT = "datasets.load_dataset('json', data_files=FILE, split='train').{}.to_json('rows.jsonl')"
_WITH_TURNS = {"messages", "prompt", "chosen", "rejected"}
_BESIDE_TURNS = {"system", "system_prompt", "label", "kto_tag"}
_ANSWER = (str, int, float, list)
_SHORT = re.compile(r"\s*(?:\$([^$]+)\$|(\S+))\s*")  # a solution that is only the answer


def read_as(row: Row, fields: Fields, is_own: bool = False) -> tuple[str | None, str]:
    """Add the fields that a row has under other names, and bring turns to role and content.

    Args:
        is_own: a user's own task asks for the fields: what it can use stays as it is.

    Returns:
        The problem of a row that cannot be read, which is then unchanged; and where the fields were found, as text.
    """
    problem, wanted = find_problem(row, fields), dict(fields)
    if "problem" in fields and not is_own:  # task math, which needs an answer as well, unless the solution is boxed
        if "####" in str(row.get("answer")):  # GSM8K's, which no answer of MATH equals
            return problem, ""
        if row.get("answer") is None and not re.search(r"\\(boxed|fbox)", str(row.get("solution"))):
            wanted["answer"] = _ANSWER
    if "messages" in fields and isinstance(row.get("tools"), str) and row["tools"]:
        wanted["tools"] = list
    found, notes = {}, []
    try:
        if problem is None and len(wanted) == len(fields) and (is_own or _is_done(row, fields)):
            return None, ""
        for field, kind in wanted.items():
            own_problem = find_problem(row, {field: kind})
            if own_problem is None and (is_own or field not in {"answer", *_WITH_TURNS}):
                continue
            kinds = kind if isinstance(kind, tuple) else (kind,)
            value, path = _find(row, field, kinds)
            if value is None and field not in fields:
                continue  # the task will say that there is no answer
            if value is None:
                own_problem = own_problem or f"the field {field!r} is empty"
                return own_problem + (MORE if field not in row and not is_own else ""), ""
            if (problem := find_problem({field: value}, {field: kind})) is not None:
                return problem, ""
            if value is not row.get(field):
                found[field] = value
                notes += [f"{field} from {path}"] if path != field else []
    except ValueError as error:
        return str(error), ""
    row.update(found)
    return None, ", ".join(notes)


def _is_done(row: Row, fields: Fields) -> bool:
    """Whether there is nothing to do, as in most rows."""
    turns = [row[field] for field in _WITH_TURNS if field in fields]
    has_more = not _BESIDE_TURNS.isdisjoint(row) and (_system(row) or _verdict(row))
    return not turns or (not has_more and all(value and plain(value) is value for value in turns))


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
    if field in ("chosen", "rejected") and value is None and _verdict(row):
        raise ValueError(f"a completion with a label (KTO) is no pair{MORE}")
    paths = [field, *_PATHS.get(field, ())]
    value, path = next(((found, path) for path in paths if (found := _at(row, path)) is not None), (None, field))
    return plain(value) if field in _WITH_TURNS else _decoded(row, value, kinds), path


def _question(row: Row, field: str) -> tuple[object, str]:
    """The question as it was before a prompt was made of it, else the only turn of a prompt."""
    prompts = _prompts(row)
    turns, path = _asked(row, {name: prompts[name] for name in prompts if name not in ("question", "problem")})
    for known in _PATHS["question"]:
        if isinstance(text := _at(row, known), str) and text.strip():
            prompt = str(turns[-1].get("content")) if turns else text
            if " ".join(text.split()) not in " ".join(prompt.split()):
                raise _differ("questions", known, path)
            return text, known + (f" (without what {path} adds)" if len(turns) > 1 or prompt != text else "")
    if _system(row):
        raise _lost("system")
    if turns and [turn["role"] for turn in turns] != ["user"]:
        convert = CONVERT.format(f"map(lambda row: {{{field!r}: row[{path!r}][-1]['content']}})")
        said = ", ".join(turn["role"] for turn in turns)
        raise ValueError(
            f"{path!r} has the turns {said}, and a question is one turn of the user: {convert} keeps the last one "
            "(--system-prompt gives all questions a system turn)"
        )
    return turns[0]["content"] if turns else None, path


def _prompt(row: Row, kinds: tuple[type, ...]) -> tuple[object, str]:
    """The prompt: its own form or, where a row has none, text if it is one turn of the user; else turns."""
    own = plain(row.get("prompt"))
    asked, path = _asked(row, _prompts(row) if own is None else {"prompt": own})
    turns = _with_system(row, asked)
    if turns is not asked:
        return turns, f"system and {path}"
    is_text = str in kinds and (list not in kinds or not isinstance(own, list))
    return turns[0]["content"] if is_text and [turn["role"] for turn in turns] == ["user"] else turns or None, path


def _prompts(row: Row) -> dict[str, object]:
    """The values of all paths of prompts; Alpaca's `input` alone is none."""
    found = {path: plain(value) for path in _PATHS["prompt"] if (value := _at(row, path)) not in (None, "")}
    parts = {part for path in found if "+" in path for part in path.split(" + ")}
    return {path: value for path, value in found.items() if path not in parts}


def _asked(row: Row, prompts: dict[str, object]) -> tuple[list[dict], str]:
    """The turns of these prompts, which must agree, else of a conversation, without those that answer; [] if none."""
    turns, path = _agreed({name: as_turns(prompt, "user") for name, prompt in prompts.items()}, "prompts")
    if turns is not None:  # HH's prompt ends where the answer begins
        is_open = turns and turns[-1]["role"] == "assistant" and turns[-1].get("content") == ""
        return turns[:-1] if is_open else turns, path
    paths = [*_PATHS["messages"], *(_PATHS["history"] if row.get("rejected") is not None else ())]
    path = next((path for path in paths if isinstance(plain(row.get(path)), list)), "prompt")
    turns = list(plain(row.get(path)) or ())
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns, path


def _answer(row: Row, kinds: tuple[type, ...]) -> tuple[object, str]:
    """The gold answer; a verdict on a completion is none."""
    found = {path: _gold(_at(row, path)) for path in dict.fromkeys(["answer", *_PATHS["answer"]])}
    found = {path: gold for path, gold in found.items() if gold is not None}
    solution = found.pop("solution", [])
    if not found and not isinstance(solution, list) and (only := _SHORT.fullmatch(_last(solution))):
        found["solution"] = (only[1] or only[2]).strip()
    gold, path = _agreed(found, "answers", _compared)
    if gold is None and isinstance(row.get("label"), bool):
        raise ValueError(f"'label' is true or false, as in KTO, which is no answer{MORE}")
    is_list = isinstance(gold, list) and len(gold) == 1 and list not in kinds and path != "answer"
    return gold[0] if is_list else _decoded(row, gold, kinds), path


def _gold(value: object) -> object:
    if isinstance(value, dict) and [name for name, part in value.items() if part is not None] == ["target"]:
        value = value["target"]  # Search-R1 in verl's schema
    if isinstance(value, str) and value.startswith('["'):
        value = parsed(value) or value
    return None if isinstance(value, bool | dict) else value


def _compared(gold: object) -> object:
    """What two spellings of an answer must have in common."""
    return sorted(map(_last, gold if isinstance(gold, list) else [gold]))


def _last(gold: object) -> str:
    """GSM8K's worked answer has the answer after ####."""
    return str(gold).rpartition("####")[2].strip()


def _conversation(row: Row) -> tuple[object, str]:
    """The conversation to learn from."""
    paths = ["messages"] if row.get("messages") is not None else _PATHS["messages"]
    found = {path: plain(row[path]) for path in paths if row.get(path) is not None}
    prompts = {} if "messages" in found else _prompts(row)
    for asked, given in ((schema.reads.get("prompt"), schema.reads.get("completion", "")) for schema in SCHEMAS):
        if asked in prompts and (completion := _at(row, given)) is not None:
            turns, _ = _asked(row, {asked: prompts[asked]})
            found[f"{asked} and {given}"] = [*turns, *as_turns(completion, "assistant")]
            for name in ("history", "context"):
                if row.get(name):
                    raise _lost(name)
    if not found and (worked := _worked(row)):
        found["question and answer, its steps as a thought"] = worked
    turns, path = _agreed(found, "conversations")
    if turns is not None and (verdict := _verdict(row)):
        good = CONVERT.format(f"filter(lambda row: row[{verdict!r}]).remove_columns({verdict!r})")
        raise ValueError(f"a completion with a label (KTO) may be a bad one: {good} keeps the good ones")
    whole = _with_system(row, turns) if isinstance(turns, list) else turns
    return whole, path if whole is turns else f"system and {path}"


def _worked(row: Row) -> list[dict]:
    """GSM8K's question, and its worked answer in the form that --task gsm8k asks for; [] for other rows.

    The marks `<<48/2=24>>` are for a calculator (Cobbe et al. 2021, arXiv 2110.14168), which nobody calls here.
    """
    steps, _, gold = str(row.get("answer")).rpartition("####")
    thought, gold = re.sub("<<[^<>]*>>", "", steps).strip(), gold.strip()
    if not (isinstance(row.get("question"), str) and thought and gold):
        return []
    answer = f"<think>\n{thought}\n</think>\n\n<answer>{gold}</answer>"
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]


def _verdict(row: Row) -> str | None:
    """The field that says whether a completion is good (KTO)."""
    spelled = ("true", "false") if row.get("completion") is None else ("true", "false", "0", "1")
    return next((name for name in ("label", "kto_tag") if str(row.get(name)).lower() in spelled), None)


def _agreed(found: dict[str, object], what: str, compared=lambda value: value) -> tuple[object, str]:
    """The first of several values, which must all be the same."""
    (first, value), *others = found.items() or [("", None)]
    for path, other in others:
        if compared(other) != compared(value):
            raise _differ(what, first, path)
    return value, first


def _differ(what: str, path: str, other: str) -> ValueError:
    columns = [name.partition(".")[0] for name in other.split(" and ")]  # a prompt and its completion: two
    keep = CONVERT.format(f"remove_columns({columns if columns[1:] else columns[0]!r})")
    return ValueError(f"{path!r} and {other!r} are different {what}: {keep} keeps the first")


def _lost(name: str) -> ValueError:
    keep = CONVERT.format(f"remove_columns({name!r})")
    return ValueError(f"the field {name!r} would be left out: {keep} removes it{MORE}")


def _at(row: dict, path: str) -> object:
    """The value at a path; None where there is nothing."""
    if "+" in path:
        first, second = (row.get(part) for part in path.split(" + "))
        is_text = isinstance(first, str) and isinstance(second, str | None)
        return "\n\n".join(filter(None, (first, second))) if is_text else None
    value: object = row
    for key in path.split("."):
        value = parsed(value) if isinstance(value, str) else value  # a dict in a CSV file
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _decoded(row: Row, value: object, kinds: tuple[type, ...]) -> object:
    """A list, or a number of a CSV file, that is written as text where no text is wanted."""
    if isinstance(value, str) and str not in kinds:
        found = parsed(value)
        if isinstance(found, list | dict) or (row.is_table and type(found) in (*kinds, int)):
            return found
    return value


def _with_system(row: Row, turns: list[dict]) -> list[dict]:
    """The turns with the system turn of the row's own field; both must be the same."""
    system = _system(row)
    if not (turns and system):
        return turns
    if turns[0]["role"] != "system":
        return [{"role": "system", "content": row[system]}, *turns]
    _agreed({"a system turn": turns[0]["content"], system: row[system]}, "system turns", str.strip)
    return turns


def _system(row: Row) -> str | None:
    names = ("system", "system_prompt")
    return next((name for name in names if isinstance(row.get(name), str) and row[name].strip()), None)
