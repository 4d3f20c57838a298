"""DoRA: the length of each output's weights is trained apart from their direction."""

from __future__ import annotations

import torch
from torch import Tensor

from core_plugin_lora.factor import Factor

COLUMNS = 1024
"""How many inputs of a weight in fewer bits are in float32 at a time."""


class Magnitude(Factor):
    """The lengths: as many numbers as there are outputs."""

    def forward(self, norms: Tensor) -> Tensor:
        """What multiplies rows of these lengths ``[out]``, so that they get the trained ones."""
        return self.weight.flatten() / norms.clamp(min=torch.finfo(norms.dtype).tiny)


@torch.no_grad()
def row_norms(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The lengths of the rows of ``W + B A``, ``[out]``, without making that sum.

    It is ``|w|² + 2 b·(A w) + b·(A Aᵀ b)`` for a row ``w`` and its ``b``, in float32 at least. What
    is added to in place is not touched by autocast.

    Args:
        weight: ``W [out, in]``.
        down: ``A [r, in]``.
        up: ``B [out, r]``, with the scaling in it.
    """
    dtype = torch.promote_types(down.dtype, torch.float32)
    down, up = down.to(dtype), up.to(dtype)
    squares, products = down.new_zeros(len(up)), torch.zeros_like(up)
    width = weight.shape[1] if weight.dtype == dtype else COLUMNS
    for columns, part in zip(weight.split(width, 1), down.split(width, 1), strict=True):
        columns = columns.to(dtype)
        squares += torch.linalg.vector_norm(columns, dim=1).square()
        products.addmm_(columns, part.t())
    gram = down.new_zeros(len(down), len(down)).addmm_(down, down.t())
    products.mul_(2).addmm_(up, gram)
    return squares.add_((up * products).sum(1)).clamp_(min=0).sqrt()
