"""One pass over a model: every module, with all the places that it stands at."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


@dataclasses.dataclass
class Site:
    """A module of a model. A module that is used twice is one site with two places."""

    module: nn.Module
    in_block: bool
    """Whether it is inside one of a model's repeated blocks."""
    paths: list[str] = dataclasses.field(default_factory=list)
    places: list[tuple[nn.Module, str]] = dataclasses.field(default_factory=list)
    """The parent, and the name there, for each of the paths."""

    @property
    def path(self) -> str:
        """The first of its paths, which is what messages call it."""
        return self.paths[0]

    @property
    def base(self) -> nn.Module:
        """The model's own layer, inside an adapter layer if there is one."""
        from core_plugin.adapters.layer import AdapterLayer

        return self.module.base_layer if isinstance(self.module, AdapterLayer) else self.module


def sites(model: nn.Module) -> list[Site]:
    """The modules below the root, in their order; not those inside adapter layers."""
    from core_plugin.adapters.layer import AdapterLayer

    found: dict[int, Site] = {}

    def visit(parent: nn.Module, prefix: str, in_block: bool) -> None:
        for name, child in parent._modules.items():
            if child is None:
                continue
            site = found.setdefault(id(child), Site(child, in_block))
            site.paths.append(prefix + name)
            site.places.append((parent, name))
            if not isinstance(child, AdapterLayer):
                visit(child, f"{prefix}{name}.", in_block or _is_block(parent, child))

    visit(model, "", False)
    return list(found.values())


def _is_block(parent: nn.Module, child: nn.Module) -> bool:
    """Whether a module is an element of a list, or one of several of its type in a container."""
    from torch import nn

    if isinstance(parent, nn.Sequential | nn.ModuleDict):
        return sum(type(sibling) is type(child) for sibling in parent.children()) > 1
    return isinstance(parent, nn.ModuleList)


def linear_layers(model_sites: Sequence[Site]) -> list[Site]:
    """Every ``nn.Linear`` apart from the output head.

    The head is a Linear whose weight is tied to an Embedding's, or one outside the repeated
    blocks with as many outputs as some Embedding has rows. What ``nn.MultiheadAttention`` holds
    is left out too: it is never called, only its weight is read.
    """
    from torch import nn

    embeddings = [s.base for s in model_sites if isinstance(s.base, nn.Embedding)]
    tied = {id(e.weight) for e in embeddings}
    rows = {e.num_embeddings for e in embeddings}
    return [
        site
        for site in model_sites
        if isinstance(site.base, nn.Linear)
        and id(site.base.weight) not in tied
        and (site.in_block or site.base.out_features not in rows)
        and not weight_is_read(site)
    ]


def weight_is_read(site: Site) -> bool:
    """Whether a module's parent reads its weight and never calls it."""
    from torch import nn

    return any(isinstance(parent, nn.MultiheadAttention) for parent, _ in site.places)
