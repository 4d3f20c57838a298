"""``core-plugin export``."""

from pathlib import Path
from typing import Annotated

import typer

from core_plugin.cli.arguments import Debug


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
        bool, typer.Option("--merge", help="Write the model with the run's adapter merged into it.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's model as safetensors; of a run with an adapter, the adapter's files.

    The tokenizer and the run's configuration are written beside it.
    """
    from core_plugin.training.export import export as export_checkpoint

    found = export_checkpoint(checkpoint, directory, merge=merge)
    names = ", ".join(sorted(path.name for path in directory.iterdir()))
    print(f"{found} is in {directory}: {names}")
