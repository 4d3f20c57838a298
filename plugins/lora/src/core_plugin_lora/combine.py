"""A new adapter that does what several adapters do together, each with a weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from core_plugin.adapters.inject import add_adapter
from core_plugin.adapters.layer import AdapterModule
from core_plugin.adapters.walk import adapters as adapters_of
from core_plugin.adapters.walk import check_names, modules
from core_plugin.errors import ConfigError
from core_plugin.tensors import is_sharded
from core_plugin_lora.places import explicit
from core_plugin_lora.plugin import LoRA, LoRAParams

Combination = Literal["cat", "svd", "linear"]
Factors = tuple[Tensor, Tensor]
"""A ``[..., r, in]`` and B ``[..., out, r]``; the update is ``B A``."""


@torch.no_grad()
def add_weighted_adapter(
    model: nn.Module,
    adapters: Sequence[str],
    weights: Sequence[float],
    name: str,
    combination: Combination = "svd",
    svd_rank: int | None = None,
) -> None:
    """Add an adapter whose update of each layer is the weighted sum of other adapters' updates.

    It is not active yet, and not trained. Its scaling is 1 at every layer; ``rank_pattern`` tells
    where its rank differs. A layer that some of the adapters do not have gets the others' sum.

    Args:
        model: A model with the adapters; not sharded.
        adapters: Their names.
        weights: One for each; any finite numbers.
        name: What to call the new one.
        combination: ``cat`` is exact; the ranks add up. ``svd`` gives the best update of rank
            ``svd_rank``, which is exact where that is at least the sum of the ranks. ``linear``
            adds up the factors, each times the root of its weight, which is quick and only an
            approximation: the product of sums has terms that the sum of products has not.
        svd_rank: The new rank for ``svd``; None: the largest of the adapters' at each layer.

    Raises:
        ConfigError: With all that is in the way; nothing was changed.
    """
    check_names(model, adapters)
    faults = [
        *_request_faults(model, adapters, weights, combination, svd_rank),
        *_adapter_faults(model, adapters),
    ]
    if faults:
        raise ConfigError(*faults)
    weighted = list(zip(adapters, weights, strict=True))
    combined = _everywhere(model, weighted, combination, svd_rank)
    at = {layer: (new.rank, new.rank) for layer, new in combined.items()}
    add_adapter(model, LoRA, explicit(model, _params(model, adapters), at), name)
    for layer, new in combined.items():
        new.fill(layer, name)


def _params(model: nn.Module, adapters: Sequence[str]) -> LoRAParams:
    """All that the new adapter's parameters say but for layers, ranks and alphas."""
    held = adapters_of(model)
    params: list[LoRAParams] = [held[name].params for name in adapters]
    return dataclasses.replace(
        params[0],
        use_rslora=False,
        init_lora_weights=True,
        lora_bias=any(own.lora_bias for own in params),
        lora_dropout=min(own.lora_dropout for own in params),
    )


def _request_faults(
    model: nn.Module,
    adapters: Sequence[str],
    weights: Sequence[float],
    combination: str,
    svd_rank: int | None,
) -> Iterator[str]:
    if any(is_sharded(parameter) for parameter in model.parameters()):
        yield "the model is sharded already; combine adapters before it is"
    if not adapters:
        yield "no adapters to combine"
    if len(weights) != len(adapters):
        yield f"there are {len(adapters)} adapters and {len(weights)} weights"
    if not all(map(math.isfinite, weights)):
        yield f"weights are finite numbers, got {[*weights]}"
    if combination not in COMBINATIONS:
        yield f"combination is one of {', '.join(COMBINATIONS)}, got {combination!r}"
    if svd_rank is not None and (combination != "svd" or svd_rank < 1):
        yield f"svd_rank is a rank, at least 1, and for svd alone; got {svd_rank!r}"


def _adapter_faults(model: nn.Module, adapters: Sequence[str]) -> Iterator[str]:
    held, names = adapters_of(model), dict.fromkeys(adapters)
    for adapter in (held[name] for name in names):
        if not issubclass(adapter.method, LoRA):
            yield f"{adapter.name!r} is no LoRA adapter, but of {adapter.method.__qualname__}"
        elif adapter.params.use_dora:
            yield f"{adapter.name!r} has use_dora: what it does is no sum with the base's weight"
        elif adapter.params.bias != "none":
            yield f"{adapter.name!r} trains biases of the model, which cannot be combined"
    for path, module in modules(model):
        for name in names:
            if name in module.adapters and not hasattr(module, "factors"):
                yield f"{path}: the {type(module).__name__} of {name!r} cannot be combined"


@dataclasses.dataclass(frozen=True)
class _Combined:
    """What the new adapter is at a layer."""

    rank: int
    factors: Sequence[Factors]
    bias: Tensor | None

    def fill(self, layer: Any, name: str) -> None:
        """Copy it into the layer's part of the adapter."""
        for targets, sources in zip(layer.factors(name), self.factors, strict=True):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        if self.bias is not None:
            layer.lora_B[name].bias.copy_(self.bias)


def _everywhere(
    model: nn.Module,
    weighted: Sequence[tuple[str, float]],
    combination: Combination,
    svd_rank: int | None,
) -> dict[AdapterModule, _Combined]:
    combined, faults = {}, []
    for path, layer in modules(model):
        if held := [(name, weight) for name, weight in weighted if name in layer.adapters]:
            try:
                combined[layer] = _combined(layer, held, combination, svd_rank)
            except ConfigError as error:
                faults.append(f"{path}: {error}")
    if faults:
        raise ConfigError(*faults)
    return combined


def _combined(
    layer: Any,
    held: Sequence[tuple[str, float]],
    combination: Combination,
    svd_rank: int | None,
) -> _Combined:
    shares = [weight * layer.params[name].scaling for name, weight in held]
    ranks = [layer.params[name].r for name, _ in held]
    factors = [layer.factors(name) for name, _ in held]
    # A convolution's groups each have their part of the rank.
    parts = ranks[0] // factors[0][0][0].shape[-2]
    rank = svd_rank or max(ranks)
    if combination == "svd" and rank % parts:
        raise ConfigError(f"svd_rank is a multiple of the convolution's groups, {parts}")
    new = [
        COMBINATIONS[combination](shares, same_place, rank // parts)
        for same_place in zip(*factors, strict=True)
    ]
    return _Combined(parts * new[0][0].shape[-2], new, _bias(layer, held))


def _bias(layer: Any, held: Sequence[tuple[str, float]]) -> Tensor | None:
    biases = [
        weight * layer.params[name].scaling * layer.lora_B[name].bias
        for name, weight in held
        if layer.params[name].lora_bias
    ]
    return cast("Tensor", sum(biases)) if biases else None


def _concatenated(shares: Sequence[float], factors: Sequence[Factors], rank: int) -> Factors:
    down = torch.cat([share * a for share, (a, _) in zip(shares, factors, strict=True)], dim=-2)
    return down, torch.cat([b for _, b in factors], dim=-1)


def _best(shares: Sequence[float], factors: Sequence[Factors], rank: int) -> Factors:
    """The singular value decomposition of the sum, which is made of small matrices only."""
    down, up = (x.double() for x in _concatenated(shares, factors, rank))
    left, left_rest = torch.linalg.qr(up)
    right, right_rest = torch.linalg.qr(down.mT)
    u, s, vh = torch.linalg.svd(left_rest @ right_rest.mT, full_matrices=False)
    best = slice(min(rank, s.shape[-1]))
    return vh[..., best, :] @ right.mT, left @ (u * s[..., None, :])[..., best]


def _summed(shares: Sequence[float], factors: Sequence[Factors], rank: int) -> Factors:
    if len({a.shape for a, _ in factors}) > 1:
        raise ConfigError("linear is for adapters of equal ranks; cat and svd are for any")
    roots = [math.sqrt(abs(share)) for share in shares]
    signed = [math.copysign(root, share) for root, share in zip(roots, shares, strict=True)]
    down = sum(root * a for root, (a, _) in zip(signed, factors, strict=True))
    up = sum(root * b for root, (_, b) in zip(roots, factors, strict=True))
    return cast("Tensor", down), cast("Tensor", up)


COMBINATIONS: Mapping[str, Callable[[Sequence[float], Sequence[Factors], int], Factors]] = {
    "cat": _concatenated,
    "svd": _best,
    "linear": _summed,
}
