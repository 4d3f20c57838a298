"""What a method says of itself: its name, its parameters and its layers."""

import dataclasses
import json

import pytest
from torch import nn

from core_plugin.adapters.layer import AdapterLayer, ModelAdapter, ParameterLayer
from core_plugin.testing.children import run_python
from core_plugin.testing.peft.models import Models
from core_plugin.testing.peft.subject import LAYER_TYPES, Subject
from core_plugin.types.peft import BasePeft, PeftParams

pytestmark = pytest.mark.level(1)


def test_the_entry_points_module_does_not_import_torch(method: type[BasePeft]) -> None:
    """Importing the module that the entry point names imports no torch."""
    program = "import sys, importlib; importlib.import_module(sys.argv[1])"
    run_python(f"{program}; assert 'torch' not in sys.modules", method.__module__)


def test_parameters_have_defaults(method: type[BasePeft]) -> None:
    """``Params`` is a frozen dataclass that can be made without arguments."""
    params = method.Params()
    field = dataclasses.fields(params)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(params, field, None)


@pytest.mark.only("layers")
def test_parameters_say_which_modules_are_meant(method: type[BasePeft]) -> None:
    """``Params`` derives from ``PeftParams``, and has ``target_parameters`` if the method does."""
    assert issubclass(method.Params, PeftParams)
    names = {field.name for field in dataclasses.fields(method.Params)}
    if method.layer_class(nn.Parameter) is not None:
        assert "target_parameters" in names, "it has a layer for parameters, and no field for them"


def test_it_adapts_layers_or_a_model(method: type[BasePeft]) -> None:
    """It has layers, or a class for a model's door, and not both."""
    door = method.model_adapter()
    assert bool(method.layers()) != (door is not None)
    if door is not None:
        assert issubclass(door, ModelAdapter)
        assert door.child.startswith(method.prefix), f"{door.child!r} lacks {method.prefix!r}"


@pytest.mark.only("layers")
def test_layers_are_adapter_layers(method: type[BasePeft]) -> None:
    """Every layer is an ``AdapterLayer`` for a type of module, and defines what it must."""
    for base, layer in method.layers().items():
        whole = isinstance(base, str) or issubclass(base, nn.Module)
        assert issubclass(layer, AdapterLayer if whole else ParameterLayer), layer
        for name in ("add_adapter", "forward"):
            own = getattr(layer, name)
            assert own is not getattr(AdapterLayer, name), f"{layer.__name__} has no {name}"


@pytest.mark.only("layers")
@pytest.mark.in_place
def test_the_types_that_are_tried(subject: Subject) -> str:
    """A layer for a type of torch's is tried; the report says which others are not."""
    tried = {name for name in LAYER_TYPES if subject.layer_class(name) is not None}
    assert tried, f"the method has no layer for any of {', '.join(LAYER_TYPES)}"
    names = [b if isinstance(b, str) else b.__qualname__ for b in subject.method.layers()]
    others = [name for name in names if name.rpartition(".")[2] not in LAYER_TYPES]
    return f"not tried: {', '.join(others)}" if others else ""


def test_patterns_name_fields(method: type[BasePeft], models: Models) -> None:
    """``patterns``, ``training_only`` and ``neutral`` are about fields that are there, or not."""
    fields = {field.name for field in dataclasses.fields(method.Params)}
    unused = {f for f in fields if f.endswith("_pattern")} - method.patterns.keys()
    assert unused <= {"layers_pattern"}, f"patterns lacks {unused}, which then do nothing"
    for pattern, field in method.patterns.items():
        assert {pattern, field} <= fields, f"patterns: {pattern} or {field} is no field"
    assert not fields & method.neutral.keys(), "neutral: a field cannot be what Params lacks"
    assert method.training_only <= method.config(models.params).keys()


def test_the_configuration_is_plain_data(method: type[BasePeft], models: Models) -> None:
    """``config`` can be written as JSON, and names the method."""
    config = json.loads(json.dumps(dict(method.config(models.targeted))))
    assert config["peft_type"] == method.peft_type
