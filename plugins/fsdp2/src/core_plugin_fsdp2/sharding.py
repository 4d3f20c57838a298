"""Sharding with torch's ``fully_shard``, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from core_plugin.errors import ConfigError

if TYPE_CHECKING:
    from core_plugin.types.distributed import ShardContext
    from core_plugin_fsdp2.plugin import FSDP2Params


def mesh(params: FSDP2Params, device_type: str, world_size: int) -> DeviceMesh:
    """See :meth:`core_plugin_fsdp2.plugin.FSDP2.create_mesh`."""
    replicas = params.replicas
    if replicas == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    if world_size % replicas or world_size == replicas:
        raise ConfigError(
            f"distributed.replicas is {replicas}, but {world_size} ranks cannot be split into "
            f"{replicas} equal parts of two or more, each of which shards a copy of the model; "
            "change replicas or the number of processes"
        )
    shape = (replicas, world_size // replicas)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, params: FSDP2Params, context: ShardContext) -> nn.Module:
    """See :meth:`core_plugin_fsdp2.plugin.FSDP2.shard_model`."""
    if not context.blocks:
        raise ConfigError(
            f"fsdp2: {type(model).__name__} names no blocks to shard one by one; its model plugin "
            f"has to return them from blocks(). Candidates: {_candidates(model)}"
        )
    for block in context.blocks:
        _shard_part(block, params, context, root=False)
    return _shard_part(model, params, context, root=True)


def _shard_part(
    part: nn.Module, params: FSDP2Params, context: ShardContext, root: bool
) -> nn.Module:
    sums = not context.averages_in_collective(params.average_in_collective)
    context.materialize(part)
    for group in _trained_dtype_groups(part):
        sharded = fully_shard(
            group,
            mesh=context.mesh,
            # The root's are needed first in backward: torch's own choice (None) keeps them.
            reshard_after_forward=params.reshard_after_forward and (None if root else True),
            mp_policy=_policy(params, context, root=root and group is part),
        )
        sharded.set_force_sum_reduction_for_comms(sums)  # it is for one group, not for those within
    return part


def _trained_dtype_groups(part: nn.Module) -> list[nn.Module]:
    """The modules to shard one by one so that no group trains parameters of two dtypes.

    ``fully_shard`` needs one original dtype among a group's trained parameters; the dtypes that
    differ from the part's own, as those of adapters in a half-precision model, get groups of
    their own.
    """
    dtypes = {p.dtype for p in part.parameters() if p.requires_grad and not _sharded(p)}
    if len(dtypes) < 2:
        return [part]
    first = next(p.dtype for p in part.parameters() if p.requires_grad and not _sharded(p))
    odd = [
        module
        for module in part.modules()
        if any(p.requires_grad and p.dtype != first for p in module.parameters(recurse=False))
        and not any(_sharded(p) for p in module.parameters(recurse=False))
    ]
    return [*odd, part]


def _sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, torch.distributed.tensor.DTensor)


def _policy(params: FSDP2Params, context: ShardContext, root: bool) -> MixedPrecisionPolicy:
    """Cast to the computing dtype in each group; back to float32 at the root's output alone."""
    if context.dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=context.dtype,
        reduce_dtype=getattr(torch, params.reduce_dtype),
        output_dtype=torch.float32 if root else None,
        cast_forward_inputs=root,  # what a block gets beside its activations keeps its precision
    )


def _candidates(model: nn.Module) -> str:
    classes = {
        type(child).__name__
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for child in module
    }
    return ", ".join(sorted(classes)) or "none (the model has no nn.ModuleList)"
