"""Make the bundled policies: supervised fine-tuning on generated conversations, in three lessons.

    python imitation/tiny_policy/make_policy.py --dtype bfloat16 --save-dtype bfloat16 --threads 2     # tiny_policy

README.md has the commands of the others. --lessons arithmetic (warm_start.py) begins with a new policy; tools
(tool_lessons.py) and countdown (countdown_lessons.py, where some tokens weigh more) continue one. The rows keep their
order, because the later lessons build on the earlier ones. At the end the policy is examined as it answers by itself,
and, in arithmetic, forced to reason before it answers: the second accuracy shows how much experiment_base can bring
out. With every --num-... at 0 a --model is only examined.
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from countdown_lessons import EMPHASIS, countdown_conversations, renew_symbols
from emphasis import emphasise, read_weighted
from tiny_policy import make_model, make_tokenizer
from tool_examination import examine_tools
from tool_lessons import renew_collapsed_embeddings, tool_conversations
from warm_start import conversations

from common.errors import UserError
from common.evaluate import evaluate
from common.policy import Policy
from imitation.sft import train as sft
from tasks import arithmetic, countdown

from harness.base.config import DTYPES, CountOrZero
from harness.base.terminal import say
from harness.cli.parse import parse_config
from harness.data.data import read_rows
from harness.models.context import check_prompts
from harness.models.loading import load_policy, make_policy
from harness.run.start import run_main, start_run
from harness.task.conversations import batches, encode_rows

RESOLVED = {"new": {"lr": 1.5e-3}, **sft.RESOLVED}
LESSONS = {"arithmetic": conversations, "tools": tool_conversations, "countdown": countdown_conversations}
# The questions at the end, by lessons, and the budget of an answer in tokens
EXAMINED = {"arithmetic": (arithmetic, 96), "tools": (arithmetic, 96), "countdown": (countdown, 160)}


@dataclass(frozen=True, kw_only=True)
class Config(sft.Config):
    data: ClassVar[None] = None  # the lessons replace it
    eval_every: ClassVar[int] = 0
    model: str = "new"  # a fresh tiny policy "new", the bundled one "tiny", a hub id, or a directory
    lessons: Literal["arithmetic", "tools", "countdown"] = "arithmetic"  # what is taught
    # with --lessons tools: embeddings of the syllables of names, unused until then: like those of digits, random, as is
    embeddings: Literal["like_digits", "random", "as_is"] = "like_digits"
    num_copying: CountOrZero = 38_000  # conversations of the first lesson
    num_reasoning: CountOrZero = 200_000  # conversations of the second lesson: all are reasoned, or call a tool
    num_answering: CountOrZero = 120_000  # conversations of the third lesson: some are reasoned, or call a tool
    warmup_steps: CountOrZero = 50  # steps over which the learning rate rises from 0
    lr: sft.Positive | None = None  # peak learning rate; None: 1.5e-3 for "new", 5e-4 for "tiny", else 1e-5
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the weights in final/, which are then examined


def main(argv: list[str] | None = None) -> None:
    config = parse_config(Config, argv, description=__doc__, resolved=RESOLVED)
    if config.lessons != "tools" and config.embeddings != Config.embeddings:
        raise UserError("--embeddings is about the names of --lessons tools")
    if config.lessons != "arithmetic" and config.model == "new":
        raise UserError(f"--lessons {config.lessons} continues a policy that can reason: give a --model")
    rows = make_rows(config)
    with start_run(config) as run:
        policy = new_policy(config) if config.model == "new" else load_policy(config)
        task, budget = EXAMINED[config.lessons]  # the examination at the end would fail
        check_prompts(policy, read_rows(str(task.EVAL_DATA), task.FIELDS), task.messages, max_new_tokens=budget)
        if config.lessons == "tools" and config.embeddings != "as_is":
            cosines = renew_collapsed_embeddings(policy, config.seed, at_random=config.embeddings == "random")
            say("mean cosine between the syllables of names: {:.3f}, renewed {:.3f}".format(*cosines))
        if config.lessons == "countdown":
            renew_symbols(policy, config.seed)
        rows = encode_rows(rows, f"--lessons {config.lessons}", policy, config.max_length)
        if config.lessons == "countdown":
            rows = [emphasise(policy.tokenizer, row, EMPHASIS) for row in rows]
        steps = list(batches(config, rows, shuffle=False))
        sft.train(config, run, policy, steps, [], read_weighted if config.lessons == "countdown" else sft.read)

        cast_weights(policy, DTYPES[config.save_dtype])
        run.save_final(policy)
        cast_weights(policy, torch.float32)  # rounded: the weights that are examined are the weights that were saved
        examination = examine(config, policy)
        run.write_summary(examination)
        for name, value in examination.items():
            say(f"{name:40} {value:.3f}")
        say(f"policy: {run.directory / 'final'}")


def make_rows(config: Config) -> list[dict]:
    sizes = (config.num_copying, config.num_reasoning, config.num_answering)
    return list(LESSONS[config.lessons](*sizes, config.seed))


def new_policy(config: Config) -> Policy:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, config.seed)
    model.set_attn_implementation(config.attn_implementation)
    return make_policy(model, tokenizer, config)


def cast_weights(policy: Policy, dtype: torch.dtype) -> None:
    """Cast the trained weights only: `.to(dtype)` would also round the rotary embedding's frequencies, for good."""
    for weight in policy.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(dtype)


def examine(config: Config, policy: Policy) -> dict[str, float]:
    """Held-out answers, by itself and, in arithmetic, forced to reason first; after --lessons tools its calls."""
    task, budget = EXAMINED[config.lessons]
    questions = read_rows(str(task.EVAL_DATA), task.FIELDS)[: config.eval_prompts]
    examination = {}
    ways = {"eval": "", "eval_forced": "<think>"} if task is arithmetic else {"eval": ""}
    for name, prefix in ways.items():
        metrics = evaluate(
            policy, questions, task, max_new_tokens=budget, num_samples=8, seed=config.seed, prefix=prefix
        ).metrics
        examination |= {f"{name}/{key}": value for key, value in metrics.items()}
    return examination | (examine_tools(policy, config.eval_prompts, config.seed) if config.lessons == "tools" else {})


if __name__ == "__main__":
    run_main(main)
