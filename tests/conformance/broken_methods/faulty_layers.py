"""The layers of the methods, and what each fault changes in them.

A fault is put into the classes when the first adapter that has it is made; a process has one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core_plugin.adapters.layer import AdapterLayer, AdapterParameters, ModelAdapter

RANK, SCALE = 3, 0.5
FAULTS: dict[str, Callable[[ModuleType], None]] = {}


@functools.cache
def put_in(name: str) -> None:
    if name:
        FAULTS[name](sys.modules[__name__])


def fault(name: str) -> Callable[[Callable[[ModuleType], None]], Callable[[ModuleType], None]]:
    def add(function: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        FAULTS[name] = function
        return function

    return add


class LowRank(AdapterLayer):
    """``base(x) + SCALE · up down x``."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.faulty_down = AdapterParameters(self.fill_down)
        self.faulty_up = AdapterParameters(nn.init.zeros_)

    @staticmethod
    def fill_down(parameter: Tensor) -> None:
        nn.init.kaiming_uniform_(parameter, a=5**0.5)

    def sizes(self) -> tuple[int, int]:
        raise NotImplementedError

    def add_adapter(self, name: str, params: Any) -> None:
        put_in(params.fault)
        inputs, outputs = self.sizes()
        self.faulty_down.add(name, (RANK, inputs), self.base_layer)
        self.faulty_up.add(name, (outputs, RANK), self.base_layer)

    def base(self, x: Tensor) -> Tensor:
        return self.base_layer(x)

    def down(self, x: Tensor, name: str) -> Tensor:
        raise NotImplementedError

    def update(self, x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        up = self.faulty_up[name].to(dtype)
        return SCALE * F.linear(self.down(x, name).to(dtype), up)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        for name in self.used:
            result = result + self.update(x, name, result.dtype)
        return result

    def product(self, name: str) -> Tensor:
        """The update of a weight ``[out, in]``."""
        return SCALE * (self.faulty_up[name] @ self.faulty_down[name])


class Linear(LowRank):
    def sizes(self) -> tuple[int, int]:
        return self.base_layer.in_features, self.base_layer.out_features

    def down(self, x: Tensor, name: str) -> Tensor:
        x = F.dropout(x, self.params[name].dropout, self.training)
        return F.linear(x, self.faulty_down[name].to(x.dtype))

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        tensors["weight"].add_(self.product(name).to(tensors["weight"]))


class Embedding(LowRank):
    def sizes(self) -> tuple[int, int]:
        return self.base_layer.num_embeddings, self.base_layer.embedding_dim

    def down(self, x: Tensor, name: str) -> Tensor:
        return F.embedding(x, self.faulty_down[name].t(), self.base_layer.padding_idx)

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        tensors["weight"].add_(self.product(name).t().to(tensors["weight"]))


class Door(ModelAdapter):
    """Multiplies a model's outputs, one number for each place of the last dimension."""

    child = "door_adapter"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.door_vector = AdapterParameters(nn.init.normal_)
        self._shape = (11,)
        self._base = [next(m for m in model.modules() if isinstance(m, nn.Embedding))]

    def add_adapter(self, name: str, params: Any) -> None:
        put_in(params.fault)
        self.door_vector.add(name, self._shape, self._base[0])

    def attach(self, model: nn.Module) -> None:
        self.hooks = [model.register_forward_hook(self.multiply)]

    def multiply(self, model: nn.Module, args: Any, output: Tensor) -> Tensor:
        for name in self.used:
            output = output * self.door_vector[name].to(output.dtype)
        return output


# Faults of layers


@fault("a new adapter is not neutral")
def _(layers: ModuleType) -> None:
    create = LowRank.__init__

    def __init__(self: LowRank, base_layer: nn.Module) -> None:
        create(self, base_layer)
        self.faulty_up = AdapterParameters(nn.init.ones_)

    LowRank.__init__ = __init__


@fault("the output is float32")
def _(layers: ModuleType) -> None:
    right = LowRank.forward
    LowRank.forward = lambda self, x: right(self, x).float()


@fault("the weights' dtype is taken for the output's")
def _(layers: ModuleType) -> None:
    def update(self: LowRank, x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return SCALE * F.linear(self.down(x, name), self.faulty_up[name])

    LowRank.update = update


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


@fault("a backward pass is wrong")
def _(layers: ModuleType) -> None:
    right = Linear.down
    Linear.down = lambda self, x, name: Halved.apply(right(self, x, name))


@fault("a part is never trained")
def _(layers: ModuleType) -> None:
    right = Embedding.down
    Embedding.down = lambda self, x, name: right(self, x, name).detach()


@fault("dropout never ends")
def _(layers: ModuleType) -> None:
    def down(self: Linear, x: Tensor, name: str) -> Tensor:
        x = F.dropout(x, self.params[name].dropout, training=True)
        return F.linear(x, self.faulty_down[name].to(x.dtype))

    Linear.down = down


@fault("every call draws")
def _(layers: ModuleType) -> None:
    right = LowRank.base
    LowRank.base = lambda self, x: right(self, x) + 0 * torch.rand(())


@fault("the input is written to")
def _(layers: ModuleType) -> None:
    right = Linear.down
    Linear.down = lambda self, x, name: right(self, x.detach().mul_(1.01) / 1.01, name)


@fault("strides are not looked at")
def _(layers: ModuleType) -> None:
    right = LowRank.down
    right = Linear.down
    Linear.down = lambda self, x, name: right(
        self, x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()), name
    )


@fault("samples depend on each other")
def _(layers: ModuleType) -> None:
    right = Linear.down
    Linear.down = lambda self, x, name: right(self, x - x.mean(dim=0), name)


@fault("an empty batch is an error")
def _(layers: ModuleType) -> None:
    right = Linear.down
    Linear.down = lambda self, x, name: right(self, x / (x.abs().max() + 1), name)


@fault("adapters have the base's dtype")
def _(layers: ModuleType) -> None:
    right = LowRank.add_adapter

    def add_adapter(self: LowRank, name: str, params: Any) -> None:
        right(self, name, params)
        for holder in (self.faulty_down, self.faulty_up):
            holder[name].data = holder[name].data.to(self.base_layer.weight.dtype)

    LowRank.add_adapter = add_adapter


@fault("the base layer is not called")
def _(layers: ModuleType) -> None:
    def base(self: Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.base_layer.weight, self.base_layer.bias)

    Linear.base = base


@fault("only a new adapter is filled")
def _(layers: ModuleType) -> None:
    AdapterParameters.reset_parameters = lambda self: None


@fault("filled again it is different")
def _(layers: ModuleType) -> None:
    AdapterParameters.reset_parameters = lambda self: [
        nn.init.zeros_(parameter) for parameter in self.values()
    ]


@fault("the graph breaks")
def _(layers: ModuleType) -> None:
    right = LowRank.forward

    def forward(self: LowRank, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return right(self, x)

    LowRank.forward = forward


# Faults of a life with several adapters


@fault("the last adapter is used")
def _(layers: ModuleType) -> None:
    def settle(self: LowRank) -> None:
        self.used = self.used and (list(self.adapters)[-1],)

    LowRank.settle = settle


@fault("disabled it goes on")
def _(layers: ModuleType) -> None:
    def settle(self: LowRank) -> None:
        self.used = tuple(name for name in self.active if name in self.adapters)

    LowRank.settle = settle


@fault("an adapter leaves something behind")
def _(layers: ModuleType) -> None:
    def remove(self: LowRank, name: str) -> None:
        AdapterLayer.remove(self, name)
        with torch.no_grad():
            self.base_layer.weight.mul_(1.001)

    LowRank.remove = remove


@fault("a copy uses the original")
def _(layers: ModuleType) -> None:
    def settle(self: LowRank) -> None:
        self.kept = lambda x: LowRank.forward(self, x)

    LowRank.settle = settle
    Linear.forward = lambda self, x: self.kept(x)


@fault("something is in no state dict")
def _(layers: ModuleType) -> None:
    right = LowRank.add_adapter

    def add_adapter(self: LowRank, name: str, params: Any) -> None:
        right(self, name, params)
        self.scales = {**getattr(self, "scales", {}), name: 1 + torch.rand(())}

    def down(self: Linear, x: Tensor, name: str) -> Tensor:
        return self.scales[name].to(x.dtype) * right_down(self, x, name)

    right_down = Linear.down
    LowRank.add_adapter, Linear.down = add_adapter, down


# Faults of merging


@fault("merging forgets the scale")
def _(layers: ModuleType) -> None:
    right = LowRank.product
    LowRank.product = lambda self, name: right(self, name) / SCALE


@fault("merging rounds in between")
def _(layers: ModuleType) -> None:
    right = LowRank.product

    def product(self: LowRank, name: str) -> Tensor:
        return right(self, name).to(self.base_layer.weight.dtype)

    LowRank.product = product


@fault("merging writes into the base")
def _(layers: ModuleType) -> None:
    def merge_into(self: Linear, tensors: Mapping[str, Tensor], name: str) -> None:
        update = self.product(name).to(tensors["weight"])
        tensors["weight"].add_(update)
        self.base_layer.weight.data.add_(1e-3 * update)

    Linear.merge_into = merge_into


@fault("what is no number is merged as zero")
def _(layers: ModuleType) -> None:
    right = LowRank.product
    LowRank.product = lambda self, name: right(self, name).nan_to_num(0, 0, 0)


# Faults on several ranks


@fault("ranks begin with different values")
def _(layers: ModuleType) -> None:
    def initialize(self: LowRank, name: str) -> None:
        if torch.distributed.is_initialized():
            with torch.no_grad():
                self.faulty_down[name].add_(torch.distributed.get_rank())

    LowRank.initialize = initialize


@fault("parameters are kept from before")
def _(layers: ModuleType) -> None:
    def settle(self: LowRank) -> None:
        self.kept = {name: [self.faulty_up[name]] for name in self.used}

    def update(self: LowRank, x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        return SCALE * F.linear(self.down(x, name).to(dtype), self.kept[name][0].to(dtype))

    LowRank.settle, LowRank.update = settle, update


# Faults at a model's door


@fault("the hook stays")
def _(layers: ModuleType) -> None:
    Door.detach = lambda self: None


@fault("the hook is the original's")
def _(layers: ModuleType) -> None:
    def attach(self: Door, model: nn.Module) -> None:
        def multiply(model: nn.Module, args: Any, output: Tensor) -> Tensor:
            return Door.multiply(self, model, args, output)

        self.hooks = [model.register_forward_hook(multiply)]

    Door.attach = attach


@fault("the output has another shape")
def _(layers: ModuleType) -> None:
    right = Door.multiply
    Door.multiply = lambda self, *call: right(self, *call)[:, 1:]
