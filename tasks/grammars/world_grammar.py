"""Invented worlds to search: people, towns, ships, games and books that nobody can know without reading about them.

Every entity has a name, a document of at most 32 tokens of the tiny policy, and three facts: *where* (a town), *when*
(a year) and *who* (a person). Towns and people are entities of the same world: a fact leads on to another document.

    Jarce was born in Waplem in 1734. The father of Jarce was Mabto.
    The ship Fardil was built in Tinhur in 1846. Jarce built Fardil.

A question asks for one fact of an entity that it names (one hop), or of one that a fact of the named entity leads to:

    When was the ship Fardil built?                             one hop: Fardil
    Where was the one who built the ship Fardil born?           two hops: Fardil, then Jarce

Names are a capital and two syllables, chosen so that the tiny policy's tokenizer makes three tokens of each, of which
only the first one changes when there is a space in front. A hash assigns each of the 12,250 names to one of three
pools, so that the names of the warm start never occur in the worlds of reinforcement learning, and those of its
held-out documents in neither.

    world = make_world(random.Random(0), num_entities=2000, only_pool="train")
    texts = [document(entity) for entity in world.entities.values()]
    question = draw_question(random.Random(1), world, num_hops=2)
"""

import functools
import hashlib
import random
from dataclasses import dataclass

CAPITALS = tuple("ACFJMNOSTW")  # those that are one token with a space in front, too
_SYLLABLES = (
    "ab ad ain ak ap ar ard ast ed ef ell em en er id il im in ist iv ond op or ul um",
    "ab ain ak al ap ar ard as ast at ce ci co cor he ho hur id il im in ir is ist it iv la le lem lt ol om on ond or "
    "ot ou ous si to tor ul um un ur us ve ver ze",
)
FIRST_SYLLABLES, SECOND_SYLLABLES = (tuple(text.split()) for text in _SYLLABLES)
YEARS = range(1100, 2000)
ASKS = ("where", "when", "who")
NOTHING_FOUND = "nothing found"


@dataclass(frozen=True)
class Kind:
    """How entities of a kind are written and asked about; "{}" is the name, or a phrase with it."""

    share: float  # of the entities of a world
    document: str  # with {name}, {where}, {when} and {who}
    phrase: str  # for the entity, in its questions
    questions: dict[str, str]  # by what is asked for
    leads_to: dict[str, str]  # "where" and "who": the phrase for the town or the person of that fact


KINDS: dict[str, Kind] = {
    "person": Kind(
        0.4,
        "{name} was born in {where} in {when}. The father of {name} was {who}.",
        "{}",
        {"where": "Where was {} born?", "when": "When was {} born?", "who": "Who was the father of {}?"},
        {"where": "the town where {} was born", "who": "the father of {}"},
    ),
    "town": Kind(
        0.3,
        "The town {name} is near {where}. {who} built {name} in {when}.",
        "the town {}",
        {"where": "Where is {}?", "when": "When was {} built?", "who": "Who built {}?"},
        {"where": "the town near {}", "who": "the one who built {}"},
    ),
    "ship": Kind(
        0.1,
        "The ship {name} was built in {where} in {when}. {who} built {name}.",
        "the ship {}",
        {"where": "Where was {} built?", "when": "When was {} built?", "who": "Who built {}?"},
        {"where": "the town where {} was built", "who": "the one who built {}"},
    ),
    "game": Kind(
        0.1,
        "The game of {name} was in {where} in {when}. {who} won the game of {name}.",
        "the game of {}",
        {"where": "Where was {}?", "when": "When was {}?", "who": "Who won {}?"},
        {"where": "the town of {}", "who": "the one who won {}"},
    ),
    "book": Kind(
        0.1,
        "{who} wrote the book {name}. {name} came out in {where} in {when}.",
        "the book {}",
        {"where": "Where did {} come out?", "when": "When did {} come out?", "who": "Who wrote {}?"},
        {"where": "the town where {} came out", "who": "the one who wrote {}"},
    ),
}
LEADS_TO_KIND = {"where": "town", "who": "person"}


@dataclass(frozen=True)
class Entity:
    """Someone or something that has a document."""

    name: str
    kind: str
    where: str  # the name of a town
    when: str  # a year
    who: str  # the name of a person


@dataclass(frozen=True)
class World:
    """Entities by name; the town and the person of every fact are among them."""

    entities: dict[str, Entity]


@dataclass(frozen=True)
class WorldQuestion:
    """A question, its answer, and the names of the entities whose documents tell it, in the order of the search."""

    text: str
    answer: str
    asks: str  # "where", "when" or "who"
    path: tuple[str, ...]  # one name for each hop

    @property
    def num_hops(self) -> int:
        return len(self.path)


def pool(name: str) -> str:
    """Which of three disjoint sets a name belongs to: "heldout", "train" or "warm_start". A hash of it decides.

    >>> {pool("Jarce"), pool("Mabto"), pool("Waplem")} <= {"heldout", "train", "warm_start"}
    True
    """
    bucket = hashlib.sha256(name.encode()).digest()[0]
    return "heldout" if bucket < 38 else "train" if bucket < 102 else "warm_start"


@functools.lru_cache
def names(only_pool: str) -> tuple[str, ...]:
    """All names of a pool: some 1,800 of "heldout", 3,000 of "train", 7,400 of "warm_start"."""
    every = (
        capital + first + second for capital in CAPITALS for first in FIRST_SYLLABLES for second in SECOND_SYLLABLES
    )
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
    order = rng.sample(list(entities), num_entities)
    return World({name: entities[name] for name in order})


def document(entity: Entity) -> str:
    """What there is to read about an entity. Its name occurs twice, that of any other entity at most once.

    >>> document(Entity("Fardil", "ship", "Tinhur", "1846", "Jarce"))
    'The ship Fardil was built in Tinhur in 1846. Jarce built Fardil.'
    """
    return KINDS[entity.kind].document.format(name=entity.name, where=entity.where, when=entity.when, who=entity.who)


def one_hop(entity: Entity, asks: str) -> WorldQuestion:
    """The question for one fact of an entity.

    >>> one_hop(Entity("Fardil", "ship", "Tinhur", "1846", "Jarce"), "when").text
    'When was the ship Fardil built?'
    """
    kind = KINDS[entity.kind]
    text = kind.questions[asks].format(kind.phrase.format(entity.name))
    return WorldQuestion(text, getattr(entity, asks), asks, (entity.name,))


def two_hops(world: World, entity: Entity, leads: str, asks: str) -> WorldQuestion:
    """The question for a fact of the town ("where") or the person ("who") that a fact of `entity` leads to.

    >>> person = Entity("Jarce", "person", "Waplem", "1734", "Mabto")
    >>> ship = Entity("Fardil", "ship", "Tinhur", "1846", "Jarce")
    >>> two_hops(World({"Jarce": person, "Fardil": ship}), ship, "who", "where").text
    'Where was the one who built the ship Fardil born?'
    """
    kind, middle = KINDS[entity.kind], world.entities[getattr(entity, leads)]
    phrase = kind.leads_to[leads].format(kind.phrase.format(entity.name))
    text = KINDS[middle.kind].questions[asks].format(phrase)
    return WorldQuestion(text, getattr(middle, asks), asks, (entity.name, middle.name))


def draw_question(rng: random.Random, world: World, num_hops: int) -> WorldQuestion:
    """A question of one or two hops about a random entity; every kind, fact and way on is as likely as any other."""
    kind = rng.choice(list(KINDS))
    members = [entity for entity in world.entities.values() if entity.kind == kind]
    entity, asks = rng.choice(members or list(world.entities.values())), rng.choice(ASKS)
    return one_hop(entity, asks) if num_hops == 1 else two_hops(world, entity, rng.choice(list(LEADS_TO_KIND)), asks)


def find(world: World, query: str, k: int = 2) -> list[str]:
    """A search: at most `k` documents that hold words of the query, those with most of them first.

    Documents that hold equally many come in the order of the world, which is random.
    """
    words = set(query.split())
    texts = [document(entity) for entity in world.entities.values()]
    scores = [sum(word.strip(".") in words for word in text.split()) for text in texts]
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    return [texts[index] for index in order[:k] if scores[index]]


def render_results(texts: list[str]) -> str:
    """The texts that a search has found, as the tool answers: one a line.

    >>> render_results([])
    'nothing found'
    """
    return "\n".join(texts) or NOTHING_FOUND


def to_row(question: WorldQuestion) -> dict:
    """A question as a row of a data file; `path` names the entities whose documents support the answer."""
    return {
        "question": question.text,
        "answer": question.answer,
        "asks": question.asks,
        "num_hops": question.num_hops,
        "path": list(question.path),
    }
