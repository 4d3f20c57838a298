"""Scenarios: buffers that a forward pass changes stay equal on all ranks."""

import torch
import torch.distributed as dist
from ddp_models import AVERAGES, DDP, data, shard
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Normed(nn.Module):
    """Batch norm, beside buffers that no step changes, of values that no sum leaves as they are."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=dtype)
        self.linear = nn.Linear(3, 2, dtype=dtype)
        self.register_buffer("constant", torch.tensor([0.1, 1 / 3, -torch.inf, 3e38]))
        self.register_buffer("narrow", torch.tensor([0.1], dtype=torch.bfloat16))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.cache += x.sum()
        return self.linear(self.norm(x))


class Collectives(TorchDispatchMode):
    """The names of those that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "c10d":
            self.names.append(operator._opname)
        return operator(*args, **(kwargs or {}))


def make(dtype: torch.dtype = torch.float32) -> Normed:
    torch.manual_seed(0)
    return Normed(dtype)


def train(model: nn.Module, rank: int, step: int = 0, micro_batches: int = 1) -> None:
    dtype = DDP.unwrap_model(model).linear.weight.dtype
    for number in range(micro_batches):
        with DDP.gradient_sync(model, number == micro_batches - 1):
            inputs = data(rank + 10 * step + 100 * number).to(dtype)
            model(inputs).square().mean().backward()


def assert_equal_on_all_ranks(tensor: torch.Tensor) -> None:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    assert all(torch.equal(tensor, other) for other in tensors)


def running_statistics_are_the_mean_of_all_ranks(rank: int) -> None:
    model, alone = shard(make(torch.float64)), make(torch.float64)
    variances = torch.ones(3, dtype=torch.float64)
    for step in range(3):
        train(model, rank, step)
        shares = [data(r + 10 * step).double() for r in range(dist.get_world_size())]
        alone(torch.cat(shares))
        variance = torch.stack([share.var(0) for share in shares]).mean(0)
        variances = 0.9 * variances + 0.1 * variance
        norm = DDP.unwrap_model(model).norm
        torch.testing.assert_close(norm.running_mean, alone.norm.running_mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(norm.running_var, variances, rtol=1e-12, atol=0)
        assert norm.num_batches_tracked == step + 1
        assert_equal_on_all_ranks(norm.running_mean)
        assert_equal_on_all_ranks(norm.running_var)


def all_micro_batches_of_a_step_count(rank: int) -> None:
    model = shard(make(torch.float64))
    train(model, rank, micro_batches=3)
    expected = torch.zeros(dist.get_world_size(), 3, dtype=torch.float64)
    for other in range(dist.get_world_size()):
        for number in range(3):
            mean = data(other + 100 * number).double().mean(0)
            expected[other] = 0.9 * expected[other] + 0.1 * mean
    norm = DDP.unwrap_model(model).norm
    torch.testing.assert_close(norm.running_mean, expected.mean(0), rtol=1e-12, atol=0)
    assert_equal_on_all_ranks(norm.running_mean)


def what_no_step_changes_stays_bit_by_bit(rank: int) -> None:
    model = shard(make())
    for step in range(5):
        train(model, rank, step)
    inner = DDP.unwrap_model(model)
    assert torch.equal(inner.constant, make().constant)
    assert torch.equal(inner.narrow, make().narrow)
    expected = sum(data(rank + 10 * step).sum() for step in range(5))
    torch.testing.assert_close(inner.cache, expected[None])


def loaded_values_are_what_the_next_step_begins_with(rank: int) -> None:
    model, other = shard(make()), shard(make())
    train(model, rank)
    other.load_state_dict(model.state_dict())
    train(model, rank, 1)
    train(other, rank, 1)
    for name in ("running_mean", "running_var"):
        values = [getattr(DDP.unwrap_model(m).norm, name) for m in (model, other)]
        assert torch.equal(*values)


def they_cost_one_collective_a_step_or_none(rank: int) -> None:
    for model, expected in ((make(), 2), (nn.Sequential(nn.Linear(3, 2)), 1)):
        if expected == 1:
            model.register_buffer("cache", torch.zeros(4), persistent=False)
        sharded = shard(model, device=AVERAGES)
        for _ in range(3):
            with Collectives() as collectives, DDP.gradient_sync(sharded, True):
                sharded(data(rank)).square().mean().backward()
        # What the buffers cost comes on leaving the inner context, still within the outer one.
        assert len(collectives.names) == expected, collectives.names
