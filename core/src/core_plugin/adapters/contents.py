"""The tensors of an adapter's file, beside those of the model that they are for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from core_plugin.adapters.layer import Adapter, AdapterLayer, AdapterModule, ModelAdapter
from core_plugin.adapters.names import FILE_PREFIX, SAVED, canonical_name, renamed
from core_plugin.adapters.saved import SavedModule
from core_plugin.adapters.switch import biases
from core_plugin.adapters.walk import adapters, modules, own_modules
from core_plugin.errors import CheckpointError
from core_plugin.params import near
from core_plugin.tensors import copy_full

TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

SHOWN = 50
"""How many faults of a kind a message has."""


def adapter_of(model: nn.Module, name: str) -> Adapter:
    """A model's adapter.

    Raises:
        CheckpointError: It has none of the name.
    """
    held = adapters(model)
    if name not in held:
        has = ", ".join(map(repr, held)) or "none"
        raise CheckpointError(f"the model has no adapter {name!r}; it has {has}")
    return held[name]


def refuse(directory: Path, name: str, *faults: Sequence[str]) -> None:
    """Refuse files with faults.

    Args:
        directory: Where the files are.
        name: The adapter that they are for.
        faults: Lists of faults of a kind; of a long one, the first are shown.

    Raises:
        CheckpointError: There are some.
    """
    report = ""
    for kind in faults:
        report += "".join(f"\n  - {fault}" for fault in kind[:SHOWN])
        report += f"\n  and {len(kind) - SHOWN} more like these" if len(kind) > SHOWN else ""
    if report:
        raise CheckpointError(f"{directory} is not for this model's {name!r}:{report}")


def named_tensors(model: nn.Module, name: str) -> dict[str, Tensor]:
    """An adapter's own tensors by their names in its file."""
    adapter = adapters(model)[name]
    own: dict[str, Tensor] = {}
    for path, module in modules(model):
        for _, in_file, tensor in module.adapter_tensors(name):
            own[file_name(path, module, in_file)] = tensor
    return own | {FILE_PREFIX + bias: tensor for bias, tensor in biases(model, adapter).items()}


def file_name(path: str, module: AdapterModule, in_file: str) -> str:
    """The whole name of a tensor in a file; one of the model's door has no path there."""
    return in_file if isinstance(module, ModelAdapter) else f"{FILE_PREFIX}{path}.{in_file}"


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU, by their names there."""
    if not (directory / TENSORS).exists() and (directory / PICKLE).exists():
        raise CheckpointError(
            f"{directory} has its tensors in {PICKLE}, a pickle, which is not read; let the peft "
            "library save the adapter again, with safe_serialization=True"
        )
    try:
        return safetensors.torch.load_file(directory / TENSORS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{directory} does not hold an adapter: {TENSORS}: {error}"
        ) from error


class Contents:
    """A file's tensors beside those of a model's adapter that they are for."""

    def __init__(
        self, tensors: Mapping[str, Tensor], model: nn.Module, name: str, renames: Mapping[str, str]
    ) -> None:
        self._merged = [
            path
            for path, module in modules(model)
            if isinstance(module, AdapterLayer) and name in module.merged
        ]
        self._wanted = named_tensors(model, name)
        self._targets = {**_embeddings(model), **self._wanted}
        unused = _unused(model)
        self._tensors = {
            spelled(key, self._targets, renames): tensor
            for key, tensor in tensors.items()
            if not bare(key).startswith(unused)
        }

    def faults(self) -> list[list[str]]:
        """What does not fit, by kind."""
        merged = [
            f"{path}: the adapter is merged into the base; unmerge it" for path in self._merged
        ]
        missing = [bare(key) for key in self._wanted if key not in self._tensors]
        unexpected = [bare(key) for key in self._tensors if key not in self._targets]
        # Near names are looked up for as many as are shown, since there may be thousands.
        near_names = [near(name, missing[: 4 * SHOWN]) for name in unexpected[:SHOWN]]
        hints = [f"; did you mean {close}?" if close else "" for close in near_names]
        misfits = {
            bare(key): _misfit(tensor, self._targets[key])
            for key, tensor in self._tensors.items()
            if key in self._targets
        }
        return [
            merged,
            [f"{name}: missing" for name in missing],
            [
                f"{name}: unexpected{hint}"
                for name, hint in itertools.zip_longest(unexpected, hints, fillvalue="")
            ],
            [f"{name}: {reason}" for name, reason in misfits.items() if reason],
        ]

    def load(self) -> None:
        """Copy what fits."""
        for key, tensor in self._tensors.items():
            target = self._targets.get(key)
            if target is not None and not self._merged and not _misfit(tensor, target):
                copy_full(target, tensor)


def _misfit(tensor: Tensor, target: Tensor) -> str | None:
    """Why a tensor of a file is not for one of the model."""
    if tensor.shape != target.shape:
        return f"shape {list(tensor.shape)} in the file, {list(target.shape)} in the model"
    if target.is_meta:
        return "on the meta device in the model; give it memory first"
    kinds = {(t.is_floating_point(), t.is_complex()) for t in (tensor, target)}
    if len(kinds) > 1 or not _keeps_values(tensor, target):
        return f"{tensor.dtype} in the file, which {target.dtype} in the model cannot hold"
    return None


def _keeps_values(tensor: Tensor, target: Tensor) -> bool:
    if tensor.dtype == target.dtype:
        return True
    back = tensor.to(target.dtype).to(tensor.dtype)
    return bool(((back == tensor) | (tensor != tensor)).all())


def spelled(key: str, targets: Mapping[str, Any], renames: Mapping[str, str]) -> str:
    """A file's name as the model has it: with the prefix, and of the architecture of today."""
    if key in targets:
        return key
    own = canonical_name(bare(key))
    if FILE_PREFIX + own in targets:
        return FILE_PREFIX + own
    return FILE_PREFIX + renamed(own, renames)


def bare(key: str) -> str:
    """A name in a file without the prefix."""
    return key.removeprefix(FILE_PREFIX)


def _embeddings(model: nn.Module) -> dict[str, Tensor]:
    """The base tensors that the peft library may have put into a file too.

    It saves the input and output embeddings of a Hugging Face model whole if they have an adapter
    or if rows were added to them.
    """
    held = [_told(model, "get_input_embeddings"), _told(model, "get_output_embeddings")]
    held += [module.base_layer for module in held if isinstance(module, AdapterLayer)]
    return {
        f"{FILE_PREFIX}{path}.{name}": tensor
        for path, module in own_modules(model)
        if any(module is embedding for embedding in held)
        for name, tensor in module._parameters.items()
        if tensor is not None
    }


def _told(model: nn.Module, getter: str) -> Any:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None


def _unused(model: nn.Module) -> tuple[str, ...]:
    """How names begin that the peft library may write, and that nothing depends on.

    With ``bias: all`` it writes the biases of a module that it has a copy of, and the copy's twice.
    """
    saved = [path for path, module in modules(model) if isinstance(module, SavedModule)]
    return tuple(f"{path}.{kind}." for path in saved for kind in ("original_module", SAVED))
