"""Which of a model's adapters apply, and which parameters are trained."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from core_plugin.adapters.bases import bases
from core_plugin.adapters.encoders import call_kernels
from core_plugin.adapters.gradients import let_gradients_through, release
from core_plugin.adapters.layer import Adapter, AdapterLayer, AdapterModule, ModelAdapter
from core_plugin.adapters.names import BASE_LAYER
from core_plugin.adapters.saved import SavedModule
from core_plugin.adapters.tokens import TokenRows
from core_plugin.adapters.walk import adapters as adapters
from core_plugin.adapters.walk import check_names as check_names
from core_plugin.adapters.walk import modules as modules
from core_plugin.adapters.walk import own_modules
from core_plugin.errors import ConfigError
from core_plugin.tensors import is_sharded, reshard


def set_adapter(model: nn.Module, names: str | Sequence[str], trainable: bool = True) -> None:
    """Choose the adapters that apply: one, several in their order, or none.

    The parameters of the adapters that are chosen are trained, those of the others are not. The
    model's own parameters stay as they are, but for biases that an adapter trains.

    Args:
        model: A model with adapters.
        names: The adapters.
        trainable: Whether to train them; otherwise they are frozen too.

    Raises:
        ConfigError: There is no such adapter, adapters are merged, or some exclude each other;
            nothing was changed.
    """
    chosen = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
    check_names(model, chosen)
    check_unmerged(model)
    check_together(model, chosen)
    # Whole parameters, which a forward pass may have left, take what is trained from their shards.
    reshard(model)
    activate([module for _, module in modules(model)], chosen, trainable)
    train_biases(model, adapters(model).values(), chosen if trainable else ())


def activate(held: Iterable[AdapterModule], names: Sequence[str], trainable: bool) -> None:
    """Choose the adapters that apply in some modules, without any check."""
    for module in held:
        module.activate(names)
        for name in module.adapters:
            for _, _, parameter in module.adapter_parameters(name):
                parameter.requires_grad_(trainable and name in names)


def train_biases(model: nn.Module, held: Iterable[Adapter], names: Sequence[str]) -> None:
    """Train the model's own biases as the adapters of some names say, and no others of theirs."""
    for adapter in held:
        for bias in biases(model, adapter).values():
            bias.requires_grad_(adapter.name in names)


def check_unmerged(model: nn.Module) -> None:
    """Check that no adapter is merged.

    Raises:
        ConfigError: One is.
    """
    for path, module in modules(model):
        if isinstance(module, AdapterLayer) and module.merged:
            merged = ", ".join(map(repr, module.merged))
            raise ConfigError(f"the adapters {merged} are merged into {path}; unmerge them first")


def check_together(model: nn.Module, names: Sequence[str]) -> None:
    """Check that adapters can apply at once.

    Raises:
        ConfigError: With every module where they exclude each other.
    """
    faults = []
    for path, module in modules(model):
        here = [name for name in names if name in module.adapters]
        if len(here) > 1 and (reason := module.clash(here)):
            faults.append(f"{path}: {reason}")
    if faults:
        raise ConfigError(*faults)


# Training


def trains_bias(params: Any) -> bool:
    """Whether an adapter with these parameters trains biases of the model itself."""
    return getattr(params, "bias", "none") != "none"


def biases(model: nn.Module, adapter: Adapter) -> dict[str, nn.Parameter]:
    """The model's own biases that an adapter trains, by their names in a file.

    ``bias: all`` means every parameter that is called so, but for those of modules that the
    adapter has copies of; any other word but ``none`` means those of the layers it adapts.
    """
    if not trains_bias(adapter.params):
        return {}
    layers = [module for _, module in modules(model) if isinstance(module, AdapterLayer)]
    inner = {x.owner.get_submodule(name): x for x in layers for name in x.inner_layers}
    own = [x for x in layers if adapter.name in x.adapters]
    copied = {m for x in own if isinstance(x, SavedModule) for m in x.base_layer.modules()}
    adapted = {x.owner for x in own if not isinstance(x, SavedModule | TokenRows)}
    adapted |= {module for module, x in inner.items() if adapter.name in x.adapters}
    everywhere = adapter.params.bias == "all"
    return {
        ".".join(filter(None, (path, BASE_LAYER if module in inner else "", "bias"))): bias
        for path, module in own_modules(model)
        if (bias := module._parameters.get("bias")) is not None
        and (module not in copied if everywhere else module in adapted)
    }


# On and off


def warn_of_what_stays(model: nn.Module, when: str, names: Iterable[str]) -> None:
    """Warn if an adapter has changed the model itself, which it does not take back."""
    held = adapters(model)
    for name in names:
        if trains_bias(held[name].params):
            warnings.warn(
                f"the adapter {name!r} trains biases of the model itself, which keep their values "
                f"when it {when}",
                stacklevel=3,
            )
    changed = {n for _, m in modules(model) for n in m.adapters if m.changes_base(m.params[n])}
    for name in sorted(changed.intersection(names)):
        warnings.warn(
            f"the adapter {name!r} has changed the model's own weights when it was made, and they "
            f"stay so when it {when}",
            stacklevel=3,
        )


def enable_adapters(model: nn.Module) -> None:
    """Let the active adapters apply again, after :func:`disable_adapters`."""
    _reshard_merged(model)
    for _, module in modules(model):
        module.enable(True)


def disable_adapters(model: nn.Module) -> contextlib.ExitStack:
    """Let no adapter apply, from now on: the model computes as it did without any.

    What is merged is put aside too.

    Returns:
        A context. When it is left, in whatever way, the adapters that were active are so again,
        and the same parameters are trained::

            with disable_adapters(model):
                reference = model(tokens)

    Raises:
        ConfigError: Adapters were merged without keeping what was there before.
    """
    if any(base.is_lost for base in bases(model) if base.layers[0].merged):
        raise ConfigError("adapters are merged in place, and what was there before is not kept")
    warn_of_what_stays(model, "is disabled", adapters(model))
    restore = contextlib.ExitStack()
    restore.callback(_State(model).restore)
    _reshard_merged(model)
    for _, module in modules(model):
        module.enable(False)
    return restore


def _reshard_merged(model: nn.Module) -> None:
    """Let shards be in place, with which those from before a merge change places."""
    if any(isinstance(module, AdapterLayer) and module.originals for _, module in modules(model)):
        reshard(model)


class _State:
    """Which adapters apply, and what is trained, at some time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {m: (m.active, m.enabled) for _, m in modules(model)}
        self._trained = _trained(model)

    def restore(self) -> None:
        """Bring it back, for what is still there."""
        held = adapters(self._model)
        _reshard_merged(self._model)
        for _, module in modules(self._model):
            active, enabled = self._modules.get(module, (module.active, module.enabled))
            module.activate([name for name in active if name in held])
            module.enable(enabled)
        if _trained(self._model) != self._trained:
            reshard(self._model)
            for name, parameter in self._model.named_parameters():
                parameter.requires_grad_(self._trained.get(name, parameter.requires_grad))


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


# Deleting


def delete_adapter(model: nn.Module, name: str) -> None:
    """Remove an adapter; a layer without any is replaced by the model's own layer.

    The other adapters stay as they are, active or not. If the model itself is a layer with
    adapters, it stays.

    Raises:
        ConfigError: There is no such adapter, it is merged, or the model is sharded; nothing was
            changed.
    """
    check_names(model, [name])
    reshard(model)
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise ConfigError("the model is sharded; delete adapters before it is")
    held = [module for _, module in modules(model)]
    if any(isinstance(module, AdapterLayer) and name in module.merged for module in held):
        raise ConfigError(f"the adapter {name!r} is merged; unmerge it first")
    warn_of_what_stays(model, "is deleted", [name])
    if any(name in module.active for module in held):
        for bias in biases(model, adapters(model)[name]).values():
            bias.requires_grad_(False)
    for module in held:
        module.activate([n for n in module.active if n != name])
        if name in module.adapters:
            module.remove(name)
    take_out(model, [module for module in held if not module.adapters])
    if adapters(model):
        let_gradients_through(model)
    else:
        release(model)
        call_kernels(model)


def take_out(model: nn.Module, leaving: Collection[AdapterModule]) -> None:
    """Put base layers back at all the places of adapter layers, and detach what is at the door."""
    out = set(leaving)
    for _, parent in list(own_modules(model)):
        for name, child in list(parent._modules.items()):
            if isinstance(child, ModelAdapter) and child in out:
                child.detach()
                delattr(parent, name)
            elif child in out:
                setattr(parent, name, _without(child, out))


def _without(module: nn.Module | None, out: Collection[nn.Module]) -> nn.Module | None:
    while isinstance(module, AdapterLayer) and module in out:
        module = module.base_layer
    return module
