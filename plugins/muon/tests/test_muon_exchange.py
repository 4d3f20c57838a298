"""The plan of who computes what."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_plugin_muon.exchange import assign_owners, flops, plan_exchange, rows_on_rank

SHAPES = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=40)


@given(rows=st.integers(1, 200), world_size=st.integers(1, 17))
def test_rows_are_those_of_torch_chunk(rows: int, world_size: int) -> None:
    chunks = [len(chunk) for chunk in torch.empty(rows, 1).chunk(world_size)]
    chunks += [0] * (world_size - len(chunks))
    assert [rows_on_rank(rows, world_size, rank) for rank in range(world_size)] == chunks


@given(shapes=SHAPES, world_size=st.integers(1, 16))
def test_the_busiest_rank_is_within_the_bound_of_longest_first(
    shapes: list[tuple[int, int]], world_size: int
) -> None:
    loads = [0] * world_size
    for shape, owner in zip(shapes, assign_owners(shapes, world_size), strict=True):
        loads[owner] += flops(shape)
    total, longest = sum(map(flops, shapes)), max(map(flops, shapes))
    assert max(loads) <= total / world_size + longest * (1 - 1 / world_size) + 1


@given(shapes=SHAPES, world_size=st.integers(1, 8))
def test_what_ranks_send_is_what_the_others_expect(
    shapes: list[tuple[int, int]], world_size: int
) -> None:
    plans = [plan_exchange(tuple(shapes), world_size, rank) for rank in range(world_size)]
    assert sorted(index for plan in plans for index in plan.owned) == list(range(len(shapes)))
    for source in plans:
        for owner in plans:
            assert source._to_owner[owner.rank] == owner._from_rank[source.rank]
    assert sum(sum(plan._to_owner) for plan in plans) == sum(r * c for r, c in shapes)


def test_tall_and_wide_cost_the_same_and_square_more_than_flat() -> None:
    assert flops((8, 32)) == flops((32, 8))
    assert flops((16, 16)) > flops((4, 64))


@pytest.mark.parametrize("world_size", [1, 3])
def test_equal_matrices_are_dealt_out_evenly(world_size: int) -> None:
    owners = assign_owners([(4, 4)] * 6, world_size)
    assert [owners.count(rank) for rank in range(world_size)] == [6 // world_size] * world_size
