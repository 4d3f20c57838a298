"""Another adapter's values in the place of one that a model has, which may be compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from core_plugin.adapters import configuration, settings
from core_plugin.adapters.contents import (
    Contents,
    adapter_of,
    bare,
    file_name,
    named_tensors,
    read_tensors,
    refuse,
    spelled,
)
from core_plugin.adapters.layer import AdapterModule
from core_plugin.adapters.walk import modules
from core_plugin.errors import ConfigError


def hotswap(
    model: nn.Module,
    directory: Path | str,
    name: str = "default",
    *,
    renames: Mapping[str, str] | None = None,
) -> None:
    """Give an adapter the values of another one, in place; a compiled model stays compiled.

    The adapter keeps its settings, and gets values that do with them what the other's do with the
    other's. How far the settings may differ is up to the method.

    Args:
        model: A model with the adapter, and real tensors; sharded or not.
        directory: Where the other's files are.
        name: Which adapter of the model.
        renames: See :attr:`core_plugin.types.model.BaseModel.renames`.

    Raises:
        CheckpointError: With every reason why the other one cannot take its place; nothing was
            changed.
    """
    directory, adapter = Path(directory), adapter_of(model, name)
    config, wanted = configuration.read(directory), named_tensors(model, name)
    if config["peft_type"] != adapter.method.peft_type:
        ours = adapter.method.peft_type
        refuse(directory, name, [f"peft_type: {config['peft_type']!r}, {ours!r} in the model"])
    tensors = {spelled(k, wanted, renames or {}): t for k, t in read_tensors(directory).items()}
    names = [bare(key) for key in tensors]
    config = settings.with_names_of_today(config, adapter.method, model, renames or {})
    params = settings.parameters(config, adapter.method, model, names)
    faults = [*_other_rows(params, adapter.params)]
    for path, module in modules(model):
        if name in module.adapters and module.prefix is None:
            there = configuration.at_place(
                params, adapter.method, configuration.place(path, module)
            )
            try:
                tensors |= _converted(path, module, name, there, tensors)
            except ConfigError as error:
                faults.append(f"{path}: {error}")
    found = Contents(tensors, model, name, {})
    refuse(directory, name, faults, *found.faults())
    found.load()


def _other_rows(params: Any, held: Any) -> Iterator[str]:
    field = "trainable_token_indices"
    theirs, ours = getattr(params, field, None), getattr(held, field, None)
    if theirs != ours:
        yield f"{field}: {theirs!r}, {ours!r} in the model"


def _converted(
    path: str, module: AdapterModule, name: str, params: Any, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The file's tensors for a module, as the held adapter's settings need them, by whole name."""
    keys = {own: file_name(path, module, own) for _, own, _ in module.adapter_tensors(name)}
    theirs = {own: tensors[key] for own, key in keys.items() if key in tensors}
    if theirs and len(theirs) < len(keys):
        return {}  # what is missing is told with the rest
    fitting = module.converted(name, params if theirs else None, theirs)
    return {keys[own]: tensor for own, tensor in fitting.items()}
