"""An adapter's files: what is written is read, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from core_plugin.adapters import load_adapter, modules, save_adapter, set_adapter
from core_plugin.errors import CheckpointError
from core_plugin.testing.checks import (
    assert_differs,
    assert_same,
    assert_unchanged,
    snapshot,
)
from core_plugin.testing.peft.models import OTHER, Models
from core_plugin.types.peft import ADAPTER, BasePeft, PeftPlugin

pytestmark = pytest.mark.level(2)

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def _saved(directory: Path, model: nn.Module, name: str = ADAPTER) -> dict[str, bytes]:
    """Save an adapter; the files that it wrote, by name."""
    save_adapter(directory, model, name)
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def test_a_loaded_adapter_gives_the_same(models: Models, directory: Path) -> None:
    """Loaded into a model whose adapter had other values, an adapter gives its outputs exactly."""
    model, other, ids = models.adapted(), models.adapted(seed=5), models.ids()
    expected = model(ids)
    assert_differs(other(ids), expected, "adapters of two seeds are equal")
    save_adapter(directory, model)
    load_adapter(other, directory)
    assert_same(other(ids), expected)


def test_an_adapter_is_made_from_its_files(models: Models, directory: Path) -> None:
    """The files and a model are enough: ``from_pretrained`` gives the same outputs, frozen."""
    model, ids = models.adapted(), models.ids()
    save_adapter(directory, model)
    loaded = models.network()
    PeftPlugin.from_pretrained(loaded, directory)
    assert_same(loaded(ids), model(ids))
    assert not any(p.requires_grad for p in loaded.parameters())
    on = models.network()
    PeftPlugin.from_pretrained(on, directory, trainable=True)
    assert [n for n, p in on.named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]


def test_two_saves_are_the_same_bytes(models: Models, directory: Path) -> None:
    """An adapter saved twice, and once more after it was loaded, gives the same files."""
    first = _saved(directory / "first", models.adapted())
    assert first.keys() == {TENSORS, CONFIG}
    assert _saved(directory / "second", models.adapted()) == first
    loaded = models.network()
    PeftPlugin.from_pretrained(loaded, directory / "first")
    third = _saved(directory / "third", loaded)
    assert third[TENSORS] == first[TENSORS]
    assert json.loads(third[CONFIG]) == json.loads(first[CONFIG])
    assert third[CONFIG] == first[CONFIG]


def test_files_hold_no_adapters_name(models: Models, directory: Path) -> None:
    """An adapter's name is not in its files, so it can be loaded under another."""
    model, ids = models.adapted(), models.ids()
    files = _saved(directory / "first", model)
    named = models.adapted(name=OTHER)
    assert _saved(directory / "named", named, OTHER) == files
    PeftPlugin.from_pretrained(model, directory / "named", "third")
    set_adapter(model, "third")
    assert_same(model(ids), named(ids))


def test_an_adapter_may_have_a_modules_name(models: Models, directory: Path) -> None:
    """An adapter that is called as a module of the model is saved, whole and alone."""
    files = _saved(directory / "first", models.adapted())
    for name in ("blocks", "layers", "layer", "weight", "base"):
        model = models.adapted(name=name)
        assert _saved(directory / name, model, name) == files, name
        models.add(model)
        assert _saved(directory / f"{name}-2", model, name) == files, f"{name} beside another"


def test_the_files_are_the_peft_librarys(
    method: type[BasePeft], models: Models, directory: Path
) -> None:
    """The tensors are the adapter's alone, under its modules' names; the settings have the type."""
    model = models.adapted()
    save_adapter(directory, model)
    tensors = safetensors.torch.load_file(directory / TENSORS)
    names = [
        f"base_model.model.{path}.{file}" if path and models.changes_layers else None
        for path, module in modules(model)
        for _, file, _ in module.adapter_parameters(ADAPTER)
    ]
    assert len(tensors) == len(names)
    if models.changes_layers:
        assert set(tensors) == set(names)
    config = json.loads((directory / CONFIG).read_text())
    assert config["peft_type"] == method.peft_type
    assert list(config) == sorted(config)


def missing(tensors: dict[str, Tensor]) -> None:
    """Leave one out."""
    tensors.pop(min(tensors))


def unexpected(tensors: dict[str, Tensor]) -> None:
    """Add one."""
    tensors["base_model.model.more.weight"] = torch.ones(2)


def misshapen(tensors: dict[str, Tensor]) -> None:
    """Give one another dimension."""
    tensors[min(tensors)] = torch.ones(*tensors[min(tensors)].shape, 2)


def of_integers(tensors: dict[str, Tensor]) -> None:
    """Make one of integers."""
    tensors[min(tensors)] = tensors[min(tensors)].to(torch.int32)


@pytest.mark.parametrize("damage", [missing, unexpected, misshapen, of_integers])
def test_files_that_do_not_fit_are_refused(
    models: Models, directory: Path, damage: Callable[[dict[str, Tensor]], None]
) -> None:
    """A tensor that is missing, too many, of another shape or no float is told by name."""
    model = models.adapted(seed=5)
    save_adapter(directory, models.adapted())
    tensors = safetensors.torch.load_file(directory / TENSORS)
    whole = set(tensors)
    least = min(tensors)
    damage(tensors)
    told = (set(tensors) - whole or {least}).pop()
    safetensors.torch.save_file(tensors, directory / TENSORS, {"format": "pt"})
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=told.removeprefix("base_model.model.")):
        load_adapter(model, directory)
    assert_unchanged(model, before)
    plain = models.network()
    values = snapshot(plain)
    with pytest.raises(CheckpointError):
        PeftPlugin.from_pretrained(plain, directory)
    assert_unchanged(plain, values)


def test_a_state_dict_goes_round(models: Models) -> None:
    """A model's state dict fits another model with the adapter, strictly, and carries it over."""
    model, other, ids = models.adapted(), models.adapted(seed=5), models.ids()
    other.load_state_dict(model.state_dict())
    assert_same(other(ids), model(ids))


def test_a_bfloat16_models_adapter_is_saved_as_it_is(models: Models, directory: Path) -> None:
    """An adapter of a model in bfloat16 is float32 in its files, and comes back exactly."""
    model = models.adapted(models.network(dtype=torch.bfloat16))
    other = models.adapted(models.network(dtype=torch.bfloat16), seed=5)
    save_adapter(directory, model)
    tensors = safetensors.torch.load_file(directory / TENSORS)
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    load_adapter(other, directory)
    assert_unchanged(other, snapshot(model))
