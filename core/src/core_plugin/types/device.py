"""Where tensors live and are computed with."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from core_plugin import privateuse1
from core_plugin.contract import Implementation
from core_plugin.errors import PluginUnavailableError
from core_plugin.plugin import BasePlugin
from core_plugin.privateuse1 import DeviceBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    import torch


class BaseDevice(Implementation, abstract=True):
    """A kind of device. The methods after the first three have defaults for torch's own devices."""

    @staticmethod
    @abstractmethod
    def backend(params: Any) -> DeviceBackend:
        """What the device is called, and what it can do; the hardware is not touched."""

    @staticmethod
    @abstractmethod
    def unavailable(params: Any) -> str | None:
        """Why this machine cannot run on the device, or None if it can."""

    @staticmethod
    @abstractmethod
    def device(params: Any, local_rank: int) -> torch.device:
        """The device of a process, made the current one.

        Args:
            params: The implementation's ``Params``.
            local_rank: The process's number on its host, from 0.

        Raises:
            PluginUnavailableError: There is none for the local rank.
        """

    @classmethod
    def register(cls, params: Any) -> DeviceBackend:
        """Make torch know the device, if it does not have it itself. Called before :meth:`device`.

        The hardware is not touched.
        """
        return privateuse1.backend_of(cls, params)

    @staticmethod
    def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
        """Why matrix products in the dtype cannot run on the device, or None if they can."""
        import torch

        try:
            ones = torch.ones(2, 2, dtype=dtype, device=device)
            return None if torch.isfinite(ones @ ones).all() else "products are not finite"
        except RuntimeError as error:
            return str(error).partition("\n")[0]

    @staticmethod
    def rng_state(device: torch.device) -> torch.Tensor | None:
        """The state of the device's random generator, or None if it has none but the CPU's."""
        import torch

        if device.type == "cpu":
            return None
        return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]

    @staticmethod
    def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
        """Put back what :meth:`rng_state` gave."""
        import torch

        torch.get_device_module(device).set_rng_state(state, device)

    @staticmethod
    def workarounds() -> AbstractContextManager[None]:
        """What torch or other libraries need to be told for this device's sake.

        It is entered while a run uses the device, and left at the run's end.
        """
        return nullcontext()


class PrivateUse1Device(BaseDevice, abstract=True):
    """A device that torch does not have itself, as a package of its own brings it."""

    @staticmethod
    @abstractmethod
    def load_runtime(params: Any) -> ModuleType:
        """Load the libraries with device guard, hooks, allocator and kernels.

        Called once in a process, before the device has its name, and without touching the
        hardware, which is initialised when it is first used.

        Returns:
            The module that becomes ``torch.<name>``, with the functions that
            ``core_plugin.privateuse1.requirements`` lists.
        """

    @staticmethod
    def load_collectives(params: Any) -> None:
        """Register the backend for ``torch.distributed``, if one is declared."""

    @staticmethod
    @abstractmethod
    def initializations() -> int:
        """How often the hardware was initialised in this process: 0 until it is used, then 1."""

    @classmethod
    def register(cls, params: Any) -> DeviceBackend:
        """Put the device into torch's slot. All calls after the first give the same result.

        Raises:
            PluginConflictError: This process has another device already, or this one with other
                parameters.
            PluginContractError: The device lacks something that every device must have.
        """
        return privateuse1.register(cls, params)

    @classmethod
    def device(cls, params: Any, local_rank: int) -> torch.device:
        """The device with the number of the local rank; see :class:`BaseDevice`."""
        return indexed_device(cls.register(params).name, local_rank)

    @staticmethod
    @contextmanager
    def workarounds() -> Iterator[None]:
        """Modules that move to the device keep their parameters.

        Without it torch makes new parameters, since those of the CPU cannot hold the device's
        memory: tied ones come apart, and an optimizer that was made before trains the old ones.
        """
        import torch

        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)


def indexed_device(device_type: str, local_rank: int) -> torch.device:
    """The device with the number of a local rank, made the current one.

    Raises:
        PluginUnavailableError: There are fewer.
    """
    import torch

    module = torch.get_device_module(device_type)
    count = module.device_count()
    if local_rank >= count:
        raise PluginUnavailableError(
            f"local rank {local_rank} needs {device_type}:{local_rank}, but there are {count} "
            "devices; ask for fewer processes under launcher"
        )
    if count > 1:
        module.set_device(local_rank)
    return torch.device(device_type, local_rank)


class DevicePlugin(BasePlugin, contract=BaseDevice):
    """The type of device backends."""
