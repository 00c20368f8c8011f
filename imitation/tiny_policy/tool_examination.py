"""Examine how well a policy uses its tools, by itself and when it is forced to begin with a call.

The policy answers held-out questions of the calculator's task, and questions about an invented world with names that
occur in no training data. Metrics are named tools/<subject>/<how>/<what>: the subject is `calculator`, `one_hop` or
`two_hops`; how is `greedy`, `sampled` (8 conversations per question, temperature 1), or either of these with the prefix
`forced_`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tool_lessons import copying_row, search_in
from world_grammar import draw_question, make_world, to_row

from common.chat import decode, encode_prompt
from common.evaluate import EVALUATION, mean
from common.experience import collate
from common.given_answers import encode_chat
from common.observations import encode_observation
from common.policy import Policy
from common.sampling import begin_rows, continue_rows
from common.tools import ToolCall, call_tool, parse_calls, schemas
from common.tools import calculator as calculate
from common.trajectory import Trajectory
from tasks import arithmetic, calculator

from harness.data.data import read_rows

MAX_TURNS, MAX_NEW_TOKENS = 4, 128
NUM_SAMPLES = 8
NUM_ENTITIES = 400  # of the world


@dataclass
class Talk:
    """One conversation: the policy's calls, the tools' answers, and the other text of the policy."""

    row: dict
    calls: list[ToolCall] = field(default_factory=list)
    results: list[tuple[str, bool]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def answers(self, wanted: str) -> bool:
        return arithmetic.reward({"answer": wanted}, "\n".join(self.said))["correct"] == 1

    @property
    def is_right(self) -> bool:
        return self.answers(self.row["answer"])

    @property
    def is_called_for(self) -> bool:
        """Whether the first call is the call that the question needs: its result holds the answer, or the next name."""
        if "path" not in self.row:
            return bool(self.results) and self.results[0] == (self.row["answer"], True)
        return bool(self.calls) and self.calls[0].arguments == {"query": self.row["path"][0]}


def examine_tools(policy: Policy, num_questions: int, seed: int) -> dict[str, float]:
    """All metrics; a share is left out if there is nothing to count."""
    world, rng = make_world(random.Random(seed), NUM_ENTITIES, "heldout"), random.Random(seed + 1)
    sums = read_rows(str(calculator.EVAL_DATA), calculator.FIELDS)[:num_questions]
    subjects: dict[str, tuple[list[dict], dict[str, Callable]]] = {"calculator": (sums, {"calculator": calculate})}
    for num_hops, name in ((1, "one_hop"), (2, "two_hops")):
        rows = [to_row(draw_question(rng, world, num_hops)) for _ in range(max(num_questions // 2, 1))]
        subjects[name] = rows, {"search": search_in(world)}
    metrics = {"tools/loss_of_copied_unseen_names": copying_loss(policy, num_questions, seed)}
    for name, (rows, tools) in subjects.items():
        for way, prefix in (("", ""), ("forced_", "<tool_call>")):
            for how, group_size in (("greedy", 1), ("sampled", NUM_SAMPLES)):
                settings = {"group_size": group_size, "greedy": how == "greedy", "prefix": prefix, "seed": seed}
                found = describe(converse(policy, rows, tools, **settings), group_size)
                metrics |= {f"tools/{name}/{way}{how}/{what}": value for what, value in found.items()}
    return metrics


def describe(talks: list[Talk], group_size: int) -> dict[str, float]:
    """Shares of conversations, calls and groups."""
    groups = [talks[start : start + group_size] for start in range(0, len(talks), group_size)]
    calling = [talk for talk in talks if talk.calls]
    parts = {
        "accuracy": [talk.is_right for talk in talks],
        "called": [bool(talk.calls) for talk in talks],
        "groups_with_a_call": [any(talk.calls for talk in group) for group in groups],
        "groups_with_both": [0 < sum(talk.is_right for talk in group) < group_size for group in groups],
        "malformed": [call.error is not None for talk in talks for call in talk.calls],
        "failed": [not is_executed for talk in talks for _, is_executed in talk.results],
        "first_call_right": [talk.is_called_for for talk in calling],
        "accuracy_called": [talk.is_right for talk in calling],
        "accuracy_unaided": [talk.is_right for talk in talks if not talk.calls],
    }
    for kind in sorted({talk.row["kind"] for talk in talks if "kind" in talk.row}):
        of_kind = [talk for talk in talks if talk.row.get("kind") == kind]
        parts[f"called_{kind}"] = [bool(talk.calls) for talk in of_kind]
        parts[f"accuracy_{kind}"] = [talk.is_right for talk in of_kind]
    if "path" not in talks[0].row:
        parts["result_copied"] = [t.answers(t.results[-1][0]) for t in talks if t.results and t.results[-1][1]]
    return {name: mean(values) for name, values in parts.items() if values}


def converse(
    policy: Policy,
    questions: list[dict],
    tools: dict[str, Callable[..., str]],
    *,
    group_size: int,
    greedy: bool,
    prefix: str,
    seed: int,
) -> list[Talk]:
    """`group_size` conversations about each question; the first turn is forced to begin with `prefix`."""
    tokenizer, offered = policy.tokenizer, schemas(tools)
    forced = tokenizer.encode(prefix, add_special_tokens=False)
    prompts = [encode_prompt(tokenizer, arithmetic.messages(row), offered) + forced for row in questions]
    rows = begin_rows(prompts, group_size)
    talks = [Talk(questions[row.prompt_index]) for row in rows]
    open_ones = list(zip(rows, talks, strict=True))
    for turn in range(MAX_TURNS):
        settings = {"max_new_tokens": MAX_NEW_TOKENS, "generation_batch_size": 256, "greedy": greedy}
        sampled = continue_rows(policy, [row for row, _ in open_ones], key=(seed, EVALUATION), **settings)
        going_on = []
        for (row, talk), ids in zip(open_ones, sampled, strict=True):
            text = (prefix if turn == 0 else "") + decode(tokenizer, ids)
            calls, said = parse_calls(text, "hermes")
            talk.said.append(said)
            talk.calls += calls
            if calls and turn + 1 < MAX_TURNS and row.finish_reason == "stop":
                results = [call_tool(tools, call) for call in calls]
                talk.results += results
                row.observe(encode_observation(tokenizer, [text for text, _ in results], policy.end_of_turn_ids))
                going_on.append((row, talk))
        open_ones = going_on
    return talks


@torch.no_grad()
def copying_loss(policy: Policy, num_rows: int, seed: int) -> float:
    """Nats per token of copied names that occur in no training data."""
    rng, rows = random.Random(seed), []
    for index in range(num_rows):
        messages = copying_row(rng, "heldout", only_names=True)["messages"]
        ids, mask = encode_chat(policy.tokenizer, messages, policy.end_of_turn_ids)
        rows.append(Trajectory(ids, mask.index(1), mask, [0.0] * len(ids), index))
    batch = collate(rows, policy.pad_id, policy.device)
    log_probs = policy(batch.sequences, batch.action_mask).log_probs  # (B, T-1)
    return -(log_probs * batch.action_mask).sum().item() / batch.action_mask.sum().item()
