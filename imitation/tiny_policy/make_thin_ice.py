"""Write the maps of tasks/thin_ice.py, and the lessons from which the policy tiny_world has learned it.

    python imitation/tiny_policy/make_thin_ice.py               # seconds; the same bytes every time
    python imitation/tiny_policy/make_thin_ice.py --lessons     # runs/thin_ice/: demonstrations, and a policy to teach
    python imitation/sft/train.py --model runs/thin_ice/student --data runs/thin_ice/lessons.jsonl --lr 1e-3 \\
        --name tiny_world                                      # two to three minutes of one core
    python imitation/tiny_policy/make_thin_ice.py --policy runs/sft/tiny_world/final    # data/policies/tiny_world

thin_ice.jsonl (training) and thin_ice_heldout.jsonl (evaluation) have maps of 4 x 4 cells whose shortest way takes 2
to 9 turns, equally many of each; no map is in both. thin_ice_large.jsonl has maps of 6 x 6 cells, 6 to 13 turns long.
thin_ice_patient.jsonl has short ways and a budget of 20 turns: room for a farm.

A demonstration is the way of a walker in a hurry: with probability 1 - NOISE it goes straight towards the coin or the
bridge, and else does anything. In a share --care of its turns it looks for ice before it goes. All of its ways
are kept, also those that end in the water or nowhere. So the lessons teach what the words mean and where to go; that
ice is dangerous can be seen in them, but most ways ignore it: that is left to reinforcement learning.

The words of this world are new to the policy `tiny`: its embeddings of tokens that it has never seen are nearly equal
(cosine 0.99), so it could not tell N from S. Each of them gets a new random embedding, as long as those of the digits,
before any lesson.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from data_files import DATA, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.thin_ice import ACTIONS, MOVES, Environment, distances, start_of, view

from harness.base.config import TINY_POLICY

SEED = 20261128
PATIENCE = 20  # turns of the budget where it does not depend on the shortest way
SLACK = 3  # turns of the budget beyond the shortest way
NOISE = 0.5
NUM_LESSONS = 8_000
LESSONS = Path("runs") / "thin_ice"
SEEN = "0123456789 "  # text whose tokens keep their embeddings


@dataclass(frozen=True, kw_only=True)
class Config:
    lessons: bool = False  # write the lessons, and no maps
    care: float = 0.5  # of the walker: the share of its turns in which it looks for ice before it goes
    policy: Path | None = None  # publish this trained policy, and write no maps


def draw_map(rng: random.Random, size: int = 4) -> dict:
    """A map with a way to the reward; the budget is set by its shortest way."""
    cells = [[x, y] for x in range(1, size + 1) for y in range(1, size + 1)]
    while True:
        rng.shuffle(cells)
        coin, bridge, *others = cells
        num_ice = rng.choice((1, 2, 3)) * size // 4
        row = {"size": size, "at": rng.choice([coin, *others[num_ice:]]), "has": rng.random() < 0.25}
        row |= {"coin": coin, "bridge": bridge, "ice": sorted(others[:num_ice])}
        shortest = distances(row).get(start_of(row))
        if shortest is not None:
            return row | {"optimal": shortest, "max_turns": shortest + SLACK}


def make_rows(name: str, per_length: int, lengths: range, size: int = 4, without: list[dict] = ()) -> list[dict]:
    """Different maps, `per_length` for each length of the shortest way; the lengths take turns."""
    rng, known = random.Random(f"{SEED} {name}"), set(map(json.dumps, without))
    found: dict[int, list[dict]] = {length: [] for length in lengths}
    while any(len(rows) < per_length for rows in found.values()):
        row = draw_map(rng, size)
        rows = found.get(row["optimal"], [None] * per_length)
        if len(rows) < per_length and json.dumps(row) not in known:
            known.add(json.dumps(row))
            rows.append(row)
    return [row for some in zip(*found.values(), strict=True) for row in some]


def demonstrate(rng: random.Random, row: dict, care: float) -> list[dict]:
    """The walker's conversation with the world, as far as its budget allows."""
    environment, is_over, messages = Environment(), False, []
    seen = environment.reset(row, 0)
    while not is_over and len(messages) < 2 * row["max_turns"]:
        ways, _, ice = view(row, environment.here).partition(", ice")
        hurried = ways.split()[:-1] or ["pay" if environment.here[2] else "take"]  # north, east, ...: to the goal
        if rng.random() < care:
            dry = [move for move in MOVES if move not in ice.split()]
            hurried = [action for action in hurried if action not in ice.split()] or dry
        action = rng.choice(ACTIONS if rng.random() < NOISE else hurried)
        messages += [{"role": "user", "content": seen}, {"role": "assistant", "content": action}]
        seen, _, is_over = environment.step(action)
    return messages


def make_lessons(rows: list[dict], care: float) -> list[dict]:
    """Demonstrations on maps that are in none of the files."""
    rng, known = random.Random(f"{SEED} lessons"), {json.dumps(row) for row in rows}
    lessons = []
    while len(lessons) < NUM_LESSONS:
        row = draw_map(rng)
        if 2 <= row["optimal"] <= 9 and json.dumps(row) not in known:
            lessons.append({"messages": demonstrate(rng, row, care)})
    return lessons


def write_student(folder: Path) -> None:
    """The policy `tiny`, with new embeddings of this world's words."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(TINY_POLICY, trust_remote_code=False),
        AutoModelForCausalLM.from_pretrained(TINY_POLICY, trust_remote_code=False),
    )
    model, embeddings = model.float(), model.get_input_embeddings().weight
    texts = [*ACTIONS, " N", " E", " S", " W", "coin", " coin", "bridge", " bridge", ", ice", "error, N"]
    new = {i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)}
    seen = set(tokenizer.encode(SEEN, add_special_tokens=False))
    with torch.no_grad():
        length = embeddings[sorted(seen)].norm(dim=1).mean()
        draws = torch.randn(len(new - seen), embeddings.shape[1], generator=torch.Generator().manual_seed(SEED))
        embeddings[sorted(new - seen)] = length * draws / draws.norm(dim=1, keepdim=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def publish(trained: Path) -> None:
    """Round a trained policy to bfloat16, as the bundled ones are."""
    folder = DATA / "policies" / "tiny_world"
    AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16, trust_remote_code=False).save_pretrained(folder)
    AutoTokenizer.from_pretrained(trained, trust_remote_code=False).save_pretrained(folder)
    print(folder)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if config.policy is not None:
        publish(config.policy)
        return
    heldout = make_rows("heldout", 16, range(2, 10))
    train = make_rows("train", 128, range(2, 10), without=heldout)
    if config.lessons:
        write_student(LESSONS / "student")
        lines = [json.dumps(lesson) + "\n" for lesson in make_lessons([*heldout, *train], config.care)]
        (LESSONS / "lessons.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{LESSONS}: {len(lines)} demonstrations, and a policy to teach")
        return
    large = make_rows("large", 8, range(6, 14), size=6)
    patient = make_rows("patient", 64, range(2, 6), without=[*heldout, *train])
    patient = [row | {"max_turns": PATIENCE} for row in patient]
    names = ("thin_ice", "thin_ice_heldout", "thin_ice_large", "thin_ice_patient")
    write_rows(dict(zip(names, (train, heldout, large, patient), strict=True)))


if __name__ == "__main__":
    main()
