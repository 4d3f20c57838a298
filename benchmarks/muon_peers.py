"""The models and optimizers that ``muon.py`` compares.

All optimizers get the same hidden matrices (those that core-plugin-muon routes to Muon), gradients
and options, and their updates are equal but for rounding. What is not a hidden matrix goes to
torch's fused AdamW for each of the peers, whatever it has of its own, and to its own AdamW for
ours.

The peers have bfloat16 written into their Newton-Schulz iteration; ours takes it where the hardware
computes it, and float32 elsewhere. What they compute in is one of :data:`NUMBERS`.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import muon_fsdp2
import pytorch_optimizer
import torch
import torch.distributed as dist
from pytorch_optimizer.optimizer.muon import base as pytorch_optimizer_base
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from core_plugin.builtin.decoder import Decoder
from core_plugin_muon import Muon, route

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HIDDEN, VOCABULARY = 384, 8192
LR, ADAMW_LR, DECAY, MOMENTUM = 0.02, 3e-3, 0.1, 0.95
OWN_OPTIONS = {
    "lr": LR,
    "adamw_lr": ADAMW_LR,
    "weight_decay": DECAY,
    "momentum": MOMENTUM,
    "adjust_lr_fn": "original",
}


def llama(layers: int) -> nn.Module:
    """Seven matrices a layer: four square ones, and a SwiGLU of 1024."""
    return Decoder.build(Decoder.Params(hidden_size=HIDDEN, layers=layers, heads=6), VOCABULARY)


class GPT2Block(nn.Module):
    """The parameters of a block: a fused projection for attention, and a wide MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.c_proj = nn.Linear(HIDDEN, HIDDEN)
        self.c_fc = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.mlp_c_proj = nn.Linear(4 * HIDDEN, HIDDEN)


class GPT2(nn.Module):
    """The parameters of GPT-2, head tied; nothing here needs to compute with them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(1024, HIDDEN)
        self.h = nn.ModuleList(GPT2Block() for _ in range(layers))
        self.ln_f = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight


MODELS = {"Llama": llama, "GPT-2": GPT2}


def make_model(name: str, layers: int, strategy: str) -> nn.Module:
    """The same values everywhere; with FSDP2 each layer is sharded over all ranks."""
    torch.manual_seed(0)
    model = MODELS[name](layers)
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        (blocks,) = (m for m in model.modules() if isinstance(m, nn.ModuleList))
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh)
    return model


FLOAT32, SHIPPED = "float32", "as shipped"
WITHOUT_UNITS = "as shipped, on a CPU without bfloat16"
NUMBERS = (FLOAT32, SHIPPED, WITHOUT_UNITS)


def set_numbers(numbers: str) -> None:
    """In this process, before it computes anything, choose among :data:`NUMBERS`.

    Matrix products in bfloat16 are oneDNN's. It is held to AVX2 to be as on a CPU without units for
    bfloat16; there ours, which asks the CPU itself, would take float32.
    """
    if numbers == WITHOUT_UNITS:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    if numbers == FLOAT32:
        force_float32()
    if numbers != SHIPPED:
        OWN_OPTIONS["ns_dtype"] = "float32"


def force_float32() -> None:
    """Make the peers iterate in float32."""
    Tensor.bfloat16 = Tensor.float
    iterate = pytorch_optimizer_base.zero_power_via_newton_schulz_5
    forced = functools.partial(iterate, dtype=torch.float32)
    pytorch_optimizer_base.zero_power_via_newton_schulz_5 = forced


def hidden_and_rest(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    routes = route(model)
    kinds = ("muon", "adamw")
    return tuple([r.parameter for r in routes if r.algorithm == kind] for kind in kinds)


class Both:
    """A peer's Muon for the hidden matrices, and torch's fused AdamW for the rest."""

    def __init__(self, muon: Callable[[list[Tensor]], torch.optim.Optimizer], model: nn.Module):
        hidden, rest = hidden_and_rest(model)
        adamw = torch.optim.AdamW(
            rest, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=DECAY, fused=True
        )
        self.optimizers = [muon(hidden), adamw]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def ours(model: nn.Module) -> torch.optim.Optimizer:
    sharded = isinstance(next(model.parameters()), DTensor)
    group = dist.group.WORLD if dist.is_initialized() and not sharded else None
    return Muon.for_model(model, process_group=group, **OWN_OPTIONS)


def torchs(hidden: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(hidden, lr=LR, weight_decay=DECAY, momentum=MOMENTUM)


def pytorch_optimizers(hidden: list[Tensor]) -> torch.optim.Optimizer:
    group = {"params": hidden, "use_muon": True}
    return pytorch_optimizer.Muon([group], lr=LR, weight_decay=DECAY, momentum=MOMENTUM)


def muon_fsdp2s(hidden: list[Tensor]) -> torch.optim.Optimizer:
    group = {"params": hidden, "use_muon": True, "lr": LR, "weight_decay": DECAY}
    return muon_fsdp2.Muon([group | {"momentum": MOMENTUM, "rms_scale": False}])


class Kellers(torch.optim.Optimizer):
    """Keller Jordan's algorithm, written out (https://github.com/KellerJordan/Muon, muon.py).

    Over several ranks, as many matrices as there are ranks are stepped at a time, one by each, and
    then gathered; gloo wants those to be of one shape, so there must be as many of each.
    """

    def __init__(self, hidden: Sequence[Tensor]) -> None:
        super().__init__(sorted(hidden, key=lambda p: p.shape, reverse=True), {})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        matrices = group["params"]
        if not dist.is_initialized():
            for matrix in matrices:
                self.move(matrix)
            return
        ranks, rank = dist.get_world_size(), dist.get_rank()
        padded = matrices + [torch.empty_like(matrices[-1])] * (-len(matrices) % ranks)
        for start in range(0, len(matrices), ranks):
            if start + rank < len(matrices):
                self.move(matrices[start + rank])
            dist.all_gather(padded[start : start + ranks], padded[start + rank])

    def move(self, matrix: Tensor) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        average = state["momentum_buffer"].lerp_(matrix.grad, 1 - MOMENTUM)
        update = iterate_as_keller(matrix.grad.lerp_(average, MOMENTUM))
        update *= max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
        matrix.mul_(1 - LR * DECAY)
        matrix.add_(update, alpha=-LR)


def iterate_as_keller(matrix: Tensor, steps: int = 5) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    tall = matrix.shape[0] > matrix.shape[1]
    if tall:
        x = x.mT
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = b * gram + c * gram @ gram
        x = a * x + polynomial @ x
    return x.mT if tall else x


def both(muon: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[nn.Module], Both]:
    return functools.partial(Both, muon)


OURS, TORCH = "core-plugin-muon", "torch.optim.Muon"
PEERS = {
    "none": {
        OURS: ours,
        TORCH: both(torchs),
        "Keller Jordan's": both(Kellers),
        "pytorch-optimizer": both(pytorch_optimizers),
    },
    "ddp": {OURS: ours, TORCH: both(torchs), "Keller Jordan's": both(Kellers)},
    "fsdp2": {OURS: ours, TORCH: both(torchs), "muon-fsdp2": both(muon_fsdp2s)},
}
