"""Groups of processes: how they are formed, smaller ones, and what is left if a rank fails."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core_plugin.testing.children import RETURNED, exit_code_of_fork
from core_plugin.testing.device.models import RANKS
from core_plugin.testing.device.subject import Subject

pytestmark = pytest.mark.level(2)


@pytest.mark.fresh
@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize(
    "form",
    ["cpu:gloo,{device}:{library}", "{device}:{library}", "{library}", None],
    ids=["cpu_and_device", "device", "library", "unnamed"],
)
def test_a_group_is_formed(
    subject: Subject, device: torch.device, rank: int, directory: Path, form: str | None
) -> None:
    """A group is formed by devices and libraries, by one device, by the library's name, by none."""
    if device.type == "cpu" and form:
        form = form.removeprefix("cpu:gloo,")
    library = subject.backend.collective_backend
    name = form.format(device=device.type, library=library) if form else None
    _join(name, rank, directory)
    tensor = torch.full((2,), float(rank), device=device)
    dist.all_reduce(tensor)
    names: list[int | None] = [None] * RANKS
    dist.all_gather_object(names, rank)
    dist.barrier()
    dist.destroy_process_group()
    assert tensor.device == device, tensor.device
    assert tensor.tolist() == [1, 1], tensor.tolist()
    assert names == [0, 1], names


def _join(name: str | None, rank: int, directory: Path, seconds: float = 20) -> None:
    store = dist.FileStore(str(directory / "store"), RANKS)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(name, store=store, rank=rank, world_size=RANKS, timeout=timeout)


@pytest.mark.fresh
@pytest.mark.ranks(RANKS)
def test_a_rank_that_raises_does_not_leave_the_others_waiting(
    subject: Subject, rank: int, directory: Path
) -> None:
    """If a rank ends with an error, the others do so within a time limit."""
    code = exit_code_of_fork(partial(_raise_on_the_last, subject, rank, directory))
    assert (directory / f"joined-{rank}").exists(), "the group did not work in the first place"
    assert code is not None, "the rank still waits, long after the other one failed"
    assert code != RETURNED, "the rank ended well, although the other one had failed"


def _raise_on_the_last(subject: Subject, rank: int, directory: Path) -> None:
    with subject.session(rank, RANKS, store=None) as session:
        tensor = torch.ones(2, device=session.device)
        _join(subject.backend.collective_backend, rank, directory, seconds=5)
        dist.all_reduce(tensor)
        if tensor.tolist() == [RANKS] * 2:
            (directory / f"joined-{rank}").touch()
        if rank == RANKS - 1:
            raise RuntimeError("meant to fail")
        dist.all_reduce(tensor)
        tensor.tolist()


@pytest.mark.ranks(RANKS)
def test_a_smaller_group_has_its_own_ranks(device: torch.device, rank: int) -> None:
    """A collective of a smaller group does not reach the ranks outside."""
    alone = [dist.new_group([r]) for r in range(RANKS)]
    mine = torch.full((2,), rank + 1.0, device=device)
    dist.all_reduce(mine, group=alone[rank])
    assert mine.tolist() == [rank + 1] * 2, mine.tolist()
    assert dist.get_rank(alone[rank]) == 0, dist.get_rank(alone[rank])
    assert dist.get_rank(alone[1 - rank]) == -1, dist.get_rank(alone[1 - rank])
    for group in alone:
        dist.destroy_process_group(group)


@pytest.mark.ranks(RANKS)
def test_a_second_group_of_all_ranks_works_beside_the_first(
    subject: Subject, device: torch.device, rank: int
) -> None:
    """A new group of all ranks, formed by the library's name, works between calls of the first."""
    group = dist.new_group(backend=subject.backend.collective_backend)
    first, second = (torch.full((3,), rank + 1.0, device=device) for _ in range(2))
    works = [
        dist.all_reduce(first, async_op=True),
        dist.all_reduce(second, group=group, async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()
    dist.all_reduce(first)
    dist.destroy_process_group(group)
    assert first.tolist() == [6, 6, 6], first.tolist()
    assert second.tolist() == [3, 3, 3], second.tolist()


@pytest.mark.ranks(RANKS)
def test_a_barrier_waits_for_all_ranks(rank: int, directory: Path) -> None:
    """No rank passes a barrier before the last one reaches it."""
    if rank == 0:
        time.sleep(0.2)
        (directory / "reached").touch()
    dist.barrier()
    assert (directory / "reached").exists(), "rank 1 passed before rank 0 came"


@pytest.mark.ranks(RANKS)
def test_objects_are_exchanged(device: torch.device, rank: int) -> None:
    """Objects are gathered from all ranks, broadcast and scattered."""
    gathered: list[object] = [None] * RANKS
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (rank + 1)})
    broadcast: list[object] = ["from 1", 2.5] if rank == 1 else [None, None]
    dist.broadcast_object_list(broadcast, src=1)
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, ["for 0", "for 1"] if rank == 0 else None, src=0)
    assert gathered == [{"rank": 0, "text": "x"}, {"rank": 1, "text": "xx"}], gathered
    assert broadcast == ["from 1", 2.5], broadcast
    assert scattered == [f"for {rank}"], scattered


@pytest.mark.ranks(RANKS)
def test_objects_are_exchanged_in_the_devices_memory(
    subject: Subject, device: torch.device, rank: int
) -> None:
    """Objects are exchanged by the device's library too, where a group has no other."""
    group = dist.new_group(backend=f"{device.type}:{subject.backend.collective_backend}")
    gathered: list[object] = [None] * RANKS
    dist.all_gather_object(gathered, f"rank {rank}", group=group)
    objects: list[object] = [{"a": 1}] if rank == 0 else [None]
    dist.broadcast_object_list(objects, src=0, group=group, device=device)
    dist.destroy_process_group(group)
    assert gathered == ["rank 0", "rank 1"], gathered
    assert objects == [{"a": 1}], objects


@pytest.mark.ranks(RANKS)
def test_tensors_of_the_cpu_go_through_the_same_group(device: torch.device, rank: int) -> None:
    """A group for the device and the CPU exchanges the tensors of both."""
    there, here = torch.full((2,), rank + 1.0, device=device), torch.full((2,), rank + 1.0)
    dist.all_reduce(there)
    dist.all_reduce(here)
    gathered = [torch.empty(2) for _ in range(RANKS)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    assert there.device == device, there.device
    assert here.device.type == "cpu"
    assert there.tolist() == here.tolist() == [3, 3], there.tolist()
    assert [t.tolist() for t in gathered] == [[0, 0], [1, 1]], [t.tolist() for t in gathered]
