"""What a device is called: as it is written, read and printed."""

import pickle
import re

import pytest
import torch
from torch import nn

from core_plugin import privateuse1
from core_plugin.devices import parse_device
from core_plugin.errors import ConfigError, DeviceIndexError, PluginNotFoundError
from core_plugin.testing.device.subject import Subject

pytestmark = pytest.mark.level(1)


@pytest.mark.fresh
@pytest.mark.offline
def test_the_declared_name_is_printed(subject: Subject) -> None:
    """Once registered, a device is printed with the name that it declares."""
    name = subject.implementation.register(subject.params).name
    assert name == subject.backend.name
    device = torch.device(name, 0)
    assert str(device) == f"{name}:0", f"it is printed as {device}"
    assert (device.type, device.index) == (name, 0)
    assert torch.device(name).index is None
    assert pickle.loads(pickle.dumps(device)) == device


@pytest.mark.fresh
def test_a_name_is_parsed(subject: Subject) -> None:
    """The plugin's name, with and without an index, is the device; so is what is printed."""
    for index in ("", ":0"):
        device = parse_device(subject.name + index)
        assert str(device) == subject.backend.name + index
        assert parse_device(str(device)) == device


@pytest.mark.only("privateuse1")
def test_the_names_of_the_slot_are_parsed(device: torch.device) -> None:
    """The slot's own names are the device that is registered in it."""
    for alias in ("privateuse1", "privateuseone"):
        assert parse_device(alias) == torch.device(device.type)
        assert parse_device(f"{alias}:0") == torch.device(device.type, 0)


MALFORMED = ("{}:", "{}:-1", "{}:01", "{}:x", "{}:0:0", "{}0", " {}", "{}\n", "{}:0 ", ":0", "")


@pytest.mark.fresh
@pytest.mark.offline
def test_a_malformed_name_is_refused(subject: Subject) -> None:
    """A text that is no name and index is refused, with the text, before anything is registered."""
    for text in (subject.name.upper(), *(pattern.format(subject.name) for pattern in MALFORMED)):
        with pytest.raises(ConfigError, match=re.escape(repr(text))):
            parse_device(text)
    assert not privateuse1.has_backend()


def test_an_index_beyond_the_last_is_refused(device: torch.device, subject: Subject) -> None:
    """An index that there is not is refused, and the message has the text that was written."""
    count = torch.get_device_module(device).device_count()
    with pytest.raises(DeviceIndexError, match=f"{subject.name}:{count}"):
        parse_device(f"{subject.name}:{count}")


@pytest.mark.fresh
@pytest.mark.offline
def test_an_unknown_name_is_answered_with_those_installed(subject: Subject) -> None:
    """For a name that nothing has (yet), the message lists the devices that are installed."""
    for text in (f"{subject.name}_of_nobody", "privateuse1", "privateuseone:0"):
        with pytest.raises(PluginNotFoundError) as raised:
            parse_device(text)
        installed = str(raised.value).partition("installed: ")[2]
        assert subject.name in installed.split("; ")[0].split(", "), raised.value


@pytest.mark.only("accelerator")
def test_tensors_and_errors_show_the_name(device: torch.device) -> None:
    """Tensors, their types and torch's errors have the device's name, and not the slot's."""
    tensor = torch.arange(2, device=device)  # torch prints floats in float64
    assert f"device='{device}'" in repr(tensor), repr(tensor)
    assert f"torch.{device.type}." in tensor.type(), tensor.type()
    with pytest.raises(RuntimeError) as raised:
        tensor + torch.arange(2)
    message = str(raised.value)
    assert device.type in message, message
    assert "privateuse" not in message.lower(), message


@pytest.mark.only("privateuse1")
def test_torch_has_methods_of_the_name(device: torch.device) -> None:
    """``tensor.<name>()``, ``module.<name>()`` and ``tensor.is_<name>`` are there."""
    name = device.type
    moved = getattr(torch.ones(2), name)()
    assert moved.device == device
    assert getattr(moved, f"is_{name}")
    assert not getattr(torch.ones(2), f"is_{name}")
    assert getattr(nn.Linear(2, 2), name)().weight.device == device
    assert getattr(moved.cpu().untyped_storage(), name)().device == device
    assert torch.get_device_module(device) is getattr(torch, name)
