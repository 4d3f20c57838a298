"""Storages: the memory under tensors, its size, whose it is, and its copies."""

import copy
import pickle

import pytest
import torch
from torch import nn

from core_plugin.testing.device.memory import gives_back
from core_plugin.testing.device.subject import Subject
from core_plugin.testing.device.values import DTYPES, assert_equal, sample

pytestmark = pytest.mark.level(1)


def test_tensors_and_views_have_one_storage(device: torch.device) -> None:
    """A tensor and its views have one storage: on the device, and as large as it must be."""
    there = sample(4, 6).to(device)
    storage = there.untyped_storage()
    assert storage.device == device
    assert storage.nbytes() >= 96
    assert there.t()[1:].untyped_storage()._cdata == storage._cdata
    assert there.clone().untyped_storage()._cdata != storage._cdata
    assert storage.cpu().device.type == "cpu"
    assert storage.cpu().tolist()[:96] == sample(24).untyped_storage().tolist()
    assert storage.clone().device == device
    assert storage.clone().data_ptr() != storage.data_ptr()


def test_a_storage_is_set(device: torch.device) -> None:
    """``set_`` and ``data`` make a tensor look at another one's storage."""
    values, there = sample(24), sample(24).to(device)
    view = torch.empty(0, device=device).set_(there.untyped_storage(), 2, (3, 4), (6, 1))
    assert_equal(view, values.as_strided((3, 4), (6, 1), 2), on=device)
    assert view.untyped_storage().data_ptr() == there.data_ptr()
    same = torch.empty(0, device=device).set_(there)  # type: ignore[call-overload]
    assert same.is_set_to(there)
    assert not view.is_set_to(there)
    data = torch.zeros(1, device=device)
    data.data = there
    for tensor in (view, same, data):
        tensor.add_(1)
    values.as_strided((3, 4), (6, 1), 2).add_(1)
    assert_equal(there, values + 2, on=device)


@pytest.mark.only("accelerator")
def test_another_devices_storage_is_refused(device: torch.device) -> None:
    """A tensor does not take a storage of the CPU."""
    with pytest.raises(RuntimeError):
        torch.empty(0, device=device).set_(torch.ones(4).untyped_storage(), 0, (4,), (1,))


def test_resizing_keeps_what_fits(device: torch.device) -> None:
    """``resize_`` keeps the elements that are there, in memory's order, and makes room for more."""
    there = sample(2, 3).to(device)
    there.resize_(4, 64)
    assert there.shape == (4, 64)
    assert there.untyped_storage().nbytes() >= 1024
    assert_equal(there.view(-1)[:6], sample(2, 3).view(-1), on=device)
    there.fill_(3)
    assert_equal(there.resize_(5), torch.full((5,), 3.0), on=device)
    assert_equal(there.resize_as_(torch.empty(2, 4)), torch.full((2, 4), 3.0), on=device)
    assert torch.empty(0, device=device).resize_(3).fill_(1).sum().item() == 3


def test_an_output_grows(device: torch.device) -> None:
    """With ``out=`` an empty tensor grows, one that fits is written in place, also if strided."""
    values, there = sample(4, 6), sample(4, 6).to(device)
    grown = torch.empty(0, device=device)
    assert torch.mul(there, 2, out=grown) is grown
    assert_equal(grown, values * 2, on=device)
    address = grown.data_ptr()
    torch.sum(there, dim=1, out=grown.resize_(0))
    assert_equal(grown, values.sum(1), on=device)
    assert grown.data_ptr() == address, "it has other memory, though there was enough"
    base = torch.zeros(6, 8, device=device)
    torch.add(there, 1, out=base[:, 2:6].t())
    expected = torch.zeros(6, 8)
    expected[:, 2:6] = (values + 1).t()
    assert_equal(base, expected, on=device)
    with pytest.raises(RuntimeError):
        torch.add(there, 1, out=torch.empty(4, 6, dtype=torch.int32, device=device))


@pytest.mark.requires("storage_resize")
def test_a_storages_memory_is_given_back(device: torch.device, subject: Subject) -> None:
    """A storage of size 0 has no memory, and gets some when it is resized again."""
    there = torch.ones(1 << 16, device=device)
    storage = there.untyped_storage()
    with gives_back(1 << 18, subject, device):
        storage.resize_(0)
        if storage.nbytes() != 0:
            raise NotImplementedError("a storage cannot be resized")
    assert (there.shape, there.device) == ((1 << 16,), device)
    storage.resize_(4 << 16)
    assert storage.nbytes() == 4 << 16
    there.fill_(2)
    assert_equal(there, torch.full((1 << 16,), 2.0), on=device)
    storage.resize_(8 << 16)
    assert_equal(there, torch.full((1 << 16,), 2.0), on=device)


def test_a_storage_is_made_or_refused(device: torch.device) -> None:
    """``torch.UntypedStorage`` on the device has the size asked for, or it raises."""
    try:
        storage = torch.UntypedStorage(16, device=device)
    except (RuntimeError, NotImplementedError):
        return
    assert (storage.device, storage.nbytes()) == (device, 16)
    storage.copy_(torch.arange(4, dtype=torch.int32).untyped_storage())
    there = torch.empty(0, dtype=torch.int32, device=device).set_(storage)
    assert_equal(there, torch.arange(4, dtype=torch.int32), on=device)
    assert torch.UntypedStorage(0, device=device).nbytes() == 0


def test_a_deep_copy_is_independent(device: torch.device) -> None:
    """A deep copy has memory of its own; what shared memory before shares it after."""
    there = sample(4, 6).to(device)
    base, view = copy.deepcopy((there, there.t()[1:3]))
    there.zero_()
    assert_equal(base, sample(4, 6), on=device)
    assert_equal(view, sample(4, 6).t()[1:3], on=device)
    assert view.stride() == (1, 6)
    base.add_(1)
    assert_equal(view, sample(4, 6).t()[1:3] + 1, on=device)
    parameter = copy.deepcopy(nn.Parameter(there))
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert parameter.device == device


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pickled_tensor_comes_back(device: torch.device, dtype: torch.dtype) -> None:
    """Pickling keeps device, dtype, layout and values."""
    there = sample(4, 6, dtype=dtype).to(device)
    base, view = pickle.loads(pickle.dumps((there, there.t()[1:3])))
    there.zero_()
    assert_equal(base, sample(4, 6, dtype=dtype), on=device)
    assert_equal(view, sample(4, 6, dtype=dtype).t()[1:3], on=device)
    assert view.stride() == (1, 6)
