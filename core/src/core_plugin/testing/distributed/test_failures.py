"""One rank fails: the others end as well, in time, and nothing half-written passes for whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from core_plugin.errors import ConfigError
from core_plugin.testing.checks import assert_all_same
from core_plugin.testing.children import RAISED, RETURNED, exit_code_of_fork
from core_plugin.testing.distributed.batches import batch
from core_plugin.testing.distributed.checkpoints import (
    fresh,
    load,
    save,
    trained,
)
from core_plugin.testing.distributed.loop import Loop, materializer
from core_plugin.testing.distributed.networks import on_meta
from core_plugin.testing.distributed.subject import join

RANKS = 2
FAILING = 1
"""The rank that fails. It ends then, as in a run; the others lose contact if they wait for it."""

pytestmark = [
    pytest.mark.level(3),
    pytest.mark.only("several"),
    pytest.mark.ranks(RANKS),
    pytest.mark.fresh,
    pytest.mark.timeout_s(60.0),
]


def _ends(loop: Loop, directory: Path, function: Callable[[], object]) -> int | None:
    """How a process of each rank ends that runs a function in a group, if it does in time."""

    def run() -> None:
        join(dist.FileStore(str(directory / "group"), RANKS), loop.rank, RANKS)
        function()

    code = exit_code_of_fork(run, seconds=40)
    assert code is not None, f"rank {loop.rank} does not end when rank {FAILING} has failed"
    assert code in (RETURNED, RAISED), f"rank {loop.rank} ended with {code}"
    return code


def _fail(part: nn.Module) -> None:
    raise ConfigError("the weights do not fit the model")


def test_materialising_fails_on_one_rank(loop: Loop, directory: Path) -> None:
    """An error in materialising leaves ``shard_model`` as it is, and the other rank ends."""

    def shard() -> None:
        model = on_meta("plain")
        if loop.rank != FAILING:
            loop.shard(model, materializer(model))
            return
        try:
            loop.shard(model, _fail)
        except ConfigError as error:
            raise RuntimeError("this rank ends") from error
        raise AssertionError("no error left shard_model")

    code = _ends(loop, directory, shard)
    assert loop.rank != FAILING or code == RAISED


def test_backward_fails_on_one_rank(loop: Loop, directory: Path) -> None:
    """An error in a step of one rank ends the other, which waits for its gradients."""

    def step() -> None:
        model, optimizer = trained(loop)
        if loop.rank == FAILING:
            raise RuntimeError("this rank ends")
        loop.step(model, optimizer, batch())

    assert _ends(loop, directory, step) == RAISED, "a rank went on with its own gradients"


def test_saving_fails_on_one_rank(loop: Loop, directory: Path) -> None:
    """If one rank cannot write, saving is no success, unless all was written without it."""
    (directory / "good").mkdir(exist_ok=True)
    (directory / "no folder").touch()

    def write() -> None:
        model, optimizer = trained(loop)
        place = directory / ("no folder/bad" if loop.rank == FAILING else "good")
        loop.strategy.save_checkpoint(model, optimizer, place, include_frozen=True)

    def read() -> None:
        model, _ = trained(loop)
        again, resumed = fresh(loop)
        load(loop, again, resumed, directory / "good")
        assert_all_same(loop.values(again), loop.values(model))

    written = _ends(loop, directory, write)
    (directory / f"rank-{loop.rank}-{written}").touch()
    _meet(loop, directory)
    if all((directory / f"rank-{rank}-{RETURNED}").exists() for rank in range(RANKS)):
        (directory / "group").unlink(missing_ok=True)
        assert _ends(loop, directory, read) == RETURNED, "what was saved is not whole"


def _meet(loop: Loop, directory: Path) -> None:
    store = dist.FileStore(str(directory / "meeting"), RANKS)
    store.set(str(loop.rank), "")
    store.wait([str(rank) for rank in range(RANKS)])


def test_after_a_failed_save_another_succeeds(loop: Loop, directory: Path) -> None:
    """If all ranks fail to save, for want of a directory, they can save into another one."""
    (directory / "no folder").touch()

    def write() -> None:
        model, optimizer = trained(loop)
        with pytest.raises(Exception):  # noqa: B017, PT011 (an OSError, or torch's own of all)
            loop.strategy.save_checkpoint(
                model, optimizer, directory / "no folder" / "bad", include_frozen=True
            )
        save(loop, model, optimizer, directory / "good")
        load(loop, model, optimizer, directory / "good")

    assert _ends(loop, directory, write) == RETURNED
