"""What the distributed tests run: ``fsdp2_processes.py SCENARIO WORLD_SIZE``.

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
from torch.distributed.tensor import DTensor

from core_plugin.errors import ConfigError
from core_plugin.types import DistributedPlugin
from core_plugin.types.distributed import ShardContext

FSDP2 = DistributedPlugin("fsdp2").resolve()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.dtype = None

    def forward(self, x):
        self.dtype = x.dtype
        self.whole = not isinstance(self.up.weight, DTensor)
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks; the head is tied to the embedding, whose 7 rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reference(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def shard(model: nn.Module, dtype: torch.dtype = torch.float32, **params: object) -> nn.Module:
    params = FSDP2.Params(**params)
    mesh = FSDP2.create_mesh(params, "cpu", dist.get_world_size())
    context = ShardContext(torch.device("cpu"), mesh, lambda part: None, list(model.blocks), dtype)
    return FSDP2.shard_model(model, params, context)


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return tuple(torch.randint(0, 7, (4, 5), generator=generator) for _ in range(2))


def loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def averaged_gradients() -> dict[str, torch.Tensor]:
    """Those of one process: the mean of all ranks' losses."""
    model = reference()
    losses = [loss(model, *data(rank)) for rank in range(dist.get_world_size())]
    torch.stack(losses).mean().backward()
    return {n: p.grad for n, p in model.named_parameters()}


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    actual = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient)


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
    expected = torch.cat([g.flatten() for g in averaged_gradients().values()])
    actual = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    assert 0 < torch.dist(actual, expected) < 0.05 * expected.norm()


def trained_parameters_of_two_dtypes(rank: int) -> None:
    model = reference()
    model.blocks[1].up.bfloat16()
    model.blocks[1].up.register_forward_pre_hook(lambda m, a: (a[0].bfloat16(),))
    model.blocks[1].up.register_forward_hook(lambda m, a, out: out.float())
    model = shard(model)
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
    model = shard(reference())
    loss(model, *data(rank)).backward()
    expected = torch.linalg.vector_norm(
        torch.cat([g.flatten() for g in averaged_gradients().values()])
    )
    norm = FSDP2.clip_grad_norm(model, 0.01)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(FSDP2.clip_grad_norm(model, None), torch.tensor(0.01))


def memory_is_asked_for_block_by_block(rank: int) -> None:
    with torch.device("meta"):
        model = Net()
    asked = []

    def materialize(part: nn.Module) -> None:
        asked.append(part)
        real = [p for p in model.parameters() if not p.is_meta]
        assert all(isinstance(p, DTensor) for p in real), "a whole block was left in memory"
        if part is model:
            part = nn.ModuleList([part.embedding])
            model.head.weight = model.embedding.weight = nn.Parameter(torch.empty(7, 6))
        part.to_empty(device="cpu")
        model.head.weight = model.embedding.weight

    params = FSDP2.Params()
    mesh = FSDP2.create_mesh(params, "cpu", dist.get_world_size())
    context = ShardContext(
        torch.device("cpu"), mesh, materialize, list(model.blocks), torch.float32
    )
    FSDP2.shard_model(model, params, context)
    assert asked == [*model.blocks, model]
    assert not any(p.is_meta for p in model.parameters())


def no_blocks_are_an_error(rank: int) -> None:
    model = reference()
    context = ShardContext(torch.device("cpu"), None, lambda part: None, [], torch.float32)
    with pytest.raises(ConfigError, match=r"Net names no blocks.*Candidates: Block"):
        FSDP2.shard_model(model, FSDP2.Params(), context)


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
