"""The model of the tests, how one process trains it, and what is asked of a sharded one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core_plugin.privateuse1 import DeviceCapabilities
from core_plugin.tensors import canonical_name, gather
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
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    device: DeviceCapabilities = AVERAGES,
    materialize=lambda part: None,
    blocks=None,
    **params: object,
) -> nn.Module:
    params = FSDP2.Params(**params)
    mesh = FSDP2.create_mesh(params, "cpu", dist.get_world_size())
    blocks = list(model.blocks if blocks is None else blocks)
    context = ShardContext(torch.device("cpu"), mesh, materialize, blocks, dtype, device)
    return FSDP2.shard_model(model, params, context)


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return tuple(torch.randint(0, 7, (4, 5), generator=generator) for _ in range(2))


def loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def averaged_gradients(model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Those of one process: the mean of all ranks' losses."""
    model = reference() if model is None else model
    losses = [loss(model, *data(rank)) for rank in range(dist.get_world_size())]
    torch.stack(losses).mean().backward()
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {canonical_name(n): p.grad for n, p in model.named_parameters()}
    return {n: gather(grad) for n, grad in named.items() if grad is not None}


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient)


def assert_gradients_are_near(model: nn.Module) -> None:
    """As near as bf16 comes, which is not the same as equal."""
    expected = torch.cat([g.flatten() for g in averaged_gradients().values()])
    actual = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    assert 0 < torch.dist(actual, expected) < 0.05 * expected.norm()


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
