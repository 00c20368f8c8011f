"""Pairs of answers to the same prompt, one of them preferred: read, checked, and turned into rows of ids.

A row is {"prompt": ..., "chosen": ..., "rejected": ...}, in the schema of HuggingFaceH4/ultrafeedback_binarized: the
prompt is text or messages; an answer is text, one message, or the complete conversation that ends with it. Other
schemas are those of docs/data.md. The fields `style_chosen` and `style_rejected` are optional words (without them, an
answer with a thought is one style, and an answer without is another); `score_chosen` and `score_rejected` are optional
numbers, and equal ones are a tie.
"""

from collections import Counter
from typing import NamedTuple

from common.chat import encode_chat, with_remedy
from common.errors import UserError
from common.experience import collate
from common.logprobs import token_log_probs
from common.messages import THOUGHTS
from common.parallel import gather_rows, own_part
from common.policy import Policy
from common.reward_model import RewardModel
from common.trajectory import Trajectory

from harness.base.config import ROOT, PolicyConfig, shown
from harness.base.terminal import say
from harness.data.data import find_test_data, read_rows
from harness.data.order import hold_out
from harness.data.rows import Row
from harness.data.thoughts import answer_of, read_format, tell_of_openings
from harness.data.turns import as_turns
from harness.models.context import context_length
from harness.processes.processes import agreed

PAIRS = ROOT / "data" / "preference_pairs.jsonl"
HELD_OUT = ROOT / "data" / "preference_pairs_heldout.jsonl"
NAMES = ("chosen", "rejected")
FIELDS = {"prompt": (str, list), "chosen": (str, list), "rejected": (str, list)}
THOUGHT = "</think>"  # in an answer that was reasoned
PAIRS_AT_ONCE = 512  # as tensors, when log-probs are computed before training


class Pair(NamedTuple):
    chosen: Trajectory
    rejected: Trajectory
    same_style: bool

    @property
    def rows(self) -> tuple[Trajectory, Trajectory]:
        return self.chosen, self.rejected


class PairRows(NamedTuple):
    rows: list[Row]
    eval_rows: list[Row]
    eval_source: str


@agreed
def read_pairs(config: PolicyConfig) -> PairRows:
    """The rows to train on, and held-out rows: of `--eval-data`, else rows of `--data` chosen by `--seed`."""
    rows = read_rows(config.data, FIELDS)
    own = str(HELD_OUT) if config.data == str(PAIRS) else None
    source = config.eval_data or own or find_test_data(config.data)
    if source is not None:
        eval_rows = read_rows(source, FIELDS)[: config.eval_prompts]
    elif len(rows) <= config.eval_prompts:
        raise UserError(
            f"{shown(config.data)} has {len(rows)} pairs, and --eval-prompts takes {config.eval_prompts} of them: "
            "lower it, or give --eval-data"
        )
    else:
        rows, eval_rows = hold_out(rows, config.eval_prompts, config.seed)
    rows = rows[: config.max_pairs]
    for row in (*rows, *eval_rows):
        _read_pair(row)  # to refuse it before a model is loaded
    return PairRows(rows, eval_rows, source or config.data)


@agreed
def load_pairs(config: PolicyConfig, policy: Policy | RewardModel, found: PairRows) -> tuple[list[Pair], list[Pair]]:
    """The pairs to train on, and held-out pairs."""
    options = (policy, config.max_length, getattr(config, "answer_begins", None))
    pairs = encode_pairs(found.rows, config.data, *options)
    if len(pairs) < config.pairs_per_step:
        raise UserError(f"--pairs-per-step {config.pairs_per_step} exceeds the {len(pairs)} pairs")
    return pairs, encode_pairs(found.eval_rows, found.eval_source, *options)


def encode_pairs(
    rows: list[Row], source: str, policy: Policy | RewardModel, max_length: int, answer_begins: str | None
) -> list[Pair]:
    """Pairs as rows of ids; pairs that can teach nothing are left out, and counted."""
    tags = None if answer_begins is None else read_format(answer_begins)
    pairs, left_out, first, context = [], Counter(), {}, context_length(policy)
    for index, row in enumerate(rows):
        prompt, turns, problem = _read_pair(row)
        reasoned = [THOUGHT in turn["content"] or any(map(turn.get, THOUGHTS)) for turn in turns]
        styles = [row.get(f"style_{name}", default) for name, default in zip(NAMES, reasoned, strict=True)]
        if tags is not None:
            shown_turns = [{key: turn[key] for key in turn if key not in THOUGHTS} for turn in turns]
            turns = [turn | {"content": answer_of(turn["content"], tags) or ""} for turn in shown_turns]
        encoded = []
        if problem is not None:
            pass
        elif not all(turn["content"].strip() or turn.get("tool_calls") for turn in turns):
            problem = "an empty answer"
        elif turns[0] == turns[1]:
            problem = "two equal answers"
        elif row.get("score_chosen") is not None and row.get("score_chosen") == row.get("score_rejected"):
            problem = "a tie"
        else:
            encoded = [_encode(row, [*prompt, turn], index, policy) for turn in turns]
            longest = max(len(trajectory.ids) for trajectory in encoded)
            if longest > max_length:
                problem = f"more than --max-length {max_length} tokens"
            elif longest > context:
                problem = f"more than the model's context of {int(context)} tokens"
        if problem is not None:
            left_out[problem] += 1
            first.setdefault(problem, row.place)
            continue
        for position, trajectory in enumerate(encoded):
            trajectory.completion_index, trajectory.text = position, turns[position]["content"]
            trajectory.question, trajectory.rewards = prompt[-1]["content"], {"chosen": 1.0 - position}
        pairs.append(Pair(*encoded, styles[0] == styles[1]))
    for problem, count in left_out.items():
        say(f"{count} of {len(rows)} pairs left out: {problem} (the first: {first[problem]})")
    if not pairs:
        raise UserError(f"{shown(source)}: no pair is left")
    if isinstance(policy, Policy):  # a reward model samples nothing
        tell_of_openings(policy.tokenizer, [row for pair in pairs for row in pair.rows])
    return pairs


def _read_pair(row: Row) -> tuple[list[dict], list[dict], str | None]:
    """The messages of the prompt, those of the two answers, and why the pair is left out, if it is."""
    prompt, answers, histories = as_turns(row["prompt"], "user"), [], []
    for name in NAMES:
        *before, last = as_turns(row[name], "assistant") or [{}]
        beside = {key: last[key] for key in (*THOUGHTS, "tool_calls") if last.get(key)}
        content = last.get("content") or ("" if "tool_calls" in beside else last.get("content"))
        if last.get("role") != "assistant" or not isinstance(content, str):
            raise UserError(f"{row.place}: {name!r} does not end with a message of the assistant")
        if before:  # a complete conversation, or one that goes on from the prompt
            histories.append([*prompt, *before] if before[0]["role"] == "assistant" else before)
        answers.append({"role": "assistant", "content": content} | beside)
    history = max([prompt, *histories], key=len)  # the prompt may be its first question, or lack its system turn
    said, asked, *others = [list(map(_said, turns)) for turns in (history, prompt, *histories)]
    is_one = all(other == said for other in others) and asked in (said[: len(asked)], said[len(said) - len(asked) :])
    # only the last turn is judged, and learned
    history = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in history]
    return history, answers, None if is_one else "the answers have different histories"


def _said(turn: dict) -> dict:
    """What two equal turns have in common."""
    return {key: str(value).strip() for key, value in turn.items() if value is not None and key != "weight"}


def _encode(row: Row, messages: list[dict], index: int, policy: Policy | RewardModel) -> Trajectory:
    try:
        ids, mask = encode_chat(policy.tokenizer, messages, policy.end_of_turn_ids, row.get("tools"))
    except ValueError as error:
        raise UserError(f"{row.place}: {with_remedy(error)}") from error
    return Trajectory(ids, mask.index(1), mask, [0.0] * len(ids), prompt_index=index, finish_reason="given")


def add_reference(policy: Policy, pairs: list[Pair], micro_batch_size: int) -> None:
    """Let every answer keep its log-probs under `policy` as it is now, in the place of a sampler's.

    Each rank computes its part; all ranks get all of them.
    """
    own, found = own_part(pairs), []
    for start in range(0, len(own), PAIRS_AT_ONCE):
        rows = [row for pair in own[start : start + PAIRS_AT_ONCE] for row in pair.rows]
        found += token_log_probs(policy, collate(rows, policy.pad_id, policy.device), micro_batch_size).tolist()
    for row, log_probs in zip((row for pair in pairs for row in pair.rows), gather_rows(found), strict=True):
        row.sampler_log_probs = [0.0, *log_probs][: len(row.ids)]
