"""Matrices brought whole to the ranks that own them, and the results brought back.

An exchange is started for a bucket and waited for later, so that one bucket travels while another
is computed. What is sent is referenced until then: a collective reads it in the background.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from core_plugin_muon.plan import Plan

Rows = Callable[[int], Tensor | None]
"""Gives this rank's rows of a matrix, by its number."""

Wait = Callable[[], dict[int, Tensor]]
"""Waits for what was started and returns tensors of shape (rows, columns) by matrix number."""


class Exchange(ABC):
    """One rank's part in the exchanges of a plan; all its ranks must call the same in turn.

    Args:
        plan: the plan, the same on all ranks.
        rank: this rank.
        group: the ranks of the plan, in their order; None for one rank alone.
    """

    def __init__(self, plan: Plan, rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.plan = plan
        self.rank = rank
        self.group = group

    @abstractmethod
    def held(self, number: int) -> range:
        """Where a matrix lies in the rows that this rank holds of its parameter."""

    @abstractmethod
    def gather(self, bucket: int, rows: Rows, like: Tensor) -> Wait:
        """Start to bring the matrices of a bucket to their owners.

        Args:
            bucket: number of the bucket.
            rows: gives the rows of a matrix that this rank holds; None if they are zeros.
            like: a tensor of the rows' dtype and device.

        Returns:
            To wait for the matrices that this rank owns; those that it knows to be zeros may be
            left out.
        """

    @abstractmethod
    def scatter(self, bucket: int, results: Mapping[int, Tensor], like: Tensor) -> Wait:
        """Start to bring the owners' results to the ranks that step with them.

        Args:
            bucket: number of the bucket.
            results: those of the matrices that `gather` brought; zeros for the others.
            like: a tensor of the results' dtype and device.

        Returns:
            To wait for this rank's rows of the results of the bucket; without those of zeros
            where nothing travelled.
        """


class Alone(Exchange):
    """One rank that holds all matrices."""

    def held(self, number: int) -> range:
        """All of its rows."""
        matrix = self.plan.matrices[number]
        return range(matrix.start, matrix.start + matrix.rows)

    def gather(self, bucket: int, rows: Rows, like: Tensor) -> Wait:
        """Nothing travels."""
        return lambda: _without_zeros(self.plan.buckets[bucket], rows)

    def scatter(self, bucket: int, results: Mapping[int, Tensor], like: Tensor) -> Wait:
        """Nothing travels."""
        return lambda: dict(results)


class Replicated(Alone):
    """Ranks that all hold all matrices; results reach them in one all-gather a bucket."""

    def gather(self, bucket: int, rows: Rows, like: Tensor) -> Wait:
        """Nothing travels: each rank has its own."""
        own = self.plan.shares[bucket][self.rank]
        return lambda: _without_zeros(own, rows)

    def scatter(self, bucket: int, results: Mapping[int, Tensor], like: Tensor) -> Wait:
        """Every rank's results, filled up to the size of the largest share, to every rank."""
        shares = self.plan.shares[bucket]
        matrices = self.plan.matrices
        sizes = [[matrices[n].rows * matrices[n].columns for n in share] for share in shares]
        largest = max(map(sum, sizes))
        send = like.new_zeros(largest)
        places = send.split_with_sizes([*sizes[self.rank], largest - sum(sizes[self.rank])])
        for n, place in zip(shares[self.rank], places, strict=False):
            if n in results:
                place.view(matrices[n].shape).copy_(results[n])
        received = like.new_empty(largest * self.plan.world_size)
        work = dist.all_gather_single(received, send, group=self.group, async_op=True)

        def wait() -> dict[int, Tensor]:
            _finish(work, send)
            return {
                n: part.view(matrices[n].shape)
                for share, size, whole in zip(shares, sizes, received.split(largest), strict=True)
                for n, part in zip(
                    share, whole.split_with_sizes([*size, largest - sum(size)]), strict=False
                )
            }

        return wait


class Sharded(Exchange):
    """Ranks that each hold rows of the parameters; two all-to-alls a bucket, without padding."""

    def held(self, number: int) -> range:
        """The rows on this rank, which may be none."""
        matrix = self.plan.matrices[number]
        rows = matrix.on_rank(self.rank)
        first = matrix.start + rows.start - self.rank * matrix.chunk
        return range(first, first + len(rows))

    def gather(self, bucket: int, rows: Rows, like: Tensor) -> Wait:
        """Each rank sends every owner its rows of the owner's matrices."""
        shares = self.plan.shares[bucket]
        order = list(chain(*shares))
        parts = [self._flat(n, rows(n), like) for n in order if self.held(n)]
        send = torch.cat([like.new_empty(0), *parts])
        received = like.new_empty(sum(self._from_ranks(shares)))
        work = dist.all_to_all_single(
            received,
            send,
            self._from_ranks(shares),
            self._to_owners(shares),
            group=self.group,
            async_op=True,
        )
        own = shares[self.rank]

        def wait() -> dict[int, Tensor]:
            _finish(work, send)
            sizes = [self._size(n, rank) for rank in range(self.plan.world_size) for n in own]
            pieces = received.split_with_sizes(sizes)
            return {
                n: torch.cat(pieces[place :: len(own)]).view(self.plan.matrices[n].shape)
                for place, n in enumerate(own)
            }

        return wait

    def scatter(self, bucket: int, results: Mapping[int, Tensor], like: Tensor) -> Wait:
        """Each owner sends every rank its rows of the results."""
        shares = self.plan.shares[bucket]
        pieces = [
            results[n][span.start : span.stop].reshape(-1)
            for rank in range(self.plan.world_size)
            for n in shares[self.rank]
            if (span := self.plan.matrices[n].on_rank(rank))
        ]
        send = torch.cat([like.new_empty(0), *pieces])
        received = like.new_empty(sum(self._to_owners(shares)))
        work = dist.all_to_all_single(
            received,
            send,
            self._to_owners(shares),
            self._from_ranks(shares),
            group=self.group,
            async_op=True,
        )
        order = list(chain(*shares))

        def wait() -> dict[int, Tensor]:
            _finish(work, send)
            parts = received.split_with_sizes([self._size(n, self.rank) for n in order])
            return {
                n: part.view(len(self.held(n)), self.plan.matrices[n].columns)
                for n, part in zip(order, parts, strict=True)
            }

        return wait

    def _flat(self, number: int, rows: Tensor | None, like: Tensor) -> Tensor:
        return like.new_zeros(self._size(number, self.rank)) if rows is None else rows.reshape(-1)

    def _size(self, number: int, rank: int) -> int:
        """Elements of a matrix on a rank."""
        matrix = self.plan.matrices[number]
        return len(matrix.on_rank(rank)) * matrix.columns

    def _to_owners(self, shares: Sequence[Sequence[int]]) -> list[int]:
        """Elements of this rank that each owner needs."""
        return [sum(self._size(n, self.rank) for n in share) for share in shares]

    def _from_ranks(self, shares: Sequence[Sequence[int]]) -> list[int]:
        """Elements on each rank of the matrices that this rank owns."""
        own = shares[self.rank]
        return [sum(self._size(n, rank) for n in own) for rank in range(self.plan.world_size)]


def _without_zeros(numbers: Iterable[int], rows: Rows) -> dict[int, Tensor]:
    return {number: part for number in numbers if (part := rows(number)) is not None}


def _finish(work: dist.Work | None, sent: Tensor) -> None:
    """Wait; `sent` is an argument so that its memory lives until here."""
    if work is not None:
        work.wait()


def agree(terms: object, group: dist.ProcessGroup, like: Tensor) -> None:
    """Make sure that all ranks mean the same, and open the connections between them.

    A transport may connect two ranks when they first talk; here nothing else is under way.

    Args:
        terms: whose text has to be the same on all ranks.
        group: the ranks; all must call this, and wait for one that does not.
        like: a tensor of the device to talk from.

    Raises:
        RuntimeError: a rank means something else; raised on all ranks, and tells who differs.
    """
    if like.is_meta:  # a dry run: there are no values to compare
        return
    digest = int.from_bytes(blake2b(str(terms).encode(), digest_size=7).digest())
    mine = torch.full((dist.get_world_size(group),), digest, dtype=torch.int64).to(like.device)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    ranks: dict[int, list[int]] = {}
    for rank, value in enumerate(theirs.tolist()):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        raise RuntimeError(
            "Muon: ranks differ in the matrices that they orthogonalize, in the order, the names "
            "or the options of those, or in the dtype that they work in; ranks that agree: "
            f"{list(ranks.values())}. Give all the same parameter groups in the same order, and "
            "set ns_dtype if their hardware differs"
        )
