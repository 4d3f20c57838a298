"""The data source ``jsonl``: prompts with completions, and chats, one JSON object a line."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from core_plugin.builtin import jsonl_records as records
from core_plugin.builtin import tokenization
from core_plugin.builtin.jsonl_records import Template
from core_plugin.builtin.tokenization import TokenizerParams
from core_plugin.params import require
from core_plugin.types.data import BaseData, Samples
from core_plugin.types.model import IGNORED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import tokenizers
    import torch


class JSONLines(BaseData):
    """Lines of ``{"prompt": ..., "completion": ...}`` or ``{"messages": [{"role": ..., "content":
    ...}, ...]}``. Completions, assistant messages, and the end mark after each, are supervised.
    A special token that is written in a text is plain text: no content can end its own turn.
    """  # noqa: D205

    @dataclasses.dataclass(frozen=True)
    class Params(TokenizerParams):
        """Where the lines are, and how they become tokens.

        Attributes:
            vocabulary_size: Tokens of the byte-level BPE that is trained on the texts, the
                template's marks included; of little text it may get fewer. Unused with
                ``tokenizer``.
            tokenizer: A ``tokenizer.json`` to load instead.
            path: Files of UTF-8 JSON lines, or directories of .jsonl files.
            sequence_length: Most tokens of a sample, at least 1; what is longer is cut on the
                right. A sample must be supervised somewhere before the cut.
            template: What is put around the texts.
        """

        path: str | list[str] = dataclasses.field(kw_only=True)
        sequence_length: int = 1024
        template: Template = dataclasses.field(default_factory=Template)

        def __post_init__(self) -> None:
            super().__post_init__()
            require(
                (self.path not in ("", []), f"path must name a file, got {self.path!r}"),
                (
                    self.sequence_length >= 1,
                    f"sequence_length must be at least 1, got {self.sequence_length}",
                ),
            )

        @property
        def special_tokens(self) -> Sequence[str]:
            """The template's marks."""
            return [mark for mark in dataclasses.astuple(self.template) if mark]

    @staticmethod
    def tokenizer(params: Params) -> tokenizers.Tokenizer:
        """Load the tokenizer, or train one on the contents.

        Raises:
            ConfigError: A file is missing, a line is wrong, or the tokenizer's file is.
        """
        if params.tokenizer is not None:
            return tokenization.make(params, [])
        samples = records.parse(params.path, params.template).values()
        return tokenization.make(params, [p.text for ps in samples for p in ps if not p.mark])

    @staticmethod
    def load(params: Params, tokenizer: tokenizers.Tokenizer) -> Samples:
        """Tokenize all samples, in the order of the lines.

        Raises:
            ConfigError: A file is missing or not UTF-8, or lines are wrong, or the cut leaves
                nothing supervised of them; with the file and line of each.
        """
        samples = records.parse(params.path, params.template)
        parts = [part for sample in samples.values() for part in sample]
        contents, marks = (
            iter(tokenization.encode(tokenizer, [p.text for p in parts if p.mark is mark], mark))
            for mark in (False, True)
        )
        loaded = Supervised(
            [
                [(next(marks if p.mark else contents), p.supervised) for p in sample]
                for sample in samples.values()
            ],
            params.sequence_length,
        )
        records.report(
            f"{where}: nothing supervised is left of it within sequence_length "
            f"({params.sequence_length} tokens)"
            for where, (_, labels) in zip(samples, loaded.samples, strict=True)
            if bool((labels == IGNORED).all())
        )
        return loaded

    @staticmethod
    def end_token(params: Params) -> str:
        """The mark that stands after a completion and after each message."""
        return params.template.end


class Supervised:
    """Samples of different lengths, kept as int32."""

    def __init__(self, samples: Sequence[Sequence[tuple[list[int], bool]]], length: int) -> None:
        import torch

        self.samples: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parts in samples:
            ids = [i for part, _ in parts for i in part][: length + 1]
            targets = [i if on else IGNORED for part, on in parts for i in part][: length + 1]
            self.samples.append(
                (
                    torch.tensor(ids[:-1], dtype=torch.int32),
                    torch.tensor(targets[1:], dtype=torch.int32),
                )
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 ``[length of the sample]``."""
        input_ids, labels = self.samples[index]
        return {"input_ids": input_ids.long(), "labels": labels.long()}
