"""DP-SGD step by step: noise from a chosen source, and as much of it as a target needs.

Clipping is done by Opacus; noise and batches are drawn here, because PyTorch's generator
starts from 32 bits, few enough to be tried out one by one.
"""

import math
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np

from clients.opacus_checks import OWNER, record_gradients
from clients.torch_training import BatchLoss, logits_of
from fl_strategies.exceptions import MissingExtra, require
from fl_strategies.privacy.bounds.gaussian import gaussian_mu
from fl_strategies.privacy.bounds.pld import dpsgd_epsilon
from fl_strategies.privacy.events import DPSGDEvent
from fl_strategies.privacy.secure import GRID, continuous_gaussian, random_words

try:
    import torch
    from opacus.optimizers import DPOptimizer
    from torch import Tensor
except ImportError as error:
    raise MissingExtra("DPTorchLearner", "opacus", "opacus") from error

Source: TypeAlias = np.random.Generator | None  # None: the operating system

# Gradients of single records held at once, in numbers: 64 MB.
GRADIENTS_PER_PASS: Final = 1 << 24
# Below this, noise protects nobody and its accounting takes minutes.
LEAST_NOISE: Final = 0.3
MOST_NOISE: Final = 1e6
# Where in PyTorch's saved generator the 624 words of the Mersenne twister are.
_TWISTER: Final = slice(24, 24 + 624 * 8)


def hide_generators(device: torch.device) -> None:
    """Let nobody know what PyTorch's generators will draw; an accelerator's takes 64 bits."""
    if device.type != "cpu":
        torch.manual_seed(int(random_words(1)[0] >> np.uint64(1)))
    torch.default_generator.set_state(unpredictable_state())


def drawn_rows(event: DPSGDEvent, source: Source) -> Tensor:
    """Return which records a step takes, each by a draw of its own, (records,) of bool."""
    uniform = (random_words(event.records, source) >> np.uint64(11)) * 2.0**-53
    return torch.from_numpy(uniform < event.batch_size / event.records)


def unpredictable_state() -> Tensor:
    """Return a state for PyTorch's generator that no seed of 32 bits leads to."""
    state = torch.Generator().get_state()
    words = random_words(312).view(np.uint32).astype(np.uint64)
    state[_TWISTER] = torch.from_numpy(words.view(np.uint8))
    return state


class NoisyOptimizer(DPOptimizer):  # type: ignore[misc] # Opacus has no types
    """Opacus' clipping, with noise from a chosen source."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, source: Source, event: DPSGDEvent, norm: float
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=event.noise_multiplier,
            max_grad_norm=norm,
            expected_batch_size=event.batch_size,
        )
        self.source = source

    def clip_and_accumulate(self) -> None:
        """Add the clipped gradients of a batch to the sum."""
        for parameter in self.params:
            # A record that overflows would turn the sum, and so every parameter, into NaN.
            parameter.grad_sample.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        """Add noise to the sum, both in whole units, so that no low bits tell them apart."""
        deviation = self.noise_multiplier * self.max_grad_norm
        unit = min(deviation, self.max_grad_norm) / GRID
        for parameter in self.params:
            noise = continuous_gaussian(parameter.numel(), self.source) * (deviation / unit)
            # On the processor, because not every device has float64.
            total = (parameter.summed_grad.cpu().double() / unit).round()
            total += torch.from_numpy(noise).round().view_as(parameter)
            parameter.grad = (total * unit).to(parameter.dtype).to(parameter.device)


def noisy_step(
    model: Any, optimizer: NoisyOptimizer, loss: BatchLoss, rows: Tensor, targets: Tensor
) -> None:
    """Take one noisy step on a batch (b, ...), in as many passes as memory asks for."""
    size = max(1, GRADIENTS_PER_PASS // sum(p.numel() for p in optimizer.params))
    for start in range(0, max(1, len(rows)), size):
        some = slice(start, start + size)
        optimizer.zero_grad()
        optimizer.signal_skip_step(do_skip=start + size < len(rows))
        if len(rows):
            scores = logits_of(model(rows[some]))
            record_gradients(loss(scores, targets[some], scores.new_ones(len(scores))))
        else:  # not every layer takes no rows, and the noise is due all the same
            for parameter in optimizer.params:
                parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)
        optimizer.step()


@lru_cache(maxsize=1024)
def calibrated_noise(
    records: int, batch_size: int, steps: int, *, target_epsilon: float, delta: float
) -> float:
    """Return a noise multiplier with which DP-SGD spends at most `target_epsilon`.

    Spends more than 0.95 of the target, unless even the least noise, 0.3, spends less.

    Examples
    --------
    >>> noise = calibrated_noise(300, 32, 400, target_epsilon=4.572, delta=1e-4)
    >>> 2.0 <= noise < 2.1
    True
    """
    # What the central limit theorem says about many steps, as a place to start.
    growth = (gaussian_mu(target_epsilon, delta) * records / batch_size) ** 2 / steps
    noise = min(max(1 / math.sqrt(math.log1p(growth)), LEAST_NOISE), MOST_NOISE)
    low, high, rule = 0.0, math.inf, f"in reach of a noise_multiplier of {MOST_NOISE:g}"
    while high - low > 1e-3 * low:
        share = dpsgd_epsilon(records, batch_size, steps, noise, delta) / target_epsilon
        low, high = (noise, high) if share > 1 else (low, noise)
        if 0.96 < share <= 1 or high == LEAST_NOISE:
            break
        require(low < MOST_NOISE, OWNER, "target_epsilon", rule, target_epsilon)
        # Epsilon falls somewhat faster than the noise grows.
        noise *= (max(share, 1e-9) / 0.98) ** (1 / 1.5)
        noise = noise if low < noise < high else (low + high) / 2
        noise = min(max(noise, LEAST_NOISE), MOST_NOISE)
    return high
