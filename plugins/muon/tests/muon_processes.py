"""Runs scenarios in groups of processes: ``muon_processes.py``, a JSON list a line on its input.

The list is ``[SCENARIO, WORLD_SIZE, DIRECTORY]``. It starts a gloo group of so many processes and
calls the function named SCENARIO with the directory on each. For each list one line comes out: a
JSON string that is empty, or what went wrong. The processes are forked, so that torch is imported
once. Every scenario compares with one process that has the same gradients, bit for bit.
"""

import json
import sys
import time
import traceback
import warnings
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch._dynamo  # The optimizers import it, which takes long.
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.nn.parallel import DistributedDataParallel

from core_plugin_muon import Muon, optimizer, route
from core_plugin_muon.plugin import Params, muon

SECONDS = 100
"""After which a scenario counts as hung."""

# As (outputs, inputs): uneven and even row blocks, ranks without rows, tall, wide and square.
LAYERS = [(65, 48), (48, 96), (64, 64), (1, 32), (3, 7), (2, 40), (40, 4)]


class Layers(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(inputs, outputs) for outputs, inputs in LAYERS])


def two_kinds(model: nn.Module, **options: object) -> Muon:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [
        {"params": matrices[:3], "lr": 0.02},
        {"params": [p for p in model.parameters() if p.ndim != 2], "algorithm": "adamw"},
        {"params": matrices[3:], "lr": 0.01, "ns_steps": 4, "nesterov": False},
    ]
    return Muon(groups, **options)


def set_gradients(model: nn.Module, step: int) -> None:
    """The same global gradients in every process, laid out as the parameters."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements, src_data_rank=None)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(p), q), f"{name} differs from that of one process"


def sharded(seed: int = 0) -> nn.Module:
    model = Layers(seed)
    for layer in model.layers[:3]:
        fully_shard(layer)
    return fully_shard(model)


def fsdp2(directory: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        reference, model = Layers(), sharded()
        run(reference, two_kinds(reference, dtype=dtype), range(4))
        run(model, two_kinds(model, dtype=dtype), range(4))
        assert_same(model, reference)


def fsdp2_computes_once(directory: Path) -> None:
    computed, exchanged = [], []
    orthogonalize, all_to_all = optimizer.orthogonalize, dist.all_to_all_single

    def counted(matrix: torch.Tensor, **options: object) -> torch.Tensor:
        computed.append(tuple(matrix.shape))
        return orthogonalize(matrix, **options)

    def counted_exchange(*args: object, **options: object) -> object:
        exchanged.append(args)
        return all_to_all(*args, **options)

    model = sharded()
    muon = two_kinds(model)
    run(model, muon, range(1))
    optimizer.orthogonalize, dist.all_to_all_single = counted, counted_exchange
    run(model, muon, range(1, 3))
    everywhere: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, computed)
    assert sorted(chain(*everywhere)) == sorted(LAYERS * 2)
    assert len(exchanged) == 4, "two all-to-alls a step"


def ddp(directory: Path) -> None:
    """Backward on the same batch everywhere: two equal gradients average without rounding."""

    def train(model: nn.Module) -> None:
        optimizer = muon(model, Params(lr=0.02))
        inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(5))
        for _ in range(4):
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


def fsdp2_backward(directory: Path) -> None:
    """The entry point on a sharded model, tied and untied, with FSDP2's own gradients."""

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
        optimizer = muon(model, Params(lr=0.01))
        tokens, losses = torch.arange(13), []
        for _ in range(4):
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
    muon = two_kinds(model)
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
    hybrid = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicate", "shard"))
    for mesh, placements in [
        (flat, (Shard(1),)),
        (flat, (Replicate(),)),
        (hybrid, (Replicate(), Shard(0))),
        (hybrid, (Shard(0), Shard(1))),
    ]:
        reference, model = Layers(), Layers()
        for layer in model.layers:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, placements))
        ours, theirs = two_kinds(model), two_kinds(reference)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(model, ours, range(3))
        assert len(caught) == 1, caught
        assert "whole on every rank" in str(caught[0].message)
        run(reference, theirs, range(3))
        assert_same(model, reference)
        if dist.get_rank() == 0:
            model.layers[2].weight.grad = None
        ours.step()


def gradients_laid_out_otherwise(directory: Path) -> None:
    """A gradient that is still a sum over ranks, or whole on each, is brought to the parameter."""
    for placement in (Partial(), Replicate()):
        reference, model = Layers(), sharded()
        ours, theirs = two_kinds(model), two_kinds(reference)
        set_gradients(reference, 0)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            part = q.grad if placement == Replicate() or dist.get_rank() == 0 else 0 * q.grad
            p.grad = DTensor.from_local(part, p.device_mesh, (placement,))
        ours.step()
        theirs.step()
        assert_same(model, reference)


def save(directory: Path) -> None:
    model = sharded()
    muon = two_kinds(model)
    run(model, muon, range(3))
    states = get_state_dict(model, muon)
    assert states[1]["state"]["layers.0.weight"]["momentum_buffer"].placements == (Shard(0),)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=directory / "checkpoint")


def resume(directory: Path) -> None:
    """On any number of ranks the run goes on as one process would have."""
    model = sharded(seed=1)
    muon = two_kinds(model)
    before = [p.to_local().clone() for p in model.parameters()]
    states = get_state_dict(model, muon)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), old), "making a template must not train"
    loaded = {"model": states[0], "optimizer": states[1]}
    dcp.load(loaded, checkpoint_id=directory / "checkpoint")
    set_state_dict(
        model, muon, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    reference = Layers()
    other = two_kinds(reference)
    run(reference, other, range(3))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert sorted(muon.state[p]) == sorted(other.state[q])
        for key, value in muon.state[p].items():
            assert torch.equal(whole(value), other.state[q][key]), key
    run(model, muon, range(3, 5))
    run(reference, other, range(3, 5))
    assert_same(model, reference)


def process(rank: int, scenario: str, world_size: int, directory: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/{scenario}-{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    globals()[scenario](directory)
    dist.barrier()
    dist.destroy_process_group()


def launch(scenario: str, world_size: int, directory: str) -> None:
    group = mp.start_processes(
        process,
        (scenario, world_size, Path(directory)),
        world_size,
        join=False,
        start_method="fork",
    )
    deadline = time.monotonic() + SECONDS
    while not group.join(timeout=1):
        if time.monotonic() > deadline:
            for member in group.processes:
                member.kill()
            raise TimeoutError(f"{scenario} did not end in {SECONDS} s")


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            launch(*json.loads(line))
            fault = ""
        except Exception:
            fault = traceback.format_exc()
        print(json.dumps(fault), flush=True)
