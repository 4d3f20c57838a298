"""Clipping: by the norm of all gradients, which every rank knows."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from core_plugin.testing.checks import assert_near, assert_same
from core_plugin.testing.distributed.alone import alone, backward_alone
from core_plugin.testing.distributed.batches import batch
from core_plugin.testing.distributed.loop import MAX_NORM, Loop, Values, gathered, gradients
from core_plugin.testing.distributed.worlds import worlds

pytestmark = pytest.mark.level(2)


def _model(loop: Loop, kind: str = "plain") -> nn.Module:
    """A model with gradients."""
    model = loop.model(kind)
    loop.backward(model, batch())
    return model


@functools.cache
def _clipped_alone(kind: str = "plain") -> tuple[float, Values]:
    model = alone(kind)
    backward_alone(model, batch())
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return float(norm), gradients(model)


@pytest.mark.parametrize("kind", ["tied", "frozen"])
@worlds(1, 2)
def test_the_norm_is_that_of_one_process(loop: Loop, kind: str, world_size: int) -> None:
    """The norm is that of all gradients of the whole model, and they are scaled to the limit."""
    model = _model(loop, kind)
    norm = loop.strategy.clip_grad_norm(model, MAX_NORM)
    expected, clipped = _clipped_alone(kind)
    assert norm.ndim == 0
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    for name, gradient in loop.gradients(model).items():
        assert_near(gradient, clipped[name], 1e-4, name)


@worlds(3)
def test_the_norm_is_one_on_all_ranks(loop: Loop, world_size: int) -> None:
    """Every rank gets the same norm, bit for bit, and no part of one."""
    norm = loop.strategy.clip_grad_norm(_model(loop), MAX_NORM)
    assert type(norm) is torch.Tensor
    assert len(set(gathered(norm.item()))) == 1, f"the ranks have {gathered(norm.item())}"


@worlds(1, 2)
def test_gradients_of_two_dtypes(loop: Loop, world_size: int) -> None:
    """Gradients in float32 and in bfloat16 have one norm, and are all scaled."""
    model = _model(loop, "two_dtypes")
    before = loop.gradients(model)
    norm = loop.strategy.clip_grad_norm(model, MAX_NORM)
    expected, _ = _clipped_alone("two_dtypes")
    assert float(norm) == pytest.approx(expected, rel=0.02)
    for name, gradient in loop.gradients(model).items():
        assert gradient.dtype == before[name].dtype
        assert_near(gradient, before[name].double() * (MAX_NORM / expected), 0.03, name)


@pytest.mark.parametrize("max_norm", [None, 1e6], ids=["no_limit", "a_high_limit"])
@worlds(1, 2)
def test_nothing_is_scaled(loop: Loop, max_norm: float | None, world_size: int) -> None:
    """Without a limit, or below it, gradients stay as they are, bit for bit; the norm is told."""
    model = _model(loop)
    before = loop.gradients(model)
    norm = loop.strategy.clip_grad_norm(model, max_norm)
    assert float(norm) == pytest.approx(_clipped_alone()[0], rel=1e-6)
    for name, gradient in loop.gradients(model).items():
        assert_same(gradient, before[name], name)


@worlds(1, 2)
def test_no_gradient_at_all(loop: Loop, world_size: int) -> None:
    """Where there is no gradient, the norm is zero."""
    assert float(loop.strategy.clip_grad_norm(loop.model(), MAX_NORM)) == 0


@worlds(1, 2)
def test_a_gradient_that_is_no_number(loop: Loop, world_size: int) -> None:
    """If a gradient of one rank is no number, every rank's norm is none."""
    model = loop.model()
    with torch.no_grad():
        part = batch()
        loop.unwrapped(model).positions.strength.fill_(torch.nan if loop.rank == 0 else 1.0)
    loop.backward(model, part)
    norm = loop.strategy.clip_grad_norm(model, MAX_NORM)
    assert not any(torch.tensor(gathered(norm.item())).isfinite())
