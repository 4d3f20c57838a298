"""The names of tensors: in memory with an adapter, before it came, and in an adapter's file.

In memory and in files the names are the peft library's: ``X.lora_A.default.weight`` in memory is
``base_model.model.X.lora_A.weight`` in the file, and the base layer's weight is
``X.base_layer.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from core_plugin.tensors import canonical_name as canonical_name

BASE_LAYER = "base_layer"
"""What an adapter layer calls the layer that it stands in for."""

SAVED = "modules_to_save"
"""What the layer of a module that is trained whole calls its copies, one an adapter."""

FILE_PREFIX = "base_model.model."
"""What the peft library's wrapper objects put before every name in a file."""


def base_name(name: str) -> str:
    """The name that a parameter of the model had before injection, or that its copy was made from.

    ``layers.0.q_proj.base_layer.weight`` was ``layers.0.q_proj.weight``, and
    ``score.modules_to_save.default.weight`` is a copy of ``score.weight``; others are unchanged.
    """
    parts = iter(canonical_name(name).split("."))
    kept = []
    for part in parts:
        if part == SAVED:
            next(parts, None)  # the adapter's name
        elif part != BASE_LAYER:
            kept.append(part)
    return ".".join(kept)


def renamed(name: str, renames: Mapping[str, str]) -> str:
    """A name from a file, as the architecture calls it now.

    Args:
        name: The name in the file.
        renames: See :attr:`core_plugin.types.model.BaseModel.renames`.
    """
    for pattern, replacement in renames.items():
        name = re.sub(pattern, replacement, name)
    return name
