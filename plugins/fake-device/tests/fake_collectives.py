"""What the tests of the collective library run in processes of their own.

``fake_collectives.py SCENARIO [WORLD_SIZE]`` runs the function named SCENARIO, or runs it on each
of WORLD_SIZE ranks, with the device registered. Any failed assertion ends the program with an
error.
"""

import os
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from core_plugin_fake_device import fakeccl
from core_plugin_fake_device.plugin import Fake

# ---- Without a group. -------------------------------------------------------------------------


def work_is_done_when_it_is_finished() -> None:
    begun, proceed, finished = threading.Event(), threading.Event(), []

    def finish() -> None:
        begun.set()
        proceed.wait()
        finished.append(True)

    def wait() -> None:
        seen.append((work.wait(), list(finished)))

    seen: list[tuple[bool, list[bool]]] = []
    work = fakeccl.FakeWork([], torch.ones(1), finish)
    threads = [threading.Thread(target=wait) for _ in range(2)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    threads[1].join(0.2)
    assert seen == []
    proceed.set()
    for thread in threads:
        thread.join()
    assert seen == [(True, [True])] * 2


def work_that_is_looked_at_is_finished() -> None:
    finished: list[bool] = []
    work = fakeccl.FakeWork([], torch.ones(1), lambda: finished.append(True))
    assert work.is_completed()
    assert work.wait()
    assert finished == [True]


def an_error_at_the_end_stays() -> None:
    work = fakeccl.FakeWork([], torch.ones(1), lambda: torch.ones(2).copy_(torch.ones(3)))
    assert work.is_completed()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match"):
            work.wait()
    assert not work.is_success()
    assert "must match" in str(work.exception())


# ---- In a group. ---------------------------------------------------------------------------------


def on(rank: int, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=f"fake:{rank % 2}")


def calls_are_recorded(rank: int) -> None:
    fakeccl.calls.clear()
    tensor = on(rank, rank, 1.0)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [0.5, 1.0]
    dist.all_gather_single(torch.empty(4, device=tensor.device), tensor)
    dist.barrier()
    device = f"fake:{rank}"
    assert fakeccl.calls == [
        fakeccl.Call("all_reduce", "AVG", device, 8),
        fakeccl.Call("all_gather_single", "-", device, 8),
        fakeccl.Call("barrier", "-", "-", 0),
    ]
    trace = Path(os.environ[fakeccl.TRACE], f"rank-{rank}.txt").read_text()
    assert trace == f"all_reduce AVG {device} 8\nall_gather_single - {device} 8\nbarrier - - 0\n"


def what_cannot_be_reduced_is_refused(rank: int) -> None:
    with pytest.raises(TypeError, match=r"AVG needs floating-point numbers, got torch.int64"):
        dist.all_reduce(on(rank, 1).long(), dist.ReduceOp.AVG)
    with pytest.raises(NotImplementedError, match="PREMUL_SUM is not supported"):
        dist.all_reduce(on(rank, 1), dist._make_nccl_premul_sum(2.0))
    torch.fake.switch_off(["average_in_collectives"])
    for average in (
        lambda: dist.all_reduce(on(rank, 1), dist.ReduceOp.AVG),
        lambda: dist.reduce_scatter_single(on(rank, 1), on(rank, 1, 2), dist.ReduceOp.AVG),
    ):
        with pytest.raises(RuntimeError, match=r"\(capability average_in_collectives\)"):
            average()
    tensor = on(rank, 1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2


def results_arrive_later(rank: int) -> None:
    tensor = on(rank, rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert tensor.item() == 1
    (result,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert result.device == tensor.device
    assert result.item() == 2
    other = 1 - rank
    received = on(rank, -1)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, on(rank, rank), other),
            dist.P2POp(dist.irecv, received, other),
        ]
    ):
        work.wait()
    assert received.item() == other


def what_gloo_has_not_works_too(rank: int) -> None:
    inputs = [on(rank, *[rank] * (rank + 1 + to)) for to in range(2)]
    outputs = [on(rank, *[-1] * (rank + 1 + source)) for source in range(2)]
    dist.all_to_all(outputs, inputs)
    assert [o.tolist() for o in outputs] == [[i] * (rank + 1 + i) for i in range(2)]
    stacked = torch.empty(2, 3, device=f"fake:{rank}")
    dist.all_gather_single(stacked, on(rank, *[rank] * 3))
    assert stacked.tolist() == [[0] * 3, [1] * 3]
    summed = [on(rank, rank), on(rank, 1, 2)]
    with dist._coalescing_manager(device=summed[0].device):
        for tensor in summed:
            dist.all_reduce(tensor)
    assert [t.tolist() for t in summed] == [[1], [2, 4]]


def strides_are_heeded_or_refused(rank: int) -> None:
    base = torch.arange(6.0).view(2, 3).to(f"fake:{rank}")
    column, transposed = base[:, :1], base.t().contiguous().t()
    assert not transposed.is_contiguous()
    for use in (
        lambda: dist.all_reduce(column),
        lambda: dist.reduce(column, 0),
        lambda: dist.broadcast(column, 0),
        lambda: dist.all_to_all_single(column, column),
        lambda: dist.all_gather_single(base.t(), base[:1].t()),
        lambda: dist.reduce_scatter(transposed, [base, base]),
        lambda: dist.scatter(transposed, [base, base] if rank == 0 else None),
        lambda: dist.recv(column, 1 - rank),
    ):
        with pytest.raises(ValueError, match=r"strides \(.*; pass tensor.contiguous\(\)"):
            use()
    assert base.flatten().tolist() == [0, 1, 2, 3, 4, 5]

    summed = transposed.clone()
    dist.all_reduce(summed)
    assert torch.equal(summed, base + base)
    out = torch.empty_like(base)
    dist.reduce_scatter(out, [transposed, transposed])
    assert torch.equal(out, base + base)
    dist.scatter(out, [transposed, transposed] if rank == 0 else None)
    assert torch.equal(out, base)
    if rank == 0:
        dist.send(transposed + 1, 1)
    else:
        dist.recv(out, 0)
        assert torch.equal(out, base + 1)
    columns = torch.zeros(2, 3, device=base.device)
    dist.all_gather([columns[:, 1:2], columns[:, 2:]], column + rank)
    assert columns.tolist() == [[0, 0, 1], [0, 3, 4]]
    dist.all_to_all([columns[:, :1], columns[:, 1:2]], [column, column + 1])
    assert columns.tolist() == [[rank, rank, 1], [3 + rank, 3 + rank, 4]]


def a_dead_peer_is_an_error(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"(?i)connection|closed|reset|timed out|peer"):
        dist.all_reduce(on(rank, 1))
    os._exit(0)


def _process(rank: int, scenario: str, world_size: int, directory: str) -> None:
    os.environ[fakeccl.TRACE] = directory
    Fake.register(Fake.Params())
    Fake.device(Fake.Params(), rank)
    store = dist.FileStore(str(Path(directory, "store")), world_size)
    dist.init_process_group(
        "cpu:gloo,fake:fakeccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    globals()[scenario](rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    scenario, *ranks = sys.argv[1:]
    if not ranks:
        globals()[scenario]()
    else:
        with tempfile.TemporaryDirectory() as directory:
            world_size = int(ranks[0])
            arguments = (scenario, world_size, directory)
            mp.start_processes(_process, arguments, world_size, start_method="fork")
