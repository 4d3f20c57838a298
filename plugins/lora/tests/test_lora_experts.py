"""LoRA for parameters that modules hold themselves, such as stacked experts' weights."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from core_plugin.adapters import (
    add_adapter,
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
from core_plugin_lora.experts import LoRAParameter
from core_plugin_lora.plugin import LoRA, LoRAParams

EXPERTS, WIDTH, HIDDEN = 3, 4, 6
X = torch.linspace(-3, 5, 5 * WIDTH).sin().view(5, WIDTH).double()


class Experts(nn.Module):
    """Every expert sees every row; the gates say how much each counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.gates = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        gates = torch.softmax(x @ self.gates.T, dim=-1)
        hidden = torch.tanh(torch.einsum("ehw,bw->beh", self.up, x))
        if fail:
            raise KeyError("in the middle")
        return torch.einsum("ewh,beh,be->bw", self.down, hidden, gates) + self.bias


class Transposed(Experts):
    """Holds the same weights the other way round."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(self.up.detach().mT.contiguous())
        self.down = nn.Parameter(self.down.detach().mT.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        weights = {"up": self.up.mT, "down": self.down.mT}
        return torch.func.functional_call(_plain, weights, (x, self.gates, self.bias))


class _Plain(Experts):
    def forward(self, x: Tensor, gates: Tensor, bias: Tensor) -> Tensor:
        weights = {"gates": gates, "bias": bias, "up": self.up, "down": self.down}
        return torch.func.functional_call(_experts, weights, (x,))


_experts, _plain = Experts(), _Plain()


class Block(nn.Module):
    def __init__(self, kind: type[Experts] = Experts) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = kind()
        self.double()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.experts(x, **kwargs)


def adapted(parameters: list[str], kind: type[Experts] = Experts, **settings: Any) -> Block:
    """A block with an adapter that has random values."""
    block = Block(kind)
    names = [f"experts.{name}" for name in parameters]
    params = LoRAParams(
        **{"target_modules": [], "target_parameters": names, "r": 2, "lora_alpha": 3, **settings}
    )
    inject(block, LoRA, params)
    randomize(block)
    return block


def layers(block: Block) -> Iterator[LoRAParameter]:
    layer = block.experts
    while isinstance(layer, LoRAParameter):
        yield layer
        layer = layer.base_layer


def randomize(block: Block, name: str = "default") -> None:
    for layer in layers(block):
        for _, _, parameter in layer.adapter_parameters(name):
            nn.init.normal_(parameter)


def own(block: Block) -> dict[str, nn.Parameter]:
    return {
        f"{layer.parameter}.{in_file}": parameter
        for layer in layers(block)
        for _, in_file, parameter in layer.adapter_parameters("default")
    }


def updated(block: Block, *names: str) -> Block:
    """A block without adapters, with the weights that the adapters stand for."""
    plain = copy.deepcopy(block)
    for layer in layers(block):
        weight = getattr(layer.owner, layer.parameter).detach().clone()
        for name in names:
            weight += update(layer, name)
        owner = next(m for m in plain.modules() if isinstance(m, Experts))
        setattr(owner, layer.parameter, nn.Parameter(weight))
        plain.experts = owner
    return plain


def update(layer: LoRAParameter, name: str) -> Tensor:
    """Expert by expert, from the layout of the file."""
    params = layer.params[name]
    a, b = (p.detach() for _, _, p in layer.adapter_parameters(name))
    weight = getattr(layer.owner, layer.parameter)
    if weight.dim() == 2:
        return params.lora_alpha / params.r * b @ a
    experts, r = len(weight), params.r
    total = torch.empty_like(weight)
    for e in range(experts):
        # A's experts come one after another, B's take turns.
        product = b[:, e::experts] @ a[e * r : (e + 1) * r]
        is_transposed = getattr(layer.owner, "is_transposed", False)
        total[e] = params.lora_alpha / r * (product.T if is_transposed else product)
    return total


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# What it computes


@pytest.mark.parametrize("kind", [Experts, Transposed])
@pytest.mark.parametrize("parameters", [["up"], ["down"], ["up", "down"], ["gates"]], ids=str)
def test_each_expert_has_its_update(kind: type[Experts], parameters: list[str]) -> None:
    block = adapted(parameters, kind)
    assert [layer.parameter for layer in layers(block)] == parameters[::-1]
    assert_close(block(X), updated(block, "default")(X))
    assert (block(X) - Block(kind)(X)).abs().max() > 0.1


def test_the_layout_of_the_file(tmp_path: Path) -> None:
    # Parameters are nested in the order in which the module has them: the first is innermost.
    save_adapter(tmp_path, adapted(["down", "gates", "up"]))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    at = "base_model.model.experts"
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        f"{at}.base_layer.base_layer.lora_A.weight": [EXPERTS * 2, WIDTH],
        f"{at}.base_layer.base_layer.lora_B.weight": [HIDDEN, 2 * EXPERTS],
        f"{at}.base_layer.lora_A.weight": [EXPERTS * 2, HIDDEN],
        f"{at}.base_layer.lora_B.weight": [WIDTH, 2 * EXPERTS],
        f"{at}.lora_A.weight": [2, WIDTH],
        f"{at}.lora_B.weight": [EXPERTS, 2],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("init", [True, "gaussian", "eva"])
def test_a_new_adapter_changes_nothing(dtype: torch.dtype, init: bool | str) -> None:
    block, x = Block().to(dtype), X.to(dtype)
    expected = block(x)
    names = ["experts.up", "experts.down"]
    params = LoRAParams(target_modules=[], target_parameters=names, init_lora_weights=init)
    inject(block, LoRA, params)
    assert torch.equal(block(x), expected)
    dtypes = {parameter.dtype for parameter in own(block).values()}
    assert dtypes == {torch.float64 if dtype == torch.float64 else torch.float32}


def test_how_a_new_adapter_is_drawn() -> None:
    torch.manual_seed(0)
    block = Block()
    block.experts.up = nn.Parameter(torch.empty(20, 3, 100))
    params = {"target_modules": [], "target_parameters": ["experts.up"], "r": 25}
    inject(block, LoRA, LoRAParams(**params))
    a, b = own(block).values()
    assert a.abs().max() <= 0.1
    assert a.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert not b.any()
    block = unload(block)
    inject(block, LoRA, LoRAParams(**params, init_lora_weights="gaussian"))
    assert next(iter(own(block).values())).std().item() == pytest.approx(1 / 25, rel=0.02)


# Gradients


@pytest.mark.parametrize("kind", [Experts, Transposed])
def test_gradients_are_right(kind: type[Experts]) -> None:
    block = adapted(["up", "down"], kind)
    names = [name for name, p in block.named_parameters() if p.requires_grad]
    assert len(names) == 4

    def run(x: Tensor, *given: Tensor) -> Tensor:
        return torch.func.functional_call(block, dict(zip(names, given, strict=True)), (x,))

    trained = [block.get_parameter(name) for name in names]
    assert torch.autograd.gradcheck(run, (X.clone().requires_grad_(), *trained))
    block(X).sum().backward()
    assert all(p.grad is None for p in block.parameters() if not p.requires_grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_gradients(reentrant: bool) -> None:
    block, x = adapted(["up", "down"]), X.clone().requires_grad_()
    block(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in own(block).items()}
    block.zero_grad()
    checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
    for name, parameter in own(block).items():
        assert_close(parameter.grad, expected[name])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


def test_the_update_is_never_a_tensor_of_its_own() -> None:
    model = nn.ModuleDict({"stack": Stack()})
    names = ["stack.weight"]
    inject(model, LoRA, LoRAParams(target_modules=[], target_parameters=names, r=2))
    stack = model["stack"].owner.weight.untyped_storage().nbytes()
    large: set[int] = set()
    kept: set[int] = set()

    def note(places: set[int], tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() == stack:
            places.add(tensor.untyped_storage().data_ptr())
        return tensor

    class Made(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return note(large, function(*args, **(kwargs or {})))

    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: note(kept, tensor), lambda tensor: tensor
    )
    with Made(), hooks:
        output = model["stack"](torch.randn(8, 1, 32, requires_grad=True))
    assert len(large) == 1
    assert kept == large
    output.sum().backward()


# The module stays as it was


def test_nothing_stays_replaced_after_an_error() -> None:
    block = adapted(["up", "down"])
    experts = next(layer.owner for layer in layers(block))
    before, expected = dict(experts._parameters), block(X)
    with pytest.raises(KeyError, match="in the middle"):
        block(X, fail=True)
    assert all(experts._parameters[name] is p for name, p in before.items())
    assert torch.equal(block(X), expected)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def test_a_parametrized_parameter() -> None:
    block = adapted(["up", "down"])
    expected = updated(block, "default")
    up = next(layer for layer in layers(block) if layer.parameter == "up")
    weight = up.owner.up.detach().clone()
    parametrize.register_parametrization(up.owner, "up", Halved())
    with torch.no_grad():
        expected.experts.up -= weight / 2
    for _ in range(3):
        assert_close(block(X), expected(X))
    with parametrize.cached():
        assert_close(block(X), expected(X))
        assert_close(block(X), expected(X))
    with pytest.raises(KeyError, match="in the middle"):
        block(X, fail=True)
    assert torch.equal(up.owner.up, weight / 2)
    with pytest.raises(ConfigError, match=r"experts.up is computed from other tensors"):
        merge(block)


def test_a_layer_for_a_parametrized_parameter() -> None:
    experts = Block().experts
    parametrize.register_parametrization(experts, "up", Halved())
    layer, params = LoRAParameter(experts, "up"), LoRAParams(r=2)
    layer.add(Adapter("default", LoRA, params), params)
    assert torch.equal(layer(X), experts(X))
    layer.activate(["default"])
    assert torch.equal(layer(X), experts(X))
    assert [list(p.shape) for _, _, p in layer.adapter_parameters("default")] == [
        [EXPERTS * 2, WIDTH],
        [HIDDEN, 2 * EXPERTS],
    ]


# Merging, several adapters


@pytest.mark.parametrize("kind", [Experts, Transposed])
def test_merged_is_unmerged(kind: type[Experts]) -> None:
    block = adapted(["up", "down", "gates"], kind)
    expected = block(X)
    before = {n: p.clone() for n, p in block.experts.owner.named_parameters()}
    merge(block)
    assert_close(block(X), expected)
    unmerge(block)
    assert all(torch.equal(p, before[n]) for n, p in block.experts.owner.named_parameters())
    assert_close(block(X), expected)
    block = unload(block)
    assert type(block.experts) is kind
    assert_close(block(X), expected)


def test_several_adapters_and_none() -> None:
    block = adapted(["up", "down"])
    more = LoRAParams(target_modules=[], target_parameters=["experts.up"], r=3)
    add_adapter(block, LoRA, more, "other")
    for layer in layers(block):
        for _, _, parameter in layer.adapter_parameters("other"):
            nn.init.normal_(parameter)
    assert len(list(layers(block))) == 2
    set_adapter(block, ["default", "other"])
    expected = updated(block, "default")
    inner = next(layer for layer in layers(block) if layer.parameter == "up")
    with torch.no_grad():
        expected.experts.up += update(inner, "other")
    assert_close(block(X), expected(X))
    with disable_adapters(block):
        assert torch.equal(block(X), Block()(X))


def test_samples_cannot_be_told_apart() -> None:
    block = adapted(["up"]).eval()
    with (
        pytest.raises(ConfigError, match="cannot tell samples apart"),
        per_sample(block, ["default"] * 5),
    ):
        pass


# Within a model


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("deep", {}, "experts.deep: .* 2 or 3 dimensions .* this one has 4"),
        ("up", {"lora_dropout": 0.1}, "experts.up: lora_dropout needs a layer's input"),
        ("up", {"use_dora": True}, "experts.up: use_dora needs"),
        ("up", {"lora_bias": True}, "experts.up: lora_bias needs"),
        ("up", {"init_lora_weights": "pissa"}, "experts.up: .*'pissa' is not for parameters"),
    ],
)
def test_what_has_no_adapter_says_why(name: str, settings: dict[str, Any], why: str) -> None:
    block = Block()
    experts = block.experts
    experts.deep = nn.Parameter(torch.zeros(2, 2, 2, 2))
    params = LoRAParams(target_modules=[], target_parameters=[f"experts.{name}"], **settings)
    with pytest.raises(ConfigError, match=why):
        inject(block, LoRA, params)
    assert block.experts is experts


def test_a_quantised_parameter_has_no_adapter() -> None:
    block = Block()
    whole = torch.zeros(EXPERTS, HIDDEN, WIDTH).to(torch.float8_e4m3fn)
    block.experts.up = nn.Parameter(whole, requires_grad=False)
    params = LoRAParams(target_modules=[], target_parameters=["experts.up"])
    with pytest.raises(ConfigError, match=r"experts.up: .*float8_e4m3fn"):
        inject(block, LoRA, params)


def test_autocast_leaves_the_parameters_precision_alone() -> None:
    block = adapted(["up"]).float()
    seen: list[Tensor] = []
    owner = block.experts.base_layer
    owner.register_forward_pre_hook(lambda module, args: seen.append(module.up))
    with torch.autocast("cpu", torch.bfloat16):
        block(X.float())
    assert seen[0].dtype == torch.float32
    weight = owner.up + update(block.experts, "default")
    torch.testing.assert_close(seen[0], weight, rtol=1e-5, atol=1e-5)


def test_it_compiles_whole() -> None:
    block = adapted(["up", "down"])
    compiled = torch.compile(copy.deepcopy(block), backend="aot_eager", fullgraph=True)
    assert_close(compiled(X), block(X))
