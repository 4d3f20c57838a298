"""How a parameter is seen as matrices: consecutive rows of it, each orthogonalized by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Matrix:
    """Consecutive rows of a parameter.

    All dimensions of a parameter but the last make rows; those of one that is flattened, but the
    first, make columns.

    Attributes:
        parameter: number of the parameter.
        start: its first row in the parameter.
        rows: number of rows.
        columns: number of columns.
        chunk: rows of the parameter that each rank holds where it is sharded, the last ones fewer.
    """

    parameter: int
    start: int
    rows: int
    columns: int
    chunk: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    def on_rank(self, rank: int) -> range:
        """The rows of the matrix that a rank holds where the parameter is sharded."""
        low = rank * self.chunk - self.start
        return range(min(max(low, 0), self.rows), min(max(low + self.chunk, 0), self.rows))

    def holder(self) -> int | None:
        """The rank that holds the whole matrix where the parameter is sharded, if one does."""
        rank = self.start // self.chunk if self.chunk else 0
        return rank if len(self.on_rank(rank)) == self.rows else None


def matrices_of(
    parameter: int,
    shape: Sequence[int],
    flatten: bool | None,
    split: Sequence[int],
    shards: int = 1,
) -> list[Matrix]:
    """The matrices of a parameter.

    Args:
        parameter: number that the matrices carry.
        shape: global shape, of two dimensions or more.
        flatten: join all dimensions after the first; otherwise the last two are a matrix and
            those before them a batch. Must be said of more than two dimensions.
        split: rows of the blocks that each matrix is cut into; empty for one.
        shards: number of ranks that the first dimension is sharded over.

    Raises:
        ValueError: the shape has no matrices, or the blocks have not the matrix's rows.
    """
    if len(shape) < 2:
        raise ValueError("it has no matrices, having fewer than two dimensions")
    if len(shape) > 2 and flatten is None:
        raise ValueError(
            "having more than two dimensions it needs flatten=True (one matrix, the dimensions "
            "after the first joined, as of a convolution) or flatten=False (a stack of matrices)"
        )
    rows, columns = (shape[0], prod(shape[1:])) if flatten else (shape[-2], shape[-1])
    if split and sum(split) != rows:
        raise ValueError(f"split is {tuple(split)}, {sum(split)} rows in all, of {rows}")
    total = shape[0] if flatten else prod(shape[:-1])
    chunk = -(-shape[0] // shards) * (total // shape[0] if shape[0] else 0)
    blocks = split or [rows]
    starts = [sum(blocks[:i]) for i in range(len(blocks))]
    return [
        Matrix(parameter, first + start, count, columns, chunk)
        for first in (range(0, total, rows) if rows else [0])
        for start, count in zip(starts, blocks, strict=True)
    ]


def rows_of(tensor: Tensor, start: int, count: int, flatten: bool | None) -> Tensor:
    """Rows of a parameter or of what is laid out like it, as a view in any memory format.

    Args:
        tensor: a parameter, or a rank's shard of it.
        start: the first row.
        count: number of rows, all of one matrix.
        flatten: as of the matrix.

    Returns:
        Shape (count, columns), or (count, ...) as the tensor's where it is flattened.
    """
    while tensor.ndim > 2 and not flatten:
        each = prod(tensor.shape[1:-1]) or 1
        tensor, start = tensor[start // each], start % each
    return tensor[start : start + count]
