"""How parameters become matrices, and who computes which."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_plugin_muon.matrices import Matrix, matrices_of, rows_of
from core_plugin_muon.plan import balance, make_plan

SIZES = st.integers(0, 9)
COSTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=40)


@st.composite
def parameters(draw: st.DrawFn) -> tuple[tuple[int, ...], bool, tuple[int, ...]]:
    """A shape, whether it is flattened, and how its matrices are split."""
    shape = tuple(draw(st.lists(SIZES, min_size=2, max_size=4)))
    flatten = draw(st.booleans())
    rows = shape[0] if flatten else shape[-2]
    cuts = draw(st.lists(st.integers(1, max(rows - 1, 1)), max_size=2, unique=True))
    bounds = [0, *sorted(cuts), rows] if rows > 1 and cuts else []
    return shape, flatten, tuple(b - a for a, b in pairwise(bounds))


def matrices_by_torch(
    tensor: torch.Tensor, flatten: bool, split: tuple[int, ...]
) -> list[torch.Tensor]:
    if not tensor.numel():
        return []
    whole = [tensor.flatten(1)] if flatten else list(tensor.reshape(-1, *tensor.shape[-2:]))
    return [part for matrix in whole for part in matrix.split(split or (len(matrix),))]


@given(parameters())
def test_matrices_are_those_that_torch_cuts(parameter) -> None:
    shape, flatten, split = parameter
    tensor = torch.arange(prod(shape)).view(shape)
    ours = [
        rows_of(tensor, matrix.start, matrix.rows, flatten).flatten(1)
        for matrix in matrices_of(0, shape, flatten, split)
        if matrix.rows * matrix.columns
    ]
    assert [m.tolist() for m in ours] == [
        m.tolist() for m in matrices_by_torch(tensor, flatten, split)
    ]


@given(parameters(), st.integers(1, 7))
def test_the_rows_on_a_rank_are_those_of_torch_chunk(parameter, ranks: int) -> None:
    shape, flatten, split = parameter
    tensor = torch.arange(prod(shape)).view(shape)
    shards = [*tensor.chunk(ranks), *[tensor[:0]] * ranks][:ranks]
    for matrix in matrices_of(0, shape, flatten, split, ranks):
        if not matrix.rows * matrix.columns:
            continue
        rows = []
        for rank, shard in enumerate(shards):
            span = matrix.on_rank(rank)
            if span:
                local = matrix.start + span.start - rank * matrix.chunk
                rows += rows_of(shard, local, len(span), flatten).flatten(1).tolist()
        assert rows == rows_of(tensor, matrix.start, matrix.rows, flatten).flatten(1).tolist()
        whole = [rank for rank in range(ranks) if len(matrix.on_rank(rank)) == matrix.rows]
        assert [matrix.holder()] == (whole or [None])


def test_rows_are_a_view_in_any_memory_format() -> None:
    images = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    stack = torch.zeros(3, 5, 4).transpose(1, 2)
    rows_of(images, 1, 2, flatten=True).fill_(1)
    rows_of(stack, 5, 3, flatten=False).fill_(1)
    assert images.flatten(1).sum(1).tolist() == [0, 12, 12, 0]
    assert stack.sum(2).tolist() == [[0] * 4, [0, 5, 5, 5], [0] * 4]


@pytest.mark.parametrize(
    ("shape", "flatten", "split", "fault"),
    [
        ((4,), None, (), "fewer than two dimensions"),
        ((), True, (), "fewer than two dimensions"),
        ((4, 3, 2), None, (), "needs flatten=True"),
        ((6, 3), None, (2, 3), r"split is \(2, 3\), 5 rows in all, of 6"),
        ((5, 6, 3), False, (5, 2), r"split is \(5, 2\), 7 rows in all, of 6"),
        ((5, 6, 3), True, (2, 2), r"split is \(2, 2\), 4 rows in all, of 5"),
    ],
)
def test_what_has_no_matrices_is_refused(shape, flatten, split, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        matrices_of(0, shape, flatten, split)


@given(COSTS, st.integers(1, 16))
def test_the_busiest_is_within_the_bound_of_longest_first(costs: list[int], bins: int) -> None:
    loads = [0] * bins
    for cost, chosen in zip(costs, balance(costs, bins), strict=True):
        loads[chosen] += cost
    assert max(loads) <= sum(costs) / bins + max(costs) * (1 - 1 / bins) + 1


@given(COSTS, st.integers(1, 8), st.integers(1, 300), st.booleans())
def test_a_plan_has_each_matrix_once_and_gives_each_bucket_a_like_share(
    costs: list[int], ranks: int, bucket_elements: int, sharded: bool
) -> None:
    matrices = [
        matrix
        for number, cost in enumerate(costs)
        for matrix in matrices_of(number, (cost % 7 + 1, 5), None, (), ranks if sharded else 1)
    ]
    plan = make_plan(matrices, costs, ranks, sharded=sharded, bucket_elements=bucket_elements)
    assert sorted(n for bucket in plan.buckets for n in bucket) == list(range(len(costs)))
    assert sum(plan.loads) == sum(costs)
    for owner in range(ranks):
        works = [sum(costs[n] for n in share[owner]) for share in plan.shares]
        assert max(works) - min(works) <= max(costs)
    for matrix, owner in zip(matrices, plan.owners, strict=True):
        if sharded and matrix.holder() not in (None, owner):
            held = [
                c for m, c in zip(matrices, costs, strict=True) if m.holder() == matrix.holder()
            ]
            assert sum(held) > 1.1 * sum(costs) / ranks, "what lies on a rank stays there"
    assert max(plan.loads) <= max(1.1 * sum(costs) / ranks, sum(costs) / ranks + max(costs))


@pytest.mark.parametrize(("ranks", "layers", "busiest"), [(64, 24, 3), (8, 3, 3), (4, 3, 6)])
def test_experts_leave_ranks_that_hold_more_than_their_share(
    ranks: int, layers: int, busiest: int
) -> None:
    """Eight in a layer: on 64 ranks, 8 hold them all."""
    shape = 8, 16, 16
    matrices = [m for n in range(layers) for m in matrices_of(n, shape, False, (), ranks)]
    plan = make_plan(matrices, [1] * len(matrices), ranks, sharded=True, bucket_elements=10**6)
    assert plan.loads == [busiest] * ranks
    stay = [owner == m.holder() for m, owner in zip(matrices, plan.owners, strict=True)]
    assert sum(stay) >= min(ranks, 8) * busiest


@pytest.mark.parametrize("ranks", [1, 3])
def test_equal_matrices_are_dealt_out_evenly(ranks: int) -> None:
    matrices = [Matrix(n, 0, 4, 4, -(-4 // ranks)) for n in range(6)]
    plan = make_plan(matrices, [1] * 6, ranks, sharded=True, bucket_elements=10**6)
    assert plan.loads == [6 // ranks] * ranks
    assert [len(bucket) for bucket in plan.buckets] == ([2, 2, 2] if ranks == 1 else [3, 3])
