"""Registering a device in torch's one slot for devices that it does not have itself.

A process has one slot, and what was put there stays. So everything that can be checked before is
checked before, and a failure says whether the slot is used up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from core_plugin import discovery
from core_plugin.errors import CorePluginError, PluginConflictError, PluginContractError
from core_plugin.privateuse1.backend import BUILT_IN_DEVICES, DeviceBackend

FREE = "privateuseone"
"""What torch calls the slot as long as nothing is in it."""


@dataclass(frozen=True)
class _Registration:
    provider: str
    backend: DeviceBackend


_lock = threading.RLock()
_registration: _Registration | None = None
_occupier: str | None = None
"""The provider that gave the slot its name, whether or not it passed the checks after that."""
_failures: dict[str, CorePluginError] = {}


def has_backend() -> bool:
    """Whether a device is registered, with all checks passed."""
    return _registration is not None


def registered() -> DeviceBackend | None:
    """The device that is registered in this process."""
    return _registration.backend if _registration else None


def register(
    provider: type[Any],
    backend: DeviceBackend,
    load_runtime: Callable[[], ModuleType],
    load_collectives: Callable[[], object],
) -> DeviceBackend:
    """Put a device into torch's slot, once in a process; the hardware is not touched.

    The checks are, in this order: name, slot, runtime, collective library, kernels.

    Args:
        provider: The class that the device comes from.
        backend: What it says of itself.
        load_runtime: Loads its libraries; returns what becomes ``torch.<name>``.
        load_collectives: Registers its ``torch.distributed`` backend.

    Returns:
        What the first call registered.

    Raises:
        PluginConflictError: Another device is in the slot.
        PluginContractError: The name is torch's own, or a piece is missing. It is raised again,
            the same, by every later call.
    """
    global _registration
    if backend.name in BUILT_IN_DEVICES:
        raise PluginContractError(f"a device cannot be called {backend.name!r}: torch has one")
    import torch  # noqa: F401  # before the lock is taken: importing torch may register the device

    name = _described(provider)
    with _lock:
        if name in _failures:
            raise type(_failures[name])(*_failures[name].args) from _failures[name].__cause__
        if _registration and _registration.provider == name:
            return _ready_in_this_thread(_registration.backend)
        try:
            _check_slot(name, backend)
            _fill_slot(name, backend, load_runtime, load_collectives)
        except CorePluginError as error:
            _failures[name] = error
            raise
        except Exception as error:
            _failures[name] = _failure(backend, f"{type(error).__name__}: {error}")
            raise _failures[name] from error
        _registration = _Registration(name, backend)
        return _ready_in_this_thread(backend)


def _ready_in_this_thread(backend: DeviceBackend) -> DeviceBackend:
    """Set what torch keeps for each thread: the dtype that autocast takes by itself."""
    import torch

    torch.set_autocast_dtype(backend.name, getattr(torch, backend.default_autocast_dtype))
    return backend


def _described(provider: type[Any]) -> str:
    """A provider's distribution and class, or its class alone."""
    target = f"{provider.__module__}:{provider.__qualname__}"
    installed = discovery.scan().group("core_plugin.device")
    return next((str(c) for c in installed if c.value == target), target)


def _check_slot(provider: str, backend: DeviceBackend) -> None:
    import torch

    occupant = torch._C._get_privateuse1_backend_name()
    if _occupier or occupant not in (FREE, backend.name):
        raise PluginConflictError(
            f"a process has one device beside torch's own: it is {occupant!r}, of "
            f"{_occupier or 'code that core-plugin does not know'}; {backend.name!r}, of "
            f"{provider}, needs a process of its own"
        )


def _fill_slot(
    provider: str,
    backend: DeviceBackend,
    load_runtime: Callable[[], ModuleType],
    load_collectives: Callable[[], object],
) -> None:
    import torch

    from core_plugin.privateuse1 import requirements

    module = load_runtime()
    if missing := requirements.missing_functions(module, backend.capabilities):
        raise _failure(backend, f"the runtime's module lacks {', '.join(missing)}")
    _name_slot(provider, backend, module)
    if not requirements.has_hooks():
        raise _failure(backend, "the runtime registers no PrivateUse1HooksInterface")
    default = getattr(torch, backend.default_autocast_dtype)
    if default not in module.get_amp_supported_dtype():
        raise _failure(
            backend, f"its default autocast dtype {default} is not in get_amp_supported_dtype()"
        )
    if backend.collective_backend:
        load_collectives()
        if fault := requirements.collective_fault(backend):
            raise _failure(backend, fault)
    if missing := list(requirements.missing_kernels()):
        raise _failure(backend, f"it has no kernel for {', '.join(missing)}")


def _name_slot(provider: str, backend: DeviceBackend, module: ModuleType) -> None:
    """Give the slot its name: from here on it cannot be another one's in this process."""
    global _occupier
    import torch

    _occupier = provider

    torch.utils.rename_privateuse1_backend(backend.name)
    if not hasattr(torch, backend.name):
        torch._register_device_module(backend.name, module)
    if not hasattr(torch.Tensor, backend.name):
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _failure(backend: DeviceBackend, reason: str) -> PluginContractError:
    import torch

    occupant = torch._C._get_privateuse1_backend_name()
    slot = (
        "torch's slot for such a device is still free"
        if occupant == FREE
        else f"torch's slot for such a device is {occupant!r} until this process ends"
    )
    return PluginContractError(f"cannot register the device {backend.name!r}: {reason}; {slot}")
