"""What is saved on one device and loaded on the same or another."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from core_plugin.testing.children import run_python
from core_plugin.testing.device.comparison import normal

pytestmark = pytest.mark.level(1)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def _state(device: torch.device | str) -> dict[str, Any]:
    """Tensors as a state dict has them."""
    numbers = (10 * normal(3, 4)).abs()
    return {
        "parameter": nn.Parameter(numbers.to(device)),
        "transposed": numbers.to(device).t(),
        "scalar": torch.tensor(2.5, device=device),
        "empty": torch.empty(0, 3, device=device),
        "dtypes": [numbers.to(device).to(dtype) for dtype in DTYPES],
        "number": 3,
    }


def _assert_equal(actual: Any, expected: Any, device: torch.device | str) -> None:
    torch.testing.assert_close(actual, expected, check_device=False, rtol=0, atol=0)
    tensors = [t for t in actual.values() if isinstance(t, Tensor)] + actual["dtypes"]
    assert {tensor.device for tensor in tensors} == {torch.device(device)}


def _moved(state: dict[str, Any]) -> dict[str, Any]:
    moved: dict[str, Any] = tree_map_only(Tensor, lambda t: t.detach().cpu(), state)
    return moved


def test_tensors_come_back_on_the_device_they_were_on(
    device: torch.device, directory: Path
) -> None:
    """``torch.load`` puts tensors back on the device, with values, dtypes and strides."""
    torch.save(_state(device), directory / "state.pt")
    loaded = torch.load(directory / "state.pt")
    _assert_equal(_moved(loaded), _state("cpu"), "cpu")
    assert {t.device for t in loaded["dtypes"]} == {device}
    assert loaded["parameter"].device == device
    assert isinstance(loaded["parameter"], nn.Parameter)
    assert loaded["transposed"].stride() == _state("cpu")["transposed"].stride()


def test_views_of_one_memory_are_loaded_as_such(device: torch.device, directory: Path) -> None:
    """Tensors that share memory when they are saved share it when they are loaded."""
    base = normal(4, 4).to(device)
    torch.save({"base": base, "row": base[1], "offset": base.view(-1)[6:9]}, directory / "s.pt")
    loaded = torch.load(directory / "s.pt")
    torch.testing.assert_close(loaded["offset"].cpu(), base.view(-1)[6:9].cpu())
    loaded["base"].fill_(7.0)
    assert loaded["row"].sum().item() == 28.0
    assert loaded["offset"].sum().item() == 21.0


LOAD_ON_CPU = """
import sys
import torch

assert torch._C._get_privateuse1_backend_name() == "privateuseone"
torch.save(torch.load(sys.argv[1], map_location="cpu"), sys.argv[2])
"""


def test_a_process_without_the_device_loads_on_the_cpu(
    device: torch.device, directory: Path
) -> None:
    """What the device saved can be read where nobody has heard of the device."""
    from_device, from_cpu = directory / "device.pt", directory / "cpu.pt"
    torch.save(_state(device), from_device)
    run_python(LOAD_ON_CPU, str(from_device), str(from_cpu))
    _assert_equal(torch.load(from_cpu), _state("cpu"), "cpu")


def test_what_the_cpu_saved_is_loaded_on_the_device(device: torch.device, directory: Path) -> None:
    """``map_location`` moves tensors of the CPU to the device: by object, text and name alone."""
    torch.save(_state("cpu"), directory / "state.pt")
    for place in (device, str(device), device.type):
        loaded = torch.load(directory / "state.pt", map_location=place)
        _assert_equal(loaded, _state("cpu"), device)


@pytest.mark.requires("multiple_devices")
def test_map_location_chooses_the_index(
    device: torch.device, other_device: torch.device, directory: Path
) -> None:
    """Tensors of one index are loaded on the one that ``map_location`` says, or else their own."""
    torch.save(_state(other_device), directory / "state.pt")
    _assert_equal(torch.load(directory / "state.pt"), _state("cpu"), other_device)
    loaded = torch.load(directory / "state.pt", map_location={str(other_device): str(device)})
    _assert_equal(loaded, _state("cpu"), device)


@pytest.mark.only("accelerator")
def test_an_index_that_does_not_exist_is_an_error(device: torch.device, directory: Path) -> None:
    """Tensors of an index that this machine lacks are not put somewhere else."""
    count = torch.get_device_module(device).device_count()
    torch.save(_state(device), directory / "state.pt")
    with pytest.raises(RuntimeError):
        torch.load(directory / "state.pt", map_location={str(device): f"{device.type}:{count}"})
    _assert_equal(torch.load(directory / "state.pt"), _state("cpu"), device)


class Unknown:
    """A class that no file may name unless it is allowed."""


def test_loading_runs_no_code_unless_told_to(device: torch.device, directory: Path) -> None:
    """By default a file with tensors of the device and an unknown class is refused."""
    torch.save({"tensor": torch.ones(2, device=device), "code": Unknown()}, directory / "s.pt")
    with pytest.raises(pickle.UnpicklingError, match="Unknown"):
        torch.load(directory / "s.pt")
    loaded = torch.load(directory / "s.pt", weights_only=False)
    assert isinstance(loaded["code"], Unknown)
    assert loaded["tensor"].device == device


def test_an_optimizer_goes_on_from_its_saved_state(device: torch.device, directory: Path) -> None:
    """AdamW's state is saved and loaded with dtype and device, and training goes on as before."""
    layer, optimizer = _training(device)
    _step(layer, optimizer)
    torch.save((layer.state_dict(), optimizer.state_dict()), directory / "state.pt")
    _step(layer, optimizer)

    resumed, resumed_optimizer = _training(device)
    _resume(resumed, resumed_optimizer, directory / "state.pt", None)
    state = resumed_optimizer.state[resumed.weight]
    assert state["exp_avg"].device == device
    assert state["exp_avg"].dtype == torch.float32
    assert state["step"].device == optimizer.state[layer.weight]["step"].device
    _step(resumed, resumed_optimizer)
    torch.testing.assert_close(resumed.weight, layer.weight)


def test_an_optimizer_goes_on_on_another_device(device: torch.device, directory: Path) -> None:
    """AdamW's state of the CPU goes on on the device, and the device's on the CPU."""
    for source, target in ((torch.device("cpu"), device), (device, torch.device("cpu"))):
        layer, optimizer = _training(source)
        _step(layer, optimizer)
        torch.save((layer.state_dict(), optimizer.state_dict()), directory / "state.pt")
        _step(layer, optimizer)

        resumed, resumed_optimizer = _training(target)
        _resume(resumed, resumed_optimizer, directory / "state.pt", "cpu")
        assert resumed_optimizer.state[resumed.weight]["exp_avg"].device == target
        _step(resumed, resumed_optimizer)
        torch.testing.assert_close(
            resumed.weight, layer.weight, check_device=False, rtol=1e-4, atol=1e-5
        )


def _training(device: torch.device) -> tuple[nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).to(device)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.01, eps=1e-4)


def _step(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    layer(normal(5, 4).to(layer.weight.device)).pow(2).sum().backward()
    optimizer.step()


def _resume(
    layer: nn.Linear, optimizer: torch.optim.Optimizer, file: Path, map_location: str | None
) -> None:
    of_layer, of_optimizer = torch.load(file, map_location=map_location)
    layer.load_state_dict(of_layer)
    optimizer.load_state_dict(of_optimizer)
