"""One adapter for each sample of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core_plugin.adapters.layer import AdapterLayer, AdapterModule
from core_plugin.adapters.switch import check_names, check_unmerged
from core_plugin.adapters.walk import modules
from core_plugin.errors import ConfigError

BASE = "__base__"
"""The name that stands for no adapter."""


@contextlib.contextmanager
def per_sample(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """For the while, apply to each sample of a batch the adapter that is named for it.

    Each layer with adapters is called once for each of them, with its samples: the parts of all
    tensors among its arguments whose first dimension is the batch. Not for training.

    Args:
        model: A model with adapters.
        names: The adapter of each sample; ``__base__`` for none.

    Raises:
        ConfigError: There is no such adapter, adapters are merged, the model is being trained, or
            a layer cannot tell samples apart. In the forward pass: a layer was given a batch of
            another size.
    """
    wanted = [name for name in dict.fromkeys(names) if name != BASE]
    check_names(model, wanted)
    check_unmerged(model)
    held = list(modules(model))
    _check(model, held, names, wanted)
    rows = _Rows(names)
    active = [(module, module.active) for _, module in held]
    own: list[tuple[AdapterModule, Any]] = []
    try:
        for module in _outermost(held, wanted):
            own.append((module, vars(module).get("forward")))
            vars(module)["forward"] = _BySample(module, rows)
        for module, _ in active:
            module.activate(())
        yield
    finally:
        for module, forward in own:
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
        for module, before in active:
            module.activate(before)


def _check(
    model: nn.Module,
    held: Sequence[tuple[str, AdapterModule]],
    names: Sequence[str],
    wanted: Sequence[str],
) -> None:
    if not names:
        raise ConfigError("no sample has an adapter: name one for each, or '__base__'")
    if model.training and torch.is_grad_enabled():
        raise ConfigError(
            "the model is in training mode; adapters that differ from sample to sample are for "
            "inference: call model.eval(), or use torch.no_grad()"
        )
    faults = [
        f"{path or 'the model'}: {type(module).__name__} cannot tell samples apart"
        for path, module in held
        if not module.samples and any(name in module.adapters for name in wanted)
    ]
    if faults:
        raise ConfigError(*faults)


def _outermost(
    held: Sequence[tuple[str, AdapterModule]], wanted: Sequence[str]
) -> Iterator[AdapterModule]:
    """The modules with an adapter that is wanted, but for those inside another such one."""
    inside: set[AdapterModule] = set()
    for _, module in held:
        if module not in inside and any(name in module.adapters for name in wanted):
            inside.update(inner for _, inner in modules(module))
            yield module


class _Rows:
    """The samples of each adapter, in the order in which the adapters come first."""

    def __init__(self, names: Sequence[str]) -> None:
        self.size = len(names)
        self.of: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            self.of.setdefault(name, []).append(row)
        joined = [row for rows in self.of.values() for row in rows]
        self._back = sorted(range(self.size), key=joined.__getitem__)
        self._on: dict[torch.device, tuple[dict[str, Tensor], Tensor]] = {}

    def on(self, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
        """The samples of each adapter; and where each sample is, once they are joined again."""
        if device not in self._on:
            rows = {name: torch.tensor(rows, device=device) for name, rows in self.of.items()}
            self._on[device] = rows, torch.tensor(self._back, device=device)
        return self._on[device]


class _BySample:
    """A layer's forward, called once for each adapter with that one's samples."""

    def __init__(self, layer: AdapterModule, rows: _Rows) -> None:
        forward = layer.forward
        self._forward: Callable[..., Any] = (
            forward._forward if isinstance(forward, _BySample) else forward
        )
        self._kind = type(layer.base_layer if isinstance(layer, AdapterLayer) else layer).__name__
        self._layers = [module for _, module in modules(layer)]
        self._rows = rows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's forward."""
        self._check(args, kwargs)
        parts = []
        for name in self._rows.of:
            for layer in self._layers:
                layer.activate(() if name == BASE else (name,))
            if len(self._rows.of) == 1:
                return self._forward(*args, **kwargs)
            own_args, own_kwargs = self._part(name, (args, kwargs))
            parts.append(self._forward(*own_args, **own_kwargs))
        return pytree.tree_map(lambda *leaves: self._join(leaves), *parts)

    def _check(self, args: Any, kwargs: Any) -> None:
        tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        shape = next((list(tensor.shape) for tensor in tensors), [])
        if shape[:1] != [self._rows.size]:
            raise ConfigError(
                f"adapters are named for {self._rows.size} samples, and {self._kind} was called "
                f"with an input of shape {shape}, whose first dimension has to be the batch"
            )

    def _part(self, name: str, tree: Any) -> Any:
        """Arguments for the samples of one adapter."""
        return pytree.tree_map(
            lambda x: (
                x.index_select(0, self._rows.on(x.device)[0][name])
                if isinstance(x, Tensor) and x.shape[:1] == (self._rows.size,)
                else x
            ),
            tree,
        )

    def _join(self, leaves: Sequence[Any]) -> Any:
        """One result of all samples, from those of each adapter's."""
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        counts = [len(rows) for rows in self._rows.of.values()]
        if [leaf.shape[:1] for leaf in leaves] != [(count,) for count in counts]:
            raise ConfigError(
                f"{self._kind} gives a tensor of shape {list(leaves[0].shape)}, whose first "
                f"dimension is not that of its {counts[0]} samples"
            )
        return torch.cat([*leaves]).index_select(0, self._rows.on(leaves[0].device)[1])
