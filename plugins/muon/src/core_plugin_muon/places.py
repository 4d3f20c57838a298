"""Where a model holds its parameters: the modules, their names, and what those are part of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Place:
    """One of the places of a model that hold a parameter; a tied one has several.

    Attributes:
        name: the parameter's name here, in the unwrapped model.
        owner: the module that holds it.
        parameter: the parameter.
        in_block: whether the owner is inside a repeated block: an element of an `nn.ModuleList`,
            or one of several of a class of their own in any other module. Modules without parts,
            such as `nn.Linear`, are no blocks, and a plain `nn.Sequential` is none.
        in_adapter: whether the owner says `is_adapter`, or is where a layer of the peft library
            keeps its adapters.
        ends_block: whether it is the last matrix of the innermost block around it.
    """

    name: str
    owner: nn.Module
    parameter: nn.Parameter
    in_block: bool
    in_adapter: bool
    ends_block: bool = False

    @property
    def key(self) -> str:
        """What the owner calls the parameter, such as `weight`."""
        return self.name.rpartition(".")[2]

    @property
    def module(self) -> str:
        """What the owner itself is called in the module around it, such as `lm_head`."""
        return self.name.rpartition(".")[0].rpartition(".")[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's global shape."""
        return tuple(self.parameter.shape)


def trained_parameters(model: nn.Module) -> list[list[Place]]:
    """All places of each parameter that requires gradients, in the order of the model.

    Args:
        model: the model, bare, wrapped or sharded.

    Raises:
        ValueError: `model.parameters()` and the modules' own parameters differ.
    """
    places: dict[int, list[Place]] = {}
    for place in _walk(model):
        if place.parameter.requires_grad:
            places.setdefault(id(place.parameter), []).append(place)
    listed = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    found = {key: held[0].name for key, held in places.items()}
    differing = sorted((listed | found)[key] for key in listed.keys() ^ found.keys())
    if differing:
        raise ValueError(
            "model.named_parameters() and the parameters that its modules hold differ, so it is "
            f"not certain what is to be trained: {', '.join(differing)}"
        )
    return list(places.values())


def _walk(
    module: nn.Module, prefix: str = "", in_block: bool = False, in_adapter: bool = False
) -> Iterator[Place]:
    in_adapter = in_adapter or getattr(module, "is_adapter", False) is True
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield Place(prefix + key, module, parameter, in_block, in_adapter)
    blocks = _blocks(module)
    for key, child in _children(module):
        inner = prefix if _is_wrapper(module, key) else f"{prefix}{key}."
        adapter = in_adapter or key in getattr(module, "adapter_layer_names", ())
        if id(child) in blocks:
            yield from _ended(list(_walk(child, inner, True, adapter)))
        else:
            yield from _walk(child, inner, in_block, adapter)


def _ended(block: list[Place]) -> list[Place]:
    last = max((n for n, place in enumerate(block) if len(place.shape) > 1), default=None)
    return [replace(p, ends_block=True) if n == last else p for n, p in enumerate(block)]


def _blocks(module: nn.Module) -> set[int]:
    """The children that are repeated blocks."""
    children = {id(child): _unwrapped(child) for _, child in _children(module)}
    counts = Counter(type(_unwrapped(child)) for _, child in _children(module))
    if isinstance(module, nn.ModuleList):  # its only element is repeated, too
        counts = Counter({kind: count + 1 for kind, count in counts.items()})
    else:
        counts[nn.ModuleList] = counts[nn.ModuleDict] = 0
    counts[nn.Sequential] = 0  # says nothing of what is in it
    return {
        key for key, child in children.items() if any(child.children()) and counts[type(child)] > 1
    }


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children with their names; one that is there twice, twice."""
    return [(key, child) for key, child in module._modules.items() if child is not None]


def _unwrapped(module: nn.Module) -> nn.Module:
    for key, child in _children(module):
        if _is_wrapper(module, key):
            return _unwrapped(child)
    return module


def _is_wrapper(module: nn.Module, key: str) -> bool:
    if key == "module":
        return isinstance(module, DataParallel | DistributedDataParallel)
    return key in _WRAPPERS
