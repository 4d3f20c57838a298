"""DoRA against explicit mathematics in float64: https://arxiv.org/abs/2402.09353."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core_plugin.adapters import add_adapter, initialize, inject, merge, set_adapter, unmerge
from core_plugin.errors import ConfigError
from core_plugin_lora import dora
from core_plugin_lora.dora import row_norms
from core_plugin_lora.plugin import LoRA, LoRAParams

SCALING = 2.0


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
BASES = {
    "linear": lambda: nn.Linear(6, 5),
    "no bias": lambda: nn.Linear(6, 5, bias=False),
    "gpt2": lambda: Conv1D(5, 6),
    "embedding": lambda: nn.Embedding(11, 5),
}
LINEAR = ["linear", "no bias", "gpt2"]


def made(kind: str, random: bool = True, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({"x": BASES[kind]().to(dtype)})
    params = {"r": 3, "lora_alpha": 3 * SCALING, "use_dora": True, "target_modules": ["x"]}
    inject(model, LoRA, LoRAParams(**{**params, **more}))
    if random:
        with torch.no_grad():
            for parameter in parts(model["x"]):
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return model["x"]


def parts(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    ((a, b),) = layer.factors("default")
    return a, b, layer.lora_magnitude_vector["default"].weight


def given_to(kind: str) -> Tensor:
    return torch.arange(9) if kind == "embedding" else torch.randn(2, 4, 6)


def weight_of(layer: Any) -> Tensor:
    """The base's weight as ``[out, in]``."""
    weight = layer.base_layer.weight
    return weight if type(layer.base_layer) is nn.Linear else weight.T


def mathematics(layer: Any, x: Tensor, a: Tensor, b: Tensor, m: Tensor) -> Tensor:
    changed = weight_of(layer).detach().double() + SCALING * b @ a
    direction = changed / changed.detach().norm(dim=1, keepdim=True)
    weight = m[:, None] * direction
    if isinstance(layer.base_layer, nn.Embedding):
        return weight.T[x]
    bias = layer.base_layer.bias
    return x @ weight.T + (0 if bias is None else bias.detach().double())


@pytest.mark.parametrize("kind", BASES)
def test_it_is_the_mathematics(kind: str) -> None:
    layer, x = made(kind), given_to(kind)
    wide = [p.detach().double().requires_grad_() for p in parts(layer)]
    inputs = x.double() if x.is_floating_point() else x
    expected, result = mathematics(layer, inputs, *wide), layer(x)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(result)
    wanted = torch.autograd.grad(expected, wide, upstream.double())
    got = torch.autograd.grad(result, parts(layer), upstream)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", BASES)
def test_a_new_adapter_changes_nothing(kind: str, dtype: torch.dtype) -> None:
    layer, x = made(kind, random=False, dtype=dtype), given_to(kind)
    x = x.to(dtype) if x.is_floating_point() else x
    assert torch.equal(layer(x), layer.base_layer(x))
    norms = weight_of(layer).double().norm(dim=1)
    torch.testing.assert_close(parts(layer)[2].double(), norms, rtol=1e-6, atol=0)


def test_magnitudes_come_with_the_values_of_a_model_that_was_on_meta() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"x": nn.Linear(6, 5)})
    inject(model, LoRA, LoRAParams(use_dora=True, target_modules=["x"]))
    model.to_empty(device="cpu")
    base = model["x"].base_layer
    torch.manual_seed(0)
    base.reset_parameters()
    initialize(model)
    torch.testing.assert_close(parts(model["x"])[2], base.weight.norm(dim=1))


@pytest.mark.parametrize("kind", BASES)
def test_merged_and_back(kind: str) -> None:
    layer, x = made(kind), given_to(kind)
    before, weight = layer(x), layer.base_layer.weight.clone()
    merge(layer)
    torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)
    unmerge(layer)
    assert torch.equal(layer.base_layer.weight, weight)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("kind", LINEAR)
def test_a_base_in_fewer_bits(kind: str) -> None:
    layer = made(kind, dtype=torch.bfloat16)
    x = torch.randn(9, 6, dtype=torch.bfloat16)
    result = layer(x)
    assert result.dtype == torch.bfloat16
    expected = mathematics(layer, x.double(), *(p.double() for p in parts(layer)))
    assert (result - expected).abs().max() < 0.02 * expected.abs().max()
    result.sum().backward()
    assert {p.grad.dtype for p in parts(layer)} == {torch.float32}


def test_a_small_change_of_length_is_seen_in_bfloat16() -> None:
    """Near 1 bfloat16 has steps of 1/128."""
    layer = made("no bias", random=False, dtype=torch.bfloat16)
    parts(layer)[2].data.mul_(1.003)
    x = torch.randn(4000, 6, dtype=torch.bfloat16)
    before, after = layer.base_layer(x).double(), layer(x).double()
    ratio = ((after * before).sum() / before.square().sum()).item()
    assert ratio == pytest.approx(1.003, abs=3e-4)


@pytest.mark.parametrize("kind", BASES)
def test_autocast_leaves_the_lengths_alone(kind: str) -> None:
    layer, x = made(kind), given_to(kind)
    with torch.autocast("cpu", torch.bfloat16):
        result, of_base = layer(x), layer.base_layer(x)
        norms = layer._norms("default")
    assert result.dtype == of_base.dtype
    assert torch.equal(norms, layer._norms("default"))
    assert (result - layer(x)).abs().max() < 0.02 * result.abs().max()


def test_dropout_leaves_the_base_alone() -> None:
    layer, x = made("linear", lora_dropout=0.999), torch.randn(4, 6)
    a, b, m = parts(layer)
    changed = weight_of(layer) + SCALING * b @ a
    factor = m / changed.norm(dim=1)
    dropped = factor * (x @ weight_of(layer).T) + layer.base_layer.bias
    torch.manual_seed(0)
    torch.testing.assert_close(layer(x), dropped)
    layer.eval()
    torch.testing.assert_close(layer(x), dropped + factor * (SCALING * x @ a.T @ b.T))


def test_a_row_of_zeros_stays_one() -> None:
    layer = made("linear", random=False)
    layer.base_layer.weight[2] = 0
    layer.initialize("default")
    x = torch.randn(4, 6)
    assert torch.equal(layer(x), layer.base_layer(x))
    layer(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in parts(layer))


def test_it_applies_alone() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"x": nn.Linear(6, 5)})
    inject(model, LoRA, LoRAParams(use_dora=True, target_modules=["x"]))
    add_adapter(model, LoRA, LoRAParams(target_modules=["x"]), "plain")
    with pytest.raises(ConfigError, match="x: 'default' has use_dora, so it applies alone"):
        set_adapter(model, ["default", "plain"])
    set_adapter(model, "plain")
    assert torch.equal(model["x"](torch.ones(6)), model["x"].base_layer(torch.ones(6)))


# Lengths


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5)),
    size_of_update=st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
    columns=st.integers(1, 50),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
)
def test_lengths_of_rows(
    sizes: tuple[int, int, int],
    size_of_update: float,
    columns: int,
    dtype: torch.dtype,
    transposed: bool,
) -> None:
    outputs, inputs, rank = sizes
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    a, b = torch.randn(rank, inputs), size_of_update * torch.randn(outputs, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dora, "COLUMNS", columns)
        found = row_norms(weight, a, b)
    expected = (weight.double() + b.double() @ a.double()).norm(dim=1)
    scale = weight.double().norm(dim=1) + (b.double() @ a.double()).norm(dim=1)
    assert ((found - expected).abs() / scale).max() < 1e-3
    close = expected > 0.1 * scale  # where the sum does not cancel
    assert not close.any() or ((found - expected).abs() / expected)[close].max() < 2e-5


def test_lengths_of_rows_that_cancel_are_not_imaginary() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 300), torch.randn(200, 4)
    found = row_norms(-(b @ a), a, b)
    assert (found >= 0).all()
    assert (found < 1e-3 * (b @ a).norm(dim=1)).all()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.found = max(self.found, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_the_weights_size_is_made(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 5000).to(dtype)
    a, b = torch.randn(4, 5000), torch.randn(300, 4)
    with Largest() as largest:
        row_norms(weight, a, b)
    assert largest.found <= 300 * dora.COLUMNS
