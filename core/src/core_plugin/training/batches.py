"""Which sample is read when, and by which rank.

The order is a function of the seed and one counter, the global position. Ranks take equal slices
of a global batch, so any number of them reads the same samples in a step, and none twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core_plugin.types.data import BaseData, Samples
from core_plugin.types.model import IGNORED

Batch = Mapping[str, Tensor]


class Batches:
    """The micro-batches of one rank.

    Args:
        data: The data plugin, which collates.
        samples: Its samples.
        seed: The run's seed.
        global_batch_size: Samples in a step, over all ranks.
        micro_batch_size: Samples in a micro-batch.
        rank: This rank.
        world_size: The number of ranks.
    """

    def __init__(
        self,
        data: type[BaseData],
        samples: Samples,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._data = data
        self._samples = samples
        self._seed = seed
        self._global = global_batch_size
        self._micro = micro_batch_size
        self._share = -(-global_batch_size // world_size)
        self._first = rank * self._share
        self._permutation = functools.lru_cache(maxsize=2)(self._permutation_of)

    def undivided(self) -> Batches:
        """The same batches, as one rank alone would read them."""
        return Batches(self._data, self._samples, self._seed, self._global, self._micro, 0, 1)

    @property
    def samples(self) -> int:
        """The number of samples in an epoch."""
        return len(self._samples)

    def sample(self, index: int) -> Batch:
        """A sample by its index in the data."""
        return self._samples[index]

    def sample_index(self, position: int) -> int:
        """The index of the sample that is read at a global position."""
        epoch, offset = divmod(position, len(self._samples))
        return int(self._permutation(epoch)[offset])

    def _permutation_of(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed((self._seed << 20) + epoch & (2**63 - 1))
        return torch.randperm(len(self._samples), generator=generator)

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step: as many on every rank, so that collectives match.

        A rank that has fewer samples than others gets ones in which nothing is supervised.
        """
        start = step * self._global
        mine = range(self._first, min(self._first + self._share, self._global))
        return [
            self._collate([start + i for i in mine[at : at + self._micro]], start)
            for at in range(0, self._share, self._micro)
        ]

    def _collate(self, positions: list[int], spare: int) -> Batch:
        if positions:
            return self._data.collate([self._samples[self.sample_index(p)] for p in positions])
        batch: dict[str, Any] = dict(self._data.collate([self._samples[self.sample_index(spare)]]))
        batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        return batch


def supervised_tokens(batches: list[Batch]) -> int:
    """The number of tokens that a loss is taken of."""
    return sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
