"""Low-rank adapters: the method's parameters, and its layer for each kind of base layer."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from core_plugin.types.peft import BasePeft, PeftParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from core_plugin.adapters.layer import AdapterLayer


@dataclasses.dataclass(frozen=True)
class LoRAParams(PeftParams):
    """The parameters of LoRA."""

    r: int = 8
    """The rank of the update of a weight, at least 1."""
    lora_alpha: int | float = 16
    """What the update is multiplied by, over the rank (see ``use_rslora``); above 0."""
    lora_dropout: float = 0.0
    """The share of a layer's inputs that the adapter does not see in training: 0 to below 1.

    An embedding's inputs are token numbers, of which none is dropped.
    """
    use_rslora: bool = False
    """Divide ``lora_alpha`` by the square root of the rank, not by the rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ValueError(f"r is a rank, a whole number of at least 1, got {self.r!r}")
        if not (math.isfinite(self.lora_alpha) and self.lora_alpha > 0):
            raise ValueError(f"lora_alpha is a finite number above 0, got {self.lora_alpha!r}")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout is from 0 to below 1, got {self.lora_dropout!r}")

    @property
    def scaling(self) -> float:
        """What the update is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class LoRA(BasePeft):
    """Trains a low-rank update of each weight: ``W x + B (A x) scaling``.

    LoRA, https://arxiv.org/abs/2106.09685; ``use_rslora``, https://arxiv.org/abs/2312.03732.
    """

    Params = LoRAParams
    prefix = "lora_"
    training_only = frozenset({"init_lora_weights", "lora_dropout"})

    @staticmethod
    def layer(base: nn.Module, params: LoRAParams) -> type[AdapterLayer] | None:
        """``nn.Linear`` and ``nn.Embedding`` have a layer."""
        from torch import nn

        from core_plugin_lora.layers import LoRAEmbedding, LoRALinear

        if isinstance(base, nn.Linear):
            return LoRALinear
        return LoRAEmbedding if isinstance(base, nn.Embedding) else None

    @staticmethod
    def config(params: LoRAParams) -> Mapping[str, Any]:
        """The settings, and those of the peft library that would change what the file means."""
        return {
            "peft_type": "LORA",
            "r": params.r,
            "lora_alpha": params.lora_alpha,
            "lora_dropout": params.lora_dropout,
            "use_rslora": params.use_rslora,
            "init_lora_weights": True,
            "alpha_pattern": {},
            "bias": "none",
            "fan_in_fan_out": False,
            "lora_bias": False,
            "rank_pattern": {},
            "use_dora": False,
        }
