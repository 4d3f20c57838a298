"""Orthogonalization of matrices by Newton-Schulz iteration.

Source: Keller Jordan, Muon (https://kellerjordan.github.io/posts/muon). In bfloat16 the operations
and their order are those of `torch.optim.Muon`, to which results on a CPU are bitwise equal; in
float32 they are chosen by shape. On a CPU no bit of a result depends on what else is in the list,
nor, in float32, on the number of threads: ranks compute the same whichever matrices each is given.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from core_plugin_muon.coefficients import Triple
from core_plugin_muon.options import check_option

_TILE = 16
"""Sides of float32 matrices are filled up to multiples of this with zeros. At the rims of other
sizes, how a library adds up depends on the number of matrices and threads, and on the address."""

_BATCHED_ON_CPU = 64
"""Smaller side up to which a batched product is quicker than single ones on a CPU."""

_BATCH_ELEMENTS = 2**22
"""Most elements of a batch; larger ones are no quicker, and take memory several times over."""

_GRAM_GAIN = 1.1
"""Times fewer operations from which on iterating on the Gram matrix is quicker."""

_GRAM_TOLERANCE = 0.01
"""Most that rounding the Gram matrix may change a singular value by; see `_gram_is_safe`."""

_SYMMETRIC_FROM = 256
"""Rows from which on leaving out half of a symmetric product is quicker."""

_POWER_BITS = 0x7F800000  # the exponent of a float32; masking the rest leaves a power of two


@torch.no_grad()
def orthogonalize(
    matrices: Sequence[Tensor],
    coefficients: Sequence[Triple],
    dtype: torch.dtype,
    eps: float = 1e-7,
) -> list[Tensor]:
    """The orthogonal factor of each matrix, approximately.

    For `matrix = U S V^T` this is `U p(S / |S|) V^T`, with `p` the polynomials of all steps one
    after the other, which bring singular values near 1. The size of a matrix does not matter:
    1e-30 and 1e30 times it give the same.

    Args:
        matrices: each of shape (rows, columns) and of any floating dtype; not written to.
        coefficients: a triple for each step, see `coefficients.schedule`.
        dtype: dtype to work in, float32 or bfloat16.
        eps: least norm to divide by once the largest entry is between 1 and 2, so that zeros stay
            zeros.

    Returns:
        A new contiguous tensor for each matrix, of its shape and of dtype `dtype`.
    """
    results = [matrix.new_empty(matrix.shape, dtype=dtype) for matrix in matrices]
    for members in _alike(matrices):
        batch = [matrices[index] for index in members]
        outcome = _orthogonalize_alike(batch, tuple(coefficients), dtype, eps)
        for index, result in zip(members, outcome, strict=True):
            results[index].copy_(result)
    return results


def flops(shape: tuple[int, int], coefficients: Sequence[Triple], dtype: torch.dtype) -> int:
    """Floating point operations that `orthogonalize` takes for a matrix of this shape."""
    rows, columns = _padded(shape, dtype)
    on_matrix, on_gram = _flops_of_both(rows, columns, len(coefficients), dtype)
    return on_gram if _uses_gram(rows, columns, tuple(coefficients), dtype) else on_matrix


def update_scale(rule: str, rows: int, columns: int) -> float:
    """The factor on the orthogonal update of a matrix.

    Args:
        rule: `match_rms_adamw`, 0.2 * sqrt(max(rows, columns)) (Moonlight, arXiv 2502.16982,
            where the root mean square of an update is AdamW's); `original`,
            sqrt(max(1, rows / columns)) (Keller Jordan); `spectral`, sqrt(rows / columns);
            `none`, 1.
        rows: rows of the matrix.
        columns: columns of the matrix.

    Raises:
        ValueError: there is no such rule.
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if rule == "original":
        return math.sqrt(max(1.0, rows / max(columns, 1)))
    if rule == "spectral":
        return math.sqrt(rows / max(columns, 1))
    check_option("adjust_lr_fn", rule)
    return 1.0


def working_dtype(choice: str, device: torch.device) -> torch.dtype:
    """The dtype to iterate in on a device.

    Args:
        choice: `float32`, `bfloat16`, or `auto`, which is bfloat16 where the hardware computes it
            and float32 where it would be emulated, which takes 20 times as long.
        device: the device that the matrices are on.
    """
    if choice == "auto":
        return torch.bfloat16 if _computes_bfloat16(device) else torch.float32
    return torch.bfloat16 if choice == "bfloat16" else torch.float32


def _computes_bfloat16(device: torch.device) -> bool:
    if device.type == "cpu":
        units = torch.cpu.get_capabilities()
        native = bool(units.get("avx512_bf16") or units.get("amx_bf16"))
        return native and torch.backends.mkldnn.is_available()
    try:
        module: Any = torch.get_device_module(device)
        return bool(module.is_bf16_supported(including_emulation=False))
    except (AttributeError, RuntimeError, TypeError):  # no module, no such function or argument
        return False


def _alike(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of matrices to iterate together: of one shape, where tall ones count as wide."""
    alike: dict[tuple[torch.device, int, int], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        if matrix.numel():
            rows, columns = sorted(matrix.shape)
            alike[matrix.device, rows, columns].append(index)
    for (device, rows, columns), members in alike.items():
        alone = device.type == "cpu" and rows > _BATCHED_ON_CPU
        size = 1 if alone else max(1, _BATCH_ELEMENTS // (rows * columns))
        yield from (members[start : start + size] for start in range(0, len(members), size))


def _orthogonalize_alike(
    matrices: Sequence[Tensor], coefficients: tuple[Triple, ...], dtype: torch.dtype, eps: float
) -> list[Tensor]:
    if dtype == torch.bfloat16 and matrices[0].is_cpu:
        return [_orthogonalize_as_torch(matrix, coefficients, eps) for matrix in matrices]
    x = _without_magnitude(_stack(matrices, dtype))
    norms = vector_norm(vector_norm(x, dim=-1, dtype=torch.float32), dim=-1).clamp(min=eps)
    x.div_(norms.to(dtype)[:, None, None])
    _, rows, columns = x.shape
    iterate = _iterate_gram if _uses_gram(rows, columns, coefficients, dtype) else _iterate
    return [
        (padded.mT if _is_tall(matrix) else padded)[: matrix.shape[0], : matrix.shape[1]]
        for matrix, padded in zip(matrices, iterate(x, coefficients), strict=True)
    ]


def _orthogonalize_as_torch(matrix: Tensor, coefficients: tuple[Triple, ...], eps: float) -> Tensor:
    """The operations of `torch.optim.Muon` one by one, on memory laid out as it has it."""
    x = matrix.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
    x = _without_magnitude(x.mT if _is_tall(matrix) else x)
    x.div_(x.norm().clamp(min=eps))
    for a, b, c in coefficients:
        gram = x @ x.mT
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.mT if _is_tall(matrix) else x


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _stack(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A copy of matrices of one shape, transposed if tall: shape (batch, rows, columns)."""
    shape = _padded(matrices[0].shape, dtype)
    x = torch.zeros(len(matrices), *shape, dtype=dtype, device=matrices[0].device)
    for padded, matrix in zip(x, matrices, strict=True):
        wide = matrix.mT if _is_tall(matrix) else matrix
        padded[: wide.shape[0], : wide.shape[1]] = wide
    return x


def _padded(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
    """Rows and columns of a wide matrix of this shape, filled up."""
    rows, columns = sorted(shape)
    return (_fill_up(rows), _fill_up(columns)) if dtype == torch.float32 else (rows, columns)


def _fill_up(side: int) -> int:
    return -(-side // _TILE) * _TILE


def _without_magnitude(x: Tensor) -> Tensor:
    """Divide each matrix, in place, by the power of two next below its largest entry.

    A norm of squares overflows above 1e19 and vanishes below 1e-23. A power of two divides
    without rounding, so nothing else changes.
    """
    peak = x.abs().amax((-2, -1), keepdim=True).float().clamp(min=2.0**-126)
    power = (peak.view(torch.int32) & _POWER_BITS).view(torch.float32)
    return x.div_(power.to(x.dtype))


def _iterate(x: Tensor, coefficients: tuple[Triple, ...]) -> Tensor:
    """The iteration itself, on shape (batch, rows, columns); `x` is used up."""
    gram, polynomial = (_empty_gram(x) for _ in range(2))
    following = torch.empty_like(x)
    for a, b, c in coefficients:
        _add_symmetric(gram, x, x.mT, beta=0, alpha=1, out=gram)
        _add_symmetric(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=following)
        x, following = following, x
    return x


def _iterate_gram(x: Tensor, coefficients: tuple[Triple, ...]) -> Tensor:
    """The same in exact arithmetic, with all steps on the Gram matrix and one product at the end.

    A step multiplies `x` by a polynomial of the Gram matrix, and so the Gram matrix by its square.
    In one triangle of these products rounding errors grow fast, where they do no harm. So both
    are computed, and factors are in this order.
    """
    gram, polynomial, product, spare = (_empty_gram(x) for _ in range(4))
    _add_symmetric(gram, x, x.mT, beta=0, alpha=1, out=gram)
    for step, (a, b, c) in enumerate(coefficients):
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        if step == 0:
            product.copy_(polynomial).diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            torch.baddbmm(product, product, polynomial, beta=a, out=spare)
            product, spare = spare, product
        if step < len(coefficients) - 1:
            torch.baddbmm(gram, gram, polynomial, beta=a, out=spare)
            torch.baddbmm(spare, spare, polynomial, beta=a, out=gram)
    return product @ x


def _empty_gram(x: Tensor) -> Tensor:
    batch, rows, _ = x.shape
    return x.new_empty(batch, rows, rows)


def _add_symmetric(
    base: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float, out: Tensor
) -> None:
    """`out = beta * base + alpha * left @ right`, which is known to be symmetric."""
    blocks = _row_blocks(out.shape[-1], out.dtype)
    if len(blocks) == 1:
        torch.baddbmm(base, left, right, beta=beta, alpha=alpha, out=out)
        return
    for start, stop in blocks:
        rows = slice(start, stop)
        lower = out[:, rows, :stop]
        torch.baddbmm(
            base[:, rows, :stop],
            left[:, rows],
            right[..., :stop],
            beta=beta,
            alpha=alpha,
            out=lower,
        )
        out[:, :start, rows] = lower[..., :start].mT


def _row_blocks(rows: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Blocks of rows of a symmetric product, each computed up to the diagonal alone.

    At most 8, so that they stay large enough for any device, of whole tiles.
    """
    size = max(rows, 1)
    if dtype == torch.float32 and rows >= _SYMMETRIC_FROM:
        size = max(_SYMMETRIC_FROM // 2, _fill_up(rows // 8))
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _flops_of_both(rows: int, columns: int, steps: int, dtype: torch.dtype) -> tuple[int, int]:
    """Operations of iterating on the matrix itself, and on its Gram matrix."""
    computed = sum((stop - start) * stop for start, stop in _row_blocks(rows, dtype))
    gram, applied = 2 * computed * columns, 2 * rows * rows * columns
    on_matrix = steps * (gram + 2 * computed * rows + applied)
    on_gram = gram + (4 * steps - 3) * 2 * rows**3 + applied
    return on_matrix, on_gram


def _uses_gram(
    rows: int, columns: int, coefficients: tuple[Triple, ...], dtype: torch.dtype
) -> bool:
    on_matrix, on_gram = _flops_of_both(rows, columns, len(coefficients), dtype)
    return (
        dtype == torch.float32
        and on_matrix >= _GRAM_GAIN * on_gram
        and _gram_is_safe(coefficients)
        and _multiplies_in_float32()
    )


def _multiplies_in_float32() -> bool:
    """Whether products of float32 matrices are not allowed to be of TF32 or bfloat16."""
    backends: Any = torch.backends
    return all(
        backend.matmul.fp32_precision in ("none", "ieee")
        for backend in (backends.cuda, backends.mkldnn)
    )


@lru_cache(maxsize=64)
def _gram_is_safe(coefficients: tuple[Triple, ...]) -> bool:
    """Whether rounding the Gram matrix in float32 changes the result little.

    Its rounding error is that of an eigenvalue near 1, and a step multiplies the smallest
    eigenvalues by about a^2: those that rounding made negative run away if the steps are many or
    steep. So iterate on single singular values with an error as large.
    """
    values = [10 ** (exponent / 20) for exponent in range(-160, 1)]
    rounding = torch.finfo(torch.float32).eps
    changes = (
        abs(
            _through_gram(value, sign * rounding, coefficients)
            - _through_gram(value, 0, coefficients)
        )
        for value in values
        for sign in (-1, 1)
    )
    return all(change <= _GRAM_TOLERANCE for change in changes)


def _through_gram(value: float, error: float, coefficients: tuple[Triple, ...]) -> float:
    """A singular value after all steps, if its square is off by an error."""
    eigenvalue = value * value + error
    for a, b, c in coefficients:
        factor = a + b * eigenvalue + c * eigenvalue * eigenvalue
        value, eigenvalue = value * factor, eigenvalue * factor * factor
    return value
