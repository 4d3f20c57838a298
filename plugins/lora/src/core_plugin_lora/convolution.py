"""LoRA for convolutions: a narrow one like the base layer's, and one of width 1 after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from core_plugin.adapters.layer import tensor_options
from core_plugin.errors import ConfigError
from core_plugin_lora.factor import Factor, by_adapter, init_fault, initial_down, initial_up
from core_plugin_lora.layer import LoRAMatrix

if TYPE_CHECKING:
    from core_plugin_lora.plugin import LoRAParams

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""By the number of dimensions of the kernel."""


class LoRAConv(LoRAMatrix):
    """A convolution with low-rank adapters: ``A [r, in, *kernel]``, ``B [out, r / groups, 1...]``.

    A reads all input channels, with the base's kernel, stride, padding and dilation; B has the
    base's groups. So it is in the files of the peft library.
    """

    base_layer: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def __init__(self, base_layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
        super().__init__(base_layer)
        self.lora_A, self.lora_B = by_adapter(), by_adapter()

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        """See :meth:`LoRAMatrix.matrix`; it is a copy if the weight is not contiguous."""
        return weight.flatten(1)

    @classmethod
    def fault(cls, base: nn.Module, params: LoRAParams) -> str | None:
        """See :meth:`AdapterLayer.fault`."""
        if nn.parameter.is_lazy(cast("Tensor", base.weight)):
            return "the layer has no size before its first input; give it one"
        groups = cast("int", base.groups)
        if params.r % groups:
            return f"r is a multiple of the convolution's groups, {groups}; it is {params.r}"
        if params.use_dora and groups > 1:
            return f"use_dora is for convolutions without groups, and this one has {groups}"
        return init_fault(params, "convolutions")

    def factors(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`LoRAMatrix.factors`; with groups, there is one of each for each group."""
        down: Tensor = self.lora_A[name].weight
        up: Tensor = self.lora_B[name].weight
        if (groups := self.base_layer.groups) == 1:
            return [(down.flatten(1), up.flatten(1))]
        parts = (groups, -1)
        return [(down.unflatten(0, parts).flatten(2), up.unflatten(0, parts).flatten(2))]

    def add_adapter(self, name: str, params: LoRAParams) -> None:
        """See :meth:`AdapterModule.add_adapter`."""
        base, options = self.base_layer, tensor_options(self.base_layer)
        ones = (1,) * len(base.kernel_size)
        down = (params.r, base.in_channels, *base.kernel_size)
        up = (base.out_channels, params.r // base.groups, *ones)
        bias = base.out_channels if params.lora_bias else None
        self.lora_A[name] = Factor(down, initial_down(params), options)
        self.lora_B[name] = Factor(up, initial_up(params), options, bias)
        if params.use_dora:
            self.add_magnitude(name, (1, base.out_channels, *ones))
        if params.lora_bias:
            self.changes = ("weight", "bias")

    def by_output(self, values: Tensor) -> Tensor:
        """See :meth:`LoRAMatrix.by_output`: a result is ``[..., out, *size]``."""
        return values.view(-1, *(1,) * len(self.base_layer.kernel_size))

    def converted(
        self, name: str, params: Any, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """See :meth:`LoRAMatrix.converted`."""
        groups = self.base_layer.groups
        if params is not None and groups > 1 and params.r != self.params[name].r:
            raise ConfigError("with groups, r cannot differ from the one in the model")
        return super().converted(name, params, tensors)

    def merge_fault(self, name: str) -> str | None:
        """See :meth:`AdapterLayer.merge_fault`."""
        if self.base_layer.groups > 1:
            return "A reads all input channels, and a convolution with groups only its group's"
        if self.params[name].lora_bias and self.base_layer.bias is None:
            return "the adapter has a bias, and the convolution has none"
        return None

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """See :meth:`AdapterLayer.merge_into`."""
        weight = tensors["weight"].contiguous()
        super().merge_into({"weight": weight}, name)
        if weight is not tensors["weight"]:
            tensors["weight"].copy_(weight)
        if (bias := self.lora_B[name].bias) is not None:
            tensors["bias"].add_(bias, alpha=self.params[name].scaling)

    def forward(self, x: Tensor) -> Tensor:
        """As the base layer, in its dtype: from ``[batch, in, ...]`` to ``[batch, out, ...]``."""
        result = cast("Tensor", self.base_layer(x))
        for name in self.used:
            result = self._with_update(x, result, name)
        return result

    def _with_update(self, x: Tensor, result: Tensor, name: str) -> Tensor:
        params, up = self.params[name], self.lora_B[name]
        if params.lora_dropout:
            x = F.dropout(x, params.lora_dropout, self.training)
        narrow = self._narrow(x, self.lora_A[name].weight.to(x.dtype))
        # It takes less to scale B than what B gives.
        weight, bias = params.scaling * up.weight, None
        if up.bias is not None:
            bias = (params.scaling * up.bias).to(narrow.dtype)
        if params.use_dora:
            result, factor = self._rescaled(result, name)
            weight = weight * self.by_output(factor)[:, None]
        convolve = CONVOLUTIONS[len(self.base_layer.kernel_size)]
        groups = self.base_layer.groups
        return result + convolve(narrow, weight.to(narrow.dtype), bias, groups=groups)

    def _narrow(self, x: Tensor, weight: Tensor) -> Tensor:
        """A, from ``[batch, in, ...]`` to ``[batch, r, ...]``, where the base layer looks."""
        base = self.base_layer
        padding: Any = base.padding
        if base.padding_mode != "zeros":
            x = F.pad(x, base._reversed_padding_repeated_twice, base.padding_mode)
            padding = 0
        convolve: Any = CONVOLUTIONS[len(base.kernel_size)]
        return cast("Tensor", convolve(x, weight, None, base.stride, padding, base.dilation))
