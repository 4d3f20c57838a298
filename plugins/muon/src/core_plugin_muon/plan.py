"""Who orthogonalizes which matrix: decided from shapes, so alike on all ranks without a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from core_plugin_muon.matrices import Matrix

_FEWEST_BUCKETS = 3
"""So that one can come and one go back while another is computed, if there are enough matrices."""

_UNEVENNESS = 1.1
"""Times an equal share that a rank may compute of what it holds, so that less has to travel."""


def balance(costs: Sequence[int], bins: int, taken: Sequence[int] = ()) -> list[int]:
    """Share out by longest processing time: the costliest first, each to the least loaded bin.

    Source: Graham, Bounds on Multiprocessing Timing Anomalies (1969).

    Args:
        costs: cost of each item.
        bins: number of bins.
        taken: load of each bin to begin with; none if empty.

    Returns:
        A bin for each item.
    """
    chosen = [0] * len(costs)
    loads = list(taken) or [0] * bins
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        chosen[item] = loads.index(min(loads))
        loads[chosen[item]] += costs[item]
    return chosen


@dataclass(frozen=True)
class Plan:
    """Matrices and their owners, in buckets that are exchanged together.

    Attributes:
        matrices: all matrices.
        costs: floating point operations of each.
        owners: the rank that orthogonalizes each.
        buckets: the numbers of each bucket's matrices. Every bucket has a like part of every
            owner's work.
        world_size: number of ranks.
    """

    matrices: tuple[Matrix, ...]
    costs: tuple[int, ...]
    owners: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    world_size: int

    @cached_property
    def loads(self) -> list[int]:
        """Floating point operations of each rank."""
        loads = [0] * self.world_size
        for owner, cost in zip(self.owners, self.costs, strict=True):
            loads[owner] += cost
        return loads

    @cached_property
    def shares(self) -> list[list[list[int]]]:
        """Of each bucket, for each rank, the matrices that it owns."""
        return [
            [[n for n in bucket if self.owners[n] == rank] for rank in range(self.world_size)]
            for bucket in self.buckets
        ]


def make_plan(
    matrices: Sequence[Matrix],
    costs: Sequence[int],
    world_size: int,
    *,
    sharded: bool,
    bucket_elements: int,
) -> Plan:
    """Choose owners and buckets.

    A matrix that lies on one rank as it is stays there, as whole experts do, unless that rank would
    then compute for longer than the others; the rest is shared out so that all ranks compute for
    about as long.

    Args:
        matrices: all matrices.
        costs: floating point operations of each.
        world_size: number of ranks.
        sharded: the ranks hold rows of the parameters; otherwise whole ones.
        bucket_elements: how many elements of a bucket a rank may own, about.
    """
    holders = [matrix.holder() if sharded else None for matrix in matrices]
    chosen, loads = _staying(holders, costs, world_size)
    free = [n for n in range(len(matrices)) if n not in chosen]
    shared = balance([costs[n] for n in free], world_size, loads)
    chosen |= zip(free, shared, strict=True)
    owners = tuple(chosen[n] for n in range(len(matrices)))
    buckets = _buckets(matrices, costs, owners, world_size, bucket_elements)
    return Plan(tuple(matrices), tuple(costs), owners, buckets, world_size)


def _staying(
    holders: Sequence[int | None], costs: Sequence[int], world_size: int
) -> tuple[dict[int, int], list[int]]:
    """The matrices that stay on the ranks that hold them, and the load of each rank by them."""
    most = max(_UNEVENNESS * sum(costs) / world_size, max(costs, default=0))
    loads = [0] * world_size
    staying = {}
    for n, (holder, cost) in enumerate(zip(holders, costs, strict=True)):
        if holder is not None and loads[holder] + cost <= most:
            loads[holder] += cost
            staying[n] = holder
    return staying, loads


def _buckets(
    matrices: Sequence[Matrix],
    costs: Sequence[int],
    owners: Sequence[int],
    world_size: int,
    bucket_elements: int,
) -> tuple[tuple[int, ...], ...]:
    elements = sum(matrix.rows * matrix.columns for matrix in matrices)
    owned = [[n for n, owner in enumerate(owners) if owner == r] for r in range(world_size)]
    count = max(
        ceil(elements / world_size / bucket_elements),
        min(_FEWEST_BUCKETS, max(map(len, owned))),
    )
    buckets: list[list[int]] = [[] for _ in range(count)]
    for own in owned:
        for n, bucket in zip(own, balance([costs[n] for n in own], count), strict=True):
            buckets[bucket].append(n)
    return tuple(tuple(sorted(bucket)) for bucket in buckets if bucket) or ((),)
