"""What the distributed test of all kinds runs: ``lora_kinds_processes.py SIZE DIRECTORY``.

Starts the processes of one gloo group and runs every scenario on each. Any failed assertion ends
the program with an error. Each scenario compares with one process that has the whole batch.
"""

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from core_plugin.adapters import initialize, inject, merge, unmerge
from core_plugin.errors import ConfigError
from core_plugin_lora.combine import add_weighted_adapter
from core_plugin_lora.eva import initialize_eva
from core_plugin_lora.plugin import LoRA, LoRAParams

X = torch.linspace(-4, 9, 4 * 5 * 8).sin().view(4, 5, 8).double()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 6, 8) / 3)
        self.down = nn.Parameter(torch.randn(3, 8, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("ehw,bsw->besh", self.up, x))
        return torch.einsum("ewh,besh->bsw", self.down, hidden)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, padding_mode="circular")
        self.experts = Experts()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.conv(x.mT).mT
        return torch.tanh(self.linear(x + self.experts(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(), Block()).double()
    # What the second one gets varies in more directions.
    blocks[0].linear.weight.data *= 20
    return blocks


def adapted(**settings: object) -> nn.Module:
    made = model()
    params = {
        "target_modules": ["attention", "conv", "linear"],
        "target_parameters": ["experts.up", "experts.down"],
        "r": 2,
    }
    return inject(made, LoRA, LoRAParams(**{**params, **settings}))


def randomized(made: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return made


def sharded(made: nn.Module) -> nn.Module:
    for block in made:
        fully_shard(block)
    return fully_shard(made)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_gradients(wrap: Callable[[nn.Module], nn.Module], **settings: object) -> None:
    reference = randomized(adapted(**settings))
    made = randomized(adapted(**settings))
    wrapped = wrap(made)
    wrapped(X.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    reference(X).square().mean().backward()
    for (name, parameter), expected in zip(
        made.named_parameters(), reference.parameters(), strict=True
    ):
        if expected.requires_grad:
            torch.testing.assert_close(whole(parameter.grad), expected.grad)
        else:
            assert parameter.grad is None, name


def ddp() -> None:
    assert_gradients(DistributedDataParallel)
    assert_gradients(DistributedDataParallel, bias="all")


def fsdp2() -> None:
    assert_gradients(sharded)
    assert_gradients(sharded, bias="all")


def merging() -> None:
    made, reference = sharded(randomized(adapted())), randomized(adapted())
    expected = made(X)
    merge(made)
    merge(reference)
    torch.testing.assert_close(made(X), expected)
    for parameter, other in zip(made.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter), other)
    unmerge(made)
    torch.testing.assert_close(made(X), expected, rtol=0, atol=0)


def from_meta() -> None:
    """The lengths of DoRA are those of the weights, which come after the sharding."""
    settings = {"target_modules": ["conv"], "target_parameters": None, "use_dora": True}
    reference = adapted(**settings)
    with torch.device("meta"):
        made = sharded(adapted(**settings))
    made.to_empty(device="cpu")
    for parameter, other in zip(made.parameters(), reference.parameters(), strict=True):
        if not other.requires_grad:
            parameter.data.copy_(
                torch.distributed.tensor.distribute_tensor(
                    other.data, parameter.device_mesh, parameter.placements
                )
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete")
        initialize(made)
    for block, other in zip(made, reference, strict=True):
        lengths = (layer.conv.lora_magnitude_vector["default"].weight for layer in (block, other))
        torch.testing.assert_close(*map(whole, lengths))


def eva() -> None:
    settings = {"init_lora_weights": "eva"}
    made, reference = sharded(adapted(**settings)), adapted(**settings)
    batches = [X, X.flip(0) + 1]
    initialize_eva(reference, batches, rho=1)
    initialize_eva(made, batches, rho=1)
    for block, other in zip(made, reference, strict=True):
        for one, expected in zip(
            block.linear.factors("default")[0], other.linear.factors("default")[0], strict=True
        ):
            assert isinstance(one, DTensor)
            torch.testing.assert_close(whole(one), expected)
    initialize_eva(reference, batches, rho=2)
    assert {block.linear.params["default"].r for block in reference} == {1, 3}
    with pytest.raises(ConfigError, match="call it with rho=1"):
        initialize_eva(sharded(adapted(**settings)), batches, rho=2)


def combining() -> None:
    with pytest.raises(ConfigError, match="the model is sharded already"):
        add_weighted_adapter(sharded(adapted()), ["default"], [1], "sum")


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
    for scenario in (ddp, fsdp2, merging, from_meta, eva, combining):
        scenario()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    mp.start_processes(start, (size, folder), nprocs=size, start_method="fork")
