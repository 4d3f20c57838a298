"""LoRA for convolutions against explicit mathematics and torch's own convolutions in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
from core_plugin.errors import ConfigError
from core_plugin_lora.convolution import LoRAConv
from core_plugin_lora.plugin import LoRA, LoRAParams

INPUTS = {
    nn.Conv1d: torch.linspace(-2, 3, 2 * 4 * 9).sin().view(2, 4, 9),
    nn.Conv2d: torch.linspace(-2, 9, 2 * 4 * 7 * 8).sin().view(2, 4, 7, 8),
    nn.Conv3d: torch.linspace(-2, 9, 2 * 4 * 5 * 6 * 5).sin().view(2, 4, 5, 6, 5),
}
CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"kernel_size": 1, "bias": False},
    {"stride": 2, "padding": 1},
    {"dilation": 2},
    {"padding": 2, "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "replicate", "stride": 2},
    {"padding": 2, "padding_mode": "circular", "dilation": 2, "bias": False},
    {"padding": "same", "padding_mode": "reflect"},
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
]
GROUPS: list[dict[str, Any]] = [
    {"groups": 2},
    {"groups": 2, "padding": 2, "padding_mode": "circular", "stride": 2},
]
every_kind = pytest.mark.parametrize("kind", INPUTS)


def model(kind: type[nn.Module], **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(4, 6, **{"kernel_size": 3, **options})).double()


def adapted(kind: type[nn.Module], settings: dict[str, Any], **options: Any) -> nn.Sequential:
    """A model with an adapter that has random values."""
    made = model(kind, **options)
    inject(made, LoRA, LoRAParams(**{"target_modules": ["0"], "r": 4, **settings}))
    randomize(made)
    return made


def randomize(made: nn.Module, name: str = "default") -> None:
    for _, in_file, parameter in made[0].adapter_parameters(name):
        nn.init.normal_(parameter)
        if "magnitude" in in_file:
            parameter.data.abs_().add_(0.5)


def values(layer: LoRAConv, name: str = "default") -> dict[str, Tensor]:
    return {in_file: p.detach() for _, in_file, p in layer.adapter_parameters(name)}


def update(layer: LoRAConv, name: str = "default") -> Tensor:
    """The weight ``[out, in, *kernel]`` of a convolution without groups, term by term."""
    a, b = values(layer, name)["lora_A.weight"], values(layer, name)["lora_B.weight"]
    groups, params = layer.base_layer.groups, layer.params[name]
    outputs, rank = len(b) // groups, len(a) // groups
    total = torch.zeros(len(b), *a.shape[1:], dtype=a.dtype)
    for o in range(len(b)):
        for j in range(rank):
            total[o] += b[o, j].item() * a[o // outputs * rank + j]
    return params.lora_alpha / (params.r**0.5 if params.use_rslora else params.r) * total


def convolved(base: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """What a convolution like ``base``, but without groups and bias, gives."""
    options = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    like = type(base)(4, 6, **{o: getattr(base, o) for o in options}, bias=False).double()
    like.weight.data = weight
    return like(x)


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# What it computes


@every_kind
@pytest.mark.parametrize("options", [*OPTIONS, *GROUPS], ids=str)
@pytest.mark.parametrize("rslora", [False, True])
def test_a_convolution_is_the_mathematics(
    kind: type[nn.Module], options: dict[str, Any], rslora: bool
) -> None:
    made = adapted(kind, {"lora_alpha": 3, "use_rslora": rslora}, **options)
    layer, x = made[0], INPUTS[kind].double()
    assert isinstance(layer, LoRAConv)
    expected = model(kind, **options)(x) + convolved(layer.base_layer, x, update(layer))
    assert_close(made(x), expected)
    assert_close(made(x[0]), expected[0])


@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dora_scales_each_output_channel(kind: type[nn.Module], options: dict[str, Any]) -> None:
    made = adapted(kind, {"use_dora": True}, **options)
    layer, x = made[0], INPUTS[kind].double()
    magnitude = values(layer)["lora_magnitude_vector"]
    ones = (1,) * len(layer.base_layer.kernel_size)
    assert magnitude.shape == (1, 6, *ones)
    weight = layer.base_layer.weight + update(layer)
    norms = torch.stack([row.square().sum().sqrt() for row in weight])
    weight = weight * (magnitude.flatten() / norms).view(6, 1, *ones)
    expected = convolved(layer.base_layer, x, weight)
    if (bias := layer.base_layer.bias) is not None:
        expected = expected + bias.view(6, *ones)
    assert_close(made(x), expected)


@every_kind
def test_b_has_a_bias_if_wanted(kind: type[nn.Module]) -> None:
    made = adapted(kind, {"lora_bias": True, "lora_alpha": 8}, padding=1)
    without = adapted(kind, {"lora_alpha": 8}, padding=1)
    found = values(made[0])
    for name, value in values(without[0]).items():
        value.copy_(found[name])
    bias = found["lora_B.bias"]
    x = INPUTS[kind].double()
    ones = (1,) * len(made[0].base_layer.kernel_size)
    assert_close(made(x), without(x) + 2 * bias.view(6, *ones))


@every_kind
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"padding": 1, "padding_mode": "reflect"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("init", [True, "gaussian", "eva"])
def test_a_new_adapter_changes_nothing(
    kind: type[nn.Module], options: dict[str, Any], dtype: torch.dtype, init: bool | str
) -> None:
    made, x = model(kind, **options).to(dtype), INPUTS[kind].to(dtype)
    expected = made(x)
    dora = not options.get("groups")
    params = LoRAParams(target_modules=["0"], r=4, init_lora_weights=init, use_dora=dora)
    inject(made, LoRA, params)
    assert torch.equal(made(x), expected)
    assert made(x).dtype == dtype


def test_how_a_new_adapter_is_drawn() -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(40, 60, 5))
    inject(made, LoRA, LoRAParams(target_modules=["0"], r=50))
    add_adapter(
        made, LoRA, LoRAParams(target_modules=["0"], r=50, init_lora_weights="gaussian"), "normal"
    )
    add_adapter(
        made, LoRA, LoRAParams(target_modules=["0"], r=50, init_lora_weights=False), "random"
    )
    a = values(made[0])["lora_A.weight"]
    assert a.abs().max() <= (40 * 25) ** -0.5
    assert a.std().item() == pytest.approx((3 * 40 * 25) ** -0.5, rel=0.02)
    assert not values(made[0])["lora_B.weight"].any()
    assert values(made[0], "normal")["lora_A.weight"].std().item() == pytest.approx(
        1 / 50, rel=0.02
    )
    assert values(made[0], "random")["lora_B.weight"].abs().min() > 0


# Gradients


@every_kind
@pytest.mark.parametrize("options", [{"dilation": 2}, *GROUPS], ids=str)
def test_gradients_are_right(kind: type[nn.Module], options: dict[str, Any]) -> None:
    made = adapted(kind, {"r": 2, "lora_bias": True}, **options)
    parameters = [p for _, _, p in made[0].adapter_parameters("default")]
    x = INPUTS[kind][:1].double().clone().requires_grad_()

    def run(x: Tensor, *given: Tensor) -> Tensor:
        names = [own for own, _, _ in made[0].adapter_parameters("default")]
        return torch.func.functional_call(made[0], dict(zip(names, given, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters), atol=1e-6, fast_mode=True)
    made(x).sum().backward()
    assert made[0].base_layer.weight.grad is None


def test_dora_takes_the_norms_for_constants() -> None:
    made, x = adapted(nn.Conv2d, {"use_dora": True}), INPUTS[nn.Conv2d].double()
    layer = made[0]
    made(x).square().sum().backward()
    own = {in_file: p for _, in_file, p in layer.adapter_parameters("default")}
    a, b, m = (p.detach().clone().requires_grad_() for p in own.values())
    weight = layer.base_layer.weight + 4 * torch.einsum("or,rikl->oikl", b[..., 0, 0], a)
    norms = weight.detach().flatten(1).norm(dim=1).view(6, 1, 1, 1)
    weight = m.transpose(0, 1) / norms * weight
    F.conv2d(x, weight, layer.base_layer.bias).square().sum().backward()
    for parameter, expected in zip(own.values(), (a, b, m), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_dropout_is_on_the_adapters_input_and_in_training_alone() -> None:
    made = adapted(nn.Conv2d, {"lora_dropout": 0.5}, padding=1)
    x = INPUTS[nn.Conv2d].double()
    base = made[0].base_layer(x)
    with torch.no_grad():
        made.eval()
        expected = made(x) - base
        assert torch.equal(made(x), made(x))
        made.train()
        mean = sum(made(x) - base for _ in range(2000)) / 2000
        assert not torch.equal(made(x), made(x))
    assert (mean - expected).abs().max() < 0.1 * expected.abs().max()


# Merging


@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}], ids=str)
def test_merged_is_unmerged(
    kind: type[nn.Module], options: dict[str, Any], settings: dict[str, Any]
) -> None:
    made, x = adapted(kind, settings, **options), INPUTS[kind].double()
    expected, weight = made(x), made[0].base_layer.weight.clone()
    merge(made)
    assert_close(made(x), expected)
    unmerge(made)
    assert torch.equal(made[0].base_layer.weight, weight)
    assert_close(made(x), expected)
    assert_close(unload(made)(x), expected)


@pytest.mark.parametrize("keep", [False, True])
def test_a_weight_in_another_memory_format_is_merged(keep: bool) -> None:
    made = model(nn.Conv2d).float().to(memory_format=torch.channels_last)
    inject(made, LoRA, LoRAParams(target_modules=["0"], r=4))
    randomize(made)
    x = INPUTS[nn.Conv2d].contiguous(memory_format=torch.channels_last)
    expected = made(x)
    merge(made, keep=keep)
    torch.testing.assert_close(made(x), expected, rtol=1e-4, atol=1e-4)


def test_a_bias_is_merged() -> None:
    made, x = adapted(nn.Conv2d, {"lora_bias": True}), INPUTS[nn.Conv2d].double()
    expected = made(x)
    merge(made)
    assert_close(made(x), expected)


@pytest.mark.parametrize(
    ("options", "settings", "why"),
    [
        ({"groups": 2}, {}, "reads all input channels"),
        ({"bias": False}, {"lora_bias": True}, "has a bias, and the convolution has none"),
    ],
)
def test_what_cannot_be_merged_says_why(
    options: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    made, x = adapted(nn.Conv2d, settings, **options), INPUTS[nn.Conv2d].double()
    expected = made(x)
    with pytest.raises(ConfigError, match=why):
        merge(made)
    assert torch.equal(made(x), expected)


# Within a model


@pytest.mark.parametrize(
    ("made", "settings", "why"),
    [
        (nn.Conv2d(4, 6, 3, groups=2), {"r": 3}, "r is a multiple of .* groups, 2; it is 3"),
        (nn.Conv2d(4, 6, 3, groups=2), {"use_dora": True}, "use_dora is for .* without groups"),
        (nn.Conv2d(4, 6, 3), {"init_lora_weights": "pissa"}, "'pissa' is not for convolutions"),
        (nn.ConvTranspose2d(4, 6, 3), {}, "LoRA has no layer for ConvTranspose2d"),
        (nn.ConvTranspose1d(4, 6, 3), {}, "LoRA has no layer for ConvTranspose1d"),
        (nn.LazyConv2d(6, 3), {}, "no size before its first input"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_has_no_adapter_says_why(made: nn.Module, settings: dict[str, Any], why: str) -> None:
    held = nn.Sequential(made)
    with pytest.raises(ConfigError, match=why):
        inject(held, LoRA, LoRAParams(**{"target_modules": ["0"], "r": 4, **settings}))
    assert held[0] is made


def test_several_adapters_add_up_and_switch() -> None:
    made, x = adapted(nn.Conv2d, {}), INPUTS[nn.Conv2d].double()
    add_adapter(made, LoRA, LoRAParams(target_modules=["0"], r=2), "other")
    randomize(made, "other")
    base, first = made[0].base_layer(x), made(x)
    set_adapter(made, "other")
    second = made(x)
    set_adapter(made, ["default", "other"])
    assert_close(made(x), first + second - base)
    with disable_adapters(made):
        assert torch.equal(made(x), base)
    made.eval()
    with torch.no_grad(), per_sample(made, ["other", "__base__"]):
        assert_close(made(x), torch.stack([second[0], base[1]]))


def test_dora_applies_alone() -> None:
    made = adapted(nn.Conv2d, {"use_dora": True})
    add_adapter(made, LoRA, LoRAParams(target_modules=["0"], r=2), "other")
    with pytest.raises(ConfigError, match="'default' has use_dora, so it applies alone"):
        set_adapter(made, ["default", "other"])


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=str)
def test_autocast_computes_in_its_dtype(settings: dict[str, Any]) -> None:
    made = adapted(nn.Conv2d, settings).float()
    x = INPUTS[nn.Conv2d]
    expected = made(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = made(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.2)


def test_a_base_in_fewer_bits_is_trained_in_float32() -> None:
    made = model(nn.Conv2d).bfloat16()
    inject(made, LoRA, LoRAParams(target_modules=["0"], r=4))
    made(INPUTS[nn.Conv2d].bfloat16()).sum().backward()
    for _, _, parameter in made[0].adapter_parameters("default"):
        assert parameter.dtype == torch.float32
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("options", [{"padding": 1, "padding_mode": "reflect"}, {"groups": 2}])
def test_it_compiles_whole(options: dict[str, Any]) -> None:
    made, x = adapted(nn.Conv2d, {}, **options), INPUTS[nn.Conv2d].double()
    compiled = torch.compile(copy.deepcopy(made), backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), made(x))
