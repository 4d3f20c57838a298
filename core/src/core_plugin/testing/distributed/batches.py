"""The batches of a step, and each rank's share of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core_plugin.testing.distributed.networks import SEQUENCE, VOCABULARY
from core_plugin.types.model import IGNORED

ROWS = 12
"""The rows of a step's batch, which 1 to 4 ranks share evenly."""


@dataclass(frozen=True)
class Batch:
    """Token ids and labels, both ``[rows, sequence]``."""

    ids: Tensor
    labels: Tensor

    @property
    def tokens(self) -> int:
        """The number of tokens that a loss is taken of."""
        return int((self.labels != IGNORED).sum())

    def rows(self, start: int, stop: int) -> Batch:
        """A part of it."""
        return Batch(self.ids[start:stop], self.labels[start:stop])

    def unsupervised(self) -> Batch:
        """The same tokens without a label."""
        return Batch(self.ids, torch.full_like(self.labels, IGNORED))


def batch(step: int = 0, rows: int = ROWS) -> Batch:
    """A step's batch, always the same; its rows have 1 to 5 labels, which repeat."""
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(0, VOCABULARY, (2, rows, SEQUENCE), generator=generator)
    for row in range(rows):
        labels[row, row % SEQUENCE + 1 :] = IGNORED
    return Batch(ids, labels)


def share(whole: Batch, rank: int, world_size: int, micro_batch_size: int) -> list[Batch]:
    """A rank's micro-batches: as many on every rank, as in a run.

    A rank that has fewer rows than others gets micro-batches in which nothing is supervised.
    """
    rows = len(whole.ids)
    most = -(-rows // world_size)
    start, end = rank * most, min((rank + 1) * most, rows)
    spare = whole.rows(0, 1).unsupervised()
    return [
        whole.rows(at, min(at + micro_batch_size, end)) if at < end else spare
        for at in range(start, start + most, micro_batch_size)
    ]


def loss_sum(model: nn.Module, part: Batch) -> Tensor:
    """The sum of the losses of the supervised tokens."""
    logits = model(part.ids).flatten(0, 1)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits, part.labels.flatten(), reduction="sum", ignore_index=IGNORED)
