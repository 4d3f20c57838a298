"""``core-plugin train``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from core_plugin.cli.arguments import Debug, Overrides, RunFile
from core_plugin.cli.output import console

if TYPE_CHECKING:
    from core_plugin.config import RunConfig


def train(
    file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be trained, and train nothing.")
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
    if dry_run:
        _print_plan(run)
        return

    from core_plugin.training.worker import Worker
    from core_plugin.training.world import place_from_environment

    worker = Worker(run, debug)
    launcher = run["launcher"]
    if place_from_environment() is not None:
        code = worker()
    else:
        code = launcher.implementation.launch(launcher.params, worker)
    raise typer.Exit(code)


def _print_plan(run: RunConfig) -> None:
    from rich.table import Table

    from core_plugin.adapters import parts
    from core_plugin.training.assembly import build_model, tokenizer_of

    model = build_model(run, tokenizer_of(run).get_vocab_size())
    table = Table(box=None, pad_edge=False)
    for title in ("module", "layer", "settings", "parameters"):
        table.add_column(
            title, overflow="fold", justify="right" if title == "parameters" else "left"
        )
    for part in parts(model):
        settings = " ".join(f"{field}={value}" for field, value in part.settings.items())
        table.add_row(part.module, part.kind, settings, f"{part.parameters:,}")
    out = console()
    if table.row_count:
        out.print(table)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    out.print(f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})")
