"""One pass over a model: every module, with all the places that it stands at."""

from __future__ import annotations

import collections
import dataclasses

from torch import nn

from core_plugin.adapters.layer import AdapterLayer, AdapterModule, ParameterLayer
from core_plugin.tensors import WRAPPERS


@dataclasses.dataclass(eq=False, slots=True)
class Site:
    """A module of a model. A module that is used twice is one site with two places."""

    module: nn.Module
    base: nn.Module
    """The model's own layer, inside the adapter layers if there are any."""
    in_block: bool
    """Whether it is inside one of a model's repeated blocks."""
    path: str
    """Its first name in the model, without those of wrappers and of adapter layers."""
    place: tuple[nn.Module, str]
    """The parent, and the name there."""
    others: tuple[tuple[str, tuple[nn.Module, str]], ...] = ()
    """The other paths and places."""

    @property
    def paths(self) -> list[str]:
        """All its names in the model."""
        return [self.path, *(path for path, _ in self.others)]

    @property
    def places(self) -> list[tuple[nn.Module, str]]:
        """The parent, and the name there, for each of the paths."""
        return [self.place, *(place for _, place in self.others)]


class Sites(list[Site]):
    """The modules below a model's root, in their order; not those inside adapter layers.

    What is below a module whose own parameter is adapted is the model's all the same.

    There may be tens of thousands, and to look at each once more takes as long as to find it. So
    what is asked of all of them is noted when they are found.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, _ = _unwrapped(model, (model, ""))
        """The root."""
        self.parents: list[nn.Module] = []
        """The root, and the bases that have modules in them."""
        self.called: dict[str, list[Site]] = collections.defaultdict(list)
        """The sites by what their parents call them."""
        self.parameters: list[nn.Parameter | None] = [*self.model._parameters.values()]
        """What the root and the bases own, as often as they do; None for a bias that is not."""
        self.adapted: list[AdapterModule] = []
        """The sites' modules that hold parts of adapters."""
        self.kinds: set[type[nn.Module]] = set()
        """The types of the bases."""
        self._found: dict[int, Site] = {}
        self._visit(self.model, "", False)
        self += self._found.values()

    def of_kind(self, *kinds: type[nn.Module]) -> list[Site]:
        """Those whose bases are of some types."""
        found = {kind for kind in self.kinds if issubclass(kind, kinds)}
        return [site for site in self if type(site.base) in found] if found else []

    def _visit(self, parent: nn.Module, prefix: str, in_block: bool) -> None:
        self.parents.append(parent)
        repeated = frozenset() if in_block else _repeated(parent)
        found, called, parameters = self._found, self.called, self.parameters
        for name, child in parent._modules.items():
            if child is None:
                continue
            is_block = in_block or type(child) in repeated
            place, path = (parent, name), prefix + name
            if not WRAPPERS.isdisjoint(child._modules):
                child, place = _unwrapped(child, place)
            base = child.owner if isinstance(child, AdapterLayer) else child
            if site := found.get(id(child)):
                site.others += ((path, place),)
            else:
                site = found[id(child)] = Site(child, base, in_block, path, place)
                if isinstance(child, AdapterModule):
                    self.adapted.append(child)
                parameters += base._parameters.values()
                self.kinds.add(type(base))
            called[name].append(site)
            if base._modules and (base is child or isinstance(child, ParameterLayer)):
                self._visit(base, f"{path}.", is_block)


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
