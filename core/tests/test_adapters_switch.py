"""Choosing, disabling and deleting adapters, with methods that only this file knows."""

import copy
import dataclasses
import math
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from core_plugin.adapters import (
    adapters,
    add_adapter,
    delete_adapter,
    disable_adapters,
    enable_adapters,
    inject,
    merge,
    modules,
    set_adapter,
    unmerge,
)
from core_plugin.adapters.layer import (
    Adapter,
    AdapterLayer,
    AdapterParameters,
    ModelAdapter,
    ParameterLayer,
)
from core_plugin.adapters.switch import biases
from core_plugin.errors import ConfigError
from core_plugin.testing.children import run_script
from core_plugin.types.peft import BasePeft, PeftParams


@dataclasses.dataclass(frozen=True)
class Params(PeftParams):
    bias: str = "none"
    target_parameters: list[str] | None = None


class ScaleLayer(AdapterLayer):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.scale_vector = AdapterParameters(nn.init.ones_)

    def add_adapter(self, name: str, params: Params) -> None:
        self.scale_vector.add(name, (self.base_layer.out_features, 1), self.base_layer)

    def merge_into(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors["weight"].mul_(self.scale_vector[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        for name in self.used:
            bias = self.base_layer.bias
            plain = result if bias is None else result - bias
            result = plain * self.scale_vector[name].squeeze(1) + (0 if bias is None else bias)
        return result


class ScaleParameter(ParameterLayer):
    """Multiplies a stack of weights for as long as the module is called."""

    def __init__(self, base_layer: nn.Module, parameter: str) -> None:
        super().__init__(base_layer, parameter)
        self.scale_factor = AdapterParameters(nn.init.ones_)

    def add_adapter(self, name: str, params: Params) -> None:
        self.scale_factor.add(name, (1,), self.base_layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.owner._parameters[self.parameter]
        try:
            for name in self.used:
                held = self.owner._parameters[self.parameter]
                self.owner._parameters[self.parameter] = held * self.scale_factor[name]
            return self.base_layer(x)
        finally:
            self.owner._parameters[self.parameter] = own


class Scale(BasePeft):
    """A vector that multiplies what a linear layer's weight gives."""

    Params = Params
    prefix = "scale_"
    peft_type = "SCALE"

    @staticmethod
    def layers() -> dict[type, type[AdapterLayer]]:
        return {nn.Linear: ScaleLayer, nn.Parameter: ScaleParameter}


class Shift(ModelAdapter):
    child = "door_shift"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.door_vector = AdapterParameters(nn.init.ones_)

    def add_adapter(self, name: str, params: object) -> None:
        self.door_vector[name] = nn.Parameter(torch.ones(1))

    def attach(self, model: nn.Module) -> None:
        self._hook = model.register_forward_hook(lambda _, __, output: self(output))

    def detach(self) -> None:
        self._hook.remove()

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return output + sum(self.door_vector[name] for name in self.used)


class Door(BasePeft):
    """A number that is added to a model's outputs."""

    prefix = "door_"
    peft_type = "DOOR"

    @staticmethod
    def model_adapter() -> type[ModelAdapter]:
        return Shift


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 4))
        self.down = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.up @ self.down


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.v_proj = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.v_proj(torch.tanh(self.q_proj(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.experts = Experts()
        self.score = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.score(x + self.experts(x))


TOKENS = torch.arange(7)
Q = Params(target_modules=["q_proj"])
QV = Params(target_modules=["q_proj", "v_proj"])


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def randomize(m: nn.Module, seed: int = 1) -> None:
    """Give all adapters of a model values that show."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, module in modules(m):
            for name in module.adapters:
                for _, _, parameter in module.adapter_parameters(name):
                    parameter.add_(torch.rand_like(parameter))


def two() -> Model:
    """A model with the adapters "first", on q, and "second", on q and v; "first" is active."""
    m = inject(model(), Scale, Q, "first")
    add_adapter(m, Scale, QV, "second")
    randomize(m)
    return m


def trained(m: nn.Module) -> set[str]:
    return {name for name, p in m.named_parameters() if p.requires_grad}


def snapshot(m: nn.Module) -> tuple[object, ...]:
    """All that switching could change."""
    return (
        [(name, id(module)) for name, module in m.named_modules()],
        [(name, id(p), p.requires_grad, p._version) for name, p in m.named_parameters()],
        [(path, part.active, part.used, part.enabled) for path, part in modules(m)],
    )


def scaled(*names: str) -> torch.Tensor:
    """What the model of :func:`two` gives with these adapters, computed in a plain model."""
    reference, source = model(), two()
    with torch.no_grad():
        for plain, adapted in zip(reference.layers, source.layers, strict=True):
            for name in names:
                plain.q_proj.weight.mul_(adapted.q_proj.scale_vector[name])
                if name == "second":
                    plain.v_proj.weight.mul_(adapted.v_proj.scale_vector[name])
    return reference(TOKENS)


# Finding


def test_modules_come_once_with_their_canonical_paths() -> None:
    m = inject(model(), Scale, Params(["q_proj"], target_parameters=["experts.up"]), "x")
    m.again = m.layers[0].q_proj
    expected = ["layers.0.q_proj", "layers.1.q_proj", "experts"]
    assert [path for path, _ in modules(m)] == expected
    m.layers[1] = torch.compile(m.layers[1], backend="eager")
    assert [path for path, _ in modules(torch.compile(m, backend="eager"))] == expected
    m.layers[0].q_proj = torch.compile(m.layers[0].q_proj, backend="eager")
    assert [path for path, _ in modules(m)] == expected


def test_nested_parameter_layers_come_outermost_first() -> None:
    both = Params([], target_parameters=["experts.up", "experts.down"])
    m = inject(model(), Scale, both, "x")
    found = list(modules(m))
    assert [path for path, _ in found] == ["experts", "experts.base_layer"]
    assert found[0][1].base_layer is found[1][1]
    assert list(adapters(m)) == ["x"]
    assert adapters(m)["x"].params is both


def test_a_layer_that_is_itself_the_model_has_an_empty_path() -> None:
    layer = ScaleLayer(nn.Linear(4, 4))
    assert [path for path, _ in modules(layer)] == [""]


# Choosing


@pytest.mark.parametrize(
    "names", [["first"], ["second"], ["first", "second"], ["second", "first"], []]
)
def test_those_that_are_chosen_apply(names: list[str]) -> None:
    m = two()
    set_adapter(m, names)
    torch.testing.assert_close(m(TOKENS), scaled(*names))


def test_one_name_need_not_be_in_a_list() -> None:
    m = two()
    set_adapter(m, "second")
    assert all(module.active == ("second",) for _, module in modules(m))
    torch.testing.assert_close(m(TOKENS), scaled("second"))


def test_only_what_is_chosen_is_trained() -> None:
    m = two()
    qs = {f"layers.{i}.q_proj.scale_vector" for i in range(2)}
    vs = {f"layers.{i}.v_proj.scale_vector" for i in range(2)}
    assert trained(m) == {f"{path}.first" for path in qs}
    set_adapter(m, "second")
    assert trained(m) == {f"{path}.second" for path in qs | vs}
    set_adapter(m, ["first", "second"])
    assert trained(m) == {f"{path}.second" for path in qs | vs} | {f"{path}.first" for path in qs}
    set_adapter(m, "first", trainable=False)
    assert trained(m) == set()
    assert torch.equal(m(TOKENS), two()(TOKENS))


def test_gradients_go_to_the_active_adapter_alone() -> None:
    m = two()
    set_adapter(m, "second")
    m(TOKENS).square().sum().backward()
    with_gradient = {name for name, p in m.named_parameters() if p.grad is not None}
    assert with_gradient == trained(m)
    assert all(m.get_parameter(name).grad.abs().sum() > 0 for name in with_gradient)


def test_what_the_user_trains_of_the_base_stays_so() -> None:
    m = two()
    m.layers[0].norm.weight.requires_grad_(True)
    for names in ("second", [], "first"):
        set_adapter(m, names)
        assert "layers.0.norm.weight" in trained(m)


def test_unknown_names_are_all_told_and_nothing_changes() -> None:
    m = two()
    before = snapshot(m)
    with pytest.raises(ConfigError) as caught:
        set_adapter(m, ["second", "frist", "zz"])
    assert caught.value.faults == (
        "the model has no adapter called 'frist'; did you mean first?",
        "the model has no adapter called 'zz'; it has 'first', 'second'",
    )
    assert snapshot(m) == before
    with pytest.raises(ConfigError, match="it has none"):
        set_adapter(model(), "x")


def test_merged_adapters_are_not_switched() -> None:
    m = two()
    merge(m)
    before = snapshot(m)
    with pytest.raises(ConfigError, match=r"'first' are merged into layers.0.q_proj; unmerge"):
        set_adapter(m, "second")
    assert snapshot(m) == before
    unmerge(m)
    set_adapter(m, "second")
    torch.testing.assert_close(m(TOKENS), scaled("second"))


def test_a_method_says_which_adapters_exclude_each_other() -> None:
    class Exclusive(ScaleLayer):
        def clash(self, names: list[str]) -> str | None:
            return f"{names} exclude each other"

    class Method(Scale):
        @staticmethod
        def layers() -> dict[type, type[AdapterLayer]]:
            return {nn.Linear: Exclusive}

    m = inject(model(), Method, Q, "a")
    add_adapter(m, Method, QV, "b")
    before = snapshot(m)
    with pytest.raises(ConfigError) as caught:
        set_adapter(m, ["b", "a"])
    assert caught.value.faults == tuple(
        f"layers.{i}.q_proj: ['b', 'a'] exclude each other" for i in range(2)
    )
    assert snapshot(m) == before


def test_a_compiled_model_follows() -> None:
    m = two()
    compiled = torch.compile(m, backend="eager")
    torch.testing.assert_close(compiled(TOKENS), scaled("first"))
    set_adapter(compiled, "second")
    torch.testing.assert_close(compiled(TOKENS), scaled("second"))
    with disable_adapters(compiled):
        torch.testing.assert_close(compiled(TOKENS), scaled())
    torch.testing.assert_close(compiled(TOKENS), scaled("second"))


# Biases


def biased(bias: str, **rules: object) -> Model:
    return inject(model(), Scale, Params(["q_proj", "v_proj"], bias=bias, **rules), "x")


ADAPTED = {f"layers.{i}.q_proj.base_layer.bias" for i in range(2)}
OTHERS = {"layers.0.norm.bias", "layers.1.norm.bias", "score.0.bias", "score.2.bias"}


@pytest.mark.parametrize(
    ("bias", "expected"),
    [("none", set()), ("scale_only", ADAPTED), ("all", ADAPTED | OTHERS)],
)
def test_biases_are_trained_as_the_adapter_says(bias: str, expected: set[str]) -> None:
    m = biased(bias)
    assert {name for name in trained(m) if name.endswith("bias")} == expected
    found = biases(m, adapters(m)["x"])
    assert set(found) == expected
    assert all(found[name] is m.get_parameter(name) for name in expected)
    add_adapter(m, Scale, Q, "plain")
    set_adapter(m, "plain")
    assert not {name for name in trained(m) if name.endswith("bias")}
    set_adapter(m, "x")
    assert {name for name in trained(m) if name.endswith("bias")} == expected


def test_biases_of_a_module_that_is_copied_are_not_trained_twice() -> None:
    m = biased("all", modules_to_save=["score"])
    found = {name for name in trained(m) if name.endswith("bias")}
    copies = {"score.modules_to_save.x.0.bias", "score.modules_to_save.x.2.bias"}
    expected = ADAPTED | {"layers.0.norm.bias", "layers.1.norm.bias"}
    assert found == expected | copies
    assert set(biases(m, adapters(m)["x"])) == expected


def test_deleting_the_adapter_freezes_its_biases() -> None:
    m = biased("all")
    with pytest.warns(UserWarning, match="biases of the model itself, which keep their values"):
        delete_adapter(m, "x")
    assert trained(m) == set()


# On and off


def test_disabled_adapters_change_nothing_and_come_back() -> None:
    m = two()
    set_adapter(m, ["second", "first"])
    before = snapshot(m)
    with disable_adapters(m):
        assert torch.equal(m(TOKENS), model()(TOKENS))
        with disable_adapters(m):
            assert torch.equal(m(TOKENS), model()(TOKENS))
        assert torch.equal(m(TOKENS), model()(TOKENS))
    assert snapshot(m) == before


def test_an_exception_brings_everything_back() -> None:
    m = two()
    m.layers[1].norm.weight.requires_grad_(True)
    before = snapshot(m)

    def fail() -> None:
        with disable_adapters(m):
            set_adapter(m, "second")
            m.requires_grad_(False)
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        fail()
    assert snapshot(m) == before


def test_adapters_can_be_on_for_a_while_inside() -> None:
    m = two()
    expected = m(TOKENS)
    with disable_adapters(m):
        enable_adapters(m)
        assert torch.equal(m(TOKENS), expected)
        with disable_adapters(m):
            assert torch.equal(m(TOKENS), model()(TOKENS))
        assert torch.equal(m(TOKENS), expected)


def test_without_a_context_they_stay_off_until_they_are_enabled() -> None:
    m = two()
    expected = m(TOKENS)
    disable_adapters(m)
    assert torch.equal(m(TOKENS), model()(TOKENS))
    set_adapter(m, "second")
    assert torch.equal(m(TOKENS), model()(TOKENS))
    set_adapter(m, "first")
    enable_adapters(m)
    assert torch.equal(m(TOKENS), expected)


def test_merged_adapters_are_put_aside_and_come_back_merged() -> None:
    m = two()
    merge(m)
    merged, before = m(TOKENS), snapshot(m)
    base = model()
    with disable_adapters(m):
        assert torch.equal(m(TOKENS), base(TOKENS))
        with disable_adapters(m):
            assert torch.equal(m(TOKENS), base(TOKENS))
        assert torch.equal(m.layers[0].q_proj.weight, base.layers[0].q_proj.weight)
    assert torch.equal(m(TOKENS), merged)
    assert snapshot(m) == before
    unmerge(m)
    assert torch.equal(m(TOKENS), two()(TOKENS))


def test_merged_adapters_may_be_unmerged_while_they_are_disabled() -> None:
    m = two()
    expected = m(TOKENS)
    merge(m)
    with disable_adapters(m):
        unmerge(m)
        assert torch.equal(m(TOKENS), model()(TOKENS))
    assert torch.equal(m(TOKENS), expected)


def test_deleting_one_while_it_is_disabled_leaves_the_others() -> None:
    m = two()
    set_adapter(m, ["first", "second"])
    with disable_adapters(m):
        delete_adapter(m, "second")
    torch.testing.assert_close(m(TOKENS), scaled("first"))


def test_disabling_says_that_biases_stay() -> None:
    m = biased("all")
    with pytest.warns(UserWarning, match="'x' trains biases of the model itself"):
        context = disable_adapters(m)
    context.close()


def test_copies_and_pickles_are_as_the_model_is() -> None:
    m = two()
    set_adapter(m, ["second", "first"])
    expected = m(TOKENS)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(TOKENS), expected)
        assert trained(other) == trained(m)
        with disable_adapters(other):
            assert torch.equal(other(TOKENS), model()(TOKENS))
        set_adapter(other, "first")
        torch.testing.assert_close(other(TOKENS), scaled("first"))
    assert torch.equal(m(TOKENS), expected)


# Deleting


def test_the_rest_stays_active_and_empty_layers_leave() -> None:
    m = two()
    set_adapter(m, ["second", "first"])
    delete_adapter(m, "second")
    assert list(adapters(m)) == ["first"]
    assert type(m.layers[0].v_proj) is nn.Linear
    torch.testing.assert_close(m(TOKENS), scaled("first"))
    assert trained(m) == {f"layers.{i}.q_proj.scale_vector.first" for i in range(2)}
    delete_adapter(m, "first")
    assert str(m) == str(model())
    assert m.state_dict().keys() == model().state_dict().keys()
    assert torch.equal(m(TOKENS), model()(TOKENS))


FACTORS = {"a": 2.0, "b": 3.0, "c": 5.0}
STEPS = st.tuples(st.sampled_from(["add", "delete", "set"]), st.sampled_from(list(FACTORS)))


@settings(max_examples=30, deadline=None)
@given(st.lists(STEPS, max_size=8))
def test_any_order_of_adding_choosing_and_deleting_does_what_a_reference_says(
    steps: list[tuple[str, str]],
) -> None:
    layer, held, active = nn.Linear(4, 3, bias=False), set(), set()
    m = nn.ModuleDict({"q_proj": layer})
    x = torch.randn(2, 4)
    expected = layer(x)
    for step, name in steps:
        if (name in held) == (step == "add"):
            with pytest.raises(ConfigError, match=repr(name)):
                _take(step, m, name)
            continue
        _take(step, m, name)
        held = held | {name} if step == "add" else held - {name} if step == "delete" else held
        active = {name} if step == "set" else active & held
        factor = math.prod(FACTORS[n] for n in active)
        torch.testing.assert_close(m["q_proj"](x), expected * factor)
        assert set(adapters(m)) == held
        assert (m["q_proj"] is layer) == (not held)


def _take(step: str, m: nn.Module, name: str) -> None:
    if step == "add":
        add_adapter(m, Scale, Q, name)
        m["q_proj"].scale_vector[name].data.fill_(FACTORS[name])
    elif step == "delete":
        delete_adapter(m, name)
    else:
        set_adapter(m, name)


def test_a_deleted_adapter_is_not_active_when_its_name_comes_again() -> None:
    m = inject(model(), Scale, Q, "first")
    add_adapter(m, Scale, Params(["v_proj"]), "second")
    set_adapter(m, ["first", "second"])
    delete_adapter(m, "second")
    add_adapter(m, Scale, QV, "second")
    enable_adapters(m)
    assert all("second" not in module.used for _, module in modules(m))
    with disable_adapters(m):
        set_adapter(m, ["second", "first"])
        with disable_adapters(m):
            delete_adapter(m, "second")
        add_adapter(m, Scale, QV, "second")
        enable_adapters(m)
        assert all("second" not in module.used for _, module in modules(m))


def test_a_shared_layer_leaves_all_its_places() -> None:
    shared = nn.Linear(4, 4)
    m = nn.ModuleDict({"a": shared, "inner": nn.ModuleDict({"b": shared}), "c": nn.Linear(4, 4)})
    inject(m, Scale, Params(["a"]), "x")
    delete_adapter(m, "x")
    assert m["a"] is m["inner"]["b"] is shared


def test_nested_parameter_layers_leave_one_by_one() -> None:
    m = inject(model(), Scale, Params([], target_parameters=["experts.up"]), "up")
    with pytest.warns(UserWarning, match="has adapters already"):
        inject(m, Scale, Params([], target_parameters=["experts.down"]), "down")
    owner = m.experts.owner
    inner = m.experts.base_layer
    assert [inner.parameter, m.experts.parameter] == ["up", "down"]
    delete_adapter(m, "up")
    assert m.experts.base_layer is owner
    assert m.experts.parameter == "down"
    delete_adapter(m, "down")
    assert m.experts is owner


def test_nested_parameter_layers_leave_together() -> None:
    both = Params([], target_parameters=["experts.up", "experts.down"])
    m = inject(model(), Scale, both, "x")
    owner = m.experts.owner
    delete_adapter(m, "x")
    assert m.experts is owner


def test_an_inner_parameter_layer_is_left_when_the_outer_one_goes() -> None:
    m = inject(model(), Scale, Params([], target_parameters=["experts.up"]), "up")
    add_adapter(m, Scale, Params([], target_parameters=["experts.down"]), "down")
    inner = m.experts.base_layer
    delete_adapter(m, "down")
    assert m.experts is inner


def test_a_model_that_is_a_layer_itself_stays() -> None:
    layer = ScaleLayer(nn.Linear(4, 4))
    layer.add(Adapter("x", Scale, Q), Q)
    delete_adapter(layer, "x")
    x = torch.randn(2, 4)
    assert torch.equal(layer(x), layer.base_layer(x))


def test_what_is_at_the_door_is_detached() -> None:
    m = inject(model(), Door, PeftParams(), "x")
    expected = model()(TOKENS)
    torch.testing.assert_close(m(TOKENS), expected + 1)
    add_adapter(m, Door, PeftParams(), "y")
    delete_adapter(m, "x")
    assert torch.equal(m(TOKENS), expected)
    set_adapter(m, "y")
    torch.testing.assert_close(m(TOKENS), expected + 1)
    with disable_adapters(m):
        assert torch.equal(m(TOKENS), expected)
    delete_adapter(m, "y")
    assert torch.equal(m(TOKENS), expected)
    assert str(m) == str(model())
    assert not m._forward_hooks


def test_what_is_unknown_or_merged_is_not_deleted() -> None:
    m = two()
    before = snapshot(m)
    with pytest.raises(ConfigError, match="'secnd'; did you mean second"):
        delete_adapter(m, "secnd")
    assert snapshot(m) == before
    merge(m)
    before = snapshot(m)
    with pytest.raises(ConfigError, match="'first' is merged; unmerge it first"):
        delete_adapter(m, "first")
    assert snapshot(m) == before
    delete_adapter(m, "second")
    torch.testing.assert_close(m(TOKENS), scaled("first"))


# Several processes

SCRIPT = Path(__file__).with_name("adapter_switch_processes.py")


def test_a_sharded_model_is_switched_as_a_whole_one() -> None:
    run_script(SCRIPT, 2)
