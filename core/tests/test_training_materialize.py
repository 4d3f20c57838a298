"""From meta to memory: values by seed and name, whatever the order of the calls."""

from __future__ import annotations

import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from core_plugin.adapters import base_name
from core_plugin.adapters.layer import AdapterLayer, AdapterParameters
from core_plugin.errors import ConfigError
from core_plugin.tensors import canonical_name
from core_plugin.training.materialize import Materializer

CPU = torch.device("cpu")


class Scale(nn.Module):
    """A parameter and both kinds of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("kept", torch.empty(3))
        self.register_buffer("computed", torch.empty(3), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.kept.fill_(2.0)
        self.computed.fill_(3.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.scale = Scale()
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


def build() -> Tied:
    with torch.device("meta"):
        return Tied()


def reset(module: nn.Module) -> None:
    module.reset_parameters()


def materialized(parts=lambda m: [m], seed=0, **options) -> Tied:
    model = build()
    materialize = Materializer(model, CPU, seed, reset, str, **options)
    for part in parts(model):
        materialize(part)
    return model


def test_values_depend_on_seed_and_name_alone():
    whole = materialized()
    in_parts = materialized(lambda m: [m.head, m.layers[1], m.scale, m])
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, in_parts.state_dict()[name])
    assert not torch.equal(whole.layers[0].weight, whole.layers[1].weight)
    assert not torch.equal(whole.layers[0].weight, materialized(seed=1).layers[0].weight)


def test_ties_buffers_and_flags_survive():
    model = build()
    model.layers[0].weight.requires_grad_(False)
    Materializer(model, CPU, 0, reset, str)(model)
    assert model.head.weight is model.embedding.weight
    assert [p.requires_grad for p in model.layers[0].parameters()] == [False, True]
    assert model.scale.kept.tolist() == [2.0] * 3
    assert model.scale.computed.tolist() == [3.0] * 3
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def test_the_first_owner_initialises_a_tied_tensor():
    model = materialized(lambda m: [m.head, m])
    alone = materialized(lambda m: [m.embedding])
    assert torch.equal(model.head.weight, alone.embedding.weight)


def test_no_tensor_is_held_longer_than_it_is_tied():
    model = build()
    materialize = Materializer(model, CPU, 0, reset, str)
    materialize(model)
    held = [weakref.ref(p) for p in model.parameters()]
    for module in model.modules():
        for name in list(module._parameters):
            module._parameters[name] = None
    assert [ref() for ref in held] == [None] * len(held)


def test_the_largest_modules_are_made_first():
    made = []

    def initialize(module: nn.Module) -> None:
        made.append(module.out_features)
        reset(module)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 5)))
    Materializer(model, CPU, 0, initialize, str)(model)
    assert made == [5, 9, 3]  # 50, 36 and 15 values


def test_the_global_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    materialized()
    assert torch.equal(torch.rand(2), expected)


def test_a_part_that_is_real_is_left_alone():
    model = build()
    materialize = Materializer(model, CPU, 0, reset, str)
    materialize(model)
    before = model.layers[0].weight
    with torch.no_grad():
        before.fill_(7.0)
    materialize(model)
    assert model.layers[0].weight is before
    assert before.eq(7.0).all()


def test_weights_come_from_files(tmp_path):
    original = {n: torch.randn_like(t) for n, t in materialized().state_dict().items()}
    del original["head.weight"]
    save_file({n: t for n, t in original.items() if "layers" in n}, tmp_path / "1.safetensors")
    save_file({n: t for n, t in original.items() if "layers" not in n}, tmp_path / "2.safetensors")
    files = [str(tmp_path / "1.safetensors"), str(tmp_path / "2.safetensors")]
    model = materialized(weights=files)
    for name, tensor in original.items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.scale.computed.tolist() == [3.0] * 3


def test_names_from_before_a_renaming_are_translated(tmp_path):
    expected = materialized()
    old = {n.replace("layers.", "blocks.h"): t for n, t in expected.state_dict().items()}
    del old["head.weight"]
    save_file(old, tmp_path / "old.safetensors")
    renames = {r"^blocks\.h(\d+)\.": r"layers.\1."}
    files = [str(tmp_path / "old.safetensors")]
    model = materialized(seed=1, weights=files, renames=renames)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_weights_that_do_not_fit_are_refused_with_every_name(tmp_path):
    state = materialized().state_dict()
    del state["head.weight"]
    state["layers.2.weight"] = state.pop("layers.0.weight")
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError) as caught:
        materialized(weights=[str(tmp_path / "w.safetensors")])
    assert "layers.0.weight is in no weights file (there is layers.2.weight" in str(caught.value)
    assert "has layers.2.weight, which the model has not" in str(caught.value)


def test_weights_of_other_shapes_are_refused_with_all_other_faults(tmp_path):
    state = materialized().state_dict()
    del state["head.weight"], state["head.bias"]
    state["layers.0.bias"] = torch.zeros(4)
    state["layers.1.weight"] = torch.zeros(3)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError) as caught:
        materialized(weights=[str(tmp_path / "w.safetensors")])
    assert "head.bias is in no weights file" in str(caught.value)
    assert "layers.0.bias has the shape (4,), the model's has (3,)" in str(caught.value)
    assert "layers.1.weight has the shape (3,), the model's has (3, 3)" in str(caught.value)


def test_weights_of_another_dtype_are_converted(tmp_path):
    state = {n: t.bfloat16() for n, t in materialized().state_dict().items() if n != "head.weight"}
    save_file(state, tmp_path / "w.safetensors")
    model = materialized(weights=[str(tmp_path / "w.safetensors")])
    assert model.layers[0].weight.dtype == torch.float32
    assert torch.equal(model.layers[0].weight, state["layers.0.weight"].float())


def test_tensors_from_files_own_their_memory(tmp_path):
    state = {n: t for n, t in materialized().state_dict().items() if n != "head.weight"}
    save_file(state, tmp_path / "w.safetensors")
    model = materialized(weights=[str(tmp_path / "w.safetensors")])
    for tensor in (*model.parameters(), model.scale.kept):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_values_do_not_depend_on_what_modules_are_wrapped_in():
    plain, model = materialized(), build()
    model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))
    Materializer(model, CPU, 0, reset, canonical_name)(model)
    for (name, tensor), expected in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, expected), name


class Measured(AdapterLayer):
    """An adapter that begins with its base layer's values, and halves them there."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__(base_layer)
        self.measured = AdapterParameters(nn.init.zeros_)
        self.adapters["a"] = None
        self.measured.add("a", base_layer.weight.shape, base_layer)

    def initialize(self, name: str) -> None:
        base = self.base_layer.weight
        assert type(base) is nn.Parameter
        assert base.device == self.measured[name].device == CPU
        self.measured[name].copy_(base + torch.rand(3))
        base.mul_(0.5)


@pytest.mark.parametrize(
    "parts",
    [
        lambda m: [m],
        lambda m: [m.embedding, m.head.base_layer, m],
        lambda m: [m.layers[0].measured, m.head, m.embedding, m],
    ],
)
def test_adapters_begin_with_their_bases_values(parts):
    """Those of a tied layer, which another one owns, included."""
    plain, model = materialized(), build()
    model.layers[0] = Measured(model.layers[0])
    model.head = Measured(model.head)
    materialize = Materializer(model, CPU, 0, reset, base_name)
    for part in parts(model):
        materialize(part)
    assert torch.equal(model.layers[0].base_layer.weight, plain.layers[0].weight / 2)
    assert torch.equal(model.head.base_layer.weight, plain.head.weight / 2)
    assert model.head.base_layer.weight is model.embedding.weight
    drawn = model.layers[0].measured["a"] - plain.layers[0].weight
    assert 0 <= drawn.min() < drawn.max() < 1
    materialize(model)
    assert torch.equal(model.head.base_layer.weight, plain.head.weight / 2)
