"""The optimizers ``adamw`` and ``sgd``."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from core_plugin import privateuse1
from core_plugin.errors import ConfigError
from core_plugin.params import require

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Where torch itself has the fused step; another device declares it."""


@dataclasses.dataclass(frozen=True)
class AdamWParams:
    """The parameters of AdamW.

    Attributes:
        lr: Peak learning rate, above 0.
        betas: Decay of the means of the gradient and of its square, per step, each in [0, 1).
        eps: Added to the root of the mean square, above 0.
        weight_decay: Decoupled decay, as a fraction of ``lr`` per step, at least 0; of matrices
            alone, not of biases and norms.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        require(
            (0 < self.lr < math.inf, f"lr must be above 0, got {self.lr}"),
            (
                all(0 <= beta < 1 for beta in self.betas),
                f"betas must be in [0, 1), got {self.betas[0]} and {self.betas[1]}",
            ),
            (0 < self.eps < math.inf, f"eps must be above 0, got {self.eps}"),
            (
                0 <= self.weight_decay < math.inf,
                f"weight_decay must be at least 0, got {self.weight_decay}",
            ),
        )


@dataclasses.dataclass(frozen=True)
class SGDParams:
    """The parameters of stochastic gradient descent.

    Attributes:
        lr: Peak learning rate, above 0.
        momentum: Decay of the sum of gradients, per step, in [0, 1).
        nesterov: Nesterov's form of the momentum, which must then be above 0.
        weight_decay: Factor of the weights that is added to the gradients, at least 0; of
            matrices alone, not of biases and norms.
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(
            (0 < self.lr < math.inf, f"lr must be above 0, got {self.lr}"),
            (0 <= self.momentum < 1, f"momentum must be in [0, 1), got {self.momentum}"),
            (
                not self.nesterov or self.momentum != 0,
                f"nesterov needs a momentum above 0, got momentum {self.momentum}",
            ),
            (
                0 <= self.weight_decay < math.inf,
                f"weight_decay must be at least 0, got {self.weight_decay}",
            ),
        )


def adamw(model: nn.Module, params: AdamWParams) -> Optimizer:
    """Adam with decoupled weight decay (arXiv:1711.05101).

    Raises:
        ConfigError: The model has no parameter that is trained.
    """
    import torch

    trained = _trained(model)
    uniform = _uniform(trained)
    fused = uniform and all(_has_fused(p.device.type) for p in trained)
    return torch.optim.AdamW(
        _groups(trained, params.weight_decay),
        lr=params.lr,
        betas=params.betas,
        eps=params.eps,
        fused=fused,
        foreach=uniform and not fused,
    )


def _has_fused(device_type: str) -> bool:
    registered = privateuse1.registered()
    declared = registered and registered.backend.capabilities.fused_optimizers
    is_registered = registered and registered.backend.name == device_type
    return device_type in FUSED_DEVICES or bool(is_registered and declared)


def sgd(model: nn.Module, params: SGDParams) -> Optimizer:
    """Stochastic gradient descent.

    Raises:
        ConfigError: The model has no parameter that is trained.
    """
    import torch

    trained = _trained(model)
    return torch.optim.SGD(
        _groups(trained, params.weight_decay),
        lr=params.lr,
        momentum=params.momentum,
        nesterov=params.nesterov,
        foreach=_uniform(trained),  # the fused step cannot take sharded parameters
    )


def _trained(model: nn.Module) -> list[nn.Parameter]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("optimizer: the model has no parameter that is trained; all are frozen")
    return trained


def _groups(trained: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """The matrices, decayed, and the rest, not."""
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _uniform(trained: list[nn.Parameter]) -> bool:
    """Whether one call can step them all: many-tensor operations mix no sharded and whole ones."""
    return len({type(p) for p in trained}) == 1
