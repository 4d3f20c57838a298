"""What the tests run in processes of their own, as a process has one slot for a device.

``fake_processes.py SCENARIO [WORLD_SIZE]`` registers the device and runs the function named
SCENARIO, or runs it on each of WORLD_SIZE ranks. Any failed assertion ends the program with an
error.
"""

import copy
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile

from core_plugin_fake_device import fakeccl
from core_plugin_fake_device.plugin import Fake

# ---- One process. --------------------------------------------------------------------------------


def register(**params: object) -> None:
    Fake.register(Fake.Params(**params))
    assert Fake.initializations() == 0


def the_hardware_is_opened_by_the_first_tensor() -> None:
    register(devices=3)
    torch.manual_seed(0)
    assert torch.fake.device_count() == 3
    assert str(torch.device("fake:2")) == "fake:2"
    assert torch.fake.is_available()
    assert not torch.fake.is_initialized()
    assert Fake.initializations() == 0
    torch.ones(1, device="fake:2")
    torch.ones(1, device="fake:1")
    assert Fake.initializations() == 1
    assert torch.fake.is_initialized()


def many_threads_open_it_once() -> None:
    register()
    start = threading.Barrier(8)

    def use() -> None:
        start.wait()
        torch.ones(1, device="fake")

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Fake.initializations() == 1


def a_bad_index_changes_nothing() -> None:
    register(devices=2)
    torch.fake.set_device(1)
    for use in (
        lambda: torch.ones(1, device="fake:2"),
        lambda: torch.fake.set_device(2),
        lambda: torch.UntypedStorage(8, device="fake:2"),
        lambda: torch.Generator(device="fake:2"),
        lambda: torch.fake.memory_allocated(2),
    ):
        with pytest.raises(IndexError, match="there is no device 2; the indices are 0 to 1"):
            use()
    assert torch.fake.current_device() == 1


def the_number_of_devices_is_fixed_by_use() -> None:
    register()
    torch.ones(1, device="fake")
    with pytest.raises(RuntimeError, match="cannot change after the device was used"):
        torch.fake.configure(Fake.Params(devices=3))


def memory_is_counted() -> None:
    register()
    before = torch.fake.memory_allocated()
    tensor = torch.ones(1000, device="fake")
    assert torch.fake.memory_allocated() == before + 4000
    assert torch.fake.memory_allocated(1) == 0
    del tensor
    assert torch.fake.memory_allocated() == before
    assert torch.fake.max_memory_allocated() >= before + 4000
    torch.fake.reset_peak_memory_stats()
    assert torch.fake.max_memory_allocated() == before
    storage = torch.ones(1000, device="fake:1").untyped_storage()
    storage.resize_(0)
    assert torch.fake.memory_allocated(1) == 0
    assert torch.accelerator.max_memory_allocated(1) == 4000


def memory_has_an_end_on_each_device() -> None:
    register(memory_mb=1)
    kept = torch.empty(2**19, dtype=torch.uint8, device="fake:0")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"device 0 is out of memory.*524288 of 1048576"
    ):
        torch.empty(2**19 + 1, dtype=torch.uint8, device="fake:0")
    assert torch.fake.memory_allocated() == 2**19
    assert torch.fake.mem_get_info(0) == (2**19, 2**20)
    torch.empty(2**20, dtype=torch.uint8, device="fake:1")
    del kept
    gc.collect()
    torch.empty(2**20, dtype=torch.uint8, device="fake:0")
    torch.fake.set_memory_capacity(None)
    torch.empty(2**21, dtype=torch.uint8, device="fake:0")


def trained(**options: object) -> None:
    model = nn.Linear(2, 2).to("fake")
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(1, 2, device="fake")).sum().backward()
    optimizer.step()


def profiled() -> list[str]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.FAKE]) as record:
        torch.ones(3, device="fake").exp()
    return [event.key for event in record.key_averages() if event.device_time_total > 0]


def averaged() -> None:
    torch.ops.fake_device.require("average_in_collectives")


def timed() -> float:
    events = [torch.fake.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        event.record()
    return events[0].elapsed_time(events[1])


NEEDS: dict[str, Callable[[], object]] = {
    "multiple_devices": lambda: torch.ones(1, device="fake:1"),
    "generator": lambda: torch.Generator(device="fake"),
    "pinned_memory": lambda: torch.ones(1).pin_memory(),
    "streams": lambda: torch.fake.Stream(),
    "events": lambda: torch.fake.Event().record(),
    "event_timing": timed,
    "memory_statistics": lambda: torch.accelerator.memory_allocated(),
    "storage_resize": lambda: torch.ones(1, device="fake").untyped_storage().resize_(0),
    "average_in_collectives": averaged,
    "float64": lambda: torch.ones(1, device="fake").double(),
    "complex_numbers": lambda: torch.view_as_complex(torch.ones(2, device="fake")),
    "convolution": lambda: nn.Conv1d(1, 1, 1).to("fake")(torch.ones(1, 1, 3, device="fake")),
    "recurrent_layers": lambda: nn.GRU(1, 1).to("fake")(torch.ones(1, 1, 1, device="fake")),
    "fused_optimizers": lambda: trained(fused=True),
    "profiler": profiled,
}


def what_is_switched_off_says_so() -> None:
    register(without=tuple(NEEDS))
    torch.__future__.set_swap_module_params_on_conversion(True)
    trained()
    for name, use in NEEDS.items():
        torch.fake.switch_off([name])
        with pytest.raises(RuntimeError, match=rf"switched off \(capability {name}\)"):
            use()
        torch.fake.switch_off([])
        use()


def random_numbers_are_the_devices_own() -> None:
    register()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = torch.rand(4, device="fake:1")
    nn.functional.dropout(torch.ones(4, device="fake:1", requires_grad=True))
    assert torch.equal(torch.rand(4), expected)
    generator = torch.Generator(device="fake:1").manual_seed(3)
    state = generator.get_state()
    assert torch.equal(torch.rand(4, device="fake:1", generator=generator), first)
    generator.set_state(state)
    twin = generator.clone_state()
    assert twin.device == torch.device("fake:1")
    for source in (generator, twin):
        assert torch.equal(torch.rand(4, device="fake:1", generator=source), first)
    kept = torch.fake.get_rng_state("fake:1")
    second = torch.rand(4, device="fake:1")
    torch.fake.set_rng_state(kept, "fake:1")
    assert torch.equal(torch.rand(4, device="fake:1"), second)
    with pytest.raises(RuntimeError, match="Expected a 'fake' device type for generator"):
        torch.rand(4, device="fake", generator=torch.Generator())


def recurrent_layers_are_those_of_the_cpu() -> None:
    register()
    torch.__future__.set_swap_module_params_on_conversion(True)
    for layer in (nn.LSTM, nn.GRU):
        for bias in (True, False):
            torch.manual_seed(0)
            host = layer(3, 4, num_layers=2, bias=bias)
            device = copy.deepcopy(host).to("fake")
            x = torch.randn(5, 2, 3, requires_grad=True)
            y = x.detach().to("fake").requires_grad_()
            host(x)[0].square().sum().backward()
            device(y)[0].square().sum().backward()
            torch.testing.assert_close(y.grad.cpu(), x.grad)
            for p, q in zip(host.parameters(), device.parameters(), strict=True):
                torch.testing.assert_close(q.grad.cpu(), p.grad)


def a_profile_has_the_devices_time() -> None:
    register()
    assert "aten::exp" in profiled()


def in_a_child(use: Callable[[], None]) -> int:
    """The exit status of a forked process that calls the function."""
    child = os.fork()
    if child == 0:
        try:
            use()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def a_forked_child_cannot_use_it() -> None:
    register()

    def use() -> None:
        assert not torch.fake._is_in_bad_fork()
        torch.ones(1, device="fake")

    assert in_a_child(use) == 0
    kept = torch.ones(1, device="fake")

    def misuse() -> None:
        assert torch.fake._is_in_bad_fork()
        assert not torch.fake.is_initialized()
        torch.manual_seed(0)
        for use in (lambda: torch.ones(1, device="fake"), lambda: kept + 1, kept.cpu):
            with pytest.raises(RuntimeError, match=r"cannot be used in the child.*'spawn'"):
                use()

    assert in_a_child(misuse) == 0
    assert not torch.fake._is_in_bad_fork()
    assert kept.item() == 1


# ---- Several. ------------------------------------------------------------------------------------


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


def a_dead_peer_is_an_error(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"(?i)connection|closed|reset|timed out|peer"):
        dist.all_reduce(on(rank, 1))
    os._exit(0)


def _process(rank: int, scenario: str, world_size: int, directory: str) -> None:
    os.environ[fakeccl.TRACE] = directory
    register()
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
