"""What the distributed tests run: ``fsdp2_processes.py SCENARIO WORLD_SIZE [DIRECTORY]``.

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
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core_plugin.errors import ConfigError
from core_plugin.privateuse1 import DeviceCapabilities
from core_plugin.types import DistributedPlugin
from core_plugin.types.distributed import ShardContext

FSDP2 = DistributedPlugin("fsdp2").resolve()
AVERAGES = DeviceCapabilities(average_in_collectives=True)
SUMS = DeviceCapabilities()


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


def shard(
    model: nn.Module, dtype: torch.dtype = torch.float32, device=AVERAGES, **params: object
) -> nn.Module:
    params = FSDP2.Params(**params)
    mesh = FSDP2.create_mesh(params, "cpu", dist.get_world_size())
    blocks = list(model.blocks)
    context = ShardContext(torch.device("cpu"), mesh, lambda part: None, blocks, dtype, device)
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
    assert_gradients_are_near(model)


def assert_gradients_are_near(model: nn.Module) -> None:
    """As near as bf16 comes, which is not the same as equal."""
    expected = torch.cat([g.flatten() for g in averaged_gradients().values()])
    actual = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    assert 0 < torch.dist(actual, expected) < 0.05 * expected.norm()


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


class Reductions(TorchDispatchMode):
    """What the process groups are asked to do with gradients: ("allreduce_", "SUM"), ..."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        leaves = tree_leaves(args)
        if operator.namespace == "c10d" and leaves[0].is_floating_point():
            operations = (x.op() for x in leaves if is_reduce_op(x))
            collective = operator.__name__.split(".")[0]
            self.seen += [(collective, ReduceOp.RedOpType(n).name) for n in operations]
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


def _process(rank: int, scenario: str, world_size: int, store: str, *directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    globals()[scenario](rank, *directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    _, scenario, world_size, *directory = sys.argv
    with tempfile.TemporaryDirectory() as temporary:
        arguments = (scenario, int(world_size), str(Path(temporary) / "store"), *directory)
        mp.start_processes(_process, arguments, int(world_size), start_method="fork")
