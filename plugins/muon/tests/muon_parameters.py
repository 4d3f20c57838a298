"""Parameters in one process, their gradients, and an optimizer of both kinds."""

from collections.abc import Sequence

import torch
from torch import nn

from core_plugin_muon import Muon

SHAPES = [(16, 16), (8, 24), (24, 8), (3, 5)]


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def vectors(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator)) for s in [(7,), (5, 3), (2, 3, 4)]]


def set_gradients(params: Sequence[nn.Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * factor).to(p.dtype)


def run(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def assert_same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def mixed(seed: int = 0, **options: object) -> tuple[Muon, list[nn.Parameter]]:
    matrices, rest = parameters(seed), vectors(seed)
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 0.001}]
    return Muon(groups, lr=0.02, **options), matrices + rest
