"""Scenarios of real ranks: every layout trains bit for bit as one process with its gradients."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from muon_model import (
    OPTIONS,
    Parts,
    assert_same,
    assert_trains_alike,
    in_groups,
    laid_out,
    run,
    set_gradients,
    sharded,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from core_plugin_muon import Muon, route
from core_plugin_muon.options import Rule


def fsdp2(directory: Path) -> None:
    for options in OPTIONS:
        assert_trains_alike(sharded(), **options)


def hybrid(directory: Path) -> None:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    for options in OPTIONS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no slow way
            assert_trains_alike(sharded(mesh=mesh), **options)


def in_common(directory: Path) -> None:
    """Plain parameters that all ranks hold, and DTensors that are replicated."""
    world = dist.group.WORLD
    for options in OPTIONS:
        reference, model = Parts(), Parts()
        run(reference, in_groups(reference, **options), range(3))
        run(model, in_groups(model, process_group=world, **options), range(3))
        assert_same(model, reference)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert_trains_alike(laid_out(mesh, (Replicate(),)))


def ddp(directory: Path) -> None:
    """Backward on the same batch everywhere: two equal gradients average without rounding."""

    def train(model: nn.Module) -> None:
        optimizer = Muon.for_model(model, lr=0.02)
        inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(5))
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 9))

    reference, model = network(), DistributedDataParallel(network())
    train(reference)
    train(model)
    assert_same(model, reference)


def ignored_by_ddp(directory: Path) -> None:
    """What DDP leaves to each rank is refused, unless each rank is to compute everything."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 9))
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, ["0.weight", "0.bias"])
        return model

    model = DistributedDataParallel(network())
    with pytest.raises(ValueError, match=r"DistributedDataParallel ignores 0\.weight, .*by a rule"):
        Muon.for_model(model, [Rule("2.weight", "muon")])
    Muon.for_model(model, [Rule("2.weight", "muon"), Rule("0.weight", "adamw")])
    reference = network()
    alone = Muon.for_model(model, [Rule("2.weight", "muon")], process_group=None)
    other = Muon.for_model(reference, [Rule("2.weight", "muon")])
    for optimizer, trained in ((alone, model.module), (other, reference)):
        set_gradients(trained, dist.get_rank())
        optimizer.step()
    assert_same(model.module, reference)


def fsdp2_backward(directory: Path) -> None:
    """A sharded model, tied and untied, with FSDP2's own gradients."""

    class Tiny(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tokens = nn.Embedding(13, 6)
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
            self.head = nn.Linear(6, 13, bias=False)
            if tied:
                self.head.weight = self.tokens.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens)
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return self.head(x)

    def train(model: nn.Module) -> list[float]:
        optimizer = Muon.for_model(model, lr=0.01)
        tokens, losses = torch.arange(13), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    for tied in (False, True):
        reference, model = Tiny(tied), Tiny(tied)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert route(model) == route(reference)
        assert train(model) == train(reference)
        assert_same(model, reference)


def missing_gradients(directory: Path) -> None:
    """A rank without a gradient neither stops the others nor changes its own part."""
    rank = dist.get_rank()
    model = sharded()
    muon = in_groups(model)
    first, second = model.layers[0].weight, model.layers[1].weight
    set_gradients(model, 0)
    if rank == 1:
        first.grad = None
    second.grad = None
    before = [p.to_local().clone() for p in (first, second)]
    muon.step()
    assert torch.equal(first.to_local(), before[0]) == (rank == 1)
    assert torch.equal(second.to_local(), before[1])
    buffer = muon.state[first]["momentum_buffer"].to_local()
    assert buffer.any().item() == (rank != 1)
    keys = [sorted(muon.state[p]) for p in model.parameters()]
    everywhere: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, keys)
    assert everywhere == [keys] * dist.get_world_size()
    assert all(keys)


def other_layouts(directory: Path) -> None:
    ranks = dist.get_world_size()
    flat = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (2, ranks // 2))
    for mesh, placements in [(flat, (Shard(1),)), (square, (Shard(0), Shard(1)))]:
        model = laid_out(mesh, placements)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_trains_alike(model)
        assert len(caught) == 1, caught
        assert "whole on every rank" in str(caught[0].message)
        if dist.get_rank() == 0:
            model.layers[2].weight.grad = None
        in_groups(model).step()


def gradients_laid_out_otherwise(directory: Path) -> None:
    """A gradient that is still a sum over ranks, or whole on each, is brought to the parameter."""
    for placement in (Partial(), Replicate()):
        reference, model = Parts(), sharded()
        ours, theirs = in_groups(model), in_groups(reference)
        set_gradients(reference, 0)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            part = q.grad if placement == Replicate() or dist.get_rank() == 0 else 0 * q.grad
            p.grad = DTensor.from_local(part, p.device_mesh, (placement,))
        ours.step()
        theirs.step()
        assert_same(model, reference)
