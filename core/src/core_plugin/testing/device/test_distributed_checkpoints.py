"""Checkpoints that all ranks write together, and that any other number of ranks reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

from core_plugin import state, tensors
from core_plugin.testing.children import run_python
from core_plugin.testing.device.comparison import normal
from core_plugin.testing.device.models import (
    RANKS,
    adamw,
    assert_close,
    batch,
    network,
    parameters,
    sharded,
    step,
)
from core_plugin.testing.device.subject import Subject

pytestmark = [pytest.mark.level(3), pytest.mark.ranks(RANKS)]

Layout = Callable[[Subject, torch.device], nn.Module]


def _sharded(subject: Subject, device: torch.device) -> nn.Module:
    return sharded(network(), subject, device)


def _whole(subject: Subject, device: torch.device) -> nn.Module:
    return network().to(device)


def _replicated(subject: Subject, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    return sharded(network(), subject, device, mesh)


@pytest.mark.parametrize(
    ("before", "after"),
    [(_sharded, _sharded), (_sharded, _whole), (_whole, _sharded), (_sharded, _replicated)],
    ids=["sharded", "sharded_to_whole", "whole_to_sharded", "sharded_to_replicated"],
)
def test_training_goes_on_from_a_checkpoint(
    subject: Subject,
    device: torch.device,
    rank: int,
    directory: Path,
    before: Layout,
    after: Layout,
) -> None:
    """What was saved in one layout goes on in another as if nothing had happened."""
    model = before(subject, device)
    optimizer = adamw(model)
    step(model, optimizer, batch(), device)
    state.save(model, optimizer, directory / "saved", include_frozen=True)
    step(model, optimizer, batch(), device)

    resumed = after(subject, device)
    other = adamw(resumed)
    dist.barrier()
    state.load(resumed, other, directory / "saved", include_frozen=True)
    step(resumed, other, batch(), device)
    assert {tensors.local(p).device for p in resumed.parameters()} == {device}
    assert_close(parameters(resumed), parameters(model))


@pytest.mark.timeout_s(90)
def test_a_process_without_the_device_goes_on_and_comes_back(
    subject: Subject, device: torch.device, rank: int, directory: Path
) -> None:
    """A CPU that knows nothing of the device reads the checkpoint, and the device reads its one."""
    model = _sharded(subject, device)
    optimizer = adamw(model)
    step(model, optimizer, batch(), device)
    state.save(model, optimizer, directory / "device", include_frozen=True)
    told: list[str | None] = [_go_on_without_the_device(directory) if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    assert told == [None], f"a process without the device cannot read the checkpoint: {told[0]}"

    returned = _sharded(subject, device)
    other = adamw(returned)
    state.load(returned, other, directory / "cpu", include_frozen=True)
    for _ in range(2):
        step(model, optimizer, batch(), device)
    step(returned, other, batch(), device)
    assert_close(parameters(returned), parameters(model))


def _go_on_without_the_device(directory: Path) -> str | None:
    """Run a step in a process of its own, from a checkpoint to another; its error, if any."""
    program = f"from {__name__} import step_on_the_cpu as step; step({str(directory)!r})"
    try:
        run_python(program, seconds=50)  # the other rank waits for no more than 60 s
    except AssertionError as error:
        return str(error)
    return None


def step_on_the_cpu(directory: str) -> None:
    """Take one step from the checkpoint ``device`` in a directory to the checkpoint ``cpu``."""
    slot = torch._C._get_privateuse1_backend_name()
    assert slot == "privateuseone", f"this process is meant to know no device, but has {slot}"
    model, cpu = network(), torch.device("cpu")
    optimizer = adamw(model)
    state.load(model, optimizer, Path(directory, "device"), include_frozen=True)
    step(model, optimizer, batch(), cpu)
    state.save(model, optimizer, Path(directory, "cpu"), include_frozen=True)


def test_tensors_are_read_in_another_layout(
    device: torch.device, rank: int, directory: Path
) -> None:
    """Uneven rows of a dtype are read as columns, as a whole, and on the CPU, bit by bit."""
    whole = normal(5, 3).bfloat16()
    mesh = init_device_mesh(device.type, (RANKS,))
    rows = distribute_tensor(whole.to(device), mesh, [Shard(0)])
    dcp.save({"tensor": rows}, checkpoint_id=directory / "saved")
    for placement in (Shard(1), Replicate()):
        read = zeros(5, 3, dtype=whole.dtype, device_mesh=mesh, placements=[placement])
        dcp.load({"tensor": read}, checkpoint_id=directory / "saved")
        assert read.to_local().device == device
        assert torch.equal(read.full_tensor().cpu(), whole)
    on_cpu = torch.zeros(5, 3, dtype=whole.dtype)
    dcp.load({"tensor": on_cpu}, checkpoint_id=directory / "saved")
    assert torch.equal(on_cpu, whole)


def test_a_whole_state_dict_from_one_rank(
    subject: Subject, device: torch.device, rank: int
) -> None:
    """Rank 0 gets the whole model on the CPU, and a whole model of rank 0 reaches all ranks."""
    model = _sharded(subject, device)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full: dict[str, Any] = get_model_state_dict(model, options=options)
    assert_close(full, parameters(network()) if rank == 0 else {})
    doubled = {name: tensor * 2 for name, tensor in full.items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, doubled, options=options)
    assert {tensors.local(p).device for p in model.parameters()} == {device}
    assert_close(parameters(model), {n: 2 * p for n, p in parameters(network()).items()})
