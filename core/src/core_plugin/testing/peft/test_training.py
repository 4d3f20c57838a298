"""Training: what changes and what does not, recomputed, compiled, and in fewer bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core_plugin.adapters import base_name
from core_plugin.testing.checks import (
    assert_all_near,
    assert_near,
    gradients,
    snapshot,
    trained_values,
)
from core_plugin.testing.peft.bases import EACH_BASE
from core_plugin.testing.peft.models import Models
from core_plugin.testing.peft.networks import VOCABULARY, blocks
from core_plugin.types.peft import BasePeft

pytestmark = pytest.mark.level(1)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean cross entropy of the tokens, each taken for its own label."""
    logits = model(ids).float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, (ids.flatten() + 1) % VOCABULARY)


def train(model: nn.Module, ids: Tensor, steps: int = 3) -> None:
    """Some steps of AdamW; gradients of the last one are left."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, eps=1e-3, weight_decay=0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, ids).backward()
        optimizer.step()


def test_every_parameter_is_trained(models: Models) -> None:
    """Within three steps every parameter of the adapter has changed."""
    model = models.adapted(fresh=True).train()
    before = trained_values(model)
    train(model, models.ids())
    now = trained_values(model)
    unchanged = [name for name in before if torch.equal(now[name], before[name])]
    assert not unchanged, f"{', '.join(unchanged)} did not change in three steps"


@EACH_BASE
def test_every_layers_parameters_are_trained(models: Models, base: str) -> None:
    """Within three steps every parameter of a layer's adapter has changed."""
    model = models.adapted_layer(base, fresh=True).train()
    before = trained_values(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        (model(models.layer_input(base)) - 1).square().mean().backward()
        optimizer.step()
    now = trained_values(model)
    unchanged = [name for name in before if torch.equal(now[name], before[name])]
    assert not unchanged, f"{', '.join(unchanged)} did not change in three steps"


def test_the_model_itself_is_not_trained(models: Models) -> None:
    """The model's own values stay as they were, and none of them gets a gradient."""
    model = models.adapted(fresh=True).train()
    trained = trained_values(model).keys()
    before = {n: t for n, t in snapshot(model).items() if n not in trained}
    train(model, models.ids())
    now = {n: t for n, t in snapshot(model).items() if n not in trained}
    assert_all_near(now, before, relative=0)
    with_gradient = [n for n, p in model.named_parameters() if p.grad is not None]
    assert set(with_gradient) == set(trained), with_gradient


def test_training_lowers_the_loss(models: Models) -> None:
    """Some steps on a batch lower its loss."""
    model = models.adapted(fresh=True).train()
    ids = models.ids()
    before = loss(model, ids)
    train(model, ids, steps=15)
    assert loss(model, ids) < before


@pytest.mark.parametrize("reentrant", [False, True], ids=["not_reentrant", "reentrant"])
def test_recomputed_blocks_have_the_same_gradients(models: Models, reentrant: bool) -> None:
    """Activation checkpointing of the blocks changes no gradient."""
    ids, plain, recomputed = models.ids(), models.adapted().train(), models.adapted().train()
    for block in blocks(recomputed):
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    if reentrant:  # such a checkpoint needs an input that requires a gradient
        embedding = next(m for m in recomputed.modules() if isinstance(m, nn.Embedding))
        embedding.register_forward_hook(lambda *call: call[-1].requires_grad_())
    loss(plain, ids).backward()
    loss(recomputed, ids).backward()
    assert_all_near(gradients(recomputed), gradients(plain))


def test_a_compiled_model_is_traced_whole(models: Models) -> None:
    """``torch.compile`` traces the model without a break, with equal outputs and gradients."""
    ids, plain, traced = models.ids(), models.adapted().train(), models.adapted().train()
    torch._dynamo.reset()
    compiled: Any = torch.compile(traced, backend="eager", fullgraph=True)
    assert_near(compiled(ids), plain(ids))
    loss(plain, ids).backward()
    loss(compiled, ids).backward()
    assert_all_near(gradients(traced), gradients(plain))
    torch._dynamo.reset()


def test_a_bfloat16_model_is_trained(models: Models) -> None:
    """With a model in bfloat16 the adapter is float32, and its loss falls."""
    model = models.adapted(models.network(dtype=torch.bfloat16), fresh=True).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    ids = models.ids()
    before = loss(model, ids)
    train(model, ids, steps=15)
    assert loss(model, ids) < before
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained)


def test_autocast_changes_no_gradient_by_much(models: Models) -> None:
    """Under autocast in bfloat16 gradients are those of float32 to its precision."""
    ids, plain, cast = models.ids(), models.adapted().train(), models.adapted().train()
    loss(plain, ids).backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss(cast, ids).backward()
    expected, actual = gradients(plain), gradients(cast)
    distance = torch.stack([torch.dist(actual[n], expected[n]) for n in expected]).norm()
    whole = torch.stack([g.norm() for g in expected.values()]).norm()
    assert distance < 0.1 * whole, f"gradients are off by {distance / whole:.1%}"


def test_names_lead_back_to_the_model(method: type[BasePeft], models: Models) -> None:
    """``base_name`` gives what is not trained the name that it had in the model."""
    model = models.adapted()
    names = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert {method.base_name(n) for n in names} == {
        base_name(n) for n, _ in models.network().named_parameters()
    }
