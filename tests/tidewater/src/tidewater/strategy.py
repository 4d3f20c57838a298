"""The strategy ``breakwater``: whole models, whose gradients are summed parameter by parameter."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from core_plugin.types import BaseDistributed, Capabilities
from tidewater import CALLS

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from core_plugin.types.distributed import ShardContext


class Breakwater(BaseDistributed):
    """Adds up each gradient over the ranks as soon as backward has made it."""

    capabilities: ClassVar[Capabilities] = Capabilities(averages_gradients=False)

    @staticmethod
    def create_mesh(params: Any, device_type: str, world_size: int) -> None:
        """None: the ranks are the default process group."""

    @staticmethod
    def shard_model(model: nn.Module, params: Any, context: ShardContext) -> nn.Module:
        """Materialise the model on every rank, and wrap it."""
        from tidewater.modules import Summed

        CALLS["shard_model"] += 1
        context.materialize(model)
        return Summed(model)

    @staticmethod
    def unwrap_model(model: nn.Module) -> nn.Module:
        """The module inside the wrapper."""
        return model.get_submodule("inner")

    @staticmethod
    def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Sum in this pass's backward, or not."""
        CALLS[f"gradient_sync {enabled}"] += 1
        model.summing = enabled
        return nullcontext()
