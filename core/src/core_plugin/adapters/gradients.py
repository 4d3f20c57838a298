"""Gradients through a frozen embedding, which reentrant activation checkpointing needs.

Such a checkpoint gives gradients to what is inside only if one of its inputs requires one; the
first block's input does not where the embedding is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core_plugin.adapters.roles import input_embeddings
from core_plugin.adapters.tree import Site, sites


def let_gradients_through(model: nn.Module, model_sites: Sequence[Site] | None = None) -> None:
    """Let the output of a model's input embedding require a gradient, now and later.

    Args:
        model: The model.
        model_sites: Its modules, where they are known already.
    """
    model_sites = model_sites or sites(model)
    for site in input_embeddings(model_sites):
        if not _hooks(site.base):
            bases = (model, *(site.base for site in model_sites))
            site.base.register_forward_hook(InputGradients(bases))


def release(model: nn.Module) -> None:
    """Take back :func:`let_gradients_through`."""
    for module in model.modules():
        for key in _hooks(module):
            del module._forward_hooks[key]


def _hooks(module: nn.Module) -> list[int]:
    hooks = module._forward_hooks.items()
    return [key for key, hook in hooks if isinstance(hook, InputGradients)]


class InputGradients:
    """The hook. Where a model says whether it checkpoints (as Hugging Face's do), it is heeded."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Asked of the type first: of 30,000 modules, hasattr alone takes as long as all the rest.
        says = "gradient_checkpointing"
        self._says = [m for m in modules if says in vars(m) or hasattr(type(m), says)]

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Mark the output, while gradients are on; torch.compile has no reentrant checkpoints."""
        needed = not self._says or any(m.gradient_checkpointing for m in self._says)
        on = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if needed and on and isinstance(output, Tensor):
            output.requires_grad_()
