"""Devices by name, as users write them, and autocast on them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from core_plugin import privateuse1
from core_plugin.errors import (
    ConfigError,
    DeviceIndexError,
    PluginNotFoundError,
    PluginUnavailableError,
)
from core_plugin.types.device import DevicePlugin

if TYPE_CHECKING:
    import torch


def parse_device(text: str) -> torch.device:
    """The device that a text such as ``cpu``, ``cuda:0`` or ``fake:1`` names.

    ``privateuse1`` (or torch's ``privateuseone``) is whatever device is registered. A device that
    a package brings is registered; the hardware is not initialised.

    Raises:
        ConfigError: The text is no name, or a name and an index.
        PluginNotFoundError: No device has the name; the message lists those that are installed.
        PluginLoadError: The device's package is broken.
        PluginUnavailableError: It is installed, but cannot run here, because of what is said.
        PluginConflictError: This process has another device already.
        DeviceIndexError: There are fewer devices.
    """
    import torch

    name, index = _split(text)
    device_type = _registered_type(name) or _register(name)
    if index is None:
        return torch.device(device_type)
    count = torch.get_device_module(device_type).device_count()
    if index >= count:
        raise DeviceIndexError(f"there is no {text}: {device_type} has {_indices(count)}")
    return torch.device(device_type, index)


def _split(text: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(privateuse1|[a-z][a-z_]*)(?::(0|[1-9][0-9]*))?", text)
    if not found:
        raise ConfigError(
            f"{text!r} is no device: write a name, such as cpu, or a name and an index, such as "
            "cuda:0 (lowercase letters and underscores; the index without sign or leading zeros)"
        )
    name, index = found.groups()
    return name, None if index is None else int(index)


def _registered_type(name: str) -> str | None:
    """What the device in torch's slot is called, if the name is that or the slot's."""
    registered = privateuse1.registered()
    of_the_slot = name in ("privateuse1", "privateuseone")
    if of_the_slot and registered is None:
        raise PluginNotFoundError(
            f"{name!r}: no device is registered in torch's slot for devices that are not its own; "
            f"installed: {', '.join(DevicePlugin.names())}"
        )
    if registered and (of_the_slot or name == registered.backend.name):
        return registered.backend.name
    return None


def _register(name: str) -> str:
    """Let torch know the device of a plugin, with the parameters' defaults."""
    route = DevicePlugin(name)
    implementation = route.resolve()
    params: Any = route.parse_params({}, route.params_type())
    if reason := implementation.unavailable(params):
        raise PluginUnavailableError(
            f"the device {name!r} is installed, but cannot run here: {reason}"
        )
    device_type: str = implementation.register(params).name
    return device_type


def _indices(count: int) -> str:
    return "no device" if count == 0 else f"the indices 0 to {count - 1}"


def autocast(device_type: str, dtype: torch.dtype | None = None) -> torch.autocast:
    """A context in which operators compute in a dtype, where that is safe.

    Args:
        device_type: A device's name.
        dtype: The dtype; the device's default if none is given.

    Raises:
        PluginUnavailableError: The device has no autocast in the dtype (torch would warn, and
            compute in float32).
    """
    import torch

    chosen = dtype or _default_autocast_dtype(device_type)
    module = torch.get_device_module(device_type)
    in_tree = (torch.bfloat16, torch.float16)
    supported = getattr(module, "get_amp_supported_dtype", lambda: in_tree)()
    if chosen not in supported:
        raise PluginUnavailableError(
            f"{device_type} has no autocast in {chosen}, only in {', '.join(map(str, supported))}"
        )
    return torch.autocast(device_type, chosen)


def _default_autocast_dtype(device_type: str) -> torch.dtype:
    """The one that a registered device declares; torch's own is set for each thread alone."""
    import torch

    registered = privateuse1.registered()
    if registered and registered.backend.name == device_type:
        return getattr(torch, registered.backend.default_autocast_dtype)  # type: ignore[no-any-return]
    return torch.get_autocast_dtype(device_type)
