"""The peers of ``sharding.py``: torch's DDP and FSDP2 by hand, Accelerate and Lightning Fabric.

Each function makes a model of a size, ready to train, in a rank whose process group is there. All
of them ask for the same of torch; FSDP2 is sharded on ``meta``, given memory with ``to_empty`` and
initialised part by part, which is as sparing as torch can do it. Each rank then draws the values of
its parts alone, so that they depend on the number of ranks; core-plugin's do not. Accelerate is not
asked for FSDP2: on CPUs it makes DDP instead, without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from core_plugin.builtin.decoder import Decoder

if TYPE_CHECKING:
    from lightning.fabric.strategies import Strategy
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

WORLD_SIZE, VOCABULARY = 2, 2048


def on_cpu(size: Decoder.Params) -> nn.Module:
    return Decoder.build(size, VOCABULARY)


def on_meta(size: Decoder.Params) -> nn.Module:
    with torch.device("meta"):
        return on_cpu(size)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp_by_hand(size: Decoder.Params) -> nn.Module:
    return DistributedDataParallel(on_cpu(size), gradient_as_bucket_view=True)


def fsdp2_by_hand(size: Decoder.Params) -> nn.Module:
    model = shard(on_meta(size), init_device_mesh("cpu", (WORLD_SIZE,)))
    model.to_empty(device="cpu")
    for module in model.modules():
        if list(module.parameters(recurse=False)) or list(module.buffers(recurse=False)):
            Decoder.initialize(module)
    return model


def ddp_by_accelerate(size: Decoder.Params) -> nn.Module:
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    return Accelerator(cpu=True, kwargs_handlers=[options]).prepare(on_cpu(size))


def launched(strategy: Strategy) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy=strategy)
    fabric.launch()
    return fabric


def ddp_by_fabric(size: Decoder.Params) -> nn.Module:
    return launched(DDPStrategy(gradient_as_bucket_view=True)).setup(on_cpu(size))


def fsdp2_by_fabric(size: Decoder.Params) -> nn.Module:
    strategy = ModelParallelStrategy(
        lambda model, mesh: shard(model, mesh["data_parallel"]),
        data_parallel_size=WORLD_SIZE,
        tensor_parallel_size=1,
    )
    return launched(strategy).setup(on_meta(size))  # it gives memory and initialises, as by hand


PEERS = {
    "ddp": {"by hand": ddp_by_hand, "Accelerate": ddp_by_accelerate, "Fabric": ddp_by_fabric},
    "fsdp2": {"by hand": fsdp2_by_hand, "Fabric": fsdp2_by_fabric},
}
