"""IA³: the method's parameters, and its layer for each kind of base layer."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from core_plugin.params import require
from core_plugin.types.peft import BasePeft, PeftParams, Rule, check_rule


@dataclasses.dataclass(frozen=True)
class IA3Params(PeftParams):
    """The parameters of IA³."""

    feedforward_modules: Rule | None = None
    """Those of ``target_modules`` whose inputs are scaled; of the others it is the outputs."""
    feedforward: bool = False
    """Scale the inputs of all targets, and not those of ``feedforward_modules`` alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rule("feedforward_modules", self.feedforward_modules)
        inputs, targets = self.feedforward_modules, self.target_modules
        if isinstance(inputs, list) and isinstance(targets, list):
            alone = sorted({*inputs} - {*targets})
            require((not alone, f"feedforward_modules has {alone}, which target_modules has not"))


class IA3(BasePeft):
    """Trains vectors that scale the inputs or outputs of layers: https://arxiv.org/abs/2205.05638."""

    Params = IA3Params
    peft_type = "IA3"
    prefix = "ia3_"
    mixes = True
    patterns = {"feedforward_modules": "feedforward"}
    neutral = {"fan_in_fan_out": False, "init_ia3_weights": True}
    # The shapes of a file's vectors say what feedforward_modules says.
    training_only = frozenset({*neutral, "feedforward_modules"})

    @staticmethod
    def layers() -> Mapping[Any, Any]:
        """Linear layers, also those of GPT-2, and convolutions."""
        from torch import nn

        from core_plugin_ia3.layers import IA3Conv, IA3Conv1D, IA3Linear

        of_gpt2 = "transformers.pytorch_utils.Conv1D"
        return {nn.Linear: IA3Linear, of_gpt2: IA3Conv1D, nn.Conv2d: IA3Conv, nn.Conv3d: IA3Conv}

    @classmethod
    def config(cls, params: IA3Params) -> Mapping[str, Any]:
        """See :meth:`BasePeft.config`; one regular expression says whose inputs are scaled."""
        every = super().config(params).items()
        fields = {k: v for k, v in every if v is not None or not k.startswith("layers_")}
        inputs = params.feedforward_modules or []
        if inputs and isinstance(inputs, list):  # the library takes a list for ends of words, too
            inputs = rf"(.*\.)?({'|'.join(map(re.escape, inputs))})"
        return fields | {"feedforward_modules": ".*" if fields.pop("feedforward") else inputs}
