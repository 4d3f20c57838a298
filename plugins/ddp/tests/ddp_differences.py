"""Scenarios: ranks whose models differ say so together, before anything is exchanged."""

import pytest
import torch
import torch.distributed as dist
from ddp_models import reference, shard
from torch import nn

from core_plugin.errors import RankMismatchError


def fault(model: nn.Module) -> str:
    asked = []
    with pytest.raises(RankMismatchError) as caught:
        shard(model, asked.append)
    assert asked == []
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    return texts[0]


def parameters_by_rank(rank: int) -> None:
    model = reference()
    if rank == 1:
        model.extra = nn.Linear(2, 2, bias=False)
        model.sometimes = nn.Linear(3, 4)
        model.used[0].weight.requires_grad_(False)
        model.used[0].bias.data = model.used[0].bias.data.half()
    told = fault(model)
    assert "extra.weight: (not there) (rank 0); float32 [2, 2], trained (rank 1)" in told
    assert "sometimes.weight: float32 [2, 3], trained (rank 0); float32 [4, 3], trained" in told
    assert "used.0.weight: float32 [5, 3], trained (rank 0); float32 [5, 3], frozen" in told
    assert "used.0.bias: float32 [5], trained (rank 0); float16 [5], trained (rank 1)" in told
    assert "used.2" not in told


def buffers_by_rank(rank: int) -> None:
    model = reference()
    model.register_buffer("counter", torch.zeros(2 + rank))
    assert "counter: float32 [2], a buffer (rank 0); float32 [3], a buffer" in fault(model)


def the_order_by_rank(rank: int) -> None:
    model = reference()
    if rank == 1:
        model._modules = dict(reversed(model._modules.items()))
    assert "another order: used.0.weight (rank 0); sometimes.weight (rank 1)" in fault(model)


def many_differences_by_rank(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1 + rank, bias=False) for _ in range(30)))
    told = fault(model)
    assert "19.weight" in told
    assert "20.weight" not in told
    assert "... and 10 more" in told


def what_is_trained_on_one_rank_alone(rank: int) -> None:
    model = reference().requires_grad_(rank == 0)
    assert "trained (rank 0); float32 [5, 3], frozen (rank 1, 2)" in fault(model)


def equal_models_on_meta(rank: int) -> None:
    model = reference().to("meta")
    shard(model, lambda part: part.to_empty(device="cpu"))
