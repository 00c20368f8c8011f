"""Products with oneDNN: values and gradients equal nn.Linear's, and only float32 on the CPU uses them."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from fast import matmul

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not matmul.is_faster(), reason="MKL is as fast on this processor")


def both(bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """The same layer twice: unchanged, and with oneDNN."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = nn.Linear(192, 256, bias=bias)
    fast = nn.Sequential(copy.deepcopy(plain))
    matmul.use_fast_products(fast)
    return plain, fast[0]


@pytest.fixture
def calls(monkeypatch):
    """The number of rows of each product with oneDNN."""
    counts = []
    multiply = matmul.multiply
    monkeypatch.setattr(matmul, "multiply", lambda x, w: counts.append(len(x)) or multiply(x, w))
    return counts


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(257,), (2, 3, 70), (50,)])
def test_values_and_gradients_are_those_of_a_linear_layer(shape, bias, calls):
    results = []
    for layer in both(bias):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(*shape, 192, generator=generator, requires_grad=True)
        y = layer(x)
        y.backward(torch.randn(y.shape, generator=generator))
        results.append([y, x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert len(calls) == 3  # forward, and the gradients of x and of the weight
    for expected, actual in zip(*results, strict=True):
        assert actual.shape == expected.shape
        assert (actual - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [25, 57, 300])
def test_values_without_gradients(rows, bias, calls):
    plain, fast = both(bias)
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(fast(x[:, None]), plain(x[:, None]))
        assert torch.equal(matmul.product(fast)(x), fast(x))
        assert torch.equal(matmul.product(plain)(x), plain(x))
    assert len(calls) == 3


def test_frozen_weights_get_no_gradient_and_pass_it_on(calls):
    _, fast = both(bias=False)
    fast.requires_grad_(False)
    x = torch.randn(300, 192, requires_grad=True)
    fast(x).sum().backward()
    torch.testing.assert_close(x.grad, fast.weight.sum(dim=0).expand(300, 192))
    assert fast.weight.grad is None
    assert len(calls) == 2


def test_few_rows_and_other_dtypes_stay_with_pytorch(calls):
    plain, fast = both(bias=False)
    x = torch.randn(300, 192)
    assert torch.equal(fast(x[:24]), plain(x[:24]))
    assert torch.equal(matmul.product(fast)(x[:24]), plain(x[:24]))
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(x).dtype == torch.bfloat16
    assert fast.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert not calls


def test_a_policy_uses_onednn_and_is_saved_unchanged(calls, tmp_path):
    from harness.base.config import RunConfig
    from harness.models.loading import load_policy
    from harness.models.saving import save_policy

    policy = load_policy(RunConfig(device="cpu"))
    calls.clear()  # loading tries the model on a few tokens
    policy.model(torch.arange(300)[None])
    assert set(calls) == {320}
    save_policy(policy, tmp_path)
    names = load_policy(RunConfig(device="cpu", model=str(tmp_path))).state_dict().keys()
    assert names == policy.state_dict().keys()
