"""What reinforcement learning does to SmolLM2 beside the reward: keep and measure the runs of docs/smollm2.md.

    for seed in 0 1 2; do bash recipes/instructions_smollm2_135m.sh -- --seed $seed --name seed$seed; done
    python benchmarks/smollm2.py runs/experiment_base/seed{0,1,2}      # 9 minutes on one core

Keeps the runs in benchmarks/results/smollm2/, draws docs/smollm2_unseen.png, and writes the entry `smollm2` of
measurements.json; results of other runs stay there:

- `held_out`: greedy answers to all 256 held-out prompts, before training and after each run: how many are right, by
  kind of prompt (`split`) and of instruction;
- `unseen`: qualities of these answers that the reward does not see: the mean log-probability per token (nats) under
  the model before training, the share that names its topic, the share of different words, and the number of words;
- `base_log_prob`: by run and step, the mean log-probability per token (nats) of the policy's completions under the
  model before training. A run keeps all completions of the first and of each tenth step;
- `rewarded`: by run and step, five of the different prompts whose completions earned the reward, with the completion;
- `answers`: of the model before training and after the first run, to ten held-out prompts, and to OTHER, questions
  that nothing rewards.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import tyro

from common.chat import decode, encode_prompt
from common.experience import collate
from common.logprobs import token_log_probs
from common.loss import masked_mean
from common.policy import Policy
from common.sampling import sample
from common.trajectory import Trajectory
from tasks import instructions
from viewer.groups import read_run
from viewer.results import keep_runs, read_json, write_json
from viewer.save_figure import save_figure

from harness.base.config import ModelConfig
from harness.base.machine import describe_machine
from harness.models.loading import load_policy

HELD_OUT = instructions.EVAL_DATA.with_name("instructions_short_heldout.jsonl")
RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "smollm2_unseen.png"
LABELS = {  # in the figure, by the beginnings of the runs' names
    "before": "untrained", "seed": "no KL penalty", "kl_002": "KL weight 0.02", "kl_01": "KL weight 0.1",
    "on_topic": "a reward for the topic", "one_word": "largest number of words only", "lora": "LoRA of rank 16",
}  # fmt: skip
OTHER = (
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "How many days has a week?",
    "What is 2 + 3?",
    "Name three colors.",
    "Give me a recipe for pancakes.",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Explain what a computer is to a child.",
    "Write a short poem about the sea.",
    "Tell me a joke.",
    "Write an email to my teacher: I am ill today.",
    "What should I do when I cannot sleep?",
    "Translate into French: Good morning.",
    "Give me a synonym of happy.",
    "What is the opposite of hot?",
    "Tell me about the history of Rome.",
    "What is photosynthesis?",
    "Hello! How are you?",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # directories
    max_new_tokens: int = 48  # of an answer to a held-out prompt
    draw_only: bool = False  # draw from the committed data


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    if config.draw_only:
        draw(read_json(RESULTS / "measurements.json", "smollm2"))
        return
    torch.set_num_threads(1)
    runs = [read_run(directory) for directory in config.runs]
    keep_runs(RESULTS / "smollm2", runs)
    result = read_json(RESULTS / "measurements.json", "smollm2") | describe_machine()
    base = load(runs[0].config["model"])
    for run in runs:
        samples, name = read_samples(run.directory / "samples.jsonl"), run.directory.name
        result.setdefault("base_log_prob", {})[name] = {
            step: base_log_prob(base, trajectories_of(entries)) for step, entries in samples.items()
        }
        result.setdefault("rewarded", {})[name] = {
            step: list({entry["question"]: entry["text"] for entry in entries if entry["return"] == 1}.items())[:5]
            for step, entries in samples.items()
        }
    rows = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    prompts = [row["prompt"] for row in rows]
    places = {run.directory.name: str(run.directory / "final") for run in runs}
    if "before" not in result.setdefault("unseen", {}):
        places = {"before": runs[0].config["model"]} | places
    texts = {}
    for name, place in places.items():
        policy = load(place)
        answers = greedy(policy, prompts, config.max_new_tokens)
        given = texts_of(base, answers)
        result.setdefault("held_out", {})[name] = follow(rows, given)
        result["unseen"][name] = unseen(base, rows, answers, given)
        texts[name] = given[:10] + texts_of(base, greedy(policy, OTHER, 64))
    if "before" in texts:
        pair = texts["before"], texts[runs[0].directory.name]
        result["answers"] = list(zip([*prompts[:10], *OTHER], *pair, strict=True))
    write_json(RESULTS / "measurements.json", result, entry="smollm2")
    draw(result)
    for name in ("base_log_prob", "held_out", "unseen"):
        print(name, json.dumps(result[name], indent=1))
    for row in result["answers"]:
        print("\n   ".join(row))


def load(model: str) -> Policy:
    return load_policy(ModelConfig(model=model, device="cpu", dtype="float32"))


def follow(rows: list[dict], texts: list[str]) -> dict[str, list[int]]:
    """By kind of prompt, how many there are, and how many of the texts follow all instructions."""
    asked, right = Counter(), Counter()
    for row, text in zip(rows, texts, strict=True):
        for name in (row["split"], f"{row['split']}/{row['kind']}"):
            asked[name] += 1
            right[name] += int(instructions.reward(row, text)["correct"])
    return {name: [asked[name], right[name]] for name in sorted(asked)}


def read_samples(path: Path) -> dict[int, list[dict]]:
    """The completions of the steps that a run keeps completely, by step."""
    samples = defaultdict(list)
    for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if entry["step"] == 1 or entry["step"] % 10 == 0:
            samples[entry["step"]].append(entry)
    return samples


def trajectories_of(samples: list[dict]) -> list[Trajectory]:
    fields = ("ids", "prompt_length", "action_mask", "sampler_log_probs", "prompt_index", "completion_index")
    return [Trajectory(*(entry[field] for field in fields)) for entry in samples]


def base_log_prob(base: Policy, completions: list[Trajectory]) -> float:
    """The mean over all sampled tokens of log p under `base`."""
    experience = collate(completions, base.pad_id)
    return masked_mean(token_log_probs(base, experience, 8), experience.action_mask).item()


def unseen(base: Policy, rows: list[dict], answers: list[Trajectory], texts: list[str]) -> dict[str, float]:
    """Means over answers, or over their tokens, of values outside the reward; `texts` are the answers'."""
    found = [instructions.describe(row, text) for row, text in zip(rows, texts, strict=True)]
    on_topic = [instructions.reward(row, text)["on_topic"] for row, text in zip(rows, texts, strict=True)]
    means = {name: fmean(values[name] for values in found) for name in ("words", "distinct")}
    return {"base_log_prob": base_log_prob(base, answers), "on_topic": fmean(on_topic)} | means


def greedy(policy: Policy, questions: Sequence[str], max_new_tokens: int) -> list[Trajectory]:
    prompts = [encode_prompt(policy.tokenizer, [{"role": "user", "content": question}]) for question in questions]
    return sample(policy, prompts, 1, max_new_tokens=max_new_tokens, key=(0,), greedy=True, generation_batch_size=64)


def texts_of(policy: Policy, answers: list[Trajectory]) -> list[str]:
    return [decode(policy.tokenizer, answer.completion_ids) for answer in answers]


def draw(result: dict) -> None:
    """Followed prompts of the trained kinds, against two values that the reward does not see."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    titles = {
        "base_log_prob": "log-prob per token under the untrained model (nats)",
        "on_topic": "share of answers that name their topic",
    }
    colors: dict[str, str] = {}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        shown: set[str] = set()
        for name, values in result["unseen"].items():
            label = next((label for begin, label in LABELS.items() if name.startswith(begin)), name)
            asked, right = result["held_out"][name]["topics"]
            color = colors.setdefault(label, f"C{len(colors)}")
            axes.scatter(values[key], right / asked, s=60, color=color, label=None if label in shown else label)
            shown.add(label)
        axes.set_xlabel(title)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out prompts that are followed")
    panels[0].set_ylim(0, 1)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="upper center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.88))
    save_figure(figure, PICTURE, dpi=100)


if __name__ == "__main__":
    main()
