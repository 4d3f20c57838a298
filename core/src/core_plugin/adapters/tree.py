"""One pass over a model: every module, with all the places that it stands at."""

from __future__ import annotations

import collections
import dataclasses

from torch import nn

from core_plugin.adapters.layer import AdapterLayer, ParameterLayer
from core_plugin.tensors import WRAPPERS


@dataclasses.dataclass(eq=False, slots=True)
class Site:
    """A module of a model. A module that is used twice is one site with two places."""

    module: nn.Module
    base: nn.Module
    """The model's own layer, inside the adapter layers if there are any."""
    in_block: bool
    """Whether it is inside one of a model's repeated blocks."""
    model: nn.Module
    """The whole model."""
    paths: list[str]
    """Its names in the model, without those of wrappers and of adapter layers."""
    places: list[tuple[nn.Module, str]]
    """The parent, and the name there, for each of the paths."""

    @property
    def path(self) -> str:
        """The first of its paths, which is what messages call it."""
        return self.paths[0]


def sites(model: nn.Module) -> list[Site]:
    """The modules below the root, in their order; not those inside adapter layers.

    What is below a module whose own parameter is adapted is the model's all the same.
    """
    found: dict[int, Site] = {}

    def visit(parent: nn.Module, prefix: str, in_block: bool) -> None:
        repeated = frozenset() if in_block else _repeated(parent)
        for name, child in parent._modules.items():
            if child is None:
                continue
            is_block = in_block or type(child) in repeated
            place = (parent, name)
            if not WRAPPERS.isdisjoint(child._modules):
                child, place = _unwrapped(child, place)
            base = child
            while isinstance(base, AdapterLayer):
                base = base.base_layer
            path = prefix + name
            if site := found.get(id(child)):
                site.paths.append(path)
                site.places.append(place)
            else:
                found[id(child)] = Site(child, base, in_block, root, [path], [place])
            if base._modules and (base is child or isinstance(child, ParameterLayer)):
                visit(base, f"{path}.", is_block)

    root, _ = _unwrapped(model, (model, ""))
    visit(root, "", False)
    return list(found.values())


def _unwrapped(
    module: nn.Module, place: tuple[nn.Module, str]
) -> tuple[nn.Module, tuple[nn.Module, str]]:
    """The module inside wrappers, and where to put another one in its place.

    A compiled module calls what it was made with, whatever its attribute is later. So what is put
    there takes the place of the compiled module itself.
    """
    while inner := next((name for name in module._modules if name in WRAPPERS), None):
        place = place if inner == "_orig_mod" else (module, inner)
        module = module.get_submodule(inner)
    return module, place


def _repeated(parent: nn.Module) -> frozenset[type]:
    """The types of a parent's repeated blocks.

    These are the elements of a list, or several of one type in a container.
    """
    if not isinstance(parent, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return frozenset()
    counts = collections.Counter(map(type, parent._modules.values()))
    least = 1 if isinstance(parent, nn.ModuleList) else 2
    return frozenset(kind for kind, count in counts.items() if count >= least)


def weight_is_read(site: Site) -> bool:
    """Whether a module's parent reads its weight and never calls it."""
    return any(isinstance(parent, nn.MultiheadAttention) for parent, _ in site.places)
