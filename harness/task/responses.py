"""Responses of a policy or a server to prompts, which are a task's questions or the rows of a file."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

from common.chat import decode, encode_prompt
from common.errors import UserError
from common.keyed import keyed_generator
from common.sampling import sample

from harness.base.checks import parse_numbers
from harness.base.config import (
    RESOLVED,
    Count,
    InputPath,
    LocalPath,
    ModelConfig,
    OfData,
    OfEngine,
    OfRun,
    Positive,
    Share,
    shown,
)
from harness.base.terminal import say
from harness.data.data import read_rows
from harness.data.rows import Row
from harness.engines.chat_server import ChatServer
from harness.models.context import check_prompts
from harness.models.loading import load_policy
from harness.task.named_task import task_of
from harness.task.questions import load_rows
from harness.task.scorer import Scorer
from harness.task.task import Task

# Separates the random numbers of responses from the numbers of training (steps) and evaluation (2**31)
RESPONSES = 2**31 + 1


@dataclass(frozen=True, kw_only=True)
class ResponseConfig(ModelConfig):
    """The settings of the programs that sample responses to a file of questions."""

    FIRST_GROUP: ClassVar[str] = "sampling"

    num_samples: Count = 8  # n: responses per prompt
    max_new_tokens: Count | None = None  # completion budget in tokens; None: 96 for the bundled policy, else 512
    temperature: Positive = 1.0  # logits are divided by it
    # below 1: draw only from the most probable tokens that together have this much probability
    top_p: Share = 1.0
    # a text at which a completion ends, e.g. "</response>", for models that were taught no end of turn; may be given
    # several times
    stop: OfData[tuple[str, ...]] = ()
    # questions and right answers: a file of tasks, or the path of your own
    task: OfData[LocalPath] = "arithmetic"
    data: OfData[InputPath | None] = (
        None  # questions: file (docs/data.md), or hub dataset; None: the task's own training data
    )
    # prompts without a task, and so without rewards: file or hub dataset with rows {"prompt": text or messages}
    prompts: OfData[InputPath | None] = None
    at_most: OfData[tuple[str, ...]] = ()  # NAME=NUMBER: keep rows whose field NAME is at most NUMBER, e.g. num_terms=2
    max_question_length: OfData[Count | None] = None  # keep prompts of at most this many characters; None: any
    # the system turn of every prompt, which is not written to the file; None: none for the bundled policy and for
    # --prompts, the task's own for other models
    system_prompt: OfData[str | None] = None
    limit: OfData[Count | None] = None  # the first prompts only, this many; None: all
    # NAME=NUMBER: divide the prompts into parts with these shares, e.g. sft=0.5 pairs=0.3 rl=0.2; a conversation, or a
    # prompt that occurs several times, is in one part only
    splits: OfData[tuple[str, ...]] = ()
    split: OfData[str | None] = None  # the part of --splits to ask
    # a server that speaks OpenAI's protocol responds instead of --model: http://127.0.0.1:8000
    url: OfEngine[str | None] = None
    served_model: OfEngine[str | None] = None  # the model's name on that server; None: the first in its list
    request_seconds: OfEngine[Positive] = 600.0  # seconds until a request to the server counts as failed
    shard: OfRun[str] = "1/1"  # make only this part, e.g. 2/4; the parts in order are the complete file
    # responses that are made at the same time: memory of the KV cache, or requests to the server
    generation_batch_size: OfRun[Count] = 128
    output: OfRun[LocalPath] = "runs/responses.jsonl"  # a JSONL file, new or to be continued

    @property
    def batch_size(self) -> int:
        """Prompts per batch."""
        return max(1, self.generation_batch_size // self.num_samples)

    def __post_init__(self) -> None:
        found = {}
        if self.system_prompt is None and (self.prompts is not None or self.url is not None):
            found["system_prompt"] = "" if self.prompts is not None else task_of(self.task).system_prompt
        if self.max_new_tokens is None and self.url is not None:
            found["max_new_tokens"] = RESOLVED["full"]["max_new_tokens"]
        for name, value in found.items():
            object.__setattr__(self, name, value)


# What `parse_config` fills in
DEFAULTS = {kind: {"max_new_tokens": values["max_new_tokens"]} for kind, values in RESOLVED.items()}


class Prompt(NamedTuple):
    index: int  # among all prompts of the source; it names the random numbers
    shown: str | list[dict]  # as it is written: text, or messages if there are several
    messages: list[dict]  # the prompt, with the system turn of `--system-prompt`
    row: Row


class Response(NamedTuple):
    text: str
    finish_reason: str  # "stop", or "length": cut off


def read_prompts(config: ResponseConfig) -> tuple[list[Prompt], Task | None]:
    """The prompts to respond to, and the task, which `--prompts` does not have."""
    if config.prompts is None:
        file = task_of(config.task)
        task, source = Task(Scorer(file)), config.data if config.data is not None else file.train_data
        if source is None and not file.has("rows"):
            raise UserError(f"{file} names no data: give --data")
        rows = load_rows(source, file, config.at_most, config.max_question_length)
        task.scorer.try_out(rows[0])
        asked = [(row, file.messages(row), file.messages(row, config.system_prompt)) for row in rows]
    else:
        source, task = config.prompts, None
        rows = read_rows(source, {"prompt": (str, list)})
        system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
        turns = [messages_of(row) for row in rows]
        asked = [(row, own, [*system, *own]) for row, own in zip(rows, turns, strict=True)]
    prompts = [
        Prompt(index, as_prompt(own), messages, row)
        for index, (row, own, messages) in enumerate(asked)
        if own and (task or not config.max_question_length or len(own[-1]["content"]) <= config.max_question_length)
    ]
    if len(prompts) < len(asked):
        say(f"{len(asked) - len(prompts)} of {len(asked)} prompts left out: too long, or nothing is asked")
    prompts = _in_split(config, prompts)[: config.limit]
    if not prompts:
        raise UserError(f"{shown(source or config.task)}: no prompt is left")
    return prompts, task


def messages_of(row: Row) -> list[dict]:
    """The messages of a row's prompt, up to the last one that is not the assistant's."""
    messages = as_messages(row["prompt"])
    for turn in messages:
        if not (isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))):
            raise UserError(f"{row.place}: a message of the prompt has no role, or no text as its content")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return [{"role": turn["role"], "content": turn["content"]} for turn in messages]


def read_responses(source: str) -> list[Row]:
    """The rows of a file of responses, each with its `index`."""
    rows = read_rows(source, {"index": int, "prompt": (str, list), "responses": list})
    for row in rows:
        row.index = row["index"]
        if not all(isinstance(found, dict) and {"text", "finish_reason"} <= found.keys() for found in row["responses"]):
            raise UserError(f"{row.place}: a response has no text, or no finish_reason")
    for before, row in pairwise(rows):
        if row.index <= before.index:
            raise UserError(
                f"{row.place}: its index {row.index} does not follow {before.index}: are the shards in order?"
            )
    return rows


def as_messages(prompt: str | list[dict]) -> list[dict]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def as_prompt(messages: list[dict]) -> str | list[dict]:
    """The text of a single question, else the messages."""
    return messages[0]["content"] if [turn["role"] for turn in messages] == ["user"] else messages


def conversation_of(row: dict, prompt: str | list[dict]) -> str:
    """What stays in one part: the conversation of a row, if it names one in `conversation`, else the prompt."""
    return json.dumps(row.get("conversation", prompt), sort_keys=True)


def place_of(text: str, purpose: str, seed: int) -> float:
    """A number in [0, 1) that depends on this text alone: it divides data by shares."""
    return keyed_generator(purpose, seed, zlib.crc32(text.encode())).random()


def _in_split(config: ResponseConfig, prompts: list[Prompt]) -> list[Prompt]:
    if not config.splits and config.split is None:
        return prompts
    shares = parse_numbers("--splits", config.splits)
    if config.split not in shares or min(shares.values()) < 0 or not 0 < sum(shares.values()) <= 1 + 1e-9:
        raise UserError("--splits are names with shares that add up to at most 1, and --split is one of the names")
    names = list(shares)
    begin = sum(shares[name] for name in names[: names.index(config.split)])
    end = begin + shares[config.split]
    places = [place_of(conversation_of(prompt.row, prompt.shown), "splits", config.seed) for prompt in prompts]
    return [prompt for prompt, place in zip(prompts, places, strict=True) if begin <= place < end]


def make_responder(config: ResponseConfig, prompts: list[Prompt]) -> Callable[[list[Prompt]], list[list[Response]]]:
    """A function that returns `num_samples` responses to each of some prompts."""
    count, key = config.num_samples, (config.seed, RESPONSES)
    if config.url is not None:
        server = ChatServer(config.url, config.served_model, config.request_seconds)
        names = ("max_new_tokens", "temperature", "top_p")
        settings = dict(zip(("max_tokens", *names[1:]), (getattr(config, name) for name in names), strict=True))

        if config.stop:  # the second is vLLM's; other servers leave the stop text out, or refuse it
            settings |= {"stop": list(config.stop), "include_stop_str_in_output": True}

        def ask(batch: list[Prompt]) -> list[list[Response]]:
            answers = server.chat_all([(prompt.messages, prompt.index) for prompt in batch], count, key, settings)
            return [[Response(*answer) for answer in group] for group in answers]

        return ask
    policy = load_policy(config, config.temperature)
    messages = {id(prompt.row): prompt.messages for prompt in prompts}
    remedy = "leave out long prompts with --max-question-length, or lower --max-new-tokens"
    rows = [prompt.row for prompt in prompts]
    check_prompts(policy, rows, lambda row: messages[id(row)], config.max_new_tokens, remedy)

    def respond(batch: list[Prompt]) -> list[list[Response]]:
        trajectories = sample(
            policy,
            [encode_prompt(policy.tokenizer, prompt.messages) for prompt in batch],
            count,
            max_new_tokens=config.max_new_tokens,
            key=key,
            prompt_index=[prompt.index for prompt in batch],
            top_p=config.top_p,
            generation_batch_size=config.generation_batch_size,
        )
        found = [Response(decode(policy.tokenizer, row.completion_ids), row.finish_reason) for row in trajectories]
        return [found[start : start + count] for start in range(0, len(found), count)]

    return respond
