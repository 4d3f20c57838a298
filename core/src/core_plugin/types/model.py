"""Model architectures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from core_plugin.contract import Implementation
from core_plugin.plugin import BasePlugin

if TYPE_CHECKING:
    import tokenizers
    import torch
    from torch import nn

IGNORED = -100
"""The label of a position that is not supervised."""


class BaseModel(Implementation, abstract=True):
    """An architecture: it describes a model on ``meta``, and says how its parts are initialised."""

    renames: ClassVar[Mapping[str, str]] = {}
    """What tensors were called in files that were written before the architecture was renamed:
    regular expressions for a part of a name, and what to put in its place.
    """

    @staticmethod
    @abstractmethod
    def build(params: Any, vocabulary_size: int) -> nn.Module:
        """The model. Called under ``torch.device("meta")``: no memory, no random numbers.

        Args:
            params: The implementation's ``Params``.
            vocabulary_size: The number of tokens that the run's tokenizer has.
        """

    @staticmethod
    def initialize(module: nn.Module) -> None:
        """Fill the parameters and buffers that a module of the model owns itself.

        Called once for each module that owns any, with real tensors and a seeded generator; not
        for its children, and not for what an adapter added. Buffers, persistent or not, are
        to be filled too.
        """
        module.reset_parameters()  # type: ignore[operator]

    @staticmethod
    def blocks(model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks, outermost first: what a strategy shards, recomputes or compiles."""
        return ()

    @staticmethod
    def adapter_defaults(method: str) -> Mapping[str, Any]:
        """What a PEFT method's parameters are where the run leaves them None.

        Args:
            method: The method's name, such as ``lora``.
        """
        return {}

    @staticmethod
    def untied(params: Any) -> Any:
        """The parameters of the same model without tensors that several modules share.

        A merged adapter can change a tensor for one of them. None: there is no such model.
        """
        return None

    @staticmethod
    def transformers_config(params: Any, vocabulary_size: int) -> Mapping[str, Any] | None:
        """The content of ``config.json`` for an architecture of Hugging Face transformers.

        That architecture has parameters of the same names and layout, and computes the same. The
        token ids ``bos_token_id`` and ``eos_token_id``, and ``dtype``, are added where a checkpoint
        is exported. None: there is no such architecture.

        Args:
            params: The implementation's ``Params``.
            vocabulary_size: See :meth:`build`.
        """
        return None

    @staticmethod
    def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The sum of the losses of all supervised tokens of a micro-batch: a scalar.

        The default calls ``model(input_ids)`` for logits ``[batch, sequence, vocabulary]`` and
        takes the cross entropy with ``labels [batch, sequence]``: the token that follows each
        position, or :data:`IGNORED`. It is computed in float32 at least.
        """
        from torch.nn import functional as F

        logits = model(batch["input_ids"]).flatten(0, 1)
        return F.cross_entropy(
            logits.float() if logits.itemsize < 4 else logits,
            batch["labels"].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )

    @staticmethod
    def tokenizer(params: Any) -> tokenizers.Tokenizer | None:
        """The tokenizer that belongs to the architecture's weights; None leaves it to the data."""
        return None

    @staticmethod
    def weights(params: Any) -> Sequence[str]:
        """The safetensors files to start from; none means to start from random weights."""
        return ()


class ModelPlugin(BasePlugin, contract=BaseModel):
    """The type of architectures."""
