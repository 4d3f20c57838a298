"""``full_state_dict``: whole tensors, on the CPU of the first rank."""

from __future__ import annotations

import pytest
import torch

from core_plugin import tensors
from core_plugin.testing.checks import assert_all_same
from core_plugin.testing.distributed.alone import alone
from core_plugin.testing.distributed.batches import batch
from core_plugin.testing.distributed.checkpoints import trained
from core_plugin.testing.distributed.loop import CPU, Loop
from core_plugin.testing.distributed.worlds import worlds

pytestmark = pytest.mark.level(3)


@pytest.mark.parametrize("kind", ["tied", "two_dtypes"])
@worlds(1, 3)
def test_the_first_rank_has_all(loop: Loop, kind: str, world_size: int) -> None:
    """The first rank gets every parameter and persistent buffer by the architecture's names."""
    model, _ = trained(loop, kind)
    expected = loop.values(model)
    full = loop.strategy.full_state_dict(model, False)
    assert_all_same(full, expected if loop.rank == 0 else {})
    for name, value in full.items():
        assert value.device == CPU, f"{name} is on {value.device}"
        assert type(value) is torch.Tensor, f"{name} is a {type(value).__name__}"


@worlds(1, 2)
def test_only_what_is_trained(loop: Loop, world_size: int) -> None:
    """With ``trainable`` it is what is trained, and no buffer."""
    model, _ = trained(loop, "frozen")
    full = loop.strategy.full_state_dict(model, True)
    expected = tensors.trained_parameters(alone("frozen")) if loop.rank == 0 else {}
    assert full.keys() == expected.keys()


@worlds(1, 2)
def test_whole_tensors_are_copies(loop: Loop, world_size: int) -> None:
    """Training does not change the tensors that were given, nor do they change the model."""
    model, optimizer = trained(loop)
    full = loop.strategy.full_state_dict(model, False)
    before = {name: value.clone() for name, value in full.items()}
    loop.step(model, optimizer, batch(2))
    assert_all_same(full, before)
    values = loop.values(model)
    for value in full.values():
        value.fill_(torch.nan)
    assert_all_same(loop.values(model), values)


@worlds(2)
def test_training_goes_on_after_it(loop: Loop, world_size: int) -> None:
    """Steps after it give what they give without it."""
    model, optimizer = trained(loop)
    loop.strategy.full_state_dict(model, False)
    other, others_optimizer = trained(loop)
    for step in (2, 3):
        loop.step(model, optimizer, batch(step), 1.0)
        loop.step(other, others_optimizer, batch(step), 1.0)
    assert_all_same(loop.values(model), loop.values(other))
