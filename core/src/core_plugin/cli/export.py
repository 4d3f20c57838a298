"""``core-plugin export``."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from core_plugin.cli.arguments import Debug


class DType(StrEnum):
    """What the tensors of a model can be rounded to."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def size(text: str) -> int:
    """The bytes that a text such as ``500MB`` or ``2GiB`` stands for."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        found = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        found = 0
    if found < 1:
        raise typer.BadParameter(f"{text!r} is no size, such as 500MB or 2GiB")
    return found


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, or the directory of a run, whose newest one is meant.",
            show_default=False,
        ),
    ],
    directory: Annotated[
        Path, typer.Argument(help="Where to write; empty, or not there yet.", show_default=False)
    ],
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Write the model with the run's adapter merged into it. The whole model is then "
            "in memory.",
        ),
    ] = False,
    shard_size: Annotated[
        int,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help="What a file holds at most. So much memory is needed, at least that of the "
            "largest tensor.",
        ),
    ] = "5GB",  # type: ignore[assignment]  # the parser gets it
    dtype: Annotated[
        DType | None,
        typer.Option(
            help="Round the model's floating-point tensors to it.", show_default="as trained"
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's model for transformers; of a run with an adapter, the adapter's files.

    A model is safetensors and config.json. The tokenizer and the run's configuration are beside it.
    """
    import torch

    from core_plugin.training.export import export as export_checkpoint

    rounded = getattr(torch, dtype) if dtype else None
    exported = export_checkpoint(
        checkpoint, directory, merge=merge, shard_size=shard_size, dtype=rounded
    )
    names = {re.sub(r"-\d+-of-", "-*-of-", path.name) for path in directory.iterdir()}
    print(f"{exported.checkpoint} is in {directory}: {', '.join(sorted(names))}")
    for note in exported.notes:
        print(note)
