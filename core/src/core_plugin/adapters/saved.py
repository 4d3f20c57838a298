"""Modules that are trained whole (``modules_to_save``), in a copy that belongs to an adapter."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core_plugin.adapters.layer import AdapterLayer, AdapterModule
from core_plugin.adapters.names import BASE_LAYER, SAVED
from core_plugin.adapters.walk import modules, own_modules
from core_plugin.tensors import copy_full, gather


class SavedModule(AdapterLayer):
    """Stands in for a module, and calls the copy of the adapter that is used, or else the module.

    The copies of a module in fewer than 32 bits are float32, since they are trained. They are
    called with inputs in float32 then, and give outputs in the module's dtype.
    """

    prefix = SAVED

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.modules_to_save = nn.ModuleDict()
        self.changes = tuple(_saved_tensors(base_layer))

    @classmethod
    def fault(cls, base: nn.Module, params: Any) -> str | None:
        """See :meth:`AdapterLayer.fault`."""
        kind = type(base).__name__
        if isinstance(base, nn.ModuleList | nn.ModuleDict):
            return f"a {kind} is never called, so no copy can stand in for it; name what is in it"
        if any(isinstance(module, AdapterModule) for module in base.modules()):
            return f"the {kind} has adapters already, which a copy would have too"
        dtypes = {p.dtype for p in base.parameters()}
        if not dtypes:
            return f"the {kind} has no parameters to train"
        if whole := sorted(str(d) for d in dtypes if not d.is_floating_point):
            return f"the {kind} has parameters of {', '.join(whole)}, which cannot be trained"
        return None

    def add_adapter(self, name: str, params: Any) -> None:
        """See :meth:`AdapterModule.add_adapter`."""
        # Hooks are shared and not copied: what they refer to may be the whole model.
        hooks = [
            hook
            for module in self.base_layer.modules()
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        ]
        made = copy.deepcopy(self.base_layer, {id(hook): hook for hook in hooks})
        for tensor in _tensors(made):
            if tensor.is_floating_point() and tensor.itemsize < 4:
                tensor.data = tensor.data.float()
        self.modules_to_save[name] = made

    def initialize(self, name: str) -> None:
        """Give a copy the values of the module that it is a copy of."""
        pairs = zip(_tensors(self.modules_to_save[name]), _tensors(self.base_layer), strict=True)
        for target, source in pairs:
            copy_full(target, gather(source.detach()))

    def clash(self, names: Sequence[str]) -> str | None:
        """See :meth:`AdapterModule.clash`."""
        both = " and ".join(map(repr, names))
        return f"the adapters {both} each have a copy of the module, and one can stand in for it"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module, or as the copy that is used."""
        used = self._stand_in()
        pairs = zip(self.base_layer.parameters(), used.parameters(), strict=True)
        own, made = next(((b.dtype, m.dtype) for b, m in pairs if b.dtype != m.dtype), (None, None))
        if own is None or made is None:
            return used(*args, **kwargs)
        args, kwargs = _cast((args, kwargs), own, made)
        return _cast(used(*args, **kwargs), made, own)

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """See :meth:`AdapterLayer.merge_into`."""
        for own, tensor in _saved_tensors(self.modules_to_save[name]).items():
            tensors[own].copy_(tensor)

    def adapter_parameters(self, name: str) -> Iterator[tuple[str, str, nn.Parameter]]:
        """See :meth:`AdapterModule.adapter_parameters`; in a file, they are the module's own."""
        if name in self.adapters:
            for own, parameter in self.modules_to_save[name].named_parameters():
                yield f"{SAVED}.{name}.{own}", own, parameter

    def adapter_tensors(self, name: str) -> Iterator[tuple[str, str, Tensor]]:
        """See :meth:`AdapterModule.adapter_tensors`."""
        if name in self.adapters:
            for own, tensor in _saved_tensors(self.modules_to_save[name]).items():
                yield f"{SAVED}.{name}.{own}", own, tensor

    def check(self, prefix: str) -> None:
        """The copies are modules of the model's kind, and are initialised as those are."""

    def _stand_in(self) -> nn.Module:
        return self.modules_to_save[self.used[-1]] if self.used else self.base_layer

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name in (BASE_LAYER, SAVED, "used") or name.startswith("__"):
                raise
            return getattr(self._stand_in(), name)


def tie_saved(model: nn.Module, name: str) -> None:
    """Tie an adapter's copies of modules whose own parameters are tied.

    They stay apart if the adapter's parameters have ``ensure_weight_tying`` False. A copy of a
    module that is tied to another one, of which the adapter has no copy, is trained apart from
    that; a warning says so.

    Args:
        model: The model; its ``SavedModule`` layers are in place.
        name: The adapter.
    """
    owners: dict[nn.Parameter, tuple[str, nn.Parameter]] = {}
    copied: set[nn.Module] = set()
    for path, layer in modules(model):
        if isinstance(layer, SavedModule) and name in layer.adapters:
            copied.update(layer.base_layer.modules())
            made = layer.modules_to_save[name]
            for own, parameter in layer.base_layer.named_parameters(remove_duplicate=False):
                within, _, last = own.rpartition(".")
                module = made.get_submodule(within)
                owner = f"{path}.{own}", cast("nn.Parameter", getattr(module, last))
                _, tied = owners.setdefault(parameter, owner)
                if getattr(layer.adapters[name].params, "ensure_weight_tying", True):
                    setattr(module, last, tied)
    for path, module in own_modules(model):
        for own, parameter in module.named_parameters(recurse=False):
            if parameter in owners and module not in copied:
                warnings.warn(
                    f"{owners[parameter][0]} is tied to {path}.{own}, which is not in "
                    "modules_to_save: the copy is trained apart from it. Name both modules to "
                    "keep them tied",
                    stacklevel=2,
                )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What a file holds of a module."""
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _cast(tree: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """Arguments or results with the tensors of one dtype in another."""
    return pytree.tree_map(
        lambda x: x.to(new) if isinstance(x, Tensor) and x.dtype == old else x, tree
    )
