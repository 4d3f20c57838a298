"""The learning-rate schedules ``constant``, ``linear``, ``cosine`` and ``wsd``.

Each is a closed form of the step, so that nothing but the step has to be kept. The rate of step
``k`` (from 0) is the optimizer group's own, times a factor: ``(k + 1) / warmup_steps`` during the
warm-up, 1 at its last step (or at step 0 if there is none), and ``min_ratio`` at the last step.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from core_plugin.params import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


@dataclasses.dataclass(frozen=True)
class ConstantParams:
    """The parameters of a constant rate.

    Attributes:
        warmup_steps: Steps over which the rate grows from zero to its peak, at least 0.
    """

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        require(
            (self.warmup_steps >= 0, f"warmup_steps must be at least 0, got {self.warmup_steps}")
        )

    def faults(self, run: Any) -> Iterable[str]:
        """What does not fit the rest of the run's configuration."""
        if self.warmup_steps > run.train.steps:
            yield (
                f"warmup_steps ({self.warmup_steps}) is more than train.steps ({run.train.steps})"
            )


@dataclasses.dataclass(frozen=True)
class LinearParams(ConstantParams):
    """The parameters of a decaying rate.

    Attributes:
        warmup_steps: Steps over which the rate grows from zero to its peak, at least 0.
        min_ratio: Rate of the last step, as a fraction of the peak, in [0, 1].
    """

    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require((0 <= self.min_ratio <= 1, f"min_ratio must be in [0, 1], got {self.min_ratio}"))


@dataclasses.dataclass(frozen=True)
class CosineParams(LinearParams):
    """The parameters of a decaying rate.

    Attributes:
        warmup_steps: Steps over which the rate grows from zero to its peak, at least 0.
        min_ratio: Rate of the last step, as a fraction of the peak, in [0, 1].
    """

    min_ratio: float = 0.1


@dataclasses.dataclass(frozen=True)
class WSDParams(LinearParams):
    """The parameters of a rate that grows, stays and decays.

    Attributes:
        warmup_steps: Steps over which the rate grows from zero to its peak, at least 0.
        min_ratio: Rate of the last step, as a fraction of the peak, in [0, 1].
        decay_steps: Steps at the end over which the rate decays, at least 1; None for a tenth of
            the run, rounded up.
    """

    decay_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (
                self.decay_steps is None or self.decay_steps >= 1,
                f"decay_steps must be at least 1, got {self.decay_steps}",
            )
        )

    def faults(self, run: Any) -> Iterable[str]:
        """What does not fit the rest of the run's configuration."""
        total = self.warmup_steps + (self.decay_steps or 0)
        if total > run.train.steps:
            yield (
                f"warmup_steps ({self.warmup_steps}) and decay_steps ({self.decay_steps}) "
                f"together are more than train.steps ({run.train.steps})"
            )


def constant(optimizer: Optimizer, params: ConstantParams, *, steps: int) -> LRScheduler:
    """The peak rate from the end of the warm-up on."""
    return _schedule(optimizer, params, steps, lambda *_: 1.0)


def linear(optimizer: Optimizer, params: LinearParams, *, steps: int) -> LRScheduler:
    """A straight line from the peak to ``min_ratio``."""
    return _schedule(
        optimizer, params, steps, lambda since, total: _line(since / total, params.min_ratio)
    )


def cosine(optimizer: Optimizer, params: CosineParams, *, steps: int) -> LRScheduler:
    """Half a cosine from the peak to ``min_ratio`` (arXiv:1608.03983, without restarts)."""

    def decay(since: int, total: int) -> float:
        return _line((1 - math.cos(math.pi * since / total)) / 2, params.min_ratio)

    return _schedule(optimizer, params, steps, decay)


def wsd(optimizer: Optimizer, params: WSDParams, *, steps: int) -> LRScheduler:
    """Warm-up, stable, decay (arXiv:2404.06395), with a straight line for the decay."""

    def decay(since: int, total: int) -> float:
        length = min(params.decay_steps or math.ceil(steps / 10), total)
        return _line(max(since - (total - length), 0) / length, params.min_ratio)

    return _schedule(optimizer, params, steps, decay)


def _schedule(
    optimizer: Optimizer, params: ConstantParams, steps: int, decay: Callable[[int, int], float]
) -> LRScheduler:
    """The warm-up, then ``decay(steps since the peak, steps from the peak to the last one)``."""
    from torch.optim.lr_scheduler import LambdaLR

    peak = max(params.warmup_steps - 1, 0)
    total = steps - 1 - peak

    def factor(step: int) -> float:
        if step < params.warmup_steps:
            return (step + 1) / params.warmup_steps
        return decay(min(step - peak, total), total) if total > 0 else 1.0

    return LambdaLR(optimizer, factor)


def _line(progress: float, end: float) -> float:
    """From 1 at progress 0 to ``end`` at 1, both exactly."""
    return end + (1 - end) * (1 - progress)
