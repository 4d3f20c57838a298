"""LoRA's layers against explicit mathematics in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core_plugin.adapters import base_name, inject
from core_plugin.errors import ConfigError
from core_plugin_lora.layers import LoRAEmbedding, LoRALinear
from core_plugin_lora.plugin import LoRA, LoRAParams


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


def injected(model: nn.Module, random: bool = True, **settings: object) -> nn.Module:
    inject(model, LoRA, LoRAParams(**{"r": 3, **settings}), "default")
    if random:
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
    return model


def seeded(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    r=st.integers(1, 6),
    alpha=st.floats(0.5, 32),
    rslora=st.booleans(),
    bias=st.booleans(),
)
def test_linear_is_the_mathematics(
    shape: list[int], sizes: tuple[int, int], r: int, alpha: float, rslora: bool, bias: bool
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"x": nn.Linear(*sizes, bias=bias)})
    layer = injected(model, r=r, lora_alpha=alpha, use_rslora=rslora)["x"]
    assert isinstance(layer, LoRALinear)
    x = torch.randn(*shape, sizes[0])
    a, b = (m["default"].weight.double() for m in (layer.lora_A, layer.lora_B))
    scaling = alpha / (r**0.5 if rslora else r)
    weight = layer.base_layer.weight.double() + scaling * b @ a
    expected = x.double() @ weight.T + (layer.base_layer.bias.double() if bias else 0)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)
    assert layer(x).shape == (*shape, sizes[1])


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[0], torch.tensor(5)])
def test_embedding_is_the_mathematics(
    tokens: Tensor, padding_idx: int | None, rslora: bool
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"x": nn.Embedding(11, 6, padding_idx=padding_idx)})
    layer = injected(model, target_modules=["x"], r=4, lora_alpha=6, use_rslora=rslora)["x"]
    assert isinstance(layer, LoRAEmbedding)
    a = layer.lora_embedding_A["default"].double()
    b = layer.lora_embedding_B["default"].double()
    assert a.shape == (4, 11)
    assert b.shape == (6, 4)
    scaling = 6 / (2 if rslora else 4)
    table = layer.base_layer.weight.double() + scaling * (b @ a).T
    torch.testing.assert_close(layer(tokens).double(), table[tokens], rtol=1e-5, atol=1e-5)


def test_the_padding_row_gets_no_gradient() -> None:
    model = injected(seeded(), target_modules=["tokens"])
    model(TOKENS).square().sum().backward()
    columns = model.tokens.lora_embedding_A["default"].grad.abs().sum(0)
    used = sorted(set(TOKENS.flatten().tolist()) - {3})
    assert columns.nonzero().flatten().tolist() == used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_new_adapter_changes_nothing(dtype: torch.dtype) -> None:
    model = injected(seeded().to(dtype), random=False, target_modules=TARGETS)
    expected = seeded().to(dtype)(TOKENS)
    assert torch.equal(model(TOKENS), expected)
    assert model(TOKENS).dtype == dtype


def test_how_a_new_adapter_is_drawn() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"x": nn.Linear(400, 50), "e": nn.Embedding(9, 400)})
    model = injected(model, random=False, target_modules=["x", "e"], r=50)
    a, b = model["x"].lora_A["default"].weight, model["x"].lora_B["default"].weight
    assert a.abs().max() <= 400**-0.5
    assert a.std().item() == pytest.approx(400**-0.5 / 3**0.5, rel=0.02)
    assert not b.any()
    assert not model["e"].lora_embedding_A["default"].any()
    assert model["e"].lora_embedding_B["default"].std().item() == pytest.approx(1, rel=0.02)


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


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


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
    assert result.dtype == of_base.dtype == torch.bfloat16
    expected = model(TOKENS)
    assert (result - expected).abs().max() < 0.05 * expected.abs().max()


def test_dropout_acts_on_the_adapters_input_in_training_alone() -> None:
    torch.manual_seed(0)
    model = injected(nn.ModuleDict({"x": nn.Linear(200, 1)}), r=1, lora_alpha=1, lora_dropout=0.25)
    layer = model["x"]
    nn.init.ones_(layer.lora_A["default"].weight)
    nn.init.ones_(layer.lora_B["default"].weight)
    x = torch.ones(500, 200)
    base = layer.base_layer(x)
    kept = (layer(x) - base) * 0.75
    assert kept.std() > 1
    assert kept.mean().item() == pytest.approx(150, rel=0.01)
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-3)
    layer.eval()
    torch.testing.assert_close(layer(x), base + 200)


def test_dropout_never_drops_tokens() -> None:
    model = injected(seeded(), target_modules=["tokens"], lora_dropout=0.9)
    assert torch.equal(model(TOKENS), model(TOKENS))


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


def test_hooks_of_the_parts_run() -> None:
    model = injected(seeded(), target_modules=["up"])
    seen = []
    for part in (model.up.base_layer, model.up.lora_A["default"], model.up.lora_B["default"]):
        part.register_forward_hook(lambda module, inputs, output: seen.append(module))
    model(TOKENS)
    assert seen == [
        model.up.base_layer,
        model.up.lora_A["default"],
        model.up.lora_B["default"],
    ]


def test_one_addition_in_the_graph() -> None:
    layer = injected(nn.ModuleDict({"x": nn.Linear(4, 5)}))["x"]
    graph = torch.fx.experimental.proxy_tensor.make_fx(layer)(torch.randn(2, 4))
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("addmm" in call for call in calls) == 2  # the base layer's with its bias, and ours
    assert not any("aten.add." in call or "aten.mul." in call for call in calls)


def test_compiled_it_is_one_graph() -> None:
    model = injected(seeded(), target_modules=TARGETS)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS), model(TOKENS))


def test_adapters_of_other_ranks_are_switched() -> None:
    model = injected(seeded(), random=False, target_modules=["up"], r=2)
    nn.init.normal_(model.up.lora_B["default"].weight)
    first = model(TOKENS)
    inject(model, LoRA, LoRAParams(r=5, lora_alpha=1, target_modules=["up", "tokens"]), "second")
    assert torch.equal(model(TOKENS), seeded()(TOKENS))
    model.up.activate("default")
    model.tokens.activate("default")
    assert torch.equal(model(TOKENS), first)


def test_other_kinds_of_layers_are_refused_by_name() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(2, 2, 1), "x": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match="conv: LoRA has no layer for Conv1d"):
        inject(model, LoRA, LoRAParams(target_modules=["conv", "x"]), "default")
    assert isinstance(model["x"], nn.Linear)
