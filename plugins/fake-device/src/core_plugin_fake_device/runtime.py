"""What becomes ``torch.fake``: devices, streams, random numbers and memory.

torch calls these functions by name, as it calls those of ``torch.cuda``. A vendor writes the same
ones. None but those that need the hardware may open it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from core_plugin_fake_device.plugin import LIBRARY

if TYPE_CHECKING:
    from types import TracebackType

    from core_plugin_fake_device.plugin import FakeParams

torch.ops.load_library(str(LIBRARY))
_ops = torch.ops.fake_device

Device = torch.device | str | int | None
"""How callers name a device; None is the current one."""


# ---- Settings: the fake's own, with no counterpart at a vendor's. --------------------------------


def configure(params: FakeParams) -> None:
    """Make the devices what the parameters say."""
    _ops.set_device_count(params.devices)
    set_memory_capacity(None if params.memory_mb is None else params.memory_mb * 2**20)
    switch_off(params.without)


def set_memory_capacity(bytes_per_device: int | None) -> None:
    """Limit the memory of each device; None removes the limit."""
    _ops.set_capacity(bytes_per_device or 0)


def switch_off(capabilities: Iterable[str]) -> None:
    """Switch off these capabilities, and no others: what needs them raises RuntimeError."""
    _ops.switch_off(list(capabilities))


def initializations() -> int:
    """How often the hardware was opened in this process."""
    return int(_ops.initializations())


# ---- State of the process. -----------------------------------------------------------------------


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether the hardware was opened, and can be used in this process."""
    return initializations() > 0 and not _is_in_bad_fork()


def __getattr__(name: str) -> bool:
    """Activation checkpointing keeps the device's random state only if ``_initialized`` is true."""
    if name == "_initialized":
        return is_initialized()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init() -> None:
    """Open the hardware, unless it is open."""
    _ops.initialize()


def _lazy_init() -> None:
    """What torch calls before the device is first used."""
    _ops.initialize()


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had opened the hardware."""
    return bool(_ops.is_in_bad_fork())


# ---- Devices. ------------------------------------------------------------------------------------


def device_count() -> int:
    """The number of devices."""
    return int(_ops.device_count())


def current_device() -> int:
    """The index of this thread's current device."""
    return int(_ops.current_device())


def set_device(device: Device) -> None:
    """Make a device this thread's current one."""
    _ops.exchange_device(_index(device))


def _exchange_device(index: int) -> int:
    """Make a device the current one; returns the one before. Negative changes nothing."""
    return current_device() if index < 0 else int(_ops.exchange_device(index))


_maybe_exchange_device = _exchange_device


class device:  # noqa: N801  # torch's name for it
    """A context in which a device is the current one."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = _exchange_device(self._index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _exchange_device(self._before)


def synchronize(device: Device = None) -> None:
    """Wait for all that a device was given to do."""
    torch.accelerator.synchronize(_index(device))


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    if device is None:
        return current_device()
    parsed = torch.device(device)
    if parsed.type != "fake":
        raise ValueError(f"expected a fake device, got {parsed}")
    return current_device() if parsed.index is None else parsed.index


# ---- Streams and events. -------------------------------------------------------------------------


class Stream(torch.Stream):
    """A queue of work on a device."""

    def __new__(cls, device: Device = None, priority: int = 0) -> Stream:
        """Make a new stream."""
        where = torch.device("fake", _index(device))
        return super().__new__(cls, device=where, priority=priority)


def Event(  # noqa: N802  # torch takes the time between events of exactly its own class
    enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
) -> torch.Event:
    """A new event: a point in a stream's work.

    Args:
        enable_timing: Whether the time between two such events can be taken.
        blocking: Let a thread that waits for it sleep.
        interprocess: Let other processes wait for it.
    """
    return torch.Event(
        device="fake",
        enable_timing=enable_timing,
        blocking=blocking,
        interprocess=interprocess,
    )


def current_stream(device: Device = None) -> torch.Stream:
    """The stream that this thread's work on a device goes to."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    """The stream that is current until another is set."""
    kind: Any = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=int(kind))


def set_stream(stream: torch.Stream) -> None:
    """Make a stream, and its device, the current ones."""
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """A context in which a stream is the current one; None changes nothing."""
    return nullcontext() if stream is None else stream


# ---- Random numbers. -----------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _ops.seed(current_device(), _as_int64(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        _ops.seed(index, _as_int64(seed))


def get_rng_state(device: Device = None) -> torch.Tensor:
    """The state of a device's generator: bytes, on the CPU."""
    state: torch.Tensor = _ops.get_rng_state(_index(device))
    return state


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Put back what :func:`get_rng_state` gave."""
    _ops.set_rng_state(_index(device), new_state)


def _as_int64(seed: int) -> int:
    """The signed number with the same 64 bits."""
    return (int(seed) + 2**63) % 2**64 - 2**63


# ---- Memory. -------------------------------------------------------------------------------------


def memory_allocated(device: Device = None) -> int:
    """The bytes that tensors hold on a device."""
    return int(_ops.memory_stats(_index(device))[0])


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes that tensors held on a device since the last reset."""
    return int(_ops.memory_stats(_index(device))[1])


def reset_peak_memory_stats(device: Device = None) -> None:
    """Let :func:`max_memory_allocated` begin anew."""
    _ops.reset_peak_memory(_index(device))


def empty_cache() -> None:
    """Give unused memory back to the driver: the fake keeps none."""


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """The bytes of a device that are free, and all of them."""
    return torch.accelerator.get_memory_info(_index(device))


# ---- Mixed precision. ----------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast can compute in."""
    return [torch.bfloat16, torch.float16]
