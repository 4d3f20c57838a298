"""The layers of LoRA (https://arxiv.org/abs/2106.09685).

The update is computed in the dtype of the input: the adapter's float32 weights are cast to it, as
autocast would do. So a base in bfloat16 keeps no float32 copy of every input for the backward
pass.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core_plugin.adapters.layer import AdapterLayer, AdapterParameters, tensor_options

if TYPE_CHECKING:
    from core_plugin_lora.plugin import LoRAParams


class Down(nn.Linear):
    """A: from the input to the rank. ``weight`` is ``[r, in]``."""

    is_adapter = True

    def reset_parameters(self) -> None:
        """Uniform in ±1/√in, as in the reference implementation."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """From ``[..., in]`` to ``[..., r]``."""
        return F.linear(x, self.weight.to(x.dtype))


class Up(nn.Linear):
    """B: from the rank to the output. ``weight`` is ``[out, r]``."""

    is_adapter = True

    def reset_parameters(self) -> None:
        """Zeros, so that a new adapter changes nothing."""
        nn.init.zeros_(self.weight)

    def forward(self, down: Tensor, result: Tensor, scaling: float) -> Tensor:  # type: ignore[override]
        """``result [..., out] + scaling · B down``, for ``down [..., r]``."""
        return add_product(result, down, self.weight.t(), scaling)


def add_product(result: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """``result + scaling · left @ right`` in one operation, in the dtype of ``result``."""
    left, right = left.to(result.dtype), right.to(result.dtype)
    rows = result.reshape(-1, result.shape[-1])
    flat = torch.addmm(rows, left.reshape(-1, left.shape[-1]), right, alpha=scaling)
    return flat.view(result.shape)


class LoRALinear(AdapterLayer):
    """A linear layer with low-rank adapters."""

    base_layer: nn.Linear

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__(base_layer)
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self._settings: dict[str, tuple[float, float]] = {}
        self._used: tuple[nn.Module, nn.Module, float, float] | None = None

    def add_adapter(self, name: str, params: LoRAParams) -> None:
        """See :meth:`AdapterLayer.add_adapter`."""
        base, options = self.base_layer, tensor_options(self.base_layer)
        self.lora_A[name] = Down(base.in_features, params.r, bias=False, **options)
        self.lora_B[name] = Up(params.r, base.out_features, bias=False, **options)
        self._settings[name] = (params.scaling, params.lora_dropout)

    def activate(self, name: str | None) -> None:
        """See :meth:`AdapterLayer.activate`."""
        super().activate(name)
        self._used = None
        if self.active is not None:
            modules = self.lora_A[self.active], self.lora_B[self.active]
            self._used = (*modules, *self._settings[self.active])

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the base layer: from ``[..., in]`` to ``[..., out]``, in the base layer's dtype."""
        result = cast("Tensor", self.base_layer(x, *args, **kwargs))
        if self._used is None:
            return result
        down, up, scaling, dropout = self._used
        if dropout:
            x = F.dropout(x, dropout, self.training)
        return cast("Tensor", up(down(x), result, scaling))


class LoRAEmbedding(AdapterLayer):
    """An embedding with low-rank adapters: ``A [r, rows]``, zeros, and ``B [dim, r]``, normal."""

    base_layer: nn.Embedding

    def __init__(self, base_layer: nn.Embedding) -> None:
        super().__init__(base_layer)
        self.lora_embedding_A = AdapterParameters(nn.init.zeros_)
        self.lora_embedding_B = AdapterParameters(nn.init.normal_)
        self._scaling: dict[str, float] = {}

    def add_adapter(self, name: str, params: LoRAParams) -> None:
        """See :meth:`AdapterLayer.add_adapter`."""
        base = self.base_layer
        self.lora_embedding_A.add(name, (params.r, base.num_embeddings), base)
        self.lora_embedding_B.add(name, (base.embedding_dim, params.r), base)
        self._scaling[name] = params.scaling

    def forward(self, tokens: Tensor) -> Tensor:
        """As the base layer: from ``[...]`` to ``[..., dim]``, in the base layer's dtype."""
        result = cast("Tensor", self.base_layer(tokens))
        if self.active is None:
            return result
        base = self.base_layer
        down = F.embedding(
            tokens,
            self.lora_embedding_A[self.active].t(),
            base.padding_idx,
            base.max_norm,
            base.norm_type,
            base.scale_grad_by_freq,
        )
        up = self.lora_embedding_B[self.active].t()
        return add_product(result, down, up, self._scaling[self.active])
