"""Modules that are trained whole, in copies that belong to adapters."""

import copy
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from core_plugin.adapters import (
    add_adapter,
    delete_adapter,
    disable_adapters,
    initialize,
    inject,
    load_adapter,
    merge,
    modules,
    save_adapter,
    set_adapter,
    unload,
    unmerge,
)
from core_plugin.adapters.layer import AdapterLayer
from core_plugin.adapters.names import base_name
from core_plugin.adapters.saved import SavedModule
from core_plugin.errors import ConfigError
from core_plugin.training.materialize import Materializer
from core_plugin.types.peft import BasePeft, PeftParams


class Whole(BasePeft):
    """Has no layers of its own."""

    prefix = "whole_"
    peft_type = "WHOLE"

    @staticmethod
    def layers() -> dict[type, type[AdapterLayer]]:
        return {}


class Head(nn.Module):
    """A head with two parameters that are one, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.inner.weight
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)

    def forward(self, x: torch.Tensor, *, factor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.again(self.norm(torch.tanh(self.inner(x)))) * factor * self.scale}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.score = Head()
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body(self.tokens(tokens))
        return self.head(x + self.score(x, factor=x.mean())["out"])


TOKENS = torch.arange(7)
SCORE = PeftParams([], modules_to_save=["score"])
FILE = [
    "again.weight",
    "inner.bias",
    "inner.weight",
    "norm.bias",
    "norm.num_batches_tracked",
    "norm.running_mean",
    "norm.running_var",
    "norm.weight",
]


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def saved(*names: str, params: PeftParams = SCORE) -> Model:
    m = inject(model(), Whole, params, names[0])
    for name in names[1:]:
        add_adapter(m, Whole, params, name)
    return m


def trained(m: nn.Module) -> set[str]:
    return {name for name, p in m.named_parameters() if p.requires_grad}


def train(m: nn.Module, steps: int = 3) -> None:
    m.train()
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        m(TOKENS).square().sum().backward()
        optimizer.step()
    m.eval()


# Training


def test_the_copy_is_trained_as_the_module_would_be_and_the_module_is_not() -> None:
    m, reference, untouched = saved("x"), model(), model()
    assert isinstance(m.score, SavedModule)
    assert torch.equal(m(TOKENS), untouched(TOKENS))
    reference.requires_grad_(False)
    reference.score.requires_grad_(True)
    train(m)
    train(reference)
    assert torch.equal(m(TOKENS), reference(TOKENS))
    assert not torch.equal(m(TOKENS), untouched(TOKENS))
    for name, value in untouched.state_dict().items():
        held = {base_name(n): t for n, t in m.state_dict().items() if "modules_to_save" not in n}
        assert torch.equal(held[name], value), name


def test_all_of_the_copy_is_trained_and_nothing_else() -> None:
    m = saved("x")
    parts = ("inner.weight", "inner.bias", "norm.weight", "norm.bias")
    assert trained(m) == {f"score.modules_to_save.x.{part}" for part in parts}
    with disable_adapters(m):
        assert torch.equal(m(TOKENS), model()(TOKENS))


def test_each_adapter_has_its_own_copy_and_one_is_used() -> None:
    m = saved("a", "b")
    train(m)
    one = m(TOKENS)
    set_adapter(m, "b")
    assert torch.equal(m(TOKENS), model()(TOKENS))
    assert all(".b." in name for name in trained(m))
    set_adapter(m, "a")
    assert torch.equal(m(TOKENS), one)
    before = [(n, p.requires_grad) for n, p in m.named_parameters()]
    with pytest.raises(ConfigError, match="score: the adapters 'a' and 'b' each have a copy"):
        set_adapter(m, ["a", "b"])
    assert [(n, p.requires_grad) for n, p in m.named_parameters()] == before
    assert torch.equal(m(TOKENS), one)


def test_adapters_may_copy_different_modules() -> None:
    m = saved("a")
    add_adapter(m, Whole, PeftParams([], modules_to_save=["body"]), "b")
    train(m)
    set_adapter(m, ["a", "b"])
    train(m)
    assert {name.split(".")[0] for name in trained(m)} == {"score", "body"}
    delete_adapter(m, "a")
    assert isinstance(m.score, Head)
    assert isinstance(m.body, SavedModule)
    delete_adapter(m, "b")
    assert torch.equal(m(TOKENS), model()(TOKENS))


def test_the_models_own_code_reads_the_copy() -> None:
    m = saved("x", params=PeftParams([], modules_to_save=["body"]))
    train(m)
    assert m.body.weight is m.body.modules_to_save["x"].weight
    assert m.body.in_features == 4
    with disable_adapters(m):
        assert m.body.weight is m.body.base_layer.weight
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = m.body.nothing_like_it


def test_copies_and_pickles_give_the_same_results() -> None:
    m = saved("a", "b")
    train(m)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(TOKENS), m(TOKENS))
        assert trained(other) == trained(m)
        train(other)
        assert not torch.equal(other(TOKENS), m(TOKENS))


def test_hooks_are_shared_and_not_copied() -> None:
    m = model()
    calls = []

    class Hook:
        def __init__(self) -> None:
            self.model = m

        def __call__(self, module: nn.Module, args: object, output: object) -> None:
            calls.append(module)

    hook = Hook()
    m.score.inner.register_forward_hook(hook)
    inject(m, Whole, SCORE, "x")
    made = m.score.modules_to_save["x"]
    assert list(made.inner._forward_hooks.values()) == [hook]
    m(TOKENS)
    assert calls == [made.inner]


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_of_fewer_bits_are_float32_and_give_the_modules_dtype(dtype: torch.dtype) -> None:
    m = inject(model().to(dtype), Whole, SCORE, "x")
    made, x = m.score.modules_to_save["x"], torch.randn(3, 4).to(dtype)
    assert {t.dtype for t in made.parameters()} == {torch.float32}
    assert made.norm.running_mean.dtype == torch.float32
    assert made.norm.num_batches_tracked.dtype == torch.int64
    assert made.again.weight is made.inner.weight
    out = m.score(x, factor=x.mean())["out"]
    exact = made(x.float(), factor=x.mean().float())["out"]
    assert torch.equal(out, exact.to(dtype))
    out.float().sum().backward()
    assert made.inner.weight.grad.dtype == torch.float32


def test_a_float64_module_has_a_float64_copy() -> None:
    m = inject(model().double(), Whole, SCORE, "x")
    assert m.score.modules_to_save["x"].inner.weight.dtype == torch.float64
    assert m(TOKENS).dtype == torch.float64


def test_a_model_that_is_cast_afterwards_still_runs() -> None:
    m = saved("x").bfloat16()
    assert m(TOKENS).dtype == torch.bfloat16


def test_a_module_of_mixed_precision_takes_what_it_took() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.out = nn.Linear(4, 4).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(x.float()).to(x.dtype))

    m = inject(nn.ModuleDict({"it": Mixed()}), Whole, PeftParams([], modules_to_save=["it"]), "x")
    x = torch.randn(2, 4).bfloat16()
    assert m["it"](x).dtype == m["it"].base_layer(x).dtype == torch.bfloat16


def test_under_autocast_the_dtype_is_that_of_the_module() -> None:
    m = saved("x", params=PeftParams([], modules_to_save=["body"])).bfloat16()
    m.body.modules_to_save.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert m.body(torch.randn(2, 4)).dtype == torch.bfloat16
        assert m.body(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16


# From meta


def test_from_meta_the_copy_gets_the_values_of_the_module() -> None:
    with torch.device("meta"):
        m = Model().eval()
    inject(m, Whole, SCORE, "x")
    assert all(t.is_meta for t in m.state_dict().values())
    m.to_empty(device="cpu")
    source = model()
    source.score.scale.fill_(3.0)
    values = {**source.state_dict(), "score.scale": source.score.scale}
    own = {**dict(m.named_parameters()), **dict(m.named_buffers())}
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.fill_(7 if "modules_to_save" in name else 0)
            if "modules_to_save" not in name:
                tensor.copy_(values[base_name(name)])
    initialize(m)
    assert torch.equal(m(TOKENS), source(TOKENS))


def test_materialized_copies_have_the_modules_values() -> None:
    with torch.device("meta"):
        m = Model().eval()
    inject(m, Whole, SCORE, "x")

    def fill(module: nn.Module) -> None:
        if hasattr(module, "scale"):
            module.scale.fill_(2.0)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    Materializer(m, torch.device("cpu"), 0, fill, base_name)(m)
    made, base = m.score.modules_to_save["x"], m.score.base_layer
    for name, tensor in base.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name
    assert made.again.weight is made.inner.weight
    assert made.inner.weight is not base.inner.weight
    assert made.scale == 2


# Files


def test_a_file_has_the_modules_own_names_with_buffers_and_tied_ones(tmp_path: Path) -> None:
    m = saved("x")
    train(m)
    assert sorted(own for _, own, _ in m.score.adapter_tensors("x")) == FILE
    for in_memory, own, tensor in m.score.adapter_tensors("x"):
        assert m.state_dict(keep_vars=True)[f"score.{in_memory}"] is tensor
        assert in_memory == f"modules_to_save.x.{own}"
    save_adapter(tmp_path, m, "x")
    file = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert sorted(file) == [f"base_model.model.score.{name}" for name in FILE]
    other = saved("other")
    load_adapter(other, tmp_path, "other")
    assert torch.equal(other(TOKENS), m(TOKENS))


# Merging


def test_merging_puts_the_copys_values_in_place_and_takes_them_back() -> None:
    m = saved("x")
    train(m)
    expected = m(TOKENS)
    merge(m)
    assert torch.equal(m(TOKENS), expected)
    assert torch.equal(
        m.score.base_layer.norm.running_mean, m.score.modules_to_save["x"].norm.running_mean
    )
    with disable_adapters(m):
        assert torch.equal(m(TOKENS), model()(TOKENS))
    assert torch.equal(m(TOKENS), expected)
    unmerge(m)
    assert torch.equal(m(TOKENS), expected)
    with disable_adapters(m):
        assert torch.equal(m(TOKENS), model()(TOKENS))


def test_unloading_leaves_the_model_with_the_trained_values() -> None:
    m = saved("x")
    train(m)
    expected = m(TOKENS)
    assert unload(m) is m
    assert isinstance(m.score, Head)
    assert torch.equal(m(TOKENS), expected)
    assert torch.equal(m.score.again.weight, m.score.inner.weight)


def test_merging_into_fewer_bits_rounds_once() -> None:
    m = inject(model().bfloat16(), Whole, SCORE, "x")
    torch.manual_seed(1)
    made = m.score.modules_to_save["x"]
    with torch.no_grad():
        made.inner.weight.add_(torch.rand_like(made.inner.weight))
    merge(m)
    assert torch.equal(m.score.base_layer.inner.weight, made.inner.weight.bfloat16())


# Ties


def test_copies_of_tied_modules_are_tied() -> None:
    m = saved("x", params=PeftParams([], modules_to_save=["tokens", "head"]))
    reference = model().requires_grad_(False)
    reference.tokens.weight.requires_grad_(True)
    assert m.tokens.weight is m.head.weight
    assert trained(m) == {"tokens.modules_to_save.x.weight"}
    add_adapter(m, Whole, PeftParams([], modules_to_save=["tokens", "head"]), "y")
    assert m.tokens.modules_to_save["y"].weight is m.head.modules_to_save["y"].weight
    assert m.tokens.modules_to_save["y"].weight is not m.tokens.weight
    train(m)
    train(reference)
    torch.testing.assert_close(m(TOKENS), reference(TOKENS))
    expected = m(TOKENS)
    unload(m)
    assert torch.equal(m(TOKENS), expected)
    assert m.tokens.weight is m.head.weight


def test_copies_stay_apart_if_the_adapter_says_so() -> None:
    class Apart(PeftParams):
        ensure_weight_tying = False

    m = inject(model(), Whole, Apart([], modules_to_save=["tokens", "head"]), "x")
    assert m.tokens.weight is not m.head.weight
    assert len(trained(m)) == 2
    train(m)
    expected = m(TOKENS)
    assert not torch.equal(m.tokens.weight, m.head.weight)
    unload(m)
    assert torch.equal(m(TOKENS), expected)


def test_copies_of_fewer_bits_are_tied_too() -> None:
    params = PeftParams([], modules_to_save=["tokens", "head"])
    m = inject(model().bfloat16(), Whole, params, "x")
    assert m.tokens.weight is m.head.weight
    assert m.tokens.weight.dtype == torch.float32
    assert m(TOKENS).dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "other"), [("head", "tokens"), ("tokens", "head")])
def test_a_copy_that_leaves_a_tie_is_told(name: str, other: str) -> None:
    m = model()
    with pytest.warns(UserWarning, match=rf"{name}.weight is tied to {other}.weight, which is not"):
        inject(m, Whole, PeftParams([], modules_to_save=[name]), "x")
    train(m)
    assert torch.equal(getattr(m, other).weight, model().tokens.weight)
    expected = m(TOKENS)
    unload(m)
    assert torch.equal(m(TOKENS), expected)


def test_a_head_that_reads_the_embeddings_weight_uses_the_copy() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(7, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.tokens(tokens), self.tokens.weight)

    torch.manual_seed(0)
    m = Functional()
    reference = copy.deepcopy(m)
    inject(m, Whole, PeftParams([], modules_to_save=["tokens"]), "x")
    train(m)
    train(reference)
    assert torch.equal(m(TOKENS), reference(TOKENS))


# What cannot be copied


def quantized() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ModuleList([nn.Linear(2, 2)]), "is never called"),
        (nn.ModuleDict({"a": nn.Linear(2, 2)}), "is never called"),
        (nn.Tanh(), "Tanh has no parameters to train"),
        (quantized(), "Linear has parameters of torch.uint8, which cannot be trained"),
        (nn.Sequential(SavedModule(nn.Linear(2, 2))), "Sequential has adapters already"),
    ],
)
def test_what_cannot_be_copied_is_refused(module: nn.Module, message: str) -> None:
    assert message in SavedModule.fault(module, SCORE)
    m = nn.ModuleDict({"it": module, "other": nn.Linear(2, 2)})
    before = str(m)
    with pytest.raises(ConfigError, match="it"):
        inject(m, Whole, PeftParams([], modules_to_save=["it"]), "x")
    assert str(m) == before


def test_the_layers_are_found_by_structure_when_names_are_alike() -> None:
    m = nn.ModuleDict({"modules_to": nn.Linear(2, 2), "x": nn.Linear(2, 2)})
    with pytest.warns(UserWarning, match="has the name of a module"):
        inject(m, Whole, PeftParams([], modules_to_save=["x"]), "x")
    assert [path for path, _ in modules(m)] == ["x"]
    assert trained(m) == {"x.modules_to_save.x.weight", "x.modules_to_save.x.bias"}
