"""Factors that are made from a layer's weight, or from each other."""

from __future__ import annotations

import torch
from torch import Tensor


def principal(weight: Tensor, rank: int, scaling: float, init: str) -> tuple[Tensor, Tensor]:
    """A and B with ``scaling · B A`` the part of a weight that an initialisation trains.

    Args:
        weight: ``[out, in]``; all is computed in float32, or in its float64.
        rank: At most the smaller of the weight's dimensions.
        scaling: The adapter's.
        init: ``olora``, ``pissa`` or ``pissa_niter_<iterations>``.

    Returns:
        ``A [rank, in]``, ``B [out, rank]``.
    """
    weight = weight if weight.dtype == torch.float64 else weight.float()
    if init == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank], q[:, :rank]
    u, s, vh = _svd(weight, rank, init)
    root = (s[:rank] / scaling).sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root


def _svd(weight: Tensor, rank: int, init: str) -> tuple[Tensor, Tensor, Tensor]:
    _, _, iterations = init.partition("_niter_")
    if not iterations:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        return u, s, vh
    devices = [] if weight.device.type == "cpu" else [weight.device]
    # The same approximation whenever the adapter is made: its file holds no weight of the base.
    with torch.random.fork_rng(devices, device_type=weight.device.type):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(weight, rank, int(iterations))
    return u, s, v.mT


def orthogonal(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Random A and B whose product is zero, like the given ones in all but the values.

    Each has half of the rows of a random rotation within it:
    https://datta0.github.io/posts/rethink-lora-init/.
    """
    rank = len(down)
    # All ranks of a sharded model have the same factors here, and so they draw the same.
    generator = torch.Generator(down.device).manual_seed(int(down.double().abs().sum() * 2**20))
    rotation, _ = torch.linalg.qr(down.new_empty(rank, rank).normal_(generator=generator))
    random_down = down.new_empty(down.shape[1], rank // 2).normal_(std=0.1, generator=generator)
    random_up = up.new_empty(len(up), rank // 2).normal_(std=0.1, generator=generator)
    return (random_down @ rotation[0::2]).t(), random_up @ rotation[1::2]
