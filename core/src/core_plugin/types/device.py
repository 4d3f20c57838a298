"""Where tensors live and are computed with."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from core_plugin.contract import Implementation
from core_plugin.plugin import BasePlugin

if TYPE_CHECKING:
    import torch


class BaseDevice(Implementation, abstract=True):
    """A device backend. The methods but the first two have defaults for torch's own device API."""

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
        """

    @staticmethod
    def collective_backend(device: torch.device) -> str:
        """The name of the ``torch.distributed`` backend for tensors on the device."""
        import torch.distributed

        return torch.distributed.get_default_backend_for_device(device)

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether matrix products in the dtype run on the device."""
        import torch

        try:
            ones = torch.ones(2, 2, dtype=dtype, device=device)
            return bool(torch.isfinite(ones @ ones).all())
        except RuntimeError:
            return False

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


class DevicePlugin(BasePlugin, contract=BaseDevice):
    """The type of device backends."""
