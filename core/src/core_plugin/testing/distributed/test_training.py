"""Training on several ranks gives what one process makes of the whole batch, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from core_plugin import tensors
from core_plugin.testing.checks import (
    assert_all_near,
    assert_all_same,
    assert_differs,
    assert_near,
    assert_same,
)
from core_plugin.testing.distributed.alone import alone, gradients_alone, trained_alone
from core_plugin.testing.distributed.batches import batch, loss_sum, share
from core_plugin.testing.distributed.loop import (
    MAX_NORM,
    Loop,
    MakeOptimizer,
    Trained,
    Values,
    adamw,
    gathered,
    gradients,
    sgd,
)
from core_plugin.testing.distributed.worlds import worlds

pytestmark = pytest.mark.level(2)

EXACT = 1e-6
"""How far numbers may be off that are computed in float64, and exchanged in float32 at least."""
HALF = 0.03
"""The same where a part is in bfloat16."""
EACH_OPTIMIZER = pytest.mark.parametrize("make", [adamw, sgd], ids=["adamw", "sgd"])


def assert_trained_alike(actual: Trained, expected: Trained) -> None:
    """Check the norms of all steps, and the values."""
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
    assert_all_near(actual.values, expected.values, EXACT)


@pytest.mark.parametrize("kind", ["tied", "frozen"])
@worlds(1, 2)
def test_gradients_are_those_of_one_process(loop: Loop, kind: str, world_size: int) -> None:
    """The gradients of a batch that the ranks share are those of the whole batch."""
    model = loop.model(kind)
    loop.backward(model, batch())
    assert_all_near(loop.gradients(model), gradients_alone(kind), EXACT)


@EACH_OPTIMIZER
@worlds(1, 2)
def test_steps_are_those_of_one_process(loop: Loop, make: MakeOptimizer, world_size: int) -> None:
    """Several steps with clipping give the norms and the values of one process."""
    trained, _ = loop.train(loop.model(), make, max_norm=MAX_NORM)
    assert_trained_alike(trained, trained_alone("plain", make, max_norm=MAX_NORM))


@worlds(3, 4)
def test_training_on_more_ranks(loop: Loop, world_size: int) -> None:
    """On more ranks, which do not divide the model's rows, steps are the same."""
    trained, _ = loop.train(loop.model("tied"), max_norm=MAX_NORM)
    assert_trained_alike(trained, trained_alone("tied", max_norm=MAX_NORM))


@worlds(1, 2, 3)
def test_the_divisor_is_what_is_divided_by(loop: Loop, world_size: int) -> None:
    """A gradient is the sum of the ranks' own, divided by ``gradient_divisor``."""
    model, whole = loop.model(), batch()
    (part,) = share(whole, loop.rank, world_size, len(whole.ids))
    loop.micro_step(model, part, 1.0, last=True)
    expected = alone()
    loss_sum(expected, whole).backward()
    divided = {n: grad / loop.divisor for n, grad in gradients(expected).items()}
    assert_all_near(loop.gradients(model), divided, EXACT)


@worlds(2, 4)
def test_uneven_batches(loop: Loop, world_size: int) -> None:
    """Ranks with fewer rows, or with none, take part with micro-batches without a label."""
    model = loop.model()
    loop.backward(model, batch(rows=5), micro_batch_size=1)
    assert_all_near(loop.gradients(model), gradients_alone(rows=5), EXACT)


@worlds(1, 2)
def test_frozen_parameters_stay(loop: Loop, world_size: int) -> None:
    """Frozen parameters get no gradient and keep their values, bit for bit; others are trained."""
    model = loop.model("frozen")
    loop.backward(model, batch())
    unwrapped = loop.unwrapped(model)
    frozen = {n for n, p in unwrapped.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, p in alone("frozen").named_parameters() if not p.requires_grad}
    got = [n for n, p in unwrapped.named_parameters() if n in frozen and p.grad is not None]
    assert not got, f"frozen, and with a gradient: {', '.join(got)}"
    before = loop.values(loop.model("frozen"))
    trained, _ = loop.train(loop.model("frozen"), sgd)
    for name, value in trained.values.items():
        if name in frozen:
            assert_same(value, before[name], name)
        elif not name.startswith("positions"):
            assert_differs(value, before[name], f"{name} was not trained")


@worlds(1, 2)
def test_tied_weights_stay_tied(loop: Loop, world_size: int) -> None:
    """A weight in two places has one gradient, and is one weight after several steps."""
    model = loop.model("tied")
    trained, _ = loop.train(model)
    assert_trained_alike(trained, trained_alone("tied"))
    unwrapped = loop.unwrapped(model)
    assert unwrapped.head.weight is unwrapped.embedding.weight


@pytest.mark.parametrize("kind", ["adapted", "two_dtypes"])
@worlds(1, 2)
def test_trained_parameters_of_two_dtypes(loop: Loop, kind: str, world_size: int) -> None:
    """Parts in float32 are trained beside ones in bfloat16; each keeps its dtype."""
    model = loop.model(kind)
    loop.backward(model, batch())
    actual, expected = loop.gradients(model), gradients_alone(kind)
    assert {n: g.dtype for n, g in actual.items()} == {n: g.dtype for n, g in expected.items()}
    _assert_close_together(actual, expected)
    trained, _ = loop.train(loop.model(kind), sgd)
    expected = trained_alone(kind, sgd).values
    assert {n: t.dtype for n, t in trained.values.items()} == {
        n: t.dtype for n, t in expected.items()
    }
    assert_all_near(trained.values, expected, HALF)


def _assert_close_together(actual: Values, expected: Values) -> None:
    """Check the distance of all tensors together, since single ones may be tiny."""
    assert actual.keys() == expected.keys(), f"{sorted(actual)} instead of {sorted(expected)}"
    apart = torch.stack([torch.dist(actual[n].double(), expected[n].double()) for n in expected])
    whole = torch.stack([tensor.double().norm() for tensor in expected.values()])
    share_off = float(apart.norm() / whole.norm())
    assert share_off < HALF, f"gradients are off by {share_off:.1%}"


@worlds(1, 2)
def test_computing_in_bfloat16(loop: Loop, world_size: int) -> None:
    """In bfloat16, blocks compute in it, and gradients are float32 and close to exact ones."""
    casts = loop.strategy.capabilities.mixed_precision
    model = loop.model("single_precision", computed=torch.bfloat16)
    loop.backward(model, batch(), autocast=None if casts else torch.bfloat16)
    assert _computed(loop, model) == {torch.bfloat16}
    actual, expected = loop.gradients(model), gradients_alone("single_precision")
    assert {g.dtype for g in actual.values()} == {torch.float32}
    _assert_close_together(actual, expected)


def _computed(loop: Loop, model: nn.Module) -> set[torch.dtype | None]:
    return {block.computed for block in loop.unwrapped(model).blocks}  # type: ignore[misc]


@pytest.mark.requires("mixed_precision")
@worlds(1, 2)
def test_the_strategy_casts_by_itself(loop: Loop, world_size: int) -> None:
    """Without autocast the blocks compute in the context's dtype, and logits are float32."""
    model = loop.model("single_precision", computed=torch.bfloat16)
    logits = model(batch().ids)
    found = _computed(loop, model)
    if found != {torch.bfloat16}:
        raise RuntimeError(f"blocks compute in {found}")
    assert logits.dtype == torch.float32


@worlds(1, 2)
def test_evaluation_after_training(loop: Loop, world_size: int) -> None:
    """In evaluation without gradients the outputs are those of one process; training goes on."""
    model = loop.model()
    trained, optimizer = loop.train(model, sgd, steps=(0, 1))
    expected = alone()
    expected.load_state_dict(trained_alone("plain", sgd, (0, 1)).values)
    assert_near(_evaluated(model), _evaluated(expected), EXACT)
    assert_all_same(loop.values(model), trained.values)
    loop.step(model, optimizer, batch(2))
    assert_all_near(loop.values(model), trained_alone("plain", sgd, (0, 1, 2)).values, EXACT)


@torch.no_grad()
def _evaluated(model: nn.Module) -> Tensor:
    logits: Tensor = model.eval()(batch(9).ids)
    model.train()
    return logits


@worlds(2)
def test_ranks_stay_equal(loop: Loop, world_size: int) -> None:
    """After several steps every rank has the same whole parameters, bit for bit."""
    trained, _ = loop.train(loop.model())
    for name, value in trained.values.items():
        for other in gathered(value):
            assert_same(other, value, name)


@worlds(1, 2)
def test_an_optimizer_holds_what_is_trained(loop: Loop, world_size: int) -> None:
    """The parameters that an optimizer gets are the model's own, before and after a step."""
    model = loop.model()
    _, optimizer = loop.train(model, steps=(0,))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    live = tensors.trained_parameters(loop.unwrapped(model))
    assert held == {id(p) for p in live.values()}
