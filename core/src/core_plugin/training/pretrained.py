"""What ``from_pretrained`` of transformers reads: files of tensors, configuration, tokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
from torch import Tensor

MODEL_FILE = "model.safetensors"

Tensors = dict[str, Tensor]


def write_tensors(
    directory: Path, tensors: Tensors, read: Callable[[Tensors], Tensors], shard_size: int
) -> None:
    """Write tensors into one safetensors file, or into several and their index.

    Args:
        directory: Where to.
        tensors: All of them by name, in order; their values may be on ``meta``.
        read: Gives some of them their values; it is called once for each file, and what it gave
            is let go before the next.
        shard_size: The bytes that a file holds, at most; a larger tensor has a file of its own.
    """
    shards = _shards(tensors, shard_size)
    files = _file_names(len(shards))
    for file, shard in zip(files, shards, strict=True):
        safetensors.torch.save_file(read(shard), directory / file, {"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": {n: f for f, shard in zip(files, shards, strict=True) for n in shard},
        }
        _write_json(directory / f"{MODEL_FILE}.index.json", index)


def _shards(tensors: Tensors, size: int) -> list[Tensors]:
    """The tensors file by file, in order."""
    shards: list[Tensors] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > size:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [MODEL_FILE]
    stem, suffix = MODEL_FILE.split(".")
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def write_config(
    directory: Path, architecture: Mapping[str, Any], tensors: Tensors, special: Mapping[str, int]
) -> None:
    """Write ``config.json``.

    Args:
        directory: Where to.
        architecture: See :meth:`core_plugin.types.model.BaseModel.transformers_config`.
        tensors: The model's.
        special: The ids of the tokens ``bos`` and ``eos``, where there are such.
    """
    floating = [t.dtype for t in tensors.values() if t.is_floating_point()]
    widest = functools.reduce(torch.promote_types, floating, floating[0])
    # Without these, transformers takes ids of the architecture's first tokenizer.
    ids = {f"{role}_token_id": special.get(role) for role in ("bos", "eos")}
    config = {**ids, **architecture, "dtype": str(widest).removeprefix("torch.")}
    _write_json(directory / "config.json", config)


def write_tokenizer_config(
    directory: Path, tokenizer: tokenizers.Tokenizer, special: Mapping[str, int]
) -> None:
    """Write ``tokenizer_config.json``: what transformers wants to know beside ``tokenizer.json``.

    Args:
        directory: Where to.
        tokenizer: The one in ``tokenizer.json``.
        special: The ids of the tokens ``bos`` and ``eos``, where there are such.
    """
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    others = [t.content for id_, t in added if t.special and id_ not in special.values()]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": tokenizer.id_to_token(id_) for role, id_ in special.items()},
        "additional_special_tokens": others,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def special_tokens(tokenizer: tokenizers.Tokenizer, end: str | None) -> dict[str, int]:
    """The ids of the tokens that begin (``bos``) and end (``eos``) a text, where there are such.

    Args:
        tokenizer: It tells what it puts around a text.
        end: What ended one in training; it goes before what the tokenizer puts there.
    """
    own = type(tokenizer).from_str(tokenizer.to_str())
    own.no_truncation()
    own.no_padding()
    text = own.encode("a")
    found = {}
    if 0 in text.special_tokens_mask:
        around = {"bos": 0, "eos": -1}
        found = {r: text.ids[at] for r, at in around.items() if text.special_tokens_mask[at]}
    if end is not None and (trained := tokenizer.token_to_id(end)) is not None:
        found["eos"] = trained
    return found


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
