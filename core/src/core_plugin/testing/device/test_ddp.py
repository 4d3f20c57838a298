"""DistributedDataParallel: two ranks with half the batch each do what one does with the whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from core_plugin.testing.device.models import (
    RANKS,
    Trained,
    assert_close,
    assert_trained_alike,
    batch,
    gradients,
    loss,
    network,
    parameters,
    reference,
    train,
    whole_gradients,
)

pytestmark = [pytest.mark.level(2), pytest.mark.ranks(RANKS)]

Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]
SMALL_BUCKETS = {"bucket_cap_mb": 1e-4}


def _parallel(model: nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """The model on the device, in parallel on all ranks."""
    devices = None if device.type == "cpu" else [device]
    return DistributedDataParallel(model.to(device), device_ids=devices, **options)


def _trained(device: torch.device, rank: int, hook: Hook | None = None, **options: Any) -> Trained:
    model = _parallel(network(), device, **options)
    if hook:
        model.register_comm_hook(None, hook)
    return train(model, batch(rank), device)


@pytest.mark.parametrize(
    "options",
    [{}, SMALL_BUCKETS, {"gradient_as_bucket_view": True}],
    ids=["default", "small_buckets", "gradient_as_bucket_view"],
)
def test_training_is_that_of_one_process(
    device: torch.device, rank: int, options: dict[str, Any]
) -> None:
    """Three steps of AdamW give the norms, gradients and parameters of one process."""
    assert_trained_alike(_trained(device, rank, **options), reference())


@pytest.mark.requires("pinned_memory")
def test_training_a_static_graph(device: torch.device, rank: int) -> None:
    """With ``static_graph`` the results are those of one process too."""
    assert_trained_alike(_trained(device, rank, static_graph=True), reference())


def test_gradients_can_be_the_buckets_memory(device: torch.device, rank: int) -> None:
    """With ``gradient_as_bucket_view`` gradients share the memory of their bucket."""
    model = _parallel(network(), device, gradient_as_bucket_view=True)
    loss(model, batch(rank), device).backward()
    storages = {
        p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None
    }
    assert len(storages) == 1, f"there is one bucket, but gradients are in {len(storages)} memories"
    assert_close(gradients(model), whole_gradients())


def test_a_hook_that_sums_and_divides(device: torch.device, rank: int) -> None:
    """A communication hook that waits for the sum by its future gives the default's results."""
    assert_trained_alike(_trained(device, rank, _sum_and_divide), reference())


@pytest.mark.requires("average_in_collectives")
def test_a_hook_that_averages(device: torch.device, rank: int) -> None:
    """A communication hook that averages in the collective gives the default's results."""
    assert_trained_alike(_trained(device, rank, _average), reference())


# torch compares these annotations with the classes themselves.
def _sum_and_divide(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / RANKS)  # type: ignore[no-any-return]


def _average(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("view", [False, True], ids=["own_memory", "bucket_view"])
def test_gradients_wait_for_the_last_micro_batch(
    device: torch.device, rank: int, view: bool
) -> None:
    """Under ``no_sync`` gradients stay each rank's own; the next backward averages the sum."""
    model = _parallel(network(), device, gradient_as_bucket_view=view)
    with model.no_sync():
        loss(model, batch(rank), device).backward()
    own = gradients(model)
    loss(model, batch(rank), device).backward()
    assert_close(own, _own_gradients(rank))
    assert_close(gradients(model), {n: 2 * g for n, g in whole_gradients().items()})


def _own_gradients(rank: int) -> dict[str, Tensor]:
    """Those of a rank's share, on the CPU."""
    model = network()
    loss(model, batch(rank), torch.device("cpu")).backward()
    return gradients(model)


@pytest.mark.requires("pinned_memory")
def test_parameters_that_one_rank_does_not_use(device: torch.device, rank: int) -> None:
    """With ``find_unused_parameters`` a rank that skips a block counts as a gradient of zero."""
    model = _parallel(network(), device, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        loss(model, batch(rank), device, depth=2 - rank).backward()
    alone, cpu = network(), torch.device("cpu")
    losses = [loss(alone, batch(r), cpu, depth=2 - r) for r in range(RANKS)]
    torch.stack(losses).mean().backward()
    assert_close(gradients(model), gradients(alone))


def test_all_ranks_start_from_the_first_ones_parameters(device: torch.device, rank: int) -> None:
    """Wrapping a model gives every rank the parameters of rank 0."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    assert_close(parameters(_parallel(model, device)), parameters(network()))


def test_buffers_are_the_first_ones(device: torch.device, rank: int) -> None:
    """A forward pass gives every rank the buffers of rank 0."""
    norm = nn.BatchNorm1d(3)
    model = _parallel(norm, device)
    with torch.no_grad():
        norm.running_mean.fill_(rank + 1)  # type: ignore[union-attr]
        norm.num_batches_tracked.fill_(rank + 5)  # type: ignore[union-attr]
    model.eval()
    result = model(torch.ones(2, 3, device=device))
    assert norm.num_batches_tracked.tolist() == 5  # type: ignore[union-attr]
    torch.testing.assert_close(result.detach().cpu(), torch.zeros(2, 3))
