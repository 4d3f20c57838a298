"""Modules on the device: moving them, tied weights, adapters, torch.compile, batches for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from core_plugin.adapters.layer import Adapter, AdapterLayer, AdapterParameters
from core_plugin.testing.device.comparison import normal
from core_plugin.types.peft import ADAPTER, BasePeft

pytestmark = pytest.mark.level(1)


class _TiedModel(nn.Module):
    """An embedding whose weight the output layer has too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, index: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(torch.tanh(self.hidden(self.embedding(index)))) * self.scale
        return logits


def _model() -> _TiedModel:
    torch.manual_seed(0)
    return _TiedModel()


INDEX = torch.tensor([[1, 3, 3], [0, 6, 1]])


def test_a_moved_module_has_the_same_parameters(device: torch.device) -> None:
    """``module.to`` keeps each Parameter object, and puts values and buffers on the device."""
    model = _model()
    before = dict(model.named_parameters())
    values = copy.deepcopy(model.state_dict())
    model.to(device)
    for name, parameter in model.named_parameters():
        assert parameter is before[name], f"{name} is another Parameter after module.to"
        assert isinstance(parameter, nn.Parameter), f"{name} is a {type(parameter).__name__}"
        assert parameter.requires_grad, f"{name} requires no gradient any more"
    for name, tensor in model.state_dict().items():
        assert tensor.device == device, f"{name} is on {tensor.device}"
        torch.testing.assert_close(tensor.cpu(), values[name])


def test_tied_weights_stay_tied(device: torch.device) -> None:
    """Modules that share a weight share it on the device, its gradient too, and back on the CPU."""
    reference, model = _model(), _model()
    reference(INDEX).pow(2).sum().backward()
    for place in (device, torch.device("cpu")):
        model.to(place)
        assert model.head.weight is model.embedding.weight, f"the weights came apart on {place}"
        model.zero_grad()
        model(INDEX.to(place)).pow(2).sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
        torch.testing.assert_close(gradients, expected, check_device=False)


def test_a_module_changes_device_and_dtype_at_once(device: torch.device) -> None:
    """``module.to(device, dtype)`` converts parameters, and integer buffers keep their dtype."""
    layer = nn.BatchNorm1d(3)
    layer.to(device, torch.bfloat16)
    assert layer.weight.device == device
    assert layer.weight.dtype == torch.bfloat16
    assert layer.num_batches_tracked is not None
    assert layer.num_batches_tracked.dtype == torch.int64


def test_a_module_made_on_meta_gets_memory_and_values(device: torch.device) -> None:
    """A module from ``meta`` works after ``to_empty`` and ``load_state_dict``."""
    reference = _model()
    with torch.device("meta"):
        model = _TiedModel()
    model.to_empty(device=device)
    model.load_state_dict(reference.state_dict())
    torch.testing.assert_close(model(INDEX.to(device)).cpu(), reference(INDEX))


def test_state_dicts_go_between_devices(device: torch.device) -> None:
    """A module takes the state of one on another device, and stays where it is."""
    reference, model = _model(), _model().to(device)
    with torch.no_grad():
        model.hidden.weight.add_(1)
    reference.load_state_dict(model.state_dict())
    torch.testing.assert_close(reference(INDEX), model(INDEX.to(device)).cpu())
    model.load_state_dict(_model().state_dict())
    assert model.hidden.weight.device == device
    torch.testing.assert_close(model(INDEX.to(device)).cpu(), _model()(INDEX))


class _LowRank(AdapterLayer):
    """A linear layer plus a product of two narrow ones."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.low_a = AdapterParameters(nn.init.kaiming_uniform_)
        self.low_b = AdapterParameters(nn.init.zeros_)

    def add_adapter(self, name: str, params: Any) -> None:
        """Both factors, on the base layer's device."""
        self.low_a.add(name, (2, self.in_features), self.base_layer)
        self.low_b.add(name, (self.out_features, 2), self.base_layer)

    def forward(self, x: Tensor) -> Tensor:
        """The base layer's output and the active adapters'."""
        output: Tensor = self.base_layer(x)
        for name in self.used:
            output = output + x @ self.low_a[name].T @ self.low_b[name].T
        return output


def test_an_adapter_is_made_where_its_base_layer_is(device: torch.device) -> None:
    """An adapter for a layer on the device is on it, changes nothing at first, and is trained."""
    base = nn.Linear(6, 3).to(device).requires_grad_(False)
    layer = _LowRank(base)
    layer.add(Adapter(ADAPTER, BasePeft, None), None)
    layer.activate([ADAPTER])
    adapter = [parameter for _, _, parameter in layer.adapter_parameters(ADAPTER)]
    assert {p.device for p in adapter} == {device}
    x = normal(2, 6).to(device)
    torch.testing.assert_close(layer(x), base(x))

    optimizer = torch.optim.SGD(adapter, lr=0.1)
    layer(x).pow(2).sum().backward()
    optimizer.step()
    assert not torch.allclose(layer(x), base(x)), "a step changed nothing"
    assert base.weight.grad is None


def test_a_compiled_function_gives_the_same(device: torch.device) -> None:
    """``torch.compile`` can trace what runs on the device; its ``eager`` backend runs it there."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu(x @ weight) * 2 + x.new_ones(3)

    x, weight = normal(2, 4).to(device), normal(4, 3, seed=2).to(device).requires_grad_()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), function(x, weight))
    torch._dynamo.reset()


def test_batches_of_a_worker_process_move_to_the_device(device: torch.device) -> None:
    """A ``DataLoader`` works with a worker forked from a process that uses the device."""
    torch.ones(1, device=device)
    samples = normal(6, 2)
    loader = DataLoader(
        TensorDataset(samples),
        batch_size=2,
        num_workers=1,
        multiprocessing_context="fork",
        timeout=20,
    )
    batches = [batch.to(device) for (batch,) in loader]
    assert {batch.device for batch in batches} == {device}
    torch.testing.assert_close(torch.cat(batches).cpu(), samples)
