"""``core-plugin test``."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from core_plugin.errors import PluginUnavailableError


def conformance(
    plugin: Annotated[
        str, typer.Argument(help="The plugin, such as device:fake.", show_default=False)
    ],
    parameters: Annotated[
        list[str] | None,
        typer.Argument(help="Parameters of the plugin: devices=4 ...", show_default=False),
    ] = None,
    level: Annotated[int | None, typer.Option(help="Run the cases up to this level.")] = None,
    excepted: Annotated[
        list[str] | None,
        typer.Option("--except", metavar="CASE=REASON", help="A case that may fail, and why."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write a report for scripts.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a report as JUnit XML.")] = None,
    only: Annotated[str | None, typer.Option("-k", help="Run the cases whose names match.")] = None,
) -> None:
    """Test a plugin against its type's conformance suite, and say which level it reaches."""
    if importlib.util.find_spec("pytest") is None:
        raise PluginUnavailableError(
            "the conformance suites need pytest: pip install core-plugin[testing]"
        )
    from core_plugin import testing

    options = [f"--core-plugin={plugin}"]
    options += [f"--core-plugin-params={text}" for text in parameters or ()]
    options += [f"--core-plugin-except={text}" for text in excepted or ()]
    options += [f"--core-plugin-level={level}"] if level is not None else []
    options += [f"--core-plugin-report={json}"] if json else []
    options += [f"--junit-xml={junit}"] if junit else []
    options += ["-k", only] if only else []
    sys.exit(testing.run(options))
