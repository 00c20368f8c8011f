"""A small encoder for searching by meaning, where no model can be downloaded: half a megabyte, in a minute.

    python benchmarks/train_encoder.py            # 45 s, one thread; writes runs/search_encoder

It is a sentence-transformers model for --encoder, and needs requirements-search.txt. A text's vector is the mean of
those of its tokens, which are learned from random ones: the vector of a question, or of a name alone, comes closest to
that of the document about the entity that it names, among those of a batch. Questions and documents are of invented
worlds with the names of the warm start, none of which occurs in the bundled documents.

It knows the tokens of names, and which words say nothing, and no language beyond that: it is for these invented
documents only. The order of tokens is lost, so that Jarul and Jular are one name to it.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import tyro

from common.datagen.world_grammar import World, document, draw_question, make_world

from common.plumbing.config import ROOT, shown

TOKENIZER = ROOT / "assets" / "tiny_policy" / "tokenizer.json"
ENTITIES, BATCHES_OF_A_WORLD = 5000, 50
NAME_SHARE = 1 / 3  # of the queries; the others are questions of one and of two hops, half and half


@dataclass(frozen=True, kw_only=True)
class Config:
    output: str = str(ROOT / "runs" / "search_encoder")  # directory of the model
    dimensions: int = 128  # of a vector
    steps: int = 1500  # batches
    batch_size: int = 128  # pairs of a query and a document; the other documents of the batch are the wrong ones
    lr: float = 0.02  # learning rate of AdamW, which falls to zero
    seed: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    torch.set_num_threads(1)
    began = time.process_time()
    model = train(config)
    model.save(config.output, create_model_card=False)
    print(f"{shown(config.output)}: {sum(p.numel() for p in model.parameters()):,} numbers, {config.steps} steps, "
          f"{time.process_time() - began:.0f} CPU seconds")  # fmt: skip


def train(config: Config):
    """The loss is the cross-entropy of a softmax over cosines * 20, in each row of which one document is right."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    torch.manual_seed(config.seed)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=config.dimensions)], device="cpu")
    loss_of = MultipleNegativesRankingLoss(model, scale=20.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=config.steps)
    batches = pairs(random.Random(config.seed), config.batch_size)
    for step in range(1, config.steps + 1):
        loss = loss_of([model.preprocess(texts) for texts in next(batches)], None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return model


def pairs(rng: random.Random, batch_size: int) -> Iterator[tuple[list[str], list[str]]]:
    """Batches of queries and documents, no document twice in a batch."""
    while True:
        world = make_world(rng, ENTITIES, "warm_start")
        for _ in range(BATCHES_OF_A_WORLD):
            queries: dict[str, str] = {}  # by the name of the entity to be found
            while len(queries) < batch_size:
                name, query = draw_query(rng, world)
                queries.setdefault(name, query)
            yield list(queries.values()), [document(world.entities[name]) for name in queries]


def draw_query(rng: random.Random, world: World) -> tuple[str, str]:
    """The name of an entity, and a text with which to search for it."""
    question = draw_question(rng, world, num_hops=rng.choice((1, 2)))
    name = question.path[0]
    return name, name if rng.random() < NAME_SHARE else question.text


if __name__ == "__main__":
    main()
