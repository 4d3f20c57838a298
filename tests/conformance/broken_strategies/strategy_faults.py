"""What each fault changes in the strategies. It is put in when the first mesh is made."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import spread
import torch
import torch.distributed as dist
from faulty_strategy import Faulty, FaultySharded
from torch import Tensor, nn

from core_plugin import state, tensors
from core_plugin.types.distributed import ShardContext

FAULTS: dict[str, Callable[[], None]] = {}


@functools.cache
def put_in(name: str) -> None:
    import strategy_file_faults  # noqa: F401 (it adds its own)

    if name:
        FAULTS[name]()


def fault(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        FAULTS[name] = function
        return function

    return add


def after_sharding(change: Callable[[nn.Module, ShardContext], None]) -> None:
    """Change a model between materialisation and wrapping."""

    def replicate(model: nn.Module, context: ShardContext) -> nn.Module:
        context.materialize(model)
        change(model, context)
        return spread.Replica(model)

    spread.replicate = replicate


# Gradients


@fault("gradients are never exchanged")
def _() -> None:
    spread.average = lambda gradient: None


@fault("gradients are summed")
def _() -> None:
    spread.average = dist.all_reduce


@fault("the last rank's data are dropped")
def _() -> None:
    average = spread.average

    def without_the_last(gradient: Tensor) -> None:
        if dist.get_rank() > 0 and dist.get_rank() == dist.get_world_size() - 1:
            gradient.zero_()
        average(gradient)

    spread.average = without_the_last


@fault("ranks drift apart")
def _() -> None:
    average = spread.average

    def drifting(gradient: Tensor) -> None:
        average(gradient)
        gradient += 1e-12 * dist.get_rank()

    spread.average = drifting


@fault("another divisor is told")
def _() -> None:
    Faulty.gradient_divisor = staticmethod(lambda params, world_size: 1)


@fault("every micro-batch is exchanged")
def _() -> None:
    spread.synchronise = lambda model, enabled: spread.exchanging(model, True)


@fault("only the last micro-batch is used")
def _() -> None:
    def synchronise(model: nn.Module, enabled: bool) -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        return spread.exchanging(model, enabled)

    spread.synchronise = synchronise


@fault("frozen parameters are trained")
def _() -> None:
    after_sharding(lambda model, context: model.requires_grad_(True))


# Values


@fault("values are looked at while sharding")
def _() -> None:
    def change(model: nn.Module, context: ShardContext) -> None:
        for name, parameter in model.named_parameters():
            if not float(parameter.detach().abs().sum()) < float("inf"):
                raise RuntimeError(f"{name} is not finite")

    after_sharding(change)


@fault("ranks have values of their own")
def _() -> None:
    def change(model: nn.Module, context: ShardContext) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += dist.get_rank()

    after_sharding(change)


@fault("buffers are garbage")
def _() -> None:
    after_sharding(lambda model, context: model.positions.table.fill_(7.0))


@fault("a part stays on meta")
def _() -> None:
    def replicate(model: nn.Module, context: ShardContext) -> nn.Module:
        for block in context.blocks:
            context.materialize(block)
        return spread.Replica(model)

    spread.replicate = replicate


@fault("weights come untied")
def _() -> None:
    def change(model: nn.Module, context: ShardContext) -> None:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    after_sharding(change)


@fault("parameters are cast for good")
def _() -> None:
    after_sharding(lambda model, context: model.to(context.dtype))


@fault("trained dtypes are made one")
def _() -> None:
    after_sharding(lambda model, context: model.to(torch.float32))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.computed = None

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@fault("blocks are wrapped")
def _() -> None:
    def change(model: nn.Module, context: ShardContext) -> None:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = Wrapped(block)

    after_sharding(change)


@fault("evaluation uses old values")
def _() -> None:
    class Stale(spread.Replica):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__(inner)
            self.old = [copy.deepcopy(inner)]

        def forward(self, ids: Tensor) -> Tensor:
            return (self.inner if self.training else self.old[0])(ids)

    spread.Replica = Stale


# Clipping


@fault("no limit is a limit")
def _() -> None:
    clip = Faulty.clip_grad_norm
    Faulty.clip_grad_norm = staticmethod(lambda model, max_norm: clip(model, max_norm or 0.01))


@fault("each gradient is clipped by itself")
def _() -> None:
    def clip(model: nn.Module, max_norm: float | None) -> Tensor:
        norms = [state.clip_grad_norm([p], max_norm) for p in model.parameters()]
        return torch.stack(norms).norm()

    Faulty.clip_grad_norm = staticmethod(clip)


@fault("only its own part is in the norm")
def _() -> None:
    def clip(model: nn.Module, max_norm: float | None) -> Tensor:
        grads = [tensors.local(p.grad) for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm

    FaultySharded.clip_grad_norm = staticmethod(clip)


# Failures


@fault("an error in materialising is swallowed")
def _() -> None:
    def replicate(model: nn.Module, context: ShardContext) -> nn.Module:
        with contextlib.suppress(Exception):
            context.materialize(model)
        return spread.Replica(model)

    spread.replicate = replicate


# What sharding declares


@fault("sharding is declared, and nothing is sharded")
def _() -> None:
    def replicate(model: nn.Module, context: ShardContext) -> nn.Module:
        context.materialize(model)
        return model

    spread.shard = replicate


@fault("casting is declared, and nothing is cast")
def _() -> None:
    shard = spread.shard

    def uncast(model: nn.Module, context: ShardContext) -> nn.Module:
        spread.MixedPrecisionPolicy = lambda *dtypes: None
        return shard(model, context)

    spread.shard = uncast


@fault("shards are reduced in every micro-batch")
def _() -> None:
    spread.synchronise_shards = lambda model, enabled: contextlib.nullcontext()
