"""Invented worlds: names that can be copied, documents, questions whose answers stand in them, and disjoint pools."""

import random
import re
from collections import Counter

import pytest

from common.datagen.world_grammar import (
    KINDS,
    NOTHING_FOUND,
    document,
    draw_question,
    find,
    make_world,
    names,
    pool,
    render_results,
    to_row,
)

from common.plumbing.config import TINY_POLICY

POOLS = ("heldout", "train", "warm_start")


@pytest.fixture(scope="module")
def tokens():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    return lambda text: tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="module")
def world():
    return make_world(random.Random(0), 400, "train")


def test_pools_share_no_name():
    every = [name for only_pool in POOLS for name in names(only_pool)]
    assert len(every) == len(set(every)) == 10 * 25 * 49
    for only_pool in POOLS:
        assert len(names(only_pool)) > 1500
        assert {pool(name) for name in names(only_pool)[:100]} == {only_pool}


def test_names_tokenise_alike_with_and_without_a_space(tokens):
    for name in random.Random(0).sample([name for only_pool in POOLS for name in names(only_pool)], 2000):
        with_space = tokens(" " + name)
        assert len(with_space) == 3
        assert tokens(name) == [with_space[0].removeprefix("Ġ"), *with_space[1:]]


def test_a_world_depends_on_its_seed_alone():
    first, again, other = (make_world(random.Random(seed), 50, "heldout") for seed in (0, 0, 1))
    assert first == again != other
    assert {pool(name) for name in first.entities} == {"heldout"}
    with pytest.raises(ValueError, match="no world of"):
        make_world(random.Random(0), 5000, "heldout")


def test_facts_lead_to_documents_of_the_world(world, tokens):
    for name, entity in world.entities.items():
        assert world.entities[entity.where].kind == "town"
        assert world.entities[entity.who].kind == "person"
        assert name not in (entity.where, entity.who)
        text = document(entity)
        assert len(tokens(text)) <= 32
        counts = Counter(re.findall(r"\w+", text))
        assert (counts[name], counts[entity.where], counts[entity.who], counts[entity.when]) == (2, 1, 1, 1)
    assert {entity.kind for entity in world.entities.values()} == KINDS.keys()


@pytest.mark.parametrize("num_hops", [1, 2])
def test_the_documents_of_its_path_answer_a_question(world, num_hops):
    """The question names the first, each but the last names the next one, and the last one holds the answer."""
    rng = random.Random(3)
    seen = Counter()
    for _ in range(300):
        row = to_row(draw_question(rng, world, num_hops))
        assert len(row["path"]) == row["num_hops"] == num_hops
        texts = [row["question"], *(document(world.entities[name]) for name in row["path"])]
        for text, word in zip(texts, [*row["path"], row["answer"]], strict=True):
            assert word in re.findall(r"\w+", text)
        assert row["answer"] not in row["question"] or num_hops == 2
        seen[row["asks"], world.entities[row["path"][0]].kind] += 1
    assert len(seen) == 3 * len(KINDS)


def test_what_is_searched_comes_first(world):
    for name, entity in list(world.entities.items())[:20]:
        first, *others = find(world, name, k=3)
        assert first == document(entity)
        assert len(others) <= 2
        assert all(name in text for text in others)
    assert render_results(find(world, "Nobody")) == NOTHING_FOUND
    assert render_results(["a", "b"]) == "a\nb"
