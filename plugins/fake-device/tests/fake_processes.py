"""What the tests run in processes of their own, as a process has one slot for a device.

``fake_processes.py SCENARIO`` registers the device and runs the function named SCENARIO. Any failed
assertion ends the program with an error.
"""

import copy
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from core_plugin_fake_device.plugin import Fake


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
    register(without=("multiple_devices",))
    with pytest.raises(RuntimeError, match=r"switched off \(capability multiple_devices\)"):
        torch.fake.set_device(1)
    torch.fake.switch_off([])
    torch.ones(1, device="fake:1", requires_grad=True).sum().backward()
    for change in (
        lambda: torch.fake.configure(Fake.Params(devices=3)),
        lambda: torch.fake.switch_off(["multiple_devices"]),
    ):
        with pytest.raises(RuntimeError, match="cannot change after the device was used"):
            change()
    torch.ones(1, device="fake:1", requires_grad=True).sum().backward()


def mixtures(x: torch.Tensor, other: str) -> list[Callable[[], object]]:
    """Operators on a tensor of the device that take another argument from elsewhere."""
    weight, bias = torch.ones(1, 1, 2, 2), torch.ones(1)
    geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    backward = torch.ops.aten.convolution_backward_overrideable
    return [
        lambda: x.add_(x.to(other)),
        lambda: torch.conv2d(x, weight.to(other)),
        lambda: torch.conv2d(x, weight.to(x.device), bias.to(other)),
        lambda: backward(x, x, weight.to(other), *geometry),
    ]


def devices_are_not_mixed() -> None:
    register()
    x = torch.ones(1, 1, 4, 4, device="fake:0")
    for other in ("cpu", "fake:1"):
        for use in mixtures(x, other):
            with pytest.raises(RuntimeError, match=f"at least two devices, fake:0 and {other}!"):
                use()
    numbers = torch.ones(2, device="fake:0")
    numbers[torch.tensor([0])] = 2
    with pytest.raises(RuntimeError, match="at least two devices"):
        numbers[torch.tensor([1], device="fake:1")] = 3
    assert numbers.tolist() == [2, 1]


def windows_are_those_of_the_cpu() -> None:
    register()
    makers = [getattr(torch, name) for name in dir(torch) if name.endswith("_window")]
    assert torch.kaiser_window in makers
    for make in makers:
        for options in ({}, {"periodic": False}, {"dtype": torch.float64}):
            window = make(9, device="fake:1", **options)
            assert window.device == torch.device("fake:1")
            assert torch.equal(window.cpu(), make(9, **options))
    beta = torch.kaiser_window(9, False, 3.0, device="fake")
    assert torch.equal(beta.cpu(), torch.kaiser_window(9, False, 3.0))


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


def seeding_waits_for_what_is_being_drawn() -> None:
    register()
    torch.fake.manual_seed(3)
    expected = torch.rand(10_000_000, device="fake")
    torch.fake.manual_seed(3)
    drawn = torch.zeros(10_000_000, device="fake")
    thread = threading.Thread(target=drawn.uniform_)
    thread.start()
    while drawn[0] == drawn[1]:
        pass
    torch.fake.manual_seed(4)
    thread.join()
    assert torch.equal(drawn, expected)


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


def a_forked_child_can_free() -> None:
    register()
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.ones(1).pin_memory()
            torch.ones(1, device="fake")

    def free() -> None:
        signal.alarm(20)
        kept.clear()
        assert torch.fake.memory_allocated() >= 0

    kept = [torch.ones(1).pin_memory(), torch.ones(1, device="fake")]
    threads = [threading.Thread(target=allocate) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert [in_a_child(free) for _ in range(100)] == [0] * 100
    finally:
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    # torch's threads may still be giving up a graph: if Python ends meanwhile, they abort it.
    time.sleep(0.2)
