"""The cache of sampling adds tokens and drops rows exactly as plain tensors do, and keeps rows from turn to turn."""

import pytest
import torch

from common.fast import cache as cache_module
from common.fast.cache import RowCache
from common.fast.kept_rows import KeptRows
from common.policy import Policy
from common.sampling import begin_rows, continue_rows
from common.trajectory import Trajectory

HEADS, SIZE, LAYERS = 2, 3, 2


@pytest.mark.parametrize("grow_by", [0, 1, 3, 100])
@pytest.mark.parametrize("seed", range(5))
def test_cache_holds_what_plain_tensors_hold(monkeypatch, grow_by, seed):
    monkeypatch.setattr(cache_module, "GROW_BY", grow_by)
    generator = torch.Generator().manual_seed(seed)
    cache = RowCache()
    plain: list[list[torch.Tensor]] = [[], []]  # (rows, heads, tokens, size): keys and values of each layer

    def append(rows: int, tokens: int) -> None:
        for layer in range(LAYERS):
            states = [torch.randn(rows, HEADS, tokens, SIZE, generator=generator) for _ in range(2)]
            old = plain[layer] or [x[:, :, :0] for x in states]
            plain[layer] = [torch.cat([x, y], dim=2) for x, y in zip(old, states, strict=True)]
            for returned, wanted in zip(cache.update(*states, layer), plain[layer], strict=True):
                assert torch.equal(returned, wanted)

    append(3, 4)
    cache.batch_repeat_interleave(4)
    plain = [[x.repeat_interleave(4, dim=0) for x in layer] for layer in plain]
    append(12, 1)
    chosen = torch.tensor([0, 0, 0, 1, 4, 4, 5, 7, 9, 9, 9, 9, 11])
    cache.batch_select_indices(chosen)
    plain = [[x[chosen] for x in layer] for layer in plain]
    rows = 13
    while True:
        append(rows, 1)
        assert cache.get_seq_length() == plain[0][0].shape[2]
        ended = torch.rand(rows, generator=generator) < 0.2
        if ended.all():
            break
        order = cache.drop_rows(ended)
        assert sorted(order.tolist()) == (~ended).nonzero()[:, 0].tolist()
        moved = (order != torch.arange(len(order))).sum()
        assert moved <= ended.sum()  # the others stay where they are
        plain = [[x[order] for x in layer] for layer in plain]
        rows = len(order)


PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13], [14, 15]]


def converse(policy: Policy, kept: KeptRows | None, **settings) -> list[Trajectory]:
    """Six turns, of rows in another order each time; a tool answers with 1 to 9 tokens, and once 30, and rows leave."""
    rows = begin_rows(PROMPTS, 4)
    open_ones = list(rows)
    for turn in range(6):
        sampled = continue_rows(policy, open_ones, kept=kept, **{"max_new_tokens": 40, "key": (0, 1)} | settings)
        if kept is not None and any(sampled):  # what is kept needs the memory of one batch at most
            assert len(kept) <= min(len(open_ones), settings.get("generation_batch_size", 16))
        open_ones = [row for row in open_ones if row.finish_reason == "stop" and (len(row.ids) + turn) % 6][::-1]
        for row in open_ones:
            num_tokens = 30 if turn == 1 and row is open_ones[0] else 1 + sum(row.ids) % 9
            row.observe([3 + sum(row.ids) % 20] * num_tokens, settings.get("max_length", 1000))
    return rows


class OtherRanks:
    """Go on for twelve steps after this rank is done."""

    def __init__(self):
        self.steps = 0

    def __call__(self, done: bool) -> bool:
        self.steps = self.steps + 1 if done else 0
        return self.steps > 12


SETTINGS = [{}, {"greedy": True}, {"top_p": 0.8}, {"max_length": 30}, {"generation_batch_size": 7}]


@pytest.mark.parametrize("settings", SETTINGS, ids=[next(iter(settings), "default") for settings in SETTINGS])
def test_kept_rows_sample_what_rows_run_again_sample(make_policy, settings):
    check_kept_rows(make_policy(temperature=1.2), **settings)


def test_kept_rows_do_not_keep_what_other_ranks_wait_for(make_policy):
    """What is drawn only because other ranks go on can end a turn once more, and is in no row."""
    policy = make_policy(temperature=1.2, end_of_turn_ids=range(2, 10))
    rows, others = (begin_rows([[20, 21, 22]], 1) for _ in range(2))
    kept, all_done = KeptRows(), OtherRanks()
    for _ in range(4):
        settings = {"max_new_tokens": 99, "key": (0, 1), "everyone_done": all_done}
        continue_rows(policy, rows, kept=kept, **settings)
        continue_rows(policy, others, **settings)
        for row in (*rows, *others):
            row.observe([11, 12])
    assert rows[0].ids == others[0].ids
    assert rows[0].sampler_log_probs == pytest.approx(others[0].sampler_log_probs, abs=1e-5)


def test_kept_rows_are_exact_with_a_sliding_window():
    """A gap between a row's tokens would move some of them out of the window."""
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=24, intermediate_size=64, initializer_range=0.3, sliding_window=6, **shape)
    check_kept_rows(Policy(MistralForCausalLM(config), None, [2], pad_id=0, temperature=1.2))


def check_kept_rows(policy: Policy, **settings) -> None:
    """The same ids, masks and finish reasons, the same log-probs up to rounding, and fewer tokens run."""
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
