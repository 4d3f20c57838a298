"""Putting an adapter into a model: everything is planned and checked first, and then done."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from core_plugin.adapters.encoders import call_layers
from core_plugin.adapters.gradients import let_gradients_through
from core_plugin.adapters.layer import (
    Adapter,
    AdapterLayer,
    AdapterModule,
    ModelAdapter,
    ParameterLayer,
)
from core_plugin.adapters.plan import Plan, Target, on_meta, plan
from core_plugin.adapters.saved import SavedModule, tie_saved
from core_plugin.adapters.switch import activate, delete_adapter, train_biases
from core_plugin.adapters.tokens import tie_rows
from core_plugin.adapters.walk import modules

if TYPE_CHECKING:
    from core_plugin.types.peft import BasePeft


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A block without Python's garbage collection.

    In a large model hundreds of thousands of objects are made here, and all stay; to look among
    them for garbage, again and again, takes longer than to make them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@uncollected()
def inject(
    model: nn.Module,
    method: type[BasePeft],
    params: Any,
    name: str = "default",
    *,
    defaults: Mapping[str, Any] | None = None,
    state_dict: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    check: Callable[[], None] | None = None,
) -> nn.Module:
    """Put an adapter into a model in place, make it the active one, and freeze all else.

    The model may be on ``meta``; what depends on its values is then up to :func:`initialize`.
    Modules and parameters that the model shares stay shared.

    Args:
        model: The model; not sharded yet.
        method: The PEFT method.
        params: The method's ``Params``; never changed.
        name: What to call the adapter.
        defaults: What stands for parameters that are None.
        state_dict: The adapter's tensors by their names in a file: their modules get the adapter,
            and how they differ from ``target_modules`` is told in a warning.
        extra: What else the adapter's configuration holds.
        check: Called when the adapter is in its place, and before the base's values are changed
            for it: if it raises, the adapter is taken out again.

    Returns:
        The model itself.

    Raises:
        ConfigError: With everything that is wrong; nothing was changed.
        PluginContractError: The method's layer is not as an adapter layer has to be.
    """
    prepared = plan(model, Adapter(name, method, params, extra or {}), defaults or {}, state_dict)
    held = {name: adapter for module in prepared.held for name, adapter in module.adapters.items()}
    if held:
        warnings.warn(
            f"the model has adapters already ({', '.join(held)}); {name!r} becomes the active one, "
            "and the others stay as they are. add_adapter adds one without choosing it",
            stacklevel=3,
        )
    made = _apply(prepared, check)
    for parameter in prepared.sites.parameters:
        if parameter is not None and parameter.requires_grad:
            parameter.requires_grad = False
    activate({*prepared.held, *made}, [name], trainable=True)
    train_biases(model, [*held.values(), made[0].adapters[name]], [name])
    return model


@uncollected()
def add_adapter(
    model: nn.Module,
    method: type[BasePeft],
    params: Any,
    name: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Put another adapter into a model: neither active nor trained, and all else stays as it is.

    Arguments and errors are those of :func:`inject`.
    """
    adapter = Adapter(name, method, params, extra or {})
    for module in _apply(plan(model, adapter, defaults or {})):
        for _, _, parameter in module.adapter_parameters(name):
            parameter.requires_grad_(False)


def initialize(model: nn.Module) -> None:
    """Fill the adapters of a model whose own values are there: of one that was on ``meta``.

    After ``to_empty``, loading the model's weights and tying again what was tied, this gives every
    adapter the values that a new one has.
    """
    held = [module for _, module in modules(model)]
    for name in {name: None for module in held for name in module.adapters}:
        _tie(model, [module for module in held if name in module.adapters], name)
    for module in held:
        for part in module.modules():
            if getattr(part, "is_adapter", False):
                part.reset_parameters()  # type: ignore[operator]
        for name in module.adapters:
            module.initialize(name)


def _apply(prepared: Plan, check: Callable[[], None] | None = None) -> list[AdapterModule]:
    """Do what was planned; the modules that have a part of the new adapter."""
    for message in prepared.warnings:
        warnings.warn(message, stacklevel=4)
    name, made = prepared.adapter.name, _make(prepared)
    changed = [m for m in made if m.changes_base(m.params[name]) and not on_meta(m)]
    before = [(p, p.detach().clone()) for m in changed for p in _base_parameters(m)]
    _put_in(prepared, made)
    try:
        _tie(prepared.model, made, name)
        if check is not None:
            check()
        for module in made:
            if type(module).initialize is not AdapterModule.initialize and not on_meta(module):
                module.initialize(name)
    except BaseException:
        for parameter, value in before:
            parameter.data.copy_(value)
        with warnings.catch_warnings(action="ignore"):
            delete_adapter(prepared.model, name)
        raise
    let_gradients_through(prepared.model, prepared.sites)
    return made


def _base_parameters(module: AdapterModule) -> Iterator[nn.Parameter]:
    if isinstance(module, AdapterLayer):
        yield from module.owner.parameters(recurse=False)


def _tie(model: nn.Module, made: Sequence[AdapterModule], name: str) -> None:
    """Let what the model shares be shared in the adapter too."""
    if any(isinstance(module, SavedModule) for module in made):
        tie_saved(model, name)
    tie_rows(made, name)


def _put_in(prepared: Plan, made: Sequence[AdapterModule]) -> None:
    for target, module in zip(prepared.targets, made, strict=False):
        if target.layer_class is not None:
            _place(target, module)
    for parent in prepared.sites.parents:
        if isinstance(parent, nn.TransformerEncoder):
            call_layers(parent)
    for module in made:
        if isinstance(module, ModelAdapter) and module.child not in prepared.model._modules:
            prepared.model.add_module(module.child, module)
            module.attach(prepared.model)


def _make(prepared: Plan) -> list[AdapterModule]:
    """Make all parts of the adapter before the first is put in; one that fails undoes the rest."""
    made: list[AdapterModule] = []
    checked: set[type[AdapterModule]] = set()
    within: dict[nn.Module, AdapterLayer] = {}
    try:
        for target in prepared.targets:
            made.append(_part(target, within))
            made[-1].add(prepared.adapter, target.params)
            if type(made[-1]) not in checked:
                checked.add(type(made[-1]))
                made[-1].check(prepared.adapter.method.prefix)
        if prepared.model_adapter is not None:
            made.append(_at_the_door(prepared.model, prepared.model_adapter))
            made[-1].add(prepared.adapter, prepared.adapter.params)
            made[-1].check(prepared.adapter.method.prefix)
    except BaseException:
        for module in made:
            if prepared.adapter.name in module.adapters:
                module.remove(prepared.adapter.name)
        raise
    return made


def _part(target: Target, within: dict[nn.Module, AdapterLayer]) -> AdapterLayer:
    """The layer at a place: what is there, or a new one, outside that of another parameter."""
    held = target.site.module
    if target.layer_class is None:
        return cast("AdapterLayer", held)
    base = within.get(held, held)
    layer: AdapterLayer
    if target.parameter is not None:
        layer = cast("type[ParameterLayer]", target.layer_class)(base, target.parameter)
    else:
        layer = target.layer_class(base)
    within[held] = layer
    return layer


def _at_the_door(model: nn.Module, kind: type[ModelAdapter]) -> ModelAdapter:
    held = getattr(model, kind.child, None)
    return held if isinstance(held, kind) else kind(model)


def _place(target: Target, layer: AdapterModule) -> None:
    for parent, name in target.site.places:
        setattr(parent, name, layer)
        call_layers(parent)
