"""Scenarios of the parameters and of what a model is wrapped in; each runs on every rank."""

import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp2_meta import in_one_process, on_meta, sharded_on_meta
from fsdp2_model import (
    AVERAGES,
    FSDP2,
    SUMS,
    Block,
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from core_plugin.errors import ConfigError


class Four(Net):
    """The net with four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend([Block(), Block()])


def in_double(model: nn.Module) -> nn.Module:
    return model.to(torch.float64)


def double(model: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return in_double(model())


def assert_is_one_process(model: nn.Module, whole: nn.Module, rank: int) -> None:
    loss(model, *data(rank)).backward()
    assert_gradients(model, averaged_gradients(whole))


def parameters_are_freed_down_to_two_ranks(rank: int) -> None:
    model = shard(reference(), reshard_after_forward=2)
    result = loss(model, *data(rank))
    weight = model.blocks[0].up.weight
    assert weight.placements == (Replicate(), Shard(0))
    assert weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert weight.to_local().numel() == weight.numel() / 2
    result.backward()
    assert_gradients(model, averaged_gradients())
    with pytest.raises(ConfigError, match="is 3, which does not divide the 4 ranks"):
        shard(reference(), reshard_after_forward=3)
    with pytest.raises(ConfigError, match="is 4, which does not divide the 2 ranks"):
        shard(reference(), reshard_after_forward=4, replicas=2)


def the_last_blocks_are_kept_after_forward(rank: int) -> None:
    for params, kept in (
        ({"keep_last_blocks": 1}, [False, False, False, True]),
        ({"keep_last_blocks": 4}, [True] * 4),
        ({"reshard_after_forward": 2, "keep_last_blocks": 3}, [False, True, True, True]),
    ):
        model = shard(double(Four), **params)
        result = loss(model, *data(rank))
        assert [not isinstance(b.up.weight, DTensor) for b in model.blocks] == kept
        result.backward()
        assert_gradients(model, averaged_gradients(double(Four)))
    with pytest.raises(ConfigError, match="keep_last_blocks is 5, but Four has 4 blocks"):
        shard(double(Four), keep_last_blocks=5)


class Gathers(TorchDispatchMode):
    """How many all-gathers had begun when each block began, forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.begun, self.forward, self.backward = 0, [], []
        for block in model.blocks:
            block.up.register_forward_pre_hook(lambda m, args: self.forward.append(self.begun))
            block.down.register_full_backward_pre_hook(
                lambda m, grad: self.backward.append(self.begun)
            )

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "allgather" in operator.__name__:
            self.begun += 1
        return operator(*args, **(kwargs or {}))


def blocks_are_gathered_ahead(rank: int) -> None:
    # The root's gather is the first one; each block has one in forward and one in backward.
    for params, forward, backward in (
        ({}, [2, 3, 4, 5], [7, 8, 9, 9]),
        ({"forward_prefetch": 1}, [3, 4, 5, 5], [7, 8, 9, 9]),
        ({"forward_prefetch": 9, "backward_prefetch": 2}, [5, 5, 5, 5], [8, 9, 9, 9]),
        ({"backward_prefetch": 9}, [2, 3, 4, 5], [9, 9, 9, 9]),
    ):
        model = shard(double(Four), **params)
        with Gathers(model) as gathers:
            loss(model, *data(rank)).backward()
        assert gathers.forward == forward, (params, gathers.forward)
        assert gathers.backward == backward, (params, gathers.backward)
        assert_gradients(model, averaged_gradients(double(Four)))


def parameters_are_offloaded(rank: int) -> None:
    params = FSDP2.Params(cpu_offload=True)
    assert FSDP2.parameter_device(params, torch.device("cuda")).type == "cpu"
    assert FSDP2.parameter_device(FSDP2.Params(), torch.device("cuda")).type == "cuda"
    model, whole = sharded_on_meta(on_meta(), cpu_offload=True), in_one_process(on_meta())
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, whole)]
    for _ in range(2):
        model.zero_grad()
        whole.zero_grad()
        assert_is_one_process(model, whole, rank)
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.device.type == parameter.grad.device.type == "cpu"
        torch.testing.assert_close(parameter.full_tensor(), whole.get_parameter(name))


def gradients_are_divided_by_the_factor(rank: int) -> None:
    world_size = dist.get_world_size()
    for device in (AVERAGES, SUMS):
        for factor in (1.0, 8.0, 0.3):
            params = {"gradient_divide_factor": factor, "replicas": world_size // 2}
            divisor = FSDP2.gradient_divisor(FSDP2.Params(**params), world_size)
            assert divisor == factor
            model = shard(reference(), device=device, **params)
            with Reductions() as reductions:
                loss(model, *data(rank)).backward()
            assert {operation for _, operation in reductions.seen} == {"SUM"}
            times = world_size / factor
            assert_gradients(model, {n: g * times for n, g in averaged_gradients().items()})
            model.zero_grad()
            (loss(model, *data(rank)) * (divisor / world_size)).backward()
            assert_gradients(model, averaged_gradients())


def one_rank_divides_by_nothing(rank: int) -> None:
    params = {"gradient_divide_factor": 8.0}
    assert FSDP2.gradient_divisor(FSDP2.Params(**params), 1) == 1
    for make in (reference, lambda: in_double(reference())):
        assert_is_one_process(shard(make(), device=SUMS, **params), make(), rank)


def float32_is_reduced_and_returned_as_asked(rank: int) -> None:
    model = shard(reference(), reduce_dtype="bfloat16", output_dtype="bfloat16")
    ids, labels = data(rank)
    assert model(ids).dtype == torch.bfloat16
    assert [b.dtype for b in model.blocks] == [torch.float32] * 2
    loss(model, ids, labels).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_gradients_are_near(model)
    model = shard(reference(), torch.bfloat16, output_dtype="bfloat16")
    assert model(ids).dtype == torch.bfloat16


class Crossed(Net):
    """Tied over all bounds: blocks with blocks, and with what is outside; a shared layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[1].down = self.blocks[0].down
        for block in self.blocks:
            block.head = nn.Linear(6, 7)
            block.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
            x = x + nn.functional.pad(block.head(x).softmax(-1), (0, -1))
        return self.head(x)


def ties_over_blocks_stay(rank: int) -> None:
    for wrapped in (False, True):
        model, whole = on_meta(Crossed), in_one_process(on_meta(Crossed))
        if wrapped:
            model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
        model = sharded_on_meta(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert len([*model.parameters()]) == len([*whole.parameters()])
        for _ in range(2):
            optimizer.zero_grad()
            whole.zero_grad()
            assert_is_one_process(model, whole, rank)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(
                    [*whole.parameters()], [p.grad for p in whole.parameters()], alpha=-0.1
                )
        assert model.blocks[0].up.weight is model.blocks[1].up.weight
        assert model.embedding.weight is model.head.weight is model.blocks[1].head.weight


class Around(Net):
    """The net, which has a parameter of its own that is in a block, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = self.blocks[0].up.bias


def what_cannot_be_sharded_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="a Around has blocks in it, and a parameter"):
        shard(Around())
    model = reference()
    model.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match=r"Net have not: temperature; give them the shape \[1\]"):
        shard(model)
    model = reference()
    model.blocks[1].up.bias = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    told = r"blocks\.1\.up\.weight \(float32\), blocks\.1\.up\.bias \(bfloat16\); give them one"
    with pytest.raises(ConfigError, match=told):
        shard(model)


class PureBlock(Block):
    """A block that notes nothing, which the compiler could not do in a checkpoint."""

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Pure(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PureBlock(), PureBlock()])


def wrapped(model: nn.Module, checkpointed: bool, compiled: bool) -> nn.Module:
    if checkpointed:
        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    for block in model.blocks:
        if compiled:
            block.compile(backend="aot_eager")
    return model


def blocks_are_checkpointed_and_compiled(rank: int, checkpointed: bool, compiled: bool) -> None:
    # The compiler looks at it of every input.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor")
    whole = in_one_process(on_meta(Pure))
    model = sharded_on_meta(
        wrapped(on_meta(Pure), checkpointed, compiled), keep_last_blocks=1, forward_prefetch=1
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, whole)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert_is_one_process(model, whole, rank)
        for optimizer in optimizers:
            optimizer.step()
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == compiled


def everything_at_once(rank: int) -> None:
    params = {
        "replicas": 2,
        "cpu_offload": True,
        "forward_prefetch": 1,
        "backward_prefetch": 2,
        "keep_last_blocks": 1,
        "gradient_divide_factor": 4.0,
    }
    whole = in_one_process(in_double(on_meta(Crossed)))
    model = sharded_on_meta(wrapped(in_double(on_meta(Crossed)), True, False), **params)
    for last in (False, True):
        with FSDP2.gradient_sync(model, last):
            loss(model, *data(rank)).backward()
    assert_gradients(model, {n: 2 * g for n, g in averaged_gradients(whole).items()})
    expected = torch.linalg.vector_norm(
        torch.stack([2 * p.grad.norm() for p in whole.parameters()])
    )
    torch.testing.assert_close(FSDP2.clip_grad_norm(model, None), expected)
