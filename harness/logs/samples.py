"""samples.jsonl, the sampled rows as the loss sees them, and tokens.jsonl; docs/metrics.md lists the fields."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from common.experience import Experience
from common.loss import masked_mean
from common.parallel import data_size, gather_rows, part_of
from common.trajectory import Trajectory

from harness.base.files import finite, read_lines
from harness.base.ranks import on_main
from harness.base.terminal import POLICY, REWARD, TOOL, WORLD, printable
from harness.logs.statistics import RowUpdate, UpdateStatistics
from harness.task.task import Task

MOST_TURNS = 12  # of a printed conversation
END = 100  # characters at the end of a long text that are printed, because the answer is there


def write_samples(
    path: Path,
    token_texts: "TokenTexts",
    step: int,
    task: Task,
    group_size: int,
    trajectories: list[Trajectory],
    experience: Experience,
    statistics: UpdateStatistics,
) -> list[str]:
    """Append two groups of most steps and all of every tenth step, from all ranks; values are 0 off the sampled tokens.

    Returns the lines.
    """
    num_rows = data_size() * len(trajectories)
    kept = num_rows if step % 10 == 0 else 2 * group_size
    entries = []
    for index, (number, trajectory) in enumerate(zip(part_of(num_rows), trajectories, strict=True)):
        if number >= kept:
            break
        if trajectory.question is None:
            row = task.train_rows[trajectory.prompt_index]
            asked, total = (task.file.question(row), task.file.right_answer(row)), task.total_reward(trajectory.rewards)
        else:  # given, with its own question
            asked, total = (trajectory.question, None), sum(trajectory.rewards.values())
        entry = {"step": step} | dict(zip(("question", "answer"), asked, strict=True))
        entry |= {"text": trajectory.text} | ({"turns": trajectory.turns} if trajectory.turns else {})
        entry |= {"return": total}
        entry |= _describe_row(trajectory, index, experience, statistics)
        entries.append((trajectory.ids, json.dumps(finite(entry), default=str) + "\n"))
    entries = gather_rows(entries)

    def write() -> None:
        token_texts.add(step, (i for ids, _ in entries for i in ids))  # first: every id in samples.jsonl has a text
        with path.open("a", encoding="utf-8") as samples:
            samples.writelines(line for _, line in entries)

    on_main(write)
    return [line for _, line in entries]


def _describe_row(row: Trajectory, index: int, experience: Experience, statistics: UpdateStatistics) -> dict:
    """The entry in samples.jsonl for row `index` of a rollout."""

    def per_token(values: torch.Tensor, compact: Callable[[float], float] = in_millionths) -> list[float]:
        return [0.0] + [compact(value) for value in values[: len(row.ids) - 1].tolist()]

    def of_update(update: RowUpdate) -> dict:
        """Round log-probs as everywhere else; six significant digits for values of any size."""
        others = {name: x for name, x in update.measurements.items() if name not in ("log_probs", "entropy")}
        lists = {name: per_token(x, in_six_digits) for name, x in others.items()}
        place = {"epoch": update.epoch, "minibatch": update.minibatch}
        return place | {"log_probs": per_token(update.measurements["log_probs"])} | lists

    updates = statistics.rows.get((row.prompt_index, row.completion_index), [])  # none if it had no gradient
    if experience.old_log_probs is not None:
        old = experience.old_log_probs[index]
    else:
        old = updates[0].measurements["log_probs"] if updates else experience.sampler_log_probs[index]
    reference = experience.log_probs_ref
    return {
        "prompt_index": row.prompt_index,
        "completion_index": row.completion_index,
        "prompt_length": row.prompt_length,
        "ids": row.ids,
        "action_mask": row.action_mask,
        "sampler_log_probs": [round(value, 6) for value in row.sampler_log_probs],
        "old_log_probs": per_token(old),
        "log_probs_ref": None if reference is None else per_token(reference[index]),
        "entropy": per_token(updates[0].measurements["entropy"]) if updates else None,
        "rewards": row.rewards,
        **({"logged": row.logged} if row.logged else {}),
        **({"episode": row.episode.by_turn()} if row.episode else {}),
        "advantage": _advantage(experience, index),
        "finish_reason": row.finish_reason,
        "updates": [of_update(update) for update in updates],
    }


def _advantage(experience: Experience, index: int) -> float | None:
    """The advantage of a row; with one for each token, their mean; None in pairs."""
    if experience.advantages is None:
        return None
    advantages = experience.advantages[index]
    return advantages.item() if len(advantages) == 1 else masked_mean(advantages, experience.action_mask[index]).item()


def in_millionths(value: float) -> float:
    return round(value, 6)


def in_six_digits(value: float) -> float:
    """
    >>> in_six_digits(0.000123456789), in_six_digits(1.0)
    (0.000123457, 1)
    """
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() else rounded  # saves two characters for each of many 0s and 1s


def describe_best(task: Task, group: list[Trajectory]) -> str:
    """The best and the worst completion of a group; with several turns only the best one, with a line for each turn."""
    ordered = sorted(group, key=lambda trajectory: -task.total_reward(trajectory.rewards))
    best, worst = ordered[0], ordered[-1]
    reward, lowest = (task.total_reward(trajectory.rewards) for trajectory in (best, worst))
    question, number = printable(task.file.question(task.train_rows[best.prompt_index]), 120), len(group)
    place = f", best of {number}" if number > 1 else ""
    if best.turns:
        return "\n".join([question, *turn_lines(best.turns), f"{REWARD} {reward:g}{place}"])
    lines = [question, f"  -> {printable(best.text, 240, END)} (reward {reward:g}{place})"]
    if lowest < reward:
        lines.append(f"  -> {printable(worst.text, 240, END)} (reward {lowest:g}, the worst)")
    return "\n".join(lines)


def turn_lines(turns: list[tuple[str, str]]) -> list[str]:
    """One line per turn of a conversation, for the policy, and the tools or the world."""
    names = {"assistant": POLICY, "tool": TOOL, "user": WORLD}
    lines = [f"{names[role]} {printable(text, 240, END)}" for role, text in turns]
    if len(lines) > MOST_TURNS:  # how it began, and how it ended
        lines[MOST_TURNS // 2 : 1 - MOST_TURNS // 2] = ["  ..."]
    return lines


class TokenTexts:
    """tokens.jsonl: one line per token id, written when the id first occurs; `path` can already hold some."""

    def __init__(self, path: Path, tokenizer, end_of_turn_ids: list[int]):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._path, self._tokenizer = path, tokenizer
        self._bytes = {character: byte for byte, character in bytes_to_unicode().items()}
        self._added = tokenizer.added_tokens_decoder
        self._ends = set(end_of_turn_ids)
        self._special = {i for i, token in self._added.items() if token.special} | {*tokenizer.all_special_ids}
        self._known = {line.get("id") for line in read_lines(path)}

    def add(self, step: int, ids: Iterable[int]) -> None:
        new = sorted(set(ids) - self._known)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step} | self._describe(i)) + "\n" for i in new)
        self._known.update(new)

    def _describe(self, i: int) -> dict:
        marks = {"special": i in self._special or i in self._ends, "end_of_turn": i in self._ends}
        return {"id": i, "text": self.text(i)} | {name: True for name, is_so in marks.items() if is_so}

    def text(self, i: int) -> str:
        """The text of one token; incomplete bytes look like `<0xE2><0x82>`, and an id without a token has no text."""
        if i in self._added:
            return self._added[i].content
        piece = self._tokenizer.convert_ids_to_tokens(i)
        if not isinstance(piece, str):
            return ""
        if "\u2581" in piece:  # SentencePiece's space, which `decode` drops at the start
            return piece.replace("\u2581", " ")
        text = self._tokenizer.decode([i], clean_up_tokenization_spaces=False)
        if "\ufffd" not in text:
            return text
        # byte-level tokenizers write every byte as a character; SentencePiece writes <0xE2>
        if not set(piece) <= self._bytes.keys() or re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return piece
        raw = bytes(self._bytes[character] for character in piece)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in raw)
