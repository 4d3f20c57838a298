"""What the strategies do; the faults replace some of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from core_plugin.types.distributed import ShardContext


class Replica(nn.Module):
    """A whole model, whose gradients are averaged while ``exchanging`` is on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.exchanging = True
        for parameter in inner.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.exchange)

    def exchange(self, parameter: Tensor) -> None:
        if self.exchanging:
            average(parameter.grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def average(gradient: Tensor) -> None:
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def replicate(model: nn.Module, context: ShardContext) -> nn.Module:
    context.materialize(model)
    return Replica(model)


def synchronise(model: Replica, enabled: bool) -> AbstractContextManager[None]:
    return exchanging(model, enabled)


@contextmanager
def exchanging(model: Replica, enabled: bool) -> Iterator[None]:
    model.exchanging = enabled
    yield
    model.exchanging = True


def shard(model: nn.Module, context: ShardContext) -> nn.Module:
    context.materialize(model)
    half = context.dtype == torch.bfloat16
    inside = [part for block in context.blocks for part in reversed(list(block.modules()))]
    for part in (*inside, model):
        if part is model or any(True for _ in part.parameters(recurse=False)):
            root = torch.float32 if part is model else None
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, root) if half else None
            options = {"mp_policy": policy} if policy else {}
            fully_shard(part, mesh=context.mesh, **options)
            part.set_force_sum_reduction_for_comms(True)
    return model


def synchronise_shards(model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    model.set_requires_gradient_sync(enabled)
    return nullcontext()
