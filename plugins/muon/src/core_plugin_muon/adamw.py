"""AdamW on what a rank holds of its parameters, the same to the bit however they were cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw

_TILE = 64
"""Elements. torch's fused kernel for CPUs goes through a tensor in vectors, and rounds otherwise in
what is left at the end; whatever vectors a CPU has, a tile is a number of them."""


def step_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    options: Mapping[str, Any],
) -> None:
    """Take a step of `torch.optim.AdamW` in place.

    Args:
        parameters: tensors of this rank's memory, all on one device.
        gradients: of the parameters' shapes.
        states: `step`, `exp_avg` and `exp_avg_sq` of each, the latter two of its shape.
        options: `lr`, `betas`, `eps` and `weight_decay`.
    """
    rows = [
        [parameter, gradient.to(state["exp_avg"].dtype), state["exp_avg"], state["exp_avg_sq"]]
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True)
    ]
    steps = [state["step"] for state in states]
    fused = all(t.is_cpu and t.is_contiguous() and not t.is_complex() for row in rows for t in row)
    if fused:
        _adamw_in_tiles(rows, steps, options)
    else:
        _adamw(rows, steps, options, fused=None)


def _adamw_in_tiles(
    rows: Sequence[list[Tensor]], steps: Sequence[Tensor], options: Mapping[str, Any]
) -> None:
    """The fused kernel, with the end of each tensor in a tile of its own, filled up with zeros."""
    pieces, counters, filled = [], [], []
    for row, step in zip(rows, steps, strict=True):
        count = row[0].numel()
        rest = count % _TILE
        if not rest:
            pieces.append(row)
            counters.append(step)
            continue
        flat = [tensor.view(-1) for tensor in row]
        if count > rest:
            pieces.append([tensor[:-rest] for tensor in flat])
            counters.append(step.clone())  # each piece counts
        end = [tensor[-rest:] for tensor in flat]
        pieces.append([pad(tensor, (0, _TILE - rest)) for tensor in end])
        counters.append(step)
        filled.append((end, pieces[-1]))
    _adamw(pieces, counters, options, fused=True)
    for end, outcome in filled:
        for changed in (0, 2, 3):
            end[changed].copy_(outcome[changed][: len(end[changed])])


def _adamw(
    rows: Sequence[Sequence[Tensor]],
    steps: list[Tensor],
    options: Mapping[str, Any],
    *,
    fused: bool | None,
) -> None:
    parameters, gradients, averages, squares = ([row[n] for row in rows] for n in range(4))
    adamw(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        fused=fused,
        has_complex=any(map(torch.is_complex, parameters)),
        amsgrad=False,
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )
