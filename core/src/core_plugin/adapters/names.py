"""The names of tensors: in memory with an adapter, before it came, and in an adapter's file.

In memory and in files the names are the peft library's: ``X.lora_A.default.weight`` in memory is
``base_model.model.X.lora_A.weight`` in the file, and the base layer's weight is
``X.base_layer.weight``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

BASE_LAYER = "base_layer"
"""What an adapter layer calls the layer that it stands in for."""

FILE_PREFIX = "base_model.model."
"""What the peft library's wrapper objects put before every name in a file."""


def base_name(name: str) -> str:
    """The name that a base parameter had before injection.

    ``layers.0.q_proj.base_layer.weight`` was ``layers.0.q_proj.weight``; others are unchanged.
    """
    return ".".join(part for part in name.split(".") if part != BASE_LAYER)


def adapter_state(
    state_dict: Mapping[str, Tensor], adapter_name: str, prefix: str = ""
) -> dict[str, Tensor]:
    """The tensors of one adapter by the names that they have in its file, sorted.

    Args:
        state_dict: Whole tensors by in-memory name. Those of the base and of other adapters are
            left out.
        adapter_name: Which adapter.
        prefix: The method's prefix. Without it, a base parameter is taken for the adapter's if
            one of the modules on its path has the adapter's name.
    """
    state = {}
    for name in sorted(state_dict):
        split = split_name(name, adapter_name, prefix)
        if split:
            module, rest = split
            state[FILE_PREFIX + ".".join([*module, *rest])] = state_dict[name]
    return state


def split_name(name: str, adapter_name: str, prefix: str) -> tuple[list[str], list[str]] | None:
    """Split an adapter parameter's in-memory name where its adapter layer's own names begin.

    Returns:
        The path of the layer, and the rest without the adapter's name
        (``X.lora_A.default.weight`` gives ``X`` and ``lora_A.weight``); None for the name of
        anything else.
    """
    parts = name.split(".")
    for i in range(len(parts) - 1):
        if parts[i].startswith(prefix) and parts[i + 1] == adapter_name:
            return parts[:i], [parts[i], *parts[i + 2 :]]
    return None
