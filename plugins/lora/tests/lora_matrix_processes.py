"""What the distributed test of linear layers and embeddings runs.

``lora_matrix_processes.py SIZE DIRECTORY`` starts the processes of one gloo group and runs every
scenario on each. Any failed assertion ends the program with an error. Each scenario compares with
one process that has the whole batch.
"""

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from core_plugin.adapters import initialize, inject, merge, unmerge
from core_plugin_lora import fused
from core_plugin_lora.plugin import LoRA, LoRAParams

TOKENS = torch.arange(24).reshape(6, 4) % 11
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"use_dora": True},
    {"lora_bias": True, "target_modules": ["up", "down"]},
    {"bias": "lora_only"},
    {"init_lora_weights": "pissa"},
)


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

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def adapted(randomize: bool = True, **settings: Any) -> Model:
    torch.manual_seed(0)
    params = {"target_modules": ["tokens", "up", "down"], "r": 2}
    model = inject(Model(), LoRA, LoRAParams(**{**params, **settings}))
    if randomize:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def sharded_piece_by_piece(model: nn.Module) -> nn.Module:
    """Every module that has tensors in a group of its own, as for other dtypes."""
    for module in list(model.modules()):
        if [*module.parameters(recurse=False)] and not isinstance(module, nn.ParameterDict):
            fully_shard(module)
    return fully_shard(model)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tokens: Tensor) -> Tensor:
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def assert_gradients(wrap: Callable[[nn.Module], nn.Module], **settings: Any) -> None:
    reference, made = adapted(**settings), adapted(**settings)
    wrapped = wrap(made)  # which has to live on until the backward pass
    wrapped(own_part(TOKENS)).square().mean().backward()
    reference(TOKENS).square().mean().backward()
    for (name, parameter), expected in zip(
        made.named_parameters(), reference.parameters(), strict=True
    ):
        if expected.requires_grad:
            torch.testing.assert_close(whole(parameter.grad), expected.grad)
        else:
            assert parameter.grad is None, name


def gradients() -> None:
    for settings in CASES:
        for wrap in (DistributedDataParallel, sharded):
            assert_gradients(wrap, **settings)
    with warnings.catch_warnings():
        # That a linear layer returns a view, which must not be changed in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        for settings in ({}, {"use_dora": True}):
            assert_gradients(sharded_piece_by_piece, **settings, target_modules=["up", "down"])


def one_operation() -> None:
    """Parameters that are whole within a block's forward pass are no reason to call modules."""
    seen = []
    model = sharded(adapted())
    layer = model.layers[0].up
    layer.register_forward_pre_hook(lambda m, args: seen.append(fused.fits(args[0], m._fused)))
    model(TOKENS)
    assert seen == [True]


def bfloat16() -> None:
    for settings in ({}, {"use_dora": True}):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = sharded(adapted(**settings), mp_policy=policy)
        result, expected = model(TOKENS), adapted(**settings)(TOKENS)
        assert result.dtype == torch.bfloat16
        assert (result - expected).abs().max() < 0.05 * expected.abs().max()
        result.float().square().mean().backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.grad.dtype for p in trained} == {torch.float32}


def from_meta() -> None:
    """What depends on the base's values comes after the sharding, and is as in one process."""
    for init in ("pissa", "olora", "pissa_niter_4", "orthogonal"):
        settings = {"randomize": False, "init_lora_weights": init, "use_dora": True}
        reference, plain = adapted(**settings), adapted(False)
        with torch.device("meta"):
            made = sharded(adapted(**settings))
        made.to_empty(device="cpu")
        for parameter, other in zip(base_parameters(made), base_parameters(plain), strict=True):
            parameter.data.copy_(
                distribute_tensor(other.data, parameter.device_mesh, parameter.placements)
            )
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DTensor random operators may not have complete")
            initialize(made)
        torch.testing.assert_close(made(TOKENS), plain(TOKENS))
        if init != "orthogonal":
            assert_same(made.layers, reference.layers)


def base_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "lora_" not in name]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for parameter, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter), expected, rtol=1e-4, atol=1e-5)


def merging() -> None:
    for settings in CASES:
        made, reference = sharded(adapted(**settings)), adapted(**settings)
        expected = made(TOKENS)
        merge(made)
        merge(reference)
        torch.testing.assert_close(made(TOKENS), expected)
        assert_same(made, reference)
        unmerge(made)
        torch.testing.assert_close(made(TOKENS), expected, rtol=0, atol=0)


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
    for scenario in (gradients, one_operation, bfloat16, from_meta, merging):
        scenario()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    mp.start_processes(start, (size, folder), nprocs=size, start_method="fork")
