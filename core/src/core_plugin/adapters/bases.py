"""The model's own modules inside adapter layers, and their tensors that merging changes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core_plugin.adapters.layer import AdapterLayer
from core_plugin.adapters.memory import Scratch, empty_like
from core_plugin.adapters.names import base_name
from core_plugin.adapters.walk import modules, own_modules
from core_plugin.tensors import copy_full, gather, is_sharded


@dataclasses.dataclass
class Slot:
    """A place for a tensor of the model's own that adapter layers change."""

    path: str
    """The tensor's name in the model without adapters."""
    layer: AdapterLayer
    """The innermost layer that changes it, which keeps the original."""
    key: str
    """Its name among the layer's ``changes``."""
    holder: dict[str, Any]
    """The parameters or the buffers of the module that owns it."""
    name: str
    """Its name there."""
    owners: int = 1
    """How many modules have the tensor."""

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        return self.holder[self.name]  # type: ignore[no-any-return]

    def fault(self) -> str | None:
        """Why nothing can be merged into it, or None."""
        if self.name not in self.holder:
            return f"{self.path} is computed from other tensors, so nothing can be merged into it"
        if self.tensor.is_meta:
            return f"{self.path} is on the meta device; give it values first"
        if isinstance(self.tensor, nn.Parameter) and not self.tensor.is_floating_point():
            return f"{self.path} is {self.tensor.dtype}, which no update can be added to"
        if is_sharded(self.tensor) and self.owners > 1:
            return f"{self.path} is shared and sharded, and cannot change for one module alone"
        return None

    def prepared(self, scratch: Scratch, in_place: bool) -> tuple[Tensor, Tensor]:
        """Memory for a result, and a whole tensor to add to, with the values that are there now."""
        old = self.tensor.detach()
        result = old if in_place else empty_like(old)
        is_low = old.is_floating_point() and old.itemsize < 4
        if is_sharded(old):
            return result, gather(old).to(torch.float32 if is_low else old.dtype, copy=True)
        if is_low:
            return result, scratch.like(old, self.key).copy_(old)
        return result, result if in_place else result.copy_(old)

    def put(self, tensor: Tensor, keep: bool) -> None:
        """Put a result there; only its values if it is sharded, as ``fully_shard`` has its own."""
        old = self.tensor
        if is_sharded(old):
            if keep:
                self.layer.originals[self.key] = old.detach().clone()
            old.copy_(tensor)
        else:
            if keep:
                self.layer.originals[self.key] = old
            self.holder[self.name] = tensor


@dataclasses.dataclass
class Base:
    """A module of the model's own, and the adapter layers around it, from the inside out."""

    path: str
    layers: list[AdapterLayer]
    slots: dict[str, Slot]
    """By the names among the layers' ``changes``; not those where the module has None."""

    def faults(self, names: Sequence[str]) -> Iterator[str]:
        """Why adapters cannot be merged into it."""
        for layer in self.layers:
            held = [name for name in names if name in layer.adapters]
            reasons = [layer.merge_fault(name) for name in held]
            reasons += [layer.clash(held)] if len(held) > 1 else []
            reasons += [
                f"the adapter {name!r} is on the meta device; give it values first"
                for name in held
                if any(p.is_meta for _, _, p in layer.adapter_parameters(name))
            ]
            yield from (f"{self.path}: {reason}" for reason in reasons if reason)
            slots = [self.slots[key] for key in layer.changes if held and key in self.slots]
            yield from filter(None, (slot.fault() for slot in slots))

    def merged(self, names: Sequence[str], scratch: Scratch, in_place: bool) -> dict[str, Tensor]:
        """What adapters make of its tensors, one after another.

        Those that no other module has are changed in place if so asked, and not returned.
        """
        parts = [(layer, name) for layer in self.layers for name in names if name in layer.adapters]
        keys = {key for layer, _ in parts for key in layer.changes}
        slots = {key: slot for key, slot in self.slots.items() if key in keys}
        new = [key for key, slot in slots.items() if not in_place or slot.owners > 1]
        prepared = {key: slot.prepared(scratch, key not in new) for key, slot in slots.items()}
        for layer, name in parts:
            with _whole(layer, name):
                layer.merge_into({k: prepared[k][1] for k in layer.changes if k in slots}, name)
        for result, changed in prepared.values():
            if result is not changed:
                copy_full(result, changed)
        return {key: _like(slots[key].tensor, prepared[key][0]) for key in new}

    def put(self, tensors: Mapping[str, Tensor], keep: bool) -> None:
        """Put results in place."""
        for key, tensor in tensors.items():
            self.slots[key].put(tensor, keep)

    def set_merged(self, names: Sequence[str]) -> None:
        """Let the layers know which adapters are merged."""
        for layer in self.layers:
            layer.merged = tuple(names)
            layer.activate(layer.active)

    @property
    def is_lost(self) -> bool:
        """Whether what was there before a merge was not kept."""
        changed = any(name in layer.adapters for layer in self.layers for name in layer.merged)
        return changed and bool(self.slots) and not any(layer.originals for layer in self.layers)

    def restore(self) -> None:
        """Put back what was there before a merge."""
        for layer in self.layers:
            if layer.enabled:
                layer.exchange()
            layer.originals = {}


@contextlib.contextmanager
def _whole(layer: AdapterLayer, name: str) -> Iterator[None]:
    """A block in which an adapter's sharded parameters are whole ones."""
    shards: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for path, _, parameter in list(layer.adapter_parameters(name)):
            parent, _, own = path.rpartition(".")
            holder = layer.get_submodule(parent)._parameters
            if (whole := gather(parameter)) is not parameter:
                shards.append((holder, own, parameter))
                holder[own] = nn.Parameter(whole, requires_grad=False)
        yield
    finally:
        for holder, own, parameter in shards:
            holder[own] = parameter


def _like(old: Tensor, new: Tensor) -> Tensor:
    """A result as what was there before: a parameter, or a buffer."""
    is_parameter = isinstance(old, nn.Parameter)
    return nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new


def bases(model: nn.Module) -> list[Base]:
    """The modules inside adapter layers."""
    found: dict[nn.Module, Base] = {}
    for path, layer in modules(model):
        if isinstance(layer, AdapterLayer):
            base = found.setdefault(layer.owner, Base(base_name(path), [], {}))
            base.layers.insert(0, layer)
    owners = collections.Counter(
        id(tensor)
        for _, module in own_modules(model)
        for tensor in (*module._parameters.values(), *module._buffers.values())
    )
    for base in found.values():
        for slot in _slots(base):
            if slot.name not in slot.holder:
                base.slots[slot.key] = slot
            elif slot.tensor is not None:
                slot.owners = owners[id(slot.tensor)]
                base.slots[slot.key] = slot
    return list(found.values())


def _slots(base: Base) -> Iterator[Slot]:
    for layer in base.layers:
        for key in layer.changes:
            if key not in base.slots:
                yield Slot(f"{base.path}.{key}".lstrip("."), layer, key, *layer.holder(key))
