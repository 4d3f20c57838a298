"""Registering a device in torch's one slot for devices that it does not have itself.

A process has one slot, and what was put there stays. So everything that can be checked before is
checked before, and a failure says whether the slot is used up.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from core_plugin import discovery
from core_plugin.errors import CorePluginError, PluginConflictError, PluginContractError
from core_plugin.privateuse1.backend import BUILT_IN_DEVICES, DeviceBackend, backend_of, told

FREE = "privateuseone"
"""What torch calls the slot as long as nothing is in it."""


@dataclass(frozen=True)
class Registration:
    """The device that is in the slot."""

    provider: type[Any]
    """The ``PrivateUse1Device`` that it comes from."""
    params: Any
    backend: DeviceBackend


_lock = threading.RLock()
_registration: Registration | None = None
_occupier: str | None = None
"""The provider that gave the slot its name, whether or not it passed the checks after that."""
_failures: dict[str, CorePluginError] = {}


def has_backend() -> bool:
    """Whether a device is registered, with all checks passed."""
    return _registration is not None


def registered() -> Registration | None:
    """The device that is registered in this process."""
    return _registration


def register(provider: type[Any], params: Any) -> DeviceBackend:
    """Put a device into torch's slot, once in a process; the hardware is not touched.

    The checks are, in this order: name, slot, runtime, collective library, kernels.

    Args:
        provider: The ``PrivateUse1Device`` that the device comes from.
        params: Its parameters.

    Returns:
        What the provider says of the device; the same object from every call.

    Raises:
        PluginConflictError: Another device is in the slot, or this one with other parameters.
        PluginContractError: The name is torch's own, or a piece is missing. It is raised again,
            the same, by every later call.
    """
    global _registration
    backend = backend_of(provider, params)
    if backend.name in BUILT_IN_DEVICES:
        raise PluginContractError(f"a device cannot be called {backend.name!r}: torch has one")
    import torch  # noqa: F401  # before the lock is taken: importing torch may register the device

    name = _described(provider)
    with _lock:
        if name in _failures:
            raise type(_failures[name])(*_failures[name].args) from _failures[name].__cause__
        if _registration is None or _registration.provider is not provider:
            _check_slot(name, backend)
            _keep_failure(name, provider, params, backend)
            _registration = Registration(provider, params, backend)
        elif _registration.params != params:
            raise PluginConflictError(
                f"the device {backend.name!r} is registered with {_registration.params}; with "
                f"{params} it needs a process of its own"
            )
        return _ready_in_this_thread(_registration.backend)


def _described(provider: type[Any]) -> str:
    """A provider's distribution and class, or its class alone."""
    target = f"{provider.__module__}:{provider.__qualname__}"
    installed = discovery.scan().group("core_plugin.device")
    return next((str(c) for c in installed if c.value == target), target)


def _check_slot(name: str, backend: DeviceBackend) -> None:
    import torch

    occupant = torch._C._get_privateuse1_backend_name()
    if _occupier not in (None, name) or occupant not in (FREE, backend.name):
        raise PluginConflictError(
            f"a process has one device beside torch's own: it is {occupant!r}, of "
            f"{_occupier or 'code that core-plugin does not know'}; {backend.name!r}, of {name}, "
            "needs a process of its own"
        )


def _keep_failure(name: str, provider: type[Any], params: Any, backend: DeviceBackend) -> None:
    """Fill the slot; keep why that failed, if it did."""
    try:
        _fill_slot(name, provider, params, backend)
    except CorePluginError as error:
        _failures[name] = error
        raise
    except Exception as error:
        _failures[name] = _failure(backend, told(error))
        raise _failures[name] from error


def _fill_slot(name: str, provider: type[Any], params: Any, backend: DeviceBackend) -> None:
    import torch

    from core_plugin.privateuse1 import requirements

    module = provider.load_runtime(params)
    if missing := requirements.missing_functions(module, backend.capabilities):
        raise _failure(backend, f"the runtime's module lacks {', '.join(missing)}")
    _name_slot(name, backend, module)
    if not requirements.has_hooks():
        raise _failure(backend, "the runtime registers no PrivateUse1HooksInterface")
    default = getattr(torch, backend.default_autocast_dtype)
    if default not in module.get_amp_supported_dtype():
        raise _failure(
            backend, f"its default autocast dtype {default} is not in get_amp_supported_dtype()"
        )
    if backend.collective_backend:
        provider.load_collectives(params)
        if fault := requirements.collective_fault(backend):
            raise _failure(backend, fault)
    if missing := list(requirements.missing_kernels()):
        raise _failure(backend, f"it has no kernel for {', '.join(missing)}")


def _name_slot(name: str, backend: DeviceBackend, module: ModuleType) -> None:
    """Give the slot its name: from here on it cannot be another one's in this process."""
    global _occupier
    import torch

    _occupier = name
    torch.utils.rename_privateuse1_backend(backend.name)
    if not hasattr(torch, backend.name):
        torch._register_device_module(backend.name, module)
    if not hasattr(torch.Tensor, backend.name):
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _ready_in_this_thread(backend: DeviceBackend) -> DeviceBackend:
    """Set what torch keeps for each thread: the dtype that autocast takes by itself."""
    import torch

    torch.set_autocast_dtype(backend.name, getattr(torch, backend.default_autocast_dtype))
    return backend


def _failure(backend: DeviceBackend, reason: str) -> PluginContractError:
    import torch

    occupant = torch._C._get_privateuse1_backend_name()
    slot = (
        "torch's slot for such a device is still free"
        if occupant == FREE
        else f"torch's slot for such a device is {occupant!r} until this process ends"
    )
    return PluginContractError(f"cannot register the device {backend.name!r}: {reason}; {slot}")
