"""A method whose module imports torch, and whose parameters have no defaults."""

from __future__ import annotations

import dataclasses

from torch import nn

from core_plugin.adapters.layer import AdapterLayer
from core_plugin.types.peft import BasePeft


class Layer(AdapterLayer):
    """An adapter layer that adapts nothing."""


@dataclasses.dataclass
class HeavyParams:
    rank: int


class Heavy(BasePeft):
    Params = HeavyParams
    peft_type = "HEAVY"
    prefix = "heavy_"
    patterns = {"rank_pattern": "rank"}

    @staticmethod
    def layers() -> dict[type[nn.Module], type[AdapterLayer]]:
        return {nn.Linear: Layer}

    @classmethod
    def config(cls, params: HeavyParams) -> dict[str, object]:
        return {"rank": {params.rank}}
