"""Float32 matrix products at full speed on AMD CPUs.

On a CPU, PyTorch multiplies float32 matrices with MKL, which uses the widest vector instructions (AVX-512) on Intel
CPUs only. oneDNN, which PyTorch also contains, uses them on all CPUs and is equally exact. benchmarks/README.md shows
the time saved on an AMD EPYC. Nothing changes on other machines, in bfloat16 or on a GPU.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import linear

MIN_ROWS, MIN_WORK = 8, 1_200_000  # rows and multiplications; MKL is just as fast for smaller products


def use_fast_products(model: nn.Module) -> None:
    """Let all linear layers of `model` multiply with oneDNN, if it is faster than MKL on this machine."""
    if not is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _OneDNNLinear


def is_faster() -> bool:
    """Whether this CPU has AVX-512 that MKL does not use, and PyTorch offers oneDNN's product."""
    cpu_info = Path("/proc/cpuinfo")  # exists on Linux only; other systems keep MKL
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and cpu_info.exists()
        and b"AuthenticAMD" in cpu_info.read_bytes()
    )


def product(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a linear layer computes from float32 (rows, k) in inference, without looking anything up at each call."""
    if type(layer) not in (nn.Linear, _OneDNNLinear):
        return layer.forward
    weight, bias = layer.weight, layer.bias
    min_rows = max(MIN_ROWS, MIN_WORK / weight.numel()) if type(layer) is _OneDNNLinear else math.inf

    def multiply_by_weight(x: torch.Tensor) -> torch.Tensor:
        if len(x) < min_rows:
            return linear(x, weight, bias)
        y = _multiply_padded(x, weight)
        return y if bias is None else y + bias

    return multiply_by_weight


class _OneDNNLinear(nn.Linear):
    """nn.Linear with oneDNN's product; saved, and adapted by LoRA, like any nn.Linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        is_float32 = x.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)
        if not is_float32 or x.device.type != "cpu" or rows < max(MIN_ROWS, MIN_WORK / self.weight.numel()):
            return super().forward(x)
        multiply_2d = _Product.apply if torch.is_grad_enabled() else _multiply_padded
        y = multiply_2d(x.reshape(rows, -1), self.weight).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class _Product(torch.autograd.Function):
    """y = x w^T with x (m, k), w (n, k) and y (m, n); dx = dy w, dw = dy^T x."""

    @staticmethod
    def forward(context, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, w)  # without padding: layers with the same input share it
        return _multiply_padded(x, w)

    @staticmethod
    def backward(context, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, w = context.saved_tensors
        dy_padded = _pad(dy)
        needs_dx, needs_dw = context.needs_input_grad
        dx = multiply(dy_padded, w.t())[: len(dy)] if needs_dx else None
        dw = multiply(dy_padded.t(), _pad(x).t()) if needs_dw else None
        return dx, dw


def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x w^T by oneDNN, for x (m, k) and w (n, k); either can be a transposed view."""
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")


def _multiply_padded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return multiply(_pad(x), w)[: len(x)]


def _pad(x: torch.Tensor) -> torch.Tensor:
    """Append zero rows, up to one of a few sizes, because oneDNN compiles and keeps a kernel for every shape.

    >>> [len(_pad(torch.ones(rows, 1))) for rows in (9, 64, 65, 257, 500, 1000, 1025)]
    [16, 64, 80, 320, 512, 1024, 1152]
    """
    rows = len(x)
    step = 8 if rows < 64 else 16 if rows < 256 else max(64, 2 ** (rows.bit_length() - 4))  # at most an eighth more
    if rows % step == 0:
        return x
    padded = x.new_empty(rows + -rows % step, x.shape[1])
    padded[:rows], padded[rows:] = x, 0
    return padded
