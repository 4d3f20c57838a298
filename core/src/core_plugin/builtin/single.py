"""The strategy of a run of one process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from core_plugin.types.distributed import BaseDistributed, Capabilities, ShardContext

if TYPE_CHECKING:
    from torch import nn


class Single(BaseDistributed):
    """One process that holds the whole model."""

    capabilities: ClassVar[Capabilities] = Capabilities(multiple_processes=False)

    @staticmethod
    def create_mesh(params: Any, device_type: str, world_size: int) -> None:
        """None: there is nothing to lay out."""

    @staticmethod
    def shard_model(model: nn.Module, params: Any, context: ShardContext) -> nn.Module:
        """Materialise the model, and leave it as it is."""
        context.materialize(model)
        return model

    @staticmethod
    def unwrap_model(model: nn.Module) -> nn.Module:
        """The model: nothing is wrapped around it."""
        return model

    @staticmethod
    def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Nothing: there is no one to exchange gradients with."""
        return nullcontext()
