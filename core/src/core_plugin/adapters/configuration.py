"""``adapter_config.json``: what an adapter is made of besides its tensors.

Its words are the peft library's, and they mean what they mean to that library.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_plugin.adapters.layer import (
    PLACES,
    Adapter,
    AdapterLayer,
    AdapterModule,
    ParameterLayer,
)
from core_plugin.adapters.matching import ALL_LINEAR
from core_plugin.adapters.names import BASE_LAYER, base_name
from core_plugin.adapters.rules import endings
from core_plugin.adapters.saved import SavedModule
from core_plugin.adapters.settings import fitting
from core_plugin.adapters.walk import modules, own_modules
from core_plugin.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

    from core_plugin.types.peft import BasePeft

CONFIG = "adapter_config.json"

RULES = ("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules")
"""The settings that decide which layers have the adapter."""

OF_THE_FILE = frozenset({"inference_mode", "peft_version"})
"""What says nothing of the adapter; it is not kept."""

OF_THE_MODEL = frozenset({"auto_mapping", "base_model_name_or_path", "revision", "task_type"})
"""What helps readers to find the model; it is kept."""


def read(directory: Path) -> dict[str, Any]:
    """What the file says.

    Raises:
        CheckpointError: There is none, or it is not one.
    """
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} does not hold an adapter: {CONFIG}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise CheckpointError(
            f"{directory / CONFIG} does not say what it is the configuration of: it has no "
            "peft_type, such as LORA"
        )
    return config


def kept(config: Mapping[str, Any], method: type[BasePeft], params: Any) -> dict[str, Any]:
    """What a file says besides the method's settings, to be written back; it is warned about."""
    known = OF_THE_FILE.union(method.config(params))
    others = {key: value for key, value in config.items() if key not in known}
    strange = [f"{key}={others[key]!r}" for key in sorted(others.keys() - OF_THE_MODEL)]
    if strange:
        warnings.warn(
            f"{CONFIG} has settings that {method.__name__} does not know, which change nothing "
            f"here and are kept: {', '.join(strange)}",
            stacklevel=4,
        )
    return others


# From a model to its file


def written(model: nn.Module, adapter: Adapter, base_model: str | None) -> dict[str, Any]:
    """What the file of a model's adapter says: to the peft library it means the same as here.

    Args:
        model: The model.
        adapter: The adapter.
        base_model: A path or name of the model's own weights, for readers of the file.
    """
    config = {**adapter.extra, **_settings(adapter), "inference_mode": True}
    config["base_model_name_or_path"] = base_model or config.get("base_model_name_or_path")
    config.setdefault("task_type", None)
    if "target_modules" in config and _means_other_layers(config):
        config |= {key: None for key in RULES if key in config}
        config["target_modules"] = exactly(model, _targets(model, adapter.name))
    if "modules_to_save" in config:
        config["modules_to_save"] = _saved(model, adapter.name) or None
    for key in {*PLACES, *adapter.method.patterns}.intersection(config):
        if isinstance(config[key], list):
            config[key] = sorted(set(config[key]))
    params = _by_place(model, adapter.name)
    for field, target in adapter.method.patterns.items():
        if isinstance(config.get(field), dict):
            values = {place: getattr(p, target) for place, p in params.items()}
            config[field] = _first_fits(config[field], values, config[target])
    return config


def _settings(adapter: Adapter) -> dict[str, Any]:
    """The method's part of the file, as it comes back from JSON."""
    config = adapter.method.config(adapter.params)
    plain: dict[str, Any] = json.loads(json.dumps(config, default=_listed))
    return plain


def _listed(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return sorted(value) if isinstance(value, set | frozenset) else dict(value)


def _means_other_layers(config: Mapping[str, Any]) -> bool:
    """Whether the rules may mean other layers to the peft library, which is to be told the layers.

    It knows other architectures' defaults, has another ``all-linear``, and counts blocks otherwise.
    """
    targets = config["target_modules"]
    all_linear = isinstance(targets, str) and targets.lower() == ALL_LINEAR
    return targets is None or all_linear or config.get("layers_to_transform") is not None


def _targets(model: nn.Module, name: str) -> list[str]:
    return [
        path
        for path, module in _layers(model, name)
        if not isinstance(module, ParameterLayer) and BASE_LAYER not in path.split(".")
    ]


def exactly(model: nn.Module, paths: Sequence[str]) -> str | list[str]:
    """A rule that means these modules alone: a list, unless one is another one's end."""
    wanted = set(paths)
    for path, _ in own_modules(model):
        if (own := base_name(path)) not in wanted and not wanted.isdisjoint(endings(own)):
            return "|".join(map(re.escape, paths))
    return list(paths)


def _layers(model: nn.Module, name: str) -> Iterator[tuple[str, AdapterModule]]:
    """The method's own layers that hold an adapter."""
    for path, module in modules(model):
        if isinstance(module, AdapterLayer) and module.prefix is None and name in module.adapters:
            yield path, module


def _saved(model: nn.Module, name: str) -> list[str]:
    return [
        base_name(path)
        for path, module in modules(model)
        if isinstance(module, SavedModule) and name in module.adapters
    ]


def _by_place(model: nn.Module, name: str) -> dict[str, Any]:
    """An adapter's parameters at each place, by what patterns are compared with."""
    return {place(path, module): module.params[name] for path, module in _layers(model, name)}


def place(path: str, module: AdapterModule) -> str:
    """What patterns are compared with."""
    parameter = f".{module.parameter}" if isinstance(module, ParameterLayer) else ""
    return base_name(path) + parameter


def _first_fits(
    patterns: Mapping[str, Any], values: Mapping[str, Any], otherwise: Any
) -> dict[str, Any]:
    """Patterns that give the values at each place to a reader that takes the first that fits."""
    patterns = dict(sorted(patterns.items()))
    fits = fitting(patterns)
    read = {p: patterns[keys[0]] if (keys := fits(p)) else otherwise for p in values}
    if read == values:
        return patterns
    return {f"^{path}": value for path, value in sorted(values.items()) if value != otherwise}


# A file beside a model


def differences(config: Mapping[str, Any], model: nn.Module, adapter: Adapter) -> Iterator[str]:
    """The settings with which a file's tensors would give another result than the model's."""
    method, ours = adapter.method, _settings(adapter)
    by_place = {f: t for f, t in method.patterns.items() if isinstance(ours.get(f), dict)}
    passed = PLACES.union(by_place, by_place.values())
    for key in sorted(ours.keys() - passed):
        theirs = config.get(key, method.file_defaults.get(key, ours[key]))
        if key in method.patterns:
            theirs, ours[key] = sorted(theirs or []), sorted(ours[key] or [])
        if not method.same_result(key, theirs, ours[key]):
            yield f"{key}: {theirs!r} in {CONFIG}, {ours[key]!r} in the model"
    places = _by_place(model, adapter.name)
    for field, target in sorted(by_place.items()):
        otherwise = config.get(target, method.file_defaults.get(target, ours[target]))
        yield from _pattern_differences(config.get(field) or {}, target, otherwise, places)


def _pattern_differences(
    patterns: Mapping[str, Any], target: str, otherwise: Any, places: Mapping[str, Any]
) -> Iterator[str]:
    fits = fitting(patterns)
    different: dict[tuple[Any, Any], list[str]] = {}
    for path, params in places.items():
        theirs = patterns[keys[0]] if (keys := fits(path)) else otherwise
        if theirs != getattr(params, target):
            different.setdefault((theirs, getattr(params, target)), []).append(path)
    for (theirs, ours), paths in different.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield f"{target}: {theirs!r} in {CONFIG}, {ours!r} in the model, for {paths[0]}{more}"


def at_place(params: Any, method: type[BasePeft], path: str) -> Any:
    """The parameters of a file's adapter at a place."""
    changes = {}
    for field, target in method.patterns.items():
        patterns = getattr(params, field)
        if isinstance(patterns, Mapping) and (keys := fitting(patterns)(path)):
            changes[target] = patterns[keys[0]]
    return dataclasses.replace(params, **changes) if changes else params
