"""The factors of an update, and how new ones are filled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from core_plugin.adapters.layer import TensorOptions

if TYPE_CHECKING:
    from core_plugin_lora.plugin import LoRAParams

INITS: tuple[Any, ...] = (True, False, "gaussian", "eva")
"""The initialisations that need neither the base's weight nor that it is a matrix."""


class Factor(nn.Module):
    """A factor: ``weight``, and, for one that maps to the outputs, a ``bias`` of zeros if wanted.

    Args:
        shape: The weight's.
        initialize: What fills it.
        options: The device and dtype.
        bias: How many biases.
    """

    is_adapter = True

    def __init__(
        self,
        shape: Sequence[int],
        initialize: Callable[[Tensor], object],
        options: TensorOptions,
        bias: int | None = None,
    ) -> None:
        super().__init__()
        self.initialize = initialize
        self.weight = nn.Parameter(torch.empty(*shape, **options))
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill it as a new one."""
        if self.weight.is_meta:
            return
        with torch.no_grad():
            self.initialize(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def by_adapter() -> dict[str, Factor]:
    """An ``nn.ModuleDict`` for one factor of each adapter."""
    return cast("dict[str, Factor]", nn.ModuleDict())


def initial_down(params: LoRAParams) -> Callable[[Tensor], object]:
    """What fills A: uniform in ±1/√inputs, or normal with the deviation 1/r."""
    if params.init_lora_weights == "gaussian":
        return functools.partial(nn.init.normal_, std=1 / params.r)
    return functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5))


def initial_up(params: LoRAParams) -> Callable[[Tensor], object]:
    """What fills B: zeros, so that a new adapter changes nothing, or what fills A."""
    return nn.init.zeros_ if params.init_lora_weights else initial_down(params)


def init_fault(params: LoRAParams, layer: str) -> str | None:
    """Why a layer cannot be initialised as wanted, or None."""
    if params.init_lora_weights in INITS:
        return None
    return f"init_lora_weights={params.init_lora_weights!r} is not for {layer}"
