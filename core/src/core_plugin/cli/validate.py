"""``core-plugin validate``."""

import typer

from core_plugin import config, policy
from core_plugin.cli.arguments import Json, Overrides, RunFile
from core_plugin.cli.output import print_json
from core_plugin.errors import ConfigError


def validate(file: RunFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a YAML file completely: names, parameters, combinations.

    Neither torch nor any device is touched.
    """
    try:
        run = config.load(file, overrides or [])
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"valid": False, "faults": error.faults})
        raise typer.Exit(error.exit_code) from None
    policy.active().warn_of_unknown_names()
    if as_json:
        print_json({"valid": True, "config": run.resolved()})
    else:
        print(f"{file} is valid")
