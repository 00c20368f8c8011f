"""Helpers of the unit tests: tiny random models and the bundled tokenizer."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from common.experience import Experience
from common.policy import Policy


@pytest.fixture(scope="session")
def tokenizer(load_script):
    """The tokenizer of the tiny policy, with its chat template. A test that changes it makes a deep copy."""
    return load_script("imitation/tiny_policy/tiny_policy.py").make_tokenizer()


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Policy]:
    """Make a random Llama with grouped-query attention, whose distributions are far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(vocab_size=24, *, end_of_turn_ids=(2,), pad_id=0, temperature=1.0, tokenizer=None, seed=0, **policy):
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=256,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=end_of_turn_ids[0],
            pad_token_id=pad_id,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
        return Policy(model, tokenizer, list(end_of_turn_ids), pad_id, temperature, **policy)

    return make


@pytest.fixture(scope="session")
def make_experience() -> Callable[..., Experience]:
    """Make an `Experience` for a loss: a mask (B, T-1), and the fields that the test needs."""

    def make(action_mask: torch.Tensor, **values: torch.Tensor) -> Experience:
        rows, width = action_mask.shape[0], action_mask.shape[1] + 1
        return Experience(
            sequences=torch.zeros(rows, width, dtype=torch.long),
            attention_mask=torch.ones(rows, width, dtype=torch.long),
            action_mask=action_mask,
            sampler_log_probs=torch.zeros(action_mask.shape),
            prompt_index=torch.arange(rows),
            prompt_lengths=torch.ones(rows, dtype=torch.long),
            importance_weights=torch.ones(action_mask.shape),  # for samples of an engine
            staleness=torch.zeros(action_mask.shape),  # for those of earlier weights
            **({"completion_index": torch.zeros(rows, dtype=torch.long)} | values),
        )

    return make


@pytest.fixture(scope="session")
def hostile_queries() -> Callable[[int], Iterator[str]]:
    """Queries for an index: the syntax of FTS5 and SQL, control characters, all planes of Unicode, and long runs."""
    syntax = '" "" \' * ^ - + : ( ) { } , AND OR NOT NEAR NEAR( NEAR/2 text: rank: rowid ; -- /* */ %s ? ?1 \\ ` [ ]'
    others = (" ", "\n", "\0", "\x1b[2J", "\u202e", "\ufeff", "\ud800", "\udfff", "Fardil", "the", "1846")
    pieces, runs = [*syntax.split(), *others], ("Fardil ", '"', "NEAR(", "東", "x", "\u0301", "\ufdfa")

    def piece(rng: random.Random) -> str:
        kind = rng.random()
        if kind < 0.6:
            return rng.choice(pieces)
        if kind < 0.9:
            return chr(rng.randrange(rng.choice((0x250, 0x10000, 0x110000))))
        return rng.choice(pieces) * rng.randrange(50) if kind < 0.999 else rng.choice(runs) * 100_000

    def make(number: int) -> Iterator[str]:
        rng = random.Random(0)
        for _ in range(number):
            yield rng.choice(("", " ")).join(piece(rng) for _ in range(rng.randint(0, 12)))

    return make
