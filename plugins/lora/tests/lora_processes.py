"""What the distributed test runs: ``lora_processes.py WORLD_SIZE DIRECTORY``.

Starts the processes of one gloo group and runs every scenario on each. Any failed
assertion ends the program with an error. Each scenario compares with one process that has the
whole batch.
"""

import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from core_plugin.adapters import inject, load_adapter, save_adapter
from core_plugin_lora.plugin import LoRA, LoRAParams

PARAMS = LoRAParams(target_modules=["tokens", "up", "down"], r=3)
TOKENS = torch.arange(24).reshape(6, 4) % 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def injected(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model()
    inject(model, LoRA, PARAMS, "default")
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return model


def sharded(seed: int = 0, **options: object) -> Model:
    model = injected(seed)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward(model: nn.Module, share: bool) -> None:
    ranks = dist.get_world_size() if share else 1
    tokens = TOKENS.chunk(ranks)[dist.get_rank() if share else 0]
    model(tokens).square().mean().backward()


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == dict(reference.named_parameters()).keys()
    for name, expected in reference.named_parameters():
        if expected.requires_grad:
            torch.testing.assert_close(whole(parameters[name].grad), expected.grad)
        else:
            assert parameters[name].grad is None, name


def ddp(directory: Path) -> None:
    model, reference = DistributedDataParallel(injected()), injected()
    backward(model, share=True)
    backward(reference, share=False)
    assert_same_gradients(model.module, reference)


def fsdp2(directory: Path) -> None:
    model, reference = sharded(), injected()
    backward(model, share=True)
    backward(reference, share=False)
    assert_same_gradients(model, reference)


def fsdp2_bfloat16(directory: Path) -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    result, expected = model(TOKENS), injected()(TOKENS)
    assert result.dtype == torch.bfloat16
    assert (result - expected).abs().max() < 0.05 * expected.abs().max()
    result.float().square().mean().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.grad.dtype for p in trained} == {torch.float32}


def files(directory: Path) -> None:
    """What is gathered from shards is saved as by one process, and loads into shards again."""
    model, reference = sharded(), injected()
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if dist.get_rank() == 0:
        save_adapter(directory / "sharded", model, tensors=state)
        save_adapter(directory / "whole", reference)
    dist.barrier()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        one, other = (directory / folder / file for folder in ("sharded", "whole"))
        assert one.read_bytes() == other.read_bytes()
    assert len(load_file(directory / "whole" / "adapter_model.safetensors")) == 10
    other_model = sharded(seed=1)
    load_adapter(other_model, directory / "whole")
    for name, parameter in other_model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor)
            assert parameter.dtype == torch.float32
            assert torch.equal(whole(parameter), reference.get_parameter(name)), name


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
    for scenario in (ddp, fsdp2, fsdp2_bfloat16, files):
        scenario(directory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    mp.start_processes(start, (size, folder), nprocs=size, start_method="fork")
