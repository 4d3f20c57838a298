"""The model that is trained on several ranks, and how it is compared with one process."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, distribute_tensor

from core_plugin_muon import Muon

Layers = Sequence[tuple[int, int]]

# As (outputs, inputs): uneven and even row blocks, ranks without rows, tall, wide and square.
# The last two are large enough for other products.
LAYERS = [
    (65, 48), (48, 96), (64, 64), (1, 32), (3, 7), (2, 40), (40, 4), (259, 256), (256, 430)
]  # fmt: skip

SMALL = LAYERS[:-2]

OPTIONS = [
    {"ns_dtype": "float32"},
    {"ns_dtype": "float32", "bucket_cap_mb": 0.004},
    {"ns_dtype": "bfloat16"},
]
"""To train alike with."""


class Parts(nn.Module):
    """Linear layers, a fused one, a convolution, and experts in one parameter."""

    def __init__(self, seed: int = 0, layers: Layers = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(inputs, outputs) for outputs, inputs in layers])
        self.fused = nn.Linear(20, 24)
        self.conv = nn.Conv2d(3, 5, (3, 2))
        self.experts = nn.Parameter(torch.randn(5, 6, 9))


def in_groups(model: Parts, **options: object) -> Muon:
    matrices = [layer.weight for layer in model.layers]
    special = [model.fused.weight, model.conv.weight, model.experts]
    groups = [
        {"params": matrices[:3], "lr": 0.02},
        {"params": [p for p in model.parameters() if p.ndim == 1], "algorithm": "adamw"},
        {"params": matrices[3:], "lr": 0.01, "ns_steps": 4, "nesterov": False},
        {"params": special[:1], "split": (12, 5, 7), "adjust_lr_fn": "original"},
        {"params": special[1:2], "flatten": True, "ns_coefficients": "polar_express"},
        {"params": special[2:], "flatten": False, "adjust_lr_fn": "spectral"},
    ]
    return Muon(groups, **options)


def set_gradients(model: nn.Module, step: int) -> None:
    """The same global gradients in every process, laid out as the parameters."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements, src_data_rank=None)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(p), q), f"{name} differs from that of one process"


def sharded(seed: int = 0, mesh: DeviceMesh | None = None, layers: Layers = LAYERS) -> Parts:
    model = Parts(seed, layers)
    for layer in model.layers[:3]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def assert_trains_alike(model: Parts, **options: object) -> None:
    reference = Parts()
    run(reference, in_groups(reference, **options), range(3))
    run(model, in_groups(model, **options), range(3))
    assert_same(model, reference)


def laid_out(mesh: DeviceMesh, placements: tuple[object, ...]) -> Parts:
    """The model with its parameters of two dimensions and more laid out."""
    model = Parts()
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and p.ndim > 1:
                setattr(module, name, nn.Parameter(distribute_tensor(p, mesh, placements)))
    return model
