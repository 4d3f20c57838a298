"""The layers of torch that a method may have adapter layers for, each alone in a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 12
HEADS = 3
"""An odd number, with which torch's attention computes alike in training and in evaluation."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers from a normal distribution, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def token_ids(rows: int, *shape: int, seed: int = 0) -> Tensor:
    """Numbers of an embedding's rows, always the same."""
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(seed))


class Experts(nn.Module):
    """The mean of linear maps that are stacked in one parameter, ``weight [experts, out, in]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """From ``[..., in]`` to ``[..., out]``."""
        return torch.stack([F.linear(x, weight) for weight in self.weight]).mean(dim=0)


class DerivedLinear(nn.Linear):
    """A type whose adapter layer is that of the type it derives from."""


class Alone(nn.Module):
    """A model that is one layer, called ``layer``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.attends = isinstance(layer, nn.MultiheadAttention)

    def forward(self, x: Tensor) -> Tensor:
        """What the layer makes of the input; attention attends to its own."""
        if self.attends:
            return self.layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]
        return self.layer(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Base:
    """A layer of a model, and what it can be called with."""

    layer_type: str
    """The name in ``torch.nn`` of the type that its adapter layer is for."""
    make: Callable[[], nn.Module]
    input: Callable[[], Tensor]

    @property
    def takes_numbers(self) -> bool:
        """Whether the input is token ids."""
        return self.layer_type == "Embedding"


BASES = {
    "linear": Base("Linear", lambda: nn.Linear(8, 12), lambda: normal(2, 3, 8)),
    "linear_without_bias": Base(
        "Linear", lambda: nn.Linear(8, 12, bias=False), lambda: normal(2, 3, 8)
    ),
    "linear_of_a_derived_type": Base("Linear", lambda: DerivedLinear(8, 8), lambda: normal(4, 8)),
    "embedding": Base("Embedding", lambda: nn.Embedding(11, 8), lambda: token_ids(11, 2, 5)),
    "conv1d": Base("Conv1d", lambda: nn.Conv1d(8, 12, 3), lambda: normal(2, 8, 6)),
    "conv1d_that_wraps_around": Base(
        "Conv1d",
        lambda: nn.Conv1d(8, 8, 3, stride=2, padding=2, dilation=2, padding_mode="circular"),
        lambda: normal(2, 8, 7),
    ),
    "conv2d": Base("Conv2d", lambda: nn.Conv2d(8, 12, 2), lambda: normal(2, 8, 4, 3)),
    "conv2d_in_groups": Base(
        "Conv2d",
        lambda: nn.Conv2d(8, 16, 2, groups=2, padding=1, bias=False),
        lambda: normal(2, 8, 3, 3),
    ),
    "conv3d": Base("Conv3d", lambda: nn.Conv3d(8, 8, 2), lambda: normal(2, 8, 3, 2, 2)),
    "attention": Base(
        "MultiheadAttention",
        lambda: nn.MultiheadAttention(12, HEADS, batch_first=True),
        lambda: normal(2, 5, 12),
    ),
    "parameter": Base("Parameter", lambda: Experts(8, 12), lambda: normal(2, 3, 8)),
}
"""The layers by what cases call them."""

EACH_BASE = pytest.mark.parametrize(
    "base", [pytest.param(n, marks=pytest.mark.only(b.layer_type)) for n, b in BASES.items()]
)
"""A case with it runs for each of them that the method has a layer for."""
