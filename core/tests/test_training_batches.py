"""Which samples are read: by any number of ranks the same, each once an epoch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from core_plugin.training.batches import Batches, supervised_tokens
from core_plugin.types import BaseData
from core_plugin.types.model import IGNORED


class Data(BaseData):
    @staticmethod
    def tokenizer(params):
        raise NotImplementedError

    @staticmethod
    def load(params, tokenizer):
        raise NotImplementedError


class Samples:
    """Sample ``i`` is the one token ``i``."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([index]), "labels": torch.tensor([index])}


def read(count: int, size: int, micro: int, world_size: int, step: int, seed: int = 0):
    """What each rank reads in a step: a list of micro-batches of supervised samples."""
    ranks = [
        Batches(Data, Samples(count), seed, size, micro, rank, world_size).step(step)
        for rank in range(world_size)
    ]
    return ranks, [
        label
        for batches in ranks
        for batch in batches
        for label in batch["labels"].flatten().tolist()
        if label != IGNORED
    ]


sizes = st.integers(1, 9)


@given(count=st.integers(1, 20), size=sizes, micro=sizes, world_size=sizes, step=sizes)
def test_any_number_of_ranks_reads_the_same_samples_in_order(count, size, micro, world_size, step):
    _, alone = read(count, size, size, 1, step)
    ranks, together = read(count, size, micro, world_size, step)
    assert together == alone
    assert len(alone) == size
    assert len({len(batches) for batches in ranks}) == 1
    assert max(len(b["labels"]) for batches in ranks for b in batches) <= micro


@given(count=st.integers(1, 30), size=sizes, world_size=sizes, epochs=st.integers(1, 3))
def test_every_sample_is_read_once_an_epoch(count, size, world_size, epochs):
    steps = -(-count * epochs // size)
    order = [label for step in range(steps) for label in read(count, size, 2, world_size, step)[1]]
    for epoch in range(epochs):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_and_seeds_are_shuffled_differently():
    epochs = [read(50, 50, 50, 1, step)[1] for step in range(3)]
    other = read(50, 50, 50, 1, 0, seed=1)[1]
    assert len({tuple(order) for order in [*epochs, other, list(range(50))]}) == 5


def test_supervised_tokens_are_those_with_a_label():
    labels = torch.tensor([[1, IGNORED], [IGNORED, 2]])
    assert supervised_tokens([{"labels": labels}, {"labels": labels[:1]}]) == 3
