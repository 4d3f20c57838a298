"""Other numbers of ranks: what 1 to 4 of them save, 1 to 4 of them load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core_plugin.testing.checks import assert_all_same, assert_near
from core_plugin.testing.distributed.alone import trained_alone
from core_plugin.testing.distributed.batches import batch
from core_plugin.testing.distributed.checkpoints import (
    fresh,
    load,
    optimizer_values,
    save,
    trained,
)
from core_plugin.testing.distributed.loop import Loop
from core_plugin.testing.distributed.subject import PATIENCE, join
from core_plugin.testing.processes import NotHereError

pytestmark = pytest.mark.level(3)

KIND = "tied"
RANKS = 4
EXPECTED = "expected.pt"


@contextmanager
def _world(loop: Loop, size: int, place: Path) -> Iterator[Loop]:
    """A group of the first ranks."""
    join(dist.FileStore(str(place), size), loop.rank, size)
    try:
        yield Loop(loop.strategy, loop.params, loop.rank, size)
    finally:
        dist.destroy_process_group()


def _on_each_size(loop: Loop, place: Path, action: Callable[[Loop], None]) -> None:
    """Do something on 1, 2, 3 and 4 ranks, one after the other, where the parameters fit."""
    for size in range(1, RANKS + 1):
        if loop.rank < size:
            with _world(loop, size, place / f"group-{size}") as world:
                if _fits(world):
                    action(world)
        store = dist.FileStore(str(place / f"end-{size}"), RANKS)
        store.set(str(loop.rank), "")
        store.wait([str(rank) for rank in range(RANKS)], PATIENCE)


def _fits(world: Loop) -> bool:
    try:
        return world.mesh is None or world.mesh.size() == world.world_size
    except NotHereError:
        return False


def _save(world: Loop, directory: Path) -> None:
    model, optimizer = trained(world, KIND)
    expected = world.values(model), optimizer_values(world, model, optimizer)
    save(world, model, optimizer, directory)
    if world.rank == 0:
        torch.save(expected, directory / EXPECTED)


def _load_each(world: Loop, saved: Path) -> None:
    model, optimizer = fresh(world, KIND)
    for directory in sorted(saved.iterdir()):
        load(world, model, optimizer, directory)
        values, held = torch.load(directory / EXPECTED)
        assert_all_same(world.values(model), values)
        assert_all_same(optimizer_values(world, model, optimizer), held)
    world.step(model, optimizer, batch(2))
    expected = trained_alone(KIND).values
    for name, value in world.values(model).items():
        assert_near(value, expected[name], 1e-6, name)


@pytest.mark.only("several")
@pytest.mark.ranks(RANKS)
@pytest.mark.fresh
@pytest.mark.timeout_s(60.0)
def test_any_number_of_ranks_loads_what_any_saved(loop: Loop, directory: Path) -> None:
    """What 1 to 4 ranks saved comes back bit for bit on 1 to 4, and training goes on alike."""
    places = [directory / name for name in ("saving", "loading", "saved")]
    for place in places:
        place.mkdir(exist_ok=True)
    saving, loading, saved = places

    _on_each_size(loop, saving, lambda world: _save(world, saved / str(world.world_size)))
    if not list(saved.iterdir()):
        raise NotHereError(f"the parameters fit none of 1 to {RANKS} ranks")
    _on_each_size(loop, loading, lambda world: _load_each(world, saved))
