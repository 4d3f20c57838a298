"""Adapters merged into the layers they stand for: rounded once, exactly undone, all or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core_plugin.adapters import (
    base_name,
    disable_adapters,
    merge,
    modules,
    set_adapter,
    unload,
    unmerge,
)
from core_plugin.adapters.layer import AdapterLayer
from core_plugin.errors import CorePluginError
from core_plugin.testing.checks import (
    assert_differs,
    assert_near,
    assert_same,
    assert_unchanged,
    snapshot,
)
from core_plugin.testing.peft.bases import EACH_BASE
from core_plugin.testing.peft.models import OTHER, Models
from core_plugin.testing.processes import NotHereError
from core_plugin.types.peft import ADAPTER

pytestmark = [pytest.mark.level(2), pytest.mark.only("layers"), pytest.mark.requires("merging")]

EACH_FLOAT = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])


def _mergeable(models: Models, base: str, dtype: torch.dtype = torch.float32) -> Any:
    """A layer whose adapter can be merged."""
    model = models.adapted_layer(base, dtype)
    assert isinstance(model.layer, AdapterLayer)
    if reason := model.layer.merge_fault(ADAPTER):
        raise NotHereError(f"the method does not merge this layer: {reason}")
    return model


def _base_values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what the model itself has, by the names that it had."""
    held = {
        id(parameter)
        for _, module in modules(model)
        for name in module.adapters
        for _, _, parameter in module.adapter_parameters(name)
    }
    return {
        base_name(n): p.detach().clone() for n, p in model.named_parameters() if id(p) not in held
    }


@EACH_BASE
def test_a_merged_layer_gives_the_same(models: Models, base: str) -> None:
    """Merged, a layer gives what it gave with its adapter beside it, to 1e-5."""
    model, x = _mergeable(models, base), models.layer_input(base)
    expected = model(x)
    before = _base_values(model)
    merge(model)
    assert_near(model(x), expected)
    assert any(not torch.equal(v, before[n]) for n, v in _base_values(model).items())


@EACH_BASE
@EACH_FLOAT
def test_unmerging_is_exact(models: Models, base: str, dtype: torch.dtype) -> None:
    """Unmerged, a layer has the values and the output that it had, bit for bit."""
    model, x = _mergeable(models, base, dtype), models.layer_input(base, dtype)
    before, expected = snapshot(model), model(x)
    for _ in range(2):
        merge(model)
        unmerge(model)
    assert_unchanged(model, before)
    assert_same(model(x), expected)


@EACH_BASE
def test_merged_values_are_rounded_once(models: Models, base: str) -> None:
    """In bfloat16 merged values are those of a merge in float32, rounded once."""
    model = _mergeable(models, base, torch.bfloat16)
    precise: Any = models.layer(base, torch.bfloat16).float()
    precise = _with_adapter_of(model, models.adapted_layer(base), precise)
    merge(model)
    merge(precise)
    values = _base_values(model)
    for name, exact in _base_values(precise).items():
        assert_same(values[name], exact.to(torch.bfloat16), name)


def _with_adapter_of(model: nn.Module, target: Any, base: nn.Module) -> nn.Module:
    """A float32 layer with the base values of one model and the adapter's of another."""
    values, of_base = dict(model.named_parameters()), dict(base.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(values[name] if parameter.requires_grad else of_base[base_name(name)])
    return target  # type: ignore[no-any-return]


@EACH_BASE
def test_what_is_no_number_is_not_merged(models: Models, base: str) -> None:
    """A safe merge refuses an adapter that gives values which are no finite numbers."""
    model = _mergeable(models, base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.inf if parameter.requires_grad else 1.0)
    before = snapshot(model)
    with pytest.raises(CorePluginError):
        merge(model, safe=True)
    assert_unchanged(model, before)


def test_a_safe_merge_is_all_or_nothing(models: Models) -> None:
    """If one layer cannot be merged safely, no layer is."""
    models = models.having("merging")
    model, ids = models.adapted(), models.ids()
    before, expected = snapshot(model), model(ids)
    *_, (_, last) = modules(model)
    with torch.no_grad():
        for _, _, parameter in last.adapter_parameters(ADAPTER):
            parameter.fill_(torch.nan)
    with pytest.raises(CorePluginError):
        merge(model, safe=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    assert_same(model(ids), expected)


def test_a_merged_model_gives_the_same(models: Models) -> None:
    """A whole model gives the same merged, and exactly the same when that is undone."""
    models = models.having("merging")
    model, ids = models.adapted(), models.ids()
    before, expected = snapshot(model), model(ids)
    merge(model)
    assert_near(model(ids), expected, 2e-5)
    unmerge(model)
    assert_unchanged(model, before)
    assert_same(model(ids), expected)


def test_tied_weights_are_merged_apart(models: Models) -> None:
    """Merging an embedding does not change the output layer that is tied to it."""
    models = models.having("merging")
    model, ids = models.adapted(models.network(tied=True)), models.ids()
    expected = model(ids)
    merge(model)
    assert_near(model(ids), expected, 2e-5)


def test_shared_layers_are_merged_once(models: Models) -> None:
    """A layer that stands in two places is merged once."""
    models = models.having("merging")
    model, ids = models.adapted(models.network(shared=True)), models.ids()
    expected = model(ids)
    merge(model)
    assert_near(model(ids), expected, 2e-5)


def test_disabled_while_merged_it_is_the_model(models: Models) -> None:
    """A merged model that is disabled for a while gives its own outputs, and is merged after."""
    models = models.having("merging")
    model, ids = models.adapted(), models.ids()
    merge(model)
    merged = model(ids)
    with disable_adapters(model):
        assert_same(model(ids), models.network()(ids))
    assert_same(model(ids), merged, "the output after that")


@pytest.mark.parametrize("names", [[ADAPTER], [OTHER], [ADAPTER, OTHER]], ids="+".join)
def test_chosen_adapters_are_merged(models: Models, names: list[str]) -> None:
    """The adapters that are named are merged, and no other."""
    models = models.having("merging")
    model, ids = models.adapted(), models.ids()
    models.add(model)
    if reasons := [reason for _, m in modules(model) if (reason := m.clash(names))]:
        raise NotHereError(reasons[0])
    set_adapter(model, names)
    expected = model(ids)
    set_adapter(model, ADAPTER)
    merge(model, names)
    assert_near(model(ids), expected, 2e-5)


@pytest.mark.parametrize("merged", [False, True], ids=["left_out", "merged"])
def test_an_unloaded_model_has_no_adapter(models: Models, merged: bool) -> None:
    """Unloaded, a model has its own modules alone, with its adapter merged or left out."""
    models = models.having("merging")
    model, ids = models.adapted(), models.ids()
    plain = models.network()
    expected = model(ids) if merged else plain(ids)
    model = unload(model, merge=merged)
    assert {n: type(m) for n, m in model.named_modules()} == {
        n: type(m) for n, m in plain.named_modules()
    }
    assert model.state_dict().keys() == plain.state_dict().keys()
    if merged:
        assert_near(model(ids), expected, 2e-5)
        assert_differs(model(ids), plain(ids), "nothing was merged")
    else:
        assert_same(model(ids), expected)
