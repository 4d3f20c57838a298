"""A strategy whose module imports torch, and which says of itself what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import nn

from core_plugin.types import BaseDistributed
from core_plugin.types.distributed import MemoryPlan, ShardContext


@dataclasses.dataclass
class HeavyParams:
    ranks: int = 2


class Heavy(BaseDistributed):
    Params = HeavyParams

    @staticmethod
    def create_mesh(params: HeavyParams, device_type: str, world_size: int) -> None:
        pass

    @staticmethod
    def shard_model(model: nn.Module, params: HeavyParams, context: ShardContext) -> nn.Module:
        context.materialize(model)
        return model

    @staticmethod
    def unwrap_model(model: nn.Module) -> nn.Module:
        return model

    @staticmethod
    def gradient_sync(model: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def parameter_device(params: HeavyParams, device: torch.device) -> torch.device:
        return torch.device("meta")

    @classmethod
    def gradient_divisor(cls, params: HeavyParams, world_size: int) -> float:
        return world_size - 1

    @classmethod
    def plan_memory(cls, model: nn.Module, params: HeavyParams, world_size: int) -> MemoryPlan:
        return MemoryPlan(0, 0, 0)
