"""Making tensors on a device: what is in them, how they lie in memory, and where."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from core_plugin.testing.device.values import DTYPES, assert_equal, sample

pytestmark = pytest.mark.level(1)

FACTORIES: dict[str, Callable[[torch.device], Tensor]] = {
    "zeros": lambda device: torch.zeros(2, 3, device=device),
    "ones": lambda device: torch.ones(2, 3, device=device),
    "full": lambda device: torch.full((2, 3), 2.5, device=device),
    "full of integers": lambda device: torch.full((2,), 7, device=device),
    "arange": lambda device: torch.arange(5, device=device),
    "arange of floats": lambda device: torch.arange(0, 2, 0.25, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "eye": lambda device: torch.eye(3, 2, device=device),
    "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    "tensor": lambda device: torch.tensor([[1.5, 2], [3, 4]], device=device),
    "tensor of booleans": lambda device: torch.tensor([True, False], device=device),
    "as_tensor": lambda device: torch.as_tensor(sample(2, 3), device=device),
    "scalar_tensor": lambda device: torch.scalar_tensor(3, device=device),
}

FROM_ANOTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 3),
    "zeros_like of another dtype": lambda x: torch.zeros_like(x, dtype=torch.int64),
    "new_zeros": lambda x: x.new_zeros(4),
    "new_ones": lambda x: x.new_ones(4, dtype=torch.int32),
    "new_full": lambda x: x.new_full((2, 2), 5),
    "new_tensor": lambda x: x.new_tensor([1, 2, 3]),
}


def test_what_is_made_is_the_same(device: torch.device) -> None:
    """Functions that make tensors give the CPU's values, shape and dtype."""
    for name, factory in FACTORIES.items():
        assert_equal(factory(device), factory(torch.device("cpu")), on=device, what=name)


def test_what_is_made_after_another_is_the_same(device: torch.device) -> None:
    """What is made after another tensor is on its device, and in the same order in memory."""
    model = sample(3, 4).t()
    for name, factory in FROM_ANOTHER.items():
        made, expected = factory(model.to(device)), factory(model)
        assert_equal(made, expected, on=device, what=name)
        assert made.stride() == expected.stride(), f"{name} has the strides {made.stride()}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_has_shape_and_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Memory without values has the shape and dtype, and can be filled."""
    made = torch.empty(2, 3, dtype=dtype, device=device)
    assert (made.shape, made.dtype, made.device) == ((2, 3), dtype, device)
    assert made.untyped_storage().nbytes() >= 6 * dtype.itemsize
    made.copy_(sample(2, 3, dtype=dtype))
    assert_equal(made, sample(2, 3, dtype=dtype), on=device)
    assert torch.empty_like(made).device == made.new_empty(1).device == device


def test_shapes_without_extent(device: torch.device) -> None:
    """Tensors without elements, and those without dimensions, are like others."""
    for shape in ((0,), (2, 0, 3), ()):
        made = torch.empty(shape, device=device).fill_(2)
        assert_equal(made, torch.full(shape, 2.0), on=device)
        assert_equal(made + made.clone(), torch.full(shape, 4.0), on=device)
        assert_equal(torch.full(shape, 2.0).to(device), torch.full(shape, 2.0), on=device)
        assert made.sum().item() == 2 * made.numel()


def test_strides_are_those_asked_for(device: torch.device) -> None:
    """``empty_strided`` lays a tensor out as it is told to."""
    for strides in ((1, 2), (3, 1), (8, 2)):
        made = torch.empty_strided((2, 3), strides, device=device)
        assert made.stride() == strides, f"its strides are {made.stride()}, not {strides}"
        assert_equal(made.copy_(sample(2, 3)), sample(2, 3), on=device)
    assert torch.empty_strided((2, 3), (1, 0), device=device).stride() == (1, 0)


def test_memory_formats_are_kept(device: torch.device) -> None:
    """Channels come last in memory where that is asked for, and stay there in copies."""
    formats = {torch.channels_last: (2, 3, 4, 5), torch.channels_last_3d: (2, 3, 2, 2, 2)}
    for memory_format, shape in formats.items():
        made = torch.empty(shape, device=device, memory_format=memory_format)
        moved = sample(*shape).to(device).contiguous(memory_format=memory_format)
        for tensor in (made, moved, moved.clone(), moved.cpu(), torch.empty_like(moved)):
            assert tensor.is_contiguous(memory_format=memory_format), tensor.stride()
        assert_equal(moved.clone(), sample(*shape), on=device)


def test_each_has_memory_of_its_own(device: torch.device) -> None:
    """What is written into one tensor is in no other, also after others were given back."""
    kept: list[tuple[int, Tensor]] = []
    for number in range(1, 65):
        kept.append((number, torch.full((number * 7,), number, device=device)))
        torch.full((number * 5,), -1, device=device)
        if number % 3 == 0:
            del kept[number % len(kept)]
    for number, tensor in kept:
        assert_equal(tensor, torch.full((number * 7,), number), on=device)


def test_the_default_device_is_used(device: torch.device) -> None:
    """Inside ``with device:`` tensors are made there, and after it on the CPU again."""
    with torch.device(device.type):
        assert torch.ones(2).device == device
    with device:
        assert_equal(torch.tensor([1, 2]), torch.tensor([1, 2], device="cpu"), on=device)
    assert torch.ones(2).device.type == "cpu"


@pytest.mark.only("accelerator")
@pytest.mark.parametrize("how", ["making", "copying", "setting", "entering", "a storage"])
def test_an_index_beyond_the_last_is_refused(device: torch.device, how: str) -> None:
    """An index that there is not raises, and the current device stays what it was."""
    module = torch.get_device_module(device)
    beyond = torch.device(device.type, module.device_count())
    uses: dict[str, Callable[[], object]] = {
        "making": lambda: torch.ones(2, device=beyond),
        "copying": lambda: torch.ones(2).to(beyond),
        "setting": lambda: module.set_device(beyond.index),
        "entering": module.device(beyond.index).__enter__,
        "a storage": lambda: torch.UntypedStorage(8, device=beyond),
    }
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        uses[how]()
    assert module.current_device() == device.index
    assert_equal(torch.ones(2, device=device.type), torch.ones(2), on=device)


@pytest.mark.requires("multiple_devices")
def test_the_current_device_is_where_tensors_are_made(
    device: torch.device, other_device: torch.device
) -> None:
    """Without an index tensors are made on the current device, which a block changes for itself."""
    module = torch.get_device_module(device)
    with module.device(other_device):
        assert module.current_device() == other_device.index
        assert torch.ones(2, device=device.type).device == other_device
    assert module.current_device() == device.index
    with pytest.raises(ZeroDivisionError), module.device(other_device.index):
        raise ZeroDivisionError
    assert module.current_device() == device.index
    assert torch.ones(2, device=device.type).device == device


@pytest.mark.requires("multiple_devices")
def test_an_index_goes_before_the_current_device(
    device: torch.device, other_device: torch.device
) -> None:
    """With an index tensors are made there, computed with there, and the current device stays."""
    for name, factory in FACTORIES.items():
        made, expected = factory(other_device), factory(torch.device("cpu"))
        assert_equal(made, expected, on=other_device, what=name)
        assert_equal(made + made, expected + expected, on=other_device, what=name)
        assert made.untyped_storage().device == torch.empty_like(made).device == other_device
    assert torch.empty_strided((2, 2), (1, 2), device=other_device).device == other_device
    assert torch.get_device_module(device).current_device() == device.index
