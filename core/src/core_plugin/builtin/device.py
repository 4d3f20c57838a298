"""The devices that torch itself supports."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from core_plugin.types.device import BaseDevice

if TYPE_CHECKING:
    import torch


class CPU(BaseDevice):
    """The CPU; processes on one host share it."""

    @dataclasses.dataclass(frozen=True)
    class Params:
        """How the CPU is used.

        Attributes:
            threads: Threads of one process; null leaves it to torch (or ``OMP_NUM_THREADS``).
        """

        threads: int | None = None

        def __post_init__(self) -> None:
            if self.threads is not None and self.threads < 1:
                raise ValueError(f"threads must be at least 1 or null, got {self.threads}")

    @staticmethod
    def unavailable(params: Params) -> str | None:
        """None: there is always a CPU."""
        return None

    @staticmethod
    def device(params: Params, local_rank: int) -> torch.device:
        """The one CPU device, whatever the local rank."""
        import torch

        if params.threads is not None:
            torch.set_num_threads(params.threads)
        return torch.device("cpu")


class CUDA(BaseDevice):
    """NVIDIA's (or, in a ROCm build of torch, AMD's) GPUs, one a process."""

    @staticmethod
    def unavailable(params: object) -> str | None:
        """Whether torch was built for CUDA and sees a GPU."""
        import torch

        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} is built without CUDA"
        return None if torch.cuda.is_available() else "torch sees no CUDA GPU (see nvidia-smi)"

    @staticmethod
    def device(params: object, local_rank: int) -> torch.device:
        """The GPU with the number of the local rank."""
        return _indexed("cuda", local_rank)


class Auto(BaseDevice):
    """The accelerator that torch finds on this machine, or else the CPU."""

    @staticmethod
    def unavailable(params: object) -> str | None:
        """None: there is always a CPU."""
        return None

    @staticmethod
    def device(params: object, local_rank: int) -> torch.device:
        """The accelerator with the number of the local rank, or the CPU."""
        import torch

        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return _indexed(accelerator.type, local_rank) if accelerator else torch.device("cpu")


def _indexed(device_type: str, local_rank: int) -> torch.device:
    import torch

    from core_plugin.errors import PluginUnavailableError

    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise PluginUnavailableError(
            f"local rank {local_rank} needs {device_type}:{local_rank}, but there are {count} "
            "devices; ask for fewer processes under launcher"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device_type, local_rank)
