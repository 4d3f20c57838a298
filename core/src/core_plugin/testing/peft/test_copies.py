"""Copies of a model with an adapter, in memory and through pickle."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from core_plugin.adapters import delete_adapter, disable_adapters, set_adapter
from core_plugin.testing.checks import assert_near, assert_same
from core_plugin.testing.peft.models import OTHER, Models
from core_plugin.types.peft import ADAPTER

pytestmark = pytest.mark.level(2)


def _pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


EACH_COPY = pytest.mark.parametrize("copied", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])


@EACH_COPY
def test_a_copy_gives_the_same(models: Models, copied: Any) -> None:
    """A copy of a model with an adapter gives the same outputs."""
    model, ids = models.adapted(), models.ids()
    assert_same(copied(model)(ids), model(ids))


@EACH_COPY
def test_a_copy_is_independent(models: Models, copied: Any) -> None:
    """What is done to a copy does not change the model: other values, disabling, deleting."""
    model, ids = models.adapted(), models.ids()
    models.add(model)
    expected = model(ids)
    other = copied(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    set_adapter(other, OTHER)
    delete_adapter(other, ADAPTER)
    disable_adapters(other)
    assert_same(model(ids), expected)


@EACH_COPY
def test_a_copy_goes_on(models: Models, copied: Any) -> None:
    """A copy can be disabled, and its adapters chosen, as those of the model."""
    model, ids = models.adapted(), models.ids()
    models.add(model)
    other = copied(model)
    set_adapter(other, OTHER)
    assert_same(other(ids), models.adapted(name=OTHER, seed=2)(ids))
    with disable_adapters(other):
        assert_same(other(ids), models.network()(ids))


def test_a_model_moves_to_another_dtype(models: Models) -> None:
    """A model with an adapter that is converted to float64 gives the same, more precisely."""
    model, ids = models.adapted(), models.ids()
    expected = model(ids)
    output = model.double()(ids)
    assert output.dtype == torch.float64
    assert_near(output, expected)
