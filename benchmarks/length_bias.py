"""What GRPO's length bias does to a policy that can ramble, against Dr. GRPO: five seeds each.

    python benchmarks/length_bias.py              # about 50 minutes

All completions of the bundled policy are short, so it cannot ramble. Therefore experiment_sft first teaches it to check
its answers a random number of times, after reasoning and after a guess alike:

    <think>47+29=76 76-18=58 check 58+18=76</think><answer>58</answer>                   reasoned
    <think>58 check 58+18=76 check 58+18=76</think><answer>58</answer>                   guessed

It mostly guesses, and the number of checks does not depend on whether the answer is right. Reinforcement learning then
continues from this policy on the bundled questions, with a completion budget that leaves room for checks. Keeps the
runs (rambling_...) and rambling.csv (checks and lengths by step, style and correctness) in experiment_drgrpo/results/,
and draws experiment_drgrpo/rambling.png.
"""

import csv
import json
import random
import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from seeds import Config as SeedsConfig
from seeds import make_runs

from tasks.arithmetic import messages
from tasks.grammars.arithmetic_grammar import KINDS, draw_question, render
from viewer.bands import draw_comparison
from viewer.results import read_runs

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = "experiment_drgrpo"
step_by_step = runpy.run_path(str(ROOT / "experiment_sft" / "warm_start.py"))["step_by_step"]
CONVERSATIONS = 10_000
GUESSED_SHARE = 0.75
CHECK_AGAIN = 0.6  # probability of one more check: 1.5 on average
BINS = 10  # steps per row of rambling.csv
PANELS = ("completion/length_wrong", "completion/length_right", "reward/correct")


@dataclass(frozen=True, kw_only=True)
class Config:
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of the runs
    critic_types: tuple[str, ...] = ("grpo", "drgrpo")  # algorithms to compare
    runs_dir: str = "runs"  # where the runs are written
    flags: str = "--max-new-tokens 256 --kl-weight 0 --steps 60"  # of train.py, for all runs


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    policy = make_policy(Path(config.runs_dir))
    for critic_type in config.critic_types:
        prefix, flags = f"rambling_{critic_type}_seed", f"{config.flags} --critic-type {critic_type}"
        make_runs(
            SeedsConfig(
                experiment=EXPERIMENT,
                seeds=config.seeds,
                model=str(policy),
                prefix=prefix,
                runs_dir=config.runs_dir,
                flags=flags,
            )
        )
    results = ROOT / EXPERIMENT / "results"
    write_checks(sorted((Path(config.runs_dir) / EXPERIMENT).glob("rambling_*")), results / "rambling.csv")
    runs = read_runs(results)
    labels = {"GRPO": "rambling_grpo_seed", "Dr. GRPO": "rambling_drgrpo_seed"}
    groups = {label: [runs[name] for name in runs if name.startswith(prefix)] for label, prefix in labels.items()}
    draw_comparison(groups, ROOT / EXPERIMENT / "rambling.png", PANELS)


def make_policy(runs_dir: Path) -> Path:
    """Teach the bundled policy to ramble, and return the directory of the result."""
    directory = runs_dir / "experiment_sft" / "rambling" / "final"
    if not directory.exists():
        data = runs_dir / "rambling.jsonl"
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text("".join(json.dumps(row) + "\n" for row in conversations()), encoding="utf-8")
        train = [sys.executable, str(ROOT / "experiment_sft" / "train.py"), "--model", "tiny", "--data", str(data)]
        subprocess.run([*train, "--runs-dir", str(runs_dir), "--name", "rambling"], check=True)
    return directory


def conversations() -> Iterator[dict]:
    """Rows `{"messages": [user, assistant]}`: guessed or reasoned, then checked zero or more times."""
    rng = random.Random(0)
    for _ in range(CONVERSATIONS):
        question = draw_question(rng, rng.choices(list(KINDS), list(KINDS.values()))[0], "warm_start")
        answer, last = question.answer, question.terms[-1]
        parts = [str(answer) if rng.random() < GUESSED_SHARE else step_by_step(question)]
        while rng.random() < CHECK_AGAIN:
            parts.append(f"check {answer}{'-+'[last.sign < 0]}{last.value}={answer - last.sign * last.value}")
        text = f"<think>{' '.join(parts)}</think><answer>{answer}</answer>"
        yield {"messages": [*messages({"question": render(question)}), {"role": "assistant", "content": text}]}


def write_checks(runs: list[Path], path: Path) -> None:
    """Write how often completions check, from the rows of samples.jsonl."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("run", "first_step", "last_step", "style", "correct", "completions", "checks", "length"))
        for run in runs:
            counts = defaultdict(list)
            for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                start = row["text"].removeprefix("<think>").split("check")[0].split("</think>")[0]
                key = (
                    (row["step"] - 1) // BINS,
                    "reasoned" if "=" in start else "guessed",
                    int(row["rewards"]["correct"]),
                )
                counts[key].append((row["text"].count("check"), sum(row["action_mask"])))
            for (number, style, correct), rows in sorted(counts.items()):
                checks, length = (sum(values) / len(rows) for values in zip(*rows, strict=True))
                steps = number * BINS + 1, (number + 1) * BINS
                writer.writerow((run.name, *steps, style, correct, len(rows), round(checks, 4), round(length, 4)))


if __name__ == "__main__":
    main()
