"""The injection engine, with a method that only this file knows."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

from core_plugin.adapters import (
    adapters,
    add_adapter,
    base_name,
    initialize,
    inject,
    parts,
    set_adapter,
)
from core_plugin.adapters.layer import AdapterLayer, AdapterParameters
from core_plugin.errors import ConfigError, PluginContractError
from core_plugin.types.peft import AdapterLayerPlugin, BasePeft, PeftParams, PeftPlugin


class ScaleLayer(AdapterLayer):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.scale_vector = AdapterParameters(nn.init.ones_)

    def add_adapter(self, name: str, params: PeftParams) -> None:
        self.scale_vector.add(name, (self.base_layer.out_features,), self.base_layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        for name in self.used:
            result = result * self.scale_vector[name]
        return result


class NoBilinear(ScaleLayer):
    @classmethod
    def fault(cls, base: nn.Module, params: PeftParams) -> str:
        return "has two inputs"


class Scale(BasePeft):
    """A vector that multiplies a linear layer's outputs."""

    peft_type = "SCALE"
    prefix = "scale_"

    @staticmethod
    def layers() -> dict[type[nn.Module], type[AdapterLayer]]:
        return {nn.Linear: ScaleLayer, nn.Bilinear: NoBilinear}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.v_proj = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.v_proj(torch.tanh(self.q_proj(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.arange(7)


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def snapshot(m: nn.Module) -> tuple[object, ...]:
    """All that a failed injection could have changed."""
    return (
        [(name, id(module)) for name, module in m.named_modules()],
        [(name, id(p), p.requires_grad, p._version) for name, p in m.named_parameters()],
        str(m),
    )


def trained(m: nn.Module) -> set[str]:
    return {name for name, p in m.named_parameters() if p.requires_grad}


def test_a_third_party_method_trains_through_the_engine() -> None:
    m, untouched = model(), model()
    PeftPlugin("scale").register()(Scale)
    PeftPlugin("scale").resolve().adapt(m, PeftParams(target_modules=["q_proj"]), {})
    assert trained(m) == {f"layers.{i}.q_proj.scale_vector.default" for i in range(2)}
    assert torch.equal(m(TOKENS), untouched(TOKENS))
    frozen = {n: p.clone() for n, p in m.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD((p for p in m.parameters() if p.requires_grad), lr=0.1)
    for _ in range(2):
        m(TOKENS).square().sum().backward()
        optimizer.step()
    for i, layer in enumerate(m.layers):
        vector = layer.q_proj.scale_vector["default"]
        assert (vector != 1).all()
        with torch.no_grad():
            untouched.layers[i].q_proj.weight.mul_(vector[:, None])
            untouched.layers[i].q_proj.bias.mul_(vector)
    torch.testing.assert_close(m(TOKENS), untouched(TOKENS))
    for name, value in frozen.items():
        assert torch.equal(m.get_parameter(name), value), name
        assert m.get_parameter(name).grad is None


def test_base_names_are_those_before_injection() -> None:
    m = model()
    before = dict(m.named_parameters())
    inject(m, Scale, PeftParams(), "default")
    after = {base_name(n): p for n, p in m.named_parameters() if not p.requires_grad}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert m.head.weight is m.tokens.weight


@pytest.mark.parametrize(
    ("rules", "name", "messages"),
    [
        ({"target_modules": ["q_proj", "norm"]}, "x", ["has no layer for BatchNorm1d"]),
        ({"target_modules": ["layers"]}, "x", ["inside: layers.0.q_proj, layers.0.v_proj"]),
        ({"target_modules": "layers.*"}, "x", ["for ModuleList", "for Block", "for BatchNorm1d"]),
        ({"target_modules": ["q_pro", "norm"]}, "a.b", ["mean q_proj", "BatchNorm1d", "no dots"]),
        ({"target_modules": ["q_proj"]}, "", ["not empty"]),
        ({"target_modules": ["q_proj"]}, "keys", ["torch's containers"]),
        ({"target_modules": ["q_proj"]}, "training", ["torch's containers"]),
    ],
)
def test_a_failure_reports_all_and_changes_nothing(
    rules: dict[str, object], name: str, messages: list[str]
) -> None:
    m, params = model(), PeftParams(**rules)
    before, before_params = snapshot(m), copy.deepcopy(params)
    with pytest.raises(ConfigError) as caught:
        inject(m, Scale, params, name)
    for message in messages:
        assert message in str(caught.value)
    assert snapshot(m) == before
    assert params == before_params


def test_a_layer_that_cannot_be_made_changes_nothing() -> None:
    class Failing(ScaleLayer):
        def add_adapter(self, name: str, params: PeftParams) -> None:
            super().add_adapter(name, params)
            if self.base_layer.bias is None:
                raise RuntimeError("no bias here")

    class FailsLate(Scale):
        @staticmethod
        def layers() -> dict[type[nn.Module], type[AdapterLayer]]:
            return {nn.Linear: Failing}

    m = model()
    before = snapshot(m)
    with pytest.raises(RuntimeError, match="no bias here"):
        inject(m, FailsLate, PeftParams(), "x")
    assert snapshot(m) == before


def test_a_methods_own_objection_comes_with_the_path() -> None:
    m = nn.ModuleDict({"two": nn.Bilinear(2, 2, 2)})
    with pytest.raises(ConfigError, match="peft: two: has two inputs"):
        inject(m, Scale, PeftParams(target_modules=["two"]), "x")


def test_targets_written_as_params_stay_the_callers() -> None:
    targets = ["v_proj", "q_proj", "q_proj"]
    params = PeftParams(target_modules=targets)
    inject(model(), Scale, params, "x")
    assert params.target_modules is targets
    assert targets == ["v_proj", "q_proj", "q_proj"]


def test_freezing_is_by_structure_and_not_by_name() -> None:
    m = model()
    m.scale_bias = nn.Linear(4, 4)
    m.default = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="has the name of a module"):
        inject(m, Scale, PeftParams(target_modules=["q_proj"]), "default")
    assert trained(m) == {f"layers.{i}.q_proj.scale_vector.default" for i in range(2)}


def test_a_second_injection_warns_and_is_the_active_one() -> None:
    m = model()
    inject(m, Scale, PeftParams(target_modules=["q_proj"]), "first")
    with torch.no_grad():
        m.layers[0].q_proj.scale_vector["first"].fill_(3.0)
    with pytest.warns(UserWarning, match=r"adapters already \(first\); 'second' becomes"):
        inject(m, Scale, PeftParams(target_modules=["q_proj", "v_proj"]), "second")
    assert len(trained(m)) == 4
    assert all(name.endswith(".second") for name in trained(m))
    assert torch.equal(m(TOKENS), model()(TOKENS))
    set_adapter(m, "first")
    assert not torch.equal(m(TOKENS), model()(TOKENS))
    assert {n.rpartition(".")[2] for n in trained(m)} == {"first"}


def test_an_added_adapter_changes_nothing_until_it_is_chosen() -> None:
    m = model()
    inject(m, Scale, PeftParams(target_modules=["q_proj"]), "first")
    m.tokens.weight.requires_grad_(True)
    before = trained(m)
    add_adapter(m, Scale, PeftParams(target_modules=["v_proj"]), "second")
    assert trained(m) == before
    assert list(adapters(m)) == ["first", "second"]
    assert [p.adapter for p in parts(m) if p.active] == ["first", "first"]


def test_a_name_that_is_a_modules_warns_and_works() -> None:
    m = model()
    with pytest.warns(UserWarning, match=r"'layers' has the name of a module \(layers\)"):
        inject(m, Scale, PeftParams(target_modules=["q_proj"]), "layers")
    assert trained(m) == {f"layers.{i}.q_proj.scale_vector.layers" for i in range(2)}


def test_the_same_name_twice_is_refused() -> None:
    m = model()
    inject(m, Scale, PeftParams(target_modules=["q_proj"]), "x")
    before = snapshot(m)
    with pytest.raises(ConfigError, match="has an adapter called 'x' already"):
        inject(m, Scale, PeftParams(target_modules=["v_proj"]), "x")
    assert snapshot(m) == before


def test_a_later_adapter_that_matches_nothing_is_refused_too() -> None:
    m = model()
    inject(m, Scale, PeftParams(target_modules=["q_proj"]), "x")
    before = snapshot(m)
    with pytest.raises(ConfigError, match="no module is called 'k_prj'"):
        add_adapter(m, Scale, PeftParams(target_modules=["k_prj"]), "y")
    assert snapshot(m) == before


def test_a_sharded_model_is_refused(tmp_path: object) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        m = model()
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(m.layers[0].q_proj.weight.detach(), mesh, [Replicate()])
        m.layers[0].q_proj.weight = nn.Parameter(sharded)
        with pytest.raises(ConfigError, match="is sharded already; inject adapters before"):
            inject(m, Scale, PeftParams(), "x")
    finally:
        torch.distributed.destroy_process_group()


def test_two_methods_with_one_prefix_are_both_named() -> None:
    class Other(Scale):
        prefix = "scale_"

    m = model()
    inject(m, Scale, PeftParams(target_modules=["q_proj"]), "x")
    with pytest.raises(ConfigError) as caught:
        inject(m, Other, PeftParams(target_modules=["v_proj"]), "y")
    assert ".Scale and " in str(caught.value)
    assert "Other both use the prefix 'scale_'" in str(caught.value)


class WiderLayer(ScaleLayer):
    def __init__(self, base_layer: nn.Module) -> None:
        AdapterLayer.__init__(self, base_layer)
        self.wider_vector = AdapterParameters(nn.init.ones_)

    def add_adapter(self, name: str, params: PeftParams) -> None:
        self.wider_vector.add(name, (self.base_layer.out_features,), self.base_layer)


class Wider(Scale):
    peft_type = "WIDER"
    prefix = "wider_"

    @staticmethod
    def layers() -> dict[type[nn.Module], type[AdapterLayer]]:
        return {nn.Linear: WiderLayer}


class MixingScale(Scale):
    mixes = True


class MixingWider(Wider):
    mixes = True


def test_methods_share_a_model_only_if_both_mix_and_never_a_layer() -> None:
    m = model()
    inject(m, MixingScale, PeftParams(target_modules=["q_proj"]), "x")
    with pytest.raises(ConfigError, match="not both say that they mix"):
        inject(m, Wider, PeftParams(target_modules=["v_proj"]), "y")
    with pytest.raises(ConfigError, match=r"layers.0.q_proj has a ScaleLayer of another adapter"):
        add_adapter(m, MixingWider, PeftParams(), "y")
    add_adapter(m, MixingWider, PeftParams(target_modules=["v_proj"]), "y")
    set_adapter(m, ["x", "y"])
    assert trained(m) == {
        f"layers.{i}.{name}"
        for i in range(2)
        for name in ("q_proj.scale_vector.x", "v_proj.wider_vector.y")
    }


@pytest.mark.parametrize("wrong", ["scale", "Scale_", "", "_", "sc.ale_"])
def test_a_prefix_that_is_none_fails_when_the_method_is_defined(wrong: str) -> None:
    with pytest.raises(PluginContractError, match="ends with one"):
        type("Wrong", (Scale,), {"prefix": wrong})


@pytest.mark.parametrize("lacks", ["prefix", "peft_type"])
def test_a_method_that_lacks_one_fails_when_it_is_defined(lacks: str) -> None:
    names = {"prefix": "bare_", "peft_type": "BARE"}
    del names[lacks]
    with pytest.raises(PluginContractError, match=f"{lacks} is .*got None"):
        type("Bare", (BasePeft,), names)


def test_a_type_for_a_file_is_in_upper_case() -> None:
    with pytest.raises(PluginContractError, match="in upper case, such as 'LORA'; got 'scale'"):
        type("Lower", (Scale,), {"peft_type": "scale"})


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Linear, "lacks: derives from AdapterLayer"),
        (type("NoForward", (AdapterLayer,), {"add_adapter": lambda *_: None}), "lacks: forward"),
    ],
)
def test_a_layer_class_that_is_none_is_refused(layer: type, message: str) -> None:
    class Method(Scale):
        @staticmethod
        def layers() -> dict[type[nn.Module], type]:
            return {nn.Linear: layer}

    with pytest.raises(PluginContractError, match=message):
        inject(model(), Method, PeftParams(), "x")


def strays(fill: object) -> type[Scale]:
    class Layer(ScaleLayer):
        def add_adapter(self, name: str, params: PeftParams) -> None:
            super().add_adapter(name, params)
            fill(self, name)

    class Method(Scale):
        @staticmethod
        def layers() -> dict[type[nn.Module], type[AdapterLayer]]:
            return {nn.Linear: Layer}

    return Method


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (lambda s, n: s.register_parameter("scale_x", nn.Parameter(torch.ones(1))), "no container"),
        (lambda s, n: setattr(s, "x", nn.ModuleDict({n: nn.Linear(1, 1)})), "begin with"),
        (lambda s, n: setattr(s, "scale_x", nn.ModuleDict({n: nn.Linear(1, 1)})), "is_adapter"),
    ],
)
def test_a_layer_that_hides_parameters_is_refused(fill: object, message: str) -> None:
    m = model()
    before = snapshot(m)
    with pytest.raises(PluginContractError, match=message):
        inject(m, strays(fill), PeftParams(target_modules=["q_proj"]), "x")
    assert snapshot(m) == before


def test_a_shared_layer_stays_shared() -> None:
    shared = nn.Linear(4, 4)
    m = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 4))
    inject(m, Scale, PeftParams(target_modules=["2"]), "x")
    assert m[0] is m[2]
    assert trained(m) == {"0.scale_vector.x"}


def test_a_layer_passes_for_its_base() -> None:
    m = model()
    inject(m, Scale, PeftParams(target_modules=["q_proj"]), "x")
    layer = m.layers[0].q_proj
    assert layer.in_features == 4
    assert layer.weight is layer.base_layer.weight
    assert not layer.training
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = layer.nothing_like_it


def test_copies_and_pickles_give_the_same_results() -> None:
    m = model()
    inject(m, Scale, PeftParams(), "x")
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.1 * torch.randn_like(p))
    expected = m(TOKENS)
    assert torch.equal(copy.deepcopy(m)(TOKENS), expected)
    assert torch.equal(pickle.loads(pickle.dumps(m))(TOKENS), expected)


def test_a_base_that_copies_itself_does_not_copy_for_its_adapter_layer() -> None:
    class Copied(nn.Linear):
        def __deepcopy__(self, memo: object) -> nn.Module:
            return nn.Linear(self.in_features, self.out_features)

    m = nn.ModuleDict({"q": Copied(2, 2)})
    inject(m, Scale, PeftParams(), "x")
    assert isinstance(copy.deepcopy(m)["q"], ScaleLayer)


def test_from_meta_every_part_can_be_filled() -> None:
    with torch.device("meta"):
        m = Model()
    inject(m, Scale, PeftParams(), "x")
    assert all(p.is_meta for p in m.parameters())
    m.to_empty(device="cpu")
    with torch.no_grad():
        for p in m.parameters():
            p.fill_(float("nan"))
    initialize(m)
    assert all(m.get_parameter(name).eq(1).all() for name in trained(m))
    assert len(trained(m)) == 4


def test_a_model_on_several_devices_gets_each_adapter_where_its_layer_is() -> None:
    m = model()
    m.layers[1].to("meta")
    inject(m, Scale, PeftParams(target_modules=["q_proj"]), "x")
    devices = [layer.q_proj.scale_vector["x"].device.type for layer in m.layers]
    assert devices == ["cpu", "meta"]


def test_a_bare_module_is_returned_itself() -> None:
    m = nn.Sequential(nn.Linear(2, 2))
    assert inject(m, Scale, PeftParams(target_modules=["0"])) is m


def test_modules_of_a_state_dict_are_followed_and_differences_told() -> None:
    m = model()
    inject(m, Scale, PeftParams(target_modules=["q_proj"]), "x")
    m.layers[0].q_proj.scale_vector["x"].data.fill_(2.0)
    tensors = {
        "base_model.model.layers.0.q_proj.scale_vector": torch.ones(4),
        "base_model.model.layers.1.v_proj.scale_vector": torch.ones(4),
    }
    other = model()
    with pytest.warns(UserWarning, match="the state dict and target_modules differ") as told:
        inject(other, Scale, PeftParams(target_modules=["q_proj"]), "x", state_dict=tensors)
    message = str(told[0].message)
    assert "layers.1.v_proj: only in the state dict" in message
    assert "layers.1.q_proj: only in the parameters" in message
    assert [part.module for part in parts(other)] == ["layers.0.q_proj", "layers.1.v_proj"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["layers.0.q_prj.scale_vector"], "layers.0.q_prj, .* did you mean layers.0.q_proj"),
        (["layers.0.q_proj.weight"], "no tensor whose name has the prefix 'scale_'"),
    ],
)
def test_a_state_dict_of_another_model_is_refused(names: list[str], message: str) -> None:
    tensors = dict.fromkeys(names, torch.ones(4))
    with pytest.raises(ConfigError, match=message):
        inject(model(), Scale, PeftParams(target_modules=["q_proj"]), state_dict=tensors)


def test_what_is_unset_is_what_the_architecture_says() -> None:
    m = model()
    inject(m, Scale, PeftParams(), "x", defaults={"target_modules": ["v_proj"]})
    assert {part.module for part in parts(m)} == {"layers.0.v_proj", "layers.1.v_proj"}
    m = model()
    params = PeftParams(target_modules=["q_proj"])
    inject(m, Scale, params, "x", defaults={"target_modules": ["v_proj"]})
    assert {part.module for part in parts(m)} == {"layers.0.q_proj", "layers.1.q_proj"}


def test_a_layer_from_another_package_is_for_its_type_and_subclasses() -> None:
    class Quantized(nn.Linear): ...

    class Smaller(Quantized): ...

    class QuantizedScale(ScaleLayer): ...

    def brought() -> type[AdapterLayer]:
        return QuantizedScale

    name = f"scale.{Quantized.__module__}.{Quantized.__qualname__}"
    AdapterLayerPlugin(name).register()(brought)
    m = nn.ModuleDict({"a": Quantized(2, 2), "b": Smaller(2, 2), "c": nn.Linear(2, 2)})
    inject(m, Scale, PeftParams(target_modules=["a", "b", "c"]), "x")
    assert [type(layer) for layer in m.children()] == [QuantizedScale, QuantizedScale, ScaleLayer]


def test_adapters_are_float32_unless_the_base_is_float64() -> None:
    for dtype, expected in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ]:
        m = model().to(dtype)
        inject(m, Scale, PeftParams(target_modules=["q_proj"]), "x")
        assert m.layers[0].q_proj.scale_vector["x"].dtype == expected


def test_what_attention_never_calls_is_refused() -> None:
    m = nn.ModuleList([nn.MultiheadAttention(4, 2)])
    with pytest.raises(ConfigError, match=r"0.out_proj is never called"):
        inject(m, Scale, PeftParams(target_modules=["out_proj"]), "x")
    with pytest.raises(ConfigError) as caught:
        inject(m, Scale, PeftParams(target_modules=["0"]), "x")
    assert "did you mean" not in str(caught.value)


def test_torchs_fused_encoder_does_not_pass_an_adapter_by() -> None:
    torch.manual_seed(0)
    m = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 4)
    inject(m, Scale, PeftParams(), "x")
    with torch.no_grad():
        m.linear1.scale_vector["x"].fill_(2.0)
        expected = m.train()(x)
        torch.testing.assert_close(m.eval()(x), expected)


def test_an_encoder_in_evaluation_takes_padding_with_gradients_on() -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    m = nn.ModuleDict({"encoder": nn.TransformerEncoder(block, 2)})
    x, padding = torch.randn(2, 3, 4), torch.tensor([[False, False, True], [False] * 3])
    inject(m, Scale, PeftParams(target_modules=["linear1"]), "x")
    trained_mode = m.train().encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(m.eval().encoder(x, src_key_padding_mask=padding), trained_mode)


def test_parameters_of_another_kind_are_told() -> None:
    with pytest.raises(TypeError, match="has parameters of the type PeftParams, got"):
        inject(model(), Scale, {"r": 3})


def test_a_model_that_changes_its_embeddings_in_place_is_trained() -> None:
    class InPlace(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens)
            x *= 2
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    m = InPlace()
    inject(m, Scale, PeftParams(target_modules=["layers.1.q_proj"]))
    m(TOKENS).sum().backward()
    assert m.layers[1].q_proj.scale_vector["default"].grad is not None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_that_says_it_checkpoints_gets_gradients_through_reentrant_ones(when: str) -> None:
    class Checkpointing(Model):
        gradient_checkpointing = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens)
            for layer in self.layers:
                if self.gradient_checkpointing:
                    x = checkpoint(layer, x, use_reentrant=True)
                else:
                    x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    m = Checkpointing().train()
    m.gradient_checkpointing = when == "before"
    inject(m, Scale, PeftParams())
    m.gradient_checkpointing = True
    m(TOKENS).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in m.parameters() if p.requires_grad)


def test_a_layer_of_the_models_own_that_is_called_base_layer_is_refused() -> None:
    m = nn.ModuleDict({"base_layer": nn.Linear(2, 2), "q": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match="base_layer: 'base_layer' is a name that"):
        inject(m, Scale, PeftParams(target_modules=["q"]), "x")


def test_params_of_a_method_derive_from_the_common_ones() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(PeftParams):
        strength: float = 1.0

    parsed = PeftPlugin.parse_params({"target_modules": ["q"], "strength": 2.0}, Own)
    assert parsed == Own(["q"], strength=2.0)
