"""The entry point: parameters and the strategy; torch is imported where it is used."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from core_plugin.params import require
from core_plugin.types import BaseDistributed, Capabilities
from core_plugin.types.distributed import MemoryPlan, ShardContext

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class FSDP2Params:
    """How parameters are sharded; see ``torch.distributed.fsdp.fully_shard``.

    Attributes:
        reshard_after_forward: Free a block's whole parameters after its forward pass and gather
            them again for backward (less memory, more communication). A number n, at least 2,
            frees them down to a part that n neighbouring ranks have together, among which they
            are gathered again; it divides the ranks that share a copy of the model.
        keep_last_blocks: The number of blocks, counted from the last one, whose parameters stay
            whole after forward all the same, as backward needs them first.
        reduce_dtype: What gradients are reduced in; parameters are gathered and computed with in
            ``train.precision``.
        output_dtype: What the model's outputs are cast to. Those of its blocks never are.
        gradient_divide_factor: What gradients are divided by after they are summed, above 0; null
            for the number of ranks. The loss is scaled by the same, so that training does not
            depend on it, but the gradients on the way do.
        average_in_collective: Let the collective library average gradients (true), or sum them and
            divide (false); auto averages where the device declares that its library can.
        replicas: How many copies of the model there are, each sharded over its part of the ranks.
        cpu_offload: Keep parameters, gradients and optimizer state in the host's memory, where the
            optimizer steps; a block's parameters come to the device when they are gathered.
        forward_prefetch: The number of blocks that are gathered ahead while one computes forward,
            at least 0. With 0 the next one's gathering begins when it is called.
        backward_prefetch: The same in backward; with 0 torch gathers one ahead.
    """

    reshard_after_forward: bool | int = True
    keep_last_blocks: int = 0
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    output_dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_divide_factor: float | None = None
    average_in_collective: Literal["auto"] | bool = "auto"
    replicas: int = 1
    cpu_offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0

    def __post_init__(self) -> None:
        factor = self.gradient_divide_factor
        counts = ("keep_last_blocks", "forward_prefetch", "backward_prefetch")
        require(
            *(
                (getattr(self, n) >= 0, f"{n} must be at least 0, got {getattr(self, n)}")
                for n in counts
            ),
            (
                isinstance(self.reshard_after_forward, bool) or self.reshard_after_forward >= 2,
                "reshard_after_forward must be true, false or a number of ranks of at least 2, "
                f"got {self.reshard_after_forward}",
            ),
            (
                not self.keep_last_blocks or self.reshard_after_forward is not False,
                f"keep_last_blocks is {self.keep_last_blocks}, but reshard_after_forward is false, "
                "so all blocks are kept; remove one of them",
            ),
            (
                factor is None or (factor > 0 and math.isfinite(factor)),
                f"gradient_divide_factor must be above 0 and finite, or null, got {factor}",
            ),
            (
                factor is None or self.average_in_collective is not True,
                "gradient_divide_factor is for gradients that are summed, and "
                "average_in_collective is true; remove one of them",
            ),
            (self.replicas >= 1, f"replicas must be at least 1, got {self.replicas}"),
        )

    def faults(self, run: Any) -> Iterable[str]:
        """What does not fit the rest of the run's configuration."""
        device = run["device"]
        if self.cpu_offload:
            capabilities = device.implementation.backend(device.params).capabilities
            if not capabilities.cpu_offload:
                yield (
                    f"cpu_offload is true, but the device {device.route.name!r} does not declare "
                    "the capability cpu_offload; set it to false"
                )


class FSDP2(BaseDistributed):
    """Every rank holds a part of each parameter, gathered block by block when it is used."""

    Params = FSDP2Params
    capabilities: ClassVar[Capabilities] = Capabilities(sharded_state=True, mixed_precision=True)

    @staticmethod
    def create_mesh(params: FSDP2Params, device_type: str, world_size: int) -> DeviceMesh:
        """One dimension over all ranks; with replicas, one over them and one within each.

        Raises:
            ConfigError: The replicas do not divide the ranks, or leave one rank for each; or
                what is freed after forward does not divide the ranks of a copy.
        """
        from core_plugin_fsdp2.sharding import mesh

        return mesh(params, device_type, world_size)

    @staticmethod
    def shard_model(model: nn.Module, params: FSDP2Params, context: ShardContext) -> nn.Module:
        """Shard each block on ``meta``, then what is left, and give each rank its parts' values.

        No rank ever holds more than its parts and one whole module.

        Raises:
            ConfigError: There are no blocks, or fewer than are to be kept; a parameter cannot be
                sharded; or the device does not average as asked for.
        """
        from core_plugin_fsdp2.sharding import shard

        return shard(model, params, context)

    @staticmethod
    def unwrap_model(model: nn.Module) -> nn.Module:
        """The model: ``fully_shard`` changes it in place."""
        return model

    @staticmethod
    def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Reduce-scatter the gradients in this pass's backward, or keep them whole."""
        cast("FSDPModule", model).set_requires_gradient_sync(enabled)
        return nullcontext()

    @staticmethod
    def parameter_device(params: FSDP2Params, device: torch.device) -> torch.device:
        """The host with ``cpu_offload``, or else the device."""
        import torch

        return torch.device("cpu") if params.cpu_offload else device

    @classmethod
    def gradient_divisor(cls, params: FSDP2Params, world_size: int) -> float:
        """The number of ranks, or ``gradient_divide_factor`` where there are several."""
        if world_size == 1 or params.gradient_divide_factor is None:
            return world_size
        return params.gradient_divide_factor

    @classmethod
    def plan_memory(cls, model: nn.Module, params: FSDP2Params, world_size: int) -> MemoryPlan:
        """The bytes on the rank that holds most; each copy of the model has its part of them."""
        return super().plan_memory(model, params, max(1, world_size // params.replicas))
