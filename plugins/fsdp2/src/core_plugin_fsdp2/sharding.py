"""Sharding with torch's ``fully_shard``, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from core_plugin.errors import ConfigError
from core_plugin.training.blocks import candidates
from core_plugin_fsdp2.groups import tied_groups, trained_dtype_groups

if TYPE_CHECKING:
    from core_plugin.types.distributed import ShardContext
    from core_plugin_fsdp2.plugin import FSDP2Params


def mesh(params: FSDP2Params, device_type: str, world_size: int) -> DeviceMesh:
    """See :meth:`core_plugin_fsdp2.plugin.FSDP2.create_mesh`."""
    replicas, reshard = params.replicas, params.reshard_after_forward
    if replicas > 1 and (world_size % replicas or world_size == replicas):
        raise ConfigError(
            f"distributed.replicas is {replicas}, but {world_size} ranks cannot be split into "
            f"{replicas} equal parts of two or more, each of which shards a copy of the model; "
            "change replicas or the number of processes"
        )
    ranks = world_size // replicas
    if not isinstance(reshard, bool) and ranks % reshard:
        raise ConfigError(
            f"distributed.reshard_after_forward is {reshard}, which does not divide the {ranks} "
            "ranks that share a copy of the model; take a divisor, true or false"
        )
    if replicas == 1:
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (replicas, ranks), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, params: FSDP2Params, context: ShardContext) -> nn.Module:
    """See :meth:`core_plugin_fsdp2.plugin.FSDP2.shard_model`."""
    _check(model, params, context)
    blocks = list(context.blocks)
    sharding = Sharding(params, context)
    for group in tied_groups(model, blocks):
        sharding.apply_together(group, root=False, keep=False)
    kept = blocks[len(blocks) - params.keep_last_blocks :]
    for block in reversed(blocks):  # what is in a block comes before it
        sharding.apply(block, keep=block in kept)
    sharding.apply(model, root=True)
    prefetch(model, blocks, params)
    context.materialize(model)
    return model


def _check(model: nn.Module, params: FSDP2Params, context: ShardContext) -> None:
    name = type(model).__name__
    if not context.blocks:
        raise ConfigError(
            f"fsdp2: {name} names no blocks to shard one by one; list their classes in "
            f"train.blocks. Candidates: {candidates(model)}"
        )
    if params.keep_last_blocks > len(context.blocks):
        raise ConfigError(
            f"distributed.keep_last_blocks is {params.keep_last_blocks}, but {name} has "
            f"{len(context.blocks)} blocks"
        )
    if scalars := [n for n, p in model.named_parameters() if p.ndim == 0]:
        raise ConfigError(
            f"fsdp2 shards the first dimension, which these parameters of {name} have not: "
            f"{', '.join(scalars)}; give them the shape [1]"
        )
    for path, module in model.named_modules():
        _check_dtypes(path, module)


def _check_dtypes(path: str, module: nn.Module) -> None:
    """What a module itself trains has one dtype, since it cannot be sharded apart."""
    own = module.named_parameters(prefix=path, recurse=False)
    trained = {name: p.dtype for name, p in own if p.requires_grad}
    if len({*trained.values()}) > 1:
        told = ", ".join(f"{name} ({str(t).removeprefix('torch.')})" for name, t in trained.items())
        raise ConfigError(
            f"fsdp2 shards a module's own parameters together, and these are trained in different "
            f"dtypes: {told}; give them one dtype, or put them into modules of their own"
        )


@dataclass(frozen=True)
class Sharding:
    """What all calls of ``fully_shard`` for a model have in common."""

    params: FSDP2Params
    context: ShardContext

    def apply(self, part: nn.Module, *, root: bool = False, keep: bool = False) -> None:
        """Shard a part of the model, apart from what is sharded in it already.

        Args:
            part: What is gathered in one go, unless it trains parameters of two dtypes.
            root: Whether it is the model itself.
            keep: Whether it stays whole after forward.
        """
        for group in trained_dtype_groups(part):
            self.apply_together([group], root=root and group is part, keep=keep)

    def apply_together(self, modules: list[nn.Module], *, root: bool, keep: bool) -> None:
        """Shard modules that are gathered in one go."""
        reshard: bool | int | None = self.params.reshard_after_forward
        if reshard is not False and (root or keep):
            # The root's are needed first in backward: torch's own choice (None) keeps them.
            reshard = None if root else False
        fully_shard(
            modules,
            mesh=self.context.mesh,
            reshard_after_forward=reshard,
            mp_policy=self._precision(root),
            offload_policy=self._offloading(),
        )
        for module in modules:
            if isinstance(module, FSDPModule):  # what is in another one of them is sharded with it
                self._set_reduction(module)

    def _set_reduction(self, module: FSDPModule) -> None:
        factor, mesh = self.params.gradient_divide_factor, self.context.mesh
        averages = self.context.averages_in_collective(self.params.average_in_collective)
        module.set_force_sum_reduction_for_comms(factor is not None or not averages)
        if factor is not None and mesh is not None and mesh.size() > 1:
            module.set_gradient_divide_factor(factor)

    def _precision(self, root: bool) -> MixedPrecisionPolicy:
        """Cast to the computing dtype in each group, and to the output's at the root alone."""
        single = self.context.dtype == torch.float32
        reduce, output = self.params.reduce_dtype, self.params.output_dtype
        return MixedPrecisionPolicy(
            param_dtype=None if single else self.context.dtype,
            reduce_dtype=None if single and reduce == "float32" else getattr(torch, reduce),
            output_dtype=None
            if not root or (single and output == "float32")
            else getattr(torch, output),
            # What a block gets beside its activations keeps its precision.
            cast_forward_inputs=root,
        )

    def _offloading(self) -> OffloadPolicy:
        if not self.params.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.context.device_capabilities.pinned_memory)


def prefetch(model: nn.Module, blocks: list[nn.Module], params: FSDP2Params) -> None:
    """Gather as many blocks ahead as the parameters say, in the order in which they are called."""
    ahead, behind = params.forward_prefetch, params.backward_prefetch
    sharded = cast("list[FSDPModule]", [model, *blocks])
    for number, module in enumerate(sharded):
        if ahead:
            module.set_modules_to_forward_prefetch(sharded[number + 1 : number + 1 + ahead])
        if behind:
            end = number or len(sharded)  # the model's own backward comes first
            module.set_modules_to_backward_prefetch(sharded[max(1, end - behind) : end][::-1])
