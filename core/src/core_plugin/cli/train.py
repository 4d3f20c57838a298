"""``core-plugin train``."""

from __future__ import annotations

from typing import Annotated

import typer

from core_plugin.cli.arguments import Debug, Overrides, RunFile


def train(
    file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train, as a YAML file says; the whole file is checked before anything starts.

    Under torchrun, or in a SLURM step of several tasks, this process is one rank of the run.
    """
    from core_plugin import config, policy

    wish = ["checkpoint.resume=auto"] if resume else []
    run = config.load(file, [*(overrides or []), *wish])
    policy.active().warn_of_unknown_names()

    from core_plugin.training.worker import Worker
    from core_plugin.training.world import place_from_environment

    worker = Worker(run, debug)
    launcher = run["launcher"]
    if place_from_environment() is not None:
        code = worker()
    else:
        code = launcher.implementation.launch(launcher.params, worker)
    raise typer.Exit(code)
