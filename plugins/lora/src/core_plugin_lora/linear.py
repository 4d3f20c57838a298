"""LoRA for linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core_plugin.adapters.layer import tensor_options
from core_plugin.errors import ConfigError
from core_plugin.tensors import copy_full, gather
from core_plugin_lora import fused
from core_plugin_lora.factor import Factor, by_adapter, initial_down, initial_up
from core_plugin_lora.initialization import orthogonal, principal
from core_plugin_lora.layer import LoRAMatrix, add_product

if TYPE_CHECKING:
    from core_plugin_lora.plugin import LoRAParams


class Down(Factor):
    """A: from the input to the rank. ``weight`` is ``[r, in]``."""

    def forward(self, x: Tensor) -> Tensor:
        """From ``[..., in]`` to ``[..., r]``, in the dtype of ``x``."""
        return F.linear(x, self.weight.to(x.dtype))


class Up(Factor):
    """B: from the rank to the output. ``weight`` is ``[out, r]``."""

    def forward(
        self, narrow: Tensor, result: Tensor, scaling: float, factor: Tensor | None
    ) -> Tensor:
        """``result [..., out] + scaling · (B narrow + bias)``, for ``narrow [..., r]``.

        DoRA's factor ``[out]`` multiplies the rows of B.
        """
        weight = self.weight if factor is None else self.weight * factor[:, None]
        result = add_product(result, narrow, weight.t(), scaling)
        return result if self.bias is None else result + (scaling * self.bias).to(result.dtype)


class LoRALinear(LoRAMatrix):
    """A linear layer with low-rank adapters."""

    transposed: ClassVar[bool] = False
    """Whether the base's weight is ``[in, out]``."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.lora_A, self.lora_B = by_adapter(), by_adapter()
        self._fused: fused.Parts | None = None

    @classmethod
    def size(cls, base: Any) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return base.out_features, base.in_features

    @classmethod
    def is_plain(cls, base: nn.Module) -> bool:
        """Whether a base layer's forward is known to be the product with its weight."""
        return type(base).forward is nn.Linear.forward

    @classmethod
    def fault(cls, base: Any, params: LoRAParams) -> str | None:
        """See :meth:`AdapterLayer.fault`."""
        if nn.parameter.is_lazy(base.weight):
            return "the layer has no size before its first input; give it one"
        wanted = params.init_lora_weights if params.changes_base else "use_dora"
        if not (params.changes_base or params.use_dora):
            return None
        outputs, inputs = cls.size(base)
        if params.changes_base and "weight" not in base._parameters:
            return f"{wanted} changes the layer's weight, and that is computed from others"
        if cls.matrix(base.weight).shape != (outputs, inputs) or not _has_values(base.weight):
            return f"{wanted} needs the layer's weight, and that is quantised"
        if params.changes_base and params.r > min(outputs, inputs):
            return (
                f"{wanted} has directions for a rank up to {min(outputs, inputs)}, not {params.r}"
            )
        return None

    @classmethod
    def changes_base(cls, params: LoRAParams) -> bool:
        """See :meth:`AdapterModule.changes_base`."""
        return params.changes_base

    def factors(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`LoRAMatrix.factors`."""
        return [(self.lora_A[name].weight, self.lora_B[name].weight)]

    def add_adapter(self, name: str, params: LoRAParams) -> None:
        """See :meth:`AdapterModule.add_adapter`."""
        options, (outputs, inputs) = tensor_options(self.base_layer), self.size(self.base_layer)
        bias = outputs if params.lora_bias else None
        self.lora_A[name] = Down((params.r, inputs), initial_down(params), options)
        self.lora_B[name] = Up((outputs, params.r), initial_up(params), options, bias)
        if params.use_dora:
            self.add_magnitude(name, (outputs,))
        if params.lora_bias:
            self.changes = ("weight", "bias")

    @torch.no_grad()
    def initialize(self, name: str) -> None:
        """See :meth:`AdapterModule.initialize`."""
        params: LoRAParams = self.params[name]
        if params.changes_base:
            self._take_out(name, params)
        elif params.init_lora_weights == "orthogonal":
            self._fill(name, *orthogonal(*map(gather, *self.factors(name))))
        super().initialize(name)

    def _take_out(self, name: str, params: LoRAParams) -> None:
        """Let the adapter do what the principal part of the weight does, and the base not."""
        weight = self.base_layer.weight
        if weight.is_meta:
            raise ConfigError(
                f"init_lora_weights is {params.init_lora_weights!r}, which needs the values of the "
                "layer's weight, and that is on the meta device; load them first"
            )
        whole = gather(weight.detach())
        matrix, init = self.matrix(whole), str(params.init_lora_weights)
        down, up = principal(matrix, params.r, params.scaling, init)
        self._fill(name, down, up)
        rest = matrix.to(up.dtype, copy=True).addmm_(up, down, alpha=-params.scaling)
        copy_full(weight, self.matrix(rest).to(weight.dtype))

    def _fill(self, name: str, down: Tensor, up: Tensor) -> None:
        for parameter, value in zip(*self.factors(name), (down, up), strict=True):
            copy_full(parameter, value)

    def merge_fault(self, name: str) -> str | None:
        """See :meth:`AdapterLayer.merge_fault`."""
        if self.params[name].lora_bias and self.base_layer.bias is None:
            return "the adapter has a bias, and the layer has none"
        return None

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """See :meth:`AdapterLayer.merge_into`."""
        super().merge_into(tensors, name)
        bias = self.lora_B[name].bias
        if bias is not None:
            tensors["bias"].add_(bias, alpha=self.params[name].scaling)

    def settle(self) -> None:
        """See :meth:`AdapterModule.settle`."""
        self._fused = None
        if len(self.used) == 1 and self.is_plain(self.base_layer):
            (name,) = self.used
            params: LoRAParams = self.params[name]
            if not (params.use_dora or params.lora_bias):
                self._fused = fused.Parts(
                    self.base_layer,
                    self.lora_A[name],
                    self.lora_B[name],
                    self.transposed,
                    params.scaling,
                    params.lora_dropout,
                )

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the base layer: from ``[..., in]`` to ``[..., out]``, in the base layer's dtype."""
        parts = self._fused
        if parts is not None and not (args or kwargs) and fused.fits(x, parts):
            return fused.linear(x, parts, self.training)
        result = cast("Tensor", self.base_layer(x, *args, **kwargs))
        for name in self.used:
            result = self._with_update(x, result, name)
        return result

    def _with_update(self, x: Tensor, result: Tensor, name: str) -> Tensor:
        params, factor = self.params[name], None
        if params.lora_dropout:
            x = F.dropout(x, params.lora_dropout, self.training)
        narrow = self.lora_A[name](x)
        if params.use_dora:
            result, factor = self._rescaled(result, name)
        return cast("Tensor", self.lora_B[name](narrow, result, params.scaling, factor))


def _has_values(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.itemsize > 1


class LoRAConv1D(LoRALinear):
    """GPT-2's linear layer, whose weight is ``[in, out]``, with low-rank adapters."""

    transposed = True

    @classmethod
    def size(cls, base: Any) -> tuple[int, int]:
        """See :meth:`LoRALinear.size`."""
        inputs, outputs = base.weight.shape
        return outputs, inputs

    @classmethod
    def is_plain(cls, base: nn.Module) -> bool:
        """See :meth:`LoRALinear.is_plain`; the class is known by name alone."""
        return type(base).__name__ == "Conv1D"

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        """See :meth:`LoRAMatrix.matrix`."""
        return weight.t()
