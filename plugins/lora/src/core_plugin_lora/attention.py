"""LoRA for ``nn.MultiheadAttention``, whose weights are read and not called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from core_plugin.adapters.layer import AdapterLayer, tensor_options
from core_plugin_lora.factor import Factor, by_adapter, init_fault, initial_down, initial_up

if TYPE_CHECKING:
    from core_plugin_lora.plugin import LoRAParams

TIMES = (1, 2)
"""How often the updates of the inputs' and the output's weight count.

The peft library adds the output's twice, so its adapters are trained for that.
"""

OUTPUT = "base_layer.out_proj."
"""Where the output projection's factors are in a file of the peft library."""


class LoRAAttention(AdapterLayer):
    """A multi-head attention whose input and output projections both have low-rank adapters."""

    base_layer: nn.MultiheadAttention
    changes = ("in_proj_weight", "out_proj.weight")
    inner_layers = ("out_proj",)
    _qkv_same_embed_dim = False
    """Keeps ``nn.TransformerEncoderLayer`` from reading the weights instead of calling this."""

    def __init__(self, base_layer: nn.MultiheadAttention) -> None:
        super().__init__(base_layer)
        self.samples = base_layer.batch_first
        self.lora_A, self.lora_B = by_adapter(), by_adapter()
        self.lora_out_A, self.lora_out_B = by_adapter(), by_adapter()

    @classmethod
    def fault(cls, base: nn.Module, params: LoRAParams) -> str | None:
        """See :meth:`AdapterLayer.fault`."""
        if not getattr(base, "_qkv_same_embed_dim", True):
            return "nn.MultiheadAttention has a layer if keys and values are as wide as queries"
        if any(parametrize.is_parametrized(module) for module in base.modules()):
            return "a parametrized nn.MultiheadAttention cannot be adapted"
        for name in ("lora_dropout", "use_dora", "lora_bias"):
            if getattr(params, name):
                return f"{name} is not for nn.MultiheadAttention, where it would do nothing"
        return init_fault(params, "nn.MultiheadAttention")

    def add_adapter(self, name: str, params: LoRAParams) -> None:
        """See :meth:`AdapterModule.add_adapter`."""
        width, rank, options = self.base_layer.embed_dim, params.r, tensor_options(self.base_layer)
        for down in (self.lora_A, self.lora_out_A):
            down[name] = Factor((rank, width), initial_down(params), options)
        for up, outputs in ((self.lora_B, 3 * width), (self.lora_out_B, width)):
            up[name] = Factor((outputs, rank), initial_up(params), options)

    def adapter_parameters(self, name: str) -> Iterator[tuple[str, str, nn.Parameter]]:
        """See :meth:`AdapterModule.adapter_parameters`."""
        for own, in_file, parameter in super().adapter_parameters(name):
            is_output = in_file.startswith("lora_out_")
            yield own, OUTPUT + in_file.replace("_out", "") if is_output else in_file, parameter

    def factors(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """The adapter's A and B, of the inputs' and of the output's weight."""
        pairs = ((self.lora_A, self.lora_B), (self.lora_out_A, self.lora_out_B))
        return [(down[name].weight, up[name].weight) for down, up in pairs]

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """See :meth:`AdapterLayer.merge_into`."""
        scaling = self.params[name].scaling
        for changed, times, (down, up) in zip(self.changes, TIMES, self.factors(name), strict=True):
            weight = tensors[changed]
            # In place, so that autocast leaves the dtype alone.
            weight.addmm_(up.to(weight.dtype), down.to(weight.dtype), alpha=times * scaling)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As the base layer."""
        tensors = {}
        if self.used:
            tensors = {n: self.base_layer.get_parameter(n).clone() for n in self.changes}
        for name in self.used:
            self.merge_into(tensors, name)
        base = self.base_layer
        called = torch.func.functional_call(base, tensors, args, kwargs, tie_weights=False)
        return cast("tuple[Tensor, Tensor | None]", called)
