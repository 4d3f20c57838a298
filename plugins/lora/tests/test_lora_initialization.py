"""How a new adapter begins."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core_plugin.adapters import add_adapter, disable_adapters, initialize, inject, merge
from core_plugin.errors import ConfigError
from core_plugin_lora.initialization import principal
from core_plugin_lora.plugin import LoRA, LoRAParams


class Conv1D(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"
SHAPES: dict[str, Callable[[], nn.Module]] = {
    "wide": lambda: nn.Linear(12, 9),
    "tall": lambda: nn.Linear(9, 12, bias=False),
    "gpt2": lambda: Conv1D(9, 12),
}
PRINCIPAL = ["pissa", "pissa_niter_8", "olora"]
EVERY: list[bool | str] = [True, False, "gaussian", "eva", "orthogonal", *PRINCIPAL]


def made(base: nn.Module, init: bool | str, **settings: Any) -> Any:
    model = nn.ModuleDict({"x": base})
    params = {"r": 4, "lora_alpha": 6, "target_modules": ["x"], "init_lora_weights": init}
    inject(model, LoRA, LoRAParams(**{**params, **settings}))
    return model["x"]


def base_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return SHAPES[kind]()


def matrix(base: nn.Module) -> Tensor:
    return (base.weight if isinstance(base, nn.Linear) else base.weight.T).detach().double()


def update(layer: Any) -> Tensor:
    ((a, b),) = layer.factors("default")
    return layer.params["default"].scaling * b.detach().double() @ a.detach().double()


def given_to(base: nn.Module) -> Tensor:
    return torch.randn(7, matrix(base).shape[1])


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("init", [e for e in EVERY if e is not False])
def test_the_model_computes_what_it_did(init: bool | str, kind: str) -> None:
    base = base_of(kind)
    x = given_to(base)
    before = base(x)
    torch.testing.assert_close(made(base, init)(x), before, rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("init", EVERY)
def test_only_the_principal_ones_change_the_base(init: bool | str, kind: str) -> None:
    base = base_of(kind)
    before = base.weight.clone()
    made(base, init)
    assert torch.equal(base.weight, before) == (init not in PRINCIPAL)
    assert not base.weight.requires_grad


@pytest.mark.parametrize("kind", SHAPES)
def test_false_is_random_so_that_the_adapter_does_something(kind: str) -> None:
    base = base_of(kind)
    layer = made(base, False)
    assert update(layer).abs().min() > 0
    assert not torch.allclose(layer(x := given_to(base)), base(x))
    embedding = made(nn.Embedding(8, 5), False)
    assert update(embedding).abs().min() > 0


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_100"])
def test_pissa_trains_the_largest_singular_values(init: str, kind: str) -> None:
    base = base_of(kind)
    u, s, vh = torch.linalg.svd(matrix(base), full_matrices=False)
    expected = u[:, :4] * s[:4] @ vh[:4]
    layer = made(base, init)
    torch.testing.assert_close(update(layer), expected, rtol=1e-4, atol=1e-4)
    ((a, b),) = layer.factors("default")
    # Both factors get the same share of the values, and B's columns are orthogonal.
    torch.testing.assert_close(a.norm(dim=1), b.norm(dim=0))
    off = b.T @ b - torch.diag((b.T @ b).diag())
    assert off.abs().max() < 1e-4


@pytest.mark.parametrize("kind", SHAPES)
def test_olora_trains_the_first_directions_of_the_qr_decomposition(kind: str) -> None:
    base = base_of(kind)
    q, r = torch.linalg.qr(matrix(base))
    layer = made(base, "olora")
    torch.testing.assert_close(update(layer), 1.5 * q[:, :4] @ r[:4], rtol=1e-4, atol=1e-4)
    ((_, b),) = layer.factors("default")
    torch.testing.assert_close(b.T @ b, torch.eye(4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("init", PRINCIPAL)
def test_what_is_left_and_what_is_trained_is_the_weight(init: str, kind: str) -> None:
    base = base_of(kind)
    weight = matrix(base)
    layer = made(base, init)
    torch.testing.assert_close(matrix(base) + update(layer), weight, rtol=0, atol=1e-5)
    merge(layer)
    torch.testing.assert_close(matrix(layer.base_layer), weight, rtol=0, atol=1e-5)


def test_an_approximation_is_the_same_each_time_and_draws_nothing() -> None:
    results = []
    for seed in (1, 2):
        base = base_of("wide")
        torch.manual_seed(seed)
        expected = torch.rand(1)
        torch.manual_seed(seed)
        principal(base.weight.detach(), 4, 1.5, "pissa_niter_1")
        assert torch.equal(torch.rand(1), expected)
        results.append(principal(base.weight.detach(), 4, 1.5, "pissa_niter_1"))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_in_fewer_bits_is_decomposed_in_float32_and_rounded_once(
    dtype: torch.dtype,
) -> None:
    base = base_of("wide").to(dtype)
    weight = matrix(base)
    layer = made(base, "pissa")
    ((a, b),) = layer.factors("default")
    assert base.weight.dtype == dtype
    assert a.dtype == b.dtype == torch.float32
    assert torch.equal(base.weight, (weight.float() - update(layer).float()).to(dtype))


@pytest.mark.parametrize("kind", SHAPES)
def test_orthogonal_factors_have_no_product(kind: str) -> None:
    layer = made(base_of(kind), "orthogonal")
    ((a, b),) = layer.factors("default")
    assert a.abs().min() > 0
    assert b.abs().min() > 0
    assert update(layer).abs().max() < 1e-7
    (a @ a.T).diag().sum().backward()  # they are leaves
    assert a.grad is not None


def test_how_large_orthogonal_factors_are() -> None:
    torch.manual_seed(0)
    layer = made(nn.Linear(3000, 2000), "orthogonal", r=16)
    ((a, b),) = layer.factors("default")
    # A random rotation keeps the length: half of 16 values of deviation 0.1 a column.
    assert a.std().item() == pytest.approx(0.1 / math.sqrt(2), rel=0.05)
    assert b.std().item() == pytest.approx(0.1 / math.sqrt(2), rel=0.05)


@pytest.mark.parametrize("init", [*PRINCIPAL, "orthogonal", False])
def test_an_embedding_begins_as_by_default_but_for_false(init: bool | str) -> None:
    base = nn.Embedding(8, 5)
    before = base.weight.clone()
    layer = made(base, init)
    assert torch.equal(base.weight, before)
    assert layer.lora_embedding_A["default"].any().item() == (init is False)


@pytest.mark.parametrize("init", [*PRINCIPAL, "orthogonal"])
def test_a_model_that_was_on_meta_begins_like_another(init: str) -> None:
    with torch.device("meta"):
        base = nn.Linear(12, 9)
    layer = made(base, init)
    model = nn.ModuleDict({"x": layer})
    model.to_empty(device="cpu")
    reference = base_of("wide")
    base.load_state_dict(reference.state_dict())
    initialize(model)
    x = torch.randn(7, 12)
    torch.testing.assert_close(layer(x), reference(x), rtol=0, atol=3e-6)
    with warnings.catch_warnings(record=True, action="always") as told, disable_adapters(model):
        assert torch.equal(layer(x), reference(x)) == (init == "orthogonal")
    assert len(told) == (init != "orthogonal")


def test_a_weight_on_meta_has_no_principal_part() -> None:
    with torch.device("meta"):
        base = nn.Linear(12, 9)
    layer = made(base, "pissa")
    with pytest.raises(ConfigError, match="'pissa', which needs the values of the layer's weight"):
        layer.initialize("default")


@pytest.mark.parametrize("init", PRINCIPAL)
def test_dora_begins_with_the_lengths_of_the_whole_weight(init: str) -> None:
    base = base_of("wide")
    weight = matrix(base)
    x = given_to(base)
    before = base(x)
    layer = made(base, init, use_dora=True)
    magnitude = layer.lora_magnitude_vector["default"].weight
    torch.testing.assert_close(magnitude.double(), weight.norm(dim=1), rtol=1e-5, atol=0)
    torch.testing.assert_close(layer(x), before, rtol=0, atol=5e-6)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)


def test_a_failure_half_way_gives_the_weights_back() -> None:
    model = Pair()
    with torch.no_grad():
        model.second.weight[0, 0] = math.nan
    before = model.first.weight.clone()
    with pytest.raises(torch.linalg.LinAlgError):
        inject(model, LoRA, LoRAParams(r=2, init_lora_weights="pissa"))
    assert torch.equal(model.first.weight, before)
    assert type(model.first) is nn.Linear


def test_weights_that_others_use_are_not_changed() -> None:
    model = Pair()
    model.second.weight = model.first.weight
    params = LoRAParams(target_modules=["first"], r=2, init_lora_weights="pissa")
    with pytest.raises(ConfigError, match="first: a new adapter would change a weight that others"):
        inject(model, LoRA, params)
    nn.utils.parametrizations.weight_norm(model.first)
    with pytest.raises(ConfigError, match="that is computed from others"):
        inject(model, LoRA, params)


def test_an_adapter_that_changes_the_base_is_alone() -> None:
    changing, plain = LoRAParams(r=2, init_lora_weights="olora"), LoRAParams(r=2)
    model = Pair()
    inject(model, LoRA, plain)
    with pytest.raises(
        ConfigError, match="would change the weights that the adapters of the model"
    ):
        add_adapter(model, LoRA, changing, "second")
    model = Pair()
    inject(model, LoRA, changing)
    with pytest.raises(ConfigError, match="an adapter that changed its weights"):
        add_adapter(model, LoRA, plain, "second")
