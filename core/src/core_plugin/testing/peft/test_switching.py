"""Several adapters of a method in one model: chosen, disabled, deleted, one a sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core_plugin.adapters import (
    adapters,
    delete_adapter,
    disable_adapters,
    enable_adapters,
    modules,
    per_sample,
    set_adapter,
)
from core_plugin.errors import ConfigError
from core_plugin.testing.checks import (
    assert_differs,
    assert_near,
    assert_same,
    assert_unchanged,
    snapshot,
)
from core_plugin.testing.peft.models import OTHER, Models
from core_plugin.types.peft import ADAPTER

pytestmark = pytest.mark.level(2)


def test_a_second_adapter_is_another(models: Models) -> None:
    """Each of two adapters, when it is chosen, gives what it gives in a model of its own."""
    model, ids = models.adapted(), models.ids()
    expected = {
        ADAPTER: models.adapted()(ids),
        OTHER: models.adapted(name=OTHER, seed=2)(ids),
    }
    assert_differs(expected[OTHER], expected[ADAPTER], "both adapters give the same")
    models.add(model)
    assert adapters(model).keys() == {ADAPTER, OTHER}
    assert_same(model(ids), expected[ADAPTER], "the output after another adapter came")
    for name in (OTHER, ADAPTER, OTHER):
        set_adapter(model, name)
        assert_same(model(ids), expected[name], f"the output of {name}")


def test_the_chosen_adapter_is_trained(models: Models) -> None:
    """What requires a gradient is the chosen adapter; the other one stays as it is."""
    model = models.adapted()
    models.add(model)
    for name in (OTHER, ADAPTER):
        set_adapter(model, name)
        held = {id(p) for _, m in modules(model) for _, _, p in m.adapter_parameters(name)}
        assert {id(p) for p in model.parameters() if p.requires_grad} == held
        model(models.ids()).sum().backward()
    set_adapter(model, OTHER, trainable=False)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.only("layers")
def test_two_adapters_work_together_or_not_at_all(models: Models) -> None:
    """With two adapters, of which one is new, the output is the other's; or both are refused."""
    model, ids = models.adapted(), models.ids()
    expected = model(ids)
    models.add(model, fresh=True)
    pair = [ADAPTER, OTHER]
    if any(module.clash(pair) for _, module in modules(model)):
        with pytest.raises(ConfigError):
            set_adapter(model, pair)
        assert_same(model(ids), expected, "the output after that")
        return
    for names in (pair, pair[::-1]):
        set_adapter(model, names)
        assert_near(model(ids), expected)


def test_an_unknown_adapter_is_refused(models: Models) -> None:
    """Choosing or deleting an adapter that is not there is an error, and changes nothing."""
    model, ids = models.adapted(), models.ids()
    expected = model(ids)
    for operation in (set_adapter, delete_adapter):
        with pytest.raises(ConfigError, match="defualt"):
            operation(model, "defualt")
    assert_same(model(ids), expected)


def test_disabled_it_is_the_model(models: Models) -> None:
    """Without its adapters the model gives the outputs that it gave before, bit for bit."""
    model, ids = models.adapted(), models.ids()
    expected, before = models.network()(ids), model(ids)
    assert_differs(before, expected, "the adapter has no effect")
    with disable_adapters(model):
        assert_same(model(ids), expected)
    assert_same(model(ids), before, "the output after that")


def test_an_exception_while_disabled_restores_all(models: Models) -> None:
    """Adapters that are disabled for a while are back when it ends with an exception."""
    model, ids = models.adapted(), models.ids()
    models.add(model)
    expected, trained = model(ids), [p.requires_grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match="in between"), disable_adapters(model):
        raise RuntimeError("in between")
    assert_same(model(ids), expected)
    assert [p.requires_grad for p in model.parameters()] == trained


def test_enabling_undoes_disabling(models: Models) -> None:
    """``disable_adapters`` without ``with`` lasts until ``enable_adapters``."""
    model, ids = models.adapted(), models.ids()
    expected = model(ids)
    disable_adapters(model)
    assert_same(model(ids), models.network()(ids))
    enable_adapters(model)
    assert_same(model(ids), expected)


def test_deleting_the_last_gives_the_model_back(models: Models) -> None:
    """Without its last adapter the model has its own modules again, and its own outputs."""
    model = models.network()
    before, hooks, values = dict(model.named_modules()), _hooks(model), snapshot(model)
    models.adapted(model)
    delete_adapter(model, ADAPTER)
    assert dict(model.named_modules()) == before
    assert _hooks(model) == hooks, "hooks are left"
    assert_unchanged(model, values)
    assert_same(model(models.ids()), models.network()(models.ids()))
    assert not adapters(model)


def _hooks(model: nn.Module) -> list[int]:
    """The number of hooks of each module."""
    return [
        len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks)
        for m in model.modules()
    ]


def test_deleting_one_leaves_the_other(models: Models) -> None:
    """An adapter that is deleted takes its parameters along, and leaves the other's."""
    model, ids = models.adapted(), models.ids()
    models.add(model)
    delete_adapter(model, ADAPTER)
    set_adapter(model, OTHER)
    assert_same(model(ids), models.adapted(name=OTHER, seed=2)(ids))
    alone = models.adapted(name=OTHER, seed=2)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in alone.named_parameters()]


def test_a_deleted_adapter_can_come_again(models: Models) -> None:
    """A name that was deleted is free, and the adapter that takes it is new."""
    model, ids = models.adapted(), models.ids()
    delete_adapter(model, ADAPTER)
    models.adapted(model, seed=3)
    assert_same(model(ids), models.adapted(seed=3)(ids))


@pytest.mark.requires("per_sample")
def test_each_sample_has_its_adapter(models: Models) -> None:
    """A batch whose samples have an adapter each gives what each adapter gives its samples."""
    models = models.having("per_sample")
    model, ids = models.adapted(), models.ids(4)
    models.add(model)
    names = [OTHER, "__base__", ADAPTER, OTHER]
    expected = []
    for name, sample in zip(names, ids.split(1), strict=True):
        if name == "__base__":
            expected.append(models.network()(sample))
        else:
            set_adapter(model, name)
            expected.append(model(sample))
    set_adapter(model, ADAPTER)
    before = model(ids)
    with per_sample(model, names):
        assert_near(model(ids), torch.cat(expected))
    assert_same(model(ids), before, "the output after that")


@pytest.mark.requires("per_sample")
def test_an_exception_with_an_adapter_a_sample_restores_all(models: Models) -> None:
    """After an exception the model is as before one adapter was chosen for each sample."""
    models = models.having("per_sample")
    model, ids = models.adapted(), models.ids()
    models.add(model)
    before = model(ids)
    with pytest.raises(RuntimeError, match="in between"), per_sample(model, [OTHER] * len(ids)):
        raise RuntimeError("in between")
    assert_same(model(ids), before)
