"""Which parameters of a model Muon orthogonalizes.

The decision rests on module types and on tensor identity, never on names, so that wrapping,
sharding and renaming do not change it. Where it is in doubt a parameter goes to AdamW.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from core_plugin_muon.options import Algorithm

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Route:
    """Where one parameter goes, and why.

    Attributes:
        name: the parameter's name in the unwrapped model.
        shape: its global shape.
        algorithm: "muon" or "adamw".
        reason: what decided.
        parameter: the parameter itself.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: Algorithm
    reason: str
    parameter: Tensor = field(repr=False, compare=False)


@dataclass(frozen=True)
class _Use:
    """One place of a model that holds a parameter."""

    name: str
    owner: nn.Module
    parameter: Tensor
    in_block: bool  # inside a module that is an element of an nn.ModuleList


def route(model: nn.Module) -> list[Route]:
    """Decide for each trainable parameter of a model between Muon and AdamW.

    Weights of `nn.Linear` go to Muon, with these exceptions: output heads (a Linear outside the
    elements of any `nn.ModuleList` that has as many outputs as an Embedding has entries),
    weights tied to an embedding, matrices of one row or column, and adapters (modules with a
    true attribute `is_adapter`). Everything else goes to AdamW.

    Args:
        model: the model, bare, wrapped or sharded, on any device, `meta` included.

    Returns:
        One row for each parameter that requires gradients, in the order of the model.

    Raises:
        ValueError: no parameter goes to Muon, or `model.parameters()` and the modules' own
            parameters differ.
    """
    uses: dict[int, list[_Use]] = {}
    for use in _walk(model):
        if use.parameter.requires_grad:
            uses.setdefault(id(use.parameter), []).append(use)
    _check_complete(model, uses)
    vocabularies = {
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    routes = [_decide(places, vocabularies) for places in uses.values()]
    if not any(row.algorithm == "muon" for row in routes):
        raise ValueError(_nothing_to_do(routes))
    return routes


def format_routes(routes: Iterable[Route]) -> str:
    """The rows as a text table, one line for each parameter."""
    lines = [(row.name, "x".join(map(str, row.shape)), row.algorithm, row.reason) for row in routes]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _walk(module: nn.Module, prefix: str = "", in_block: bool = False) -> Iterator[_Use]:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield _Use(prefix + key, module, parameter, in_block)
    for key, child in module.named_children():
        inner = prefix if _is_wrapper(module, key) else f"{prefix}{key}."
        # A Linear that is itself the element may be a head: several heads make a list.
        repeated = isinstance(module, nn.ModuleList) and not isinstance(child, nn.Linear)
        yield from _walk(child, inner, in_block or repeated)


def _is_wrapper(module: nn.Module, key: str) -> bool:
    if key == "module":
        return isinstance(module, DataParallel | DistributedDataParallel)
    return key in _WRAPPERS


def _check_complete(model: nn.Module, uses: dict[int, list[_Use]]) -> None:
    listed = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    found = {key: places[0].name for key, places in uses.items()}
    differing = sorted((listed | found)[key] for key in listed.keys() ^ found.keys())
    if differing:
        raise ValueError(
            "model.named_parameters() and the parameters that its modules hold differ, so it is "
            f"not certain what is to be trained: {', '.join(differing)}"
        )


def _decide(places: list[_Use], vocabularies: set[int]) -> Route:
    first = places[0]
    shape = tuple(first.parameter.shape)
    reason = _reason_for_adamw(places, shape, vocabularies)
    if reason is None:
        return Route(first.name, shape, "muon", "hidden matrix", first.parameter)
    return Route(first.name, shape, "adamw", reason, first.parameter)


def _reason_for_adamw(
    places: list[_Use], shape: tuple[int, ...], vocabularies: set[int]
) -> str | None:
    owners = [use.owner for use in places]
    if any(getattr(owner, "is_adapter", False) for owner in owners):
        return "adapter"
    if any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners):
        return "embedding" if len(places) == 1 else "tied to an embedding"
    if len(shape) != 2:
        return f"{len(shape)}-dimensional"
    linears = [
        (use.owner, use.in_block)
        for use in places
        if isinstance(use.owner, nn.Linear) and use.owner.weight is use.parameter
    ]
    if not linears:
        return "not the weight of a Linear"
    if any(linear.out_features in vocabularies and not in_block for linear, in_block in linears):
        return "output head"
    return "one row or column" if min(shape) <= 1 else None


def _nothing_to_do(routes: list[Route]) -> str:
    counts = Counter(row.reason for row in routes)
    examples = {row.reason: row for row in reversed(routes)}
    why = "; ".join(
        f"{count} {reason} (such as {examples[reason].name}, shape {examples[reason].shape})"
        for reason, count in counts.items()
    )
    return (
        "muon needs at least one trainable hidden matrix (the weight of an nn.Linear that is not "
        f"an output head), but this model trains {why or 'no parameter'}. "
        "Use the optimizer adamw for it."
    )
