"""The adapters that a model has, and the modules that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from core_plugin.adapters.layer import Adapter, AdapterModule
from core_plugin.adapters.names import BASE_LAYER
from core_plugin.errors import ConfigError
from core_plugin.params import near
from core_plugin.tensors import WRAPPERS

_Step = tuple["_Step | None", str, nn.Module]
"""A module on the way through a model: its parent's step, its name there, and itself."""


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A model's modules with their paths, in its order, without what belongs to adapters.

    A module that is used at several places comes once.
    """
    return ((_path(step), step[2]) for step in _steps(model))


def modules(model: nn.Module) -> Iterator[tuple[str, AdapterModule]]:
    """The modules that hold parts of adapters, with their paths; a layer's inner ones after it."""
    for step in _steps(model):
        if isinstance(step[2], AdapterModule):
            yield _path(step), step[2]


def own_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """A model's parameters without those of adapters; a tied one may come more than once."""
    for _, _, module in _steps(model):
        yield from (p for p in module._parameters.values() if p is not None)


def _steps(model: nn.Module) -> Iterator[_Step]:
    """Every module once. Paths are not made here: most of them nobody needs."""
    seen: set[nn.Module] = set()
    waiting: list[_Step] = [(None, "", model)]
    while waiting:
        step = waiting.pop()
        module = step[2]
        if module in seen:
            continue
        seen.add(module)
        yield step
        if children := module._modules:
            if isinstance(module, AdapterModule):
                children = {n: child for n, child in children.items() if n == BASE_LAYER}
            waiting += [(step, n, c) for n, c in reversed(children.items()) if c is not None]


def _path(step: _Step) -> str:
    names = []
    while step[0] is not None:
        if step[1] not in WRAPPERS:
            names.append(step[1])
        step = step[0]
    return ".".join(reversed(names))


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """A model's adapters by name."""
    return {name: a for _, module in modules(model) for name, a in module.adapters.items()}


def check_names(model: nn.Module, names: Sequence[str]) -> None:
    """Check that a model has adapters of these names.

    Raises:
        ConfigError: With every name that it has not.
    """
    there = adapters(model)
    has = f"it has {', '.join(map(repr, there))}" if there else "it has none"
    faults = [
        f"the model has no adapter called {name!r}; "
        + (f"did you mean {close}?" if (close := near(name, there)) else has)
        for name in dict.fromkeys(names)
        if name not in there
    ]
    if faults:
        raise ConfigError(*faults)
