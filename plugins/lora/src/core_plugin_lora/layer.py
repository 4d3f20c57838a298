"""What the layers have in common whose update is of one matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core_plugin.adapters.layer import AdapterLayer, tensor_options
from core_plugin.errors import ConfigError
from core_plugin.tensors import copy_full, gather
from core_plugin_lora.dora import Magnitude, row_norms

if TYPE_CHECKING:
    from core_plugin_lora.plugin import LoRAParams


class LoRAMatrix(AdapterLayer):
    """A layer whose weight, seen as a matrix ``W [out, in]``, has low-rank updates ``B A``."""

    base_layer: Any
    down_name: ClassVar[str] = "lora_A.weight"
    """What A is called in a file, ``[r, in]``."""
    up_name: ClassVar[str] = "lora_B.weight"
    """What B is called, ``[out, r]``."""
    lora_magnitude_vector: nn.ModuleDict
    """DoRA's; only where an adapter has it."""

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        """The base layer's weight as ``W``: the same memory."""
        return weight

    def factors(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """An adapter's A and B."""
        raise NotImplementedError

    def by_output(self, values: Tensor) -> Tensor:
        """Values of the outputs, ``[out]``, in the shape that multiplies a result."""
        return values

    def add_magnitude(self, name: str, shape: Sequence[int]) -> None:
        """Make DoRA's lengths of the rows of an adapter; :meth:`initialize` fills them."""
        if "lora_magnitude_vector" not in self._modules:
            self.lora_magnitude_vector = nn.ModuleDict()
        options = tensor_options(self.base_layer)
        self.lora_magnitude_vector[name] = Magnitude(shape, nn.init.ones_, options)

    @torch.no_grad()
    def initialize(self, name: str) -> None:
        """See :meth:`AdapterModule.initialize`."""
        if self.params[name].use_dora:
            magnitude = self._magnitude(name).weight
            copy_full(magnitude, self._norms(name).view(magnitude.shape))

    def adapter_parameters(self, name: str) -> Iterator[tuple[str, str, nn.Parameter]]:
        """See :meth:`AdapterModule.adapter_parameters`."""
        for own, in_file, parameter in super().adapter_parameters(name):
            yield own, in_file.replace("magnitude_vector.weight", "magnitude_vector"), parameter

    def clash(self, names: Sequence[str]) -> str | None:
        """See :meth:`AdapterModule.clash`."""
        alone = [name for name in names if self.params[name].use_dora]
        return f"{alone[0]!r} has use_dora, so it applies alone" if alone else None

    def converted(
        self, name: str, params: Any, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """See :meth:`AdapterModule.converted`: a smaller rank, and any strength, will do."""
        held: LoRAParams = self.params[name]
        if params is None and not (held.use_dora or held.changes_base):
            return {own: torch.zeros(t.shape) for _, own, t in self.adapter_parameters(name)}
        if params is None:
            why = "use_dora" if held.use_dora else f"init_lora_weights {held.init_lora_weights!r}"
            raise ConfigError(f"it has no tensors for this layer, whose adapter has {why}")
        if held.changes_base and params.scaling != held.scaling:
            raise ConfigError(
                f"init_lora_weights is {held.init_lora_weights!r}, which has taken out of the base "
                f"what r and lora_alpha say; those have to stay {held.r} and {held.lora_alpha}"
            )
        as_held = {key: getattr(held, key) for key in ("r", "lora_alpha", "use_rslora")}
        super().converted(name, dataclasses.replace(params, **as_held), tensors)
        missing = held.r - params.r
        if missing and held.changes_base:
            raise ConfigError(f"r is {params.r}, and the base was changed for {held.r}")
        if missing < 0:
            raise ConfigError(f"r is {params.r}, and at most {held.r} has room in the model")
        changed = dict(tensors)
        changed[self.down_name] = _padded(tensors[self.down_name], 0, missing)
        changed[self.up_name] = _padded(tensors[self.up_name], 1, missing)
        for key in {self.up_name, "lora_B.bias"} & tensors.keys():
            changed[key] = changed[key] * (params.scaling / held.scaling)
        return changed

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """See :meth:`AdapterLayer.merge_into`."""
        weight, ((down, up),) = self.matrix(tensors["weight"]), self.factors(name)
        # In place, so that autocast leaves the dtype alone.
        weight.addmm_(up.to(weight.dtype), down.to(weight.dtype), alpha=self.params[name].scaling)
        if self.params[name].use_dora:
            norms = torch.linalg.vector_norm(weight, dim=1)
            weight.mul_(self._magnitude(name)(norms)[:, None])

    def _magnitude(self, name: str) -> Magnitude:
        return self.lora_magnitude_vector[name]  # type: ignore[return-value]

    def _norms(self, name: str) -> Tensor:
        """The lengths of the rows of ``W + scaling · B A``, which gradients take for constants."""
        ((down, up),) = self.factors(name)
        weight = self.matrix(gather(self.base_layer.weight.detach()))
        return row_norms(
            weight, gather(down.detach()), gather(up.detach()) * self.params[name].scaling
        )

    def _rescaled(self, result: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """DoRA: the base's result with the trained lengths, and what the update is multiplied by.

        The base's bias has no part in it. The change is what is multiplied, so that a dtype with
        few numbers near 1 still tells it from nothing.
        """
        factor = self._magnitude(name)(self._norms(name))
        bias = getattr(self.base_layer, "bias", None)
        if bias is not None and not bias.requires_grad:
            bias = gather(bias)  # the base may have a group of its own in fully_shard
        plain = result if bias is None else result - self.by_output(bias).to(result.dtype)
        change = self.by_output(factor - 1).to(result.dtype)
        return torch.addcmul(result, plain, change), factor


def _padded(tensor: Tensor, dim: int, missing: int) -> Tensor:
    """A tensor with zeros at the end of a dimension."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing))


def add_product(result: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """``result + scaling · left @ right`` in one operation, in the dtype of ``result``.

    Args:
        result: ``[..., out]``.
        left: ``[..., r]``.
        right: ``[r, out]``.
        scaling: A number.
    """
    kind = result.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return _add_product(result, left, right, scaling)
    return _add_product(result, left, right, scaling)


def _add_product(result: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    left, right = left.to(result.dtype), right.to(result.dtype)
    rows = result.reshape(-1, result.shape[-1])
    flat = torch.addmm(rows, left.reshape(-1, left.shape[-1]), right, alpha=scaling)
    return flat.view(result.shape)
