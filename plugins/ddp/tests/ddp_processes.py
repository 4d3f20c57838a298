"""What the distributed tests run: ``ddp_processes.py SCENARIO WORLD_SIZE``.

Starts the processes of one gloo group and runs the function named SCENARIO on each. Any failed
assertion ends the program with an error.
"""

import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core_plugin.errors import ConfigError
from core_plugin.privateuse1 import DeviceCapabilities
from core_plugin.types import DistributedPlugin
from core_plugin.types.distributed import ShardContext

DDP = DistributedPlugin("ddp").resolve()
AVERAGES = DeviceCapabilities(average_in_collectives=True)
SUMS = DeviceCapabilities()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        self.sometimes = nn.Linear(3, 2)

    def forward(self, x, everything=True):
        return self.used(x) + self.sometimes(x) if everything else self.used(x)


def reference() -> Net:
    torch.manual_seed(0)
    return Net()


def shard(
    model: nn.Module, materialize=lambda part: None, device=AVERAGES, **params: object
) -> nn.Module:
    assert DDP.create_mesh(DDP.Params(), "cpu", dist.get_world_size()) is None
    context = ShardContext(torch.device("cpu"), None, materialize, [], torch.float32, device)
    return DDP.shard_model(model, DDP.Params(**params), context)


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def averaged_gradients(everything: bool = True) -> dict[str, torch.Tensor]:
    """Those of one process: the mean of all ranks' losses."""
    model = reference()
    losses = [model(data(r), everything).square().mean() for r in range(dist.get_world_size())]
    torch.stack(losses).mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    inner = DDP.unwrap_model(model)
    actual = {n: p.grad for n, p in inner.named_parameters() if p.grad is not None}
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient)


class Reductions(TorchDispatchMode):
    """What the process groups are asked to do with gradients: SUM, AVG, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        leaves = tree_leaves(args)
        if operator.namespace == "c10d" and leaves[0].is_floating_point():
            operations = (x.op() for x in leaves if is_reduce_op(x))
            self.seen += [ReduceOp.RedOpType(number).name for number in operations]
        return operator(*args, **(kwargs or {}))


def is_reduce_op(argument: object) -> bool:
    return isinstance(argument, torch.ScriptObject) and argument._type().name() == "ReduceOp"


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


def _process(rank: int, scenario: str, world_size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    globals()[scenario](rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    _, scenario, world_size = sys.argv
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        mp.start_processes(
            _process, (scenario, int(world_size), store), int(world_size), start_method="fork"
        )
