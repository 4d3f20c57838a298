"""What the built-in data sources share: files, tokenizers, and token ids."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from core_plugin.errors import ConfigError
from core_plugin.params import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import tokenizers

BYTES = 256
"""Tokens of a byte-level vocabulary before any merge."""


@dataclasses.dataclass(frozen=True)
class TokenizerParams:
    """The tokenizer of a data source.

    Attributes:
        vocabulary_size: Tokens of the byte-level BPE that is trained on the data, the special
            ones included; of little data it may get fewer. Unused with ``tokenizer``.
        tokenizer: A ``tokenizer.json`` to load instead.
    """

    vocabulary_size: int = 1024
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        require(
            (
                self.vocabulary_size >= BYTES + len(self.special_tokens),
                f"vocabulary_size must be at least {BYTES + len(self.special_tokens)} (the bytes "
                f"and {len(self.special_tokens)} special tokens), got {self.vocabulary_size}",
            )
        )

    @property
    def special_tokens(self) -> Sequence[str]:
        """The special tokens that a trained tokenizer gets."""
        return ()


def files(path: str | list[str], suffixes: tuple[str, ...]) -> list[Path]:
    """The files that ``data.path`` stands for: each one itself, and those in each directory.

    Args:
        path: One or several paths.
        suffixes: Which files of a directory are taken, below it at any depth, sorted by name.

    Raises:
        ConfigError: One does not exist, or a directory holds no such file.
    """
    found: list[Path] = []
    for root in map(Path, [path] if isinstance(path, str) else path):
        if not root.exists():
            raise ConfigError(f"data.path: {root} does not exist")
        if root.is_dir():
            inside = sorted(p for p in root.rglob("*") if p.suffix in suffixes and p.is_file())
            if not inside:
                raise ConfigError(f"data.path: {root} holds no {' or '.join(suffixes)} file")
            found += inside
        else:
            found.append(root)
    return found


def read(path: Path) -> str:
    """The text of a file, without a byte-order mark.

    Raises:
        ConfigError: It cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_bytes().decode().removeprefix("\ufeff")
    except OSError as error:
        raise ConfigError(f"data.path: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigError(f"data.path: {path} is not UTF-8: {wrong}") from None
    if not text.strip():
        raise ConfigError(f"data.path: {path} is empty")
    return text


def make(params: TokenizerParams, texts: Iterable[str]) -> tokenizers.Tokenizer:
    """Load the tokenizer that the parameters name, or train a byte-level BPE on the texts.

    The same texts give the same tokenizer, in any process.

    Raises:
        ConfigError: The tokenizer's file does not exist or is none.
    """
    if params.tokenizer is None:
        return _train(params, texts)
    from tokenizers import Tokenizer

    if not Path(params.tokenizer).is_file():
        raise ConfigError(f"data.tokenizer: {params.tokenizer} does not exist or is no file")
    try:
        return Tokenizer.from_file(params.tokenizer)
    except Exception as error:  # the library raises this very class
        raise ConfigError(
            f"data.tokenizer: {params.tokenizer} is no tokenizer.json: {error}"
        ) from error


def _train(params: TokenizerParams, texts: Iterable[str]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=params.vocabulary_size,
        special_tokens=list(params.special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], special: bool) -> list[list[int]]:
    """The token ids of each text, whole: nothing is cut off, padded, or put around it.

    Args:
        tokenizer: Left as it is.
        texts: The texts.
        special: Whether a special token that is written in a text becomes that token; else it is
            text like any other.
    """
    own = type(tokenizer).from_str(tokenizer.to_str())
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = not special
    return [e.ids for e in own.encode_batch_fast(list(texts), add_special_tokens=False)]
