"""How long a step takes: measured in seconds, on the run's device, with the first layers of a model of random weights.

With one layer and with two, a completion is sampled and trained on, at the run's own sizes; what the second layer adds
is what each of the others will. All completions are taken to use their budget, so a step is seldom slower.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch

from common.fast.matmul import use_fast_products
from common.policy import Policy
from common.sampling import sample

from common.plumbing.adapters import add_adapter
from common.plumbing.config import DTYPES, PolicyConfig
from common.plumbing.estimate.memory import Setting
from common.plumbing.estimate.shape import Shape

TOKENS = 4  # sampled for the measurement
LONG = 1.0  # seconds after which a call is not repeated
MOST_TOKENS = {"cpu": 1024}  # that a forward pass of it runs, elsewhere a micro-batch


@dataclass(frozen=True)
class Seconds:
    """Of a step, by phase."""

    sampling: float
    log_probs: float
    update: float

    @property
    def total(self) -> float:
        return self.sampling + self.log_probs + self.update


def measure(config: PolicyConfig, shape: Shape, setting: Setting) -> Seconds:
    """The seconds of one step in one process.

    Raises:
        RuntimeError: there is no memory for two layers of the model.
    """
    one, two = (_measure_layers(config, shape, setting, num_layers) for num_layers in (1, 2))
    decode, forward, backward, step = (
        first + (shape.layers - 1) * max(0.0, second - first) for first, second in zip(one, two, strict=True)
    )
    epochs, rows = getattr(config, "epochs_per_step", 1), setting.rows
    at_once = min(rows, max(setting.generation_batch_size, setting.group_size))
    rounds = ceil(rows / at_once) * setting.completion if _samples(setting) else 0
    scored = setting.kl_weight > 0  # by the reference
    updates = epochs * ceil(rows / (getattr(config, "minibatch_size", None) or rows))
    scored += updates > 1 and setting.autocast  # by the policy as it was
    return Seconds(rounds * decode, scored * rows * forward, epochs * rows * backward + updates * step)


def _measure_layers(
    config: PolicyConfig, shape: Shape, setting: Setting, num_layers: int
) -> tuple[float, float, float, float]:
    """Seconds of a decode step of a batch; of a row's forward pass, alone and with backward; of the optimizer."""
    frozen = DTYPES[config.dtype] if setting.rank else torch.float32
    with torch.random.fork_rng(), torch.device(config.device):
        torch.manual_seed(0)
        model = shape.build(num_layers, frozen)
        model = add_adapter(model, setting.rank) if setting.rank else model
    use_fast_products(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(model, None, [], 0, 1.0, DTYPES[config.dtype], config.gradient_checkpointing).to(config.device)
    optimizer = torch.optim.AdamW([weight for weight in policy.parameters() if weight.requires_grad], lr=0.0)
    prompt, length = max(1, setting.prompt), setting.prompt + setting.completion
    rows = min(setting.micro_batch_size, setting.group_size)
    if config.device in MOST_TOKENS:
        rows = max(1, min(rows, MOST_TOKENS[config.device] // length))
    sequences = torch.ones(rows, max(2, length), dtype=torch.long, device=config.device)
    mask = torch.ones_like(sequences[:, 1:])
    mask[:, : prompt - 1] = 0

    def forward() -> None:
        with torch.no_grad():
            policy(sequences, mask)

    def backward() -> None:
        optimizer.zero_grad()
        policy(sequences, mask).log_probs.sum().backward()

    decode = _decode(policy, setting) if _samples(setting) else 0.0
    return (
        decode,
        _fastest(forward, config.device) / rows,
        _fastest(backward, config.device) / rows,
        _fastest(optimizer.step, config.device),
    )


def _samples(setting: Setting) -> bool:
    """Whether a step does, by itself."""
    return setting.group_size > 1 and setting.generation_batch_size > 0


def _decode(policy: Policy, setting: Setting) -> float:
    """One token for every row of a batch that is half done."""
    rows = min(setting.rows, max(setting.generation_batch_size, setting.group_size))
    prompt = [1] * (setting.prompt + setting.completion // 2)

    def tokens(number: int) -> Callable[[], object]:
        return lambda: sample(policy, [prompt], rows, max_new_tokens=number, key=(0, 0))

    few, more = (_fastest(tokens(number), str(policy.device)) for number in (1, 1 + TOKENS))
    return max(0.0, more - few) / TOKENS


def _fastest(action: Callable[[], object], device: str) -> float:
    """The seconds of a call. A short one is repeated: the first may compile, and any can be disturbed."""
    seconds: list[float] = []
    while len(seconds) < 4 and sum(seconds) < LONG:
        _wait(device)
        start = time.perf_counter()
        action()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
