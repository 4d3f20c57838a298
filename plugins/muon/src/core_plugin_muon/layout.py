"""How ranks hold a parameter: whole, by rows, or in a layout that they cannot share out."""

import warnings
from collections.abc import Iterable, Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from core_plugin_muon.exchange import Alone, Exchange, Replicated, Sharded


def exchange_of(
    parameter: Tensor, process_group: dist.ProcessGroup | None
) -> tuple[type[Exchange], dist.ProcessGroup | None] | None:
    """How a parameter's matrices reach their owners, and among which ranks.

    Ranks that hold copies of a shard, as in hybrid sharding, each take part in the exchange of
    their own shard group.

    Args:
        parameter: plain or a DTensor.
        process_group: the ranks that hold the same plain parameters.

    Returns:
        None for a layout other than whole or sharded by rows over one mesh dimension.
    """
    if not isinstance(parameter, DTensor):
        several = process_group is not None and dist.get_world_size(process_group) > 1
        return (Replicated, process_group) if several else (Alone, None)
    mesh = parameter.device_mesh
    spread = {dim: parameter.placements[dim] for dim in range(mesh.ndim) if mesh.size(dim) > 1}
    if not spread:
        return Alone, None
    shards = {dim: p for dim, p in spread.items() if not p.is_replicate()}
    if not shards:
        return Replicated, mesh.get_group(next(iter(spread)))
    (dim, placement), *others = shards.items()
    # Not isinstance: a strided shard holds other rows.
    if others or type(placement) is not Shard or placement.dim != 0:
        return None
    return Sharded, mesh.get_group(dim)


def process_group_of(model: nn.Module, shared: Mapping[str, Tensor]) -> dist.ProcessGroup | None:
    """The ranks among which the model's gradients are averaged, if it is wrapped for that.

    Args:
        model: the model.
        shared: parameters of it, by name, that those ranks are to share the work on.

    Raises:
        ValueError: `DistributedDataParallel` was told to ignore one of them.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel):
        return None
    named = model.module.named_parameters(remove_duplicate=False)
    ignored = {id(parameter) for name, parameter in named if name in model.parameters_to_ignore}
    apart = [
        name
        for name, parameter in shared.items()
        if id(parameter) in ignored and not isinstance(parameter, DTensor)
    ]
    if apart:
        raise ValueError(
            f"DistributedDataParallel ignores {', '.join(apart)}, so each rank has gradients of "
            "its own there, and Muon cannot share the work out; pass process_group=None to "
            "compute everything on each rank, or send them to adamw by a rule"
        )
    return model.process_group


def local_part(tensor: Tensor) -> Tensor:
    """The memory of this rank: the shard of a DTensor, a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_dense(parameters: Iterable[Tensor]) -> None:
    """Check that no gradient is sparse.

    Raises:
        RuntimeError: one is; tells the shape of its parameter.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise RuntimeError(
                "Muon needs dense gradients, but that of a parameter of shape "
                f"{tuple(parameter.shape)} is {gradient.layout}; create the embedding with "
                "sparse=False"
            )


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient, laid out as the parameter; None without one.

    A gradient that is laid out otherwise than its parameter is brought to its layout, for which
    all ranks must have one and call this.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if (
        isinstance(parameter, DTensor)
        and isinstance(gradient, DTensor)
        and gradient.placements != parameter.placements
    ):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def gather_whole(local: Tensor, like: DTensor) -> Tensor:
    """The whole tensor on every rank, from parts laid out as `like`. Every rank must call this."""
    _warn_of_layout(str(like.placements), str(like.device_mesh.shape))
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    ).full_tensor()


def own_part(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part, laid out as `like`, of a tensor that every rank holds whole."""
    return distribute_tensor(
        whole, like.device_mesh, like.placements, src_data_rank=None
    ).to_local()


@cache
def _warn_of_layout(placements: str, mesh: str) -> None:
    warnings.warn(
        f"Muon orthogonalizes parameters laid out as {placements} on a mesh of shape {mesh} whole "
        "on every rank, which is right but slow; those sharded by rows over one mesh dimension "
        "are computed once",
        stacklevel=2,
    )
