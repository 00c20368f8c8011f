"""The cache of sampling adds tokens and drops rows exactly as plain tensors do."""

import pytest
import torch

from common.fast import cache as cache_module
from common.fast.cache import RowCache

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
