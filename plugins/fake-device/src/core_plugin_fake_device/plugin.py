"""The entry point: parameters and the device; torch is imported where it is used."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from core_plugin.privateuse1 import DeviceBackend, DeviceCapabilities
from core_plugin.types.device import PrivateUse1Device

if TYPE_CHECKING:
    from types import ModuleType

NAME = "fake"
DISTRIBUTION = "core-plugin-fake-device"
LIBRARY = Path(__file__).with_name("_device.so")
TORCH = "2.13"
"""The minor version that the library is compiled for: torch's C++ interface changes with it."""

CAPABILITIES = frozenset(field.name for field in fields(DeviceCapabilities))


@dataclass(frozen=True)
class FakeParams:
    """What the device is made to be.

    Attributes:
        devices: The number of devices.
        memory_mb: MiB of memory on each device; null for no limit.
        without: Capabilities that are switched off, to imitate a lesser device.
    """

    devices: int = 2
    memory_mb: int | None = None
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= 16:
            raise ValueError(f"devices must be from 1 to 16, got {self.devices}")
        if self.memory_mb is not None and self.memory_mb < 1:
            raise ValueError(f"memory_mb must be at least 1 or null, got {self.memory_mb}")
        if unknown := sorted(set(self.without) - CAPABILITIES):
            raise ValueError(
                f"without: there is no capability {', '.join(unknown)}; there are "
                f"{', '.join(sorted(CAPABILITIES))}"
            )


class Fake(PrivateUse1Device):
    """A device without hardware: its memory is the host's, and the CPU computes in it."""

    Params = FakeParams

    @staticmethod
    def backend(params: FakeParams) -> DeviceBackend:
        """All capabilities that there are, less those that are switched off."""
        off = set(params.without)
        if params.devices == 1:
            off.add("multiple_devices")
        capabilities = DeviceCapabilities(**{name: name not in off for name in CAPABILITIES})
        return DeviceBackend(NAME, "bfloat16", "fakeccl", capabilities)

    @staticmethod
    def unavailable(params: FakeParams) -> str | None:
        """Why the library cannot be used, or None if it can."""
        try:
            torch_version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            return f"torch is not installed; pip install 'torch=={TORCH}.*'"
        if not torch_version.startswith(f"{TORCH}."):
            return (
                f"it is compiled for torch {TORCH}, and torch {torch_version} is installed; "
                f"pip install 'torch=={TORCH}.*'"
            )
        if not LIBRARY.exists():
            return (
                f"its library {LIBRARY} is missing; pip install --no-build-isolation "
                f"{DISTRIBUTION} compiles it"
            )
        return _load_error()

    @staticmethod
    def load_runtime(params: FakeParams) -> ModuleType:
        """Load the library, apply the parameters, and return what becomes ``torch.fake``."""
        from core_plugin_fake_device import runtime

        runtime.configure(params)
        return runtime

    @staticmethod
    def load_collectives(params: FakeParams) -> None:
        """Register ``fakeccl``."""
        from core_plugin_fake_device import fakeccl

        fakeccl.register()

    @staticmethod
    def initializations() -> int:
        """How often the hardware was initialised in this process."""
        from core_plugin_fake_device import runtime

        return runtime.initializations()


def _load_error() -> str | None:
    """Why the library cannot be loaded; it is not tried where another device has torch's slot."""
    import torch

    if torch._C._get_privateuse1_backend_name() not in ("privateuseone", NAME):
        return None
    try:
        from core_plugin_fake_device import runtime  # noqa: F401
    except OSError as error:
        return f"its library cannot be loaded: {error.__cause__ or error}; reinstall {DISTRIBUTION}"
    return None
