"""``core-plugin train``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from core_plugin.cli.arguments import Debug, Overrides, RunFile, wants_tracebacks
from core_plugin.cli.output import console

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from core_plugin.config import RunConfig
    from core_plugin.training.dry_run import DryRun

_SIZES = ("parameters", "gradients", "optimizer", "total")


def train(
    file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be trained, and train nothing.")
    ] = False,
    world_size: Annotated[
        int | None,
        typer.Option(help="With --dry-run: the number of ranks; by default what the file says."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train, as a YAML file says; the whole file is checked before anything starts.

    The exit code is 0 for a run that finished; 75 for one that SIGTERM stopped after it saved,
    which is to go on with --resume; 130 for one that SIGINT stopped; 2 for a mistake in the file;
    and 1 for what failed or hung.

    Under torchrun, or in a SLURM step of several tasks, this process is one rank of the run.
    """
    from core_plugin import config, policy

    if world_size is not None and not dry_run:
        raise typer.BadParameter("it goes with --dry-run", param_hint="--world-size")
    wish = ["checkpoint.resume=auto"] if resume else []
    run = config.load(file, [*(overrides or []), *wish])
    policy.active().warn_of_unknown_names()
    if dry_run:
        _print_dry_run(run, world_size)
        return

    from core_plugin.training.worker import Worker
    from core_plugin.training.world import place_from_environment

    worker = Worker(run, wants_tracebacks())
    launcher = run["launcher"]
    if place_from_environment() is not None:
        code = worker()
    else:
        code = launcher.implementation.launch(launcher.params, worker)
    raise typer.Exit(code)


def _print_dry_run(run: RunConfig, world_size: int | None) -> None:
    from core_plugin.training.dry_run import dry_run
    from core_plugin.training.placement import size

    if world_size is None:
        world_size = run["launcher"].implementation.processes(run["launcher"].params)
    result = dry_run(run, world_size)
    _print_model(result)
    _print_optimizer(result.described)
    memory = _table("", *_SIZES)
    rows = {f"rank {rank} of {world_size}": kept for rank, kept in result.ranks.items()}
    for title, kept in (rows | {"the strategy's plan": result.planned}).items():
        memory.add_row(title, *(size(getattr(kept, part)) for part in _SIZES))
    out = console()
    out.print(memory)
    if result.fault:
        out.print(f"the optimizer is as planned: without values it takes no step ({result.fault})")
    out.print("activations, buffers, and what is gathered for a while come on top")


def _print_model(result: DryRun) -> None:
    from core_plugin.adapters import parts

    out = console()
    adapters = _table("module", "layer", "settings", "parameters")
    for part in parts(result.model):
        settings = " ".join(f"{field}={value}" for field, value in part.settings.items())
        adapters.add_row(part.module, part.kind, settings, f"{part.parameters:,}")
    if adapters.row_count:
        out.print(adapters)
    total = sum(p.numel() for p in result.model.parameters())
    trained = sum(p.numel() for p in result.model.parameters() if p.requires_grad)
    out.print(f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})")
    found = (f"{count} {name}" for name, count in result.blocks.items())
    out.print(f"repeated blocks: {', '.join(found) or 'none'}")


def _print_optimizer(described: Sequence[Mapping[str, Any]]) -> None:
    titles = list(dict.fromkeys(title for row in described for title in row))
    numbers = [
        title
        for title in titles
        if all(isinstance(row.get(title), int | float | None) for row in described)
    ]
    table = _table(*titles, numbers=numbers)
    for row in described:
        table.add_row(*(_cell(row.get(title)) for title in titles))
    if titles:
        console().print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(*titles: str, numbers: Sequence[str] = _SIZES) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", justify="right" if title in numbers else "left")
    return table
