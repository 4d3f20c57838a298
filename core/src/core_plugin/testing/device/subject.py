"""The device that is tested, and what the cases of a process share."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from core_plugin.errors import PluginUnavailableError
from core_plugin.plugin import BasePlugin
from core_plugin.privateuse1 import DeviceBackend, DeviceCapabilities, backend_of
from core_plugin.testing.processes import NotHereError
from core_plugin.types import BaseDevice, DevicePlugin, PrivateUse1Device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Subject:
    """A device by its plugin's name."""

    plugin_type: ClassVar[type[BasePlugin]] = DevicePlugin
    levels: ClassVar[tuple[int, ...]] = (1, 2, 3)
    arguments: ClassVar[frozenset[str]] = frozenset(
        ("subject", "device", "other_device", "rank", "directory")
    )
    hardware: ClassVar[bool] = True
    """Whether a case needs the hardware, unless it says otherwise."""
    all_kinds: ClassVar[Mapping[str, str]] = {
        "accelerator": "devices other than the CPU",
        "privateuse1": "devices in torch's slot for those that it does not have",
    }
    """What ``only`` in a case can ask for, and what that is."""

    name: str
    params: Any
    """An instance of the implementation's ``Params``."""

    @property
    def implementation(self) -> type[BaseDevice]:
        """The class that the name stands for."""
        implementation: type[BaseDevice] = DevicePlugin(self.name).resolve()
        return implementation

    @property
    def backend(self) -> DeviceBackend:
        """What the device says of itself."""
        return backend_of(self.implementation, self.params)

    @property
    def capabilities(self) -> DeviceCapabilities:
        """What it declares that it can do."""
        return self.backend.capabilities

    @property
    def kinds(self) -> frozenset[str]:
        """Which of them the device is."""
        kinds = {"accelerator"} if self.backend.name != "cpu" else set()
        if issubclass(self.implementation, PrivateUse1Device):
            kinds.add("privateuse1")
        return frozenset(kinds)

    @property
    def groups(self) -> bool:
        """Whether several ranks can form a process group."""
        return self.backend.collective_backend is not None

    @staticmethod
    def capability_names() -> frozenset[str]:
        """What ``requires`` in a case can ask for."""
        return frozenset(field.name for field in fields(DeviceCapabilities))

    def declares(self, capability: str) -> bool:
        """Whether the device declares a capability."""
        return bool(getattr(self.capabilities, capability))

    @contextmanager
    def session(self, rank: int, size: int, store: Path | None) -> Iterator[DeviceSession]:
        """See :class:`core_plugin.testing.processes.Subject`."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        with ExitStack() as stack:
            session = DeviceSession(self, rank, stack)
            if store:
                _join(session.device, self.backend, rank, size, store)
                stack.callback(dist.destroy_process_group)
            yield session


class DeviceSession:
    """The arguments that cases can have, made when they are first asked for."""

    def __init__(self, subject: Subject, rank: int, stack: ExitStack) -> None:
        self.subject = subject
        self.rank = rank
        self._stack = stack

    def argument(self, name: str, directory: Path) -> Any:
        """See :class:`core_plugin.testing.processes.Session`."""
        return directory if name == "directory" else getattr(self, name)

    @functools.cached_property
    def device(self) -> torch.device:
        """The rank's device; ranks share devices if there are not enough."""
        import torch

        implementation, params = self.subject.implementation, self.subject.params
        if reason := implementation.unavailable(params):
            raise PluginUnavailableError(f"{self.subject.name} cannot run here: {reason}")
        name = implementation.register(params).name
        count = torch.get_device_module(name).device_count()
        device = implementation.device(params, self.rank % max(count, 1))
        self._stack.enter_context(implementation.workarounds())
        return device

    @functools.cached_property
    def other_device(self) -> torch.device:
        """The next device after the rank's."""
        import torch

        count = torch.get_device_module(self.device.type).device_count()
        if count < 2:
            raise NotHereError(f"there is no second {self.device.type} here")
        return torch.device(self.device.type, ((self.device.index or 0) + 1) % count)


def _join(device: torch.device, backend: DeviceBackend, rank: int, size: int, store: Path) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    library = backend.collective_backend
    dist.init_process_group(
        library if device.type == "cpu" else f"cpu:gloo,{device.type}:{library}",
        store=dist.FileStore(str(store), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
