"""Parameters that name every layer of an adapter, and what its rank is there."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from core_plugin.adapters.configuration import exactly, place
from core_plugin.adapters.layer import AdapterModule, ParameterLayer
from core_plugin.adapters.walk import modules

if TYPE_CHECKING:
    from core_plugin_lora.plugin import LoRAParams

T = TypeVar("T", bound=Hashable)


def explicit(
    model: nn.Module, params: LoRAParams, at: Mapping[AdapterModule, tuple[int, float]]
) -> LoRAParams:
    """The parameters of an adapter that is in these layers alone.

    Args:
        model: The model, which has the layers.
        params: All else about the adapter.
        at: The rank and the alpha of each layer.
    """
    places = {place(path, m): m for path, m in modules(model) if m in at}
    ranks = {path: at[module][0] for path, module in places.items()}
    alphas = {path: at[module][1] for path, module in places.items()}
    rank, alpha = _most(ranks.values()), _most(alphas.values())
    parameters = [p for p, m in places.items() if isinstance(m, ParameterLayer)]
    return dataclasses.replace(
        params,
        target_modules=exactly(model, [p for p in places if p not in parameters]),
        target_parameters=parameters or None,
        exclude_modules=None,
        layers_to_transform=None,
        layers_pattern=None,
        weights=None,
        r=rank,
        lora_alpha=alpha,
        rank_pattern={p: r for p, r in ranks.items() if r != rank},
        alpha_pattern={p: a for p, a in alphas.items() if a != alpha},
    )


def _most(values: Iterable[T]) -> T:
    return collections.Counter(values).most_common(1)[0][0]
