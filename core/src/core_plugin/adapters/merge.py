"""Merging adapters into the model's own tensors, and taking adapters out of the model.

A merged model computes with its base layers alone. The sums are made in float32, or in float64 for
a base in float64, and rounded once to the base's dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from core_plugin.adapters.bases import Base, Slot, bases
from core_plugin.adapters.encoders import call_kernels
from core_plugin.adapters.gradients import release
from core_plugin.adapters.layer import AdapterLayer, ModelAdapter
from core_plugin.adapters.memory import Scratch
from core_plugin.adapters.switch import take_out, trains_bias
from core_plugin.adapters.walk import adapters, check_names, modules
from core_plugin.errors import ConfigError
from core_plugin.tensors import gather, reshard

Results = Sequence[tuple[Base, dict[str, Tensor]]]


@torch.no_grad()
def merge(
    model: nn.Module,
    names: str | Sequence[str] | None = None,
    *,
    safe: bool = False,
    keep: bool = True,
) -> list[str]:
    """Put adapters into the tensors of the base layers, which then compute alone.

    A tensor that other modules share stays as it is for them; the adapted layer gets its own.

    Args:
        model: A model with adapters. If it is sharded, all ranks call this.
        names: The adapters, in the order in which they are added; None: the active ones.
        safe: Change nothing unless all results are finite.
        keep: Keep the tensors that were there, so that :func:`unmerge` brings them back. Without
            it, and without ``safe``, they are changed in place, which is fast and takes no memory;
            an error half-way then leaves a model that is of no use.

    Returns:
        The names of the tensors that are no longer shared.

    Raises:
        ConfigError: With all that is in the way; nothing was changed.
    """
    wanted = _wanted(model, names)
    reshard(model)
    found = bases(model)
    faults = [*_model_faults(model, wanted), *(f for base in found for f in base.faults(wanted))]
    if faults:
        raise ConfigError(*dict.fromkeys(faults))
    scratch = Scratch()
    results = [(base, base.merged(wanted, scratch, not (safe or keep))) for base in found]
    if safe:
        _check_finite(results)
    untied = _tie(results)
    for base, tensors in results:
        base.put(tensors, keep)
        base.set_merged(wanted)
    return untied


@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Bring back what the base layers had before a merge: the very tensors, bit for bit.

    Raises:
        ConfigError: Nothing is merged, or it was with ``keep=False``.
    """
    found = [base for base in bases(model) if base.layers[0].merged]
    if not found:
        raise ConfigError("no adapter is merged into the model")
    if any(base.is_lost for base in found):
        raise ConfigError(
            "the adapters were merged with keep=False: what the base layers had before is gone"
        )
    reshard(model)
    for base in found:
        base.restore()
        base.set_merged(())


def unload(model: nn.Module, *, merge: bool = True, safe: bool = False) -> nn.Module:
    """Take all adapters out of a model, and put its own modules back in all their places.

    Args:
        model: A model with adapters. What is frozen stays so.
        merge: Merge the active adapters first, if none is merged; False brings the base's own
            tensors back.
        safe: See :func:`merge`.

    Returns:
        The model; if that is an adapter layer, its base layer.

    Raises:
        ConfigError: With all that is in the way; nothing was changed.
    """
    held = [module for _, module in modules(model)]
    if not held:
        raise ConfigError("the model has no adapters")
    is_merged = any(isinstance(module, AdapterLayer) and module.merged for module in held)
    if merge:
        _check_complete(model) if is_merged else _merge(model, safe=safe, keep=False)
    else:
        _warn_of_biases(model)
        if is_merged:
            unmerge(model)
        for module in held:  # a module that was compiled with a layer goes on calling that
            module.activate(())
    release(model)
    call_kernels(model)
    take_out(model, held)
    return model.owner if isinstance(model, AdapterLayer) else model


_merge = merge  # which unload has an argument called like


def _wanted(model: nn.Module, names: str | Sequence[str] | None) -> tuple[str, ...]:
    """The adapters to merge, in order."""
    held = adapters(model)
    if names is None:
        active = (name for _, module in modules(model) for name in module.active)
        wanted = tuple(dict.fromkeys(name for name in active if name in held))
    else:
        wanted = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
        check_names(model, wanted)
    if not wanted:
        has = f"it has {', '.join(map(repr, held))}" if held else "it has none"
        raise ConfigError(f"the model has no active adapter to merge; {has}")
    return wanted


def _model_faults(model: nn.Module, wanted: Sequence[str]) -> Iterator[str]:
    """What is against a merge, the single tensors aside."""
    for path, module in modules(model):
        if isinstance(module, AdapterLayer) and module.merged:
            merged = ", ".join(map(repr, module.merged))
            yield f"the adapters {merged} are merged already; unmerge them first"
        if not module.enabled:
            yield "the adapters are disabled; enable them first"
        if isinstance(module, ModelAdapter):
            yield from (_cannot_merge(path, name) for name in wanted if name in module.adapters)


def _check_complete(model: nn.Module) -> None:
    """Check that a merged model needs its adapters no more."""
    faults = []
    for path, module in modules(model):
        if isinstance(module, ModelAdapter):
            faults += [_cannot_merge(path, name) for name in module.used]
        elif not module.enabled:
            faults.append("the adapters are disabled; enable them first")
    if faults:
        raise ConfigError(*dict.fromkeys(faults))


def _warn_of_biases(model: nn.Module) -> None:
    for name, adapter in adapters(model).items():
        if trains_bias(adapter.params):
            warnings.warn(
                f"the adapter {name!r} trained biases of the model itself, which keep their values",
                stacklevel=3,
            )


def _cannot_merge(path: str, name: str) -> str:
    return f"{path}: the adapter {name!r} adapts the model at its door, and cannot be merged"


def _check_finite(results: Results) -> None:
    faults = [
        f"merging would make {base.slots[key].path} infinite or not a number"
        for base, tensors in results
        for key, tensor in tensors.items()
        if not _is_finite(tensor)
    ]
    if faults:
        raise ConfigError(*faults)


def _is_finite(tensor: Tensor) -> bool:
    # One sum is several times as fast as looking at each element; a finite one that overflows is
    # told apart by looking.
    total = gather(tensor.sum())
    return bool(total.isfinite()) or bool(gather(tensor).isfinite().all())


def _tie(results: Results) -> list[str]:
    """Let results be shared as the tensors were, where all who share them get the same.

    Returns:
        The names of the tensors that were shared and are no more.
    """
    places: dict[int, list[tuple[dict[str, Tensor], Slot]]] = {}
    for base, tensors in results:
        for key in tensors:
            slot = base.slots[key]
            if slot.owners > 1:
                places.setdefault(id(slot.tensor), []).append((tensors, slot))
    untied = []
    for shared in places.values():
        first = shared[0][0][shared[0][1].key]
        if len(shared) == shared[0][1].owners and all(t[s.key].equal(first) for t, s in shared):
            for tensors, slot in shared:
                tensors[slot.key] = first
        else:
            untied += [slot.path for _, slot in shared]
    return untied
