"""Scenarios: gradients that are compressed when they are exchanged."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ddp_models import (
    DDP,
    Net,
    Reductions,
    assert_gradients,
    averaged_gradients,
    data,
    reference,
    shard,
)
from torch import nn

from core_plugin.errors import ConfigError
from core_plugin_ddp.plugin import PowerSGDParams

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def backward(model: nn.Module, inputs: torch.Tensor, *arguments: bool) -> None:
    with DDP.gradient_sync(model, True):
        model(inputs, *arguments).square().mean().backward()


def gradients_are_summed_in_half_precision(rank: int) -> None:
    for name, dtype in HALVES.items():
        for options in ({}, {"bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": False}):
            model = shard(reference(), compression=name, **options)
            for _ in range(3):
                model.zero_grad()
                with Reductions() as reductions:
                    backward(model, data(rank))
                assert set(reductions.seen) == {"SUM"}
                assert_gradients(model, summed_in(dtype))


def summed_in(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Each rank's own gradients, rounded, divided and added up in one process."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(dist.get_world_size()):
        model = reference()
        model(data(rank)).square().mean().backward()
        for name, parameter in model.named_parameters():
            share = parameter.grad.to(dtype).div_(dist.get_world_size())
            total[name] = total[name] + share if name in total else share
    return {name: gradient.float() for name, gradient in total.items()}


def compressed_gradients_are_near_the_exact_ones_and_accumulate(rank: int) -> None:
    for name, tolerance in {"fp16": 1e-3, "bf16": 1e-2}.items():
        model = shard(reference(), compression=name)
        for last in (False, True):
            with DDP.gradient_sync(model, last):
                model(data(rank)).square().mean().backward()
        for parameter, expected in averaged_gradients().items():
            actual = DDP.unwrap_model(model).get_parameter(parameter).grad
            assert actual.dtype == torch.float32
            torch.testing.assert_close(actual, 2 * expected, rtol=tolerance, atol=tolerance)


def compression_goes_with_unused_parameters(rank: int) -> None:
    for finds in ({"find_unused_parameters": True}, {"static_graph": True}):
        for how in (
            {"compression": "fp16"},
            {"compression": "powersgd", "powersgd": PowerSGDParams(rank=1, start_step=2)},
        ):
            model = shard(reference(), **finds, **how)
            for _ in range(4):
                model.zero_grad()
                backward(model, data(rank), False)
                inner = DDP.unwrap_model(model)
                assert inner.sometimes.weight.grad is None
                assert torch.isfinite(inner.used[0].weight.grad).all()


def one_rank_sends_nothing_that_could_be_compressed(rank: int) -> None:
    for compression in ("fp16", "bf16", "powersgd"):
        model = shard(reference(), compression=compression)
        backward(model, data(rank))
        assert_gradients(model, averaged_gradients())


def a_library_that_cannot_add_up_is_refused(rank: int) -> None:
    def refuse(tensor, *arguments, **options):
        raise RuntimeError("Invalid scalar type\nstack")

    def overflow(tensor, *arguments, **options):
        tensor.fill_(torch.inf)

    for stub, fault in ((refuse, "Invalid scalar type"), (overflow, "is inf")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", stub)
            with pytest.raises(ConfigError, match=f"compression is bf16.*gloo.*{fault}"):
                shard(reference(), compression="bf16")


# PowerSGD


class Wide(nn.Module):
    """Matrices of two shapes that are worth approximating, and vectors that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 24)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wide() -> Wide:
    torch.manual_seed(0)
    return Wide().double()


def power_sgd(rank: int, start_step: int, model: nn.Module | None = None, **options) -> nn.Module:
    settings = PowerSGDParams(rank=rank, start_step=start_step)
    return shard(model or wide(), compression="powersgd", powersgd=settings, **options)


def samples(rank: int, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(number, 16, generator=generator, dtype=torch.float64)


def exchanged(model: nn.Module, rank: int, step: int, number: int = 4) -> dict[str, torch.Tensor]:
    model.zero_grad()
    backward(model, samples(rank, step, number))
    return {n: p.grad.clone() for n, p in DDP.unwrap_model(model).named_parameters()}


def exact(step: int, number: int = 4) -> dict[str, torch.Tensor]:
    model = wide()
    for rank in range(dist.get_world_size()):
        loss = model(samples(rank, step, number)).square().mean()
        (loss / dist.get_world_size()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(actual, expected, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=tolerance, atol=tolerance)


def steps_before_the_start_are_exact(rank: int) -> None:
    model = power_sgd(1, 3)
    for step in range(3):
        assert_same(exchanged(model, rank, step), exact(step), 1e-14)
    gradient = exchanged(model, rank, 3)["layers.0.weight"]
    assert torch.linalg.matrix_rank(gradient, rtol=1e-6) == 1
    assert not torch.allclose(gradient, exact(3)["layers.0.weight"])


def gradients_of_the_rank_are_exact(rank: int) -> None:
    """One sample on each of two ranks gives every matrix a gradient of rank two."""
    for options in ({}, {"bucket_cap_mb": 1e-3}):
        model = power_sgd(2, 2, **options)
        for step in range(5):
            assert_same(exchanged(model, rank, step, 1), exact(step, 1), 1e-12)


def what_is_left_out_is_added_later(rank: int, directory: str) -> None:
    """All that was exchanged and all that is still left out are the sum of the gradients."""
    model = power_sgd(1, 2, bucket_cap_mb=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sent = {n: torch.zeros_like(p) for n, p in wide().named_parameters()}
    wanted = {n: torch.zeros_like(p) for n, p in wide().named_parameters()}
    for step in range(8):
        sent = {n: sent[n] + g for n, g in exchanged(model, rank, step).items()}
        wanted = {n: wanted[n] + g for n, g in exact(step).items()}
    files = save(model, optimizer, directory)
    for name in wanted:
        left = sum(f["errors"][name] for f in files) / len(files)
        total = sent[name] + left.view_as(sent[name])
        torch.testing.assert_close(total, wanted[name], rtol=1e-9, atol=1e-12)
        assert (left.norm() > 0.1 * wanted[name].norm()) == name.endswith("weight")


def save(model: nn.Module, optimizer, directory: str) -> list[dict[str, torch.Tensor]]:
    if dist.get_rank() == 0:
        Path(directory).mkdir()
    dist.barrier()
    DDP.save_checkpoint(model, optimizer, Path(directory), include_frozen=True)
    dist.barrier()
    return [torch.load(f) for f in sorted(Path(directory).glob("powersgd-*.pt"))]


def new(start_step: int, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = power_sgd(1, start_step, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(model: nn.Module, optimizer, rank: int, numbers: range) -> None:
    for step in numbers:
        exchanged(model, rank, step)
        optimizer.step()


def a_run_goes_on_bit_by_bit(rank: int, directory: str) -> None:
    for saved_at, start_step in ((1, 3), (3, 3), (4, 3), (6, 2)):
        for megabytes in (25.0, 1e-3):
            options = {"bucket_cap_mb": megabytes}
            model, optimizer = new(start_step, **options)
            steps(model, optimizer, rank, range(saved_at))
            place = f"{directory}/{saved_at}-{start_step}-{megabytes}"
            save(model, optimizer, place)
            steps(model, optimizer, rank, range(saved_at, 9))

            other, its_optimizer = new(start_step, **options)
            DDP.load_checkpoint(other, its_optimizer, Path(place), include_frozen=True)
            steps(other, its_optimizer, rank, range(saved_at, 9))
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(one, two), (saved_at, start_step, megabytes)


def staged_is_what_is_saved(rank: int, directory: str) -> None:
    model, optimizer = new(2)
    steps(model, optimizer, rank, range(4))
    saved = save(model, optimizer, directory)[rank]
    write = DDP.stage_checkpoint(model, optimizer, include_frozen=True)
    steps(model, optimizer, rank, range(4, 6))
    later = Path(f"{directory}-later")
    if rank == 0:
        later.mkdir()
    dist.barrier()
    write(later, None)
    staged = torch.load(later / f"powersgd-{rank:05d}.pt")
    assert staged["exchanges"] == saved["exchanges"] == 4
    for kind in ("errors", "projections"):
        assert staged[kind].keys() == saved[kind].keys()
        assert all(torch.equal(staged[kind][n], saved[kind][n]) for n in saved[kind])


def save_for_another_number_of_ranks(rank: int, directory: str) -> None:
    model, optimizer = new(2)
    steps(model, optimizer, rank, range(4))
    save(model, optimizer, directory)


def load_on_another_number_of_ranks(rank: int, directory: str) -> None:
    before = [torch.load(f) for f in sorted(Path(directory).glob("powersgd-*.pt"))]
    assert len(before) != dist.get_world_size()
    model, optimizer = new(2)
    DDP.load_checkpoint(model, optimizer, Path(directory), include_frozen=True)
    after = save(model, optimizer, f"{directory}-{dist.get_world_size()}")
    for name in before[0]["errors"]:
        means = [sum(f["errors"][name] for f in files) / len(files) for files in (before, after)]
        assert means[0].norm() > 0 or name.endswith("bias")
        torch.testing.assert_close(*means)
    for name, projection in before[0]["projections"].items():
        assert torch.equal(after[0]["projections"][name], projection)
    steps(model, optimizer, rank, range(4, 7))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def checkpoints_without_its_memory_are_taken(rank: int, directory: str) -> None:
    plain = shard(wide())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    steps(plain, optimizer, rank, range(2))
    assert save(plain, optimizer, directory) == []
    model, its_optimizer = new(2)
    DDP.load_checkpoint(model, its_optimizer, Path(directory), include_frozen=True)
    assert_same(exchanged(model, rank, 2), exchanged(plain, rank, 2), 0)


def a_scalar_is_refused(rank: int) -> None:
    model = Net()
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match="cannot handle scalars, and the model trains scale"):
        shard(model, compression="powersgd")


def gradients_of_zero_are_zero_until_they_are_not(rank: int) -> None:
    """And then they are near the exact ones at once, although nothing was there to begin with."""
    for approximation_rank in (2, 4):
        model = power_sgd(approximation_rank, 2)
        for step in range(6):
            model.zero_grad()
            nothing = torch.zeros(1, 16, dtype=torch.float64)
            backward(model, samples(rank, step, 1) if step > 3 else nothing)
            gradient = DDP.unwrap_model(model).layers[0].weight.grad
            expected = exact(step, 1)["layers.0.weight"] if step > 3 else gradient * 0
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
