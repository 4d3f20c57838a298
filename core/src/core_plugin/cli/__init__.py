"""The command line: one file a command."""

import signal
import sys
import warnings
from typing import Annotated, Any

import typer

from core_plugin import CorePluginError, __version__
from core_plugin.cli import (
    checkpoints,
    conformance,
    doctor,
    export,
    info,
    listing,
    schema,
    train,
    validate,
)
from core_plugin.cli.arguments import Debug, wants_tracebacks

app = typer.Typer(
    help="Train with PyTorch: one YAML file, every part of it a plugin.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("train")(train.train)
app.command("validate")(validate.validate)
app.command("list")(listing.list_plugins)
app.command("info")(info.info)
app.command("doctor")(doctor.doctor)
app.command("schema")(schema.schema)
app.command("export")(export.export)
app.add_typer(checkpoints.app, name="checkpoints")
app.command("test")(conformance.conformance)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"core-plugin {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    pass  # --debug is looked for wherever it stands


def main() -> None:
    """Run the command line; what goes wrong is a message, with a traceback only if asked for."""
    warnings.showwarning = _show_warning
    try:
        app()
    except CorePluginError as error:
        if wants_tracebacks():
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        if wants_tracebacks():
            raise
        from core_plugin.training import blame

        print(f"error: {blame.told(error)}\n{blame.HINT}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
