"""Other values for an adapter that is there; with a method that only this file knows."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from core_plugin.adapters import hotswap, inject, save_adapter
from core_plugin.adapters.layer import AdapterLayer, AdapterParameters
from core_plugin.errors import CheckpointError, ConfigError
from core_plugin.types.peft import BasePeft, PeftParams, PeftPlugin


@dataclasses.dataclass(frozen=True)
class ShiftParams(PeftParams):
    factor: float = 1.0
    patience: int = 1
    mode: str = "add"
    factor_pattern: dict[str, float] = dataclasses.field(default_factory=dict)
    trainable_token_indices: list[int] | None = None


class ShiftLayer(AdapterLayer):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.shift_vector = AdapterParameters(nn.init.zeros_)

    def add_adapter(self, name: str, params: ShiftParams) -> None:
        self.shift_vector.add(name, (self.base_layer.out_features,), self.base_layer)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name in self.used:
            result = result + self.params[name].factor * self.shift_vector[name]
        return result


class ScaledShiftLayer(ShiftLayer):
    """Takes another factor too, and has no effect where the other adapter has no part."""

    def converted(
        self, name: str, params: ShiftParams | None, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        if params is None:
            return {"shift_vector": torch.zeros_like(self.shift_vector[name])}
        if params.mode != self.params[name].mode:
            raise ConfigError(f"mode is {params.mode!r}")
        return {n: t * params.factor / self.params[name].factor for n, t in tensors.items()}


class Strict(BasePeft):
    """Adds a vector, and takes no other settings."""

    Params = ShiftParams
    peft_type = "SHIFT"
    prefix = "shift_"
    patterns = {"factor_pattern": "factor"}
    training_only = frozenset({"patience"})

    @staticmethod
    def layers() -> dict[type[nn.Module], type[AdapterLayer]]:
        return {nn.Linear: ShiftLayer}


@PeftPlugin("shift").register()
class Shift(Strict):
    """Adds a vector times a factor."""

    @staticmethod
    def layers() -> dict[type[nn.Module], type[AdapterLayer]]:
        return {nn.Linear: ScaledShiftLayer}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 3)
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.up(self.tokens(tokens)))))


INPUT = torch.arange(5)


def model(seed: int, method: type[BasePeft] = Shift, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    m = Model().eval()
    settings.setdefault("target_modules", ["up", "down"])
    inject(m, method, ShiftParams(**settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in m.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return m


def saved(directory: Path, **settings: Any) -> nn.Module:
    m = model(2, **settings)
    save_adapter(directory, m)
    return m


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"patience": 2}, {"patience": 3}),
        ({"factor": 4.0}, {"factor": 0.5}),
        ({"factor_pattern": {"up": 2.0}}, {"factor_pattern": {"down": 0.5}}),
        ({}, {"target_modules": ["up"]}),
        ({"target_modules": "all-linear"}, {"target_modules": ".*down"}),
        ({"modules_to_save": ["norm"]}, {"modules_to_save": ["norm"], "factor": 2.0}),
        ({"trainable_token_indices": [3, 1]}, {"trainable_token_indices": [3, 1], "factor": 2.0}),
    ],
)
def test_the_adapter_does_what_the_other_did(
    ours: dict[str, Any], theirs: dict[str, Any], tmp_path: Path
) -> None:
    other, m = saved(tmp_path, **theirs), model(1, **ours)
    tensors = dict(m.named_parameters())
    hotswap(m, tmp_path)
    torch.testing.assert_close(m(INPUT), other(INPUT))
    assert all(parameter is tensors[name] for name, parameter in m.named_parameters())
    save_adapter(tmp_path / "again", m)
    PeftPlugin.from_pretrained(again := Model().eval(), tmp_path / "again")
    again.load_state_dict(m.state_dict())
    assert torch.equal(again(INPUT), m(INPUT))


def test_a_compiled_model_stays_compiled(tmp_path: Path) -> None:
    torch._dynamo.reset()
    other, m = saved(tmp_path, factor=0.5, target_modules=["down"]), model(1, factor=2.0)
    counter = CompileCounter()
    compiled = torch.compile(m, backend=counter)
    with torch.no_grad():
        compiled(INPUT)
        frames = counter.frame_count
        hotswap(compiled, tmp_path)
        torch.testing.assert_close(compiled(INPUT), other(INPUT))
    assert counter.frame_count == frames


@pytest.mark.parametrize(
    ("method", "ours", "theirs", "faults"),
    [
        (Shift, {}, {"mode": "subtract"}, ["down: mode is 'subtract'", "up: mode is 'subtract'"]),
        (Shift, {"target_modules": ["up"]}, {}, ["down.shift_vector: unexpected"]),
        (
            Shift,
            {"modules_to_save": ["norm"]},
            {},
            ["norm.bias: missing", "norm.weight: missing"],
        ),
        (
            Shift,
            {"trainable_token_indices": [1, 3]},
            {"trainable_token_indices": [3, 1]},
            ["trainable_token_indices: [3, 1], [1, 3] in the model"],
        ),
        (
            Strict,
            {},
            {"factor": 2.0, "target_modules": ["up"]},
            [
                "down.shift_vector: missing",
                "down: it has no tensors for this module",
                "up: factor is 2.0, and 1.0 in the model",
            ],
        ),
    ],
)
def test_what_cannot_take_the_place_is_told_and_changes_nothing(
    method: type[BasePeft],
    ours: dict[str, Any],
    theirs: dict[str, Any],
    faults: list[str],
    tmp_path: Path,
) -> None:
    saved(tmp_path, **theirs)
    m = model(1, method, **ours)
    before = {n: t.clone() for n, t in m.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        hotswap(m, tmp_path)
    assert sorted(str(caught.value).splitlines()[1:]) == sorted(f"  - {f}" for f in faults)
    assert all(torch.equal(t, before[n]) for n, t in m.state_dict().items())


def test_a_strict_method_takes_the_same_settings(tmp_path: Path) -> None:
    other, m = saved(tmp_path, patience=4), model(1, Strict)
    hotswap(m, tmp_path)
    assert torch.equal(m(INPUT), other(INPUT))


def test_other_methods_and_names_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    m = model(1)
    with pytest.raises(CheckpointError, match="no adapter 'other'"):
        hotswap(m, tmp_path, "other")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "LORA"}))
    with pytest.raises(CheckpointError, match="peft_type: 'LORA', 'SHIFT' in the model"):
        hotswap(m, tmp_path)
