"""The devices that torch itself supports."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from core_plugin import privateuse1
from core_plugin.privateuse1 import DeviceBackend, DeviceCapabilities
from core_plugin.types.device import BaseDevice, indexed_device

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
    def backend(params: Params) -> DeviceBackend:
        """What torch does on the CPU, with gloo.

        gloo averages by dividing after it has summed, which costs more than dividing elsewhere:
        it is not declared.
        """
        return DeviceBackend(
            "cpu",
            "bfloat16",
            "gloo",
            DeviceCapabilities(
                generator=True,
                storage_resize=True,
                cpu_offload=True,
                float64=True,
                complex_numbers=True,
                convolution=True,
                recurrent_layers=True,
                fused_optimizers=True,
                profiler=True,
            ),
        )

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


_GPU = DeviceCapabilities(
    multiple_devices=True,
    generator=True,
    pinned_memory=True,
    streams=True,
    events=True,
    event_timing=True,
    memory_statistics=True,
    storage_resize=True,
    average_in_collectives=True,
    cpu_offload=True,
    float64=True,
    complex_numbers=True,
    convolution=True,
    recurrent_layers=True,
    fused_optimizers=True,
    profiler=True,
)


class CUDA(BaseDevice):
    """NVIDIA's (or, in a ROCm build of torch, AMD's) GPUs, one a process."""

    @staticmethod
    def backend(params: object) -> DeviceBackend:
        """What a GPU does, with NCCL."""
        return DeviceBackend("cuda", "float16", "nccl", _GPU)

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
        return indexed_device("cuda", local_rank)


class Auto(BaseDevice):
    """The accelerator that torch finds on this machine, or else the CPU."""

    @staticmethod
    def backend(params: object) -> DeviceBackend:
        """That of the CPU, CUDA or a registered device, or what torch says of another."""
        import torch
        import torch.distributed as dist

        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return CPU.backend(CPU.Params())
        if accelerator.type == "cuda":
            return CUDA.backend(params)
        if (registered := privateuse1.registered()) is not None:
            return registered.backend
        dtype = torch.get_autocast_dtype(accelerator.type)
        return DeviceBackend(
            accelerator.type,
            "bfloat16" if dtype == torch.bfloat16 else "float16",
            dist.Backend.default_device_backend_map.get(accelerator.type),
        )

    @staticmethod
    def unavailable(params: object) -> str | None:
        """None: there is always a CPU."""
        return None

    @staticmethod
    def device(params: object, local_rank: int) -> torch.device:
        """The accelerator with the number of the local rank, or the CPU."""
        import torch

        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return indexed_device(accelerator.type, local_rank) if accelerator else torch.device("cpu")

    @staticmethod
    def workarounds() -> AbstractContextManager[None]:
        """Those of a device that is registered."""
        registered = privateuse1.registered()
        return registered.provider.workarounds() if registered else nullcontext()
