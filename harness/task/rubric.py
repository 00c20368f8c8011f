"""`--judge`: a rubric, which is a file of yes/no questions that a language model answers about each completion.

One JSON object a line, of which only `question` must be there:

    {"name": "polite", "weight": 1, "question": "Text: {answer}\\nIs this text polite?",
     "examples": [{"answer": "Good morning!", "verdict": "yes"}, {"answer": "Go away.", "verdict": "no"}]}

`{prompt}` and `{answer}` are replaced by what the policy was asked and by its answer; a question without `{answer}` is
asked below both. The examples become earlier turns of the conversation with the judge. Each question is a reward
component of its own.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import DynamicCache

from common.chat import encode_prompt
from common.errors import UserError
from common.policy import Policy
from common.reward_model import score_rows

from harness.base.checks import check_model, is_finite
from harness.base.config import JudgeConfig, ModelConfig, RunConfig, shown
from harness.base.terminal import say, short
from harness.models.context import context_of
from harness.models.loading import load_policy

Messages = list[dict]
Asked = tuple[float, float]  # the probabilities of "yes" and of "no"

WORDS = ("yes", "no")
LAYOUT = "Request: {prompt}\n\nAnswer: {answer}\n\n"  # above a question that has no {answer}
FIELDS = {"question": str, "name": str, "weight": (int, float), "examples": list}
UNREAD = 0.01  # below this probability of yes or no together, the judge has answered something else
MOST_KEPT = 100_000  # verdicts
MOST_REQUESTS = 64  # to a server at the same time


class Criterion(NamedTuple):
    """One question of a rubric. Its reward is the probability of yes, times `weight`."""

    name: str
    weight: float
    question: str  # with {answer}, and perhaps {prompt}
    examples: list[dict]

    def conversation(self, prompt: str, answer: str) -> Messages:
        """What the judge is asked: the examples with their verdicts, then the question about this answer."""
        turns = []
        for example in self.examples:
            turns.append(self._ask(example.get("prompt", ""), example["answer"]))
            turns.append({"role": "assistant", "content": example["verdict"].capitalize()})
        return [*turns, self._ask(prompt, answer)]

    def _ask(self, prompt: str, answer: str) -> dict:
        texts = {"{prompt}": prompt, "{answer}": answer}  # at once: an answer may itself contain "{prompt}"
        question = re.sub(r"\{(?:prompt|answer)\}", lambda found: texts[found[0]], self.question)
        return {"role": "user", "content": f"{question} Answer yes or no."}


def read_rubric(name: str) -> list[Criterion]:
    """The questions of a file; UserError names the line that is none."""
    try:
        lines = Path(name).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(
            f"--judge {shown(name)}: it must be a file of questions, one JSON object a line ({error})"
        ) from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    criteria: list[Criterion] = []
    for number, line in numbered:
        default = "judge" if len(numbered) == 1 else f"judge_{len(criteria) + 1}"
        try:
            criteria.append(_read_criterion(line, default))
            if criteria[-1].name in [other.name for other in criteria[:-1]]:
                raise ValueError(f"the name {criteria[-1].name!r} is there twice")
        except ValueError as error:
            raise UserError(f"--judge {shown(name)}, line {number}: {error}") from error
    if not criteria:
        raise UserError(f"--judge {shown(name)}: the file is empty; each line is a JSON object with a question")
    return criteria


def _read_criterion(line: str, name: str) -> Criterion:
    row = json.loads(line)
    if not isinstance(row, dict) or not str(row.get("question") or "").strip():
        raise ValueError('a question is missing: {"question": "Is the answer polite?"}')
    for field, value in row.items():
        if field not in FIELDS:
            raise ValueError(f"there is no field {field!r}, only {', '.join(FIELDS)}")
        if not isinstance(value, FIELDS[field]) or isinstance(value, bool):
            raise ValueError(f"{field} cannot be {short(value)}")
    if not is_finite(row.get("weight", 1.0)):
        raise ValueError(f"weight cannot be {row['weight']}")
    examples = row.get("examples", [])
    for example in examples:
        texts = isinstance(example, dict) and {"answer", "verdict"} <= example.keys() <= {"prompt", "answer", "verdict"}
        if not texts or not all(isinstance(text, str) for text in example.values()):
            raise ValueError(
                f"an example has an answer, a verdict and perhaps a prompt, all of them texts: {short(example)}"
            )
        if example["verdict"].lower() not in ("yes", "no"):
            raise ValueError(f'the verdict of an example is "yes" or "no", not {short(example["verdict"])}')
    question = row["question"] if "{answer}" in row["question"] else LAYOUT + row["question"]
    return Criterion(row.get("name", name), float(row.get("weight", 1.0)), question, examples)


class Rubric:
    """The verdicts of a judge on answers, each asked once.

        verdict = p(yes) / (p(yes) + p(no))      of the first token that the judge would answer

    Every spelling of the two words counts (`Yes`, ` yes`). If neither is probable, the judge has not been understood,
    and the verdict is the worst one.

    Args:
        ask: gives p(yes) and p(no) of some conversations.
    """

    def __init__(self, criteria: list[Criterion], ask: Callable[[list[Messages]], list[Asked]]):
        self.weights = {criterion.name: criterion.weight for criterion in criteria}
        self.worst = {name: 0.0 if weight >= 0 else 1.0 for name, weight in self.weights.items()}
        self._criteria, self._ask = criteria, ask
        self._kept: dict[str, float | None] = {}  # the verdicts, by the conversation; None: neither yes nor no
        self._has_told = False

    def score(self, conversations: list[Messages]) -> list[dict[str, float]]:
        """The verdicts on the last turn of each conversation, by the name of the question."""
        asked = list(map(self._questions, conversations))
        keys = [{name: json.dumps(messages) for name, messages in one.items()} for one in asked]
        if len(self._kept) > MOST_KEPT:
            self._kept.clear()
        pairs = zip(keys, asked, strict=True)
        new = {
            key[name]: messages for key, one in pairs for name, messages in one.items() if key[name] not in self._kept
        }
        verdicts = [yes / (yes + no) if yes + no > UNREAD else None for yes, no in self._ask(list(new.values()))]
        self._kept |= dict(zip(new, verdicts, strict=True))
        self._tell_of_unread(verdicts)
        return [
            {name: self.worst[name] if (verdict := self._kept[key]) is None else verdict for name, key in one.items()}
            for one in keys
        ]

    def remember(self, conversation: Messages, verdicts: dict[str, float]) -> None:
        """Keep verdicts that an earlier process was given."""
        if len(self._kept) <= MOST_KEPT:
            asked = self._questions(conversation)
            self._kept |= {json.dumps(messages): verdicts[name] for name, messages in asked.items()}

    def _questions(self, conversation: Messages) -> dict[str, Messages]:
        """What the judge is asked about the last turn, by the name of the question."""
        *turns, answer = conversation
        return {one.name: one.conversation(_text_of(turns), answer["content"]) for one in self._criteria}

    def _tell_of_unread(self, verdicts: list[float | None]) -> None:
        unread = verdicts.count(None)
        if not unread:
            return
        if len(self._kept) > 1 and not any(verdict is not None for verdict in self._kept.values()):
            remedy = "does it think first? Choose another judge or template, or add examples"
            raise UserError(f"the judge has begun no answer with yes or no: {remedy}")
        if not self._has_told:
            self._has_told = True
            problem = f"the judge begins {unread} of {len(verdicts)} answers with neither yes nor no"
            say(f"{problem}: these count as its worst verdict")


def load_rubric(config: JudgeConfig, is_asked: bool = True) -> Rubric:
    """The rubric of `--judge`, which `--judge-model` or the server at `--judge-url` answers, if it `is_asked`."""
    criteria = read_rubric(config.judge)
    if config.judge_url is None and config.judge_model is None:
        raise UserError("--judge is asked of a model: give --judge-model MODEL, or --judge-url http://127.0.0.1:8000")
    if not is_asked or getattr(config, "estimate", False):
        return Rubric(criteria, lambda _: [])
    return Rubric(criteria, ask_here(config) if config.judge_url is None else _ask_server(config))


class _FirstWord(nn.Module):
    """The probabilities (B, 2) that a model begins its answer with yes, and with no."""

    def __init__(self, policy: Policy):
        super().__init__()
        self._policy, self.pad_id = policy, policy.pad_id
        yes, no = (
            {policy.tokenizer.encode(text, add_special_tokens=False)[0] for text in spellings(word)} for word in WORDS
        )
        self.ids = sorted(yes - no), sorted(no - yes)  # some tokenizers begin both with a token for the space

    @property
    def device(self) -> torch.device:
        return self._policy.device

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """For right-padded rows (B, T) and their mask (B, T). What all rows begin with, the examples, is read once."""
        model, last = self._policy.model.eval(), attention_mask.sum(dim=1) - 1
        begin = int((sequences == sequences[0]).all(dim=0).long().cumprod(dim=0)[: int(last.min())].sum())
        with self._policy.autocast():
            decoder, cache = model.get_decoder(), DynamicCache()
            if begin:
                decoder(sequences[:1, :begin], past_key_values=cache, use_cache=True)
                cache.batch_repeat_interleave(len(sequences))
            hidden = decoder(sequences[:, begin:], past_key_values=cache, use_cache=True).last_hidden_state
            last = hidden[torch.arange(len(sequences)), last - begin]
            probabilities = model.get_output_embeddings()(last).float().softmax(dim=-1)  # (B, V)
        return torch.stack([probabilities[:, ids].sum(dim=1) for ids in self.ids], dim=1)


def spellings(word: str) -> list[str]:
    """How a model may begin its answer with a word.

    >>> spellings("yes")
    ['yes', ' yes', 'Yes', ' Yes', 'YES', ' YES']
    """
    return [space + text for text in (word, word.capitalize(), word.upper()) for space in ("", " ")]


def ask_here(config: RunConfig) -> Callable[[list[Messages]], list[Asked]]:
    given = f"--judge-model {shown(config.judge_model)}"
    dtype = "bfloat16" if torch.device(config.device).type == "cuda" else "float32"
    of_judge = ModelConfig(model=config.judge_model, device=config.device, dtype=dtype)
    try:
        check_model(of_judge)
        policy = load_policy(of_judge, 1.0, is_frozen=True)
    except UserError as error:
        raise UserError(str(error).replace("--model", "--judge-model")) from error
    judge, longest = _FirstWord(policy.requires_grad_(False)), context_of(policy.model.config)
    if not all(judge.ids):
        raise UserError(f"{given}: its tokenizer begins yes and no with the same token")
    say(f"{given} is the judge: {sum(weight.numel() for weight in policy.model.parameters()):,} parameters")

    def ask(conversations: list[Messages]) -> list[Asked]:
        rows = [encode_prompt(policy.tokenizer, messages) for messages in conversations]
        if rows and (width := max(map(len, rows))) > longest:
            raise UserError(f"{given} reads {longest} tokens at most, and a question about an answer has {width}")
        return score_rows(judge, rows, config.generation_batch_size)

    return ask


def _ask_server(config: RunConfig) -> Callable[[list[Messages]], list[Asked]]:
    from harness.engines.chat_server import ChatServer  # not at the top: few runs have a server, which needs httpx2

    server = ChatServer(config.judge_url, config.judge_model)

    async def ask_one(messages: Messages, free: asyncio.Semaphore) -> Asked:
        async with free:
            found = await server.first_token(messages)
        return tuple(math.fsum(p for token, p in found if token.strip().lower() == word) for word in WORDS)

    async def ask_all(conversations: list[Messages]) -> list[Asked]:
        free = asyncio.Semaphore(MOST_REQUESTS)
        return await asyncio.gather(*(ask_one(messages, free) for messages in conversations))

    return lambda conversations: server.submit(ask_all(conversations)).result()


def _text_of(turns: Messages) -> str:
    """The conversation before the answer: its only turn, or all of them with their roles."""
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns)
