"""An adapter's files, in the format of the peft library.

``adapter_model.safetensors`` holds the adapter's tensors, ``adapter_config.json`` what it takes
to use them. Two saves of the same adapter are the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch.distributed as dist
from torch import Tensor, nn

from core_plugin.adapters import configuration, settings
from core_plugin.adapters.configuration import CONFIG
from core_plugin.adapters.contents import (
    TENSORS,
    Contents,
    adapter_of,
    bare,
    named_tensors,
    read_tensors,
    refuse,
    spelled,
)
from core_plugin.adapters.inject import inject
from core_plugin.adapters.switch import set_adapter
from core_plugin.adapters.walk import modules
from core_plugin.errors import CheckpointError
from core_plugin.tensors import gather, is_sharded, model_tensors

if TYPE_CHECKING:
    from core_plugin.types.peft import BasePeft


# Writing


def save_adapter(
    directory: Path | str,
    model: nn.Module,
    name: str = "default",
    *,
    tensors: Mapping[str, Tensor] | None = None,
    base_model: str | None = None,
) -> None:
    """Write an adapter's files, which ``peft.PeftModel.from_pretrained`` can read.

    Args:
        directory: Where to; it is made if need be.
        model: The model that has the adapter.
        name: Which adapter; files do not hold its name.
        tensors: The adapter's tensors, whole, by their names in the model. None takes the
            model's: if they are sharded, every rank has to call this, and the first one writes.
        base_model: A path or name of the base model, for readers of the file.

    Raises:
        CheckpointError: The model has no such adapter, or not all of its tensors are there.
    """
    adapter, own = adapter_of(model, name), named_tensors(model, name)
    if tensors is None:
        whole = _gathered(own)
        if any(map(is_sharded, own.values())) and dist.get_rank() != 0:
            return
    else:
        whole = _picked(model, own, tensors)
    copies = {key: whole[key].detach().cpu().contiguous().clone() for key in sorted(whole)}
    config = configuration.written(model, adapter, base_model)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / TENSORS, safetensors.torch.save(copies, {"format": "pt"}))
    _write(directory / CONFIG, text.encode())


def _gathered(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    empty = [key for key, tensor in own.items() if tensor.is_meta]
    if empty:
        raise CheckpointError(f"{bare(empty[0])} is on the meta device: it has no values to save")
    return {key: gather(tensor.detach()) for key, tensor in own.items()}


def _picked(
    model: nn.Module, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The given tensors by their names in a file; buffers, which are never sharded, from the model.

    A tensor that the model has at two places was given once, under its first name.
    """
    names = {id(tensor): name for name, tensor in model_tensors(model).items()}
    picked, missing = {}, []
    for key, tensor in own.items():
        name = names.get(id(tensor), "")
        if name in tensors:
            picked[key] = tensors[name]
        elif not isinstance(tensor, nn.Parameter):
            picked[key] = tensor
        else:
            missing.append(name or bare(key))
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the adapter's tensors are not among those that are to be saved: "
            + ", ".join(missing[:3])
            + (", ..." if len(missing) > 3 else "")
        )
    return picked


def _write(path: Path, content: bytes) -> None:
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_bytes(content)
    os.replace(aside, path)


# Reading


def load_adapter(
    model: nn.Module,
    directory: Path | str,
    name: str = "default",
    *,
    partial: bool = False,
    renames: Mapping[str, str] | None = None,
) -> list[str]:
    """Read an adapter's files into a model that has such an adapter, sharded or not.

    Args:
        model: A model with the adapter, and real tensors.
        directory: Where the files are: core-plugin's or the peft library's.
        name: Which adapter of the model; files do not hold its name.
        partial: Load what fits, and leave the rest.
        renames: See :attr:`core_plugin.types.model.BaseModel.renames`.

    Returns:
        What was left out, and why; nothing unless ``partial``.

    Raises:
        CheckpointError: With everything that is missing, unexpected, of another shape or dtype, or
            made with other settings; nothing was changed.
    """
    directory, adapter = Path(directory), adapter_of(model, name)
    config = configuration.read(directory)
    config = settings.with_names_of_today(config, adapter.method, model, renames or {})
    found = Contents(read_tensors(directory), model, name, renames or {})
    faults = [[*configuration.differences(config, model, adapter)], *found.faults()]
    if not partial:
        refuse(directory, name, *faults)
    found.load()
    extra = configuration.kept(config, adapter.method, adapter.params)
    for _, module in modules(model):
        if name in module.adapters:
            module.adapters[name] = dataclasses.replace(adapter, extra=extra)
    return [fault for kind in faults for fault in kind]


def method_name(directory: Path | str) -> str:
    """The name of the method whose adapter a directory holds.

    Raises:
        CheckpointError: It holds none.
    """
    peft_type: str = configuration.read(Path(directory))["peft_type"]
    return peft_type.lower()


def attach_saved(
    model: nn.Module,
    directory: Path | str,
    method: type[BasePeft],
    name: str,
    *,
    trainable: bool,
    renames: Mapping[str, str],
) -> None:
    """See :meth:`core_plugin.types.peft.PeftPlugin.from_pretrained`."""
    directory = Path(directory)
    config, tensors = configuration.read(directory), read_tensors(directory)
    config = settings.with_names_of_today(config, method, model, renames)
    names = {bare(spelled(key, {}, old)) for key in tensors for old in ({}, renames)}
    params = settings.parameters(config, method, model, names)
    extra = configuration.kept(config, method, params)

    def check() -> None:
        different = configuration.differences(config, model, adapter_of(model, name))
        refuse(directory, name, [*different], *Contents(tensors, model, name, renames).faults())

    inject(model, method, params, name, extra=extra, check=check)
    Contents(tensors, model, name, renames).load()
    if not trainable:
        set_adapter(model, name, trainable=False)
        model.eval()
