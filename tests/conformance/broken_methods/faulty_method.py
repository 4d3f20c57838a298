"""Two small methods, each right in itself, that get one fault by their parameter."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from core_plugin.types.peft import BasePeft, PeftParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from core_plugin.adapters.layer import AdapterLayer, ModelAdapter


@dataclasses.dataclass(frozen=True)
class FaultyParams(PeftParams):
    fault: str = ""
    dropout: float = 0.0


class Faulty(BasePeft):
    """A low-rank update of linear layers and of embeddings."""

    Params = FaultyParams
    peft_type = "FAULTY"
    prefix = "faulty_"
    mixes = True

    @staticmethod
    def layers() -> Mapping[type[nn.Module] | str, type[AdapterLayer]]:
        import faulty_layers
        from torch import nn

        return {nn.Linear: faulty_layers.Linear, nn.Embedding: faulty_layers.Embedding}


@dataclasses.dataclass(frozen=True)
class FaultyDoorParams:
    fault: str = ""


class FaultyDoor(BasePeft):
    """A vector that multiplies a model's outputs."""

    Params = FaultyDoorParams
    peft_type = "FAULTY_DOOR"
    prefix = "door_"

    @staticmethod
    def model_adapter() -> type[ModelAdapter]:
        import faulty_layers

        return faulty_layers.Door
