"""From the settings in an ``adapter_config.json`` to a method's parameters.

The peft library reads some of them otherwise than core-plugin does, and passes over some faults in
silence. What is made here means for the model at hand what the file means to that library.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from core_plugin.adapters.names import base_name, renamed
from core_plugin.adapters.patterns import specificity
from core_plugin.adapters.rules import endings, is_regex
from core_plugin.errors import CheckpointError, ConfigError
from core_plugin.params import Origin, parse_params

if TYPE_CHECKING:
    from torch import nn

    from core_plugin.types.peft import BasePeft

NAMING = ("exclude_modules", "modules_to_save", "target_modules", "target_parameters")
"""The settings that are lists of names of parts of the model."""


def parameters(
    config: Mapping[str, Any],
    method: type[BasePeft],
    model: nn.Module,
    tensors: Collection[str],
) -> Any:
    """The method's ``Params`` that mean for a model what the settings of a file mean.

    Args:
        config: The settings, with the names of today.
        method: The method.
        model: The model; it may have adapters.
        tensors: The names of the file's tensors, of today too, and without the prefix.

    Raises:
        CheckpointError: With all the settings that the method cannot follow.
    """
    fields = {field.name for field in dataclasses.fields(method.Params) if field.init}
    settings = {key: value for key, value in config.items() if key in fields}
    paths = [base_name(path) for path, _ in model.named_modules()]
    _fit_modules(settings, paths, tensors)
    for key in method.patterns.keys() & settings.keys():
        settings[key] = _one_for_each(settings[key], _held(model, tensors))
    faults = list(_not_neutral(config, method))
    try:
        params: Any = parse_params({**method.file_defaults, **settings}, method.Params, Origin())
    except ConfigError as error:
        faults += error.faults
    if faults:
        report = "".join(f"\n  - {fault}" for fault in faults)
        raise CheckpointError(
            f"the adapter's configuration has settings that {method.__name__} lacks:{report}"
        )
    return params


def _not_neutral(config: Mapping[str, Any], method: type[BasePeft]) -> Iterator[str]:
    for key, value in sorted(method.neutral.items()):
        if key in config and key not in method.training_only and config[key] != value:
            yield f"{key}: {config[key]!r} would change the result; only {value!r} is known"


def with_names_of_today(
    config: dict[str, Any], method: type[BasePeft], model: nn.Module, renames: Mapping[str, str]
) -> dict[str, Any]:
    """Settings with the names that the model has now; a regular expression stays as it is.

    Args:
        config: The settings.
        method: The method.
        model: The model.
        renames: See :attr:`core_plugin.types.model.BaseModel.renames`.
    """
    if not renames:
        return config
    named = (*model.named_modules(), *model.named_parameters())
    known = {ending for path, _ in named for ending in endings(base_name(path))}

    def rename(name: Any) -> Any:
        is_old = isinstance(name, str) and name.removeprefix("^") not in known
        return renamed(name, renames) if is_old else name

    def rename_all(value: Any) -> Any:
        if isinstance(value, list):
            return [rename(v) for v in value]
        return {rename(k): v for k, v in value.items()} if isinstance(value, dict) else value

    naming = {*NAMING, "trainable_token_indices", *method.patterns}
    return {key: rename_all(value) if key in naming else value for key, value in config.items()}


def _fit_modules(settings: dict[str, Any], paths: list[str], tensors: Collection[str]) -> None:
    """Leave out empty filters and names of no module, over which the peft library passes."""
    for key in ("layers_pattern", "layers_to_transform"):
        if settings.get(key) in ([], ""):
            settings[key] = None
    if isinstance(targets := settings.get("target_modules"), list):
        existing = {ending for path in paths for ending in endings(path)}
        settings["target_modules"] = [entry for entry in targets if entry in existing]
        if lacking := [repr(entry) for entry in targets if entry not in existing]:
            warnings.warn(
                f"the adapter's target_modules name {', '.join(lacking)}, which is no module",
                stacklevel=4,
            )
    if saved := settings.get("modules_to_save"):
        found = {path for entry in saved for path in _saved(entry, paths, tensors)}
        settings["modules_to_save"] = sorted(found) or None


def _saved(entry: str, paths: list[str], tensors: Collection[str]) -> Iterator[str]:
    """The modules that an entry of ``modules_to_save`` means.

    The peft library takes it for the end of a path, within a word too; so those count that the
    file has tensors of. A whole path is no end.
    """
    is_path = entry in paths
    for path in filter(lambda path: path.endswith(entry), paths):
        named = path == entry if is_path else path.endswith(f".{entry}")
        if named or any(name.startswith(f"{path}.") for name in tensors):
            yield path


# Patterns


def fitting(patterns: Mapping[str, Any]) -> Callable[[str], list[str]]:
    """Gives the patterns that fit a path, in order; the peft library takes the first.

    A pattern fits a whole path, or what follows one of its dots.
    """
    order = {pattern: i for i, pattern in enumerate(patterns)}
    regular = {p: re.compile(rf"(.*\.)?({p})$") for p in order if is_regex(p.removeprefix("^"))}

    def fits(path: str) -> list[str]:
        found = {ending for ending in (f"^{path}", *endings(path)) if ending in order}
        found |= {pattern for pattern, compiled in regular.items() if compiled.match(path)}
        return sorted(found, key=order.__getitem__)

    return fits


def _held(model: nn.Module, tensors: Collection[str]) -> list[str]:
    """The paths of the modules that a file has tensors of, and of the parameters of those."""
    parts = {part for name in tensors for part in _beginnings(base_name(name))}
    modules = {base_name(path): module for path, module in model.named_modules()}
    own = [
        f"{path}.{name}"
        for path, module in modules.items()
        if path in parts
        for name in module._parameters
    ]
    return [*filter(parts.__contains__, modules), *own]


def _beginnings(name: str) -> Iterator[str]:
    """What precedes each dot."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _one_for_each(patterns: Any, paths: Iterable[str]) -> Any:
    """Patterns that mean here what they mean to the peft library, without those that fit nothing.

    That library takes the first that fits, core-plugin the most specific one. Where that makes a
    difference there is one for each path instead.
    """
    if not isinstance(patterns, Mapping):
        return patterns
    fits = fitting(patterns)
    found = {path: keys for path in paths if (keys := fits(path))}
    if any(_differ(patterns, keys, path) for path, keys in found.items()):
        return {f"^{path}": patterns[keys[0]] for path, keys in found.items()}
    used = {key for keys in found.values() for key in keys}
    return {key: value for key, value in patterns.items() if key in used}


def _differ(patterns: Mapping[str, Any], keys: list[str], path: str) -> bool:
    """Whether one of the most specific keys says something else than the first one."""
    highest = max(specificity(key, path) for key in keys)
    decide = [key for key in keys if specificity(key, path) == highest]
    return any(patterns[key] != patterns[keys[0]] for key in decide)
