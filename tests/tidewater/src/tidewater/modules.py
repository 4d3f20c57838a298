"""What needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core_plugin.adapters.layer import AdapterLayer, AdapterParameters
from tidewater import CALLS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidewater.plugins import KeelsonParams


class Summed(nn.Module):
    """A model whose gradients are summed over the ranks while ``summing`` is on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.summing = True
        for parameter in inner.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.sum)

    def sum(self, parameter: Tensor) -> None:
        """Sum one gradient."""
        if self.summing:
            CALLS["all_reduce"] += 1
            dist.all_reduce(parameter.grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model."""
        return self.inner(*args, **kwargs)


class Sextant(torch.optim.Optimizer):
    """``trail <- memory * trail + (1 - memory) * gradient``; a step is ``lr * sign(trail)``."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take a step."""
        CALLS["step"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["sights"] = state.get("sights", 0) + 1
                trail = state.setdefault("trail", torch.zeros_like(parameter))
                trail.lerp_(parameter.grad, 1 - group["memory"])
                parameter.sub_(trail.sign(), alpha=group["lr"])


class ScaledLinear(AdapterLayer):
    """A linear layer whose output ``[..., out]`` is multiplied by ``1 + scale [out]``."""

    base_layer: nn.Linear

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__(base_layer)
        self.keelson_scale = AdapterParameters(nn.init.zeros_)
        self.noise = 0.0

    def add_adapter(self, name: str, params: KeelsonParams) -> None:
        """Make the scale."""
        CALLS["add_adapter"] += 1
        self.noise = params.noise
        self.keelson_scale.add(name, (self.base_layer.out_features,), self.base_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the base layer's output."""
        output = self.base_layer(x)
        for name in self.used:
            scale = 1 + self.keelson_scale[name]
            if self.training and self.noise:
                scale = scale + self.noise * torch.randn_like(scale)
            output = output * scale
        return output
