"""Copies between the CPU and a device, between devices, and of single values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from core_plugin.testing.device.subject import Subject
from core_plugin.testing.device.values import DTYPES, assert_equal, sample, synchronize

pytestmark = pytest.mark.level(1)

CPU = torch.device("cpu")

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(1, 2, 0),
    "sliced": lambda x: x[:, 1:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
    "offset": lambda x: x[1],
}
"""Views of a tensor of three dimensions."""

ROUTES = ["to the device", "from the device", "on the device"]


def _ends(route: str, device: torch.device) -> tuple[torch.device, torch.device]:
    """Where a copy comes from and goes to."""
    return {
        "to the device": (CPU, device),
        "from the device": (device, CPU),
        "on the device": (device, device),
    }[route]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_round_trip_keeps_every_bit(device: torch.device, dtype: torch.dtype) -> None:
    """To the device, from tensor to tensor on it, and back: the values are the same."""
    values = sample(5, 7, dtype=dtype)
    there = values.to(device)
    assert_equal(there, values, on=device)
    assert_equal(there.clone(), values, on=device)
    assert_equal(torch.empty_like(there).copy_(there), values, on=device)
    assert_equal(there.cpu(), values, on=CPU)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("route", ROUTES)
def test_a_copy_keeps_the_layout(device: torch.device, route: str, layout: str) -> None:
    """A copy of a view has the strides that the CPU gives it, and the view's values."""
    source, target = _ends(route, device)
    view = LAYOUTS[layout](sample(3, 4, 6))
    copy = LAYOUTS[layout](sample(3, 4, 6).to(source)).to(target, copy=True)
    assert_equal(copy, view, on=target)
    expected = view.to("cpu", copy=True).stride()
    assert copy.stride() == expected, f"its strides are {copy.stride()}, not {expected}"


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "permuted", "sliced", "offset"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_copy_into_a_view_writes_there_alone(
    device: torch.device, route: str, layout: str
) -> None:
    """``copy_`` from and into a view writes all of it, nothing beside it, and keeps strides."""
    source, target = _ends(route, device)
    base, values = torch.full((3, 4, 6), -1.0), sample(3, 4, 6)
    there = base.to(target, copy=True)
    view, from_ = LAYOUTS[layout](there), LAYOUTS[layout](values.to(source))
    strides = view.stride()
    view.copy_(from_)
    LAYOUTS[layout](base).copy_(LAYOUTS[layout](values))
    assert view.stride() == strides, f"its strides became {view.stride()}"
    assert_equal(there, base, on=target)


@pytest.mark.parametrize("route", ROUTES)
def test_a_copy_expands_and_converts(device: torch.device, route: str) -> None:
    """``copy_`` repeats a smaller source, and converts it to the target's dtype."""
    source, target = _ends(route, device)
    row = sample(1, 4, dtype=torch.int32)
    copy = torch.zeros(3, 4, dtype=torch.float16, device=target).copy_(row.to(source))
    assert_equal(copy, row.expand(3, 4).to(torch.float16), on=target)
    scalar = torch.zeros(2, 2, device=target).copy_(torch.tensor(2.5, device=source))
    assert_equal(scalar, torch.full((2, 2), 2.5), on=target)
    empty = torch.empty(0, 3, device=source)
    assert_equal(torch.empty(0, 3, device=target).copy_(empty), torch.empty(0, 3), on=target)


@pytest.mark.parametrize("route", ROUTES)
def test_a_copy_is_no_alias(device: torch.device, route: str) -> None:
    """After a copy neither end sees what is written into the other."""
    source, target = _ends(route, device)
    original = sample(4).to(source, copy=True)
    copy = original.to(target, copy=True)
    original.fill_(100)
    assert_equal(copy, sample(4), on=target)
    copy.fill_(-100)
    assert_equal(original, torch.full((4,), 100.0), on=source)
    assert original.to(source) is original


@pytest.mark.parametrize("shift", [1, -1, 3])
def test_an_overlapping_copy_is_right_or_refused(device: torch.device, shift: int) -> None:
    """A copy onto part of itself is as if its source had been copied before, or it raises."""
    memory = torch.arange(64.0, device=device)
    source, target = (memory[shift:], memory[:-shift]) if shift > 0 else (memory[:-1], memory[1:])
    expected = source.cpu()
    try:
        target.copy_(source)
    except RuntimeError:
        expected = torch.arange(64.0)[target.storage_offset() :][: len(expected)]
    assert_equal(target, expected, on=device)
    memory[:32].copy_(memory[32:].clone())
    assert_equal(memory[:32], memory[32:].cpu(), on=device)


def test_the_target_holds_what_was_copied(device: torch.device) -> None:
    """A copy writes the target's own memory: operators there, and other views of it, see it."""
    memory = torch.full((8,), 7.0, device=device)
    target, seen = memory[2:6], memory.view(2, 4)
    target.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    expected = torch.tensor([7.0, 7, 1, 2, 3, 4, 7, 7])
    assert_equal(seen * 2, expected.view(2, 4) * 2, on=device)
    assert memory.sum().item() == expected.sum().item(), memory.sum().item()
    host = torch.full((8,), -1.0)
    host.copy_(memory.add(1))
    torch.testing.assert_close(host, expected + 1, rtol=0, atol=0)


@pytest.mark.requires("multiple_devices")
@pytest.mark.parametrize("source", ["cpu", "current", "other"])
@pytest.mark.parametrize("target", ["cpu", "current", "other"])
def test_a_copy_between_devices_lands_on_its_target(
    device: torch.device, other_device: torch.device, source: str, target: str
) -> None:
    """Whichever device is current, a copy fills the memory of its target, and no other."""
    places = {"cpu": CPU, "current": device, "other": other_device}
    bystanders = [torch.full((64,), -2.0, device=d) for d in places.values()]
    memory = torch.full((64,), 7.0, device=places[target])
    start = sample(64).to(places[source])
    memory[8:56].copy_(start[8:56])
    expected = torch.full((64,), 7.0)
    expected[8:56] = sample(64)[8:56]
    assert_equal(memory.view(8, 8) * 2, expected.view(8, 8) * 2, on=places[target])
    assert_equal(start.to(places[target]) + 1, sample(64) + 1, on=places[target])
    assert_equal(start + 1, sample(64) + 1, on=places[source])
    for bystander in bystanders:
        assert_equal(bystander + 1, torch.full((64,), -1.0), on=bystander.device)
    assert torch.get_device_module(device).current_device() == device.index


@pytest.mark.requires("multiple_devices")
def test_a_copy_takes_its_targets_memory(
    device: torch.device, other_device: torch.device, subject: Subject
) -> None:
    """A copy to a device that is not current takes memory there, and none on the current one."""
    from_here, nbytes = torch.ones(1 << 20, device=device), 4 << 20
    copies = [torch.ones(1 << 20).to(other_device), from_here.to(other_device)]
    for copy in copies:
        assert copy.device == copy.untyped_storage().device == other_device
    assert not torch.equal(copies[0].mul_(3).cpu(), copies[1].cpu()), "two copies share memory"
    if subject.declares("memory_statistics"):
        allocated = torch.get_device_module(device).memory_allocated
        before = allocated(device), allocated(other_device)
        more = [torch.ones(1 << 20).to(other_device), from_here.to(other_device)]
        after = allocated(device), allocated(other_device)
        assert after[0] == before[0], "memory was taken on the current device"
        assert after[1] >= before[1] + len(more) * nbytes, "no memory was taken on the target"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_that_do_not_block_are_there_after_a_wait(
    device: torch.device, dtype: torch.dtype, layout: str
) -> None:
    """With ``non_blocking`` and memory that is not pinned, all is there once one has waited."""
    values = sample(64, 64, 64)
    there = values.to(device, non_blocking=True)
    host = torch.full_like(LAYOUTS[layout](values), -99, dtype=dtype)
    host.copy_(LAYOUTS[layout](there * 2), non_blocking=True)
    synchronize(device)
    torch.testing.assert_close(host, (LAYOUTS[layout](values) * 2).to(dtype), rtol=0, atol=0)
    assert_equal(there, values, on=device)


@pytest.mark.only("accelerator")
@pytest.mark.requires("pinned_memory")
def test_what_is_sent_without_blocking_is_there_after_a_wait(device: torch.device) -> None:
    """``to("cpu", non_blocking=True)``, for which torch takes pinned memory, holds after a wait."""
    for name, layout in LAYOUTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            sent = layout(sample(64, 64, 64).to(device) * 2).to("cpu", dtype, non_blocking=True)
            synchronize(device)
            assert_equal(sent, (layout(sample(64, 64, 64)) * 2).to(dtype), on=CPU, what=name)


@pytest.mark.requires("pinned_memory")
def test_pinned_memory_is_copied_to_and_from(device: torch.device) -> None:
    """Pinned memory says that it is, and copies from and into it hold once one has waited."""
    values = sample(64, 64)
    pinned = values.pin_memory()
    if not pinned.is_pinned():
        raise RuntimeError("pin_memory() gives memory that is not pinned")
    assert not values.is_pinned()
    torch.testing.assert_close(pinned, values, rtol=0, atol=0)
    there = pinned.to(device, non_blocking=True)
    back = torch.full((64, 64), -99.0, pin_memory=True)
    assert back.is_pinned()
    back.copy_(there * 2, non_blocking=True)
    synchronize(device)
    assert_equal(there, values, on=device)
    torch.testing.assert_close(back, values * 2, rtol=0, atol=0)
    assert torch.empty(0, pin_memory=True).to(device).numel() == 0


def test_meta_tensors_have_no_values(device: torch.device) -> None:
    """A tensor goes to ``meta`` with its layout; nothing comes from there but the layout."""
    there = sample(3, 4).to(device).t()
    meta = there.to("meta")
    assert (meta.device.type, meta.shape, meta.stride()) == ("meta", (4, 3), (1, 4))
    with pytest.raises(NotImplementedError):
        meta.to(device)
    made = torch.empty_like(meta, device=device)
    assert (made.device, made.stride()) == (device, (1, 4))


@pytest.mark.only("accelerator")
def test_numpy_is_refused(device: torch.device) -> None:
    """The device's memory is not given to numpy; the error says how to go about it."""
    there = torch.ones(2, device=device)
    with pytest.raises(TypeError, match=r"\.cpu\(\)"):
        there.numpy()
    assert there.cpu().numpy().sum() == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_read(device: torch.device, dtype: torch.dtype) -> None:
    """``item``, ``tolist`` and ``bool`` read values, at an offset too."""
    values = sample(3, 4, dtype=dtype)
    there = values.to(device)
    assert there.tolist() == values.tolist()
    assert there[2, 3].item() == values[2, 3].item()
    assert there.t()[1, 2].item() == values.t()[1, 2].item()
    assert [bool(x) for x in there.flatten()] == [bool(x) for x in values.flatten()]
    with pytest.raises(RuntimeError):
        there.item()


def test_values_are_used_in_python(device: torch.device) -> None:
    """A tensor of one element is a number, an index, a condition, and an iterator's element."""
    there = torch.arange(4, device=device)
    assert [10, 11, 12, 13][there[2]] == 12
    assert (int(there[3]), float(there[1]), f"{there[1].item()}") == (3, 1.0, "1")
    assert there[1]
    assert not there[0]
    assert sum(x.item() for x in there) == 6
    assert 3 in there


MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda there, here: there + here,
    "add, the other way": lambda there, here: here + there,
    "in place": lambda there, here: there.mul_(here),
    "matmul": lambda there, here: there @ here,
    "cat": lambda there, here: torch.cat([there, here]),
    "where": lambda there, here: torch.where(there > 0, there, here),
    "out": lambda there, here: torch.add(there, there, out=here),
    "convolution": lambda there, here: conv1d(there[None], here[None]),
    "convolution, the other way": lambda there, here: conv1d(here[None], there[None]),
    "convolution with a bias": lambda there, here: conv1d(there[None], there[None], here[0, :1]),
}


def _needing_capabilities(operator: str) -> Any:
    needed = [pytest.mark.requires("convolution")] if operator.startswith("convolution") else []
    return pytest.param(operator, marks=needed)


@pytest.mark.only("accelerator")
@pytest.mark.parametrize("operator", [_needing_capabilities(name) for name in MIXED])
def test_devices_do_not_mix(device: torch.device, operator: str) -> None:
    """An operator that works on one device raises for tensors of two, and changes neither."""
    there, here = torch.full((2, 2), 3.0, device=device), torch.full((2, 2), 5.0)
    MIXED[operator](there.clone(), there.clone())
    with pytest.raises(RuntimeError):
        MIXED[operator](there, here)
    assert_equal(there, torch.full((2, 2), 3.0), on=device)
    assert_equal(here, torch.full((2, 2), 5.0), on=CPU)


def test_numbers_of_the_cpu_do_mix(device: torch.device) -> None:
    """A tensor of the CPU without dimensions is used as a number is."""
    there = sample(2, 3).to(device)
    assert_equal(there * torch.tensor(2.0), sample(2, 3) * 2, on=device)
    assert_equal(torch.tensor(1.0) - there, 1 - sample(2, 3), on=device)
