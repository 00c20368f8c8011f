"""Invented worlds to search: people, towns, ships, games and books that a policy only knows by reading about them.

Every entity has a name, a document of at most 32 tokens of the tiny policy, and three facts: *where* (a town), *when*
(a year) and *who* (a person). Towns and people are entities of the same world, so a fact leads to another document.

    Jarce was born in Waplem in 1734. The father of Jarce was Mabto.
    The ship Fardil was built in Tinhur in 1846. Jarce built Fardil.

A question asks for one fact about an entity that it names (one hop), or about the entity that such a fact leads to:

    When was the ship Fardil built?                             one hop: Fardil
    Where was the one who built the ship Fardil born?           two hops: Fardil, then Jarce

Names are a capital and two syllables, chosen so that the tiny policy's tokenizer makes three tokens of each name; a
space before the name changes only the first token. A hash assigns each of the 12,250 names to one of three pools. So
the names of the warm start never occur in the worlds of reinforcement learning, and the names of held-out documents
occur in neither.

    world = make_world(random.Random(0), num_entities=2000, only_pool="train")
    texts = [document(entity) for entity in world.values()]
    question = draw_question(random.Random(1), world, num_hops=2)
"""

import functools
import hashlib
import itertools
import random
from dataclasses import dataclass

CAPITALS = tuple("ACFJMNOSTW")  # capitals that are one token, also with a space before them
_SYLLABLES = (
    "ab ad ain ak ap ar ard ast ed ef ell em en er id il im in ist iv ond op or ul um",
    "ab ain ak al ap ar ard as ast at ce ci co cor he ho hur id il im in ir is ist it iv la le lem lt ol om on ond or "
    "ot ou ous si to tor ul um un ur us ve ver ze",
)
FIRST_SYLLABLES, SECOND_SYLLABLES = (tuple(text.split()) for text in _SYLLABLES)
YEARS = range(1100, 2000)
ASKS = ("where", "when", "who")
LEADS_TO = ("where", "who")  # facts that are themselves entities, a town and a person
NOTHING_FOUND = "nothing found"


@dataclass(frozen=True)
class Kind:
    """How documents and questions describe entities of a kind; "{}" is the name, or a phrase with it."""

    share: float  # of the entities of a world
    document: str  # with {name}, {where}, {when} and {who}
    phrase: str  # for the entity, in its questions
    questions: tuple[str, str, str]  # for where, when and who
    leads_to: tuple[str, str]  # the phrases for the town and the person of its facts


KINDS = {
    "person": Kind(
        0.4,
        "{name} was born in {where} in {when}. The father of {name} was {who}.",
        "{}",
        ("Where was {} born?", "When was {} born?", "Who was the father of {}?"),
        ("the town where {} was born", "the father of {}"),
    ),
    "town": Kind(
        0.3,
        "The town {name} is near {where}. {who} built {name} in {when}.",
        "the town {}",
        ("Where is {}?", "When was {} built?", "Who built {}?"),
        ("the town near {}", "the one who built {}"),
    ),
    "ship": Kind(
        0.1,
        "The ship {name} was built in {where} in {when}. {who} built {name}.",
        "the ship {}",
        ("Where was {} built?", "When was {} built?", "Who built {}?"),
        ("the town where {} was built", "the one who built {}"),
    ),
    "game": Kind(
        0.1,
        "The game of {name} was in {where} in {when}. {who} won the game of {name}.",
        "the game of {}",
        ("Where was {}?", "When was {}?", "Who won {}?"),
        ("the town of {}", "the one who won {}"),
    ),
    "book": Kind(
        0.1,
        "{who} wrote the book {name}. {name} came out in {where} in {when}.",
        "the book {}",
        ("Where did {} come out?", "When did {} come out?", "Who wrote {}?"),
        ("the town where {} came out", "the one who wrote {}"),
    ),
}


@dataclass(frozen=True)
class Entity:
    """Someone or something that has a document."""

    name: str
    kind: str
    where: str  # the name of a town
    when: str  # a year
    who: str  # the name of a person


World = dict[str, Entity]  # by name; the town and the person of every fact are among them


@dataclass(frozen=True)
class WorldQuestion:
    """A question, its answer, and the names of the entities to search for, in the order of the search."""

    text: str
    answer: str
    asks: str  # "where", "when" or "who"
    path: tuple[str, ...]  # one name for each hop


def pool(name: str) -> str:
    """Which of three disjoint sets a name belongs to: "heldout", "train" or "warm_start", by a hash of the name."""
    bucket = hashlib.sha256(name.encode()).digest()[0]
    return "heldout" if bucket < 38 else "train" if bucket < 102 else "warm_start"


@functools.lru_cache
def names(only_pool: str) -> tuple[str, ...]:
    """All names of a pool: some 1,800 of "heldout", 3,000 of "train", 7,400 of "warm_start"."""
    every = map("".join, itertools.product(CAPITALS, FIRST_SYLLABLES, SECOND_SYLLABLES))
    return tuple(name for name in every if pool(name) == only_pool)


def make_world(rng: random.Random, num_entities: int, only_pool: str) -> World:
    """A world of `num_entities` entities with names of one pool, the kinds in proportion to their shares.

    Raises:
        ValueError: the pool has fewer names, or there would be fewer than two towns or people.
    """
    counts = {kind: round(num_entities * KINDS[kind].share) for kind in KINDS}
    counts["person"] += num_entities - sum(counts.values())
    if min(counts["person"], counts["town"]) < 2 or num_entities > len(names(only_pool)):
        raise ValueError(f"no world of {num_entities} entities can be made of {len(names(only_pool))} names")
    drawn = iter(rng.sample(names(only_pool), num_entities))
    by_kind = {kind: [next(drawn) for _ in range(count)] for kind, count in counts.items()}

    def other(kind: str, name: str) -> str:
        while (chosen := rng.choice(by_kind[kind])) == name:
            pass
        return chosen

    entities = {
        name: Entity(name, kind, other("town", name), str(rng.choice(YEARS)), other("person", name))
        for kind, members in by_kind.items()
        for name in members
    }
    return {name: entities[name] for name in rng.sample(list(entities), num_entities)}


def document(entity: Entity) -> str:
    """The document about an entity. Its own name occurs twice, the name of any other entity at most once.

    >>> document(Entity("Fardil", "ship", "Tinhur", "1846", "Jarce"))
    'The ship Fardil was built in Tinhur in 1846. Jarce built Fardil.'
    """
    return KINDS[entity.kind].document.format(**vars(entity))


def ask(world: World, entity: Entity, asks: str, leads: str | None = None) -> WorldQuestion:
    """The question for one fact of an entity, or of the town ("where") or person ("who") that its fact `leads` to.

    >>> person = Entity("Jarce", "person", "Waplem", "1734", "Mabto")
    >>> ship = Entity("Fardil", "ship", "Tinhur", "1846", "Jarce")
    >>> ask({}, ship, "when").text
    'When was the ship Fardil built?'
    >>> ask({"Jarce": person, "Fardil": ship}, ship, "where", leads="who").text
    'Where was the one who built the ship Fardil born?'
    """
    kind, path = KINDS[entity.kind], (entity.name,)
    phrase = kind.phrase.format(entity.name)
    if leads is not None:
        phrase = kind.leads_to[LEADS_TO.index(leads)].format(phrase)
        entity = world[getattr(entity, leads)]
        path += (entity.name,)
    text = KINDS[entity.kind].questions[ASKS.index(asks)].format(phrase)
    return WorldQuestion(text, getattr(entity, asks), asks, path)


def draw_question(rng: random.Random, world: World, num_hops: int) -> WorldQuestion:
    """A question of one or two hops about a random entity; all kinds, facts and second hops are equally likely."""
    kind = rng.choice(list(KINDS))
    members = [entity for entity in world.values() if entity.kind == kind]
    entity, asks = rng.choice(members or list(world.values())), rng.choice(ASKS)
    return ask(world, entity, asks, None if num_hops == 1 else rng.choice(LEADS_TO))


def find(world: World, query: str, k: int = 2) -> list[str]:
    """A search: at most `k` documents that contain words of the query, ordered by how many they contain.

    Documents that contain equally many come in the order of the world, which is random.
    """
    words, texts = set(query.split()), map(document, world.values())
    scored = [(sum(word.strip(".") in words for word in text.split()), text) for text in texts]
    return [text for score, text in sorted(scored, key=lambda pair: -pair[0])[:k] if score]


def render_results(texts: list[str]) -> str:
    """The tool's answer to a search: the texts, one per line.

    >>> render_results([])
    'nothing found'
    """
    return "\n".join(texts) or NOTHING_FOUND


def to_row(question: WorldQuestion) -> dict:
    """A question as a row of a data file; `path` names the entities whose documents support the answer."""
    path = list(question.path)
    return {
        "question": question.text,
        "answer": question.answer,
        "asks": question.asks,
        "num_hops": len(path),
        "path": path,
    }
