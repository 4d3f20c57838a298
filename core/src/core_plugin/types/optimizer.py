"""Optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from core_plugin.plugin import BasePlugin

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def optimizer(model: nn.Module, params: Any) -> Optimizer:  # type: ignore[empty-body]
    """Make the optimizer of a model that is already sharded and on its device.

    It holds every parameter that is trained, each in one group; its state is made in ``step``, as
    tensors of the parameter's shape (then laid out as the parameter is) or as small ones that are
    equal on all ranks. What does not fit the model is a ``ValueError``, and is told with its place
    in the configuration.

    It may have a method ``describe_parameters()``, which returns a list of mappings from titles to
    values, one for each parameter: what it does with that parameter, and why. ``train --dry-run``
    prints them as a table, whatever the titles are.
    """


class OptimizerPlugin(BasePlugin, contract=optimizer):
    """The type of optimizers: functions ``(model, params) -> Optimizer``."""
