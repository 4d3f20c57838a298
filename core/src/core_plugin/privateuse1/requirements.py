"""What a device must bring, looked up without touching the hardware."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from core_plugin.privateuse1.backend import DeviceBackend, DeviceCapabilities

FUNCTIONS = (
    "_exchange_device",
    "_initialized",
    "_is_in_bad_fork",
    "_lazy_init",
    "_maybe_exchange_device",
    "current_device",
    "device",
    "device_count",
    "get_amp_supported_dtype",
    "get_rng_state",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "set_device",
    "set_rng_state",
    "synchronize",
)
"""What torch and core-plugin look for on ``torch.<name>``."""

CAPABILITY_FUNCTIONS = {
    "streams": ("Stream", "current_stream", "stream"),
    "events": ("Event",),
    "memory_statistics": ("max_memory_allocated", "memory_allocated", "reset_peak_memory_stats"),
}
"""What they look for if the device has a capability."""

KERNELS = {
    "allocation": ("aten::empty.memory_format", "aten::empty_strided"),
    "filling": ("aten::fill_.Scalar", "aten::zero_"),
    "copies to and from the host, and casting": (
        "aten::_copy_from",
        "aten::_copy_from_and_resize",
    ),
    "views": ("aten::as_strided", "aten::view"),
    "reading a scalar": ("aten::_local_scalar_dense",),
}
"""The operators without which nothing works, by what they are for.

torch makes others of them: the identity, for one, is a view, and its backward another. A kernel for
all operators, such as a fallback to the CPU, counts for each; only the suite shows that it works.
"""


def missing_functions(module: ModuleType, capabilities: DeviceCapabilities) -> list[str]:
    """The functions that a device's module lacks."""
    missing = [name for name in FUNCTIONS if not hasattr(module, name)]
    for capability, functions in CAPABILITY_FUNCTIONS.items():
        if getattr(capabilities, capability):
            lacking = (name for name in functions if not hasattr(module, name))
            missing += [f"{name} (for {capability})" for name in lacking]
    return missing


def has_hooks() -> bool:
    """Whether torch finds C++ code for the slot, once the slot has its name."""
    try:
        torch._C._get_accelerator()
    except RuntimeError:
        return False
    return True


def collective_fault(backend: DeviceBackend) -> str | None:
    """Why the declared ``torch.distributed`` backend cannot be used, or None."""
    name = backend.collective_backend
    if name not in dist.Backend.backend_list:
        return f"the collective library {name!r} is declared, but not registered with c10d"
    if backend.name not in dist.Backend.backend_capability.get(str(name), ()):
        return f"the collective library {name!r} is registered, but not for {backend.name!r}"
    return None


def missing_kernels() -> Iterator[str]:
    """The required operators that the slot has no kernel for, each with its purpose."""
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    for purpose, operators in KERNELS.items():
        for operator in operators:
            if not has_kernel(operator, "PrivateUse1"):
                yield f"{operator} ({purpose})"
