"""Gradients through a frozen embedding, which reentrant activation checkpointing needs.

Such a checkpoint gives gradients to what is inside only if one of its inputs requires one; the
first block's input does not where the embedding is frozen. So the embedding's output is made to
require one while a model says that it checkpoints, as Hugging Face's do with their attributes
``gradient_checkpointing``. Another model is left alone: it would compute gradients for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core_plugin.adapters.roles import input_embeddings
from core_plugin.adapters.tree import Sites


def let_gradients_through(model: nn.Module, model_sites: Sites | None = None) -> None:
    """Let the output of a model's input embedding require a gradient while it checkpoints.

    Args:
        model: The model.
        model_sites: Its modules, where they are known already.
    """
    model_sites = model_sites or Sites(model)
    # Not asked of the module itself: of thousands, hasattr takes as long as all the rest.
    says = "gradient_checkpointing"
    checkpointing = [m for m in model_sites.parents if says in vars(m) or hasattr(type(m), says)]
    for site in input_embeddings(model_sites) if checkpointing else ():
        if not _hooks(site.base):
            site.base.register_forward_hook(InputGradients(checkpointing))


def release(model: nn.Module) -> None:
    """Take back :func:`let_gradients_through`."""
    for module in model.modules():
        for key in _hooks(module):
            del module._forward_hooks[key]


def _hooks(module: nn.Module) -> list[int]:
    hooks = module._forward_hooks.items()
    return [key for key, hook in hooks if isinstance(hook, InputGradients)]


class InputGradients:
    """The hook; ``checkpointing`` are the modules that say whether they checkpoint."""

    def __init__(self, checkpointing: Sequence[nn.Module]) -> None:
        self._checkpointing = checkpointing

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Mark the output, while gradients are on; torch.compile has no reentrant checkpoints."""
        on = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        needed = on and any(m.gradient_checkpointing for m in self._checkpointing)
        if needed and isinstance(output, Tensor):
            output.requires_grad_()
