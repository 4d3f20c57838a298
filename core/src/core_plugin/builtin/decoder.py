"""The architecture ``decoder``: a Llama-like causal language model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_plugin.errors import ConfigError
from core_plugin.params import require
from core_plugin.types.model import BaseModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


_ADAPTER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ia3": {
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    }
}


class Decoder(BaseModel):
    """Pre-norm transformer decoder whose parameters are named and laid out as Llama's in
    Hugging Face transformers, so that their checkpoints load and its own load there.
    """  # noqa: D205

    @dataclasses.dataclass(frozen=True)
    class Params:
        """The sizes of the model and the weights it starts from.

        Attributes:
            hidden_size: Width of the residual stream; a multiple of twice ``heads``.
            layers: Number of blocks.
            heads: Number of query heads.
            key_value_heads: Number of key and value heads, a divisor of ``heads``; None for as
                many as ``heads``.
            intermediate_size: Width inside the feed-forward part; None for 8/3 of
                ``hidden_size``, rounded up to a multiple of 64.
            rope_theta: Base of the rotary frequencies.
            norm_eps: Added to the mean square in each RMSNorm.
            tie_embeddings: Use the token embeddings as the output projection too.
            initializer_std: Standard deviation of the initial weights; the projections into the
                residual stream get it divided by ``sqrt(2 * layers)``.
            weights: A safetensors file, or a directory of them, to start from; None for random
                weights.
        """

        hidden_size: int = 256
        layers: int = 4
        heads: int = 4
        key_value_heads: int | None = None
        intermediate_size: int | None = None
        rope_theta: float = 10000.0
        norm_eps: float = 1e-5
        tie_embeddings: bool = False
        initializer_std: float = 0.02
        weights: str | None = None

        def __post_init__(self) -> None:
            sizes = ("hidden_size", "layers", "heads", "key_value_heads", "intermediate_size")
            require(
                *(
                    (value is None or value >= 1, f"{name} must be at least 1, got {value}")
                    for name in sizes
                    for value in [getattr(self, name)]
                ),
                (
                    0 < self.rope_theta < math.inf,
                    f"rope_theta must be above 0, got {self.rope_theta}",
                ),
                (0 <= self.norm_eps < 1, f"norm_eps must be in [0, 1), got {self.norm_eps}"),
                (
                    0 < self.initializer_std < math.inf,
                    f"initializer_std must be above 0, got {self.initializer_std}",
                ),
            )
            require(
                (
                    self.hidden_size % (2 * self.heads) == 0,
                    f"hidden_size must be a multiple of twice heads ({2 * self.heads}), "
                    f"got {self.hidden_size}",
                ),
                (
                    self.heads % (self.key_value_heads or self.heads) == 0,
                    f"key_value_heads must divide heads ({self.heads}), got {self.key_value_heads}",
                ),
            )

        @property
        def inner_size(self) -> int:
            """Width inside the feed-forward part."""
            return self.intermediate_size or 64 * math.ceil(8 * self.hidden_size / (3 * 64))

    @staticmethod
    def build(params: Params, vocabulary_size: int) -> nn.Module:
        """The model: ``input_ids [batch, sequence]`` to ``logits [batch, sequence, vocabulary]``.

        Args:
            params: The sizes.
            vocabulary_size: Rows of the embeddings and of the output projection.
        """
        from core_plugin.builtin.decoder_model import CausalLM

        return CausalLM(params, vocabulary_size)

    @staticmethod
    def blocks(model: nn.Module) -> Sequence[nn.Module]:
        """The decoder layers, in order."""
        return list(model.get_submodule("model.layers").children())

    @staticmethod
    def adapter_defaults(method: str) -> Mapping[str, Any]:
        """Of IA³, what its paper adapts: keys, values, and what enters the last projection."""
        return _ADAPTER_DEFAULTS.get(method, {})

    @staticmethod
    def untied(params: Params) -> Params:
        """The same with an output projection of its own."""
        return dataclasses.replace(params, tie_embeddings=False)

    @staticmethod
    def transformers_config(params: Params, vocabulary_size: int) -> Mapping[str, Any]:
        """That of ``LlamaForCausalLM``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocabulary_size,
            "hidden_size": params.hidden_size,
            "intermediate_size": params.inner_size,
            "num_hidden_layers": params.layers,
            "num_attention_heads": params.heads,
            "num_key_value_heads": params.key_value_heads or params.heads,
            "hidden_act": "silu",
            "rms_norm_eps": params.norm_eps,
            "rope_theta": params.rope_theta,  # where transformers 4 reads it
            "rope_parameters": {"rope_type": "default", "rope_theta": params.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": params.tie_embeddings,
            "initializer_range": params.initializer_std,
        }

    @staticmethod
    def weights(params: Params) -> Sequence[str]:
        """The safetensors files that ``weights`` stands for, sorted.

        Raises:
            ConfigError: There is no such file or directory, or it holds no safetensors file.
        """
        if params.weights is None:
            return ()
        path = Path(params.weights)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not path.exists():
            raise ConfigError(f"model.weights: {path} does not exist")
        if not files or any(file.suffix != ".safetensors" for file in files):
            raise ConfigError(
                f"model.weights: {path} is neither a safetensors file nor a directory of them"
            )
        return [str(file) for file in files]
