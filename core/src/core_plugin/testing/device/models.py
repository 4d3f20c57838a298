"""The network and the batch of the distributed cases, and what one process makes of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from core_plugin import state, tensors
from core_plugin.testing.device.subject import Subject

RANKS = 2
MAX_NORM = 0.2
"""Less than the gradients' norm, so that clipping changes them."""

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the input and what the block makes of it, (batch, sequence, 6)."""
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Network(nn.Module):
    """Two blocks between an embedding and a head; no number of ranks divides its 7 rows."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, depth: int = 2) -> Tensor:
        """Logits, (batch, sequence, 7), with as many blocks as asked for."""
        x = self.embedding(ids)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def network(*, tied: bool = False, frozen: bool = False) -> Network:
    """The network on the CPU, with the same values in every process.

    Args:
        tied: Whether the head has the embedding's weight.
        frozen: Whether the first block is frozen.
    """
    model = Network(tied=tied)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    model.blocks[0].requires_grad_(not frozen)
    return model


def sharded(
    model: Network,
    subject: Subject,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Network:
    """The model with its blocks and the rest of it sharded, over all ranks unless told otherwise.

    Gradients are averaged in the collective if the device declares that it can.
    """
    mesh = mesh or init_device_mesh(device.type, (RANKS,))
    if not any(p.is_meta for p in model.parameters()):
        model.to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if not subject.capabilities.average_in_collectives:
        sum_in_collectives(model)
    return model


def sum_in_collectives(model: nn.Module) -> None:
    """Let gradients be summed and divided; torch's switch is for one module without its parts."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def batch(rank: int | None = None) -> Batch:
    """Token ids and labels on the CPU: a rank's share, (2, 5), or that of all ranks."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, 7, (2 * RANKS, 5), generator=generator) for _ in range(2))
    if rank is None:
        return ids, labels
    return ids.chunk(RANKS)[rank], labels.chunk(RANKS)[rank]


def loss(model: nn.Module, share: Batch, device: torch.device, depth: int = 2) -> Tensor:
    """The mean cross entropy of a batch, which is moved to the device."""
    ids, labels = (t.to(device) for t in share)
    logits = model(ids, depth).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, labels.flatten())


def adamw(model: nn.Module) -> AdamW:
    """The optimizer of all cases."""
    # A larger eps than usual, since Adam blows the rounding errors of tiny gradients up.
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, eps=1e-3)


@dataclass
class Trained:
    """What some steps gave, whole and on the CPU."""

    norms: list[Tensor]
    """The gradients' norm in each step, before clipping."""
    gradients: dict[str, Tensor]
    """Those of the last step, after clipping; Adam alone would not see by how much they differ."""
    parameters: dict[str, Tensor]


def train(model: nn.Module, share: Batch, device: torch.device, steps: int = 3) -> Trained:
    """Train with gradient clipping."""
    optimizer = adamw(model)
    norms = [step(model, optimizer, share, device) for _ in range(steps)]
    return Trained(norms, gradients(model), parameters(model))


def step(model: nn.Module, optimizer: Optimizer, share: Batch, device: torch.device) -> Tensor:
    """Train for one step; the norm before clipping is given back, on the CPU."""
    optimizer.zero_grad()
    loss(model, share, device).backward()
    norm = state.clip_grad_norm(model.parameters(), MAX_NORM)
    optimizer.step()
    return norm.cpu()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, whole and on the CPU; collective if they are sharded."""
    return {n: tensors.gather(p.grad).cpu().clone() for n, p in _named(model) if p.grad is not None}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, whole and on the CPU; collective if they are sharded."""
    return {n: tensors.gather(p.detach()).cpu().clone() for n, p in _named(model)}


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    return [(tensors.canonical_name(name), p) for name, p in unwrapped.named_parameters()]


@functools.cache
def reference(*, tied: bool = False, frozen: bool = False) -> Trained:
    """What one process makes of the whole batch, on the CPU."""
    return train(network(tied=tied, frozen=frozen), batch(), torch.device("cpu"))


@functools.cache
def whole_gradients() -> dict[str, Tensor]:
    """The gradients of the whole batch in one process, on the CPU, not clipped."""
    model = network()
    loss(model, batch(), torch.device("cpu")).backward()
    return gradients(model)


def assert_trained_alike(actual: Trained, expected: Trained) -> None:
    """Check norms, gradients and parameters.

    Raises:
        AssertionError: They differ by more than rounding.
    """
    assert_close(_by_step(actual.norms), _by_step(expected.norms))
    assert_close(actual.gradients, expected.gradients)
    assert_close(actual.parameters, expected.parameters)


def _by_step(norms: list[Tensor]) -> dict[str, Tensor]:
    return {f"the gradients' norm in step {number}": norm for number, norm in enumerate(norms)}


def assert_close(actual: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> None:
    """Check tensors by name, with room for another order of summation.

    Raises:
        AssertionError: They differ by more than rounding.
    """
    assert actual.keys() == expected.keys(), f"{[*actual]} instead of {[*expected]}"
    for name, tensor in expected.items():
        say = f"{name}: {{}}".format
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-5, msg=say)
