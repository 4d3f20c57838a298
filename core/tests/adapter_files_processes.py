"""What the test of sharded adapters runs: ``adapter_files_processes.py WORLD_SIZE DIRECTORY``.

Each process of one gloo group saves, loads and swaps an adapter of a model that is sharded over
them. Any failed assertion ends the program with an error.
"""

import dataclasses
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from core_plugin.adapters import hotswap, inject, load_adapter, save_adapter
from core_plugin.adapters.layer import AdapterLayer, AdapterParameters
from core_plugin.errors import CheckpointError
from core_plugin.state import full_state_dict
from core_plugin.tensors import gather
from core_plugin.types.peft import BasePeft, PeftParams


@dataclasses.dataclass(frozen=True)
class ShiftParams(PeftParams):
    trainable_token_indices: list[int] | None = None
    bias: str = "none"


class ShiftLayer(AdapterLayer):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.shift_vector = AdapterParameters(nn.init.zeros_)

    def add_adapter(self, name: str, params: ShiftParams) -> None:
        self.shift_vector.add(name, (self.base_layer.out_features,), self.base_layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + sum(self.shift_vector[name] for name in self.used)


class Shift(BasePeft):
    """Adds a vector to a layer's outputs."""

    Params = ShiftParams
    peft_type = "SHIFT"
    prefix = "shift_"

    @staticmethod
    def layers() -> dict[type[nn.Module], type[AdapterLayer]]:
        return {nn.Linear: ShiftLayer}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return self.norm(x)


PARAMS = ShiftParams(
    target_modules="all-linear",
    modules_to_save=["norm"],
    trainable_token_indices=[5, 2, 3],
    bias="all",
)
FILES = ("adapter_model.safetensors", "adapter_config.json")
INPUT = torch.arange(7)


def injected(seed: int) -> Model:
    torch.manual_seed(0)
    model = Model().eval()
    inject(model, Shift, PARAMS)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model


def sharded(seed: int) -> Model:
    model = injected(seed)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def assert_same_files(one: Path, other: Path) -> None:
    dist.barrier()
    for file in FILES:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def assert_same_values(model: nn.Module, reference: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert torch.equal(gather(parameter.detach()), reference.get_parameter(name)), name


def saves(directory: Path) -> None:
    model = sharded(1)
    if dist.get_rank() == 0:
        save_adapter(directory / "whole", injected(1), tensors=injected(1).state_dict())
    save_adapter(directory / "gathered", model)
    assert_same_files(directory / "gathered", directory / "whole")
    tensors = full_state_dict(model, trainable=True)
    if dist.get_rank() == 0:
        save_adapter(directory / "given", model, tensors=tensors)
    assert_same_files(directory / "given", directory / "whole")


def loads(directory: Path) -> None:
    model = sharded(2)
    load_adapter(model, directory / "whole")
    assert_same_values(model, injected(1))
    torch.testing.assert_close(model(INPUT), injected(1)(INPUT))


def swaps(directory: Path) -> None:
    model = sharded(2)
    hotswap(model, directory / "whole")
    assert_same_values(model, injected(1))


def refuses(directory: Path) -> None:
    """All ranks find the same faults, and none of them is left in a collective call."""
    torch.manual_seed(0)
    other = Model()
    inject(other, Shift, ShiftParams(["layers.0"]))
    model = fully_shard(other)
    before = {n: gather(p.detach()).clone() for n, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match=r"layers\.1\.shift_vector: unexpected"):
        load_adapter(model, directory / "whole")
    for name, parameter in model.named_parameters():
        assert torch.equal(gather(parameter.detach()), before[name]), name


def start(rank: int, world_size: int, directory: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    for scenario in (saves, loads, swaps, refuses):
        scenario(directory)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    mp.start_processes(start, (size, folder), nprocs=size, start_method="fork")
