"""Write documents about invented people, towns, ships, games and books, and questions about them.

    qa_documents.jsonl        2,000 documents of two worlds: 1,600 entities that training asks about, 400 others
    qa_tasks.jsonl            questions about the 1,600, for training
    qa_tasks_heldout.jsonl    for evaluation: half of them about the 1,600, half about the 400, in turn

The names of the 400 occur in no training question and in none of its documents, and no name of either world in the
lessons of the tiny policy. A third of the questions needs two documents, one after the other. No question is in both
files.

    python imitation/tiny_policy/make_qa_tasks.py     # a second; the same bytes every time
"""

import random

from data_files import write_rows
from world_grammar import World, document, draw_question, make_world

SEED = 20261122
NUM_ENTITIES = {"train": 1600, "heldout": 400}
NUM_TRAINING, NUM_HELD_OUT = 3840, 512  # questions
TWO_HOPS_SHARE = 1 / 3
DIFFICULTIES = {1: "one hop", 2: "two hops"}


def make_worlds() -> dict[str, World]:
    """By the pool that their names are from."""
    return {pool: make_world(random.Random(f"{SEED} {pool}"), size, pool) for pool, size in NUM_ENTITIES.items()}


def make_documents(worlds: dict[str, World]) -> list[dict]:
    """The documents of all worlds, mixed."""
    rows = [{"id": entity.name, "text": document(entity)} for world in worlds.values() for entity in world.values()]
    random.Random(SEED).shuffle(rows)
    return rows


def make_questions(worlds: dict[str, World]) -> tuple[list[dict], list[dict]]:
    """Distinct questions for training and for evaluation."""
    rng = random.Random(f"{SEED} questions")
    asked: set[str] = set()

    def draw(pool: str) -> dict:
        num_hops = 1 + (rng.random() < TWO_HOPS_SHARE)
        while (question := draw_question(rng, worlds[pool], num_hops)).text in asked:
            pass
        asked.add(question.text)
        return {
            "question": question.text,
            "answer": question.answer,
            "supporting": list(question.path),
            "difficulty": DIFFICULTIES[num_hops],
            "asks": question.asks,
            "documents": "seen" if pool == "train" else "new",
        }

    held_out = [draw(pool) for _ in range(NUM_HELD_OUT // 2) for pool in ("train", "heldout")]
    return [draw("train") for _ in range(NUM_TRAINING)], held_out


if __name__ == "__main__":
    worlds = make_worlds()
    training, held_out = make_questions(worlds)
    write_rows({"qa_documents": make_documents(worlds), "qa_tasks": training, "qa_tasks_heldout": held_out})
