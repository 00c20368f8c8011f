"""Make preference pairs from scored responses, for rewards/reward_model/train.py.

    python rewards/reward_model/make_pairs.py --eval-output runs/pairs_heldout.jsonl
    python rewards/reward_model/make_pairs.py --responses part1.jsonl part2.jsonl --choose random --min-responses 4
    python rewards/reward_model/train.py --data runs/pairs.jsonl --eval-data runs/pairs_heldout.jsonl

A row is {"prompt": ..., "chosen": ..., "rejected": ...}, one per prompt, with `style_chosen` and `style_rejected` if
the task names one style of each response, and `score_chosen` and `score_rejected` unless all scores are 0 or 1.
Responses that were cut off or are longer than --max-length are skipped, and prompts whose responses score the same.

The held-out pairs (--eval-output) are about other prompts, and about other conversations if rows have the field
`conversation`. The same responses and flags give the same bytes. The bundled pairs, on one CPU core:

    python rewards/reward_model/sample_responses.py --num-samples 16 --generation-batch-size 512
    python rewards/reward_model/score_responses.py --by correct
    python rewards/reward_model/make_pairs.py --no-styles --eval-share 0.12 --max-pairs 3000 --max-eval-pairs 400 \\
        --output data/preference_pairs.jsonl --eval-output data/preference_pairs_heldout.jsonl
"""

import harness.base.interrupt  # Ctrl-C during the imports: no traceback
import json
import zlib
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Interval

from common.errors import UserError
from common.keyed import keyed_generator

from harness.base.checks import local_path
from harness.base.config import Count, LocalPath, Seed, shown
from harness.base.files import replace_file
from harness.base.terminal import say
from harness.cli.parse import parse_plain
from harness.data.rows import Row
from harness.run.start import run_main
from harness.task.responses import as_messages, conversation_of, place_of, read_responses

SIDES = ("chosen", "rejected")


@dataclass(frozen=True, kw_only=True)
class Config:
    FIRST_GROUP: ClassVar[str] = "pairs"

    responses: tuple[str, ...] = ("runs/scored.jsonl",)  # files of score_responses.py, in order
    output: LocalPath = "runs/pairs.jsonl"  # the pairs to train on
    eval_output: LocalPath | None = None  # held-out pairs; None: none are held out
    eval_share: Annotated[float, Interval(gt=0, lt=1)] = 0.1  # with --eval-output: share of held-out prompts
    # the best and the worst response, or any two with different scores, the better one chosen
    choose: Literal["best-worst", "random"] = "best-worst"
    min_responses: Annotated[int, Ge(2)] = 2  # prompts with fewer usable responses are left out
    max_length: Count | None = None  # characters of a response; None: any
    max_pairs: Count | None = None  # the first pairs only; None: all
    max_eval_pairs: Count | None = None  # the first held-out pairs only; None: all
    # write the answers as conversations that begin with the prompt, as HuggingFaceH4/ultrafeedback_binarized does
    conversations: bool = False
    styles: bool = True  # write `style_chosen` and `style_rejected`
    seed: Seed = 0  # which prompts are held out, and which of several equal responses is taken


def main(argv: list[str] | None = None) -> None:
    config = parse_plain(Config(), argv, __doc__)
    rows = [row for source in config.responses for row in read_responses(source)]
    pairs, eval_pairs, left_out = [], [], Counter()
    for row in rows:
        pair = make_pair(config, row)
        if isinstance(pair, str):
            left_out[pair] += 1
            continue
        place = place_of(conversation_of(row, row["prompt"]), "held-out pairs", config.seed)
        (eval_pairs if config.eval_output and place < config.eval_share else pairs).append(pair)
    reasons = ", ".join(f"{reason} {count}" for reason, count in left_out.items()) or "none"
    say(f"{len(rows)} prompts, {len(pairs) + len(eval_pairs)} pairs; left out: {reasons}")
    write(config, config.output, pairs[: config.max_pairs])
    if config.eval_output:
        write(config, config.eval_output, eval_pairs[: config.max_eval_pairs])


def make_pair(config: Config, row: Row) -> dict | str:
    """The pair of a prompt, its responses as they were scored; or the reason why there is none."""
    usable = [response for response in row["responses"] if response["finish_reason"] == "stop"]
    usable = [response for response in usable if response.get("score") is not None]
    if config.max_length is not None:
        usable = [response for response in usable if len(response["text"]) <= config.max_length]
    if len(usable) < config.min_responses:
        return "too few responses"
    scores = [response["score"] for response in usable]
    generator = keyed_generator("pairs", config.seed, zlib.crc32(json.dumps(row["prompt"]).encode()))
    numbers = range(len(usable))
    couples = [(a, b) for a in numbers for b in numbers if scores[a] > scores[b]]
    if config.choose == "best-worst":
        couples = [(a, b) for a, b in couples if scores[a] == max(scores) and scores[b] == min(scores)]
    couples = [(a, b) for a, b in couples if usable[a]["text"] != usable[b]["text"]]
    if not couples:
        return "a tie"
    chosen, rejected = (usable[index] for index in couples[generator.integers(len(couples))])
    return {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}


def write(config: Config, output: str, pairs: list[dict]) -> None:
    """Write pairs, completely or not at all, and report what else than quality a reward model could learn from them."""
    path = local_path(output, "--output")
    if not pairs:
        raise UserError(f"no pair is left for {shown(path)}")
    is_binary = {pair[side]["score"] for pair in pairs for side in SIDES} <= {0, 1}
    lines = [json.dumps(line_of(config, pair, is_binary), ensure_ascii=False, separators=(",", ":")) for pair in pairs]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(line + "\n" for line in lines).encode())
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be written ({error.strerror})") from error
    styles = [{style_of(pair[side]) for side in SIDES} for pair in pairs]
    equal = "" if {None} in styles else f", {fmean(len(both) == 1 for both in styles):.0%} of equal style"
    lengths = [[len(pair[side]["text"]) for pair in pairs] for side in SIDES]
    longer = fmean(chosen > rejected for chosen, rejected in zip(*lengths, strict=True))
    means = "{:.0f} chosen, {:.0f} rejected".format(*map(fmean, lengths))
    say(f"{shown(path)}: {len(pairs)} pairs{equal}; characters: {means}, the chosen response longer in {longer:.0%}")


def line_of(config: Config, pair: dict, is_binary: bool) -> dict:
    line = {"prompt": pair["prompt"]}
    for side in SIDES:
        answer = {"role": "assistant", "content": pair[side]["text"]}
        line[side] = [*as_messages(pair["prompt"]), answer] if config.conversations else answer["content"]
    line |= {} if is_binary else {f"score_{side}": pair[side]["score"] for side in SIDES}
    styles = {f"style_{side}": style_of(pair[side]) for side in SIDES} if config.styles else {}
    return line | {name: style for name, style in styles.items() if style}


def style_of(response: dict) -> str | None:
    """The one style that the task's `describe` names with 1 among zeros, in one word."""
    style = response.get("style") or {}
    names = [name for name, value in style.items() if value == 1]
    return names[0] if len(names) == 1 and all(value in (0, 1) for value in style.values()) else None


if __name__ == "__main__":
    run_main(main)
