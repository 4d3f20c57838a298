"""An adapter's files: names, settings, strictness; with methods that only this file knows."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from core_plugin.adapters import (
    adapters,
    base_name,
    inject,
    load_adapter,
    merge,
    parts,
    save_adapter,
)
from core_plugin.adapters.layer import AdapterLayer, AdapterParameters, ModelAdapter
from core_plugin.errors import CheckpointError, ConfigError, PluginNotFoundError
from core_plugin.state import full_state_dict
from core_plugin.types.peft import BasePeft, PeftParams, PeftPlugin

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True)
class OffsetParams(PeftParams):
    strength: float = 1.0
    patience: int = 3
    lower_bias: bool = False
    strength_pattern: dict[str, float] = dataclasses.field(default_factory=dict)
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    bias: str = "none"


class OffsetLayer(AdapterLayer):
    changes = ("bias",)

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.offset_vector = AdapterParameters(nn.init.zeros_)

    def add_adapter(self, name: str, params: OffsetParams) -> None:
        self.offset_vector.add(name, (self.base_layer.out_features,), self.base_layer)

    def initialize(self, name: str) -> None:
        if self.params[name].lower_bias:
            self.base_layer.bias.data.sub_(1)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name in self.used:
            result = result + self.params[name].strength * self.offset_vector[name]
        return result

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        tensors["bias"] += self.params[name].strength * self.offset_vector[name]


@PeftPlugin("offset").register()
class Offset(BasePeft):
    """Adds a vector to a layer's outputs."""

    Params = OffsetParams
    peft_type = "OFFSET"
    prefix = "offset_"
    patterns = {"strength_pattern": "strength"}
    training_only = frozenset({"patience", "dropout"})
    neutral = {"crooked": False, "dropout": 0.0}
    file_defaults = {"strength": 0.5}

    @staticmethod
    def layers() -> dict[type[nn.Module], type[AdapterLayer]]:
        return {nn.Linear: OffsetLayer}


@dataclasses.dataclass(frozen=True)
class GreetingParams:
    words: int = 2


class GreetingAdapter(ModelAdapter):
    child = "greeting_words"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.greeting_vectors = AdapterParameters(nn.init.zeros_)
        self.like = (next(model.parameters()),)

    def add_adapter(self, name: str, params: GreetingParams) -> None:
        self.greeting_vectors[name] = nn.Parameter(torch.zeros(params.words))

    def attach(self, model: nn.Module) -> None:
        pass

    def detach(self) -> None:
        pass


@PeftPlugin("greeting").register()
class Greeting(BasePeft):
    """Is at a model's door and does nothing."""

    Params = GreetingParams
    peft_type = "GREETING"
    prefix = "greeting_"

    @staticmethod
    def model_adapter() -> type[ModelAdapter]:
        return GreetingAdapter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 3)
        self.down = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 2)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(2, 7, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


INPUT = torch.arange(6)
UP_AND_DOWN = ["down", "up"]


def bare(tied: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(tied).eval()


def model(name: str = "default", tied: bool = False, **settings: Any) -> Model:
    """A model with an adapter that has values as if it had been trained."""
    settings.setdefault("target_modules", UP_AND_DOWN)
    m = bare(tied)
    inject(m, Offset, OffsetParams(**settings), name)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in m.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return m.eval()


def saved(directory: Path, **settings: Any) -> Model:
    m = model(**settings)
    save_adapter(directory, m)
    return m


def config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / CONFIG).read_text())


def edit(directory: Path, **changes: Any) -> None:
    settings = config(directory) | changes
    (directory / CONFIG).write_text(json.dumps({k: v for k, v in settings.items() if v is not ...}))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / TENSORS)
    change(tensors)
    save_file(tensors, directory / TENSORS)


def snapshot(m: nn.Module) -> dict[str, Any]:
    """Everything of a model that a failed call has to leave as it was."""
    return {
        "tensors": {n: t.clone() for n, t in m.state_dict().items()},
        "trained": {n: p.requires_grad for n, p in m.named_parameters()},
        "modules": [(n, type(c), c.training) for n, c in m.named_modules()],
        "parts": parts(m),
        "hooks": {n: len(c._forward_hooks) for n, c in m.named_modules()},
    }


def assert_unchanged(m: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(m)
    old, new = before.pop("tensors"), after.pop("tensors")
    assert after == before
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert torch.equal(tensor, new[name]), name


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("layers.0.q_proj.base_layer.weight", "layers.0.q_proj.weight"),
        ("base_layer.weight", "weight"),
        ("experts.base_layer.base_layer.down", "experts.down"),
        ("layers.0.base_layer_norm.weight", "layers.0.base_layer_norm.weight"),
        ("layers.0.q_proj.lora_A.default.weight", "layers.0.q_proj.lora_A.default.weight"),
        ("score.modules_to_save.default.dense.bias", "score.dense.bias"),
        ("layers.0._orig_mod.q_proj.base_layer.weight", "layers.0.q_proj.weight"),
    ],
)
def test_base_name(name: str, before: str) -> None:
    assert base_name(name) == before


# Names in the file


def test_names_in_the_file_are_the_peft_librarys(tmp_path: Path) -> None:
    m = saved(
        tmp_path,
        target_modules=["0.up"],
        modules_to_save=["1.norm"],
        trainable_token_indices=[4, 1],
        bias="offset_only",
    )
    file = load_file(tmp_path / TENSORS)
    expected = {
        "layers.0.up.offset_vector": m.layers[0].up.offset_vector["default"],
        "layers.0.up.base_layer.bias": m.layers[0].up.base_layer.bias,
        "tokens.token_adapter.trainable_tokens_delta": m.tokens.token_adapter[
            "trainable_tokens_delta"
        ]["default"],
        **{
            f"layers.1.norm.{n}": t
            for n, t in m.layers[1].norm.modules_to_save["default"].state_dict().items()
        },
    }
    assert file.keys() == {PREFIX + name for name in expected}
    for name, tensor in expected.items():
        assert torch.equal(file[PREFIX + name], tensor), name
    assert "num_batches_tracked" in "".join(file)


def test_biases_of_the_whole_model_have_their_names_in_memory(tmp_path: Path) -> None:
    saved(tmp_path, target_modules=["0.up"], bias="all")
    file = load_file(tmp_path / TENSORS)
    assert {n.removeprefix(PREFIX) for n in file if n.endswith("bias")} == {
        "head.bias",
        "layers.0.down.bias",
        "layers.0.norm.bias",
        "layers.0.up.base_layer.bias",
        "layers.1.down.bias",
        "layers.1.norm.bias",
        "layers.1.up.bias",
    }


def test_what_is_at_the_door_has_its_name_alone(tmp_path: Path) -> None:
    m = bare()
    inject(m, Greeting, GreetingParams(words=3))
    nn.init.normal_(m.greeting_words.greeting_vectors["default"])
    save_adapter(tmp_path, m)
    assert list(load_file(tmp_path / TENSORS)) == ["greeting_vectors"]
    other = bare()
    assert PeftPlugin.from_pretrained(other, tmp_path, "other") is Greeting
    loaded = other.greeting_words.greeting_vectors["other"]
    assert torch.equal(loaded, m.greeting_words.greeting_vectors["default"])


@pytest.mark.parametrize("name", ["layers", "up", "offset_vector", "lora"])
@pytest.mark.filterwarnings("ignore:the adapter '[a-z]+' has the name of a module")
def test_an_adapter_may_be_called_what_a_module_is(tmp_path: Path, name: str) -> None:
    m = model(name)
    save_adapter(tmp_path / "one", m, name)
    save_adapter(tmp_path / "other", model())
    assert (tmp_path / "one" / TENSORS).read_bytes() == (tmp_path / "other" / TENSORS).read_bytes()


def test_one_of_several_adapters_is_saved(tmp_path: Path) -> None:
    m = model("first")
    with pytest.warns(UserWarning, match="the model has adapters already"):
        inject(m, Offset, OffsetParams(["0.up"]), "second")
    save_adapter(tmp_path / "second", m, "second")
    assert list(load_file(tmp_path / "second" / TENSORS)) == [f"{PREFIX}layers.0.up.offset_vector"]
    save_adapter(tmp_path / "first", m, "first")
    assert len(load_file(tmp_path / "first" / TENSORS)) == 4


def test_wrappers_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    saved(tmp_path / "plain")
    m = model()
    m.layers[0] = torch.compile(m.layers[0], backend="eager")
    m.layers[1].up = torch.compile(m.layers[1].up, backend="eager")
    save_adapter(tmp_path / "compiled", m)
    for file in (TENSORS, CONFIG):
        one, other = (tmp_path / folder / file for folder in ("plain", "compiled"))
        assert one.read_bytes() == other.read_bytes()
    load_adapter(m, tmp_path / "plain")


# The file itself


def test_the_file_says_what_peft_reads(tmp_path: Path) -> None:
    m = model(strength=2.0)
    save_adapter(tmp_path / "new" / "folder", m, base_model="base/model")
    folder = tmp_path / "new" / "folder"
    with safetensors.safe_open(folder / TENSORS, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert list(file.keys()) == sorted(file.keys())
    assert list(config(folder)) == sorted(config(folder))
    assert config(folder) == {
        "base_model_name_or_path": "base/model",
        "bias": "none",
        "crooked": False,
        "dropout": 0.0,
        "exclude_modules": None,
        "inference_mode": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lower_bias": False,
        "modules_to_save": None,
        "patience": 3,
        "peft_type": "OFFSET",
        "strength": 2.0,
        "strength_pattern": {},
        "target_modules": ["down", "up"],
        "task_type": None,
        "trainable_token_indices": None,
    }
    assert sorted(p.name for p in folder.iterdir()) == [CONFIG, TENSORS]


def test_two_saves_are_the_same_bytes(tmp_path: Path) -> None:
    saved(tmp_path / "a", target_modules=["up", "down", "up"])
    saved(tmp_path / "b", target_modules=["down", "up"])
    for file in (TENSORS, CONFIG):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


ALL = [f"layers.{i}.{n}" for i in range(2) for n in ("down", "up")]


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"target_modules": r".*p"}, {"target_modules": r".*p"}),
        ({"target_modules": ["up", "down", "up"]}, {"target_modules": ["down", "up"]}),
        ({"target_modules": "All-Linear"}, {"target_modules": ALL}),
        ({"target_modules": None}, {"target_modules": ALL}),
        (
            {"target_modules": UP_AND_DOWN, "exclude_modules": ["1.up", "0.down"]},
            {"target_modules": ["down", "up"], "exclude_modules": ["0.down", "1.up"]},
        ),
        (
            {"target_modules": "all-linear", "exclude_modules": ["1.up"]},
            {"target_modules": [ALL[0], ALL[1], ALL[2]], "exclude_modules": None},
        ),
        (
            {"target_modules": ["up"], "layers_to_transform": 1, "layers_pattern": "layers"},
            {
                "target_modules": ["layers.1.up"],
                "layers_to_transform": None,
                "layers_pattern": None,
            },
        ),
        (
            {"target_modules": ["up"], "modules_to_save": ["norm"]},
            {"modules_to_save": ["layers.0.norm", "layers.1.norm"]},
        ),
    ],
)
def test_rules_in_the_file_mean_the_same_to_peft(
    tmp_path: Path, settings: dict[str, Any], written: dict[str, Any]
) -> None:
    saved(tmp_path, **settings)
    assert {key: config(tmp_path)[key] for key in written} == written


def test_the_parameters_of_the_caller_are_not_changed(tmp_path: Path) -> None:
    params = OffsetParams(["up", "down"], strength_pattern={"up": 2.0})
    before = dataclasses.asdict(params)
    m = bare()
    inject(m, Offset, params)
    save_adapter(tmp_path, m)
    assert dataclasses.asdict(params) == before


@pytest.mark.parametrize(
    ("patterns", "written"),
    [
        ({"up": 2.0}, {"up": 2.0}),
        ({"1.up": 3.0, "down": 2.0}, {"1.up": 3.0, "down": 2.0}),
        # The first that fits is "1.up" here, since it is sorted before "up".
        ({"up": 2.0, "1.up": 3.0}, {"1.up": 3.0, "up": 2.0}),
        (
            {"up": 2.0, "layers.1.up": 3.0, ".*up": 7.0},
            {"^layers.0.up": 2.0, "^layers.1.up": 3.0},
        ),
    ],
)
def test_patterns_in_the_file_give_the_same_to_who_takes_the_first(
    tmp_path: Path, patterns: dict[str, float], written: dict[str, float]
) -> None:
    m = saved(tmp_path, strength_pattern=patterns)
    assert config(tmp_path)["strength_pattern"] == written
    other = bare()
    PeftPlugin.from_pretrained(other, tmp_path)
    assert [p.settings for p in parts(other)] == [p.settings for p in parts(m)]
    assert torch.equal(other(INPUT), m(INPUT))


# Tensors that are given


def test_given_tensors_are_saved_in_place_of_the_models(tmp_path: Path) -> None:
    m = model(modules_to_save=["norm"], bias="offset_only")
    tensors = {n: t + 1 for n, t in full_state_dict(m, trainable=True).items()}
    save_adapter(tmp_path, m, tensors=tensors)
    file = load_file(tmp_path / TENSORS)
    vector = m.layers[0].up.offset_vector["default"]
    assert torch.equal(file[f"{PREFIX}layers.0.up.offset_vector"], vector + 1)
    assert f"{PREFIX}layers.0.norm.running_mean" in file
    save_adapter(tmp_path / "whole", m, tensors=m.state_dict())
    save_adapter(tmp_path / "own", m)
    one, other = ((tmp_path / folder / TENSORS).read_bytes() for folder in ("whole", "own"))
    assert one == other


def test_a_tensor_with_two_names_is_saved_under_both(tmp_path: Path) -> None:
    m = model(tied=True, modules_to_save=["tokens", "head"])
    save_adapter(tmp_path, m, tensors=full_state_dict(m, trainable=True))
    file = load_file(tmp_path / TENSORS)
    trained = m.tokens.modules_to_save["default"].weight
    assert torch.equal(file[f"{PREFIX}tokens.weight"], trained)
    assert torch.equal(file[f"{PREFIX}head.weight"], trained)


def test_missing_tensors_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    m = model()
    tensors = m.state_dict()
    del tensors["layers.0.up.offset_vector.default"]
    with pytest.raises(CheckpointError, match=r"1 of .*: layers\.0\.up\.offset_vector\.default"):
        save_adapter(tmp_path / "x", m, tensors=tensors)
    with pytest.raises(CheckpointError, match="no adapter 'other'; it has 'default'"):
        save_adapter(tmp_path / "x", m, "other")
    with pytest.raises(CheckpointError, match="it has none"):
        save_adapter(tmp_path / "x", bare())
    with pytest.raises(CheckpointError, match="on the meta device"):
        save_adapter(tmp_path / "x", m.to("meta"))
    assert not (tmp_path / "x").exists()


# Loading into an adapter that is there


@pytest.mark.parametrize("prefix", [PREFIX, "", f"{PREFIX}_orig_mod."])
def test_a_file_loads_under_another_name_with_and_without_the_prefix(
    tmp_path: Path, prefix: str
) -> None:
    original = saved(tmp_path, modules_to_save=["norm"], bias="all", trainable_token_indices=[3])
    tensors = load_file(tmp_path / TENSORS)
    renamed = {prefix + n.removeprefix(PREFIX): t for n, t in tensors.items()}
    save_file(renamed, tmp_path / TENSORS)
    m = model("second", modules_to_save=["norm"], bias="all", trainable_token_indices=[3])
    with torch.no_grad():
        for parameter in m.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    assert load_adapter(m, tmp_path, "second") == []
    assert torch.equal(m(INPUT), original(INPUT))
    assert m.layers[0].up.offset_vector["second"].requires_grad


@pytest.mark.parametrize(
    ("stored", "values", "fits"),
    [
        (torch.bfloat16, [0.1, 0.2], True),
        (torch.float16, [0.1, 0.2], True),
        (torch.float64, [0.5, float("nan")], True),
        (torch.float64, [0.1, 0.2], False),
        (torch.float64, [1e300, 0.5], False),
        (torch.int64, [1, 2], False),
        (torch.complex64, [1, 2], False),
    ],
)
def test_a_load_casts_what_it_can_hold(
    tmp_path: Path, stored: torch.dtype, values: list[float], fits: bool
) -> None:
    saved(tmp_path, target_modules=["0.down"])
    name = f"{PREFIX}layers.0.down.offset_vector"
    edit_tensors(tmp_path, lambda t: t.update({name: torch.tensor(values, dtype=stored)}))
    m = model(target_modules=["0.down"])
    if fits:
        load_adapter(m, tmp_path)
        loaded = m.layers[0].down.offset_vector["default"]
        assert loaded.dtype == torch.float32
        torch.testing.assert_close(
            loaded.detach(),
            torch.tensor(values, dtype=stored).float(),
            rtol=0,
            atol=0,
            equal_nan=True,
        )
    else:
        kind = str(stored).removeprefix("torch.")
        with pytest.raises(CheckpointError, match=f"offset_vector: torch.{kind} in the file"):
            load_adapter(m, tmp_path)


def spoil(tensors: dict[str, Tensor]) -> None:
    tensors[f"{PREFIX}layers.0.upp.offset_vector"] = tensors.pop(
        f"{PREFIX}layers.0.up.offset_vector"
    )
    tensors[f"{PREFIX}layers.0.down.offset_vector"] = torch.zeros(5)
    tensors[f"{PREFIX}layers.1.down.offset_vector"] = torch.zeros(2, dtype=torch.int32)
    tensors[f"{PREFIX}entirely.different"] = torch.zeros(2)


FAULTS = [
    "crooked: True in adapter_config.json, False in the model",
    "strength: 1.0 in adapter_config.json, 4.0 in the model, for layers.0.up and 3 more",
    "layers.0.up.offset_vector: missing",
    "layers.0.down.offset_vector: shape [5] in the file, [2] in the model",
    "layers.1.down.offset_vector: torch.int32 in the file, which torch.float32 in the model "
    "cannot hold",
    "layers.0.upp.offset_vector: unexpected; did you mean layers.0.up.offset_vector?",
    "entirely.different: unexpected",
]


def test_all_faults_are_in_one_report_and_nothing_changes(tmp_path: Path) -> None:
    saved(tmp_path)
    edit_tensors(tmp_path, spoil)
    edit(tmp_path, crooked=True)
    m = model(strength=4.0)
    before = snapshot(m)
    with pytest.raises(CheckpointError) as caught:
        load_adapter(m, tmp_path)
    first, *faults = str(caught.value).splitlines()
    assert first == f"{tmp_path} is not for this model's 'default':"
    assert sorted(faults) == sorted(f"  - {fault}" for fault in FAULTS)
    assert_unchanged(m, before)


def test_partial_loads_what_fits_and_tells_the_rest(tmp_path: Path) -> None:
    original = saved(tmp_path)
    edit_tensors(tmp_path, spoil)
    m = model()
    with torch.no_grad():
        for part in m.parameters():
            if part.requires_grad:
                part.fill_(9)
    left_out = load_adapter(m, tmp_path, partial=True)
    assert sorted(left_out) == sorted(FAULTS[2:])
    vectors = {p: m.get_submodule(p).offset_vector["default"] for p in ALL}
    assert torch.equal(vectors["layers.1.up"], original.layers[1].up.offset_vector["default"])
    assert all(vectors[p].eq(9).all() for p in ALL if p != "layers.1.up")


@pytest.mark.parametrize(
    ("in_file", "in_model", "faults"),
    [
        ({"strength": 2.0}, {"strength": 2.0}, []),
        ({"patience": 1}, {"patience": 9}, []),
        ({"target_modules": r".*\.(up|down)"}, {"target_modules": "all-linear"}, []),
        ({"strength_pattern": {"up": 2.0}}, {"strength_pattern": {r".*\.up": 2.0}}, []),
        (
            {"strength_pattern": {"up": 2.0}},
            {},
            ["strength: 2.0 in adapter_config.json, 1.0 in the model, for layers.0.up and 1 more"],
        ),
        (
            {"strength": 3.0, "strength_pattern": {"up": 2.0}},
            {"strength_pattern": {"up": 3.0}},
            [
                "strength: 2.0 in adapter_config.json, 3.0 in the model, for layers.0.up and "
                "1 more",
                "strength: 3.0 in adapter_config.json, 1.0 in the model, for layers.0.down and "
                "1 more",
            ],
        ),
        ({"lower_bias": True}, {}, ["lower_bias: True in adapter_config.json, False in the model"]),
        (
            {"bias": "all"},
            {"bias": "offset_only"},
            [
                "bias: 'all' in adapter_config.json, 'offset_only' in the model",
                "layers.0.norm.bias: unexpected",
                "layers.1.norm.bias: unexpected",
            ],
        ),
        (
            {"modules_to_save": ["0.norm"]},
            {},
            [
                f"layers.0.norm.{n}: unexpected"
                for n in ("bias", "num_batches_tracked", "running_mean", "running_var", "weight")
            ],
        ),
    ],
)
def test_settings_that_would_give_another_result_are_told(
    tmp_path: Path, in_file: dict[str, Any], in_model: dict[str, Any], faults: list[str]
) -> None:
    original = saved(tmp_path, **in_file)
    m = model(**in_model)
    if not faults:
        load_adapter(m, tmp_path)
        assert torch.equal(m(INPUT), original(INPUT))
        return
    with pytest.raises(CheckpointError) as caught:
        load_adapter(m, tmp_path)
    assert sorted(str(caught.value).splitlines()[1:]) == sorted(f"  - {f}" for f in faults)


def test_a_setting_that_the_file_lacks_is_its_default(tmp_path: Path) -> None:
    saved(tmp_path, strength=0.5)
    edit(tmp_path, strength=..., crooked=..., lower_bias=...)
    m = model(strength=0.5)
    load_adapter(m, tmp_path)
    with pytest.raises(CheckpointError, match=r"strength: 0\.5 in .*, 1\.0 in the"):
        load_adapter(model(), tmp_path)
    other = bare()
    PeftPlugin.from_pretrained(other, tmp_path)
    assert torch.equal(other(INPUT), m(INPUT))


def test_unknown_settings_are_told_kept_and_written_back(tmp_path: Path) -> None:
    saved(tmp_path / "new")
    edit(
        tmp_path / "new",
        moon="full",
        tide=None,
        revision="main",
        peft_version="99",
        base_model_name_or_path="b",
    )
    m = model()
    with pytest.warns(UserWarning, match="Offset does not know.*: moon='full', tide=None$"):
        load_adapter(m, tmp_path / "new")
    other = bare()
    with pytest.warns(UserWarning, match="moon='full'"):
        PeftPlugin.from_pretrained(other, tmp_path / "new", "other")
    for name, held in (("default", m), ("other", other)):
        save_adapter(tmp_path / "again", held, name)
        written = config(tmp_path / "again")
        kept = ("moon", "tide", "revision", "base_model_name_or_path")
        assert [written[key] for key in kept] == ["full", None, "main", "b"]
        assert "peft_version" not in written


def test_another_methods_file_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, peft_type="IA3")
    with pytest.raises(CheckpointError, match="peft_type: 'IA3' in"):
        load_adapter(model(), tmp_path)


def test_models_that_cannot_take_values_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="no adapter 'other'"):
        load_adapter(model(), tmp_path, "other")
    with pytest.raises(CheckpointError, match="on the meta device"):
        load_adapter(model().to("meta"), tmp_path)
    m = model()
    merge(m)
    with pytest.raises(CheckpointError, match="merged into the base; unmerge it"):
        load_adapter(m, tmp_path)


@pytest.mark.parametrize("broken", [TENSORS, CONFIG])
@pytest.mark.parametrize("how", ["absent", "truncated"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, broken: str, how: str) -> None:
    saved(tmp_path)
    if how == "absent":
        (tmp_path / broken).unlink()
    else:
        (tmp_path / broken).write_bytes((tmp_path / broken).read_bytes()[:20])
    with pytest.raises(CheckpointError, match=f"does not hold an adapter: {broken}"):
        load_adapter(model(), tmp_path)
    with pytest.raises(CheckpointError, match=f"does not hold an adapter: {broken}"):
        PeftPlugin.from_pretrained(bare(), tmp_path)


def test_embeddings_that_peft_put_into_the_file_are_loaded_too(tmp_path: Path) -> None:
    """It does so for a model whose vocabulary has grown, and for embeddings with an adapter."""
    saved(tmp_path)
    tokens, head = torch.randn(7, 2), torch.randn(7, 2)
    edit_tensors(
        tmp_path,
        lambda t: t.update({f"{PREFIX}tokens.weight": tokens, f"{PREFIX}head.weight": head}),
    )
    m = model()
    load_adapter(m, tmp_path)
    assert torch.equal(m.tokens.weight, tokens)
    assert torch.equal(m.head.weight, head)
    edit_tensors(tmp_path, lambda t: t.update({f"{PREFIX}tokens.weight": torch.zeros(9, 2)}))
    with pytest.raises(CheckpointError, match=r"tokens.weight: shape \[9, 2\] in the file, \[7"):
        load_adapter(m, tmp_path)


def old_names(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        old = name.replace("layers.", "transformer.h.").replace(".up.", ".c_fc.")
        tensors[old] = tensors.pop(name)


RENAMES = {
    r"^transformer\.h\.": "layers.",
    r"(^|\.)c_fc(\.|$)": r"\1up\2",
    # A rule that must not be applied to names that are right.
    r"^head(?=\.|$)": "lm_head",
}


def test_names_from_before_an_architecture_was_renamed(tmp_path: Path) -> None:
    patterns = {"layers.1.up": 2.0, "down": 3.0}
    original = saved(tmp_path, strength_pattern=patterns, modules_to_save=["head"])
    edit_tensors(tmp_path, old_names)
    edit(
        tmp_path,
        target_modules=["transformer.h.0.c_fc", "transformer.h.1.c_fc", "down"],
        strength_pattern={"transformer.h.1.c_fc": 2.0, "down": 3.0},
    )
    m = bare()
    PeftPlugin.from_pretrained(m, tmp_path, renames=RENAMES)
    assert torch.equal(m(INPUT), original(INPUT))
    save_adapter(tmp_path / "new", m)
    load_adapter(m, tmp_path / "new", renames=RENAMES)
    with pytest.raises(
        CheckpointError, match=r"transformer\.h\.0\.c_fc\.offset_vector: unexpected"
    ):
        load_adapter(m, tmp_path)


# From files alone


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": r"layers\.1\..*(up|down)"},
        {"target_modules": "all-linear", "exclude_modules": ["0.up"], "strength": 3.0},
        {"target_modules": ["up"], "layers_to_transform": [1]},
        {"modules_to_save": ["norm"], "bias": "all", "trainable_token_indices": [3, 1]},
        {"strength_pattern": {"up": 2.0}, "patience": 8},
    ],
)
def test_an_adapter_comes_from_its_files_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"target_modules": UP_AND_DOWN, **settings}
    original = saved(tmp_path, **settings)
    m = bare().train()
    assert PeftPlugin.from_pretrained(m, tmp_path, "mine") is Offset
    assert torch.equal(m(INPUT), original(INPUT))
    assert not m.training
    assert not any(p.requires_grad for p in m.parameters())
    save_adapter(tmp_path / "again", m, "mine")
    for file in (TENSORS, CONFIG):
        assert (tmp_path / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    trained = bare().train()
    PeftPlugin.from_pretrained(trained, tmp_path, trainable=True)
    assert trained.training
    names = {n for n, p in trained.named_parameters() if p.requires_grad}
    assert names == {n for n, p in original.named_parameters() if p.requires_grad}


RULES = st.one_of(
    st.just("all-linear"),
    st.sampled_from([r".*p", r"layers\.(0\.up|1\.down)", r".*(down|up)"]),
    st.lists(st.sampled_from(["up", "down", "0.up", "layers.1.down"]), min_size=1),
)
STRENGTHS = st.sampled_from([0.5, 1.0, 2.0])


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(
    rule=RULES,
    strength=STRENGTHS,
    patterns=st.dictionaries(
        st.sampled_from(["up", "down", "0.up", "layers.1.up", r".*\.down"]), STRENGTHS
    ),
    whole=st.lists(st.sampled_from(["norm", "head", "0.norm"]), unique=True),
    rows=st.none() | st.lists(st.integers(0, 6), min_size=1, unique=True),
    bias=st.sampled_from(["none", "all", "offset_only"]),
    name=st.sampled_from(["default", "x"]),
)
def test_what_is_saved_comes_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, patterns: dict[str, float], **rest: Any
) -> None:
    settings = {
        "target_modules": rest["rule"],
        "strength": rest["strength"],
        "strength_pattern": patterns,
        "modules_to_save": rest["whole"] or None,
        "trainable_token_indices": rest["rows"],
        "bias": rest["bias"],
    }
    try:
        original = model(name, **settings)
    except ConfigError:
        hypothesis.reject()  # a pattern is for no target
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    save_adapter(first, original, name)
    m = bare()
    PeftPlugin.from_pretrained(m, first, "other")
    assert torch.equal(m(INPUT), original(INPUT))
    assert [(p.module, p.settings) for p in parts(m)] == [
        (p.module, p.settings) for p in parts(original)
    ]
    save_adapter(second, m, "other")
    for file in (TENSORS, CONFIG):
        assert (first / file).read_bytes() == (second / file).read_bytes()
    again = model(name, **settings)
    load_adapter(again, second, name)
    assert torch.equal(again(INPUT), original(INPUT))


def test_what_a_method_does_to_the_base_is_done_again(tmp_path: Path) -> None:
    original = saved(tmp_path, lower_bias=True)
    m = bare()
    PeftPlugin.from_pretrained(m, tmp_path)
    assert torch.equal(m(INPUT), original(INPUT))
    assert torch.equal(m.layers[0].up.base_layer.bias, bare().layers[0].up.bias - 1)


def lacking(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: edit(directory, **changes)


@pytest.mark.parametrize(
    ("spoil_it", "messages"),
    [
        (lambda d: edit_tensors(d, spoil), FAULTS[2:]),
        (lacking(target_modules=["up"]), ["layers.0.down.offset_vector: unexpected"]),
        (lacking(crooked=True), ["crooked: True would change the result; only False is known"]),
        (lacking(strength="much", bias=1), ["strength: must be a", "bias: must be a"]),
        (lacking(layers_pattern="layers"), ["layers_pattern says where layers_to_transform"]),
        (lacking(peft_type=...), ["it has no peft_type, such as LORA"]),
        (lacking(peft_type=None), ["it has no peft_type, such as LORA"]),
        (lambda d: (d / CONFIG).write_text("[]"), ["it has no peft_type, such as LORA"]),
    ],
)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.filterwarnings("ignore:the model has adapters already")
def test_a_failure_leaves_the_model_as_it_was(
    tmp_path: Path, spoil_it: Callable[[Path], None], messages: list[str], held: bool
) -> None:
    saved(tmp_path, lower_bias=True)
    spoil_it(tmp_path)
    m = model("first", strength=2.0) if held else bare().train()
    before = snapshot(m)
    with pytest.raises(CheckpointError) as caught:
        PeftPlugin.from_pretrained(m, tmp_path, "second")
    for message in messages:
        assert message in str(caught.value)
    assert_unchanged(m, before)
    assert list(adapters(m)) == (["first"] if held else [])


def test_a_method_that_is_not_installed_is_told_with_near_names(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, peft_type="OFSET")
    m = bare()
    with pytest.raises(PluginNotFoundError, match=r"ofset.*offset"):
        PeftPlugin.from_pretrained(m, tmp_path)
    assert adapters(m) == {}


class Nested(nn.Module):
    """A model in which the path of a module is the end of another one's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(2, 2), "down": nn.Linear(2, 2)})
        self.up = nn.Linear(2, 2)
        self.down = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.inner["down"](self.inner["up"](x))))


def test_a_path_that_is_the_end_of_another_one_means_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    m = Nested()
    settings = {"exclude_modules": ["inner.up"], "modules_to_save": ["inner.down"]}
    inject(m, Offset, OffsetParams("all-linear", **settings))
    save_adapter(tmp_path, m)
    assert config(tmp_path)["target_modules"] == "up|down"
    other = Nested()
    PeftPlugin.from_pretrained(other, tmp_path)
    assert [(p.module, p.kind) for p in parts(other)] == [(p.module, p.kind) for p in parts(m)]


def test_modules_that_were_saved_have_to_be_in_the_file(tmp_path: Path) -> None:
    saved(tmp_path, modules_to_save=["head", "norm"])
    edit(tmp_path, modules_to_save=["head", "norm"])
    edit_tensors(tmp_path, lambda t: t.pop(f"{PREFIX}layers.1.norm.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.norm\.weight: missing"):
        PeftPlugin.from_pretrained(bare(), tmp_path)
    edit_tensors(tmp_path, lambda t: (t.pop(f"{PREFIX}head.weight"), t.pop(f"{PREFIX}head.bias")))
    with pytest.raises(CheckpointError, match=r"head\.weight: missing"):
        PeftPlugin.from_pretrained(bare(), tmp_path)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / TENSORS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle, which is not read"):
        load_adapter(model(), tmp_path)


def test_a_file_of_another_architecture_is_told_in_short(tmp_path: Path) -> None:
    saved(tmp_path)
    others = {f"{PREFIX}h.{i}.offset_vector": torch.zeros(1) for i in range(60)}
    edit_tensors(tmp_path, lambda t: (t.clear(), t.update(others)))
    with pytest.raises(CheckpointError) as caught:
        load_adapter(model(), tmp_path)
    lines = str(caught.value).splitlines()
    assert sum(": missing" in line for line in lines) == 4
    assert sum(": unexpected" in line for line in lines) == 50
    assert lines[-1] == "  and 10 more like these"
    assert len(load_adapter(model(), tmp_path, partial=True)) == 64


def test_what_peft_passes_over_in_silence_does_not_stop_a_load(tmp_path: Path) -> None:
    """Names of no module; ends of words; the first pattern that fits, unused ones; no filter."""
    original = saved(tmp_path, target_modules=UP_AND_DOWN, strength=2.0, modules_to_save=["norm"])
    edit(
        tmp_path,
        target_modules=["up", "down", "gate"],
        modules_to_save=["score", "orm"],
        strength_pattern={"head": 5.0, "(up|down)": 2.0, "layers.1.up": 7.0},
        layers_to_transform=[],
    )
    m = bare()
    with pytest.warns(UserWarning, match="target_modules name 'gate', which is no module"):
        PeftPlugin.from_pretrained(m, tmp_path)
    assert torch.equal(m(INPUT), original(INPUT))
