"""The layers of IA³. Each vector has the shape that it has in the peft library's files."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from core_plugin.adapters.layer import AdapterLayer, AdapterParameters
from core_plugin_ia3.plugin import IA3Params


class IA3Linear(AdapterLayer):
    """A linear layer with vectors: ``[1, in]`` scales the input, ``[out, 1]`` the output.

    Products are computed in the wider of the two dtypes: bfloat16 has few numbers near 1.
    """

    base_layer: Any
    changes = ("weight", "bias")

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.ia3_l = AdapterParameters(nn.init.ones_)
        self.of_input: tuple[str, ...] = ()
        self.of_output: tuple[str, ...] = ()

    def add_adapter(self, name: str, params: IA3Params) -> None:
        """See :meth:`AdapterLayer.add_adapter`."""
        self.ia3_l.add(name, self._shape(params.feedforward), self.base_layer)

    def settle(self) -> None:
        """See :meth:`AdapterLayer.settle`."""
        self.of_input = tuple(n for n in self.used if self.params[n].feedforward)
        self.of_output = tuple(n for n in self.used if not self.params[n].feedforward)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the base layer, in its dtype."""
        for name in self.of_input:
            x = self._scaled(x, name)
        result = cast("Tensor", self.base_layer(x, *args, **kwargs))
        for name in self.of_output:
            result = self._scaled(result, name)
        return result

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """Scale the weight; and the bias, if it is the output that is scaled."""
        vector, of_input = self.ia3_l[name].detach(), self.params[name].feedforward
        self._scale(tensors["weight"], vector, of_input)
        if not of_input and "bias" in tensors:
            tensors["bias"].mul_(vector.flatten())

    def _scaled(self, x: Tensor, name: str) -> Tensor:
        vector: Tensor = self.ia3_l[name]
        return (x * vector.reshape(-1, *(1,) * (vector.dim() - 2))).to(x.dtype)

    def _shape(self, of_input: bool) -> tuple[int, ...]:
        outputs, inputs = self._matrix(self.base_layer.weight).shape
        return (1, inputs) if of_input else (outputs, 1)

    def _scale(self, weight: Tensor, vector: Tensor, of_input: bool) -> None:
        self._matrix(weight).mul_(vector)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight


class IA3Conv1D(IA3Linear):
    """The linear layer of GPT-2, whose weight is ``[in, out]``."""

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.t()


class IA3Conv(IA3Linear):
    """A convolution, with a factor a channel: vectors are ``[1, channels, 1, ...]``."""

    def _shape(self, of_input: bool) -> tuple[int, ...]:
        base = self.base_layer
        channels = base.in_channels if of_input else base.out_channels
        return (1, channels, *(1,) * len(base.kernel_size))

    def _scale(self, weight: Tensor, vector: Tensor, of_input: bool) -> None:
        if of_input:  # each group of filters sees channels of its own
            split = (self.base_layer.groups, -1)
            weight.unflatten(0, split).mul_(vector.unflatten(1, split).transpose(0, 1))
        else:
            weight.mul_(vector.transpose(0, 1))
