"""Torch's own transformer encoders, whose fused kernels read weights and call no layers.

They do so in evaluation, and an adapter in a layer that is not called has no effect. So they are
kept from it while the model has adapters.
"""

from __future__ import annotations

from torch import nn

FLAGS: tuple[tuple[type[nn.Module], str], ...] = (
    # Zero stands for an activation that the kernel does not know.
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu"),
    # The encoder would make nested tensors, which the kernel alone takes.
    (nn.TransformerEncoder, "use_nested_tensor"),
)
"""The attribute of each kind of module that is zero where the kernel is not for it."""

BEFORE = "before_adapters"
"""The attribute that keeps the other one's name, and its value from before."""


def call_layers(module: nn.Module) -> None:
    """Let a module call its layers if it is one of torch's encoders, or of their layers."""
    for kind, flag in FLAGS:
        if isinstance(module, kind) and BEFORE not in vars(module):
            setattr(module, BEFORE, (flag, getattr(module, flag)))
            setattr(module, flag, 0)


def call_kernels(model: nn.Module) -> None:
    """Take back :func:`call_layers` in a whole model."""
    for module in model.modules():
        if before := vars(module).pop(BEFORE, None):
            setattr(module, *before)
