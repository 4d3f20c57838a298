"""Tensors that may be sharded: their names, their wholes, their parts.

Sharded tensors are ``DTensor``s, and all others are equal on all ranks. This module imports torch,
but nothing of what makes tensors sharded: where that was never imported, no tensor is.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What compilation and recomputation call the module that they wrap; no name has these."""


def canonical_name(name: str) -> str:
    """A tensor's name without what compilation and recomputation wrap around modules."""
    for wrapper in WRAPPERS:
        name = name.replace(f"{wrapper}.", "")
    return name


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers by name; of tied ones, the first name only."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[canonical_name(name)] = tensor
    return tensors


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, by name."""
    return {canonical_name(n): p for n, p in model.named_parameters() if p.requires_grad}


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a ``DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; collective if it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


@torch.no_grad()
def call_whole(module: nn.Module, inputs: Tensor) -> Tensor:
    """What a module whose tensors may be sharded, or elsewhere, makes of a tensor; collective.

    Its tensors are gathered where the input is; the module itself stays as it is.
    """
    held = [*module.named_parameters(), *module.named_buffers()]
    whole = {name: gather(tensor).to(inputs.device) for name, tensor in held}
    result: Tensor = torch.func.functional_call(module, whole, inputs)
    return result


def copy_full(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded; every rank has the whole one."""
    with torch.no_grad():
        if is_sharded(target):
            from torch.distributed.tensor import distribute_tensor

            full = distribute_tensor(
                full.to(target.device), target.device_mesh, target.placements, src_data_rank=None
            )
        target.copy_(full)


def reshard(model: nn.Module) -> None:
    """Put the sharded parameters back where a forward pass of ``fully_shard`` left whole ones."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp else ():
        if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
            module.reshard()
