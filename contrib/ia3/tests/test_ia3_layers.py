"""IA³'s layers against explicit mathematics in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from core_plugin.adapters import add_adapter, disable_adapters, inject, merge, set_adapter, unmerge
from core_plugin.errors import ConfigError
from core_plugin_ia3.plugin import IA3, IA3Params

PLACES = pytest.mark.parametrize("of_input", [False, True], ids=["output", "input"])


def adapted(base: nn.Module, of_input: bool = False, **settings: object) -> nn.Module:
    """A model of one layer, ``x``, with random factors."""
    model = nn.ModuleDict({"x": copy.deepcopy(base)})
    settings |= {"feedforward_modules": ["x"]} if of_input else {}
    inject(model, IA3, IA3Params(target_modules=["x"], **settings))
    nn.init.uniform_(model["x"].ia3_l["default"], 0.5, 2)
    return model


def factors(model: nn.Module, adapter: str = "default") -> Tensor:
    return model["x"].ia3_l[adapter].detach().flatten()


@PLACES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 3), (2, 4, 3)])
def test_linear_is_the_mathematics(shape: tuple[int, ...], bias: bool, of_input: bool) -> None:
    torch.manual_seed(0)
    base = nn.Linear(3, 5, bias=bias).double()
    model, x = adapted(base, of_input), torch.randn(*shape, dtype=torch.float64)
    vector = factors(model)
    assert model["x"].ia3_l["default"].shape == ((1, 3) if of_input else (5, 1))
    weight = base.weight * vector if of_input else base.weight * vector[:, None]
    offset = 0 if base.bias is None else base.bias * (1 if of_input else vector)
    torch.testing.assert_close(model["x"](x), x @ weight.T + offset)


@PLACES
def test_gpt2s_linear_layer_is_the_mathematics(of_input: bool) -> None:
    torch.manual_seed(0)
    base = Conv1D(5, 3).double()
    nn.init.normal_(base.bias)
    model, x = adapted(base, of_input), torch.randn(2, 4, 3, dtype=torch.float64)
    vector = factors(model)
    assert model["x"].ia3_l["default"].shape == ((1, 3) if of_input else (5, 1))
    if of_input:
        expected = (x * vector) @ base.weight + base.bias
    else:
        expected = (x @ base.weight + base.bias) * vector
    torch.testing.assert_close(model["x"](x), expected)


CONVOLUTIONS = [
    (nn.Conv2d, {}),
    (nn.Conv2d, {"groups": 2, "stride": 2, "padding": 1}),
    (nn.Conv2d, {"groups": 4, "padding": "same", "dilation": 2, "bias": False}),
    (nn.Conv2d, {"padding": 1, "padding_mode": "reflect"}),
    (nn.Conv3d, {"groups": 2, "padding": 1}),
]


@PLACES
@pytest.mark.parametrize(("kind", "settings"), CONVOLUTIONS)
def test_convolutions_are_the_mathematics(kind: type, settings: dict, of_input: bool) -> None:
    torch.manual_seed(0)
    base = kind(4, 8, 3, **settings).double()
    spatial = len(base.kernel_size)
    model, x = adapted(base, of_input), torch.randn(2, 4, *[6] * spatial, dtype=torch.float64)
    vector = model["x"].ia3_l["default"].detach()
    assert vector.shape == (1, 4 if of_input else 8, *[1] * spatial)
    expected = base(x * vector) if of_input else base(x) * vector
    torch.testing.assert_close(model["x"](x), expected)
    torch.testing.assert_close(model["x"](x[0]), expected[0])


@PLACES
@pytest.mark.parametrize(
    "base",
    [nn.Linear(3, 5), nn.Linear(3, 5, bias=False), Conv1D(5, 3)]
    + [kind(4, 8, 3, **settings) for kind, settings in CONVOLUTIONS],
)
def test_merging_gives_the_same_layer(base: nn.Module, of_input: bool) -> None:
    torch.manual_seed(0)
    model = adapted(base.double(), of_input)
    inputs = {2: (4, 3), 4: (2, 4, 6, 6), 5: (2, 4, 6, 6, 6)}[base.weight.dim()]
    x = torch.randn(*inputs, dtype=torch.float64)
    expected, before = model["x"](x), copy.deepcopy(model["x"].base_layer.state_dict())
    merge(model)
    torch.testing.assert_close(model["x"].base_layer(x), expected)
    torch.testing.assert_close(model["x"](x), expected)
    unmerge(model)
    for name, tensor in model["x"].base_layer.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_adapters_that_are_active_together_are_multiplied() -> None:
    torch.manual_seed(0)
    base = nn.Linear(3, 5).double()
    model, x = adapted(base), torch.randn(2, 3, dtype=torch.float64)
    for name, of_input in (("second", False), ("third", True)):
        rule = ["x"] if of_input else None
        params = IA3Params(target_modules=["x"], feedforward_modules=rule)
        add_adapter(model, IA3, params, name)
        nn.init.uniform_(model["x"].ia3_l[name], 0.5, 2)
    set_adapter(model, ["default", "second", "third"])
    expected = base(x * factors(model, "third")) * factors(model) * factors(model, "second")
    torch.testing.assert_close(model["x"](x), expected)
    set_adapter(model, "third")
    torch.testing.assert_close(model["x"](x), base(x * factors(model, "third")))
    with disable_adapters(model):
        assert torch.equal(model["x"](x), base(x))


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_new_adapter_changes_nothing(dtype: torch.dtype, of_input: bool) -> None:
    torch.manual_seed(0)
    base, x = nn.Linear(3, 5).to(dtype), torch.randn(4, 3).to(dtype)
    model = adapted(base, of_input)
    model["x"].ia3_l.reset_parameters()
    assert torch.equal(model["x"](x), base(x))
    wide = dtype == torch.float64
    assert model["x"].ia3_l["default"].dtype == (torch.float64 if wide else torch.float32)


def test_a_small_change_is_not_lost_in_a_base_of_few_bits() -> None:
    torch.manual_seed(0)
    base, x = nn.Linear(64, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    model = adapted(base)
    nn.init.constant_(model["x"].ia3_l["default"], 1.003)
    result = model["x"](x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, (base(x).float() * 1.003).bfloat16())
    assert not torch.equal(result, base(x))


@PLACES
def test_gradients_are_those_of_the_mathematics(of_input: bool) -> None:
    torch.manual_seed(0)
    model = adapted(nn.Linear(3, 5).double(), of_input)
    layer, x = model["x"], torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    vector = layer.ia3_l["default"]

    def function(vector: Tensor, x: Tensor) -> Tensor:
        flat, base = vector.flatten(), layer.base_layer
        return base(x * flat) if of_input else base(x) * flat

    layer(x).square().sum().backward()
    expected = torch.autograd.grad(function(vector, x).square().sum(), (vector, x))
    torch.testing.assert_close((vector.grad, x.grad), expected)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["x.ia3_l.default"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.key = nn.Linear(6, 6)
        self.down = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.key(self.tokens(tokens)))))


@pytest.mark.parametrize(
    ("settings", "of_input"),
    [
        ({"target_modules": ["key", "down"], "feedforward_modules": ["down"]}, ["down"]),
        ({"target_modules": "key|down", "feedforward_modules": ".*own"}, ["down"]),
        ({"feedforward_modules": ["key"]}, ["key"]),
        ({"target_modules": ["key"]}, []),
        ({"feedforward": True}, ["key", "down"]),
    ],
)
def test_which_layers_scale_their_input(settings: dict, of_input: list[str]) -> None:
    model, params = Model(), IA3Params(**settings)
    inject(model, IA3, params)
    vectors = {n.split(".")[0]: p for n, p in model.named_parameters() if p.requires_grad}
    assert [name for name, vector in vectors.items() if vector.shape == (1, 6)] == of_input
    # What is written says it as well, in one field.
    written = IA3Params(
        target_modules=list(vectors), feedforward_modules=IA3.config(params)["feedforward_modules"]
    )
    again = Model()
    inject(again, IA3, written)
    assert {n: t.shape for n, t in again.state_dict().items()} == {
        n: t.shape for n, t in model.state_dict().items()
    }


def test_defaults_come_from_the_architecture() -> None:
    model = Model()
    defaults = {"target_modules": ["key", "down"], "feedforward_modules": ["down"]}
    inject(model, IA3, IA3Params(), defaults=defaults)
    assert model.key.ia3_l["default"].shape == (6, 1)
    assert model.down.ia3_l["default"].shape == (1, 6)


def test_feedforward_modules_that_are_no_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"feedforward_modules has \['up'\], which target_modules"):
        IA3Params(target_modules=["key", "down"], feedforward_modules=["down", "up"])
    with pytest.raises(ValueError, match=r"feedforward_modules: '\(' is not a regular expression"):
        IA3Params(feedforward_modules="(")
    with pytest.raises(ConfigError, match=r"feedforward_modules: .*'up'"):
        inject(Model(), IA3, IA3Params(feedforward_modules=["up"]))


def test_a_layer_that_has_no_vectors_is_named() -> None:
    with pytest.raises(ConfigError, match="tokens: IA3 has no layer for Embedding"):
        inject(Model(), IA3, IA3Params(target_modules=["tokens", "key"]))


def test_a_model_on_meta_gets_vectors_on_meta() -> None:
    with torch.device("meta"):
        model = Model()
    inject(model, IA3, IA3Params())
    assert all(p.is_meta for p in model.parameters())
