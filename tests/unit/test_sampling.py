"""`sample`: it records exactly what it draws, and a row depends only on its own key and prompt.

Keeping the cache of rows from turn to turn changes nothing.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from common.experience import collate
from common.policy import Policy
from common.sampling import _draw, begin_rows, continue_rows, sample
from common.stop_texts import can_write, ends_turn
from common.trajectory import Trajectory
from fast.kept_rows import KeptRows

VOCAB = 24
END = 2
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13], [14, 15]]
NEARLY_ONE = 1 - 2**-53  # the largest float64 in [0, 1) that a generator can return


def tokens_by_row(trajectories: list[Trajectory]) -> dict[tuple[int, int], list[int]]:
    return {(row.prompt_index, row.completion_index): row.completion_ids for row in trajectories}


def assert_training_agrees(policy: Policy, rows: list[Trajectory], some: torch.Tensor | None = None) -> None:
    experience = collate(rows, policy.pad_id)
    experience = experience if some is None else experience.select(some)
    recomputed = policy(experience.sequences, experience.action_mask).log_probs
    torch.testing.assert_close(experience.sampler_log_probs, recomputed, atol=1e-4, rtol=0)
    assert (recomputed[experience.action_mask == 1] < 0).all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_recorded_log_probs_are_those_that_training_computes(make_policy, temperature, top_p):
    """The prompts contain the pad id, which is also the end-of-turn id: those tokens must keep their attention."""
    policy = make_policy(VOCAB, temperature=temperature, end_of_turn_ids=(END,), pad_id=END)
    trajectories = sample(policy, [*PROMPTS, [END, 5, END, 6, END]], 4, max_new_tokens=20, key=(0, 1), top_p=top_p)
    assert len({len(row.ids) for row in trajectories}) > 4
    assert_training_agrees(policy, trajectories)


def test_sampling_records_all_fields_of_a_row(make_policy):
    policy, settings = make_policy(VOCAB, end_of_turn_ids=(END, 5)), {"key": (0, 1), "prompt_index": [40, 30, 20, 10]}
    rows = sample(policy, PROMPTS, 4, max_new_tokens=12, **settings)
    shorter = next(len(row.completion_ids) for row in rows if row.finish_reason == "stop")  # it ends at its budget
    again = sample(policy, PROMPTS, 4, max_new_tokens=shorter, **settings)
    assert [row.completion_ids for row in again] == [row.completion_ids[:shorter] for row in rows]
    for most, trajectories in ((12, rows), (shorter, again)):
        ends = {row.ids[-1] for row in trajectories if row.finish_reason == "stop"}
        for position, row in enumerate(trajectories):
            assert (row.prompt_index, row.completion_index) == ([40, 30, 20, 10][position // 4], position % 4)
            prompt, completion = PROMPTS[position // 4], row.completion_ids
            assert row.ids[: row.prompt_length] == prompt
            assert row.action_mask == [0] * len(prompt) + [1] * len(completion)
            assert row.sampler_log_probs[: len(prompt)] == [0.0] * len(prompt)
            assert len(row.sampler_log_probs) == len(row.ids)
            assert not {END, 5} & set(completion[:-1])
            if completion[-1] in (END, 5):  # the end-of-turn token is kept, trained on, and the last one
                assert row.finish_reason == "stop"
            else:
                assert (row.finish_reason, len(completion)) == ("length", most)
        assert ends == {END, 5} or most < 12


def test_neither_neighbours_nor_chunks_nor_order_change_a_sample(make_policy):
    policy = make_policy(VOCAB)

    def drawn(prompts=PROMPTS, group_size=4, index=range(4), **settings) -> dict[tuple[int, int], list[int]]:
        settings = {"max_new_tokens": 15, "key": (0, 1), "prompt_index": list(index)} | settings
        return tokens_by_row(sample(policy, prompts, group_size, **settings))

    reference = drawn()
    assert len({len(tokens) for tokens in reference.values()}) > 4  # rows leave the batch
    assert drawn(generation_batch_size=1) == drawn(generation_batch_size=12) == reference
    order = [2, 0, 3, 1]
    assert drawn([PROMPTS[i] for i in order], index=order) == reference
    for index, prompt in enumerate(PROMPTS):  # alone, and in a smaller group
        alone = drawn([prompt], 2, [index])
        assert alone == {row: tokens for row, tokens in reference.items() if row in ((index, 0), (index, 1))}


def test_seed_step_prompt_and_completion_each_change_the_sample(make_policy):
    policy = make_policy(VOCAB, end_of_turn_ids=(10_000,))  # a token that cannot be drawn
    samples = [
        tuple(row.completion_ids)
        for key, index in (((0, 1), 0), ((1, 1), 0), ((0, 2), 0), ((0, 1), 1))
        for row in sample(policy, [[3]], 8, max_new_tokens=15, key=key, prompt_index=[index])
    ]
    assert len({*samples}) == len(samples)


def greedy_by_hand(policy, prompt: list[int], max_new_tokens: int) -> list[int]:
    """No cache, no batch, no padding."""
    ids = []
    while len(ids) < max_new_tokens and not (ids and ids[-1] in policy.end_of_turn_ids):
        with torch.no_grad():
            ids.append(policy.model(torch.tensor([prompt + ids]), use_cache=False).logits[0, -1].argmax().item())
    return ids


@pytest.mark.parametrize("pad_id", [0, END])
def test_greedy_completions_equal_a_loop_without_cache(make_policy, pad_id):
    """In batches of several sizes, also if the end-of-turn token is the pad token."""
    policy = make_policy(VOCAB, pad_id=pad_id, seed=4)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in range(1, 7)]
    expected = [greedy_by_hand(policy, prompt, 20) for prompt in prompts]
    assert len({len(completion) for completion in expected}) > 1  # some end, some do not
    for at_once in (1, 4):
        rows = sample(policy, prompts, 1, max_new_tokens=20, key=(0,), greedy=True, generation_batch_size=at_once)
        assert [row.completion_ids for row in rows] == expected


@pytest.fixture
def make_gpt2() -> Callable[[], Policy]:
    from transformers import GPT2Config, GPT2LMHeadModel

    def make() -> Policy:
        sizes = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
        config = GPT2Config(**sizes, initializer_range=0.3, bos_token_id=None, eos_token_id=END)
        torch.manual_seed(0)
        return Policy(GPT2LMHeadModel(config).eval(), None, [END], pad_id=0)

    return make


def test_left_padding_is_harmless_with_absolute_positions(make_gpt2):
    """Rotary positions tolerate a shift; GPT-2's absolute positions do not, so `position_ids` must be given."""
    policy = make_gpt2()
    trajectories = sample(policy, PROMPTS, 3, max_new_tokens=10, key=(0, 1))
    for index, prompt in enumerate(PROMPTS):
        alone = sample(policy, [prompt], 3, max_new_tokens=10, key=(0, 1), prompt_index=[index])
        for row, same in zip(trajectories[3 * index :], alone, strict=False):
            assert row.ids == same.ids
            assert row.sampler_log_probs == pytest.approx(same.sampler_log_probs, abs=1e-5)
    assert_training_agrees(policy, trajectories)


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's statistic over the possible tokens, after asserting that no impossible token was drawn."""
    counts, expected = torch.bincount(tokens, minlength=len(probs)), probs * len(tokens)
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 0.8), (0.7, 0.6)])
def test_tokens_are_drawn_as_often_as_the_softmax_says(make_policy, temperature, top_p):
    """The keys are fixed, so the result is too. 49.7 is the 0.999 quantile of chi-square with 23 degrees of freedom."""
    policy = make_policy(VOCAB, temperature=temperature)
    prompt = [3, 4, 5]
    rows = sample(policy, [prompt], 4000, max_new_tokens=1, key=(0, 1), top_p=top_p)
    tokens = torch.tensor([row.completion_ids[0] for row in rows])

    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt])).logits[0, -1].double()
    probs = (logits / temperature).softmax(dim=-1)
    kept, held = torch.zeros_like(probs), 0.0
    for token in probs.argsort(descending=True).tolist():
        if held < top_p:
            kept[token] = probs[token]
        held += probs[token].item()
    assert chi_square(tokens, kept / kept.sum()) < 49.7
    if top_p == 1:
        assert chi_square(tokens, (logits / (1.3 * temperature)).softmax(dim=-1)) > 100  # other values would fail
    recorded = torch.tensor([row.sampler_log_probs[-1] for row in rows])
    torch.testing.assert_close(recorded, probs.log()[tokens].float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_token_without_probability_is_never_drawn(top_p):
    minus = float("-inf")
    logits = torch.tensor([[minus, 0.0, minus, 1.0, minus, minus], [-1e4, 3.0, -1e4, 3.0, -1e4, -1e4]])
    edges = torch.tensor([0.0, 5e-324, 0.25, 0.5, 0.75, NEARLY_ONE], dtype=torch.float64)
    uniforms = torch.cat([edges, torch.linspace(0, NEARLY_ONE, 101, dtype=torch.float64)])
    for row in logits:
        tokens, log_probs = _draw(row.expand(len(uniforms), -1), 1.0, top_p, uniforms)
        assert set(tokens.tolist()) <= {1, 3}
        assert log_probs.isfinite().all()
    assert _draw(logits[:1], 1.0, 1.0, edges[:1])[0].item() == 1
    assert _draw(logits[:1], 1.0, 1.0, edges[-1:])[0].item() == 3


@pytest.mark.parametrize("logit", [0.0, float("nan")])
def test_every_draw_is_in_the_vocabulary(logit):
    """Also where float32 rounds the uniform number to 1, and where the weights have diverged."""
    logits = torch.full((1, 70), logit)
    logits[:, 3:] -= float("inf")
    assert 0 <= _draw(logits, 1.0, 1.0, torch.tensor([1.0]))[0].item() < (3 if logit == 0 else 70)


def test_draws_from_a_large_vocabulary_are_exact():
    """In float32 the boundaries between 128,256 tokens would be wrong by some percent of a token's share."""
    logits = torch.randn(128_256, generator=torch.Generator().manual_seed(0))
    logits[:5000] = logits[-5000:] = float("-inf")
    cdf = logits.log_softmax(dim=-1).double().exp().cumsum(dim=-1)
    picked = torch.linspace(5001, 128_255 - 5000, 12).long()
    for uniforms in (cdf[picked - 1] / cdf[-1] + 1e-10, cdf[picked] / cdf[-1] - 1e-10):
        assert torch.equal(_draw(logits.expand(12, -1), 1.0, 1.0, uniforms)[0], picked)
    edges = torch.tensor([0.0, NEARLY_ONE], dtype=torch.float64)
    assert _draw(logits.expand(2, -1), 1.0, 1.0, edges)[0].tolist() == [5000, 128_255 - 5000]


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
STEPS = {  # the model, its settings, and whether `decoding_step` knows it
    "llama": ("llama", {}, True),
    "qwen2": ("qwen2", {}, True),
    "qwen3": ("qwen3", {}, True),
    "mistral": ("mistral", {"sliding_window": 4}, False),
    "a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, False),
    "angles that depend on the length": ("llama", {"max_position_embeddings": 8, "rope_parameters": DYNAMIC}, False),
    "a hook": ("llama", {}, False),
    "bfloat16": ("llama", {}, False),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_decoding_step_is_the_model_bit_for_bit(monkeypatch, name):
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1")  # as `load_policy` does
    kind, settings, is_known = STEPS[name]
    shape = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        kind, **shape, intermediate_size=64, vocab_size=VOCAB, initializer_range=0.3, head_dim=8, eos_token_id=END,
        **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.dim() == 1:  # biases and norms
            torch.nn.init.normal_(weight, mean=1.0, std=0.1)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    policy, calls = Policy(model, None, [END], pad_id=0, compute_dtype=dtype), []
    if name == "a hook":
        model.model.norm.register_forward_hook(lambda *_: None)
    monkeypatch.setattr(model, "forward", lambda _real=model.forward, **inputs: calls.append(1) or _real(**inputs))
    batches = PROMPTS, PROMPTS[:1]  # one prompt has no padding, and then attention has no mask
    rows = [sample(policy, prompts, 3, max_new_tokens=20, key=(0, 0)) for prompts in batches]
    assert (len(calls) == len(batches)) == is_known  # the prompts are run by the model itself
    monkeypatch.setattr("fast.decoding.decoding_step", lambda *_: None)
    assert [sample(policy, prompts, 3, max_new_tokens=20, key=(0, 0)) for prompts in batches] == rows


def test_autocast_casts_each_weight_once_for_all_tokens(make_policy):
    """In PyTorch's inference mode it keeps no casts: every decoding step would cast all weights again."""
    policy = make_policy(VOCAB, compute_dtype=torch.bfloat16)
    weights = {weight.data_ptr() for weight in policy.parameters()}
    cast = Counter()

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in weights:
                cast[args[0].data_ptr()] += 1
            return function(*args, **kwargs or {})

    with Casts():
        (row,) = sample(policy, PROMPTS[:1], 1, max_new_tokens=20, key=(0, 1))
    assert len(row.completion_ids) > 2
    assert set(cast.values()) == {1}


@pytest.mark.parametrize(("num_parts", "generation_batch_size"), [(3, None), (3, 6), (5, 12)])
def test_parts_of_the_rows_are_those_of_a_full_call(make_policy, num_parts, generation_batch_size):
    """With 3 parts of 8 rows, the first has the first group of 6 and two rows of the second, like a rank."""
    policy, group_size = make_policy(VOCAB), 6
    num_rows = len(PROMPTS) * group_size
    settings = {"max_new_tokens": 15, "key": (0, 1), "prompt_index": [40, 30, 20, 10]}
    settings["generation_batch_size"] = generation_batch_size
    expected = sample(policy, PROMPTS, group_size, **settings)
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    parts = [sample(policy, PROMPTS, group_size, rows=range(*pair), **settings) for pair in pairwise(bounds)]
    assert [len(part) for part in parts] == [end - start for start, end in pairwise(bounds)]
    for row, same in zip([row for part in parts for row in part], expected, strict=True):
        assert (row.ids, row.action_mask, row.finish_reason) == (same.ids, same.action_mask, same.finish_reason)
        assert (row.prompt_index, row.completion_index) == (same.prompt_index, same.completion_index)
        assert row.sampler_log_probs == pytest.approx(same.sampler_log_probs, abs=1e-5)


def test_nothing_to_sample_gives_no_trajectories(make_policy):
    assert sample(make_policy(VOCAB), [], 4, max_new_tokens=3, key=(0,)) == []
    for rows in (range(0), range(5, 5), range(16, 16)):
        assert sample(make_policy(VOCAB), PROMPTS, 4, rows=rows, max_new_tokens=3, key=(0,)) == []


@pytest.mark.parametrize(
    ("prompts", "index", "sentence"),
    [([[3], []], [16, 17], "prompt 17 has no tokens"), ([[3], [4]], [16], "2 prompts, but 1 entries")],
)
def test_an_empty_prompt_or_one_without_an_index_is_refused(make_policy, prompts, index, sentence):
    with pytest.raises(ValueError, match=sentence):
        sample(make_policy(VOCAB), prompts, 2, max_new_tokens=3, key=(0,), prompt_index=index)


# Several turns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [3, 15])
def test_later_turns_go_on_with_the_random_numbers_of_a_row(make_policy, budget):
    """A row in several turns equals the same row in one piece, drawn by a policy whose turns do not end."""
    policy, endless = make_policy(VOCAB, end_of_turn_ids=(2, 5, 9, 11)), make_policy(VOCAB, end_of_turn_ids=(10_000,))
    whole = sample(endless, PROMPTS, 4, max_new_tokens=budget, key=(0, 1))
    rows = begin_rows(PROMPTS, 4)
    turns = [0] * len(rows)
    for _ in range(budget + 1):
        added = continue_rows(policy, rows, max_new_tokens=budget, key=(0, 1), generation_batch_size=5)
        turns = [count + bool(ids) for count, ids in zip(turns, added, strict=True)]
    assert len(set(turns)) > 1
    for row, same in zip(rows, whole, strict=True):
        assert (row.ids, row.action_mask, row.finish_reason) == (same.ids, same.action_mask, "length")
        assert row.sampler_log_probs == pytest.approx(same.sampler_log_probs, abs=1e-5)


def test_what_tools_answer_takes_no_random_number_or_budget(make_policy):
    """The temperature is so high that tokens depend only on the random numbers of the completion."""
    flat, endless = (make_policy(VOCAB, temperature=1e9, end_of_turn_ids=ends) for ends in ((2, 5, 9, 11), (10_000,)))
    whole = sample(endless, PROMPTS, 4, max_new_tokens=15, key=(0, 1))
    rows, masks = begin_rows(PROMPTS, 4), [[0] * len(prompt) for prompt in PROMPTS for _ in range(4)]
    for turn in range(16):
        added = continue_rows(flat, rows, max_new_tokens=15, key=(0, 1))
        for row, ids, mask in zip(rows, added, masks, strict=True):
            row.observe([7, 8, 9, 2][: turn + 1])
            mask += [1] * len(ids) + [0] * min(4, turn + 1)
    assert added == [[]] * len(rows)
    assert [row.completion_ids for row in rows] == [row.completion_ids for row in whole]
    assert [row.action_mask for row in rows] == masks


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_log_probs_of_later_turns_are_those_of_training(make_policy, make_gpt2, kind):
    """At a temperature, with top-p and left padding; tool answers contain the pad and end-of-turn token."""
    policy = make_gpt2() if kind == "gpt2" else make_policy(VOCAB, pad_id=END)
    policy.temperature, policy.end_of_turn_ids = 1.5, [END, 5, 9, 11]
    rows = begin_rows(PROMPTS, 3)
    for turn in range(3):
        continue_rows(policy, rows, max_new_tokens=24, key=(0, 1), top_p=0.9)
        for row in rows:
            row.observe([END, 5, END, 7, 8, 9][: 1 + (row.completion_index + turn) % 6])
    assert len({row.num_action_tokens for row in rows}) > 4
    assert_training_agrees(policy, rows)
    for index in range(len(rows)):
        assert_training_agrees(policy, rows, torch.tensor([index]))


def test_rows_without_budget_or_room_are_left_alone(make_policy):
    policy = make_policy(VOCAB)
    rows = begin_rows(PROMPTS, 2)
    before = [list(row.ids) for row in rows]
    assert continue_rows(policy, rows, max_new_tokens=9, max_length=1, key=(0,)) == [[]] * 8
    assert continue_rows(policy, rows, max_new_tokens=0, key=(0,)) == [[]] * 8
    assert [row.ids for row in rows] == before
    assert continue_rows(policy, [], max_new_tokens=9, key=(0,)) == []
    added = continue_rows(policy, rows, max_new_tokens=9, max_length=3, key=(0,))
    assert [len(ids) for ids in added] == [0, 0, *(len(ids) for ids in added[2:4]), 0, 0, 1, 1]
    assert all(1 <= len(ids) <= 2 for ids in added[2:4])
    assert {row.finish_reason for row in rows[:2]} == {"length"}


def test_an_observation_fills_no_more_than_the_context():
    row = Trajectory([3, 4, 5], 2, [0, 0, 1], [0.0, 0.0, -1.0])
    row.observe([6, 7, 8], max_length=5)
    assert (row.ids, row.action_mask, row.sampler_log_probs) == ([3, 4, 5, 6, 7], [0, 0, 1, 0, 0], [0, 0, -1, 0, 0])
    for length in (5, 4, 1):
        row.observe([8, 9, 9, 9, 9, 9], max_length=length)
    assert row.ids == [3, 4, 5, 6, 7]


# Rows that are kept from turn to turn ---------------------------------------------------------------------------------


def converse(policy: Policy, kept: KeptRows | None, **settings) -> list[Trajectory]:
    """Six turns with rows in a new order each time; a tool answers with 1 to 9 tokens, and once 30, and rows leave."""
    rows = begin_rows(PROMPTS, 4)
    open_ones = list(rows)
    for turn in range(6):
        sampled = continue_rows(policy, open_ones, kept=kept, **{"max_new_tokens": 40, "key": (0, 1)} | settings)
        if kept is not None and any(sampled):  # the kept rows need at most the memory of one batch
            assert len(kept) <= min(len(open_ones), settings.get("generation_batch_size", 16))
        open_ones = [row for row in open_ones if row.finish_reason == "stop" and (len(row.ids) + turn) % 6][::-1]
        for row in open_ones:
            num_tokens = 30 if turn == 1 and row is open_ones[0] else 1 + sum(row.ids) % 9
            row.observe([3 + sum(row.ids) % 20] * num_tokens, settings.get("max_length", 1000))
    return rows


SETTINGS = [{"greedy": True}, {"max_length": 30}, {"top_p": 0.8, "generation_batch_size": 7}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_kept_rows_sample_what_rows_run_again_sample(make_policy, settings):
    check_kept_rows(make_policy(temperature=1.2), **settings)


def test_kept_rows_are_exact_with_a_sliding_window():
    """A gap between a row's tokens would move some of them out of the window."""
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=24, intermediate_size=64, initializer_range=0.3, sliding_window=6, **shape)
    check_kept_rows(Policy(MistralForCausalLM(config), None, [2], pad_id=0, temperature=1.2))


def check_kept_rows(policy: Policy, **settings) -> None:
    """Same ids, masks and finish reasons, same log-probs up to rounding, and fewer tokens in forward passes."""
    ways = []
    for kept in (None, KeptRows()):
        run: list[int] = []  # tokens of each forward pass

        def count(module, arguments, settings, run=run):
            run.append(settings["input_ids"].numel())

        hook = policy.model.register_forward_pre_hook(count, with_kwargs=True)
        rows = converse(policy, kept, **settings)
        hook.remove()
        ways.append((rows, sum(run)))
    (wanted, tokens_again), (rows, tokens) = ways
    for row, other in zip(rows, wanted, strict=True):
        assert (row.ids, row.action_mask, row.finish_reason) == (other.ids, other.action_mask, other.finish_reason)
    log_probs = [torch.tensor([x for row in some for x in row.sampler_log_probs]) for some in (rows, wanted)]
    torch.testing.assert_close(*log_probs, atol=1e-5, rtol=0)
    assert tokens < tokens_again


# Stop texts -----------------------------------------------------------------------------------------------------------


def text_of(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def length_by_definition(tokenizer, ids: list[int], stop_texts: tuple[str, ...]) -> int | None:
    """Decodes everything at every token."""
    lengths = range(1, len(ids) + 1)
    return next((n for n in lengths if any(stop in text_of(tokenizer, ids[:n]) for stop in stop_texts)), None)


def length_found(tokenizer, ids: list[int], stop_texts: tuple[str, ...]) -> int | None:
    return next((n for n in range(1, len(ids) + 1) if ends_turn(tokenizer, ids[:n], stop_texts)), None)


@pytest.mark.parametrize(
    ("tokens", "stop_texts", "end"),
    [
        (["an", "\u0120higher", "sw"], ("igh",), 2),  # inside a token
        (["P", "an", "sw", "er", "P"], ("nsw",), 3),  # across two
        (["P", "an", "sw", "er", "P"], ("nswe",), 4),  # across three
        (["an", "P"], ("an",), 1),  # at the first token
        (["P", "\u0120higher", "#", "an"], ("an", "#"), 3),  # the first of several
        (["P", "\u00c3", "\u00a9", "P"], ("\u00e9",), 3),  # the two bytes of an e with an accent
        (["\u00c3", "an", "\u00c3", "\u00a9"], ("n\u00e9",), 4),  # the first byte is no character
        (["an", "\u00c3", "P", "\u00a9"], ("n\u00e9",), None),
        (["#", "P"] * 6 + ["\u0120higher"], ("P#P#P#P#P ",), 13),  # a long token ends it, after many short ones
        (["an", "<|im_end|>", "sw"], ("nsw",), 3),  # texts leave control tokens out
        (["an", "sw"], ("<|im_end|>", "nsx"), None),
    ],
)
def test_a_stop_text_ends_with_the_first_token_that_completes_it(tokenizer, tokens, stop_texts, end):
    ids = tokenizer.convert_tokens_to_ids(tokens)
    assert None not in ids
    assert length_found(tokenizer, ids, stop_texts) == length_by_definition(tokenizer, ids, stop_texts) == end


@pytest.fixture(scope="session")
def sentencepiece_like():
    """Spaces begin tokens, the first one is dropped, and unknown characters are bytes: as in Llama 2 and Mistral."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"abx",
        "\u2581a",
        "\u2581ab",
        "ba",
    ]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence(list(steps))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def test_a_character_after_many_others_that_are_bytes_is_seen(sentencepiece_like):
    """A run of bytes that begins within a character is none of its characters."""
    ids = sentencepiece_like.encode("\U0001f600" * 10 + "\u00e9", add_special_tokens=False)
    assert len(ids) > 42
    assert length_found(sentencepiece_like, ids, ("\u00e9",)) == len(ids)


TEXTS = "a \n\u00e9\u2019\U0001f600b x"


@given(data=st.data())
def test_decoding_the_end_finds_what_decoding_everything_finds(tokenizer, sentencepiece_like, data):
    """With bytes of characters, control tokens and long rows; the stop text is often in the text."""
    of = data.draw(st.sampled_from([tokenizer, sentencepiece_like]))
    whole = of.encode(TEXTS + " an answer", add_special_tokens=False)
    some = [[i] for i in {*whole, of.eos_token_id}] + [of.encode(letter, add_special_tokens=False) for letter in TEXTS]
    ids = [i for part in data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=60)) for i in part]
    text = text_of(of, ids)
    start, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(1, 12))
    stops = tuple({text[start : start + length], data.draw(st.text(TEXTS, min_size=1, max_size=3))} - {""})
    stops = tuple(stop for stop in stops if "\ufffd" not in stop) or ("x",)
    assert length_found(of, ids, stops) == length_by_definition(of, ids, stops)


STOPS = ("\u00e9", "ra", " st")


@pytest.fixture
def speaker(make_policy, tokenizer) -> Callable[..., Policy]:
    """A random policy with the bundled vocabulary, which ends only at stop texts."""

    def make(*stop_texts: str, **settings) -> Policy:
        policy = make_policy(len(tokenizer), tokenizer=tokenizer, end_of_turn_ids=(10_000,), pad_id=2, **settings)
        policy.stop_texts = stop_texts
        return policy

    return make


def test_stop_texts_cut_rows_that_are_otherwise_the_same(speaker, tokenizer):
    """Each row where its own text says so; the token that completes the stop text is kept and trained."""
    settings = {"max_new_tokens": 25, "key": (0, 1)}
    whole = sample(speaker(temperature=2.0), PROMPTS, 8, **settings)
    rows = sample(speaker(*STOPS, temperature=2.0), PROMPTS, 8, **settings)
    for row, longer in zip(rows, whole, strict=True):
        end = length_by_definition(tokenizer, longer.completion_ids, STOPS)
        assert row.completion_ids == longer.completion_ids[:end]
        assert row.finish_reason == ("length" if end is None else "stop")
        assert row.action_mask == [0] * row.prompt_length + [1] * (end or 25)
        assert row.sampler_log_probs == pytest.approx(longer.sampler_log_probs[: len(row.ids)], abs=1e-4)
    assert len({len(row.ids) for row in rows}) > 5
    assert {row.finish_reason for row in rows} == {"stop", "length"}
    ends = [text_of(tokenizer, row.completion_ids) for row in rows if row.finish_reason == "stop"]
    assert any(not text.endswith(STOPS) for text in ends)  # inside a token
    assert_training_agrees(speaker(*STOPS, temperature=2.0), rows)


@pytest.mark.parametrize(
    "settings", [{"generation_batch_size": 1}, {"generation_batch_size": 8}, {"rows": range(3, 21)}]
)
def test_with_stop_texts_a_row_depends_on_itself_alone(speaker, settings):
    policy, usual = speaker(*STOPS, temperature=2.0), {"max_new_tokens": 25, "key": (0, 1)}
    whole = sample(policy, PROMPTS, 8, **usual)
    rows = sample(policy, PROMPTS, 8, **usual | settings)
    wanted = whole[3:21] if "rows" in settings else whole
    assert [(row.ids, row.finish_reason) for row in rows] == [(row.ids, row.finish_reason) for row in wanted]


def test_a_turn_that_is_continued_token_by_token_ends_at_the_same_stop_text(speaker):
    """As chat.py draws it, or a sampler that gets new weights in mid-completion; with a stop text of several tokens."""
    policy = speaker(temperature=2.0)
    [whole] = sample(policy, PROMPTS[:1], 1, max_new_tokens=25, key=(0, 1))
    policy.stop_texts = (text_of(policy.tokenizer, whole.completion_ids[8:12]),)
    [wanted] = sample(policy, PROMPTS[:1], 1, max_new_tokens=25, key=(0, 1))
    for kept in (None, KeptRows()):
        [row] = begin_rows(PROMPTS[:1], 1)
        while row.finish_reason == "length" and row.num_action_tokens < 25:
            continue_rows(policy, [row], max_new_tokens=row.num_action_tokens + 1, key=(0, 1), kept=kept)
        assert (row.ids, row.finish_reason) == (wanted.ids, "stop")
    assert row.completion_ids == whole.completion_ids[:12]


def test_a_stop_text_ends_every_turn_and_counts_only_what_was_sampled_in_it(speaker):
    """The prompt and the tools' answers contain it, and half of it ends the turn before."""
    policy, key = speaker("ab", temperature=2.0), (0, 1)
    first, second = policy.tokenizer.convert_tokens_to_ids(["a", "b"])
    row = Trajectory([first, second, first], 3, [0, 0, 0], [0.0] * 3)
    assert row.newest_turn == []
    turns = {(): [second, first], (second, first): [first, second]}
    for said in turns.values():
        row.act(said, [-1.0, -1.0])
        assert row.newest_turn == said
        assert ends_turn(policy.tokenizer, row.newest_turn, policy.stop_texts) == (said == [first, second])
        row.observe([first, second])
    policy.stop_texts = ("e",)
    before = len(row.ids)
    [added] = continue_rows(policy, [row], max_new_tokens=200, key=key)
    assert row.finish_reason == "stop"
    assert length_by_definition(policy.tokenizer, added, ("e",)) == len(added) == len(row.ids) - before


def test_only_the_end_of_a_row_is_decoded(speaker, tokenizer, monkeypatch):
    """And only after a token that has the last character of a stop text."""
    policy, decoded = speaker("never a", temperature=2.0), []

    def decode(ids, _real=tokenizer.decode, **settings):
        decoded.append(len(ids))
        return _real(ids, **settings)

    monkeypatch.setattr(tokenizer, "decode", decode)
    sample(policy, PROMPTS, 4, max_new_tokens=120, key=(0, 1))
    assert 0 < sum(length > 2 for length in decoded) < 4 * len(PROMPTS) * 120 / 2
    assert max(decoded) <= 64


@pytest.mark.parametrize(
    ("text", "is_possible"), [("</response>", True), ("\u00e9 \n\n", True), ("<|im_end|>", False), ("\ufffd", False)]
)
def test_whether_a_tokenizer_can_write_a_text(tokenizer, sentencepiece_like, text, is_possible):
    assert can_write(tokenizer, text) == is_possible
    assert can_write(sentencepiece_like, " a")
    assert not can_write(sentencepiece_like, "</s>")
