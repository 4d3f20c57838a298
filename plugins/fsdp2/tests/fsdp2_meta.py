"""Scenarios of models that are sharded on meta; each runs on every rank."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp2_model import Net, assert_gradients, averaged_gradients, data, loss, shard
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core_plugin.tensors import canonical_name, local, model_tensors
from core_plugin.training import materialize
from core_plugin.training.materialize import Materializer
from core_plugin.types import PeftPlugin

CPU = torch.device("cpu")


class Scale(nn.Module):
    """A parameter, and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 6))
        self.register_buffer("kept", torch.empty(()))
        self.register_buffer("computed", torch.empty(6), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.kept.fill_(2.0)
        self.computed.copy_(torch.arange(6))

    def forward(self, x):
        return x * (self.weight.mean(0) + self.kept + self.computed)


class Deep(Net):
    """The net with buffers in a block and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.blocks[1].scale = Scale()

    def forward(self, ids):
        x = self.scale(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.blocks[1].scale(x))


def on_meta(model: type[nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return model()


def materializer(model: nn.Module, base_name=canonical_name, **options: object) -> Materializer:
    return Materializer(model, CPU, 0, lambda m: m.reset_parameters(), base_name, **options)


def in_one_process(model: nn.Module, **options: object) -> nn.Module:
    materializer(model, **options)(model)
    return model


def sharded_on_meta(model: nn.Module, base_name=canonical_name, weights=(), **params) -> nn.Module:
    made = materializer(model, base_name, weights=weights)
    return shard(model, materialize=made, **params)


def assert_equal(model: nn.Module, whole: nn.Module) -> None:
    """Bit for bit, buffers that are not persistent and flags included."""
    actual, expected = model_tensors(model), model_tensors(whole)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if isinstance(tensor, nn.Parameter):
            assert isinstance(actual[name], DTensor), name
            assert actual[name].requires_grad == tensor.requires_grad, name
            assert torch.equal(actual[name].full_tensor(), tensor), name
    for (name, buffer), other in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(buffer, other), name


def values_are_those_of_one_process(rank: int) -> None:
    whole = on_meta(Deep)
    whole.blocks[0].up.bias.requires_grad_(False)
    in_one_process(whole)
    model = on_meta(Deep)
    model.blocks[0].up.bias.requires_grad_(False)
    model = sharded_on_meta(model)
    assert_equal(model, whole)
    assert model.head.weight is model.embedding.weight


def parts_are_filled_in_any_order(rank: int) -> None:
    model = on_meta(Deep)
    made = materializer(model)

    def in_parts(_: nn.Module) -> None:
        for part in (model.head, model.blocks[1], model.blocks[0].up, model, model):
            made(part)

    model = shard(model, materialize=in_parts)
    assert_equal(model, in_one_process(on_meta(Deep)))
    assert model.head.weight is model.embedding.weight


def it_trains_as_one_process(rank: int) -> None:
    # As some devices need it; torch then takes no other object for a sharded parameter.
    torch.__future__.set_swap_module_params_on_conversion(True)
    model, whole = sharded_on_meta(on_meta()), in_one_process(on_meta())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, whole)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, *data(rank)).backward()
        assert_gradients(model, averaged_gradients(whole))
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), whole.get_parameter(name))


class Counted:
    """A safetensors file that adds up how many numbers are read."""

    read = 0

    def __init__(self, *args, **kwargs) -> None:
        self._file = materialize_open(*args, **kwargs)

    def keys(self):
        return self._file.keys()

    def get_slice(self, name):
        return CountedSlice(self._file.get_slice(name))


class CountedSlice:
    def __init__(self, part) -> None:
        self._part = part
        self.get_shape = part.get_shape

    def __getitem__(self, index):
        tensor = self._part[index]
        Counted.read += tensor.numel()
        return tensor


materialize_open = materialize.safe_open


def each_rank_reads_its_part_alone(rank: int, directory: str) -> None:
    files = written(Deep, rank, Path(directory))
    materialize.safe_open = Counted
    model = sharded_on_meta(on_meta(Deep), weights=files)
    assert_equal(model, in_one_process(on_meta(Deep), weights=files[::-1]))
    held = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    buffers = 2  # persistent ones, which are on every rank
    assert Counted.read == held + buffers + whole + buffers  # the one process reads the whole
    assert held <= whole / dist.get_world_size() + 40


def written(model: type[nn.Module], rank: int, directory: Path) -> list[str]:
    """Two files of weights that are no initialisation's."""
    names = ["1.safetensors", "2.safetensors"]
    if rank == 0:
        torch.manual_seed(1)
        tensors = {n: torch.randn_like(t) for n, t in model_tensors(model()).items()}
        for file, blocks in zip(names, (True, False), strict=True):
            part = {n: t for n, t in tensors.items() if ("blocks" in n) == blocks}
            save_file(part, directory / file)
    dist.barrier()
    return [str(directory / name) for name in names]


ADAPTERS = {
    "plain": {},
    "pissa": {"init_lora_weights": "pissa"},
    "dora": {"use_dora": True, "init_lora_weights": False},
    "saved": {"modules_to_save": ["embedding", "head"]},
    "tokens": {"trainable_token_indices": {"embedding": [1, 3]}},
}


def adapted(**params: object) -> nn.Module:
    method = PeftPlugin("lora").resolve()
    model = on_meta()
    with torch.device("meta"):
        method.adapt(model, method.Params(r=2, target_modules=["up", "down"], **params), {})
    return model


def adapters_begin_and_train_as_in_one_process(rank: int, directory: str) -> None:
    base_name = PeftPlugin("lora").resolve().base_name
    for weights in ([], written(Net, rank, Path(directory))):
        for params in ADAPTERS.values():
            whole = in_one_process(adapted(**params), base_name=base_name, weights=weights)
            model = sharded_on_meta(adapted(**params), base_name, weights)
            assert_equal(model, whole)
            loss(model, *data(rank)).backward()
            assert_gradients(model, averaged_gradients(whole))
            frozen = [p for p in model.parameters() if not p.requires_grad]
            assert frozen
            assert all(isinstance(p, DTensor) and p.grad is None for p in frozen)


class Live(TorchDispatchMode):
    """The bytes of what operations touched and what is still held, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and not local(tensor).is_meta:
                storage = local(tensor).untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage)
        self.most = max(self.most, self.bytes)
        return result

    @property
    def bytes(self) -> int:
        held = (torch.UntypedStorage._new_with_weak_ptr(r.cdata) for r in self.storages.values())
        return sum(storage.nbytes() for storage in held if storage is not None)

    @property
    def settled(self) -> int:
        """What is held a moment later: a thread of gloo lets go of a collective's buffer late."""
        time.sleep(0.1)
        return self.bytes


class Wide(nn.Module):
    """Four blocks of 4 KiB, and 1 KiB beside them; two ranks divide all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32, bias=False)) for _ in range(4))
        for block in self.blocks:
            block.append(nn.Linear(32, 16, bias=False))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


KIB = 1024


def no_rank_holds_more_than_its_parts_and_a_module(rank: int) -> None:
    with Live() as live:
        model = sharded_on_meta(on_meta(Wide))
    parts = sum(p.to_local().nbytes for p in model.parameters())
    assert parts == (4 * 4 + 1) * KIB / 2
    assert parts <= live.bytes < parts + 64  # and what a generator keeps
    assert live.most < parts + 2 * KIB + 128, live.most  # the largest module is of 2 KiB


def after_a_step_a_rank_holds_its_parts_alone(rank: int) -> None:
    parts, ids = (4 * 4 + 1) * KIB / 2, torch.zeros(1, 1, dtype=torch.int64)
    for keep in (0, 2):
        with Live() as live:
            model = sharded_on_meta(on_meta(Wide), keep_last_blocks=keep)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for _ in range(2):
                result = model(ids)
                forward = live.settled - parts * (3 if optimizer.state else 1)
                # The embedding, and what is kept, are whole; activations are below 1 KiB.
                assert (1 + 4 * keep) * KIB <= forward < (2 + 4 * keep) * KIB, forward
                result.sum().backward()
                del result
                optimizer.step()
                optimizer.zero_grad()
                assert parts * 3 <= live.settled < parts * 3 + KIB / 2, live.bytes
