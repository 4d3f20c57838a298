"""LoRA for nn.MultiheadAttention against torch's own with other weights, in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from core_plugin.adapters import (
    add_adapter,
    disable_adapters,
    inject,
    merge,
    per_sample,
    set_adapter,
    unload,
    unmerge,
)
from core_plugin.adapters.layer import Adapter
from core_plugin.errors import ConfigError
from core_plugin_lora.attention import LoRAAttention
from core_plugin_lora.plugin import LoRA, LoRAParams

WIDTH, HEADS = 8, 2
QUERY = torch.linspace(-3, 4, 3 * 5 * WIDTH).sin().view(3, 5, WIDTH).double()
KEY = torch.linspace(-1, 9, 3 * 4 * WIDTH).cos().view(3, 4, WIDTH).double()
VALUE = torch.linspace(2, 5, 3 * 4 * WIDTH).sin().view(3, 4, WIDTH).double()
PADDING = torch.tensor([[False, False, False, True], [False] * 4, [False, True, True, True]])


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})
        self.double()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attention(*args, **kwargs)


def adapted(settings: dict[str, Any] | None = None, **options: Any) -> Model:
    """A model with an adapter that has random values."""
    made = Model(**options)
    params = {"target_modules": ["attention"], "r": 3, "lora_alpha": 6, **(settings or {})}
    inject(made, LoRA, LoRAParams(**params))
    randomize(made.attention)
    return made


def randomize(layer: LoRAAttention, name: str = "default") -> None:
    for _, _, parameter in layer.adapter_parameters(name):
        nn.init.normal_(parameter, std=0.3)


def factors(layer: LoRAAttention, name: str = "default") -> list[Tensor]:
    return [p for _, _, p in layer.adapter_parameters(name)]


def with_weights(layer: LoRAAttention, *names: str) -> nn.MultiheadAttention:
    """Torch's attention with the weights that the adapters stand for.

    As in the peft library, the output projection's update counts twice.
    """
    attention = copy.deepcopy(layer.base_layer)
    for name in names:
        a, b, out_a, out_b = (p.detach() for p in factors(layer, name))
        scaling = layer.params[name].scaling
        attention.in_proj_weight.data += scaling * torch.einsum("or,ri->oi", b, a)
        attention.out_proj.weight.data += 2 * scaling * torch.einsum("or,ri->oi", out_b, out_a)
    return attention


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


# What it computes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}], ids=str)
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"need_weights": False},
        {"key_padding_mask": PADDING, "average_attn_weights": False},
        {"attn_mask": torch.eye(5, 4, dtype=torch.bool)},
    ],
    ids=lambda kwargs: ", ".join(kwargs),
)
def test_it_is_attention_with_the_updated_weights(
    training: bool, grad: bool, options: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    made = adapted(**options).train(training)
    reference = with_weights(made.attention, "default")
    with torch.set_grad_enabled(grad):
        assert_close(made(QUERY, KEY, VALUE, **kwargs), reference(QUERY, KEY, VALUE, **kwargs))


@pytest.mark.parametrize("training", [True, False])
def test_self_attention_with_the_batch_second(training: bool) -> None:
    made = adapted(batch_first=False).train(training)
    reference = with_weights(made.attention, "default")
    with torch.no_grad():
        assert_close(made(QUERY, QUERY, QUERY), reference(QUERY, QUERY, QUERY))


@pytest.mark.parametrize("rslora", [False, True])
def test_the_scaling(rslora: bool) -> None:
    made = adapted({"r": 4, "lora_alpha": 6, "use_rslora": rslora})
    assert made.attention.params["default"].scaling == (3 if rslora else 1.5)
    reference = with_weights(made.attention, "default")
    assert_close(made(QUERY, KEY, VALUE), reference(QUERY, KEY, VALUE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("init", [True, "gaussian", "eva"])
def test_a_new_adapter_changes_nothing(dtype: torch.dtype, init: bool | str) -> None:
    made, args = Model().to(dtype), [x.to(dtype) for x in (QUERY, KEY, VALUE)]
    expected = made(*args)
    inject(made, LoRA, LoRAParams(target_modules=["attention"], init_lora_weights=init))
    for one, other in zip(made(*args), expected, strict=True):
        assert torch.equal(one, other)
    assert {p.dtype for p in factors(made.attention)} == {
        torch.float64 if dtype == torch.float64 else torch.float32
    }


# Gradients, and the model's own weights


def test_gradients_are_right() -> None:
    made = adapted({"r": 2})
    names = [own for own, _, _ in made.attention.adapter_parameters("default")]

    def run(query: Tensor, *given: Tensor) -> Tensor:
        parameters = dict(zip(names, given, strict=True))
        args = (query, KEY, VALUE)
        return torch.func.functional_call(made.attention, parameters, args)[0]

    inputs = (QUERY.clone().requires_grad_(), *factors(made.attention))
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_the_models_own_parameters_are_not_touched() -> None:
    made = adapted()
    base = made.attention.base_layer
    before = {name: (p, p.clone(), p._version) for name, p in base.named_parameters()}
    made(QUERY, KEY, VALUE)[0].sum().backward()
    with pytest.raises(RuntimeError, match="attn_mask"):
        made(QUERY, KEY, VALUE, attn_mask=torch.eye(2, dtype=torch.bool))
    for name, parameter in base.named_parameters():
        held, copied, version = before[name]
        assert parameter is held
        assert torch.equal(parameter, copied)
        assert (parameter._version, parameter.grad) == (version, None)
    assert all(p.grad is not None and p.grad.any() for p in factors(made.attention))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_gradients(reentrant: bool) -> None:
    made = adapted()
    query = QUERY.clone().requires_grad_()
    made(query, KEY, VALUE)[0].square().sum().backward()
    expected = [p.grad.clone() for p in factors(made.attention)]
    made.zero_grad()
    again = torch.utils.checkpoint.checkpoint(made, query, KEY, VALUE, use_reentrant=reentrant)
    again[0].square().sum().backward()
    assert_close([p.grad for p in factors(made.attention)], expected)


# Inside torch's own layers, which read the weights where they can


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_transformer_layers_call_it(grad: bool, masked: bool) -> None:
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0, batch_first=True).double()
    inject(made, LoRA, LoRAParams(target_modules=["self_attn"]))
    randomize(made.self_attn)
    mask = PADDING if masked else None
    expected = made.train()(KEY, src_key_padding_mask=mask)
    with torch.set_grad_enabled(grad):
        assert_close(made.eval()(KEY, src_key_padding_mask=mask), expected)
    made.self_attn = with_weights(made.self_attn, "default")
    assert_close(made(KEY, src_key_padding_mask=mask), expected)


def test_a_transformer_layer_that_it_is_put_into_calls_it() -> None:
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0, batch_first=True).double()
    layer, params = LoRAAttention(made.self_attn), LoRAParams()
    layer.add(Adapter("default", LoRA, params), params)
    layer.activate(["default"])
    randomize(layer)
    made.self_attn = layer
    expected = made(KEY)
    with torch.no_grad():
        assert_close(made.eval()(KEY), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_transformer_encoder_in_evaluation_takes_padding() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0, batch_first=True)
    made = nn.TransformerEncoder(layer, 2).double()
    inject(made, LoRA, LoRAParams(target_modules=["self_attn"]))
    for inner in made.layers:
        randomize(inner.self_attn)
    expected = made.train()(KEY, src_key_padding_mask=PADDING)
    with torch.no_grad():
        found = made.eval()(KEY, src_key_padding_mask=PADDING)
    assert_close(found[~PADDING], expected[~PADDING])


# Names


def test_names_in_memory_and_in_the_file() -> None:
    made = adapted()
    shapes = {
        in_file: list(p.shape) for _, in_file, p in made.attention.adapter_parameters("default")
    }
    assert shapes == {
        "lora_A.weight": [3, WIDTH],
        "lora_B.weight": [3 * WIDTH, 3],
        "base_layer.out_proj.lora_A.weight": [3, WIDTH],
        "base_layer.out_proj.lora_B.weight": [WIDTH, 3],
    }
    for own, _, parameter in made.attention.adapter_parameters("default"):
        assert made.attention.get_parameter(own) is parameter


# Merging, several adapters, several samples


def test_merged_is_unmerged() -> None:
    made = adapted()
    expected = made(QUERY, KEY, VALUE)
    before = {name: p.clone() for name, p in made.attention.base_layer.named_parameters()}
    merge(made)
    assert_close(made(QUERY, KEY, VALUE), expected)
    unmerge(made)
    for name, parameter in made.attention.base_layer.named_parameters():
        assert torch.equal(parameter, before[name])
    assert_close(made(QUERY, KEY, VALUE), expected)
    unload(made)
    assert type(made.attention) is nn.MultiheadAttention
    assert type(made.attention.in_proj_weight) is nn.Parameter
    assert_close(made(QUERY, KEY, VALUE), expected)


def test_several_adapters() -> None:
    made = adapted()
    add_adapter(made, LoRA, LoRAParams(target_modules=["attention"], r=2), "other")
    randomize(made.attention, "other")
    outputs = {}
    for names in (["default"], ["other"], ["default", "other"]):
        set_adapter(made, names)
        outputs[tuple(names)] = made(QUERY, KEY, VALUE)
        reference = with_weights(made.attention, *names)
        assert_close(outputs[tuple(names)], reference(QUERY, KEY, VALUE))
    with disable_adapters(made):
        base = made(QUERY, KEY, VALUE)
    assert_close(base, made.attention.base_layer(QUERY, KEY, VALUE))
    made.eval()
    with torch.no_grad(), per_sample(made, ["other", "__base__", "default"]):
        output, weights = made(QUERY, KEY, VALUE, key_padding_mask=None)
    for i, expected in enumerate((outputs[("other",)], base, outputs[("default",)])):
        assert_close((output[i], weights[i]), (expected[0][i], expected[1][i]))


def test_samples_need_the_batch_to_be_first() -> None:
    made = adapted(batch_first=False).eval()
    with (
        pytest.raises(ConfigError, match="cannot tell samples apart"),
        per_sample(made, ["default"]),
    ):
        pass


# Within a model


@pytest.mark.parametrize(
    ("options", "settings", "why"),
    [
        ({"kdim": 4}, {}, "keys and values are as wide as queries"),
        ({}, {"lora_dropout": 0.1}, "lora_dropout is not for nn.MultiheadAttention"),
        ({}, {"use_dora": True}, "use_dora is not for nn.MultiheadAttention"),
        ({}, {"lora_bias": True}, "lora_bias is not for nn.MultiheadAttention"),
        ({}, {"init_lora_weights": "olora"}, "'olora' is not for nn.MultiheadAttention"),
    ],
)
def test_what_has_no_adapter_says_why(
    options: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    made = Model(**options)
    attention = made.attention
    with pytest.raises(ConfigError, match=why):
        inject(made, LoRA, LoRAParams(target_modules=["attention"], **settings))
    assert made.attention is attention


def test_a_parametrized_one_has_none() -> None:
    made = Model()
    parametrizations.orthogonal(made.attention, "in_proj_weight")
    with pytest.raises(ConfigError, match=r"a parametrized nn\.MultiheadAttention"):
        inject(made, LoRA, LoRAParams(target_modules=["attention"]))


def test_autocast_leaves_the_weights_precision_alone() -> None:
    made = adapted().float()
    args = [x.float() for x in (QUERY, KEY, VALUE)]
    reference = with_weights(made.attention, "default")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = made(*args), reference(*args)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    assert found[0].dtype == expected[0].dtype


def test_it_compiles_whole() -> None:
    made = adapted()
    compiled = torch.compile(copy.deepcopy(made), backend="aot_eager", fullgraph=True)
    assert_close(compiled(QUERY, KEY, VALUE), made(QUERY, KEY, VALUE))
