"""LoRA for embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core_plugin.adapters.layer import AdapterParameters
from core_plugin_lora.layer import LoRAMatrix, add_product

if TYPE_CHECKING:
    from core_plugin_lora.plugin import LoRAParams


class LoRAEmbedding(LoRAMatrix):
    """An embedding with low-rank adapters: ``A [r, rows]``, zeros, and ``B [dim, r]``, normal."""

    base_layer: nn.Embedding
    down_name = "lora_embedding_A"
    up_name = "lora_embedding_B"

    def __init__(self, base_layer: nn.Embedding) -> None:
        super().__init__(base_layer)
        self.lora_embedding_A = AdapterParameters(nn.init.zeros_)
        self.lora_embedding_B = AdapterParameters(nn.init.normal_)

    @classmethod
    def fault(cls, base: nn.Module, params: LoRAParams) -> str | None:
        """See :meth:`AdapterLayer.fault`."""
        return "lora_bias is not for embeddings" if params.lora_bias else None

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        """See :meth:`LoRAMatrix.matrix`: an embedding's outputs are its weight's columns."""
        return weight.t()

    def factors(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`LoRAMatrix.factors`."""
        return [(self.lora_embedding_A[name], self.lora_embedding_B[name])]

    def add_adapter(self, name: str, params: LoRAParams) -> None:
        """See :meth:`AdapterModule.add_adapter`."""
        base = self.base_layer
        self.lora_embedding_A.add(name, (params.r, base.num_embeddings), base)
        self.lora_embedding_B.add(name, (base.embedding_dim, params.r), base)
        if params.use_dora:
            self.add_magnitude(name, (base.embedding_dim,))

    @torch.no_grad()
    def initialize(self, name: str) -> None:
        """See :meth:`AdapterModule.initialize`."""
        if self.params[name].init_lora_weights is False:
            nn.init.normal_(self.lora_embedding_A[name])
        super().initialize(name)

    def merge_fault(self, name: str) -> str | None:
        """See :meth:`AdapterLayer.merge_fault`."""
        if self.base_layer.max_norm is None:
            return None
        return "with max_norm, a merged row would be shortened as a whole, and not the base's part"

    def forward(self, tokens: Tensor) -> Tensor:
        """As the base layer: from ``[...]`` to ``[..., dim]``, in the base layer's dtype."""
        result = cast("Tensor", self.base_layer(tokens))
        for name in self.used:
            result = self._with_update(tokens, result, name)
        return result

    def _with_update(self, tokens: Tensor, result: Tensor, name: str) -> Tensor:
        ((down, up),) = self.factors(name)
        narrow = self._embed(tokens, down.t())
        if self.params[name].use_dora:
            result, factor = self._rescaled(result, name)
            up = up * factor[:, None]
        return add_product(result, narrow, up.t(), self.params[name].scaling)

    def _embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Rows of a table as the base layer takes them from its own."""
        base = self.base_layer
        rows = F.embedding(
            tokens,
            table,
            base.padding_idx,
            base.max_norm,
            base.norm_type,
            base.scale_grad_by_freq,
        )
        scale = getattr(base, "embed_scale", None)  # of embeddings that multiply what they give
        return rows if scale is None else rows * scale
