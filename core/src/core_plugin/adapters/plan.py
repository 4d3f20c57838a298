"""What an injection would do, found out and checked before anything is changed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from core_plugin.adapters.layer import (
    Adapter,
    AdapterLayer,
    AdapterModule,
    ModelAdapter,
    ParameterLayer,
)
from core_plugin.adapters.matching import Choice, choose
from core_plugin.adapters.names import BASE_LAYER, SAVED, base_name, canonical_name
from core_plugin.adapters.rules import some
from core_plugin.adapters.saved import SavedModule
from core_plugin.adapters.switch import trains_bias
from core_plugin.adapters.tokens import TokenRows, with_tied
from core_plugin.adapters.tree import Site, Sites, weight_is_read
from core_plugin.errors import ConfigError, PluginContractError
from core_plugin.params import near
from core_plugin.tensors import is_sharded

if TYPE_CHECKING:
    from core_plugin.types.peft import BasePeft


@dataclasses.dataclass(frozen=True)
class Target:
    """A place for an adapter."""

    site: Site
    layer_class: type[AdapterLayer] | None
    """The class of the layer to make there; None if there is one."""
    params: Any
    """The parameters that the layer's part of the adapter is made with."""
    parameter: str | None = None
    """The parameter of the module that is adapted, if it is not the module."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """An injection that can be done."""

    model: nn.Module
    sites: Sites
    """The model's modules."""
    held: Sequence[AdapterModule]
    """Those that have parts of adapters already."""
    adapter: Adapter
    targets: Sequence[Target]
    model_adapter: type[ModelAdapter] | None
    warnings: Sequence[str]


def plan(
    model: nn.Module,
    adapter: Adapter,
    defaults: Mapping[str, Any],
    state_dict: Mapping[str, Any] | None = None,
) -> Plan:
    """Find the places for an adapter and check everything; the model is not changed.

    Raises:
        ConfigError: With everything that is wrong.
        PluginContractError: A layer class of the method is none.
    """
    method, params = adapter.method, adapter.params
    if not isinstance(params, method.Params):
        raise TypeError(
            f"{method.__name__} has parameters of the type {method.Params.__name__}, got {params!r}"
        )
    model_sites = Sites(model)
    held = [*_held(model, model_sites)]
    faults = [*_name_faults(adapter.name), *_model_faults(held, adapter)]
    faults += _site_faults(model_sites)
    warnings = list(_name_warnings(adapter.name, model_sites))
    targets: list[Target] = []
    rule_faults: list[str] = []
    door = method.model_adapter()
    if door is not None:
        reason = door.fault(model, params)
        if isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            reason = f"a {type(model).__name__} takes each of its modules for a part of the model"
        faults += [reason] if reason else []
    else:
        choice = choose(model_sites, params, method.patterns, defaults)
        rule_faults = list(choice.faults)
        warnings += choice.warnings
        if state_dict is not None:
            found = _StateDict(state_dict, method, model_sites, choice)
            faults += found.faults
            warnings += found.differences(choice)
            choice = dataclasses.replace(choice, targets=found.targets)
        adapter = dataclasses.replace(adapter, params=choice.params)
        targets, layer_faults = _Planner(method, model_sites).targets(choice)
        faults += layer_faults
        faults += _changed_bases(targets, held, model_sites)
    faults = [f"peft: {fault}" for fault in faults] + rule_faults
    if faults:
        raise ConfigError("\n".join(faults))
    return Plan(model, model_sites, held, adapter, targets, door, warnings)


def _name_faults(name: str) -> Iterator[str]:
    if not name or "." in name:
        yield f"an adapter's name has no dots and is not empty, got {name!r}"
    elif hasattr(nn.ModuleDict(), name) or hasattr(nn.ParameterDict(), name):
        yield f"an adapter cannot be called {name!r}, which torch's containers use"


def _name_warnings(name: str, model_sites: Sites) -> Iterator[str]:
    for site in model_sites.called.get(name, ())[:1]:
        yield (
            f"the adapter {name!r} has the name of a module ({site.path}); it works, but other "
            "readers of its names may take one for the other"
        )


def _held(model: nn.Module, model_sites: Sites) -> Iterator[AdapterModule]:
    for module in (model, *model_sites.adapted):
        inner: nn.Module = module
        while isinstance(inner, AdapterModule):
            yield inner
            inner = inner.base_layer if isinstance(inner, AdapterLayer) else nn.Identity()


def _model_faults(held: Sequence[AdapterModule], adapter: Adapter) -> Iterator[str]:
    there, method = {n: a for m in held for n, a in m.adapters.items()}, adapter.method
    if adapter.name in there:
        yield f"the model has an adapter called {adapter.name!r} already"
    for other in {a.method: None for a in there.values() if a.method is not method}:
        names = f"{_described(other)} and {_described(method)}"
        if other.prefix == method.prefix:
            yield f"{names} both use the prefix {method.prefix!r}; one has to choose another"
        elif not (other.mixes and method.mixes):
            yield f"{names} cannot be in one model: not both say that they mix"
    biased = [a.name for a in there.values() if trains_bias(a.params)]
    if biased and trains_bias(adapter.params):
        yield f"bias: only one adapter can train the model's own biases, and {biased[0]!r} does"
    if any(isinstance(m, AdapterLayer) and m.merged for m in held):
        yield "adapters are merged into the model; unmerge them first"


def _site_faults(model_sites: Sites) -> Iterator[str]:
    for name in (BASE_LAYER, SAVED):
        for site in model_sites.called.get(name, ()):
            yield f"{site.path}: {name!r} is a name that adapter layers use"
    kinds = dict(zip(map(type, model_sites.parameters), model_sites.parameters, strict=True))
    if any(is_sharded(parameter) for parameter in kinds.values()):
        yield "the model is sharded already; inject adapters before it is"


def _changed_bases(
    targets: Sequence[Target], held: Sequence[AdapterModule], model_sites: Sites
) -> Iterator[str]:
    """What is wrong with adapters whose initialisation changes the model's own weights."""
    for module in held:
        if any(module.changes_base(module.params[name]) for name in module.adapters):
            yield "the model has an adapter that changed its weights when it was made; keep to that"
            return
    changing = [t for t in targets if _layer_of(t).changes_base(t.params)]
    if changing and held:
        yield "a new adapter would change the weights that the adapters of the model work on"
    if changing:
        owned = [id(p) for p in model_sites.parameters if p is not None]
        shared = {key for key, count in Counter(owned).items() if count > 1}
        for target in changing:
            if not shared.isdisjoint(map(id, target.site.base._parameters.values())):
                yield f"{target.site.path}: a new adapter would change a weight that others share"


def _layer_of(target: Target) -> type[AdapterLayer]:
    return target.layer_class or cast("type[AdapterLayer]", type(target.site.module))


def _described(method: type[BasePeft]) -> str:
    return f"{method.__module__}.{method.__qualname__}"


class _StateDict:
    """The modules that a file's tensors are for."""

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        method: type[BasePeft],
        model_sites: Sequence[Site],
        choice: Choice,
    ) -> None:
        by_path = {path: site for site in model_sites for path in site.paths}
        read = {p: p.rpartition(".")[0] for p, s in by_path.items() if weight_is_read(s)}
        found = (base_name(path) for path in _layer_paths(state_dict, method.prefix))
        paths = dict.fromkeys(read.get(path, path) for path in found)
        missing = [path for path in paths if path not in by_path]
        self.faults = [
            f"the state dict is for {path}, which the model has not"
            + (f"; did you mean {close}?" if (close := near(path, by_path)) else "")
            for path in missing
        ]
        if not paths:
            self.faults.append(
                f"the state dict has no tensor whose name has the prefix {method.prefix!r}"
            )
        owners = {site for site, _ in choice.parameters}  # of these the parameters have adapters
        chosen = dict.fromkeys(by_path[path] for path in paths if path in by_path)
        self.targets = [site for site in chosen if site not in owners]

    def differences(self, choice: Choice) -> Iterator[str]:
        """How what the parameters mean differs from the state dict, which is followed."""
        here, there = {s.path for s in self.targets}, {s.path for s in choice.targets}
        lines = [f"{path}: only in the state dict" for path in sorted(here - there)]
        lines += [f"{path}: only in the parameters" for path in sorted(there - here)]
        if lines:
            yield "the state dict and target_modules differ:" + "".join(f"\n  - {x}" for x in lines)


def _layer_paths(state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
    from core_plugin.adapters.names import FILE_PREFIX

    for name in state_dict:
        parts = canonical_name(name.removeprefix(FILE_PREFIX)).split(".")
        own = next((i for i, part in enumerate(parts) if part.startswith(prefix)), 0)
        if own:
            yield ".".join(parts[:own])


class _Planner:
    """Decides, once for each type of base layer, which layer it gets."""

    def __init__(self, method: type[BasePeft], model_sites: Sequence[Site]) -> None:
        self._method = method
        self._sites = model_sites
        self._classes: dict[type, type[AdapterLayer] | None] = {}
        self._faults: list[str] = []
        self._unsupported: dict[type[nn.Module], list[Site]] = {}

    def targets(self, choice: Choice) -> tuple[list[Target], list[str]]:
        """What to do at each place; and for those at which nothing can be done, why."""
        targets = [t for s in choice.targets if (t := self._module(s, choice.params_of(s)))]
        for site, name in choice.parameters:
            if target := self._parameter(site, name, choice.params_of(site, name)):
                targets.append(target)
        if getattr(choice.params, "ensure_weight_tying", False):
            self._faults += _tied_targets(targets)
        targets += [self._own(SavedModule, site, choice.params) for site in choice.saved]
        tokens = with_tied(choice.tokens, self._sites)
        targets += [self._own(TokenRows, site, rows) for site, rows in tokens]
        for kind, without in self._unsupported.items():
            self._faults.append(self._no_layer(kind, without))
        return targets, self._faults

    def _class(self, kind: type) -> type[AdapterLayer] | None:
        if kind not in self._classes:
            self._classes[kind] = layer_class(self._method, kind)
        return self._classes[kind]

    def _module(self, site: Site, params: Any) -> Target | None:
        held = site.module
        if isinstance(held, AdapterLayer):
            # An adapter of the same layer class joins it; anything else is no place for one.
            if type(held) is self._class(type(held.base_layer)):
                return Target(site, None, params)
            self._faults.append(f"{site.path} has a {type(held).__name__} of another adapter")
        elif weight_is_read(site):
            self._faults.append(
                f"{site.path} is never called: nn.MultiheadAttention reads its weight"
            )
        elif (chosen := self._class(type(held))) is None:
            self._unsupported.setdefault(type(held), []).append(site)
        elif reason := chosen.fault(held, params):
            self._faults.append(f"{site.path}: {reason}")
        else:
            return Target(site, chosen, params)
        return None

    def _parameter(self, site: Site, name: str, params: Any) -> Target | None:
        chosen, held = cast("type[ParameterLayer] | None", self._class(nn.Parameter)), site.module
        while isinstance(held, ParameterLayer) and held.parameter != name:
            held = held.base_layer
        if chosen is None:
            self._faults.append(
                f"{site.path}.{name}: {self._method.__name__} has no layer for parameters"
            )
        elif isinstance(held, ParameterLayer):
            return Target(dataclasses.replace(site, module=held), None, params, name)
        elif isinstance(held, AdapterLayer):
            self._faults.append(f"{site.path} has a {type(held).__name__} of another adapter")
        elif reason := chosen.fault(site.base, params, name):
            self._faults.append(f"{site.path}.{name}: {reason}")
        else:
            return Target(site, chosen, params, name)
        return None

    def _own(self, layer: type[AdapterLayer], site: Site, params: Any) -> Target:
        if isinstance(site.module, layer):
            return Target(site, None, params)
        if isinstance(site.module, AdapterLayer):
            kind = type(site.module).__name__
            self._faults.append(f"{site.path} has a {kind} of another adapter")
        elif any(isinstance(inner, AdapterModule) for inner in site.module.modules()):
            self._faults.append(f"{site.path} has layers of another adapter inside")
        elif reason := layer.fault(site.module, params):
            self._faults.append(f"{site.path}: {reason}")
        return Target(site, layer, params)

    def _no_layer(self, kind: type[nn.Module], without: Sequence[Site]) -> str:
        inner = [
            site.path
            for site in self._sites
            if any(site.path.startswith(f"{outer.path}.") for outer in without)
            and not weight_is_read(site)
            and self._class(type(site.base)) is not None
        ]
        message = (
            f"{some([s.path for s in without])}: {self._method.__name__} has no layer for "
            f"{kind.__name__}"
        )
        return f"{message}; did you mean the layers inside: {some(inner)}?" if inner else message


def _tied_targets(targets: Sequence[Target]) -> Iterator[str]:
    first: dict[int, str] = {}
    for target in targets:
        weight = getattr(target.site.base, "weight", None)
        if isinstance(weight, nn.Parameter):
            path = first.setdefault(id(weight), target.site.path)
            if path != target.site.path:
                yield (
                    f"{path} and {target.site.path} have one weight, and ensure_weight_tying keeps "
                    "saved modules tied, but no adapters; adapt one of them"
                )


def layer_class(method: type[BasePeft], kind: type) -> type[AdapterLayer] | None:
    """A method's layer class for a type of base layer.

    Raises:
        PluginContractError: What the method gives is no adapter layer.
    """
    found = method.layer_class(kind)
    if found is None:
        return None
    wanted = ParameterLayer if kind is nn.Parameter else AdapterLayer
    if not (isinstance(found, type) and issubclass(found, wanted)):
        lacks = [f"derives from {wanted.__name__}"]
    else:
        lacks = [n for n in ("add_adapter", "forward") if getattr(found, n) is _inherited(n)]
    if lacks:
        raise PluginContractError(
            f"{_described(method)}: its layer for {kind.__name__}, {found!r}, lacks: "
            f"{', '.join(lacks)}"
        )
    return found


def _inherited(name: str) -> Any:
    return getattr(AdapterLayer, name)


def on_meta(module: nn.Module) -> bool:
    """Whether a module has a tensor on ``meta``."""
    tensors: Iterator[torch.Tensor] = iter((*module.parameters(), *module.buffers()))
    return any(tensor.is_meta for tensor in tensors)
