"""Prompt tuning: the method's parameters, and what adapts a model."""

import dataclasses
from typing import Any, Literal

from core_plugin.params import require
from core_plugin.types.peft import BasePeft

OF_BASE = ("token_dim", "num_layers", "num_attention_heads")  # the peft library finds them out
OF_TEXT = ("prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs")


@dataclasses.dataclass(frozen=True)
class PromptTuningParams:
    """The parameters of prompt tuning."""

    num_virtual_tokens: int = 20
    """How many learned embeddings come before those of the input, at least 1."""
    prompt_tuning_init: Literal["RANDOM", "SAMPLE_VOCAB", "TEXT"] = "RANDOM"
    """Normal values, or embeddings of random tokens. TEXT is known from files, and is as RANDOM."""
    weights: str | None = None
    """A directory with an adapter's files to start from."""

    def __post_init__(self) -> None:
        number = self.num_virtual_tokens
        require((number >= 1, f"num_virtual_tokens must be at least 1, got {number}"))


class PromptTuning(BasePeft):
    """Trains embeddings that come before the input's: https://arxiv.org/abs/2104.08691."""

    Params = PromptTuningParams
    peft_type = "PROMPT_TUNING"
    prefix = "prompt_"
    training_only = frozenset({"prompt_tuning_init", *OF_BASE, *OF_TEXT})
    neutral = {"num_transformer_submodules": 1, "task_type": "CAUSAL_LM", "modules_to_save": None}
    neutral = neutral | dict.fromkeys((*OF_BASE, *OF_TEXT))

    @staticmethod
    def model_adapter() -> Any:
        """See :meth:`BasePeft.model_adapter`."""
        from core_plugin_prompt_tuning.prompt import Prompt

        return Prompt
