"""Checkpoints that do not fit: an error that says so, after which nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core_plugin.errors import CheckpointError
from core_plugin.state import OPTIMIZER_FILE
from core_plugin.testing.checks import assert_all_same
from core_plugin.testing.distributed.batches import batch
from core_plugin.testing.distributed.checkpoints import (
    load,
    optimizer_values,
    read_with_torch,
    save,
    trained,
    write_with_torch,
)
from core_plugin.testing.distributed.loop import Loop, sgd
from core_plugin.testing.distributed.worlds import worlds

pytestmark = pytest.mark.level(3)

Change = Callable[[dict[str, Tensor]], object]

FAULTS: dict[str, tuple[Change, str]] = {
    "a missing tensor": (lambda t: t.pop("model.head.weight"), "head.weight"),
    "a missing buffer": (lambda t: t.pop("model.positions.strength"), "positions.strength"),
    "an extra tensor": (lambda t: t.update({"model.tail": torch.zeros(2)}), "tail"),
    "another shape": (lambda t: t.update({"model.head.weight": torch.zeros(2, 3)}), "head.weight"),
    "a missing state": (
        lambda t: t.pop("optimizer.head.weight.momentum_buffer"),
        "head.weight.momentum_buffer",
    ),
}
"""What is done to the tensors, and what the error names."""


@worlds(1, 2)
def test_what_does_not_fit_changes_nothing(loop: Loop, directory: Path, world_size: int) -> None:
    """A missing or extra tensor, or another shape, is an error that names it; nothing changes."""
    model, optimizer = trained(loop, make=sgd)
    save(loop, model, optimizer, directory / "whole")
    loop.step(model, optimizer, batch(2))
    before, held = loop.values(model), optimizer_values(loop, model, optimizer)
    whole = read_with_torch(directory / "whole")
    for fault, (change, named) in FAULTS.items():
        if loop.rank == 0:
            found = dict(whole)
            change(found)
            write_with_torch(directory / fault, found, directory / "whole" / OPTIMIZER_FILE)
        dist.barrier()
        with pytest.raises(CheckpointError, match=named):
            load(loop, model, optimizer, directory / fault)
        assert_all_same(loop.values(model), before)
        assert_all_same(optimizer_values(loop, model, optimizer), held)


@worlds(2)
def test_frozen_parameters_that_were_left_out_are_missing(
    loop: Loop, directory: Path, world_size: int
) -> None:
    """A checkpoint without frozen parameters is none of a run that wants them."""
    model, optimizer = trained(loop, "frozen")
    save(loop, model, optimizer, directory, include_frozen=False)
    with pytest.raises(CheckpointError, match=r"embedding\.weight"):
        load(loop, model, optimizer, directory, include_frozen=True)


@worlds(2)
def test_after_an_error_training_goes_on(loop: Loop, directory: Path, world_size: int) -> None:
    """After such an error on all ranks the model can be trained and saved."""
    model, optimizer = trained(loop)
    save(loop, *trained(loop, "wider"), directory / "wider")
    with pytest.raises(CheckpointError):
        load(loop, model, optimizer, directory / "wider")
    loop.step(model, optimizer, batch(2))
    save(loop, model, optimizer, directory / "own")
    load(loop, model, optimizer, directory / "own")
