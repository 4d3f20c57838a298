"""Token rows: some rows of an embedding are trained, and the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core_plugin.adapters.layer import AdapterLayer, AdapterModule, AdapterParameters
from core_plugin.adapters.tree import Site
from core_plugin.tensors import copy_full, gather

TOKENS = "token_adapter"
DELTA = "trainable_tokens_delta"


class TokenRows(AdapterLayer):
    """Stands in for an embedding, or an output head, and replaces the rows of some tokens.

    An adapter's parameters are the rows' numbers: a list of ints. Its tensor, ``[rows, dim]``,
    has the new values. Its name is the peft library's, but it holds no differences.
    """

    prefix = TOKENS
    base_layer: nn.Embedding | nn.Linear

    def __init__(self, base_layer: nn.Embedding | nn.Linear) -> None:
        super().__init__(base_layer)
        self.token_adapter = nn.ModuleDict({DELTA: AdapterParameters(nn.init.zeros_)})
        self._tied: set[str] = set()
        self._rows: list[int] = []
        self._index: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @classmethod
    def fault(cls, base: nn.Module, params: Any) -> str | None:
        """See :meth:`AdapterLayer.fault`."""
        if not isinstance(base, nn.Embedding | nn.Linear):
            return f"a {type(base).__name__} has no rows of tokens, as an nn.Embedding has"
        kind = nn.Embedding if isinstance(base, nn.Embedding) else nn.Linear
        if type(base).forward is not kind.forward and not hasattr(base, "embed_scale"):
            return f"{type(base).__name__} has a forward of its own, which may not read rows"
        count = base.weight.shape[0]
        wrong = [row for row in params if type(row) is not int or not 0 <= row < count]
        if wrong or not params:
            return f"rows of tokens are numbers from 0 to {count - 1}, got {wrong or 'none'}"
        if twice := sorted({row for row in params if params.count(row) > 1}):
            return f"the rows of the tokens {twice} are there twice"
        return None

    def add_adapter(self, name: str, params: list[int]) -> None:
        """See :meth:`AdapterModule.add_adapter`."""
        self._delta.add(name, (len(params), self.base_layer.weight.shape[1]), self.base_layer)

    def tie(self, owner: TokenRows, name: str) -> None:
        """Use another layer's tensor of an adapter; it is saved as the other layer's."""
        self._delta[name] = owner._delta[name]
        self._tied.add(name)

    def initialize(self, name: str) -> None:
        """Begin with the rows that are replaced."""
        weight = gather(self.base_layer.weight.detach())
        copy_full(self._delta[name], weight[self.params[name]])

    def remove(self, name: str) -> None:
        """See :meth:`AdapterModule.remove`."""
        self._tied.discard(name)
        super().remove(name)

    def clash(self, names: Sequence[str]) -> str | None:
        """See :meth:`AdapterModule.clash`."""
        rows = [row for name in names for row in self.params[name]]
        if twice := sorted({row for row in rows if rows.count(row) > 1}):
            both = ", ".join(map(repr, names))
            return f"several of the adapters {both} have the rows of the tokens {twice}"
        return None

    def settle(self) -> None:
        """See :meth:`AdapterModule.settle`."""
        self._rows = [row for name in self.used for row in self.params[name]]
        self._index = {}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the base layer, with the new rows."""
        result = cast("Tensor", self.base_layer(x, *args, **kwargs))
        if not self.used:
            return result
        if isinstance(self.base_layer, nn.Linear):
            return self._outputs(x, result)
        return self._inputs(x, result)

    def _inputs(self, tokens: Tensor, result: Tensor) -> Tensor:
        """Embeddings ``[..., dim]`` of tokens ``[...]``."""
        base = cast("nn.Embedding", self.base_layer)
        # Row number ``count`` of the table is that of the tokens whose rows are not replaced.
        slots, count = self._on(tokens.device)[1][tokens], len(self._rows)
        table = nn.functional.pad(self._values(), (0, 0, 0, 1))
        padding = self._rows.index(base.padding_idx) if base.padding_idx in self._rows else count
        values = F.embedding(
            slots, table, padding, base.max_norm, base.norm_type, base.scale_grad_by_freq
        )
        values = values * getattr(base, "embed_scale", 1)
        return torch.where((slots < count).unsqueeze(-1), values.to(result.dtype), result)

    def _outputs(self, x: Tensor, result: Tensor) -> Tensor:
        """Logits ``[..., tokens]`` of ``x [..., dim]``."""
        base, rows = cast("nn.Linear", self.base_layer), self._on(x.device)[0]
        bias = None if base.bias is None else base.bias[rows].to(x.dtype)
        values = F.linear(x, self._values().to(x.dtype), bias)
        # Not in place: fully_shard loses its hooks on a result that is changed.
        return result.index_copy(-1, rows, values.to(result.dtype))

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """See :meth:`AdapterLayer.merge_into`."""
        weight = tensors["weight"]
        weight[self.params[name]] = self._delta[name].to(weight)

    @property
    def weight(self) -> Tensor:
        """The base layer's, ``[tokens, dim]``, with the new rows."""
        weight = self.base_layer.weight
        if not self.used:
            return weight
        return weight.index_copy(0, self._on(weight.device)[0], self._values().to(weight))

    def adapter_tensors(self, name: str) -> Iterator[tuple[str, str, Tensor]]:
        """See :meth:`AdapterModule.adapter_tensors`."""
        return iter(()) if name in self._tied else super().adapter_tensors(name)

    def _holders(self) -> Iterator[tuple[str, Any]]:
        yield f"{TOKENS}.{DELTA}", self._delta

    @property
    def _delta(self) -> AdapterParameters:
        return cast("AdapterParameters", self.token_adapter[DELTA])

    def _values(self) -> Tensor:
        """The rows in use, ``[rows, dim]``."""
        values = [self._delta[name] for name in self.used]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows in use, and for each token, the place of its row among them."""
        if device not in self._index:
            with torch.inference_mode(False):
                rows = torch.tensor(self._rows, device=device)
                slots = torch.full((self.base_layer.weight.shape[0],), len(rows), device=device)
                slots[rows] = torch.arange(len(rows), device=device)
            self._index[device] = rows, slots
        return self._index[device]


def with_tied(
    tokens: Sequence[tuple[Site, list[int]]], model_sites: Sequence[Site]
) -> list[tuple[Site, list[int]]]:
    """Places for token rows, and after them the other places where the same weight is used."""
    chosen = {id(site.module) for site, _ in tokens}
    tied = [
        (other, rows)
        for site, rows in tokens
        for other in model_sites
        if id(other.module) not in chosen
        and isinstance(other.base, nn.Embedding | nn.Linear)
        and other.base.weight is site.base.weight
    ]
    return [*tokens, *tied]


def tie_rows(layers: Iterable[AdapterModule], name: str) -> None:
    """Let layers with one weight and the same rows share an adapter's tensor; the first owns it."""
    owners: dict[tuple[int, tuple[int, ...]], TokenRows] = {}
    for layer in layers:
        if isinstance(layer, TokenRows) and name in layer.adapters:
            key = id(layer.base_layer.weight), tuple(layer.params[name])
            owner = owners.setdefault(key, layer)
            if owner is not layer:
                layer.tie(owner, name)
