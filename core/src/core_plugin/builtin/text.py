"""The data source ``text``: plain text in samples of one length."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from core_plugin.builtin import tokenization
from core_plugin.builtin.tokenization import TokenizerParams
from core_plugin.errors import ConfigError
from core_plugin.params import require
from core_plugin.types.data import BaseData, Samples
from core_plugin.types.model import IGNORED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import tokenizers
    import torch


class Text(BaseData):
    """Text files, one after the other, cut into windows that miss no token.

    Every document ends with the end-of-text token. A file may hold several documents with that
    token between them. Attention is not kept within a document.
    """

    @dataclasses.dataclass(frozen=True)
    class Params(TokenizerParams):
        """Where the text is, and how it is cut.

        Attributes:
            vocabulary_size: Tokens of the byte-level BPE that is trained on the text, the
                end-of-text token included; of little text it may get fewer. Unused with
                ``tokenizer``.
            tokenizer: A ``tokenizer.json`` to load instead.
            path: Files of UTF-8 text, or directories of .txt and .md files; None for Python's own
                language reference, which is installed with it (465 kB; differs between versions).
            sequence_length: Tokens of a sample, at least 1.
            end_of_text: The token that ends a document.
        """

        path: str | list[str] | None = None
        sequence_length: int = 256
        end_of_text: str = "<|endoftext|>"

        def __post_init__(self) -> None:
            super().__post_init__()
            require(
                (self.path not in ("", []), f"path must name a file, got {self.path!r}"),
                (
                    self.sequence_length >= 1,
                    f"sequence_length must be at least 1, got {self.sequence_length}",
                ),
                (bool(self.end_of_text), f"end_of_text must be a token, got {self.end_of_text!r}"),
            )

        @property
        def special_tokens(self) -> Sequence[str]:
            """The end-of-text token."""
            return (self.end_of_text,)

    @staticmethod
    def tokenizer(params: Params) -> tokenizers.Tokenizer:
        """Load the tokenizer, or train one on the text (2 s for 500 kB).

        Raises:
            ConfigError: A file is missing, empty, not UTF-8, or no ``tokenizer.json``.
        """
        return tokenization.make(params, [] if params.tokenizer else _documents(params))

    @staticmethod
    def load(params: Params, tokenizer: tokenizers.Tokenizer) -> Samples:
        """Tokenize all text and cut it.

        Raises:
            ConfigError: A file is missing, empty or not UTF-8, or the tokenizer lacks the
                end-of-text token.
        """
        import torch

        end = tokenizer.token_to_id(params.end_of_text)
        if end is None:
            raise ConfigError(
                f"data.end_of_text: the tokenizer has no token {params.end_of_text!r}; name the "
                "one that ends a document in its vocabulary"
            )
        documents = tokenization.encode(tokenizer, _documents(params), True)
        tokens = [token for ids in documents for token in (*ids, end)]
        return Windows(torch.tensor(tokens, dtype=torch.int32), params.sequence_length)

    @staticmethod
    def end_token(params: Params) -> str:
        """The end-of-text token."""
        return params.end_of_text


class Windows:
    """Samples that overlap by one token, so that each token but the first is predicted once."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 ``[length]``; the last is padded on the right."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window = self.tokens[index * self.length :][: self.length + 1].long()
        input_ids = window.new_zeros(self.length)
        labels = window.new_full((self.length,), IGNORED)
        input_ids[: len(window) - 1] = window[:-1]
        labels[: len(window) - 1] = window[1:]
        return {"input_ids": input_ids, "labels": labels}


def _documents(params: Text.Params) -> list[str]:
    if params.path is None:
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    return [tokenization.read(file) for file in tokenization.files(params.path, (".txt", ".md"))]
