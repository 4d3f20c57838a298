"""``stage_checkpoint``: what was to be saved is saved later, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from core_plugin.testing.checks import assert_all_same
from core_plugin.testing.distributed.batches import batch
from core_plugin.testing.distributed.checkpoints import (
    fresh,
    load,
    optimizer_values,
    read_with_torch,
    save,
    trained,
)
from core_plugin.testing.distributed.collectives import Collectives
from core_plugin.testing.distributed.loop import Loop
from core_plugin.testing.distributed.subject import PATIENCE
from core_plugin.testing.distributed.worlds import worlds

pytestmark = pytest.mark.level(3)


def _in_a_thread(write: Callable[[Path, dist.ProcessGroup | None], None], directory: Path) -> None:
    """Write what was staged as a run does: in a thread, over a group of its own."""
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(write, directory, group).result()
    dist.barrier()


@pytest.mark.parametrize("kind", ["two_dtypes"])
@worlds(1, 2)
def test_the_values_are_those_of_before(
    loop: Loop, directory: Path, kind: str, world_size: int
) -> None:
    """What is written holds the values of the moment when it was staged."""
    model, optimizer = trained(loop, kind)
    expected, held = loop.values(model), optimizer_values(loop, model, optimizer)
    write = loop.strategy.stage_checkpoint(model, optimizer, include_frozen=True)
    for step in (2, 3):
        loop.step(model, optimizer, batch(step))
    optimizer.param_groups[0]["lr"] = 0.5
    _in_a_thread(write, directory)
    again, resumed = fresh(loop, kind)
    load(loop, again, resumed, directory)
    assert_all_same(loop.values(again), expected)
    assert_all_same(optimizer_values(loop, again, resumed), held)
    assert resumed.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("include_frozen", [True, False])
@worlds(2)
def test_it_is_what_would_have_been_saved(
    loop: Loop, directory: Path, include_frozen: bool, world_size: int
) -> None:
    """What is written has the tensors that ``save_checkpoint`` writes."""
    model, optimizer = trained(loop, "frozen")
    save(loop, model, optimizer, directory / "saved", include_frozen)
    if loop.rank == 0:
        (directory / "staged").mkdir()
    write = loop.strategy.stage_checkpoint(model, optimizer, include_frozen=include_frozen)
    _in_a_thread(write, directory / "staged")
    staged, saved = (read_with_torch(directory / name) for name in ("staged", "saved"))
    assert_all_same(staged, saved)


@worlds(2)
def test_training_goes_on_while_it_is_written(loop: Loop, directory: Path, world_size: int) -> None:
    """Steps on all ranks while it is written give what they give without it."""
    model, optimizer = trained(loop)
    other, others_optimizer = trained(loop)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    write = loop.strategy.stage_checkpoint(model, optimizer, include_frozen=True)
    with ThreadPoolExecutor(1) as executor:
        writing = executor.submit(write, directory, group)
        for step in range(2, 6):
            loop.step(model, optimizer, batch(step), 1.0)
        writing.result()
    for step in range(2, 6):
        loop.step(other, others_optimizer, batch(step), 1.0)
    assert_all_same(loop.values(model), loop.values(other))


@worlds(2)
def test_it_exchanges_over_its_group_alone(loop: Loop, directory: Path, world_size: int) -> None:
    """Writing exchanges nothing over the group that training uses."""
    model, optimizer = trained(loop)
    write = loop.strategy.stage_checkpoint(model, optimizer, include_frozen=True)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    with Collectives(without=group) as exchanged, ThreadPoolExecutor(1) as executor:
        executor.submit(write, directory, group).result()
    assert not exchanged.total, f"{exchanged.total} collectives on other groups"
