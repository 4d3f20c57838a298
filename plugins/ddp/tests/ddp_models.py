"""What the scenarios share: a model, its gradients in one process, and what is exchanged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
