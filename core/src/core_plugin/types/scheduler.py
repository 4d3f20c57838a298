"""Learning-rate schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from core_plugin.plugin import BasePlugin

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


def scheduler(  # type: ignore[empty-body]
    optimizer: Optimizer, params: Any, *, steps: int
) -> LRScheduler:
    """Make the scheduler of an optimizer; it is stepped once after each optimizer step.

    Args:
        optimizer: The optimizer, whose groups hold the peak learning rates.
        params: The implementation's ``Params``.
        steps: The number of optimizer steps in the whole run.
    """


class SchedulerPlugin(BasePlugin, contract=scheduler):
    """The type of learning-rate schedules: functions ``(optimizer, params, *, steps)``."""
