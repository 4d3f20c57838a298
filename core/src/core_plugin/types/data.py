"""Training data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from core_plugin.contract import Implementation
from core_plugin.plugin import BasePlugin

if TYPE_CHECKING:
    import tokenizers
    import torch


class Samples(Protocol):
    """A map from a sample's index to the sample.

    An index always gives the same sample: on every rank, in every epoch, and after a resume.
    Which one is read when, and by which rank, is the training loop's business: the order is a
    function of the seed and of one global sample counter, for any number of ranks.
    """

    def __len__(self) -> int:
        """The number of samples in one epoch."""

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        """A sample: ``input_ids [length]`` and ``labels [length]``, both int64.

        ``labels`` holds the token that follows each position, or
        :data:`~core_plugin.types.model.IGNORED` where no loss is taken.
        """


class BaseData(Implementation, abstract=True):
    """A data source."""

    @staticmethod
    @abstractmethod
    def tokenizer(params: Any) -> tokenizers.Tokenizer:
        """The tokenizer, loaded or trained. Called on one rank if the model brings none."""

    @staticmethod
    @abstractmethod
    def load(params: Any, tokenizer: tokenizers.Tokenizer) -> Samples:
        """The samples; every rank calls it and gets the same ones.

        Raises:
            ConfigError: The files are missing, or a line in them is wrong.
        """

    @staticmethod
    def end_token(params: Any) -> str | None:
        """The token that ends a text, so that whoever generates one can stop at it, or None."""
        return None

    @staticmethod
    def collate(samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A micro-batch ``[batch, length]``; shorter samples are padded on the right.

        The padding is supervised nowhere, and a causal model does not see it from the left.
        """
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from core_plugin.types.model import IGNORED

        padding = {"labels": IGNORED}
        batch = {}
        for key in samples[0]:
            parts = [sample[key] for sample in samples]
            if len({len(part) for part in parts}) == 1:
                batch[key] = torch.stack(parts)
            else:
                batch[key] = pad_sequence(parts, True, padding.get(key, 0))
        return batch


class DataPlugin(BasePlugin, contract=BaseData):
    """The type of data sources."""
