"""Two small strategies, each right in itself, that get one fault by their parameter."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_plugin.contract import contract_methods
from core_plugin.types import BaseDistributed, Capabilities

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from core_plugin.types.distributed import ShardContext


def noted(cls: type) -> type:
    """Leave a file for each method of the contract that is called."""
    for name in contract_methods(BaseDistributed):
        setattr(cls, name, staticmethod(_noting(name, getattr(cls, name))))
    return cls


def _noting(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def noting(*args: Any, **kwargs: Any) -> Any:
        Path(os.environ["STRATEGY_CALLS"], name).touch()
        return method(*args, **kwargs)

    noting.__signature__ = inspect.signature(method)
    return noting


@dataclasses.dataclass(frozen=True)
class FaultyParams:
    fault: str = ""


@noted
class Faulty(BaseDistributed):
    """Averages each gradient over the ranks as soon as backward has made it."""

    Params = FaultyParams

    @staticmethod
    def create_mesh(params: FaultyParams, device_type: str, world_size: int) -> None:
        from strategy_faults import put_in

        put_in(params.fault)

    @staticmethod
    def shard_model(model: nn.Module, params: FaultyParams, context: ShardContext) -> nn.Module:
        import spread

        return spread.replicate(model, context)

    @staticmethod
    def unwrap_model(model: nn.Module) -> nn.Module:
        return model.get_submodule("inner")

    @staticmethod
    def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        import spread

        return spread.synchronise(model, enabled)


class FaultySharded(BaseDistributed):
    """torch's ``fully_shard`` on every module that owns something."""

    Params = FaultyParams
    capabilities = Capabilities(sharded_state=True, mixed_precision=True)

    @staticmethod
    def create_mesh(params: FaultyParams, device_type: str, world_size: int) -> DeviceMesh:
        from strategy_faults import put_in
        from torch.distributed.device_mesh import init_device_mesh

        put_in(params.fault)
        return init_device_mesh(device_type, (world_size,))

    @staticmethod
    def shard_model(model: nn.Module, params: FaultyParams, context: ShardContext) -> nn.Module:
        import spread

        return spread.shard(model, context)

    @staticmethod
    def unwrap_model(model: nn.Module) -> nn.Module:
        return model

    @staticmethod
    def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        import spread

        return spread.synchronise_shards(model, enabled)
