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
from torch.nn.parallel import DistributedDataParallel

from core_plugin.errors import ConfigError
from core_plugin.types import DistributedPlugin
from core_plugin.types.distributed import ShardContext

DDP = DistributedPlugin("ddp").resolve()


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


def shard(model: nn.Module, materialize=lambda part: None, **params: object) -> nn.Module:
    assert DDP.create_mesh(DDP.Params(), "cpu", dist.get_world_size()) is None
    context = ShardContext(torch.device("cpu"), None, materialize, [], torch.float32)
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
