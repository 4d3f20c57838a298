"""What a rank holds of a parameter: the whole tensor, a block of rows, or another layout."""

import warnings
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def local_part(tensor: Tensor) -> Tensor:
    """The memory of this rank: the shard of a DTensor, a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient, laid out as the parameter; None without one.

    Raises:
        RuntimeError: the gradient is sparse.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise RuntimeError(
            "Muon needs dense gradients, but that of a parameter of shape "
            f"{tuple(parameter.shape)} is {gradient.layout}; create the embedding with sparse=False"
        )
    if (
        isinstance(parameter, DTensor)
        and isinstance(gradient, DTensor)
        and gradient.placements != parameter.placements
    ):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def is_row_sharded(tensor: Tensor) -> bool:
    """Whether each rank of a one-dimensional mesh holds a block of rows, as under FSDP2."""
    return (
        isinstance(tensor, DTensor)
        and tensor.device_mesh.ndim == 1
        and tensor.placements == (Shard(0),)
    )


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
        f"Muon orthogonalizes matrices laid out as {placements} on a mesh of shape {mesh} whole on "
        "every rank, which is right but slow; matrices sharded by rows on a one-dimensional mesh "
        "are computed once",
        stacklevel=2,
    )
