"""Row-sharded matrices brought whole to one rank each, and their results brought back.

A plan follows from the matrices' global shapes and the number of ranks alone, so all ranks hold
the same one without having talked. No rank computes a matrix that another computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

Shape = tuple[int, int]


def flops(shape: Shape) -> int:
    """Floating point operations of one Newton-Schulz iteration on a matrix of this shape."""
    small, large = sorted(shape)
    return 4 * small * small * large + 2 * small**3


def assign_owners(shapes: Sequence[Shape], world_size: int) -> list[int]:
    """The rank that computes each matrix: longest first, each to the least loaded rank.

    Args:
        shapes: global shape of each matrix.
        world_size: number of ranks.

    Returns:
        A rank for each matrix, in the order of `shapes`.
    """
    owners = [0] * len(shapes)
    loads = [0] * world_size
    for index in sorted(range(len(shapes)), key=lambda index: -flops(shapes[index])):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += flops(shapes[index])
    return owners


def rows_on_rank(rows: int, world_size: int, rank: int) -> int:
    """Rows of a matrix that a rank holds under `Shard(0)`: even chunks, the last ones short."""
    chunk = -(-rows // world_size)
    return max(0, min(rows - chunk * rank, chunk))


@dataclass(frozen=True)
class Exchange:
    """The two all-to-alls of one bucket of matrices, as one rank sees them.

    Attributes:
        shapes: global shape of each matrix.
        world_size: number of ranks that hold a row block of each.
        rank: this rank.
    """

    shapes: tuple[Shape, ...]
    world_size: int
    rank: int

    @cached_property
    def members(self) -> list[list[int]]:
        """For each rank, the matrices that it owns."""
        owners = assign_owners(self.shapes, self.world_size)
        return [
            [index for index, owner in enumerate(owners) if owner == rank]
            for rank in range(self.world_size)
        ]

    @property
    def owned(self) -> list[int]:
        """The matrices that this rank owns."""
        return self.members[self.rank]

    @cached_property
    def sizes(self) -> list[list[int]]:
        """For each matrix, the number of elements that each rank holds of it."""
        return [
            [rows_on_rank(rows, self.world_size, rank) * columns for rank in range(self.world_size)]
            for rows, columns in self.shapes
        ]

    @cached_property
    def _to_owner(self) -> list[int]:
        """Elements of this rank's row blocks that go to each owner."""
        return [sum(self.sizes[i][self.rank] for i in owned) for owned in self.members]

    @cached_property
    def _from_rank(self) -> list[int]:
        """Elements of this rank's own matrices that lie on each rank."""
        return [sum(self.sizes[i][rank] for i in self.owned) for rank in range(self.world_size)]

    def gather(self, blocks: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Bring each matrix to its owner. Every rank of the group must call this.

        Args:
            blocks: this rank's rows of each matrix, possibly none, all of one dtype and device.
            group: the ranks that the matrices are sharded over.

        Returns:
            The matrices that this rank owns, in the order of `owned`.
        """
        send = torch.cat([blocks[index].reshape(-1) for index in chain(*self.members)])
        received = send.new_empty(sum(self._from_rank))
        dist.all_to_all_single(received, send, self._from_rank, self._to_owner, group=group)
        pieces = received.split_with_sizes(
            [self.sizes[index][rank] for rank in range(self.world_size) for index in self.owned]
        )
        count = len(self.owned)
        return [
            torch.cat(pieces[position::count]).view(self.shapes[index])
            for position, index in enumerate(self.owned)
        ]

    def scatter(
        self, matrices: Sequence[Tensor], group: dist.ProcessGroup, like: Tensor
    ) -> list[Tensor]:
        """Bring each owner's results to the ranks that hold the rows. Every rank must call this.

        Args:
            matrices: a result for each matrix in `owned`.
            group: as for `gather`.
            like: a tensor of the results' dtype and device, for a rank that owns nothing.

        Returns:
            This rank's rows of each result, in the order of `shapes`.
        """
        rows = [
            matrix.reshape(-1).split_with_sizes(self.sizes[index])
            for index, matrix in zip(self.owned, matrices, strict=True)
        ]
        send = torch.cat([like.new_empty(0), *chain(*zip(*rows, strict=True))])
        received = like.new_empty(sum(self._to_owner))
        dist.all_to_all_single(received, send, self._to_owner, self._from_rank, group=group)
        order = list(chain(*self.members))
        pieces = received.split_with_sizes([self.sizes[index][self.rank] for index in order])
        blocks = dict(zip(order, pieces, strict=True))
        return [
            blocks[index].view(self.sizes[index][self.rank] // columns, columns)
            for index, (_, columns) in enumerate(self.shapes)
        ]


@lru_cache(maxsize=64)
def plan_exchange(shapes: tuple[Shape, ...], world_size: int, rank: int) -> Exchange:
    """The exchange of these matrices, planned once however often it is asked for."""
    return Exchange(shapes, world_size, rank)
