"""Which parameters of a model Muon orthogonalizes.

The decision rests on the user's rules, then on module types, on tensor identity and on the model's
structure, so that wrapping, sharding and renaming do not change it. Where it is in doubt, a
parameter goes to AdamW.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from typing import Any

from torch import nn

from core_plugin_muon.heads import Heads
from core_plugin_muon.options import Algorithm, Rule, as_rules
from core_plugin_muon.places import Place, trained_parameters


@dataclass(frozen=True)
class Route:
    """Where one parameter goes, and why.

    Attributes:
        name: the parameter's name in the unwrapped model.
        shape: its global shape.
        algorithm: "muon", "adamw" or "skip".
        reason: what decided.
        parameter: the parameter itself.
        flatten: whether Muon joins all dimensions after the first to one matrix.
        split: rows of the blocks that Muon cuts each matrix into; empty for one block.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: Algorithm
    reason: str
    parameter: nn.Parameter = field(repr=False, compare=False)
    flatten: bool = False
    split: tuple[int, ...] = ()


@dataclass(frozen=True)
class _View:
    """What a parameter is by the type of its owner, and how it would be seen as matrices."""

    algorithm: Algorithm
    reason: str
    flatten: bool = False
    split: tuple[int, ...] = ()


def route(model: nn.Module, rules: Iterable[Rule | Mapping[str, Any]] = ()) -> list[Route]:
    """Decide for each trainable parameter of a model between Muon and AdamW.

    The first rule that matches one of a parameter's names decides. Without one, Muon gets what is
    certainly a hidden matrix: weights of linear layers, of convolutions (flattened, each group
    by itself), the projections of `nn.MultiheadAttention`, and stacks of experts (whose owner has
    `num_experts` as the stack's first dimension). AdamW gets everything else: embeddings and what
    is tied to them, output heads (see `Heads`), whatever has fewer than two dimensions or matrices
    of one row or column, adapters, depthwise convolutions, and matrices that are not of a layer
    known by its type.

    Args:
        model: the model, bare, wrapped or sharded, on any device, `meta` included.
        rules: what the user decides, by name; a mapping has the fields of a `Rule`.

    Returns:
        One row for each parameter that requires gradients, in the order of the model.

    Raises:
        ValueError: no parameter goes to Muon; a rule decides nothing or does not fit a parameter;
            or `model.parameters()` and the modules' own parameters differ.
    """
    rules = as_rules(rules)
    parameters = trained_parameters(model)
    heads = Heads.of(model)
    ruling = [next((r for r in rules if _matches(r, places)), None) for places in parameters]
    routes = [
        _decide(places, heads) if rule is None else _ruled(places, rule)
        for places, rule in zip(parameters, ruling, strict=True)
    ]
    if faults := [*_unused(rules, ruling, parameters, model), *_misfits(ruling, routes)]:
        raise ValueError("\n".join(faults))
    if not any(row.algorithm == "muon" for row in routes):
        raise ValueError(_nothing_to_do(routes, ruled=any(ruling)))
    return routes


def _decide(places: list[Place], heads: Heads) -> Route:
    first = places[0]
    views = [_by_type(place) for place in places]
    view = next((view for view in views if view.algorithm != "muon"), views[0])
    if (reason := _reason_for_adamw(places, view, heads)) is not None:
        return Route(first.name, first.shape, "adamw", reason, first.parameter)
    return _route(first, view)


def _route(place: Place, view: _View) -> Route:
    of_muon = view.algorithm == "muon"
    return Route(
        place.name,
        place.shape,
        view.algorithm,
        view.reason,
        place.parameter,
        flatten=of_muon and view.flatten,
        split=view.split if of_muon else (),
    )


def _reason_for_adamw(places: list[Place], view: _View, heads: Heads) -> str | None:
    """What keeps a parameter from Muon whatever its type of layer."""
    if any(place.in_adapter for place in places):
        return "adapter"
    if any(_is_embedding(place) for place in places):
        return "embedding" if len(places) == 1 else "tied to an embedding"
    if len(places[0].shape) < 2:
        return f"{len(places[0].shape)}-dimensional"
    if places[0].parameter.is_complex():
        return "complex"
    if min(_matrix(places[0].shape, view)) <= 1:
        return "one row or column"
    if view.algorithm != "muon":
        return view.reason
    return next(filter(None, map(heads.reason, places)), None)


def _is_embedding(place: Place) -> bool:
    return isinstance(place.owner, nn.Embedding | nn.EmbeddingBag) or (
        len(place.shape) == 2 and getattr(place.owner, "num_embeddings", None) == place.shape[0]
    )


def _by_type(place: Place) -> _View:
    owner, key, shape = place.owner, place.key, place.shape
    if key == "weight" and isinstance(owner, nn.modules.conv._ConvNd):
        return _convolution(owner, shape)
    if isinstance(owner, nn.MultiheadAttention):
        if key == "in_proj_weight":
            third = shape[0] // 3
            return _View("muon", "query, key and value, each by itself", split=(third,) * 3)
        if key in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            return _View("muon", "hidden matrix")
    if len(shape) == 3 and getattr(owner, "num_experts", None) == shape[0]:
        return _View("muon", "stack of experts")
    if len(shape) == 3 and shape[0] > 1:
        return _View("adamw", "3-dimensional (a stack has num_experts or a rule)")
    if len(shape) != 2:
        return _View("adamw", f"{len(shape)}-dimensional")
    if key == "weight" and _features(owner) == shape:
        return _View("muon", "hidden matrix")
    return _View("adamw", "matrix of no known layer")


def _convolution(owner: nn.modules.conv._ConvNd, shape: tuple[int, ...]) -> _View:
    """A group has rows of its own and sees channels of its own: it is a matrix of its own."""
    if owner.groups == 1:
        return _View("muon", "convolution", flatten=True)
    if owner.groups == owner.in_channels:  # a filter mixes no channels
        return _View("adamw", "depthwise convolution", flatten=True)
    split = (shape[0] // owner.groups,) * owner.groups
    return _View("muon", "convolution, each group by itself", flatten=True, split=split)


def _features(owner: nn.Module) -> tuple[object, object]:
    """Rows and columns of the weight that a linear layer has; none of another module."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and isinstance(owner, transformers.Conv1D):
        return owner.nx, owner.nf
    return getattr(owner, "out_features", None), getattr(owner, "in_features", None)


def _matrix(shape: tuple[int, ...], view: _View) -> tuple[int, int]:
    """Rows and columns of the smallest matrix of a parameter of two dimensions or more."""
    rows, columns = (shape[0], prod(shape[1:])) if view.flatten else shape[-2:]
    return min(view.split, default=rows), columns


# The user's rules


def _matches(rule: Rule, places: list[Place]) -> bool:
    return any(re.search(rule.match, place.name) for place in places)


def _ruled(places: list[Place], rule: Rule) -> Route:
    """As the rule says; where it does not say how to see matrices, as the type says."""
    view = _by_type(places[0])
    flatten, split = rule.flatten or view.flatten, rule.split or view.split
    return _route(places[0], _View(rule.to, f"rule {rule.match!r}", flatten, split))


def _misfits(ruling: Sequence[Rule | None], routes: Sequence[Route]) -> Iterator[str]:
    """What each rule does that cannot be, for one parameter."""
    told: list[Rule] = []
    for rule, row in zip(ruling, routes, strict=True):
        if rule is None or row.algorithm != "muon" or rule in told:
            continue
        rows = row.shape[0] if row.flatten else row.shape[-2:][0]
        if len(row.shape) < 2:
            fault = f"sends {row.name} of shape {row.shape} to muon, but it is no matrix"
        elif row.split and sum(row.split) != rows:
            sizes = f"{list(row.split)}, {sum(row.split)} rows in all"
            fault = f"splits {row.name} into {sizes}, but it has {rows}"
        else:
            continue
        told.append(rule)
        yield f"the rule {rule.match!r} {fault}"


def _unused(
    rules: Sequence[Rule],
    ruling: Sequence[Rule | None],
    parameters: list[list[Place]],
    model: nn.Module,
) -> Iterator[str]:
    for number, rule in enumerate(rules):
        matched = [places for places in parameters if _matches(rule, places)]
        first = {next(n for n, r in enumerate(rules) if _matches(r, places)) for places in matched}
        if number in first:
            continue
        if matched:
            before = " and ".join(repr(rules[n].match) for n in sorted(first))
            yield (
                f"the rule {rule.match!r} decides nothing: {before} before it takes all that it "
                "matches; put it first, or leave it out"
            )
            continue
        if any(re.search(rule.match, name) for name, _ in model.named_parameters()):
            yield f"the rule {rule.match!r} matches frozen parameters alone"
            continue
        near = _near(rule.match, [place.name for places in parameters for place in places])
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        yield f"the rule {rule.match!r} matches no parameter{hint}"


def _near(pattern: str, names: list[str]) -> list[str]:
    """For each word of a pattern, the first names that have one like it."""
    firsts = {word: name for name in reversed(names) for word in name.split(".")}
    return [
        firsts[close]
        for word in re.findall(r"\w{2,}", pattern)
        for close in get_close_matches(word, firsts, n=2)
    ][:3]


def _nothing_to_do(routes: list[Route], ruled: bool) -> str:
    needs = (
        "muon needs at least one trainable hidden matrix (the weight of a linear layer that is "
        "not an output head, or of a convolution), but "
    )
    if not routes:
        return f"{needs}this model trains no parameter"
    counts = Counter(row.reason for row in routes)
    examples = {row.reason: row for row in reversed(routes)}
    why = "; ".join(
        f"{reason}: {count}, such as {examples[reason].name} of shape {examples[reason].shape}"
        for reason, count in counts.items()
    )
    advice = "change the rules" if ruled else "send a matrix to muon by a rule"
    return f"{needs}finds none. Reasons: {why}. Use the optimizer adamw, or {advice}."
