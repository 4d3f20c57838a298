"""EVA: adapters that begin with the directions in which their layers' inputs vary most.

Explained Variance Adaptation, https://arxiv.org/abs/2410.07170.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from core_plugin.adapters.switch import check_unmerged, disable_adapters, take_out
from core_plugin.adapters.walk import adapters, check_names, modules
from core_plugin.errors import ConfigError
from core_plugin.tensors import copy_full, is_sharded
from core_plugin.types.model import IGNORED
from core_plugin_lora.linear import LoRALinear
from core_plugin_lora.places import explicit

if TYPE_CHECKING:
    from core_plugin_lora.plugin import LoRAParams


ROUNDING = 1e-12
"""What the rounding of float32 makes of a square, and more, as a share of it."""


@torch.no_grad()
def initialize_eva(
    model: nn.Module,
    batches: Iterable[Any],
    name: str = "default",
    *,
    rho: float = 2.0,
    forward: Callable[[nn.Module, Any], object] | None = None,
) -> None:
    """Initialise an adapter's linear layers by what the model's inputs are, and share out ranks.

    A gets the principal directions of a layer's inputs, B zeros: the model computes what it did
    without the adapter. The sum of the ranks stays; layers whose inputs vary in fewer directions
    get less of it, and one that gets none loses the adapter. Scalings stay. Call it before the
    optimizer is made, since ranks that change make new parameters.

    It keeps a matrix ``[in, in]`` in float64 for each distinct input of a layer.

    Args:
        model: A model with the adapter, and real tensors. If it is sharded, ``rho`` has to be 1.
        batches: Batches like those of the training; on several ranks the same ones. Where a batch
            is a mapping with ``attention_mask`` or ``labels``, only positions that are attended to
            and supervised count.
        name: The adapter.
        rho: The most that a layer's rank can grow by, as a factor; 1 leaves all ranks.
        forward: Runs the model on a batch: ``forward(model, batch)``. Unless given, a mapping's
            items are keyword arguments and a sequence's positional ones.

    Raises:
        ConfigError: There is no such adapter, it has no linear layer, no batch was given, or the
            ranks would have to change in a sharded model; nothing was changed.
    """
    check_names(model, [name])
    layers = {
        path: module
        for path, module in modules(model)
        if isinstance(module, LoRALinear) and name in module.adapters
    }
    _check(model, name, layers, rho)
    inputs = _Inputs(layers.values())
    with inputs.watched(model):
        for batch in batches:
            inputs.kept = _kept(batch)
            (forward or _forward)(model, batch)
    _check_seen(layers, inputs.of)
    most = {layer: round(layer.params[name].r * rho) for layer in inputs.of}
    found = {spread: spread.directions(max(most.values())) for spread in {*inputs.of.values()}}
    directions = {layer: found[spread] for layer, spread in inputs.of.items()}
    shares = {layer: shares[: most[layer]] for layer, (shares, _) in directions.items()}
    ranks = _ranks(name, shares)
    _check_sharded(name, ranks)
    _change_ranks(model, name, ranks)
    for layer in (layer for layer, rank in ranks.items() if rank):
        ((down, up),) = layer.factors(name)
        copy_full(down, directions[layer][1][: ranks[layer]].to(down.dtype))
        up.zero_()
        layer.initialize(name)


def _check(model: nn.Module, name: str, layers: Mapping[str, LoRALinear], rho: float) -> None:
    wanted = adapters(model)[name].params.init_lora_weights
    if wanted != "eva":
        raise ConfigError(f"{name!r} has init_lora_weights={wanted!r}; EVA is for 'eva'")
    if not layers:
        raise ConfigError(f"{name!r} has no linear layer, and EVA is for those alone")
    if not (math.isfinite(rho) and rho >= 1):
        raise ConfigError(f"rho is a factor of at least 1, got {rho!r}")
    check_unmerged(model)


def _check_seen(layers: Mapping[str, LoRALinear], seen: Mapping[LoRALinear, _Spread]) -> None:
    if not any(spread.count for spread in seen.values()):
        raise ConfigError("no batch reached a layer of the adapter")
    if unseen := [path for path, layer in layers.items() if layer not in seen]:
        warnings.warn(
            f"{len(unseen)} layers got no inputs and stay as they are: {', '.join(unseen[:3])}",
            stacklevel=3,
        )


def _check_sharded(name: str, ranks: Mapping[LoRALinear, int]) -> None:
    changed = [layer for layer, rank in ranks.items() if rank != layer.params[name].r]
    if any(is_sharded(layer.factors(name)[0][0]) for layer in changed):
        raise ConfigError("the model is sharded, so ranks cannot change: call it with rho=1")


# What the layers' inputs are


class _Inputs:
    """Watches what layers are called with."""

    def __init__(self, layers: Iterable[LoRALinear]) -> None:
        self.layers = list(layers)
        self.of: dict[LoRALinear, _Spread] = {}
        """The inputs of each layer; layers with the same ones share an entry."""
        self.kept: Tensor | None = None
        """Which positions of the batch count; None: all."""
        self._last: tuple[Tensor, int, _Spread] | None = None

    @contextlib.contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Watch while the model runs without adapters, as in evaluation."""
        training = [module for module in model.modules() if module.training]
        with contextlib.ExitStack() as stack:
            stack.enter_context(disable_adapters(model))
            for layer in self.layers:
                stack.callback(layer.register_forward_pre_hook(self._see).remove)
            model.eval()
            try:
                yield
            finally:
                for module in training:
                    module.training = True

    def _see(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        layer, x = cast("LoRALinear", module), args[0]
        if self._last is not None and self._last[0] is x and self._last[1] == x._version:
            spread = self._last[2]
            if self.of.setdefault(layer, spread) is spread:
                return
        spread = self.of.setdefault(layer, _Spread(x))
        rows = self.kept
        spread.add(x if rows is None or rows.shape != x.shape[:-1] else x[rows])
        self._last = (x, x._version, spread)


class _Spread:
    """How vectors spread around their mean: sums over all that were added."""

    def __init__(self, like: Tensor) -> None:
        width = like.shape[-1]
        self.count = 0
        self.total = torch.zeros(width, device=like.device, dtype=torch.float64)
        self.products = torch.zeros(width, width, device=like.device, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Add vectors ``[..., width]``."""
        rows = x.reshape(-1, x.shape[-1]).double()
        self.count += len(rows)
        self.total += rows.sum(0)
        self.products.addmm_(rows.T, rows)

    def directions(self, most: int) -> tuple[Tensor, Tensor]:
        """The directions of the most variance, as rows, and the share of each, falling."""
        covariance = self.products - torch.outer(self.total, self.total) / max(self.count, 1)
        variances, columns = torch.linalg.eigh(covariance)
        # Below that, it is what rounding makes of inputs that do not vary.
        floor = ROUNDING * self.products.trace()
        variances = torch.where(variances > floor, variances, 0).flip(0)
        rows = columns.T.flip(0)[:most]
        # The sign is free: the largest entry of each row is positive.
        largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
        shares = variances[:most] / variances.sum().clamp(min=torch.finfo().tiny)
        return shares, rows * largest.sign()


def _kept(batch: Any) -> Tensor | None:
    if not isinstance(batch, Mapping):
        return None
    kept = batch.get("attention_mask")
    kept = None if kept is None else kept.bool()
    if (labels := batch.get("labels")) is not None:
        supervised = labels != IGNORED
        kept = supervised if kept is None else kept & supervised
    return kept


def _forward(model: nn.Module, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


# Ranks


def _ranks(name: str, shares: Mapping[LoRALinear, Tensor]) -> dict[LoRALinear, int]:
    """As many of the largest shares as there are ranks, counted by layer."""
    every = [(share, layer) for layer, own in shares.items() for share in own.tolist()]
    every.sort(key=lambda pair: pair[0], reverse=True)
    counts = Counter(layer for _, layer in every[: sum(layer.params[name].r for layer in shares)])
    return {layer: counts[layer] for layer in shares}


def _change_ranks(model: nn.Module, name: str, ranks: Mapping[LoRALinear, int]) -> None:
    """Make the adapter's part anew where its rank changes, and tell the adapter."""
    for layer, rank in ranks.items():
        params = layer.params[name]
        if rank == 0:
            layer.remove(name)
        elif rank != params.r:
            factor = rank / params.r
            alpha = params.lora_alpha * (math.sqrt(factor) if params.use_rslora else factor)
            _remake(layer, name, dataclasses.replace(params, r=rank, lora_alpha=alpha))
    take_out(model, [layer for layer in ranks if not layer.adapters])
    held = [module for _, module in modules(model) if name in module.adapters]
    own = {m: m.params[name] for m in held if m.prefix is None}
    adapter = adapters(model)[name]
    params = explicit(model, adapter.params, {m: (p.r, p.lora_alpha) for m, p in own.items()})
    adapter = dataclasses.replace(adapter, params=params)
    for module in held:
        module.adapters[name] = adapter


def _remake(layer: LoRALinear, name: str, params: LoRAParams) -> None:
    adapter, active = layer.adapters[name], layer.active
    trained = any(p.requires_grad for _, _, p in layer.adapter_parameters(name))
    layer.remove(name)
    layer.add(adapter, params)
    layer.activate(active)
    for _, _, parameter in layer.adapter_parameters(name):
        parameter.requires_grad_(trained)
