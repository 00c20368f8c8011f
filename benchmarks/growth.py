"""How time and memory of a step grow with group size, prompt, completion, vocabulary and model size.

    python benchmarks/growth.py                   # about 20 minutes, one thread, 8 GB of memory
    python benchmarks/growth.py --draw-only       # draws the figure again, from the committed data

One quantity varies at a time, around 4 prompts of 64 tokens, groups of 8, 64 new tokens (none ends earlier) and the
shape of the bundled policy, freshly initialised. It measures sampling and the update (forward and backward, without the
optimizer) in CPU seconds, and the memory that the step adds to the process, with prompts encoded once per group and
with prompts encoded in every row. Dotted lines: the floating-point operations of the step's matrix products, at the
rate of the curve's middle point; a curve along its dotted line grows as predicted. Every point is measured in a process
of its own, as the median of three steps. Writes the entry growth of benchmarks/results/measurements.json and
growth.png.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import tyro

from viewer.results import read_json, write_json

from common.plumbing.machine import describe_machine, peak_memory_bytes

RESULTS = Path(__file__).resolve().parent / "results" / "measurements.json"
SHAPES = {  # parameters: the shape
    1_800_000: {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
                "num_key_value_heads": 2},
    25_000_000: {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
                 "num_key_value_heads": 4, "vocab_size": 4096},
    135_000_000: {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                  "num_key_value_heads": 3, "vocab_size": 49_152},
    494_000_000: {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                  "num_key_value_heads": 2, "vocab_size": 151_936},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Point:
    """One workload."""

    prompts: int = 4
    group_size: int = 8
    prompt: int = 64  # tokens
    completion: int = 64  # tokens
    vocabulary: int = 1024
    parameters: int = 1_800_000
    whole_rows: bool = False  # the update encodes the prompt in every row


AXES: dict[str, tuple[int, ...]] = {
    "group_size": (2, 4, 8, 16, 32),
    "prompt": (16, 64, 256, 896),
    "completion": (16, 64, 256, 896),
    "vocabulary": (1_024, 8_192, 32_768, 131_072),
    "parameters": tuple(SHAPES),
}
SMALL = {"prompts": 2, "group_size": 4, "prompt": 64, "completion": 32}  # the workload for models of all sizes


@dataclass(frozen=True, kw_only=True)
class Config:
    draw_only: bool = False  # draw the figure without measuring
    point: str | None = None  # used by the program itself: measure one point, given as JSON, in this process


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if config.point:
        print(json.dumps(measure(Point(**json.loads(config.point)))))
        return
    if not config.draw_only:
        torch.set_num_threads(1)
        measured = {axis: [measure_apart(point) for point in points_of(axis)] for axis in AXES}
        write_json(RESULTS, {"axes": measured} | describe_machine(), entry="growth")
    draw(read_json(RESULTS, "growth")["axes"])


def points_of(axis: str) -> list[Point]:
    """All workloads of one axis, each with and without shared prompts."""
    start = Point(**SMALL) if axis == "parameters" else Point()
    points = [replace(start, **{axis: value}) for value in AXES[axis]]
    return [replace(point, whole_rows=whole) for point in points for whole in (False, True)]


def measure_apart(point: Point) -> dict:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--point", json.dumps(asdict(point))]
    result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    print(f"{point}: {result}", flush=True)
    return asdict(point) | result


def measure(point: Point) -> dict:
    """CPU seconds of sampling and of the update, and the memory that the step adds to the process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import common.policy
    from common.experience import collate
    from common.sampling import sample

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"vocab_size": point.vocabulary, "tie_word_embeddings": True} | SHAPES[point.parameters]
    model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=2048, **shape))
    policy = common.policy.Policy(model, tokenizer=None, end_of_turn_ids=[], pad_id=0)
    prompts = torch.randint(1, point.vocabulary, (point.prompts, point.prompt)).tolist()
    if point.whole_rows:
        common.policy.hidden_states_of_shared_prompts = lambda *arguments: None
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which loading has raised
    before = peak_memory_bytes("cpu")
    seconds: dict[str, list[float]] = {"sampling": [], "update": []}
    for step in range(4):
        start = time.process_time()
        rows = sample(policy, prompts, point.group_size, max_new_tokens=point.completion, key=(0, step))
        sampled = time.process_time()
        experience = collate(rows, 0, policy.device)
        policy.zero_grad()
        for micro in experience.split(32 if point.whole_rows else len(experience)):
            log_probs, _ = policy(micro.sequences, micro.action_mask)
            (-log_probs.sum() / len(experience)).backward()
        seconds["sampling"].append(sampled - start)
        seconds["update"].append(time.process_time() - sampled)
    added = peak_memory_bytes("cpu") - before
    medians = {part: median(values[1:]) for part, values in seconds.items()}  # the first step warms up
    return medians | {"added_bytes": added, "operations": operations(point, model)}


def operations(point: Point, model) -> dict[str, float]:
    """Floating-point operations of the step's matrix products."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for p in model.parameters() if p.dim() == 2) - head  # the embedding is no product
    rows = point.prompts * point.group_size
    encodings = rows if point.whole_rows else point.prompts  # how often a prompt is encoded in the update
    completion = rows * point.completion
    a_pair = 4 * config.num_hidden_layers * config.hidden_size  # q k and p v, two operations each
    pairs_of_prompt = point.prompt * (point.prompt + 1) / 2
    pairs = rows * (point.completion * point.prompt + point.completion * (point.completion + 1) / 2)

    def forward(encodings: int) -> float:
        tokens = encodings * point.prompt + completion
        return 2 * (tokens * body + completion * head) + a_pair * (encodings * pairs_of_prompt + pairs)

    return {"sampling": forward(point.prompts), "update": 3 * forward(encodings)}


def draw(measured: dict[str, list[dict]]) -> None:
    """Seconds above, memory below; one column per axis."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    headings = {"group_size": "group size", "prompt": "prompt (tokens)", "completion": "completion (tokens)",
                "vocabulary": "vocabulary", "parameters": "parameters"}  # fmt: skip
    figure, places = plt.subplots(2, len(measured), figsize=(15, 6.5), sharex="col")
    for (axis, points), (above, below) in zip(measured.items(), places.T, strict=True):
        shared, whole = ([p for p in points if p["whole_rows"] == wanted] for wanted in (False, True))
        x = [p[axis] for p in shared]
        lines = (
            ("update, complete rows", "update", whole, "C1"),
            ("update, shared prompts", "update", shared, "C0"),
            ("sampling", "sampling", shared, "C2"),
        )
        for label, part, entries, color in lines:
            above.plot(x, [p[part] for p in entries], "o-", color=color, label=label, markersize=4)
            middle = entries[len(entries) // 2]
            rate = middle["operations"][part] / middle[part]
            above.plot(x, [p["operations"][part] / rate for p in entries], ":", color=color)
        for label, entries, color in (("complete rows", whole, "C1"), ("shared prompts", shared, "C0")):
            below.plot(x, [p["added_bytes"] / 1e9 for p in entries], "o-", color=color, label=label, markersize=4)
        below.set_xlabel(headings[axis])
        for axes in (above, below):
            axes.set_xscale("log", base=10 if axis == "parameters" else 2)
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    places[0, 0].set_ylabel("CPU seconds")
    places[1, 0].set_ylabel("GB added by the step")
    places[0, 0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS.with_name("growth.png"), dpi=100)


if __name__ == "__main__":
    main()
