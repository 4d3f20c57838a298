"""What one process makes of the same networks and batches, with nothing but torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn

from core_plugin.testing.distributed.batches import ROWS, Batch, batch, loss_sum
from core_plugin.testing.distributed.loop import (
    STEPS,
    MakeOptimizer,
    Trained,
    Values,
    adamw,
    gradients,
    materializer,
    values,
)
from core_plugin.testing.distributed.networks import Network, on_meta


def alone(kind: str = "plain", seed: int = 0) -> Network:
    """A whole network, as one process has it without any strategy."""
    model = on_meta(kind)
    materializer(model, seed)(model)
    return model.train()


def backward_alone(model: nn.Module, whole: Batch) -> None:
    """The backward pass of the mean loss over the batch."""
    (loss_sum(model, whole) / whole.tokens).backward()


@functools.cache
def gradients_alone(kind: str = "plain", rows: int = ROWS, step: int = 0) -> Values:
    """The gradients of a step's batch."""
    model = alone(kind)
    backward_alone(model, batch(step, rows))
    return gradients(model)


@functools.cache
def trained_alone(
    kind: str = "plain",
    make: MakeOptimizer = adamw,
    steps: Sequence[int] = range(STEPS),
    max_norm: float | None = None,
) -> Trained:
    """What several steps give, with nothing but torch; see :meth:`Loop.train`."""
    model = alone(kind)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    norms = []
    for step in steps:
        backward_alone(model, batch(step))
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(norms, values(model))
