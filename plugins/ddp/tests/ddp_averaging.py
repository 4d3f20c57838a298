"""Scenarios: gradients are averaged, in the collective or after it."""

import pytest
import torch
from ddp_models import (
    AVERAGES,
    DDP,
    SUMS,
    Net,
    Reductions,
    assert_gradients,
    averaged_gradients,
    data,
    reference,
    shard,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from core_plugin.errors import ConfigError

MODES = [
    (AVERAGES, "auto", "AVG"),
    (AVERAGES, True, "AVG"),
    (AVERAGES, False, "SUM"),
    (SUMS, "auto", "SUM"),
    (SUMS, False, "SUM"),
]
"""What the device can do, what is asked of it, and what the all-reduces then do."""


def gradients_are_averaged(rank: int) -> None:
    for options in ({}, {"bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": False}):
        model = shard(reference(), **options)
        assert isinstance(model, DistributedDataParallel)
        with DDP.gradient_sync(model, True):
            model(data(rank)).square().mean().backward()
        assert_gradients(model, averaged_gradients())


def gradients_are_kept_until_asked_for(rank: int) -> None:
    model = shard(reference())
    for last in (False, True):
        with DDP.gradient_sync(model, last):
            model(data(rank)).square().mean().backward()
        if not last:
            own = reference()
            own(data(rank)).square().mean().backward()
            assert_gradients(model, {n: p.grad for n, p in own.named_parameters()})
    assert_gradients(model, {n: 2 * g for n, g in averaged_gradients().items()})


def unused_parameters_are_found_if_asked_to(rank: int) -> None:
    model = shard(reference(), find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        model(data(rank), False).square().mean().backward()
        assert_gradients(model, averaged_gradients(everything=False))


def each_mode_reduces_as_it_says_and_gradients_are_equal(rank: int) -> None:
    options = (
        {},
        {"bucket_cap_mb": 1e-5},
        {"gradient_as_bucket_view": False},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "bucket_cap_mb": 1e-5},
    )
    for device, wanted, operation in MODES:
        for others in options:
            everything = "find_unused_parameters" not in others
            model = shard(reference(), device=device, average_in_collective=wanted, **others)
            for _ in range(3):  # the buckets are made anew after the first time
                model.zero_grad()
                with Reductions() as reductions:
                    model(data(rank), everything).square().mean().backward()
                assert set(reductions.seen) == {operation}, (wanted, others, reductions.seen)
                assert_gradients(model, averaged_gradients(everything))
            many = "bucket_cap_mb" in others
            assert (len(reductions.seen) > 1) == many, (wanted, others, reductions.seen)


def each_mode_keeps_gradients_until_asked_for(rank: int) -> None:
    for device, wanted, operation in MODES:
        model = shard(reference(), device=device, average_in_collective=wanted)
        for last in (False, False, True):
            with DDP.gradient_sync(model, last), Reductions() as reductions:
                model(data(rank)).square().mean().backward()
            assert reductions.seen == ([operation] if last else [])
        assert_gradients(model, {n: 3 * g for n, g in averaged_gradients().items()})


def one_rank_is_not_averaged_in_the_collective(rank: int) -> None:
    for device, wanted, _ in MODES:
        model = shard(reference(), device=device, average_in_collective=wanted)
        with Reductions() as reductions:
            model(data(rank)).square().mean().backward()
        assert "AVG" not in reductions.seen
        assert_gradients(model, averaged_gradients())


def half_precision_gradients_do_not_overflow(rank: int) -> None:
    for device, wanted, _ in MODES:
        model = nn.Linear(2, 1, bias=False, dtype=torch.float16)
        sharded = shard(model, device=device, average_in_collective=wanted)
        with Reductions() as reductions:
            sharded(torch.full((1, 2), 40000.0, dtype=torch.float16)).backward()
        assert reductions.seen == ["SUM"]
        torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight, 40000.0))


def an_average_that_the_device_does_not_declare_is_refused(rank: int) -> None:
    asked = []
    with pytest.raises(ConfigError, match="average_in_collective is true, but the device 'cpu'"):
        shard(reference(), asked.append, device=SUMS, average_in_collective=True)
    assert asked == []


def the_norm_is_that_of_the_averaged_gradients(rank: int) -> None:
    model = shard(reference())
    model(data(rank)).square().mean().backward()
    whole = torch.cat([g.flatten() for g in averaged_gradients().values()])
    norm = DDP.clip_grad_norm(model, 0.01)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(whole))
    torch.testing.assert_close(DDP.clip_grad_norm(model, None), torch.tensor(0.01))


def the_model_is_materialized_before_it_is_wrapped(rank: int) -> None:
    with torch.device("meta"):
        model = Net()
    asked = []

    def materialize(part: nn.Module) -> None:
        asked.append(part)
        part.to_empty(device="cpu").load_state_dict(reference().state_dict())

    wrapped = shard(model, materialize)
    assert asked == [model]
    assert DDP.unwrap_model(wrapped) is model


def a_model_that_trains_nothing_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="no parameter of the model is trained"):
        shard(reference().requires_grad_(False))
