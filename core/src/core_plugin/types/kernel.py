"""Kernels: faster or other implementations of a model's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from core_plugin.plugin import BasePlugin

if TYPE_CHECKING:
    from torch import nn


def kernel(model: nn.Module, params: Any) -> nn.Module:  # type: ignore[empty-body]
    """Put the kernel into a model that is on ``meta``, before adapters and sharding.

    Returns:
        The model, changed in place; parameters keep their names.
    """


class KernelPlugin(BasePlugin, contract=kernel):
    """The type of kernels: functions ``(model, params) -> model``."""
