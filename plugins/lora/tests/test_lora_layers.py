"""LoRA's layers for matrices against explicit mathematics in float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core_plugin.adapters import add_adapter, base_name, inject, merge, set_adapter
from core_plugin.errors import ConfigError
from core_plugin_lora.embedding import LoRAEmbedding
from core_plugin_lora.linear import LoRAConv1D, LoRALinear
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


class ScaledEmbedding(nn.Embedding):
    """An embedding as of Gemma and Bart, which multiplies what it gives."""

    def __init__(self, *sizes: int, embed_scale: float | Tensor) -> None:
        super().__init__(*sizes)
        self.embed_scale = embed_scale

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.embed_scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=3)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(self.tokens(tokens)))))


TARGETS = ["tokens", "up", "down"]
TOKENS = torch.tensor([[0, 3, 10, 5], [5, 5, 1, 3]])


def injected(model: nn.Module, random: bool = True, **settings: Any) -> Any:
    inject(model, LoRA, LoRAParams(**{"r": 3, "target_modules": ["x"], **settings}))
    if random:
        randomize(model)
    return model


def randomize(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)


def seeded(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def layer(base: nn.Module, **settings: Any) -> Any:
    return injected(nn.ModuleDict({"x": base}), **settings)["x"]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    r=st.integers(1, 6),
    alpha=st.floats(0.5, 32),
    rslora=st.booleans(),
    bias=st.booleans(),
    transposed=st.booleans(),
    lora_bias=st.booleans(),
)
def test_linear_is_the_mathematics(
    shape: list[int],
    sizes: tuple[int, int],
    r: int,
    alpha: float,
    rslora: bool,
    bias: bool,
    transposed: bool,
    lora_bias: bool,
) -> None:
    torch.manual_seed(0)
    inputs, outputs = sizes
    base = Conv1D(outputs, inputs) if transposed else nn.Linear(inputs, outputs, bias=bias)
    adapted = layer(base, r=r, lora_alpha=alpha, use_rslora=rslora, lora_bias=lora_bias)
    assert type(adapted) is (LoRAConv1D if transposed else LoRALinear)
    x = torch.randn(*shape, inputs)
    a, b = (m["default"].weight.double() for m in (adapted.lora_A, adapted.lora_B))
    scaling = alpha / (r**0.5 if rslora else r)
    weight = (base.weight.T if transposed else base.weight).double() + scaling * b @ a
    expected = x.double() @ weight.T
    if base.bias is not None:
        expected = expected + base.bias.double()
    if lora_bias:
        expected = expected + scaling * adapted.lora_B["default"].bias.double()
    torch.testing.assert_close(adapted(x).double(), expected, rtol=1e-4, atol=1e-4)
    assert adapted(x).shape == (*shape, outputs)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[0], torch.tensor(5), TOKENS[:0]])
def test_embedding_is_the_mathematics(
    tokens: Tensor, padding_idx: int | None, rslora: bool
) -> None:
    torch.manual_seed(0)
    base = nn.Embedding(11, 6, padding_idx=padding_idx)
    adapted = layer(base, r=4, lora_alpha=6, use_rslora=rslora)
    assert isinstance(adapted, LoRAEmbedding)
    table = base.weight.double() + update(adapted, scaling=6 / (2 if rslora else 4)).T
    torch.testing.assert_close(adapted(tokens).double(), table[tokens], rtol=1e-5, atol=1e-5)


def update(adapted: Any, scaling: float, name: str = "default") -> Tensor:
    ((a, b),) = adapted.factors(name)
    return scaling * b.double() @ a.double()


@pytest.mark.parametrize("scale", [2.5, torch.tensor(2.5)])
def test_an_embedding_that_scales_scales_the_update_too(scale: float | Tensor) -> None:
    torch.manual_seed(0)
    adapted = layer(ScaledEmbedding(11, 6, embed_scale=scale), lora_alpha=6)
    table = 2.5 * (adapted.base_layer.weight.double() + update(adapted, 2.0).T)
    torch.testing.assert_close(adapted(TOKENS).double(), table[TOKENS], rtol=1e-5, atol=1e-5)
    before = adapted(TOKENS)
    merge(adapted)
    torch.testing.assert_close(adapted(TOKENS), before)


def test_the_padding_row_gets_no_gradient() -> None:
    model = injected(seeded(), target_modules=["tokens"])
    model(TOKENS).square().sum().backward()
    columns = model.tokens.lora_embedding_A["default"].grad.abs().sum(0)
    used = sorted(set(TOKENS.flatten().tolist()) - {3})
    assert columns.nonzero().flatten().tolist() == used


def test_gradients_are_divided_by_how_often_a_token_is_there() -> None:
    plain = injected(nn.ModuleDict({"x": nn.Embedding(11, 6)}))
    model = injected(nn.ModuleDict({"x": nn.Embedding(11, 6, scale_grad_by_freq=True)}))
    model.load_state_dict(plain.state_dict())
    for m in (plain, model):
        m["x"](TOKENS).sum().backward()
    found, whole = (m["x"].lora_embedding_A["default"].grad for m in (model, plain))
    torch.testing.assert_close(found * TOKENS.flatten().bincount(minlength=11).clamp(min=1), whole)


def test_with_max_norm_a_part_of_a_row_is_shortened_and_so_not_merged() -> None:
    torch.manual_seed(0)
    adapted = layer(nn.Embedding(11, 6, max_norm=0.5), r=2)
    result, ((a, b),) = adapted(TOKENS), adapted.factors("default")
    assert (a.t()[TOKENS].norm(dim=-1) <= 0.5 + 1e-6).all()
    torch.testing.assert_close(result - adapted.base_layer(TOKENS), 8 * a.t()[TOKENS] @ b.t())
    with pytest.raises(ConfigError, match="max_norm"):
        merge(adapted)


@pytest.mark.parametrize("base", [nn.Linear(4, 5), nn.Embedding(7, 4), Conv1D(5, 4)])
def test_several_adapters_add_up(base: nn.Module) -> None:
    torch.manual_seed(0)
    model = injected(nn.ModuleDict({"x": base}), r=2, lora_alpha=2)
    add_adapter(model, LoRA, LoRAParams(r=3, lora_alpha=1, target_modules=["x"]), "other")
    set_adapter(model, ["default", "other"])
    randomize(model)
    x = torch.arange(5) if isinstance(base, nn.Embedding) else torch.randn(6, 4)
    alone = []
    for name in ("default", "other"):
        set_adapter(model, name)
        alone.append(model["x"](x) - base(x))
    set_adapter(model, ["default", "other"])
    torch.testing.assert_close(model["x"](x), base(x) + sum(alone))
    before = model["x"](x)
    merge(model)
    torch.testing.assert_close(model["x"](x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_new_adapter_changes_nothing(dtype: torch.dtype) -> None:
    model = injected(seeded().to(dtype), random=False, target_modules=TARGETS)
    expected = seeded().to(dtype)(TOKENS)
    assert torch.equal(model(TOKENS), expected)
    assert model(TOKENS).dtype == dtype


def test_the_adapters_gradients_are_those_of_the_mathematics() -> None:
    model, base = injected(seeded().double(), target_modules=TARGETS), seeded().double()
    copies = {n: p.detach().clone().requires_grad_() for n, p in trained(model).items()}
    scaling = 16 / 3

    def update(layer: str) -> Tensor:
        a, b = (copies[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        return scaling * b @ a

    a, b = (copies[f"tokens.lora_embedding_{part}.default"] for part in "AB")
    padding = torch.arange(11) == 3  # its column is not trained
    table = scaling * (b @ torch.where(padding, a.detach(), a)).T
    x = (base.tokens.weight.detach() + table)[TOKENS]
    x = torch.tanh(base.up(x) + x @ update("up").T)
    base.head(base.down(x) + x @ update("down").T).square().sum().backward()
    model(TOKENS).square().sum().backward()
    for name, parameter in trained(model).items():
        torch.testing.assert_close(parameter.grad, copies[name].grad)


def test_a_bfloat16_base_keeps_float32_adapters_and_gives_bfloat16() -> None:
    model = injected(seeded().bfloat16(), target_modules=TARGETS)
    wide = injected(seeded().bfloat16().double(), target_modules=TARGETS)
    for name, parameter in trained(model).items():
        assert parameter.dtype == torch.float32
        wide.get_parameter(name).data.copy_(parameter.detach())
    result = model(TOKENS)
    assert result.dtype == torch.bfloat16
    expected = wide(TOKENS)
    assert (result - expected).abs().max() < 0.05 * expected.abs().max()
    result.float().square().sum().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 for p in trained(model).values()
    )


def test_autocast_gives_what_the_base_gives() -> None:
    model, base = injected(seeded(), target_modules=TARGETS), seeded()
    with torch.autocast("cpu", torch.bfloat16):
        result, of_base = model(TOKENS), base(TOKENS)
        assert model.tokens(TOKENS).dtype == base.tokens(TOKENS).dtype == torch.float32
    assert result.dtype == of_base.dtype == torch.bfloat16
    expected = model(TOKENS)
    assert (result - expected).abs().max() < 0.05 * expected.abs().max()


def test_values_from_meta_are_those_of_a_real_model() -> None:
    with torch.device("meta"):
        model = Model()
    injected(model, random=False, target_modules=TARGETS)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict({n: torch.full_like(p, 7.0) for n, p in model.state_dict().items()})
    real = seeded()
    names = {name: base_name(name) for name in model.state_dict()}
    for name, before in names.items():
        if before in real.state_dict():
            model.state_dict()[name].copy_(real.state_dict()[before])
    reference = injected(seeded(), random=False, target_modules=TARGETS)
    for filled in (model, reference):
        torch.manual_seed(5)
        for module in filled.modules():
            if getattr(module, "is_adapter", False):
                module.reset_parameters()
    assert model.state_dict().keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_injecting_draws_only_what_it_keeps() -> None:
    torch.manual_seed(0)
    expected = torch.empty(3, 6).uniform_(-(6**-0.5), 6**-0.5)
    after = torch.rand(1)
    model = nn.ModuleDict({"x": nn.Linear(6, 5)})
    torch.manual_seed(0)
    injected(model, random=False)
    torch.testing.assert_close(model["x"].lora_A["default"].weight, expected, rtol=0, atol=0)
    assert torch.equal(torch.rand(1), after)


def test_the_bias_of_b_is_merged_with_the_scaling() -> None:
    torch.manual_seed(0)
    adapted, x = layer(nn.Linear(4, 5), lora_bias=True), torch.randn(3, 4)
    before = adapted(x)
    merge(adapted)
    torch.testing.assert_close(adapted(x), before)


def test_a_bias_of_b_cannot_be_merged_into_a_layer_without_one() -> None:
    adapted = layer(nn.Linear(4, 5, bias=False), lora_bias=True)
    with pytest.raises(ConfigError, match="the adapter has a bias, and the layer has none"):
        merge(adapted)


def test_adapters_of_other_ranks_are_switched() -> None:
    model = injected(seeded(), random=False, target_modules=["up"], r=2)
    nn.init.normal_(model.up.lora_B["default"].weight)
    first = model(TOKENS)
    params = LoRAParams(r=5, lora_alpha=1, target_modules=["up", "tokens"])
    add_adapter(model, LoRA, params, "second")
    set_adapter(model, "second")
    assert torch.equal(model(TOKENS), seeded()(TOKENS))
    set_adapter(model, "default")
    assert torch.equal(model(TOKENS), first)


class Quantized(nn.Linear):
    """A layer whose weight is packed; it still has the sizes of a linear one."""

    def __init__(self) -> None:
        super().__init__(4, 6)
        packed = torch.zeros(12, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True) + torch.arange(6.0)


@pytest.mark.parametrize(
    ("base", "settings", "fault"),
    [
        (nn.Embedding(4, 4), {"lora_bias": True}, "x: lora_bias is not for embeddings"),
        (Quantized(), {"use_dora": True}, "x: use_dora needs the layer's weight, .* quantised"),
        (Quantized(), {"init_lora_weights": "olora"}, "x: olora needs the layer's weight"),
        (nn.Linear(4, 2), {"init_lora_weights": "pissa"}, "x: pissa has directions .* up to 2"),
        (nn.LSTM(4, 4), {}, "x: LoRA has no layer for LSTM"),
        (nn.LazyLinear(3), {}, "x: the layer has no size before its first input"),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    base: nn.Module, settings: dict[str, Any], fault: str
) -> None:
    model = nn.ModuleDict({"x": base, "y": nn.Linear(4, 4)})
    with pytest.raises(ConfigError, match=fault):
        injected(model, random=False, target_modules=["x", "y"], **settings)
    assert model["x"] is base
    assert type(model["y"]) is nn.Linear


def test_a_quantised_layer_is_adapted_without_its_weight() -> None:
    torch.manual_seed(0)
    adapted, x = layer(Quantized()), torch.randn(5, 4)
    expected = adapted.base_layer(x) + (update(adapted, 16 / 3) @ x.double().T).T
    torch.testing.assert_close(adapted(x).double(), expected, rtol=1e-4, atol=1e-4)
    adapted(x).sum().backward()
    assert adapted.lora_B["default"].weight.grad is not None


@pytest.mark.parametrize("init", [True, "gaussian"])
def test_how_a_new_adapter_is_drawn(init: bool | str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"x": nn.Linear(400, 50), "e": nn.Embedding(9, 400)})
    injected(model, random=False, target_modules=["x", "e"], r=50, init_lora_weights=init)
    a, b = model["x"].lora_A["default"].weight, model["x"].lora_B["default"].weight
    if init is True:
        assert a.abs().max() <= 400**-0.5
        assert a.std().item() == pytest.approx(400**-0.5 / math.sqrt(3), rel=0.02)
    else:
        assert a.std().item() == pytest.approx(1 / 50, rel=0.02)
        assert a.abs().max() > 3 / 50
    assert not b.any()
    assert not model["e"].lora_embedding_A["default"].any()
    assert model["e"].lora_embedding_B["default"].std().item() == pytest.approx(1, rel=0.02)
