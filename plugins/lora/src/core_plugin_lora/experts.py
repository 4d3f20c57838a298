"""LoRA for a parameter that a module holds itself, such as the stacked weights of experts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from core_plugin.adapters.layer import ParameterLayer, TensorOptions
from core_plugin_lora.factor import Factor, by_adapter, init_fault, initial_down, initial_up

if TYPE_CHECKING:
    from core_plugin_lora.plugin import LoRAParams

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LoRAParameter(ParameterLayer):
    """A module that computes with ``W + scaling · B A`` in the place of its own parameter ``W``.

    ``W`` is a matrix ``[out, in]``, or one of each of ``E`` experts, ``[E, out, in]``; of a module
    with ``is_transposed`` set, ``[E, in, out]``. As in the peft library's files, A is
    ``[E·r, in]``, one expert after another, and B is ``[out, r·E]``, where the experts alternate.
    """

    samples = False

    def __init__(self, base_layer: nn.Module, parameter: str) -> None:
        super().__init__(base_layer, parameter)
        self.lora_A, self.lora_B = by_adapter(), by_adapter()

    @classmethod
    def fault(cls, base: nn.Module, params: LoRAParams, parameter: str = "") -> str | None:
        """See :meth:`AdapterLayer.fault`."""
        weight = getattr(base, parameter, None)
        if isinstance(weight, Tensor) and weight.dim() not in (2, 3):
            return f"a parameter has 2 or 3 dimensions to be adapted, this one has {weight.dim()}"
        if isinstance(weight, Tensor) and weight.dtype not in FLOATS:
            return f"{weight.dtype} has no products; its parameter cannot be adapted"
        for name in ("lora_dropout", "use_dora", "lora_bias"):
            if getattr(params, name):
                return f"{name} needs a layer's input, and a parameter has none"
        return init_fault(params, "parameters")

    def add_adapter(self, name: str, params: LoRAParams) -> None:
        """See :meth:`AdapterModule.add_adapter`."""
        weight = self._value()
        outputs, inputs = weight.shape[-2:]
        if self._is_transposed(weight):
            outputs, inputs = inputs, outputs
        ranks = params.r * (weight.shape[0] if weight.dim() == 3 else 1)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        options: TensorOptions = {"device": weight.device, "dtype": dtype}
        self.lora_A[name] = Factor((ranks, inputs), initial_down(params), options)
        self.lora_B[name] = Factor((outputs, ranks), initial_up(params), options)

    def factors(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """The adapter's ``A [E, r, in]`` and ``B [E, out, r]``: the same memory."""
        rank = self.params[name].r
        down = self.lora_A[name].weight.unflatten(0, (-1, rank))
        up = self.lora_B[name].weight.unflatten(1, (rank, -1)).permute(2, 0, 1)
        return [(down, up)]

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """See :meth:`AdapterLayer.merge_into`."""
        weight, ((down, up),) = tensors[self.parameter], self.factors(name)
        if self._is_transposed(weight):
            down, up = up.mT, down.mT
        stack = weight if weight.dim() == 3 else weight.unsqueeze(0)
        scaling = self.params[name].scaling
        # In place, so that autocast leaves the dtype alone.
        stack.baddbmm_(up.to(weight.dtype), down.to(weight.dtype), alpha=scaling)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module."""
        if not self.used:
            return self.base_layer(*args, **kwargs)
        weight = self._value().clone()
        for name in self.used:
            self.merge_into({self.parameter: weight}, name)
        with self._replaced_by(weight):
            return self.base_layer(*args, **kwargs)

    def _value(self) -> Tensor:
        """The owner's parameter; of a parametrized one, what it stands for."""
        owner = self.owner
        if parametrize.is_parametrized(owner, self.parameter):
            # Not the attribute, whose value parametrize.cached() would keep.
            entries = cast("nn.ModuleDict", owner.parametrizations)
            return cast("Tensor", entries[self.parameter]())
        return cast("Tensor", getattr(owner, self.parameter))

    def _is_transposed(self, weight: Tensor) -> bool:
        return weight.dim() == 3 and bool(getattr(self.owner, "is_transposed", False))

    @contextlib.contextmanager
    def _replaced_by(self, weight: Tensor) -> Iterator[None]:
        """Let the owner compute with another tensor, and in any case with its own again."""
        owner, name = self.owner, self.parameter
        entries: dict[str, Any] = owner._parameters
        entry: Tensor | nn.Module = weight
        if parametrize.is_parametrized(owner, name):
            entries = cast("nn.ModuleDict", owner.parametrizations)._modules
            entry = _Constant(weight)
        entries[name], own = entry, entries[name]
        try:
            yield
        finally:
            entries[name] = own


class _Constant(nn.Module):
    """Stands in for the parametrizations of a parameter."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self._value = [value]

    def forward(self) -> Tensor:
        """The value."""
        return self._value[0]
