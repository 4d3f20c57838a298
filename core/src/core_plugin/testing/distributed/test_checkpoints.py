"""What is saved is loaded: by the same strategy, by another one, and by torch alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from core_plugin.builtin.single import Single
from core_plugin.contract import NoParams
from core_plugin.state import OPTIMIZER_FILE
from core_plugin.testing.checks import assert_all_same, assert_same
from core_plugin.testing.distributed.batches import batch
from core_plugin.testing.distributed.checkpoints import (
    fresh,
    load,
    optimizer_values,
    read_with_torch,
    save,
    trained,
    write_with_torch,
)
from core_plugin.testing.distributed.loop import Loop, MakeOptimizer, adamw, sgd
from core_plugin.testing.distributed.worlds import worlds

pytestmark = pytest.mark.level(3)

EACH_OPTIMIZER = pytest.mark.parametrize("make", [adamw, sgd], ids=["adamw", "sgd"])


def _single(loop: Loop) -> Loop:
    """The strategy of one process, on every rank with the whole batch."""
    return Loop(Single, NoParams(), 0, 1)


@pytest.mark.parametrize("kind", ["frozen", "two_dtypes"])
@worlds(1, 2)
def test_all_values_come_back(loop: Loop, directory: Path, kind: str, world_size: int) -> None:
    """Parameters, persistent buffers and the optimizer's tensors come back bit for bit."""
    model, optimizer = trained(loop, kind)
    save(loop, model, optimizer, directory)
    again, resumed = fresh(loop, kind)
    load(loop, again, resumed, directory)
    assert_all_same(loop.values(again), loop.values(model))
    expected = optimizer_values(loop, model, optimizer)
    assert expected, "the optimizer has no state"
    assert_all_same(optimizer_values(loop, again, resumed), expected)


@EACH_OPTIMIZER
@worlds(1, 2)
def test_training_goes_on_exactly(
    loop: Loop, directory: Path, make: MakeOptimizer, world_size: int
) -> None:
    """After loading, steps give the very values that they give without an interruption."""
    model, optimizer = trained(loop, make=make)
    save(loop, model, optimizer, directory)
    again, resumed = fresh(loop, make=make)
    load(loop, again, resumed, directory)
    for step in (2, 3):
        norm = loop.step(model, optimizer, batch(step), 1.0)
        assert loop.step(again, resumed, batch(step), 1.0) == norm
    assert_all_same(loop.values(again), loop.values(model))


@worlds(1, 2)
def test_the_optimizers_options_come_back(loop: Loop, directory: Path, world_size: int) -> None:
    """What an optimizer's groups say, such as the learning rate of the step, comes back."""
    model, optimizer = trained(loop)
    optimizer.param_groups[0]["lr"] = 0.125
    save(loop, model, optimizer, directory)
    again, resumed = fresh(loop)
    load(loop, again, resumed, directory)
    assert resumed.param_groups[0]["lr"] == 0.125
    assert resumed.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]


@worlds(2)
def test_loading_into_a_model_that_was_trained(
    loop: Loop, directory: Path, world_size: int
) -> None:
    """A checkpoint from before the first step takes back what steps have changed."""
    model, optimizer = fresh(loop)
    before = loop.values(model)
    save(loop, model, optimizer, directory)
    loop.step(model, optimizer, batch())
    load(loop, model, optimizer, directory)
    assert_all_same(loop.values(model), before)


@worlds(2)
def test_tied_weights_are_loaded_once(loop: Loop, directory: Path, world_size: int) -> None:
    """A weight in two places is one in the file, and is one after loading."""
    save(loop, *trained(loop, "tied"), directory)
    assert "model.head.weight" not in read_with_torch(directory)
    again, resumed = fresh(loop, "tied")
    load(loop, again, resumed, directory)
    unwrapped = loop.unwrapped(again)
    assert unwrapped.head.weight is unwrapped.embedding.weight


@pytest.mark.parametrize("kind", ["tied", "two_dtypes"])
@worlds(2)
def test_the_strategy_of_one_process_reads_it(
    loop: Loop, directory: Path, kind: str, world_size: int
) -> None:
    """What the strategy saves, the built-in strategy ``none`` loads."""
    model, optimizer = trained(loop, kind)
    save(loop, model, optimizer, directory)
    single = _single(loop)
    again, resumed = fresh(single, kind)
    load(single, again, resumed, directory)
    assert_all_same(single.values(again), loop.values(model))
    expected = optimizer_values(loop, model, optimizer)
    assert_all_same(optimizer_values(single, again, resumed), expected)


@pytest.mark.parametrize("kind", ["tied", "two_dtypes"])
@worlds(2)
def test_it_reads_the_strategy_of_one_process(
    loop: Loop, directory: Path, kind: str, world_size: int
) -> None:
    """What the built-in strategy ``none`` saves, the strategy loads."""
    single = _single(loop)
    model, optimizer = trained(single, kind)
    if loop.rank == 0:
        directory.mkdir(exist_ok=True)
    dist.barrier()
    save(single, model, optimizer, directory)
    again, resumed = fresh(loop, kind)
    load(loop, again, resumed, directory)
    assert_all_same(loop.values(again), single.values(model))
    expected = optimizer_values(single, model, optimizer)
    assert_all_same(optimizer_values(loop, again, resumed), expected)


@worlds(1, 2)
def test_torch_reads_it(loop: Loop, directory: Path, world_size: int) -> None:
    """Torch's distributed checkpoint has whole tensors, as ``model.<name>`` and the optimizer's."""
    model, optimizer = trained(loop)
    save(loop, model, optimizer, directory)
    expected = {f"model.{name}": value for name, value in loop.values(model).items()}
    held = optimizer_values(loop, model, optimizer)
    expected |= {f"optimizer.{name}": value for name, value in held.items()}
    assert_all_same(read_with_torch(directory), expected)
    assert (directory / OPTIMIZER_FILE).is_file()


@worlds(2)
def test_it_reads_torchs(loop: Loop, directory: Path, world_size: int) -> None:
    """A checkpoint that torch alone has written in one process is loaded."""
    model, optimizer = trained(loop)
    save(loop, model, optimizer, directory / "own")
    if loop.rank == 0:
        found = read_with_torch(directory / "own")
        write_with_torch(directory / "torchs", found, directory / "own" / OPTIMIZER_FILE)
    dist.barrier()
    again, resumed = fresh(loop)
    load(loop, again, resumed, directory / "torchs")
    assert_all_same(loop.values(again), loop.values(model))
    expected = optimizer_values(loop, model, optimizer)
    assert_all_same(optimizer_values(loop, again, resumed), expected)


@worlds(1, 2)
def test_frozen_parameters_are_left_out(loop: Loop, directory: Path, world_size: int) -> None:
    """Without ``include_frozen`` frozen parameters are neither saved nor loaded."""
    model, optimizer = trained(loop, "adapted")
    save(loop, model, optimizer, directory, include_frozen=False)
    frozen = {n for n, p in loop.unwrapped(model).named_parameters() if not p.requires_grad}
    there = {name.removeprefix("model.") for name in read_with_torch(directory)}
    assert not there & frozen, f"frozen, and in the checkpoint: {sorted(there & frozen)}"
    again, resumed = fresh(loop, "adapted")
    before = loop.values(again)
    load(loop, again, resumed, directory, include_frozen=False)
    expected = loop.values(model)
    for name, value in loop.values(again).items():
        assert_same(value, (before if name in frozen else expected)[name], name)
