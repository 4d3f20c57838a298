"""An adapter's files: names, settings, strictness; with a method that only this file knows."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from core_plugin.adapters import adapter_state, base_name, inject, load_adapter, save_adapter
from core_plugin.adapters.layer import AdapterLayer, AdapterParameters
from core_plugin.errors import CheckpointError
from core_plugin.types.peft import BasePeft, PeftParams

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclasses.dataclass(frozen=True)
class OffsetParams(PeftParams):
    strength: float = 1.0
    patience: int = 3


class OffsetLayer(AdapterLayer):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.offset_vector = AdapterParameters(nn.init.zeros_)

    def add_adapter(self, name: str, params: OffsetParams) -> None:
        self.offset_vector.add(name, (self.base_layer.out_features,), self.base_layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.offset_vector[self.active]


class Offset(BasePeft):
    Params = OffsetParams
    prefix = "offset_"
    training_only = frozenset({"patience"})

    @staticmethod
    def layer(base: nn.Module, params: OffsetParams) -> type[AdapterLayer] | None:
        return OffsetLayer if isinstance(base, nn.Linear) else None

    @staticmethod
    def config(params: OffsetParams) -> dict[str, object]:
        return {
            "peft_type": "OFFSET",
            "strength": params.strength,
            "patience": params.patience,
        }


def model(params: OffsetParams, name: str = "default", width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    m = nn.ModuleDict({"up": nn.Linear(2, width), "down": nn.Linear(width, 2)})
    inject(m, Offset, params, name)
    for parameter in m.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return m


def saved(directory: Path, params: OffsetParams, name: str = "default") -> nn.Module:
    m = model(params, name)
    save_adapter(directory, Offset, params, m.state_dict(), name, "base/model")
    return m


def adapters(m: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in m.named_parameters() if p.requires_grad}


def rewrite(directory: Path, change: object) -> None:
    tensors = load_file(directory / TENSORS)
    change(tensors)
    save_file(tensors, directory / TENSORS)


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("layers.0.q_proj.base_layer.weight", "layers.0.q_proj.weight"),
        ("base_layer.weight", "weight"),
        ("layers.0.base_layer_norm.weight", "layers.0.base_layer_norm.weight"),
        ("layers.0.q_proj.lora_A.default.weight", "layers.0.q_proj.lora_A.default.weight"),
    ],
)
def test_base_name(name: str, before: str) -> None:
    assert base_name(name) == before


def test_adapter_state_takes_one_adapter_by_its_names_in_the_file() -> None:
    names = [
        "layers.0.q.lora_B.layers.weight",
        "layers.0.q.lora_A.layers.weight",
        "layers.0.q.lora_A.other.weight",
        "layers.0.q.base_layer.weight",
        "model.layers.0.weight",
        "tokens.lora_embedding_A.layers",
        "lora_head.weight",
    ]
    state = adapter_state({n: torch.tensor(i) for i, n in enumerate(names)}, "layers", "lora_")
    assert {n: int(t) for n, t in state.items()} == {
        "base_model.model.layers.0.q.lora_A.weight": 1,
        "base_model.model.layers.0.q.lora_B.weight": 0,
        "base_model.model.tokens.lora_embedding_A": 5,
    }
    assert list(state) == sorted(state)
    default = adapter_state({"q.lora_A.default.weight": torch.ones(1)}, "default")
    assert list(default) == ["base_model.model.q.lora_A.weight"]


def test_files_say_what_peft_reads(tmp_path: Path) -> None:
    m = saved(tmp_path / "new" / "folder", OffsetParams(strength=2.0))
    with safetensors.safe_open(tmp_path / "new" / "folder" / TENSORS, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        keys = [f"base_model.model.{n}.offset_vector" for n in ("down", "up")]
        assert sorted(file.keys()) == keys
        assert torch.equal(file.get_tensor(keys[1]), m["up"].offset_vector["default"])
    text = (tmp_path / "new" / "folder" / CONFIG).read_text()
    config = json.loads(text)
    assert list(config) == sorted(config)
    assert config == {
        "base_model_name_or_path": "base/model",
        "exclude_modules": None,
        "inference_mode": True,
        "patience": 3,
        "peft_type": "OFFSET",
        "strength": 2.0,
        "target_modules": ["down", "up"],
        "task_type": None,
    }
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [CONFIG, TENSORS]


def test_two_saves_are_the_same_bytes(tmp_path: Path) -> None:
    for folder, targets in [("a", ["up", "down", "up"]), ("b", ["down", "up"])]:
        saved(tmp_path / folder, OffsetParams(targets))
    for file in (TENSORS, CONFIG):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_targets_in_the_file_mean_the_same_to_another_reader(tmp_path: Path) -> None:
    for written, expected in [
        (".*p", ".*p"),
        (["up", "down", "up"], ["down", "up"]),
        ("All-Linear", ["down", "up"]),
    ]:
        saved(tmp_path, OffsetParams(written))
        assert json.loads((tmp_path / CONFIG).read_text())["target_modules"] == expected


def test_saving_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    params = OffsetParams()
    state = model(params).state_dict()
    with pytest.raises(CheckpointError, match="no tensor of an adapter called 'other'"):
        save_adapter(tmp_path / "x", Offset, params, state, "other", None)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_a_file_loads_under_another_adapter_name(tmp_path: Path, prefix: str) -> None:
    params = OffsetParams()
    original = saved(tmp_path, params, "first")
    tensors = load_file(tmp_path / TENSORS)
    bare = {prefix + n.removeprefix("base_model.model."): t for n, t in tensors.items()}
    save_file(bare, tmp_path / TENSORS)
    m = model(params, "second")
    for parameter in m.parameters():
        nn.init.zeros_(parameter)
    load_adapter(m, tmp_path, Offset, params, "second")
    for layer in ("up", "down"):
        loaded = m[layer].offset_vector["second"]
        assert torch.equal(loaded, original[layer].offset_vector["first"])
        assert loaded.requires_grad
        assert m[layer].base_layer.weight.eq(0).all()


def test_a_load_casts_to_the_adapters_dtype(tmp_path: Path) -> None:
    params = OffsetParams()
    saved(tmp_path, params)
    rewrite(tmp_path, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    m = model(params)
    load_adapter(m, tmp_path, Offset, params, "default")
    loaded = m["up"].offset_vector["default"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, load_file(tmp_path / TENSORS)["base_model.model.up.offset_vector"])


def test_all_faults_are_in_one_report_and_nothing_changes(tmp_path: Path) -> None:
    params = OffsetParams()
    saved(tmp_path, params)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["base_model.model.up.offset_vector"]
        tensors["base_model.model.down.offset_vector"] = torch.zeros(5)
        tensors["base_model.model.side.offset_vector"] = torch.zeros(2)

    rewrite(tmp_path, spoil)
    m = model(OffsetParams(strength=4.0))
    before = adapters(m)
    with pytest.raises(CheckpointError) as caught:
        load_adapter(m, tmp_path, Offset, OffsetParams(strength=4.0), "default")
    assert str(caught.value).splitlines() == [
        f"{tmp_path} is not for this model's 'default':",
        "  - strength: 1.0 in adapter_config.json, 4.0 in the model",
        "  - up.offset_vector: missing",
        "  - down.offset_vector: shape [5] in the file, [2] in the model",
        "  - side.offset_vector: unexpected",
    ]
    after = adapters(m)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("layer", ["up", "down"])
def test_a_fault_in_one_tensor_leaves_the_others_as_they_were(tmp_path: Path, layer: str) -> None:
    params = OffsetParams()
    saved(tmp_path, params)
    rewrite(tmp_path, lambda t: t.pop(f"base_model.model.{layer}.offset_vector"))
    m = model(params)
    for parameter in m.parameters():
        nn.init.constant_(parameter, 7.0)
    with pytest.raises(CheckpointError, match="missing"):
        load_adapter(m, tmp_path, Offset, params, "default")
    assert all(parameter.eq(7).all() for parameter in m.parameters())


def test_what_matters_in_training_alone_may_differ(tmp_path: Path) -> None:
    original = saved(tmp_path, OffsetParams(patience=1))
    m = model(OffsetParams(patience=9))
    nn.init.zeros_(m["up"].offset_vector["default"])
    load_adapter(m, tmp_path, Offset, OffsetParams(patience=9), "default")
    assert torch.equal(m["up"].offset_vector["default"], original["up"].offset_vector["default"])


def test_another_methods_file_is_refused(tmp_path: Path) -> None:
    params = OffsetParams()
    saved(tmp_path, params)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(CheckpointError, match="peft_type: 'IA3' in"):
        load_adapter(model(params), tmp_path, Offset, params, "default")


def test_a_model_without_the_adapter_and_one_without_memory_are_refused(tmp_path: Path) -> None:
    params = OffsetParams()
    saved(tmp_path, params)
    with pytest.raises(CheckpointError, match="no adapter 'other'"):
        load_adapter(model(params), tmp_path, Offset, params, "other")
    with pytest.raises(CheckpointError, match="on the meta device"):
        load_adapter(model(params).to("meta"), tmp_path, Offset, params, "default")


@pytest.mark.parametrize("broken", [TENSORS, CONFIG])
@pytest.mark.parametrize("how", ["absent", "truncated"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, broken: str, how: str) -> None:
    params = OffsetParams()
    saved(tmp_path, params)
    if how == "absent":
        (tmp_path / broken).unlink()
    else:
        (tmp_path / broken).write_bytes((tmp_path / broken).read_bytes()[:20])
    with pytest.raises(CheckpointError, match="does not hold an adapter"):
        load_adapter(model(params), tmp_path, Offset, params, "default")


def test_importing_the_engine_does_not_import_torch() -> None:
    code = "import sys, core_plugin.adapters; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0
