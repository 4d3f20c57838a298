"""What a device says of itself."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Any, Literal, get_args

from core_plugin.errors import PluginContractError

AutocastDtype = Literal["float16", "bfloat16"]

# fmt: off
BUILT_IN_DEVICES = frozenset({
    "cpu", "cuda", "fpga", "hip", "hpu", "ideep", "ipu", "lazy", "maia", "meta", "mkldnn", "mps",
    "mtia", "opencl", "opengl", "privateuseone", "ve", "vulkan", "xla", "xpu",
})
# fmt: on
"""The device names that are torch's own."""


@dataclass(frozen=True)
class DeviceCapabilities:
    """What a device can do beyond what every device must.

    The device conformance suite holds a device to each that it declares.
    """

    multiple_devices: bool = False
    """More than one index."""
    generator: bool = False
    """``torch.Generator(device=...)``."""
    pinned_memory: bool = False
    """``Tensor.pin_memory``, and copies from there that do not block."""
    streams: bool = False
    """``torch.Stream`` on the device."""
    events: bool = False
    """``torch.Event``: record, wait, query, synchronize."""
    event_timing: bool = False
    """``Event.elapsed_time``."""
    memory_statistics: bool = False
    """Bytes that are allocated now, and at most so far."""
    storage_resize: bool = False
    """``UntypedStorage.resize_``: to 0 frees the memory, to more allocates it."""
    average_in_collectives: bool = False
    """``ReduceOp.AVG`` in the collective library."""
    cpu_offload: bool = False
    """FSDP2's ``CPUOffloadPolicy``."""
    float64: bool = False
    """Double precision."""
    complex_numbers: bool = False
    """Complex dtypes."""
    convolution: bool = False
    """Convolutions, forward and backward."""
    recurrent_layers: bool = False
    """``nn.LSTM`` and ``nn.GRU``."""
    fused_optimizers: bool = False
    """torch's optimizers with ``fused=True``."""
    profiler: bool = False
    """An activity of its own in ``torch.profiler``."""


NO_CAPABILITIES = DeviceCapabilities()


@dataclass(frozen=True)
class DeviceBackend:
    """A kind of device.

    Raises:
        PluginContractError: The name is not one that ``torch.device`` can read, or the dtype is
            not one of the two that autocast has.
    """

    name: str
    """What devices are called and printed as: lowercase letters and underscores."""
    default_autocast_dtype: AutocastDtype
    """What ``torch.autocast`` computes in unless told otherwise."""
    collective_backend: str | None = None
    """The ``torch.distributed`` backend for its tensors; None if there is none."""
    capabilities: DeviceCapabilities = NO_CAPABILITIES

    def __post_init__(self) -> None:
        if re.search(r"[0-9]", self.name):
            raise PluginContractError(
                f"a device cannot be called {self.name!r}: torch.device reads no digits in the "
                "name of a device, only in its index; use letters and underscores"
            )
        if not re.fullmatch(r"[a-z][a-z_]*", self.name):
            raise PluginContractError(
                f"a device cannot be called {self.name!r}: use lowercase ASCII letters and "
                "underscores, a letter first"
            )
        if self.default_autocast_dtype not in get_args(AutocastDtype):
            raise PluginContractError(
                f"the device {self.name!r} declares {self.default_autocast_dtype!r} as its default "
                "autocast dtype; it must be 'float16' or 'bfloat16'"
            )


def backend_of(provider: type[Any], params: Any) -> DeviceBackend:
    """What a provider says of its device.

    Raises:
        PluginContractError: It raises, or says what cannot be.
    """
    try:
        backend: DeviceBackend = provider.backend(params)
        return backend
    except Exception as error:
        name = f"{provider.__module__}:{provider.__qualname__}"
        raise PluginContractError(f"{name}.backend: {told(error)}") from error


def told(error: Exception) -> str:
    """An error with its cause, and the place that raised it."""
    cause = f" ({error.__cause__})" if error.__cause__ else ""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{cause}{place}"
