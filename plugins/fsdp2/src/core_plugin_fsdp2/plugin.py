"""The entry point: parameters and the strategy; torch is imported where it is used."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from core_plugin.types import BaseDistributed, Capabilities
from core_plugin.types.distributed import ShardContext

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class FSDP2Params:
    """How parameters are sharded; see ``torch.distributed.fsdp.fully_shard``.

    Attributes:
        reshard_after_forward: Free a block's whole parameters after its forward pass and gather
            them again for backward (less memory, more communication).
        reduce_dtype: What gradients are reduced in.
        average_in_collective: Let the collective library average gradients (true), or sum them and
            divide (false); auto averages where the device declares that its library can.
        replicas: How many copies of the model there are, each sharded over its part of the ranks.
    """

    reshard_after_forward: bool = True
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    average_in_collective: Literal["auto"] | bool = "auto"
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")


class FSDP2(BaseDistributed):
    """Every rank holds a part of each parameter, gathered block by block when it is used."""

    Params = FSDP2Params
    capabilities: ClassVar[Capabilities] = Capabilities(sharded_state=True, mixed_precision=True)

    @staticmethod
    def create_mesh(params: FSDP2Params, device_type: str, world_size: int) -> DeviceMesh:
        """One dimension over all ranks; with replicas, one over them and one within each.

        Raises:
            ConfigError: The replicas do not divide the ranks, or leave one rank for each.
        """
        from core_plugin_fsdp2.sharding import mesh

        return mesh(params, device_type, world_size)

    @staticmethod
    def shard_model(model: nn.Module, params: FSDP2Params, context: ShardContext) -> nn.Module:
        """Materialise and shard one block after the other, then what is left.

        No rank ever holds more than its shards and one whole block.

        Raises:
            ConfigError: The architecture names no blocks, or the device does not average as
                asked for.
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
