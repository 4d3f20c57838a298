"""Merging, unmerging and unloading, with methods that only this file knows."""

import copy
import dataclasses
import io
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from core_plugin.adapters import (
    add_adapter,
    disable_adapters,
    inject,
    merge,
    modules,
    set_adapter,
    unload,
    unmerge,
)
from core_plugin.adapters.layer import (
    AdapterLayer,
    AdapterParameters,
    ModelAdapter,
    ParameterLayer,
)
from core_plugin.adapters.memory import LARGE_PAGE, empty_like
from core_plugin.builtin.decoder import Decoder
from core_plugin.builtin.decoder_model import CausalLM
from core_plugin.errors import ConfigError
from core_plugin.testing.children import run_script
from core_plugin.types.peft import BasePeft, PeftParams

X = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass(frozen=True)
class RankParams(PeftParams):
    target_parameters: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    alpha: float = 0.7
    bias: str = "none"


class RankLayer(AdapterLayer):
    """Adds ``alpha B A x``."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.rank_A = AdapterParameters(nn.init.normal_)
        self.rank_B = AdapterParameters(nn.init.normal_)

    def add_adapter(self, name: str, params: RankParams) -> None:
        outputs, inputs = self.base_layer.weight.shape
        self.rank_A.add(name, (2, inputs), self.base_layer)
        self.rank_B.add(name, (outputs, 2), self.base_layer)

    def merge_fault(self, name: str) -> str | None:
        return "a negative alpha cannot be merged" if self.params[name].alpha < 0 else None

    def merge_into(self, tensors: dict[str, Tensor], name: str) -> None:
        assert tensors.keys() == {"weight"}
        assert tensors["weight"].dtype in (torch.float32, torch.float64)
        alpha = self.params[name].alpha
        tensors["weight"].addmm_(self.rank_B[name], self.rank_A[name], alpha=alpha)

    def update(self, name: str) -> Tensor:
        """In float64."""
        product = self.rank_B[name].double() @ self.rank_A[name].double()
        return self.params[name].alpha * product

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name in self.used:
            if isinstance(self.base_layer, nn.Embedding):
                result = result + nn.functional.embedding(x, self.update(name)).to(result.dtype)
            else:
                result = result + nn.functional.linear(x, self.update(name).to(x.dtype))
        return result


class RankParameter(ParameterLayer):
    """The same for a matrix that a module holds itself."""

    def __init__(self, base_layer: nn.Module, parameter: str) -> None:
        super().__init__(base_layer, parameter)
        self.rank_A = AdapterParameters(nn.init.normal_)

    def add_adapter(self, name: str, params: RankParams) -> None:
        self.rank_A.add(name, tuple(getattr(self.owner, self.parameter).shape), self.owner)

    def merge_into(self, tensors: dict[str, Tensor], name: str) -> None:
        tensors[self.parameter].add_(self.rank_A[name])

    def forward(self, x: Tensor) -> Tensor:
        own = self.owner._parameters[self.parameter]
        try:
            for name in self.used:
                self.owner._parameters[self.parameter] = own + self.rank_A[name]
            return self.base_layer(x)
        finally:
            self.owner._parameters[self.parameter] = own


class Rank(BasePeft):
    """Low-rank updates."""

    Params = RankParams
    prefix = "rank_"
    peft_type = "RANK"

    @staticmethod
    def layers() -> dict[type, type[AdapterLayer]]:
        return {nn.Linear: RankLayer, nn.Embedding: RankLayer, nn.Parameter: RankParameter}


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

    def forward(self, output: Tensor) -> Tensor:
        return output + sum(self.door_vector[name] for name in self.used)


class Door(BasePeft):
    """A number that is added to a model's outputs."""

    Params = RankParams
    prefix = "door_"
    peft_type = "DOOR"

    @staticmethod
    def model_adapter() -> type[ModelAdapter]:
        return Shift


class Experts(nn.Module):
    """Two matrices that no module of their own holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, 8))
        self.down = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up) @ self.down


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.twice = nn.Linear(8, 8)
        self.again = self.twice
        self.experts = Experts()
        self.last = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(self.twice(torch.tanh(self.first(x)))))
        return self.experts(self.last(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.tokens(tokens))))


TOKENS = torch.arange(9).reshape(1, 9)
LAYERS = ["first", "twice", "last"]


def adapted(
    *names: str, dtype: torch.dtype = torch.float32, model: nn.Module | None = None, **params
) -> nn.Module:
    """A model with random adapters, all of them active."""
    torch.manual_seed(1)
    model = (Net() if model is None else model).to(dtype)
    chosen = RankParams(**{"target_modules": LAYERS, **params})
    inject(model, Rank, chosen, names[0])
    for name in names[1:]:
        add_adapter(model, Rank, chosen, name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if not {"base_layer", *names}.isdisjoint(path.split(".")) and "rank_" in path:
                parameter.normal_(std=0.3)
    if len(names) > 1:
        set_adapter(model, names)
    return model


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's own, by the names that they have without adapters."""
    return {
        name.replace("base_layer.", ""): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if "rank_" not in name
    }


def snapshot(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (tensor, tensor.detach().clone()) for name, tensor in own_tensors(model).items()}


def assert_as_before(model: nn.Module, before: dict[str, tuple[Tensor, Tensor]]) -> None:
    """The same objects, bit for bit."""
    now = own_tensors(model)
    assert now.keys() == before.keys()
    for name, (tensor, values) in before.items():
        assert now[name] is tensor, name
        assert torch.equal(tensor, values), name


def expected_weight(before: Tensor, layer: RankLayer, *names: str) -> Tensor:
    """In float64."""
    return before.double() + sum(layer.update(name) for name in names)


# Values


def test_a_merged_model_computes_the_same_in_its_base_layers_alone():
    model = adapted("default")
    expected = model(X)
    before = snapshot(model)
    assert merge(model) == []
    assert all(module.used == () for _, module in modules(model))
    torch.testing.assert_close(model(X), expected)
    for name in LAYERS:
        layer = model.get_submodule(name)
        assert layer.merged == ("default",)
        weight = expected_weight(before[f"{name}.weight"][1], layer, "default")
        torch.testing.assert_close(layer.base_layer.weight.double(), weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype, keep):
    torch.manual_seed(0)
    model = adapted(
        "default", dtype=dtype, model=nn.Sequential(nn.Linear(64, 96)), target_modules="0"
    )
    base = model[0].base_layer.weight.detach().clone()
    merge(model, keep=keep)
    exact = expected_weight(base, model[0], "default")
    actual, right = model[0].base_layer.weight, exact.to(dtype)
    assert actual.dtype == dtype
    assert (actual != right).sum() <= 3
    # Only where the float32 sum falls on the other side of the middle of two neighbours.
    nearest = torch.nextafter(right.abs(), torch.tensor(torch.inf, dtype=dtype)) - right.abs()
    in_float32 = 4 * 2**-24 * (base.double().abs() + (exact - base.double()).abs())
    assert torch.all((exact - actual.double()).abs() <= nearest.double() / 2 + in_float32)


def test_a_base_in_float64_is_merged_in_float64():
    model = adapted("default", dtype=torch.float64)
    base = model.first.base_layer.weight.detach().clone()
    merge(model)
    exact = expected_weight(base, model.first, "default")
    torch.testing.assert_close(model.first.base_layer.weight, exact, rtol=0, atol=1e-15)


def test_the_adapters_that_are_active_are_merged_or_those_that_are_named():
    model = adapted("a", "b", "c")
    set_adapter(model, ["c", "a"])
    base = model.first.base_layer.weight.detach().clone()
    for names, merged in [(None, ("c", "a")), ("b", ("b",)), (["b", "c", "b"], ("b", "c"))]:
        merge(model, names)
        assert model.first.merged == merged
        exact = expected_weight(base, model.first, *merged).float()
        torch.testing.assert_close(model.first.base_layer.weight, exact)
        unmerge(model)
    assert model.first.used == ("c", "a")


def test_several_adapters_are_rounded_once():
    model = adapted("a", "b", dtype=torch.bfloat16)
    base = model.last.base_layer.weight.detach().clone()
    merge(model)
    exact = expected_weight(base, model.last, "a", "b")
    assert torch.equal(model.last.base_layer.weight, exact.bfloat16())


def test_where_merged_adapters_have_no_part_nothing_else_applies():
    model = adapted("a", target_modules=["first"])
    add_adapter(model, Rank, RankParams(target_modules=["last"]), "b")
    set_adapter(model, ["a", "b"])
    merge(model, "a")
    merged = model(X)
    unmerge(model)
    set_adapter(model, "a")
    torch.testing.assert_close(merged, model(X))


# Taking it back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("safe", [True, False])
def test_unmerging_brings_the_very_tensors_back(dtype, safe):
    model = adapted("a", "b", dtype=dtype)
    model.last.base_layer.weight.requires_grad_(True)
    before, expected = snapshot(model), model(X.to(dtype))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for _ in range(2):
        merge(model, safe=safe)
        assert not torch.equal(model.last.base_layer.weight, before["last.weight"][1])
        assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
        unmerge(model)
        assert_as_before(model, before)
    assert torch.equal(model(X.to(dtype)), expected)
    assert [module.merged for _, module in modules(model)] == [()] * 3


def test_in_place_no_new_memory_is_used_and_nothing_is_kept():
    for dtype in (torch.float32, torch.bfloat16):
        model = adapted("default", dtype=dtype)
        before = snapshot(model)
        merge(model, keep=False)
        for name, (tensor, values) in before.items():
            assert own_tensors(model)[name] is tensor
            assert torch.equal(tensor, values) == (
                name not in [f"{path}.weight" for path in (*LAYERS, "again")]
            )
        with pytest.raises(ConfigError, match="merged with keep=False"):
            unmerge(model)


def test_what_is_disabled_is_put_aside_and_comes_back():
    model = adapted("default")
    before, plain = snapshot(model), disabled_output(model)
    merge(model)
    merged = model(X)
    with disable_adapters(model):
        assert_as_before(model, before)
        assert torch.equal(model(X), plain)
    assert torch.equal(model(X), merged)
    disable_adapters(model)
    unmerge(model)
    assert_as_before(model, before)


def test_what_is_merged_in_place_cannot_be_put_aside() -> None:
    model = adapted("x")
    merge(model, keep=False)
    with pytest.raises(ConfigError, match="merged in place, and what was there before is not kept"):
        disable_adapters(model)


def disabled_output(model: nn.Module) -> Tensor:
    with disable_adapters(model):
        return model(X)


def test_a_merged_model_is_moved_with_what_it_was():
    model = adapted("default")
    values = {name: t.detach().double() for name, t in own_tensors(model).items()}
    merge(model)
    model.double()
    unmerge(model)
    assert all(torch.equal(t, values[name]) for name, t in own_tensors(model).items())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_merged_model_can_be_unmerged(duplicate):
    model = adapted("default")
    before, expected = snapshot(model), model(X)
    merge(model)
    twin = duplicate(model)
    unmerge(twin)
    assert torch.equal(twin(X), expected)
    unmerge(model)
    assert_as_before(model, before)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(
        st.one_of(
            st.tuples(
                st.just("merge"),
                st.lists(st.sampled_from("abc"), min_size=1, unique=True),
                st.booleans(),
            ),
            st.just(("unmerge",)),
            st.just(("disable",)),
        ),
        max_size=8,
    ),
)
def test_any_order_of_merges_leaves_what_a_reference_says(dtype, operations):
    model = adapted("a", "b", "c", dtype=dtype)
    before = snapshot(model)
    merged = []
    for operation, *arguments in operations:
        if operation == "merge" and not merged:
            names, safe = arguments
            merge(model, names, safe=safe)
            merged = names
        elif operation == "unmerge" and merged:
            unmerge(model)
            merged = []
        elif operation == "disable":
            with disable_adapters(model):
                assert_as_before(model, before)
        weight = model.twice.base_layer.weight
        reference = before["twice.weight"][1].double() + sum(model.twice.update(n) for n in merged)
        torch.testing.assert_close(
            weight, reference.to(dtype), rtol=2**-7 if merged else 0, atol=1e-6
        )
    if merged:
        unmerge(model)
    assert_as_before(model, before)


# All or nothing


def test_a_safe_merge_changes_nothing_unless_all_is_finite():
    model = adapted("default")
    with torch.no_grad():
        model.twice.rank_A["default"][0, 0] = torch.nan
        model.last.rank_A["default"].fill_(1e30)
        model.last.rank_B["default"].fill_(1e30)
    before = snapshot(model)
    for keep in (True, False):
        with pytest.raises(ConfigError) as caught:
            merge(model, safe=True, keep=keep)
        assert caught.value.faults == (
            "merging would make twice.weight infinite or not a number",
            "merging would make last.weight infinite or not a number",
        )
        assert_as_before(model, before)
        assert [module.merged for _, module in modules(model)] == [()] * 3
    merge(model)
    assert model.last.base_layer.weight.isinf().any()


def test_an_overflow_of_the_bases_dtype_is_found():
    model = adapted("default", dtype=torch.float16)
    with torch.no_grad():
        model.first.rank_A["default"].fill_(300.0)
        model.first.rank_B["default"].fill_(300.0)
    with pytest.raises(ConfigError, match=r"first\.weight infinite"):
        merge(model, safe=True)


def test_finite_results_are_safe_even_if_their_sum_is_not():
    model = adapted("default", model=nn.Sequential(nn.Linear(4, 4)), target_modules="0")
    with torch.no_grad():
        model[0].base_layer.weight.fill_(3e38)
    merge(model, safe=True)
    assert model[0].merged == ("default",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_method_that_fails_half_way_changes_nothing(dtype):
    model = adapted("default", dtype=dtype)
    before = snapshot(model)
    model.last.rank_B["default"] = nn.Parameter(torch.zeros(1, 1))
    with pytest.raises(RuntimeError):
        merge(model)
    assert_as_before(model, before)
    assert [module.merged for _, module in modules(model)] == [()] * 3


def test_every_layer_that_cannot_be_merged_is_in_one_error():
    model = adapted("default", alpha=-1.0)
    before = snapshot(model)
    with pytest.raises(ConfigError) as caught:
        merge(model)
    reason = "a negative alpha cannot be merged"
    assert caught.value.faults == tuple(f"{name}: {reason}" for name in LAYERS)
    assert_as_before(model, before)


def test_wrong_names_are_told_with_near_ones():
    model = adapted("german", "french")
    with pytest.raises(ConfigError, match="no adapter called 'germna'; did you mean german"):
        merge(model, "germna")
    with pytest.raises(ConfigError, match="no adapter called 'x'; it has 'german', 'french'"):
        merge(model, ["german", "x"])
    set_adapter(model, [])
    with pytest.raises(ConfigError, match="no active adapter to merge; it has 'german', 'french'"):
        merge(model)
    with pytest.raises(ConfigError, match="no active adapter to merge; it has none"):
        merge(nn.Linear(2, 2))


def test_what_is_merged_disabled_or_not_there_is_refused():
    model = adapted("default")
    with pytest.raises(ConfigError, match="no adapter is merged"):
        unmerge(model)
    merge(model)
    with pytest.raises(ConfigError) as caught:
        merge(model)
    assert caught.value.faults == ("the adapters 'default' are merged already; unmerge them first",)
    unmerge(model)
    with disable_adapters(model), pytest.raises(ConfigError, match="disabled; enable them first"):
        merge(model)
    with torch.device("meta"):
        empty = adapted("default")
    with pytest.raises(ConfigError, match=r"first\.weight is on the meta device"):
        merge(empty)
    model.first.to_empty(device="meta")
    model.first.base_layer.to_empty(device="cpu")
    with pytest.raises(ConfigError, match="first: the adapter 'default' is on the meta device"):
        merge(model)


def test_weights_that_are_no_plain_parameters_are_refused():
    model = adapted("default")
    parametrize.register_parametrization(model.first.base_layer, "weight", nn.Identity())
    model.last.base_layer.weight = nn.Parameter(
        torch.zeros(6, 8, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(ConfigError) as caught:
        merge(model)
    assert [fault.partition(" ")[0] for fault in caught.value.faults] == [
        "first.weight",
        "last.weight",
    ]
    assert "is computed from other tensors" in caught.value.faults[0]
    assert "is torch.int8" in caught.value.faults[1]


# Shared weights


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("target", "other"), [("tokens", "head"), ("head", "tokens")])
def test_a_shared_weight_changes_for_the_adapted_layer_alone(target, other, keep):
    model = adapted("default", model=Tied(), target_modules=[target])
    expected = model(TOKENS)
    shared = model.get_submodule(other).weight
    values = shared.detach().clone()
    assert merge(model, keep=keep) == [f"{target}.weight"]
    torch.testing.assert_close(model(TOKENS), expected)
    assert model.get_submodule(other).weight is shared
    assert torch.equal(shared, values)
    if keep:
        unmerge(model)
        assert model.get_submodule(target).base_layer.weight is shared
        assert torch.equal(model(TOKENS), expected)


def test_two_adapted_layers_of_one_weight_each_get_their_own():
    model = adapted("default", model=Tied(), target_modules=["tokens", "head"])
    expected, shared = model(TOKENS), model.head.base_layer.weight
    assert merge(model) == ["tokens.weight", "head.weight"]
    torch.testing.assert_close(model(TOKENS), expected)
    unmerge(model)
    assert model.head.base_layer.weight is model.tokens.base_layer.weight is shared


def test_a_module_at_two_places_shares_nothing_with_itself():
    model = adapted("default")
    assert merge(model, keep=False) == []
    assert model.twice is model.again


@pytest.mark.parametrize("keep", [True, False])
def test_a_weight_that_changes_alike_for_all_who_share_it_stays_shared(keep):
    torch.manual_seed(1)
    model = Tied()
    inject(model, Rank, RankParams(target_modules=["inner"], trainable_token_indices=[2, 5]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.normal_()
    expected, shared = model(TOKENS), model.head.base_layer.weight
    assert merge(model, keep=keep) == []
    assert model.head.base_layer.weight is model.tokens.base_layer.weight
    torch.testing.assert_close(model(TOKENS), expected)
    if keep:
        unmerge(model)
        assert model.head.base_layer.weight is model.tokens.base_layer.weight is shared


def test_a_decoder_whose_head_was_untied_stays_so_when_it_is_moved():
    params = Decoder.Params(hidden_size=8, layers=1, heads=2, tie_embeddings=True)
    model = adapted("default", model=CausalLM(params, 9), target_modules=["lm_head"])
    expected = model(TOKENS)
    assert merge(model) == ["lm_head.weight"]
    torch.testing.assert_close(model.double()(TOKENS).float(), expected)
    unmerge(model)
    assert model.lm_head.base_layer.weight is model.model.embed_tokens.weight
    unload(model)
    torch.testing.assert_close(model.float()(TOKENS), expected)


# Layers inside layers, and the engine's own


def test_parameters_of_one_module_are_merged_one_inside_the_other():
    model = adapted(
        "default", target_modules=["last"], target_parameters=["experts.up", "experts.down"]
    )
    outer = model.experts
    assert isinstance(outer.base_layer, RankParameter)
    expected, before = model(X), snapshot(model)
    merge(model)
    torch.testing.assert_close(model(X), expected)
    for layer in (outer, outer.base_layer):
        held = getattr(outer.owner, layer.parameter)
        values = before[f"experts.{layer.parameter}"][1]
        assert torch.equal(held, values + layer.rank_A["default"])
    with disable_adapters(model):
        assert not torch.equal(model(X), expected)
    torch.testing.assert_close(model(X), expected)
    unmerge(model)
    assert_as_before(model, before)
    experts = outer.owner
    unload(model)
    assert model.experts is experts
    torch.testing.assert_close(model(X), expected)


def test_a_layer_around_a_layer_adds_to_what_that_one_added():
    model = adapted("default", dtype=torch.bfloat16, target_modules=["first"])
    inner = model.first
    outer = RankLayer(inner)
    outer.add(next(iter(inner.adapters.values())), inner.params["default"])
    outer.activate(["default"])
    model.first = outer
    base = inner.base_layer.weight
    values = base.detach().clone()
    merge(model)
    exact = values.double() + inner.update("default") + outer.update("default")
    assert torch.equal(inner.base_layer.weight, exact.bfloat16())
    with disable_adapters(model):
        assert inner.base_layer.weight is base
    assert torch.equal(inner.base_layer.weight, exact.bfloat16())
    unmerge(model)
    assert inner.base_layer.weight is base
    assert torch.equal(base, values)
    owner = inner.base_layer
    unload(model)
    assert model.first is owner


def test_a_module_that_is_saved_whole_is_merged_with_its_buffers():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    inject(model, Rank, RankParams(target_modules=["2"], modules_to_save=["1"]))
    for _ in range(3):
        model(X[0])
    saved = model[1].modules_to_save["default"]
    with torch.no_grad():
        saved.weight.normal_()
    model.eval()
    expected, before = model(X[0]), snapshot(model)
    merge(model, safe=True)
    torch.testing.assert_close(model(X[0]), expected)
    assert torch.equal(model[1].base_layer.running_mean, saved.running_mean)
    assert model[1].base_layer.num_batches_tracked == 3
    unmerge(model)
    assert_as_before(model, before)
    norm = model[1].base_layer
    unload(model)
    assert model[1] is norm
    torch.testing.assert_close(model(X[0]), expected)


def test_an_adapter_at_the_models_door_cannot_be_merged():
    model = Net()
    plain = model(X)
    inject(model, Door, RankParams())
    for act in (merge, unload):
        with pytest.raises(
            ConfigError, match="door_shift: the adapter 'default' adapts the model at"
        ):
            act(model)
    assert not torch.equal(model(X), plain)
    assert unload(model, merge=False) is model
    assert torch.equal(model(X), plain)
    assert [*model.state_dict()] == [*Net().state_dict()]


# Unloading


@pytest.mark.parametrize("keep", [None, True, False])
def test_unloading_leaves_the_models_own_modules_with_what_was_merged(keep):
    model = adapted("default")
    own = {name: model.get_submodule(name).base_layer for name in LAYERS}
    expected = model(X)
    names = [*own_tensors(model)]
    if keep is not None:
        merge(model, keep=keep)
    assert unload(model) is model
    assert [*modules(model)] == []
    assert all(model.get_submodule(name) is module for name, module in own.items())
    assert model.again is model.twice
    assert [*model.state_dict()] == names
    assert not any(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model(X), expected)


@pytest.mark.parametrize("merged", [True, False])
def test_unloading_without_merging_brings_the_model_back(merged):
    model = adapted("default")
    before, plain = snapshot(model), disabled_output(model)
    if merged:
        merge(model)
    unload(model, merge=False)
    assert_as_before(model, before)
    assert torch.equal(model(X), plain)


def test_a_module_that_was_compiled_with_a_layer_calls_the_base_after_unloading():
    model = adapted("default")
    plain = disabled_output(model)
    model.last = torch.compile(model.last, backend="eager")
    with torch.no_grad():
        assert not torch.equal(model(X), plain)
        unload(model, merge=False)
        assert torch.equal(model(X), plain)


def test_biases_that_were_trained_are_told():
    model = adapted("default", bias="all")
    with pytest.warns(UserWarning, match="'default' trained biases of the model itself"):
        unload(model, merge=False)


def test_unloading_can_be_safe():
    model = adapted("default")
    before = snapshot(model)
    with torch.no_grad():
        model.twice.rank_A["default"].fill_(torch.inf)
    with pytest.raises(ConfigError, match=r"twice\.weight infinite"):
        unload(model, safe=True)
    assert_as_before(model, before)
    assert len([*modules(model)]) == 3


def test_a_model_that_is_a_layer_itself_is_given_back():
    base = nn.Linear(6, 6)
    layer = RankLayer(base)
    donor = adapted("default").first
    layer.add(donor.adapters["default"], donor.params["default"])
    layer.activate(["default"])
    expected = layer(X)
    assert unload(layer) is base
    torch.testing.assert_close(base(X), expected)


def test_there_is_nothing_to_unload_in_a_model_without_adapters():
    with pytest.raises(ConfigError, match="the model has no adapters"):
        unload(Net())


def test_a_merged_model_whose_adapters_are_disabled_is_not_unloaded():
    model = adapted("default")
    merge(model)
    with disable_adapters(model), pytest.raises(ConfigError, match="disabled; enable them first"):
        unload(model)
    assert len([*modules(model)]) == 3


# Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_in_large_pages_is_as_any_other(dtype):
    size = LARGE_PAGE // dtype.itemsize
    like = torch.zeros(3, size, dtype=dtype)
    memory = empty_like(like)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == (like.shape, dtype, True)
    assert memory.untyped_storage().nbytes() == 3 * LARGE_PAGE
    memory.copy_(torch.arange(3).unsqueeze(1))
    assert memory.float().mean(1).tolist() == [0, 1, 2]
    file = io.BytesIO()
    torch.save(memory, file)
    assert torch.equal(torch.load(io.BytesIO(file.getvalue())), memory)


@pytest.mark.parametrize(
    "like",
    [torch.zeros(0, 3), torch.zeros(()), torch.zeros(LARGE_PAGE, 3).t(), torch.zeros(600_000)],
)
def test_other_memory_has_the_layout_of_its_model(like):
    memory = empty_like(like)
    assert (memory.shape, memory.stride()) == (like.shape, like.stride())


# Several processes

SCRIPT = Path(__file__).with_name("adapter_merge_processes.py")


@pytest.mark.parametrize("processes", [2, 3])
def test_a_sharded_model_is_merged_as_a_whole_one(processes: int) -> None:
    run_script(SCRIPT, processes)
