"""Putting an adapter into a model: everything is planned and checked first, and then done."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from core_plugin.adapters.matching import select
from core_plugin.adapters.names import BASE_LAYER
from core_plugin.adapters.tree import Site, sites, weight_is_read
from core_plugin.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from core_plugin.adapters.layer import AdapterLayer
    from core_plugin.types.peft import BasePeft

SHOWN = 3
"""How many modules of a kind a message names."""


def inject(model: nn.Module, method: type[BasePeft], params: Any, adapter_name: str) -> None:
    """Put an adapter into a model in place, make it the active one, and freeze all else.

    The model may be on ``meta``. Parameters that the model shares stay shared.

    Args:
        model: The model; not sharded yet.
        method: The PEFT method.
        params: The method's ``Params``; never changed.
        adapter_name: What to call the adapter.

    Raises:
        ConfigError: With everything that is wrong; nothing was changed.
        PluginContractError: The method's layer is not as an adapter layer has to be.
    """
    model_sites = sites(model)
    chosen, rule_faults = select(model_sites, params)
    targets, layer_faults = _plan(chosen, model_sites, method, params)
    general = [
        *_name_faults(adapter_name),
        *_model_faults(model, model_sites, method, adapter_name),
    ]
    faults = [f"peft: {fault}" for fault in general + layer_faults] + rule_faults
    if faults:
        raise ConfigError("\n".join(faults))
    _apply(model, method, params, adapter_name, targets)


@dataclasses.dataclass(frozen=True)
class Target:
    """A place for an adapter, and the class of the layer to make there; None if one is there."""

    site: Site
    layer_class: type[AdapterLayer] | None


def _name_faults(adapter_name: str) -> Iterator[str]:
    from torch import nn

    if not adapter_name or "." in adapter_name:
        yield f"an adapter's name has no dots and is not empty, got {adapter_name!r}"
    elif hasattr(nn.ModuleDict(), adapter_name) or hasattr(nn.ParameterDict(), adapter_name):
        yield f"an adapter cannot be called {adapter_name!r}, which torch's containers use"


def _model_faults(
    model: nn.Module, model_sites: Sequence[Site], method: type[BasePeft], adapter_name: str
) -> Iterator[str]:
    from torch.distributed.tensor import DTensor

    from core_plugin.adapters.layer import AdapterLayer

    layers = [s.module for s in model_sites if isinstance(s.module, AdapterLayer)]
    if any(adapter_name in layer.adapters() for layer in layers):
        yield f"the model has an adapter called {adapter_name!r} already"
    for other in {layer.method: None for layer in layers if layer.method is not method}:
        names = f"{_described(other)} and {_described(method)}"
        if other.prefix == method.prefix:
            yield f"{names} both use the prefix {method.prefix!r}; one has to choose another"
        elif not (other.mixes and method.mixes):
            yield f"{names} cannot be in one model: not both say that they mix"
    if any(isinstance(p, DTensor) for p in model.parameters()):
        yield "the model is sharded already; inject adapters before it is"
    for site in model_sites:
        if site.path.rpartition(".")[2] == BASE_LAYER:
            yield f"{site.path}: {BASE_LAYER!r} is what adapter layers call the layer they hold"


def _described(method: type[BasePeft]) -> str:
    return f"{method.__module__}.{method.__qualname__}"


def _plan(
    chosen: Sequence[Site], model_sites: Sequence[Site], method: type[BasePeft], params: Any
) -> tuple[list[Target], list[str]]:
    """What to do at each site; and for those at which nothing can be done, why."""
    from core_plugin.adapters.layer import AdapterLayer

    targets: list[Target] = []
    faults: list[str] = []
    unsupported: dict[type[nn.Module], list[Site]] = {}
    for site in chosen:
        if isinstance(site.module, AdapterLayer):
            targets.append(Target(site, None))
            if site.module.method is not method:
                faults.append(f"{site.path} has an adapter of {_described(site.module.method)}")
        elif weight_is_read(site):
            faults.append(f"{site.path} is never called: nn.MultiheadAttention reads its weight")
        else:
            try:
                layer_class = method.layer(site.module, params)
            except ConfigError as error:
                faults.append(f"{site.path}: {error}")
                continue
            if layer_class is None:
                unsupported.setdefault(type(site.module), []).append(site)
            targets.append(Target(site, layer_class))
    for kind, without in unsupported.items():
        faults.append(_no_layer(kind, without, model_sites, method, params))
    return targets, faults


def _no_layer(
    kind: type[nn.Module],
    without: Sequence[Site],
    model_sites: Sequence[Site],
    method: type[BasePeft],
    params: Any,
) -> str:
    inner = [
        site.path
        for site in model_sites
        if any(site.path.startswith(f"{outer.path}.") for outer in without)
        and not weight_is_read(site)
        and _supports(method, site.base, params)
    ]
    message = (
        f"{_some([s.path for s in without])}: {method.__name__} has no layer for {kind.__name__}"
    )
    return f"{message}; did you mean the layers inside: {_some(inner)}?" if inner else message


def _supports(method: type[BasePeft], base: nn.Module, params: Any) -> bool:
    try:
        return method.layer(base, params) is not None
    except ConfigError:
        return False


def _some(paths: Sequence[str]) -> str:
    more = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _apply(
    model: nn.Module,
    method: type[BasePeft],
    params: Any,
    adapter_name: str,
    targets: Sequence[Target],
) -> None:
    from core_plugin.adapters.layer import AdapterLayer

    # All layers are made before the first is put in, so that one that fails changes nothing.
    made: list[tuple[Site, AdapterLayer]] = []
    for target in targets:
        if target.layer_class is not None:
            layer = target.layer_class(target.site.module)
            layer.method = method
            layer.add_adapter(adapter_name, params)
            layer.check()
            made.append((target.site, layer))
        elif isinstance(target.site.module, AdapterLayer):
            target.site.module.add_adapter(adapter_name, params)
    for site, layer in made:
        for parent, name in site.places:
            setattr(parent, name, layer)
            _call_layers(parent)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, AdapterLayer) and module.method is method:
            module.activate(adapter_name)
            for _, parameter in module.adapter_parameters(adapter_name):
                parameter.requires_grad_(True)


def _call_layers(parent: nn.Module) -> None:
    """Keep a parent from reading a layer's weight, in evaluation, instead of calling the layer."""
    from torch import nn

    if isinstance(parent, nn.TransformerEncoderLayer):
        # Zero stands for an activation that torch's fused inference kernel does not know.
        parent.activation_relu_or_gelu = 0
