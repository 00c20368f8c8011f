"""Lengths in tokens: of prompts against the model's context, of worked solutions against the completion budget."""

import re
from collections.abc import Iterator

from common.chat import encode_prompt
from common.errors import UserError
from common.tasks.audit.findings import Finding, Lengths

from common.plumbing.config import RunConfig
from common.plumbing.context import context_of
from common.plumbing.hub import must_be_cached
from common.plumbing.pretrained import read_config, read_template, read_tokenizer
from common.plumbing.task import Row, Task

CHUNK = 1000  # texts that are tokenised at once
_ANNOTATIONS = re.compile(r"<<[^<>]*>>")  # GSM8K's, for a calculator; nobody is asked to write them


def load_tokenizer(config: RunConfig) -> tuple[object, float]:
    """The tokenizer of `--model`, as a run would have it, and the length of the model's context.

    Raises:
        UserError: it cannot be loaded, or has no chat template.
    """
    is_here = config.base_path is not None or must_be_cached("model", config.base)
    has_tokenizer = config.adapter_path is not None and (config.adapter_path / "tokenizer_config.json").is_file()
    tokenizer = read_tokenizer(str(config.adapter_path) if has_tokenizer else config.base, is_here)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    if tokenizer.chat_template is None:
        raise UserError(f"--model {config.model} has no chat template: give it one with --chat-template FILE (Jinja)")
    return tokenizer, context_of(read_config(config.base, is_here))


def measure_prompts(
    tokenizer, task: Task, rows: list[Row], system_prompt: str, of: str, room: float
) -> tuple[Lengths, Finding]:
    """The prompts, as training encodes them; those of more than `room` tokens are refused by a run."""
    long = Finding(f"{of}_long_prompts", f"{of}: prompts without room for a completion", True, len(rows))
    tokens = []
    for row in rows:
        tokens.append(len(encode_prompt(tokenizer, task.messages(row, system_prompt))))
        if tokens[-1] > room:
            long.add(row, f"{tokens[-1]} tokens: {row.question}")
    return Lengths(f"{of}_prompts", f"{of}: prompts", tokens, room), long


def measure_solutions(tokenizer, rows: list[Row], of: str, budget: int) -> Lengths:
    """Worked solutions in the rows; a policy that writes as much needs as many tokens."""
    texts = [text for text in map(worked_solution, rows) if text is not None]
    tokens = [
        length
        for chunk in _chunks(texts)
        for length in map(len, tokenizer(chunk, add_special_tokens=False)["input_ids"])
    ]
    return Lengths(f"{of}_solutions", f"{of}: worked solutions in the rows", tokens, budget)


def worked_solution(row: Row) -> str | None:
    """How a row is solved: MATH's `solution`, or what GSM8K's `answer` says before its `####`; None if it has none.

    >>> worked_solution({"answer": "48/2=<<48/2=24>>24 clips\\n#### 24"}), worked_solution({"answer": "24"})
    ('48/2=24 clips\\n#### 24', None)
    """
    answer, solution = row.get("answer"), row.get("solution")
    if isinstance(solution, str) and solution.strip():
        return solution
    return _ANNOTATIONS.sub("", answer) if isinstance(answer, str) and "\n####" in answer else None


def _chunks(texts: list[str]) -> Iterator[list[str]]:
    return (texts[start : start + CHUNK] for start in range(0, len(texts), CHUNK))
