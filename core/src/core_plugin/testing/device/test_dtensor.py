"""Device meshes, and tensors that are spread over them."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from core_plugin.testing.device.comparison import leaf, normal
from core_plugin.testing.device.models import RANKS
from core_plugin.testing.device.subject import Subject

pytestmark = [pytest.mark.level(3), pytest.mark.ranks(RANKS)]


def _mesh(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (RANKS,))


def _spread(whole: Tensor, device: torch.device, placement: Placement) -> DTensor:
    """A tensor of the CPU on the device of all ranks."""
    return distribute_tensor(whole.to(device), _mesh(device), [placement])


def _whole(tensor: Tensor | None, device: torch.device) -> Tensor:
    """On the CPU, what all ranks have together on the device."""
    assert isinstance(tensor, DTensor), f"{type(tensor).__name__} instead of a DTensor"
    assert tensor.to_local().device == device
    assert tensor.full_tensor().device == device
    return tensor.full_tensor().detach().cpu()


# Meshes


@pytest.mark.fresh
@pytest.mark.parametrize("launched", [True, False], ids=["LOCAL_RANK", "no_LOCAL_RANK"])
def test_a_mesh_chooses_the_ranks_device(
    subject: Subject, rank: int, directory: Path, launched: bool
) -> None:
    """A mesh in a process that used no device takes that of the local rank, if one is given."""
    name = subject.implementation.register(subject.params).name
    module = torch.get_device_module(name)
    expected = rank % module.device_count()
    os.environ.pop("LOCAL_RANK", None)
    if launched:
        os.environ["LOCAL_RANK"] = str(expected)
    store = dist.FileStore(str(directory / "store"), RANKS)
    library, wait = subject.backend.collective_backend, timedelta(seconds=20)
    dist.init_process_group(library, store=store, rank=rank, world_size=RANKS, timeout=wait)
    mesh = init_device_mesh(name, (RANKS,))
    tensor = torch.ones(2, device=name)
    dist.all_reduce(tensor, group=mesh.get_group())
    found = mesh.get_local_rank()
    dist.destroy_process_group()
    assert found == rank, found
    assert tensor.device.index in (None, expected), f"{tensor.device}, not index {expected}"
    assert tensor.tolist() == [RANKS] * 2, tensor


def test_a_mesh_of_two_dimensions(device: torch.device, rank: int) -> None:
    """Each dimension of a mesh has groups of its own, found by its name."""
    mesh = init_device_mesh(device.type, (RANKS, 1), mesh_dim_names=("rows", "columns"))
    over_rows, over_columns = (torch.full((2,), rank + 1.0, device=device) for _ in range(2))
    dist.all_reduce(over_rows, group=mesh["rows"].get_group())
    dist.all_reduce(over_columns, group=mesh["columns"].get_group())
    assert [mesh.get_local_rank("rows"), mesh.get_local_rank("columns")] == [rank, 0]
    assert mesh.device_type == device.type
    assert over_rows.tolist() == [3, 3], over_rows
    assert over_columns.tolist() == [rank + 1, rank + 1], over_columns


# Placements


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("length", [4, 5, 1], ids=["even", "uneven", "one_row"])
def test_parts_make_the_whole(device: torch.device, rank: int, dimension: int, length: int) -> None:
    """Each rank has its part, which may be empty, and all parts together are the whole."""
    whole = normal(length, length)
    tensor = _spread(whole, device, Shard(dimension))
    parts = [*whole.chunk(RANKS, dimension), whole.narrow(dimension, 0, 0)]
    torch.testing.assert_close(tensor.to_local().cpu(), parts[rank])
    torch.testing.assert_close(_whole(tensor, device), whole)


def test_distributing_sends_the_first_ranks_values(device: torch.device, rank: int) -> None:
    """What is distributed is what rank 0 has."""
    for placement in (Shard(0), Replicate()):
        tensor = _spread(normal(4, 2, seed=rank), device, placement)
        torch.testing.assert_close(_whole(tensor, device), normal(4, 2))


@pytest.mark.parametrize(
    ("before", "after"),
    [(Shard(0), Replicate()), (Shard(0), Shard(1)), (Replicate(), Shard(1))],
    ids=str,
)
def test_redistributing_keeps_the_whole(
    device: torch.device, rank: int, before: Placement, after: Placement
) -> None:
    """A tensor is the same whole however it is spread over the ranks."""
    whole = normal(5, 4)
    tensor = _spread(whole, device, before).redistribute(placements=[after])
    assert tensor.placements == (after,)
    torch.testing.assert_close(_whole(tensor, device), whole)


@pytest.mark.parametrize("after", [Shard(0), Shard(1), Replicate()], ids=str)
def test_partial_sums_are_summed(device: torch.device, rank: int, after: Placement) -> None:
    """Tensors of which each rank has a term become their sum."""
    terms = [normal(5, 4, seed=r) for r in range(RANKS)]
    tensor = DTensor.from_local(terms[rank].to(device), _mesh(device), [Partial()])
    summed = tensor.redistribute(placements=[after])
    assert summed.placements == (after,)
    torch.testing.assert_close(_whole(summed, device), torch.stack(terms).sum(0))


def test_a_partial_maximum(device: torch.device, rank: int) -> None:
    """Tensors of which each rank has a candidate become the largest."""
    candidates = [normal(3, 4, seed=r) for r in range(RANKS)]
    tensor = DTensor.from_local(candidates[rank].to(device), _mesh(device), [Partial("max")])
    torch.testing.assert_close(_whole(tensor, device), torch.stack(candidates).amax(0))


# Computing


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(0), Shard(0)),
    ],
    ids=str,
)
def test_matmul(device: torch.device, rank: int, left: Placement, right: Placement) -> None:
    """The product of spread matrices, and its gradients, are those of the whole ones."""
    wholes = [leaf(4, 6), leaf(6, 5, seed=1)]
    spread = [
        _spread(w.detach(), device, p).requires_grad_()
        for w, p in zip(wholes, (left, right), strict=True)
    ]
    weights = normal(4, 5, seed=2)
    expected, actual = wholes[0] @ wholes[1], spread[0] @ spread[1]
    (expected * weights).sum().backward()
    (actual * _spread(weights, device, Replicate())).sum().backward()
    torch.testing.assert_close(_whole(actual, device), expected.detach())
    for tensor, whole in zip(spread, wholes, strict=True):
        torch.testing.assert_close(_whole(tensor.grad, device), whole.grad)


def test_reductions_over_all_ranks(device: torch.device, rank: int) -> None:
    """Sums, means, norms and softmax of a spread tensor are those of the whole."""
    whole = normal(5, 4)
    tensor = _spread(whole, device, Shard(0))
    for reduce in (torch.sum, torch.mean, torch.linalg.vector_norm, torch.amax):
        torch.testing.assert_close(_whole(reduce(tensor), device), reduce(whole))
    softmax = torch.softmax(tensor, 0)
    torch.testing.assert_close(_whole(softmax, device), torch.softmax(whole, 0))


def test_a_layer_split_over_ranks(device: torch.device, rank: int) -> None:
    """Two linear layers, split by columns and then by rows, give the results of one device."""
    expected = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    with torch.no_grad():
        for seed, parameter in enumerate(expected.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed))
    split = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    split.load_state_dict(expected.state_dict())
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(split.to(device), _mesh(device), plan)
    inputs = normal(5, 4, seed=9)
    result = split(inputs.to(device))
    result.pow(2).sum().backward()
    expected(inputs).pow(2).sum().backward()
    torch.testing.assert_close(result.detach().cpu(), expected(inputs).detach())
    for part, whole in zip(split.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(_whole(part.grad, device), whole.grad)
