"""Every layer of a method: what it computes with an adapter, compared with what it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core_plugin.adapters import modules
from core_plugin.testing.checks import (
    assert_differs,
    assert_near,
    assert_same,
    assert_unchanged,
    snapshot,
)
from core_plugin.testing.peft.bases import BASES, EACH_BASE
from core_plugin.testing.peft.models import Models, dropouts
from core_plugin.testing.processes import NotHereError
from core_plugin.types.peft import ADAPTER, BasePeft

pytestmark = [pytest.mark.level(1), pytest.mark.only("layers")]

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])


@EACH_BASE
def test_a_new_adapter_changes_nothing(models: Models, base: str) -> None:
    """With a new adapter, a layer gives its base layer's output."""
    x = models.layer_input(base)
    assert_near(models.adapted_layer(base, fresh=True)(x), models.layer(base)(x))


@EACH_BASE
def test_a_trained_adapter_changes_the_output(models: Models, base: str) -> None:
    """With other values in the adapter, a layer gives another output."""
    x = models.layer_input(base)
    told = "the adapter has no effect"
    assert_differs(models.adapted_layer(base)(x), models.layer(base)(x), told)


@EACH_BASE
@EACH_DTYPE
def test_the_output_is_of_the_bases_shape_and_dtype(
    models: Models, base: str, dtype: torch.dtype
) -> None:
    """The output has the shape and the dtype of the base layer's."""
    x = models.layer_input(base, dtype)
    actual, expected = models.adapted_layer(base, dtype)(x), models.layer(base, dtype)(x)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype, f"it is {actual.dtype}, the base's {expected.dtype}"


@EACH_BASE
@pytest.mark.parametrize("autocast", [False, True], ids=["stored", "autocast"])
def test_bfloat16_gives_about_what_float32_does(models: Models, base: str, autocast: bool) -> None:
    """Outputs are right to bfloat16's precision with a base in bfloat16, and under autocast."""
    model = models.adapted_layer(base)
    x = models.layer_input(base)
    expected = model(x)
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            actual, of_base = model(x), models.layer(base)(x)
        assert actual.dtype == of_base.dtype
    else:
        model.layer.base_layer.bfloat16()
        actual = model(x if BASES[base].takes_numbers else x.bfloat16())
    assert_near(actual, expected, 0.04)


@EACH_BASE
def test_adapters_of_a_bfloat16_base_are_float32(models: Models, base: str) -> None:
    """An adapter of a base in fewer bits is float32, since it is trained."""
    model = models.adapted_layer(base, torch.bfloat16)
    held = {p.dtype for _, m in modules(model) for _, _, p in m.adapter_parameters(ADAPTER)}
    assert held == {torch.float32}, held


@EACH_BASE
def test_gradients_are_those_of_finite_differences(models: Models, base: str) -> None:
    """In float64, the gradients of the input and of each parameter are right."""
    model = models.adapted_layer(base, torch.float64)
    x = models.layer_input(base, torch.float64)
    inputs = [] if BASES[base].takes_numbers else [x.requires_grad_()]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(lambda *_: model(x), (*inputs, *trained), fast_mode=True)


@EACH_BASE
def test_gradients_arrive_in_bfloat16(models: Models, base: str) -> None:
    """With a base in bfloat16, gradients are finite, and have their parameters' dtype."""
    model = models.adapted_layer(base, torch.bfloat16)
    model(models.layer_input(base, torch.bfloat16)).float().square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = parameter.grad
            assert grad is not None, f"no gradient arrived at {name}"
            assert grad.dtype == parameter.dtype, f"{name}: {grad.dtype}"
            assert grad.isfinite().all(), f"the gradient of {name} is not finite"


@EACH_BASE
def test_strides_make_no_difference(models: Models, base: str) -> None:
    """An input that is not contiguous gives what its contiguous copy does."""
    model = models.adapted_layer(base)
    x = models.layer_input(base)
    strided = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert not strided.is_contiguous()
    assert_near(model(strided), model(x))


@EACH_BASE
def test_an_empty_batch_gives_an_empty_output(models: Models, base: str) -> None:
    """No samples give no outputs, and gradients of zero: an expert may get no token."""
    model = models.adapted_layer(base)
    x = models.layer_input(base)[:0]
    output = model(x)
    assert output.shape == models.layer(base)(x).shape
    output.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"no gradient arrived at {name}"
            assert not parameter.grad.any(), f"the gradient of {name} is not zero"


@EACH_BASE
def test_samples_do_not_depend_on_each_other(models: Models, base: str) -> None:
    """A batch gives what its samples give one by one."""
    model = models.adapted_layer(base)
    x = models.layer_input(base)
    assert_near(torch.cat([model(sample) for sample in x.split(1)]), model(x))


@pytest.mark.only("Linear")
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 4, 8)], ids=["1d", "2d", "4d"])
def test_a_linear_layer_takes_any_dimensions(models: Models, shape: tuple[int, ...]) -> None:
    """A linear layer's input may have any number of dimensions."""
    model, x = models.adapted_layer("linear"), torch.randn(shape)
    alike = model(x.reshape(1, -1, 8)).reshape(*shape[:-1], 12)
    assert_near(model(x), alike)


@EACH_BASE
def test_nothing_is_dropped_in_evaluation(models: Models, base: str) -> None:
    """Dropout is for training: in evaluation its probability makes no difference."""
    found = dropouts(models.params)
    if not found:
        raise NotHereError("its parameters have no dropout")
    often: dict[str, Any] = dict.fromkeys(found, 0.5)
    x = models.layer_input(base)
    with_it, without = models.adapted_layer(base, **often), models.adapted_layer(base)
    assert_same(with_it(x), without(x))
    with_it.train()
    assert_same(without.train()(x), models.adapted_layer(base)(x), "the output without dropout")
    outputs = [with_it(x) for _ in range(20)]
    if not BASES[base].takes_numbers:
        assert any(not torch.equal(o, outputs[0]) for o in outputs), "nothing is dropped"


@EACH_BASE
def test_calls_draw_no_random_numbers(models: Models, base: str) -> None:
    """In evaluation a call draws no random numbers, and gives the same again."""
    model = models.adapted_layer(base)
    x = models.layer_input(base)
    before = torch.get_rng_state()
    assert_same(model(x), model(x))
    assert_same(torch.get_rng_state(), before, "the state of the random generator")


@EACH_BASE
def test_the_base_is_not_written_to(models: Models, base: str) -> None:
    """A call and its backward pass leave input, base layer and adapter as they were."""
    model = models.adapted_layer(base)
    x = models.layer_input(base)
    before, input_before = snapshot(model), x.clone()
    model(x).sum().backward()
    assert_unchanged(model, before)
    assert_same(x, input_before, "the input")


@EACH_BASE
def test_names_begin_with_the_prefix(method: type[BasePeft], models: Models, base: str) -> None:
    """A layer's own parameters begin with the prefix; in a file their names are unique."""
    layer: Any = models.adapted_layer(base).layer
    own = [name for name, _ in layer.named_parameters() if not name.startswith("base_layer.")]
    assert own
    assert all(name.startswith(method.prefix) for name in own), own
    files = [file for _, file, _ in layer.adapter_parameters(ADAPTER)]
    assert len(files) == len(set(files)) == len(own)
    for name in files:
        assert any(part.startswith(method.prefix) for part in name.split(".")), name


@EACH_BASE
def test_a_layer_passes_for_its_base(models: Models, base: str) -> None:
    """A layer has the base layer's attributes and its mode."""
    layer: Any = models.adapted_layer(base).layer
    plain: Any = models.layer(base).layer
    if isinstance(getattr(plain, "weight", None), Tensor):
        assert_same(layer.weight, plain.weight, "the weight")
    assert layer.training == plain.training
    for name in plain.__dict__.keys() - layer.__dict__.keys():
        assert hasattr(layer, name), f"the layer has no {name}"
