"""Arguments that several commands have."""

import sys
from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Values that go before the file's: optimizer.lr=1e-3 distributed=ddp ...",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def wants_tracebacks() -> bool:
    """Whether ``--debug`` was given, before the command or after it."""
    return "--debug" in sys.argv
