"""Collectives on two ranks: every one gives the right values, on the right device."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from core_plugin.testing.device.models import RANKS

pytestmark = [pytest.mark.level(2), pytest.mark.ranks(RANKS)]


def _assert_all(
    tensors: list[Tensor], expected: Sequence[Sequence[float]], device: torch.device
) -> None:
    """Check values and device of several tensors."""
    found = [t.flatten().tolist() for t in tensors]
    assert found == expected, f"{found} instead of {expected}"
    devices = [t.device for t in tensors]
    assert devices == [device] * len(tensors), f"results are on {devices}, not on {device}"


def _assert(tensor: Tensor, expected: Sequence[float], device: torch.device) -> None:
    _assert_all([tensor], [expected], device)


# Reducing


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("SUM", [4.0, -2.0, 12.0]),
        ("MIN", [1.0, -4.0, 2.0]),
        ("MAX", [3.0, 2.0, 10.0]),
        ("PRODUCT", [3.0, -8.0, 20.0]),
    ],
    ids=["sum", "minimum", "maximum", "product"],
)
def test_all_reduce(device: torch.device, rank: int, operation: str, expected: list[float]) -> None:
    """All ranks have the sum, minimum, maximum or product."""
    tensor = torch.tensor([[1.0, 2.0, 10.0], [3.0, -4.0, 2.0]])[rank].to(device)
    dist.all_reduce(tensor, getattr(ReduceOp, operation))
    _assert(tensor, expected, device)


@pytest.mark.requires("average_in_collectives")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_averages(device: torch.device, rank: int, dtype: torch.dtype) -> None:
    """``ReduceOp.AVG`` gives the mean, in an all-reduce and in a reduce-scatter."""
    tensor = torch.tensor([1.0, -4.0], device=device, dtype=dtype) * (rank + 1)
    part = torch.empty(2, device=device, dtype=dtype)
    dist.all_reduce(tensor, ReduceOp.AVG)
    dist.reduce_scatter_single(
        part, torch.arange(4, device=device, dtype=dtype) * (2 * rank + 1), ReduceOp.AVG
    )
    _assert(tensor, [1.5, -6.0], device)
    _assert(part, [[0.0, 2.0], [4.0, 6.0]][rank], device)


def test_an_average_is_never_the_sum(device: torch.device, rank: int) -> None:
    """``ReduceOp.AVG`` gives the mean, or it raises an error."""
    for reduce in (_all_reduced, _reduce_scattered, _reduce_scattered_list):
        averaged = _or_refused(reduce, torch.tensor([1.0, 3.0], device=device)[rank].expand(2))
        assert averaged in (None, [2.0]), f"the average of 1 and 3 is {averaged}"


def test_an_average_of_integers_is_never_the_sum(device: torch.device, rank: int) -> None:
    """``ReduceOp.AVG`` of integers gives the mean, or it raises an error."""
    for reduce in (_all_reduced, _reduce_scattered):
        averaged = _or_refused(reduce, torch.tensor([1, 3], device=device)[rank].expand(2))
        assert averaged in (None, [2]), f"the average of 1 and 3 is {averaged}"


def _or_refused(reduce: Callable[[Tensor], Tensor], given: Tensor) -> list[float] | None:
    """The result; None if there is an error."""
    try:
        return reduce(given.clone()).tolist()
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def _all_reduced(given: Tensor) -> Tensor:
    dist.all_reduce(given, ReduceOp.AVG)
    return given[:1]


def _reduce_scattered(given: Tensor) -> Tensor:
    part = given.new_empty(1)
    dist.reduce_scatter_single(part, given, ReduceOp.AVG)
    return part


def _reduce_scattered_list(given: Tensor) -> Tensor:
    part = given.new_empty(1)
    dist.reduce_scatter(part, list(given.chunk(RANKS)), ReduceOp.AVG)
    return part


def test_reduce_gives_one_rank_the_sum(device: torch.device, rank: int) -> None:
    """The rank that is asked for has the sum."""
    for target in range(RANKS):
        tensor = torch.full((3,), rank + 1.0, device=device)
        dist.reduce(tensor, dst=target)
        if rank == target:
            _assert(tensor, [3, 3, 3], device)


def test_reduce_scatter(device: torch.device, rank: int) -> None:
    """Each rank has its own part of the sum, and what was given stays as it was."""
    given = torch.arange(6.0, device=device).view(RANKS, 3) + 10 * rank
    part = torch.empty(3, device=device)
    dist.reduce_scatter_single(part, given.flatten())
    _assert(part, [[10, 12, 14], [16, 18, 20]][rank], device)
    _assert(given, [i + 10.0 * rank for i in range(6)], device)


def test_reduce_scatter_of_a_list(device: torch.device, rank: int) -> None:
    """Each rank has the sum of what all have for it in their lists."""
    given = [torch.full((2, 2), 10.0 * target + rank, device=device) for target in range(RANKS)]
    part = torch.empty(2, 2, device=device)
    dist.reduce_scatter(part, given)
    _assert(part, [20.0 * rank + 1] * 4, device)
    _assert_all(given, [[10.0 * target + rank] * 4 for target in range(RANKS)], device)


# Moving


@pytest.mark.parametrize("source", range(RANKS))
def test_broadcast(device: torch.device, rank: int, source: int) -> None:
    """All ranks have what one had."""
    tensor = torch.arange(3.0, device=device) + 10 * rank
    dist.broadcast(tensor, src=source)
    _assert(tensor, [10.0 * source + i for i in range(3)], device)


def test_all_gather(device: torch.device, rank: int) -> None:
    """All ranks have what each had, in one tensor and in the order of the ranks."""
    given = torch.arange(2.0, device=device) + 10 * rank
    whole = torch.empty(4, device=device)
    dist.all_gather_single(whole, given)
    _assert(whole, [0, 1, 10, 11], device)
    _assert(given, [10.0 * rank, 10.0 * rank + 1], device)


def test_all_gather_of_a_list(device: torch.device, rank: int) -> None:
    """All ranks have what each had, in a list in the order of the ranks."""
    parts = [torch.empty(2, 1, device=device) for _ in range(RANKS)]
    dist.all_gather(parts, torch.full((2, 1), float(rank), device=device))
    _assert_all(parts, [[0, 0], [1, 1]], device)


def test_gather_and_scatter(device: torch.device, rank: int) -> None:
    """One rank gets what each had, and gives each its own."""
    parts = [torch.empty(2, device=device) for _ in range(RANKS)] if rank == 1 else None
    dist.gather(torch.full((2,), rank + 1.0, device=device), parts, dst=1)
    mine = torch.empty(2, device=device)
    dist.scatter(mine, [p * 10 for p in parts] if parts else None, src=1)
    _assert_all(parts or [], [[1, 1], [2, 2]] if rank == 1 else [], device)
    _assert(mine, [10.0 * (rank + 1)] * 2, device)


def test_all_to_all_of_uneven_parts(device: torch.device, rank: int) -> None:
    """Each rank has what all had for it, though the parts differ in size."""
    sizes = [[1, 2], [3, 1]]
    given = torch.arange(float(sum(sizes[rank])), device=device) + 10 * rank
    received = torch.empty(sum(s[rank] for s in sizes), device=device)
    dist.all_to_all_single(received, given, [s[rank] for s in sizes], sizes[rank])
    _assert(received, [[0, 10, 11, 12], [1, 2, 13]][rank], device)


def test_all_to_all_of_a_list(device: torch.device, rank: int) -> None:
    """Each rank has what all have for it in their lists."""
    given = [torch.full((2,), 10.0 * rank + target, device=device) for target in range(RANKS)]
    received = [torch.empty(2, device=device) for _ in range(RANKS)]
    dist.all_to_all(received, given)
    _assert_all(received, [[10.0 * source + rank] * 2 for source in range(RANKS)], device)


def test_send_and_receive(device: torch.device, rank: int) -> None:
    """A tensor goes from one rank to the other, in both directions."""
    for source in range(RANKS):
        tensor = torch.full((2, 2), 5.0 + rank, device=device)
        if rank == source:
            dist.send(tensor, 1 - rank)
        else:
            dist.recv(tensor, 1 - rank)
        _assert(tensor, [5.0 + source] * 4, device)


def test_ranks_send_and_receive_at_once(device: torch.device, rank: int) -> None:
    """A batch of sends and receives crosses."""
    mine, theirs = torch.full((2,), float(rank), device=device), torch.empty(2, device=device)
    exchanges = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
    for work in dist.batch_isend_irecv(exchanges):
        work.wait()
    _assert(theirs, [1.0 - rank] * 2, device)


# All of them


def test_several_tensors_are_reduced_at_once(device: torch.device, rank: int) -> None:
    """A coalesced all-reduce reduces each of its tensors."""
    tensors = [torch.full((size,), float(rank + size), device=device) for size in (1, 3)]
    dist.all_reduce_coalesced(tensors)
    _assert_all(tensors, [[3], [7, 7, 7]], device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8])
def test_collectives_in_a_dtype(device: torch.device, rank: int, dtype: torch.dtype) -> None:
    """Tensors that are not float32 are summed, scattered and gathered in their own dtype."""
    tensor = torch.tensor([1, 2, 3, 100], device=device).to(dtype) + rank
    part = torch.empty(2, device=device, dtype=dtype)
    dist.reduce_scatter_single(part, tensor)
    whole = torch.empty(4, device=device, dtype=dtype)
    dist.all_gather_single(whole, part)
    dist.all_reduce(tensor)
    assert tensor.dtype == whole.dtype == dtype
    _assert_all([tensor, whole], [[3, 5, 7, 201]] * 2, device)


def test_tensors_without_elements(device: torch.device, rank: int) -> None:
    """Tensors of size zero go through collectives, and those after them are right."""
    nothing = torch.empty(0, 3, device=device)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, src=0)
    dist.all_gather_single(torch.empty(0, 3, device=device), nothing)
    dist.reduce_scatter_single(torch.empty(0, 3, device=device), nothing)
    tensor = torch.ones((), device=device)
    dist.all_reduce(tensor)
    assert nothing.shape == (0, 3)
    _assert(tensor, [2], device)


def test_a_part_of_a_tensor(device: torch.device, rank: int) -> None:
    """A collective on some rows of a tensor leaves the other rows as they are."""
    tensor = torch.full((4, 2), rank + 1.0, device=device)
    dist.all_reduce(tensor[1:3])
    _assert(tensor, [rank + 1.0] * 2 + [3.0] * 4 + [rank + 1.0] * 2, device)
    dist.broadcast(tensor[3], src=1)
    _assert(tensor[2:], [3, 3, 2, 2], device)
    dist.all_gather_single(tensor[:2], tensor[3:] + rank)
    _assert(tensor, [2, 2, 3, 3, 3, 3, 2, 2], device)


def test_a_transposed_tensor(device: torch.device, rank: int) -> None:
    """A tensor whose memory has another order is reduced and gathered right, or refused."""
    given = torch.arange(6.0).view(2, 3).to(device).t() + 10 * rank
    assert not given.is_contiguous()
    expected = torch.arange(6.0).view(2, 3).t()
    parts = [torch.empty(3, 2, device=device) for _ in range(RANKS)]
    try:
        dist.all_gather(parts, given)
        dist.all_reduce(given)
    except (NotImplementedError, RuntimeError, ValueError):
        return
    torch.testing.assert_close(given.cpu(), 2 * expected + 10)
    torch.testing.assert_close([p.cpu() for p in parts], [expected, expected + 10])


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": partial(dist.broadcast, src=0),
}


@pytest.mark.only("accelerator")  # torch's gloo takes a column of the CPU for neighbours in memory
@pytest.mark.parametrize("collective", IN_PLACE)
def test_a_column_of_a_tensor(device: torch.device, rank: int, collective: str) -> None:
    """A column is reduced and sent right, or refused; the other column stays as it is."""
    wholes = torch.arange(12.0).view(RANKS, 3, 2)
    results = {"all_reduce": wholes.sum(0), "broadcast": wholes[0]}
    tensor, expected = wholes[rank].to(device), wholes[rank].clone()
    try:
        IN_PLACE[collective](tensor[:, :1])
    except (NotImplementedError, RuntimeError, ValueError):
        pass
    else:
        expected[:, 0] = results[collective][:, 0]
    torch.testing.assert_close(tensor.cpu(), expected)


# Without waiting


def test_a_work_can_be_waited_for(device: torch.device, rank: int) -> None:
    """After ``wait`` the results of calls that did not block are there."""
    reduced = torch.full((8,), rank + 1.0, device=device)
    gathered = torch.empty(4, device=device)
    part = torch.empty(1, device=device)
    two = torch.tensor([1.0, 2.0], device=device) + rank
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.all_gather_single(gathered, two, async_op=True),
        dist.reduce_scatter_single(part, two, async_op=True),
    ]
    for work in works:
        assert work is not None, "a call with async_op gave no work"
        work.wait()
    _assert(reduced, [3] * 8, device)
    _assert(gathered, [1, 2, 2, 3], device)
    _assert(part, [3.0 + 2 * rank], device)


def test_a_future_holds_the_tensors(device: torch.device, rank: int) -> None:
    """The future of a work has a list of the tensors of the device as its value."""
    for call in (dist.all_reduce, _broadcast_from_0):
        tensor = torch.full((2,), 2 - rank + 0.0, device=device)
        work = call(tensor, async_op=True)
        future = work.get_future()
        future.wait()
        value = future.value()
        assert isinstance(value, list), f"the future's value is {value!r}, no list of tensors"
        _assert_all(value, [tensor.tolist()], device)
        _assert(tensor, [3, 3] if call is dist.all_reduce else [2, 2], device)


def _broadcast_from_0(tensor: Tensor, async_op: bool) -> dist.Work:
    return dist.broadcast(tensor, src=0, async_op=async_op)  # type: ignore[no-any-return]


def test_what_follows_a_future_sees_the_result(device: torch.device, rank: int) -> None:
    """A function that is called when a work is done computes with its result."""
    tensor = torch.full((2,), rank + 1.0, device=device)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / RANKS).wait()
    _assert(halved, [1.5, 1.5], device)


def test_collectives_and_kernels_keep_their_order(device: torch.device, rank: int) -> None:
    """A collective sees what was computed before it, and what follows sees its result."""
    tensor = torch.full((256, 256), rank + 1.0, device=device)
    identity = torch.eye(256, device=device)
    for _ in range(5):
        tensor = tensor @ identity
        dist.all_reduce(tensor)
        tensor = tensor @ identity / 3
        tensor *= rank + 1
    torch.testing.assert_close(tensor.cpu(), torch.full((256, 256), rank + 1.0))
