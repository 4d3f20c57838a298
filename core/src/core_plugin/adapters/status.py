"""What adapters a model has: for people, and for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from core_plugin.adapters.layer import AdapterLayer, AdapterModule
from core_plugin.adapters.saved import SavedModule
from core_plugin.adapters.tokens import TokenRows
from core_plugin.adapters.walk import modules


@dataclasses.dataclass(frozen=True)
class Part:
    """A module's part of an adapter."""

    module: str
    kind: str
    """The type of the model's own layer, or of what stands at the model's door."""
    adapter: str
    settings: Mapping[str, Any]
    """What the adapter's patterns decide here, such as ``r`` and ``lora_alpha``."""
    parameters: int
    active: bool
    merged: bool


def parts(model: nn.Module) -> list[Part]:
    """Every part of every adapter, in the model's order."""
    return [
        Part(
            module=path,
            kind=_kind(module),
            adapter=name,
            settings=_settings(module, name),
            parameters=sum(p.numel() for _, _, p in module.adapter_parameters(name)),
            active=name in module.used,
            merged=name in getattr(module, "merged", ()),
        )
        for path, module in modules(model)
        for name, adapter in module.adapters.items()
    ]


def _kind(module: AdapterModule) -> str:
    return type(module.base_layer if isinstance(module, AdapterLayer) else module).__name__


def _settings(module: AdapterModule, name: str) -> dict[str, Any]:
    if isinstance(module, SavedModule | TokenRows):
        return {}
    fields = module.adapters[name].method.patterns.values()
    return {field: getattr(module.params[name], field) for field in fields}
