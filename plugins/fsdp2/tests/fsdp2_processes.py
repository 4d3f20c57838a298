"""Scenarios of sharding, gradients, replicas and checkpoints; each runs on every rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp2_model import (
    AVERAGES,
    FSDP2,
    SUMS,
    Net,
    Reductions,
    assert_gradients,
    assert_gradients_are_near,
    averaged_gradients,
    data,
    loss,
    reference,
    shard,
)
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from core_plugin.errors import ConfigError
from core_plugin.types.distributed import ShardContext


def every_parameter_is_sharded(rank: int) -> None:
    model = shard(reference())
    total = held = 0
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        whole = dict(reference().named_parameters())[name]
        assert torch.equal(parameter.full_tensor(), whole)
        total, held = total + whole.numel(), held + parameter.to_local().numel()
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, held)
    assert sum(counts) == total
    assert max(counts) < total
    assert model.head.weight is model.embedding.weight


def gradients_are_averaged(rank: int) -> None:
    model = shard(reference())
    with FSDP2.gradient_sync(model, True):
        loss(model, *data(rank)).backward()
    assert_gradients(model, averaged_gradients())
    assert all(block.whole for block in model.blocks)


def gradients_are_kept_until_asked_for(rank: int) -> None:
    model = shard(reference())
    for last in (False, False, True):
        with FSDP2.gradient_sync(model, last):
            loss(model, *data(rank)).backward()
    assert_gradients(model, {n: 3 * g for n, g in averaged_gradients().items()})


def blocks_are_freed_after_forward_or_kept(rank: int) -> None:
    for reshard in (True, False):
        model = shard(reference(), reshard_after_forward=reshard)
        loss(model, *data(rank))
        assert isinstance(model.blocks[0].up.weight, DTensor) == reshard


def bf16_is_computed_in_and_float32_comes_out(rank: int) -> None:
    model = shard(reference(), torch.bfloat16)
    ids, labels = data(rank)
    assert model(ids).dtype == torch.float32
    assert [b.dtype for b in model.blocks] == [torch.bfloat16] * 2
    loss(model, ids, labels).backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_gradients_are_near(model)


def with_up_in(dtype: torch.dtype) -> Net:
    """The reference with one layer in another dtype than the rest."""
    model = reference()
    model.blocks[1].up.to(dtype)
    model.blocks[1].up.register_forward_pre_hook(lambda m, a: (a[0].to(dtype),))
    model.blocks[1].up.register_forward_hook(lambda m, a, out: out.float())
    return model


def trained_parameters_of_two_dtypes(rank: int) -> None:
    model = shard(with_up_in(torch.bfloat16))
    loss(model, *data(rank)).backward()
    assert model.blocks[1].up.weight.grad.dtype == torch.bfloat16
    assert model.blocks[1].down.weight.grad.dtype == torch.float32


def frozen_parameters_are_sharded_too(rank: int) -> None:
    model = reference()
    model.requires_grad_(False)
    model.blocks[0].up.requires_grad_(True)
    model = shard(model)
    loss(model, *data(rank)).backward()
    expected = averaged_gradients()["blocks.0.up.weight"]
    torch.testing.assert_close(model.blocks[0].up.weight.grad.full_tensor(), expected)
    assert model.blocks[0].down.weight.grad is None
    assert all(isinstance(p, DTensor) for p in model.parameters())


def the_norm_is_that_of_the_whole(rank: int) -> None:
    assert_norm(shard(reference()), rank)


def the_norm_of_replicas_is_that_of_the_whole(rank: int) -> None:
    assert_norm(shard(reference(), replicas=2), rank)


def assert_norm(model: nn.Module, rank: int) -> None:
    loss(model, *data(rank)).backward()
    expected = torch.linalg.vector_norm(
        torch.cat([g.flatten() for g in averaged_gradients().values()])
    )
    norm = FSDP2.clip_grad_norm(model, 0.01)
    torch.testing.assert_close(norm, expected)
    clipped = {n: g * 0.01 / expected for n, g in averaged_gradients().items()}
    assert_gradients(model, clipped)
    torch.testing.assert_close(FSDP2.clip_grad_norm(model, None), torch.tensor(0.01))


def no_blocks_are_an_error(rank: int) -> None:
    model = reference()
    context = ShardContext(torch.device("cpu"), None, lambda part: None, [], torch.float32)
    with pytest.raises(ConfigError, match=r"Net names no blocks.*Candidates: .*Block \(2\)"):
        FSDP2.shard_model(model, FSDP2.Params(), context)


MODES = [
    (AVERAGES, "auto", "AVG"),
    (AVERAGES, True, "AVG"),
    (AVERAGES, False, "SUM"),
    (SUMS, "auto", "SUM"),
    (SUMS, False, "SUM"),
]
"""What the device can do, what is asked of it, and what the collectives then do."""


def each_mode_reduces_as_it_says_and_gradients_are_equal(rank: int) -> None:
    for device, wanted, operation in MODES:
        model = shard(reference(), device=device, average_in_collective=wanted)
        for _ in range(2):
            model.zero_grad()
            with Reductions() as reductions:
                loss(model, *data(rank)).backward()
            # one for each block, and one for the root
            assert reductions.seen == [("_reduce_scatter_base_", operation)] * 3, reductions.seen
            assert_gradients(model, averaged_gradients())


def each_mode_reduces_bf16_as_it_says(rank: int) -> None:
    for reduce_dtype in ("float32", "bfloat16"):
        for device, wanted, operation in MODES:
            model = shard(
                reference(),
                torch.bfloat16,
                device,
                reduce_dtype=reduce_dtype,
                average_in_collective=wanted,
            )
            with Reductions() as reductions:
                loss(model, *data(rank)).backward()
            assert reductions.seen == [("_reduce_scatter_base_", operation)] * 3, reductions.seen
            assert_gradients_are_near(model)


def one_rank_needs_no_collective(rank: int) -> None:
    for device, wanted, _ in MODES:
        model = shard(reference(), device=device, average_in_collective=wanted)
        with Reductions() as reductions:
            loss(model, *data(rank)).backward()
        assert reductions.seen == []
        assert_gradients(model, averaged_gradients())


def half_precision_gradients_are_always_summed(rank: int) -> None:
    for device, wanted, operation in MODES:
        model = with_up_in(torch.float16)
        model = shard(model, device=device, average_in_collective=wanted)
        with Reductions() as reductions:
            loss(model, *data(rank)).backward()
        assert sorted(op for _, op in reductions.seen) == sorted([*[operation] * 3, "SUM"])
        expected = averaged_gradients()["blocks.1.up.weight"]
        actual = model.blocks[1].up.weight.grad.full_tensor().float()
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-2)


def an_average_that_the_device_does_not_declare_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="average_in_collective is true, but the device 'cpu'"):
        shard(reference(), device=SUMS, average_in_collective=True)


def replicas_are_averaged_over_both_dimensions(rank: int) -> None:
    for device, wanted, operation in MODES:
        model = shard(reference(), device=device, average_in_collective=wanted, replicas=2)
        for last in (False, True):
            with FSDP2.gradient_sync(model, last), Reductions() as reductions:
                loss(model, *data(rank)).backward()
            each = [("_reduce_scatter_base_", operation), ("allreduce_", operation)]
            assert reductions.seen == (each * 3 if last else []), reductions.seen
        assert_gradients(model, {n: 2 * g for n, g in averaged_gradients().items()})


def replicas_are_copies_each_sharded_over_its_part(rank: int) -> None:
    model = shard(reference(), replicas=3)
    whole = dict(reference().named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.device_mesh.shape == (3, 2)
        assert parameter.device_mesh.mesh_dim_names == ("replicate", "shard")
        assert parameter.device_mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5]]
        assert parameter.placements == (Replicate(), Shard(0))
        assert torch.equal(parameter.full_tensor(), whole[name])
    held = torch.tensor(sum(p.to_local().numel() for p in model.parameters()))
    dist.all_reduce(held)
    assert held == 3 * sum(p.numel() for p in whole.values())
    tensors = FSDP2.full_state_dict(model, trainable=False)
    assert tensors.keys() == (whole.keys() if rank == 0 else set())
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())


def replicas_that_do_not_fit_are_refused(rank: int) -> None:
    assert FSDP2.create_mesh(FSDP2.Params(), "cpu", dist.get_world_size()).ndim == 1
    for replicas in (2, 3, 4, 6):
        with pytest.raises(ConfigError, match=f"replicas is {replicas}, but 3 ranks"):
            FSDP2.create_mesh(FSDP2.Params(replicas=replicas), "cpu", dist.get_world_size())


# A run of hybrid, plain and again hybrid sharding, each going on from the one before.


def hybrid_begins(rank: int, directory: str) -> None:
    model, optimizer = begun(0, replicas=2)
    train(model, optimizer, 2)
    assert_trained(model, 2)
    write(model, optimizer, rank, Path(directory) / "hybrid")


def plain_goes_on(rank: int, directory: str) -> None:
    model, optimizer = begun(1)
    read(model, optimizer, Path(directory) / "hybrid")
    assert_trained(model, 2)
    train(model, optimizer, 1)
    assert_trained(model, 3)
    write(model, optimizer, rank, Path(directory) / "plain")


def hybrid_goes_on(rank: int, directory: str) -> None:
    model, optimizer = begun(2, replicas=2)
    read(model, optimizer, Path(directory) / "plain")
    assert_trained(model, 3)
    train(model, optimizer, 1)
    assert_trained(model, 4)


def begun(seed: int, **params: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shard(reference(seed), **params)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """On four batches a step, over any number of ranks."""
    batches = range(dist.get_rank(), 4, dist.get_world_size())
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([loss(model, *data(batch)) for batch in batches]).mean().backward()
        optimizer.step()


def assert_trained(model: nn.Module, steps: int) -> None:
    """The model is as one process would have trained it from seed 0."""
    whole = reference()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([loss(whole, *data(batch)) for batch in range(4)]).mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), whole.get_parameter(name))


def write(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, directory: Path) -> None:
    if rank == 0:
        directory.mkdir()
    dist.barrier()
    FSDP2.save_checkpoint(model, optimizer, directory, include_frozen=True)


def read(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    FSDP2.load_checkpoint(model, optimizer, directory, include_frozen=True)
