"""Orthogonalization of one matrix by Newton-Schulz iteration.

Source: Keller Jordan, Muon (https://kellerjordan.github.io/posts/muon), in the order of operations
of `torch.optim.Muon`, to which the result is equal in bfloat16.
"""

import math

import torch
from torch import Tensor

from core_plugin_muon.options import Scale, WorkingDtype

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the polynomial `a x + b x^3 + c x^5` that a step applies to the singular values."""

_EPS = 1e-7
_POWER_BITS = 0x7F800000  # the exponent of a float32; masking the rest leaves a power of two


def orthogonalize(matrix: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """The orthogonal factor of a matrix, approximately.

    For `matrix = U S V^T` this is `U p(S / |S|) V^T` with `p` the polynomial applied `steps`
    times, which brings singular values near 1. The size of the matrix does not matter: 1e-30
    and 1e30 times it give the same.

    Args:
        matrix: shape (rows, columns), any floating dtype; not written to.
        steps: number of iterations.
        dtype: dtype to work in, float32 or bfloat16.

    Returns:
        A new tensor of shape (rows, columns) and of dtype `dtype`.
    """
    a, b, c = COEFFICIENTS
    x = _without_magnitude(matrix.to(dtype).contiguous())
    tall = x.shape[0] > x.shape[1]
    if tall:  # the products below are of the smaller side
        x = x.T
    x.div_(x.norm().clamp(min=_EPS))
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


def _without_magnitude(matrix: Tensor) -> Tensor:
    """The matrix divided by the power of two next below its largest entry.

    A norm of squares overflows above 1e19 and vanishes below 1e-23. A power of two divides
    without rounding, so nothing else changes.
    """
    peak = matrix.abs().amax().float().clamp(min=2.0**-126)
    power = (peak.view(torch.int32) & _POWER_BITS).view(torch.float32)
    return matrix / power.to(matrix.dtype)


def update_scale(rule: Scale, rows: int, columns: int) -> float:
    """The factor on the orthogonal update of a matrix.

    Args:
        rule: `match_rms_adamw`, 0.2 * sqrt(max(rows, columns)) (Moonlight, arXiv 2502.16982,
            where the root mean square of an update is AdamW's); `original`,
            sqrt(max(1, rows / columns)) (Keller Jordan); `none`, 1.
        rows: rows of the matrix.
        columns: columns of the matrix.
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 1.0


def working_dtype(choice: WorkingDtype, device: torch.device) -> torch.dtype:
    """The dtype to iterate in on a device.

    `auto` takes bfloat16 on CUDA devices alone: a CPU without bfloat16 units is 20 times slower
    in it than in float32.
    """
    if choice == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if choice == "bfloat16" else torch.float32
