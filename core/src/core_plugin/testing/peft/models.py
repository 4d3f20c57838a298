"""Models for a method, with and without an adapter; every call makes a new one, always the same."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from core_plugin.adapters import add_adapter, inject, modules
from core_plugin.adapters.layer import AdapterLayer
from core_plugin.testing.peft.bases import BASES, Alone, normal, token_ids
from core_plugin.testing.peft.networks import (
    TARGET_PARAMETERS,
    TARGETS,
    VOCABULARY,
    Network,
    decoder,
)
from core_plugin.testing.peft.subject import CAPABILITIES
from core_plugin.testing.processes import NotHereError
from core_plugin.types.peft import ADAPTER, BasePeft

OTHER = "other"
"""The name of a second adapter."""


class Models:
    """Makes models.

    A method that changes layers gets a network with layers of every type; one that adapts a model
    at its door gets core's decoder.

    Args:
        method: The method.
        params: Its parameters; what they say of targets and of dropout is replaced.
        suits: Whether layers of a class are to be in a network's adapter.
    """

    def __init__(
        self,
        method: type[BasePeft],
        params: Any,
        suits: Callable[[type[AdapterLayer]], bool] = lambda layer: True,
    ) -> None:
        self.method = method
        self.params = dataclasses.replace(params, **dict.fromkeys(dropouts(params), 0.0))
        self.changes_layers = bool(method.layers())
        self._suits = suits

    def having(self, capability: str) -> Models:
        """Models whose adapters are in layers that can do something, as far as there are any."""
        return Models(self.method, self.params, CAPABILITIES[capability])

    # One layer

    def layer(self, base: str, dtype: torch.dtype = torch.float32) -> Alone:
        """A model that is one layer, without an adapter, in evaluation."""
        with seeded(0):
            return Alone(BASES[base].make()).to(dtype).eval()

    def adapted_layer(
        self, base: str, dtype: torch.dtype = torch.float32, *, fresh: bool = False, **changes: Any
    ) -> Alone:
        """As :meth:`layer`, with an adapter, which has been trained unless it is to be fresh."""
        model = self.layer(base, dtype)
        parameter = BASES[base].layer_type == "Parameter"
        target = {"target_parameters": ["layer.weight"]} if parameter else {}
        places = {"target_modules": [] if parameter else ["layer"], **target}
        params = dataclasses.replace(self.params, **places, **changes)
        self._refuse(model, base, params)
        with seeded(1):
            inject(model, self.method, params)
        return model if fresh else shaken(model)

    def _refuse(self, model: Alone, base: str, params: Any) -> None:
        layer_class = self.method.layer_class(getattr(nn, BASES[base].layer_type))
        assert layer_class is not None
        if reason := layer_class.fault(model.layer, params):
            raise NotHereError(f"the method refuses this layer: {reason}")

    @staticmethod
    def layer_input(base: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """What to call the layer with."""
        made = BASES[base].input()
        return made if BASES[base].takes_numbers else made.to(dtype)

    # A network

    def network(self, *, dtype: torch.dtype = torch.float32, **options: bool) -> nn.Module:
        """The network without an adapter, in evaluation; options are those of the network."""
        with seeded(0):
            model = Network(**options) if self.changes_layers else decoder(**options)
        return model.to(dtype).eval()

    def adapted(
        self,
        model: nn.Module | None = None,
        name: str = ADAPTER,
        *,
        seed: int = 1,
        fresh: bool = False,
        **changes: Any,
    ) -> nn.Module:
        """A network with an adapter, which has been trained unless it is to be fresh.

        Args:
            model: The network, which is changed in place; a new one if None.
            name: What to call the adapter.
            seed: Another one gives an adapter of other values.
            fresh: Whether it is as new.
            changes: What its parameters have in place of their own.
        """
        model = self.network() if model is None else model
        with seeded(seed):
            inject(model, self.method, dataclasses.replace(self.targeted, **changes), name)
        return model if fresh else shaken(model, name, seed)

    def add(self, model: nn.Module, name: str = OTHER, *, fresh: bool = False) -> None:
        """Give a network that has an adapter another one, of seed 2, which is not active."""
        with seeded(2):
            add_adapter(model, self.method, self.targeted, name)
        if not fresh:
            shaken(model, name, 2)

    @functools.cached_property
    def targeted(self) -> Any:
        """The method's parameters, for every layer of the network that it has a layer for."""
        if not self.changes_layers:
            return self.params
        has = [layer_type for layer_type in TARGETS if self._has(layer_type)]
        places: dict[str, Any] = {"target_modules": [name for t in has for name in TARGETS[t]]}
        if self._has("Parameter"):
            places["target_parameters"] = TARGET_PARAMETERS
        return dataclasses.replace(self.params, **places)

    def _has(self, layer_type: str) -> bool:
        """Whether layers of a type are to be in a network's adapter, and can be."""
        layer_class = self.method.layer_class(getattr(nn, layer_type))
        if layer_class is None or not self._suits(layer_class):
            return False
        make = next(base.make for base in BASES.values() if base.layer_type == layer_type)
        with torch.device("meta"):
            return layer_class.fault(make(), self.params) is None

    @staticmethod
    def ids(batch: int = 4, length: int = 5, seed: int = 0) -> Tensor:
        """What to call a network with."""
        return token_ids(VOCABULARY, batch, length, seed=seed)


def dropouts(params: Any) -> list[str]:
    """The fields of a method's parameters that are the probability of a dropout."""
    return [
        field.name
        for field in dataclasses.fields(params)
        if "dropout" in field.name and isinstance(getattr(params, field.name), float | int)
    ]


def shaken(model: Any, name: str = ADAPTER, seed: int = 1) -> Any:
    """Move every parameter of an adapter, as training would; the model is given back."""
    with torch.no_grad():
        for number, (_, module) in enumerate(modules(model)):
            for index, (_, _, parameter) in enumerate(module.adapter_parameters(name)):
                noise = normal(*parameter.shape, seed=10_000 * seed + 100 * number + index)
                parameter.add_(0.05 * noise.to(parameter))
    return model


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of a seed; those of the process go on afterwards as if nothing was drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
