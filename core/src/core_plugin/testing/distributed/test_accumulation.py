"""Micro-batches: they are one batch, and gradients are exchanged in the last one alone."""

from __future__ import annotations

import pytest
from torch import nn

from core_plugin.testing.checks import assert_near
from core_plugin.testing.distributed.alone import alone, gradients_alone
from core_plugin.testing.distributed.batches import Batch, batch, loss_sum, share
from core_plugin.testing.distributed.collectives import Collectives
from core_plugin.testing.distributed.loop import Loop, gradients, sgd
from core_plugin.testing.distributed.worlds import worlds

pytestmark = pytest.mark.level(2)


@pytest.mark.parametrize("size", [1, 4])
@worlds(1, 2)
def test_micro_batches_are_one_batch(loop: Loop, size: int, world_size: int) -> None:
    """The gradients of micro-batches of any size are those of the batch."""
    model = loop.model()
    loop.backward(model, batch(), micro_batch_size=size)
    for name, gradient in gradients_alone().items():
        assert_near(loop.gradients(model)[name], gradient, 1e-6, name)


@worlds(2)
def test_several_steps_of_micro_batches(loop: Loop, world_size: int) -> None:
    """Steps of several micro-batches, one after the other, give what steps of one give."""
    whole, divided = loop.model(), loop.model()
    for model, size in ((whole, None), (divided, 2)):
        optimizer = loop.optimizer(model, sgd)
        for step in range(3):
            loop.step(model, optimizer, batch(step), micro_batch_size=size)
    expected = loop.values(whole)
    for name, value in loop.values(divided).items():
        assert_near(value, expected[name], 1e-6, name)


def _parts(loop: Loop, whole: Batch, size: int) -> list[Batch]:
    return share(whole, loop.rank, loop.world_size, size)


def _warm(loop: Loop, kind: str = "plain") -> nn.Module:
    """A model that has taken steps, since the first ones may exchange more."""
    model = loop.model(kind)
    loop.train(model, sgd, steps=(0, 1))
    return model


@worlds(2)
def test_gradients_wait_for_the_last_micro_batch(loop: Loop, world_size: int) -> None:
    """Before the last micro-batch nothing is reduced; where all is whole, nothing is exchanged."""
    model = _warm(loop)
    first, *others = _parts(loop, batch(), 2)
    loop.micro_step(model, first, 1.0, last=False)
    with Collectives() as exchanged:
        for part in others[:-1] or [first]:
            loop.micro_step(model, part, 1.0, last=False)
    assert not exchanged.reductions, f"exchanged early: {', '.join(exchanged.reductions)}"
    if not loop.strategy.capabilities.sharded_state:
        assert not exchanged.total, f"{exchanged.total} collectives: {', '.join(exchanged.names)}"
    with Collectives() as exchanged:
        loop.micro_step(model, others[-1], 1.0, last=True)
    assert exchanged.reductions, "gradients are not exchanged"


def _counted(loop: Loop, model: nn.Module, size: int) -> Collectives:
    """What a step of micro-batches of a size exchanges, after one of the same kind."""
    optimizer = loop.optimizer(model, sgd)
    loop.step(model, optimizer, batch(), 1.0, size)
    with Collectives() as exchanged:
        loop.step(model, optimizer, batch(), 1.0, size)
    return exchanged


@worlds(2)
def test_a_steps_reductions_do_not_grow(loop: Loop, world_size: int) -> None:
    """A step reduces as often with many micro-batches as with one."""
    model = _warm(loop)
    one, many = (_counted(loop, model, size) for size in (12, 1))
    assert len(one.reductions) == len(many.reductions), f"{one.names} and {many.names}"
    if not loop.strategy.capabilities.sharded_state:
        assert one.total == many.total, f"{one.names} and {many.names}"


@worlds(2)
def test_frozen_parameters_are_not_reduced(loop: Loop, world_size: int) -> None:
    """A gradient of what is frozen is not exchanged: a smaller sum of bytes goes over the group."""
    trained = {}
    for kind in ("plain", "frozen"):
        model = _warm(loop, kind)
        with Collectives() as exchanged:
            loop.step(model, loop.optimizer(model, sgd), batch())
        trained[kind] = exchanged.reduced
    assert trained["frozen"] < trained["plain"], f"{trained} elements"


@worlds(2)
def test_skipped_gradients_are_this_ranks_own(loop: Loop, world_size: int) -> None:
    """What is kept until the last micro-batch is added up on the rank, and then exchanged."""
    model, whole = loop.model(), batch()
    (part,) = share(whole, loop.rank, world_size, len(whole.ids))
    for last in (False, False, True):
        loop.micro_step(model, part, loop.divisor, last)
    expected = alone()
    (3 * loss_sum(expected, whole)).backward()
    for name, gradient in gradients(expected).items():
        assert_near(loop.gradients(model)[name], gradient, 1e-6, name)


@worlds(2)
def test_zeroed_gradients_begin_anew(loop: Loop, world_size: int) -> None:
    """After a step whose gradients were not used, the next ones are those of its batch alone."""
    model = loop.model()
    loop.backward(model, batch(1), micro_batch_size=2)
    for parameter in model.parameters():
        parameter.grad = None
    loop.backward(model, batch(2), micro_batch_size=2)
    for name, gradient in gradients_alone(step=2).items():
        assert_near(loop.gradients(model)[name], gradient, 1e-6, name)
