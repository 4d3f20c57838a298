"""LoRA for nn.MultiheadAttention against torch's own with other weights, in float64."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from core_plugin.adapters import (
    add_adapter,
    delete_adapter,
    disable_adapters,
    inject,
    merge,
    per_sample,
    save_adapter,
    set_adapter,
    unload,
    unmerge,
)
from core_plugin.adapters.layer import Adapter
from core_plugin.errors import ConfigError
from core_plugin.types.peft import PeftPlugin
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("targets", [["self_attn"], ["linear1"]])
@pytest.mark.parametrize("root", [True, False])
def test_a_transformer_encoder_takes_padding_with_gradients(targets: list[str], root: bool) -> None:
    encoder = transformer_encoder()
    expected = encoder.train()(KEY, src_key_padding_mask=PADDING)
    made = encoder if root else nn.Sequential(encoder)
    inject(made, LoRA, LoRAParams(target_modules=targets))
    found = encoder.eval()(KEY, src_key_padding_mask=PADDING)
    assert_close(found[~PADDING], expected[~PADDING])


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("remove", [unload, lambda model: delete_adapter(model, "default")])
def test_a_transformer_encoder_has_its_fused_kernels_back(root: bool, remove: Any) -> None:
    encoder = transformer_encoder()
    layer = encoder.layers[0]
    before = [dict(vars(module)) for module in (encoder, layer)]
    assert encoder.use_nested_tensor
    assert layer.activation_relu_or_gelu
    made = encoder if root else nn.Sequential(encoder)
    params = LoRAParams(target_modules=["self_attn", "linear1"])
    inject(made, LoRA, params)
    add_adapter(made, LoRA, params, "other")
    delete_adapter(made, "other")
    assert not encoder.use_nested_tensor
    assert not layer.activation_relu_or_gelu
    remove(made)
    assert [dict(vars(module)) for module in (encoder, layer)] == before


def transformer_encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double()


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


# Biases, of which the peft library trains the output projection's alone


class Biased(nn.Module):
    """Two attentions, of which the first has the adapter, and a linear layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        self.plain = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.plain(y, y, y, need_weights=False)[0])


def biased(trains: str, **options: Any) -> Biased:
    made = Biased(**options)
    inject(made, LoRA, LoRAParams(target_modules=["attention"], r=3, bias=trains))
    randomize(made.attention)
    return made


def biased_in_peft(trains: str, **options: Any) -> peft.PeftModel:
    settings = peft.LoraConfig(target_modules=["attention"], r=3, bias=trains)
    return peft.get_peft_model(Biased(**options), settings, autocast_adapter_dtype=False)


def from_peft(directory: Path, **options: Any) -> peft.PeftModel:
    return peft.PeftModel.from_pretrained(
        Biased(**options), directory, is_trainable=True, autocast_adapter_dtype=False
    )


def train(model: nn.Module, steps: int = 3) -> list[float]:
    # The steps do not depend on the gradients' scale. For the output projection's factors peft has
    # half of the gradients, since its forward pass adds one of the two updates to ``data``.
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, eps=1e-20)
    losses = []
    for _ in range(steps):
        loss = (model(QUERY) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_biases(model: nn.Module) -> set[str]:
    own = {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name}
    return {name.removeprefix("base_model.model.") for name in own}


def biases_in(directory: Path) -> set[str]:
    own = {
        name for name in load_file(directory / "adapter_model.safetensors") if "lora_" not in name
    }
    return {name.removeprefix("base_model.model.") for name in own}


every_bias = pytest.mark.parametrize("bias", ["lora_only", "all"])
every_kind = pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": WIDTH, "vdim": WIDTH}],
    ids=str,
)


@every_bias
@every_kind
def test_the_biases_that_peft_trains_are_trained(
    bias: str, options: dict[str, Any], tmp_path: Path
) -> None:
    made, other = biased(bias, **options), biased_in_peft(bias, **options)
    own = set() if "bias" in options else {"attention.base_layer.out_proj.base_layer.bias"}
    expected = own | ({"plain.out_proj.bias", "head.bias"} if bias == "all" else set())
    assert trained_biases(other) == expected
    in_memory = {name.replace("out_proj.base_layer", "out_proj") for name in expected}
    assert trained_biases(made) == in_memory
    save_adapter(tmp_path / "ours", made)
    other.save_pretrained(tmp_path / "theirs")
    assert biases_in(tmp_path / "ours") == biases_in(tmp_path / "theirs") == expected


@every_bias
@every_kind
def test_peft_goes_on_from_biases_that_were_trained_here(
    bias: str, options: dict[str, Any], tmp_path: Path
) -> None:
    made = biased(bias, **options)
    before = {name: p.clone() for name, p in made.named_parameters()}
    train(made)
    for name in trained_biases(made):
        assert not torch.equal(made.get_parameter(name), before[name])
    save_adapter(tmp_path, made)
    loaded = from_peft(tmp_path, **options)
    assert_close(loaded(QUERY), made(QUERY))
    assert train(loaded) == pytest.approx(train(made), rel=1e-9)


@every_bias
@every_kind
def test_biases_that_peft_trained_are_trained_on(
    bias: str, options: dict[str, Any], tmp_path: Path
) -> None:
    original = biased_in_peft(bias, **options)
    train(original)
    original.save_pretrained(tmp_path)
    made = Biased(**options)
    PeftPlugin.from_pretrained(made, tmp_path, trainable=True)
    assert_close(made(QUERY), original(QUERY))
    assert train(made) == pytest.approx(train(original), rel=1e-9)


@every_bias
def test_merging_leaves_trained_biases_where_they_are(bias: str) -> None:
    made = biased(bias)
    train(made)
    expected, trained = made(QUERY), made.attention.base_layer.out_proj.bias.clone()
    merge(made)
    assert_close(made(QUERY), expected)
    unmerge(made)
    assert torch.equal(made.attention.base_layer.out_proj.bias, trained)
    assert_close(made(QUERY), expected)
    unload(made)
    assert_close(made(QUERY), expected)
    assert torch.equal(made.attention.out_proj.bias, trained)


@every_bias
def test_a_bias_is_trained_while_its_adapter_is_active(bias: str, tmp_path: Path) -> None:
    made = biased(bias)
    add_adapter(made, LoRA, LoRAParams(target_modules=["attention"]), "other")
    trained = trained_biases(made)
    set_adapter(made, "other")
    assert trained
    assert not trained_biases(made)
    save_adapter(tmp_path, made, "other")
    assert not biases_in(tmp_path)
    set_adapter(made, "default")
    assert trained_biases(made) == trained


@every_bias
def test_disabling_keeps_a_trained_bias_and_restores_the_rest(bias: str) -> None:
    made = biased(bias)
    train(made)
    expected, trained = made(QUERY), trained_biases(made)
    reference = copy.deepcopy(made)
    reference.attention = reference.attention.base_layer
    with pytest.warns(UserWarning, match="'default' trains biases of the model itself"):
        disabled = disable_adapters(made)
    with disabled:
        assert_close(made(QUERY), reference(QUERY))
    assert_close(made(QUERY), expected)
    assert trained_biases(made) == trained


def test_a_bias_of_an_attention_that_another_adapter_is_for(tmp_path: Path) -> None:
    made = Biased()
    inject(made, LoRA, LoRAParams(target_modules=["head"], bias="all"))
    add_adapter(made, LoRA, LoRAParams(target_modules=["attention"]), "other")
    save_adapter(tmp_path / "ours", made)
    other = peft.get_peft_model(Biased(), peft.LoraConfig(target_modules=["head"], bias="all"))
    other.add_adapter("other", peft.LoraConfig(target_modules=["attention"]))
    other.save_pretrained(tmp_path / "theirs", selected_adapters=["default"])
    assert biases_in(tmp_path / "ours") == biases_in(tmp_path / "theirs")


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
