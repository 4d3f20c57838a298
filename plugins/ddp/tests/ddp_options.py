"""Scenarios: whatever the options, steps are those of one process, in float64."""

import itertools

import pytest
import torch
import torch.distributed as dist
from ddp_models import DDP, Net, data, reference, shard
from torch import nn
from torch.utils.checkpoint import checkpoint

from core_plugin.errors import TrainingError

STEPS = 4
OPTIONS = [
    {"gradient_as_bucket_view": view, "bucket_cap_mb": megabytes, **graph}
    for view, megabytes, graph in itertools.product(
        (True, False),
        (25.0, 1e-5),
        ({}, {"static_graph": True}, {"find_unused_parameters": True}),
    )
]


def uses(step: int, micro_batch: int) -> bool:
    """Whether a micro-batch uses all parameters: in steps by turns, and not in the last."""
    return step % 2 == 0 and micro_batch == 0


def inputs(rank: int, step: int, micro_batch: int) -> torch.Tensor:
    return data(rank + 10 * step + 1000 * micro_batch).double()


def loss(model: nn.Module, *, rank: int, step: int, micro_batch: int, everything: bool):
    return model(inputs(rank, step, micro_batch), everything).square().mean()


def one_process(micro_batches: int, pattern) -> Net:
    """The weights after plain steps on the mean of all losses."""
    model = reference().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_batch, rank in itertools.product(
            range(micro_batches), range(dist.get_world_size())
        ):
            place = {"rank": rank, "step": step, "micro_batch": micro_batch}
            everything = pattern(step, micro_batch)
            (loss(model, **place, everything=everything) / dist.get_world_size()).backward()
        optimizer.step()
    return model


def assert_steps_of_one_process(rank: int, micro_batches: int, pattern, **options) -> None:
    model = shard(reference().double(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            with DDP.gradient_sync(model, micro_batch == micro_batches - 1):
                place = {"rank": rank, "step": step, "micro_batch": micro_batch}
                loss(model, **place, everything=pattern(step, micro_batch)).backward()
        optimizer.step()
    expected = one_process(micro_batches, pattern).state_dict()
    for name, value in DDP.unwrap_model(model).state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)


def steps_are_those_of_one_process(rank: int) -> None:
    for options in OPTIONS:
        # Where torch looks for unused parameters, it warns if there are none.
        everything = not options.get("find_unused_parameters")
        micro_batches = (1,) if options.get("static_graph") else (1, 3)
        for number in micro_batches:
            assert_steps_of_one_process(rank, number, lambda *place: everything, **options)  # noqa: B023


def parameters_that_some_micro_batches_use_are_exchanged(rank: int) -> None:
    for options in OPTIONS:
        if options.get("find_unused_parameters"):
            assert_steps_of_one_process(rank, 3, uses, **options)


def a_static_graph_finds_unused_parameters_once(rank: int) -> None:
    for options in OPTIONS:
        if options.get("static_graph"):
            assert_steps_of_one_process(rank, 1, lambda *place: False, **options)


def gradients_live_in_the_buckets_if_asked_to(rank: int) -> None:
    for view in (True, False):
        model = shard(reference(), gradient_as_bucket_view=view)
        for _ in range(2):
            model.zero_grad()
            with DDP.gradient_sync(model, True):
                model(data(rank)).square().mean().backward()
        places = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        assert (len(places) == 1) == view


def step(model: nn.Module, rank: int, last: bool = True, everything: bool = True) -> None:
    with DDP.gradient_sync(model, last):
        model(data(rank), everything).square().mean().backward()


def fault_of(model: nn.Module, rank: int, **arguments: bool) -> str:
    with pytest.raises(TrainingError) as caught:
        step(model, rank, **arguments)
    return str(caught.value)


def unused_parameters_are_named_at_once(rank: int) -> None:
    for options in ({}, {"bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": False}):
        fault = fault_of(shard(reference(), **options), rank, everything=False)
        assert f"rank {rank}" in fault
        assert "\n  sometimes.weight\n  sometimes.bias\n" in fault
        assert "used." not in fault
        assert "find_unused_parameters to true" in fault
        assert "freeze" in fault


def frozen_parameters_count_for_nothing_in_the_names(rank: int) -> None:
    model = reference()
    model.used[0].requires_grad_(False)
    model.sometimes.bias.requires_grad_(False)
    fault = fault_of(shard(model), rank, everything=False)
    assert "exchanged:\n  sometimes.weight\n" in fault
    assert "bias" not in fault


def only_the_last_micro_batch_exchanges_and_is_looked_at(rank: int) -> None:
    model = shard(reference())
    step(model, rank, last=False, everything=False)
    step(model, rank)
    step(model, rank, last=False)
    assert "sometimes.weight" in fault_of(model, rank, everything=False)


def later_steps_are_looked_at_as_well(rank: int) -> None:
    model = shard(reference())
    for _ in range(3):
        step(model, rank)
    assert "sometimes.weight" in fault_of(model, rank, everything=False)


def a_graph_that_is_not_static_is_told(rank: int) -> None:
    for first in (True, False):
        model = shard(reference(), static_graph=True)
        for _ in range(2):
            model.zero_grad()
            step(model, rank, everything=first)
        fault = fault_of(model, rank, everything=not first)
        assert "leave static_graph out" in fault
        assert ("sometimes.weight" in fault) == first


class Reentrant(nn.Module):
    """A layer that is used twice, each time in a checkpoint that runs a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = nn.Linear(3, 3)

    def forward(self, x, everything):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.again, x, use_reentrant=True)
        return x


def a_parameter_with_two_gradients_is_named(rank: int) -> None:
    assert "again.bias gets its gradient more than once" in fault_of(shard(Reentrant()), rank)
    model = shard(Reentrant(), static_graph=True)
    for _ in range(2):
        step(model, rank)


def other_errors_stay_as_they_are(rank: int) -> None:
    model = shard(reference())
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match=r"^mine$"), DDP.gradient_sync(model, True):
            raise error("mine")


def a_parameter_unused_on_one_rank_ends_both(rank: int) -> None:
    """The rank that lacks it says so; the other one notices when that process is gone."""
    model = shard(reference())
    if rank == 1:
        fault = fault_of(model, rank, everything=False)
        assert "rank 1" in fault
        assert "sometimes.weight" in fault
    else:
        with pytest.raises(RuntimeError, match=r"gloo|Connection"):
            step(model, rank)
