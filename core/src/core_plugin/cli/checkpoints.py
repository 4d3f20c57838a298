"""``core-plugin checkpoints``."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from core_plugin.cli.arguments import Json
from core_plugin.cli.output import console, print_json
from core_plugin.errors import CheckpointError, ConfigError
from core_plugin.training import saved
from core_plugin.training.saved import Saved

QUIET = 3600.0
"""Seconds that nothing has changed in what an interrupted save left, unless it still goes on."""

app = typer.Typer(help="List, verify and prune a run's checkpoints.", no_args_is_help=True)
Run = Annotated[Path, typer.Argument(help="The directory of a run.", show_default=False)]


@app.command("list")
def list_checkpoints(run: Run, as_json: Json = False) -> None:
    """List a run's checkpoints: step, loss, size, ranks, time, and whether they are complete.

    Only names and sizes of files are looked at; verify reads them. The loss is the mean since the
    checkpoint before. Those that a run found to be broken, and set aside, come last.
    """
    rows = list(_rows(_checkpoints_of(run)))
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("step", "loss", "size", "ranks", "written"):
        table.add_column(title, justify="right")
    for title in ("state", ""):
        table.add_column(title, overflow="fold")
    for row in rows:
        loss = "" if row["loss"] is None else f"{row['loss']:.4g}"
        cells = [str(row["step"]), loss, decimal(row["bytes"]), str(row["ranks"] or "")]
        state = "; ".join(["broken", *row["faults"]]) if row["faults"] else "complete"
        marks = ", ".join(row["marks"])
        style = "yellow" if row["faults"] else None
        table.add_row(*cells, row["written"], state, marks, style=style)
    console().print(table)


def _rows(directory: Path) -> Iterator[dict[str, Any]]:
    checkpoints = saved.listed(directory)
    faults = {one: saved.verify(one.path, content=False) for one in checkpoints}
    complete = [one for one in checkpoints if not faults[one]]
    best = saved.best(complete, lambda one: True)
    for one in saved.set_aside(directory):
        faults[one] = [f"set aside as {one.path.name}"]
    for one, found in faults.items():
        marks = {"newest": complete[-1:] == [one], "best": one == best}
        with contextlib.suppress(FileNotFoundError):  # a run that goes on may have removed it
            yield _row(one, found, [name for name, has in marks.items() if has])


def _row(one: Saved, faults: list[str], marks: list[str]) -> dict[str, Any]:
    return {
        "step": one.step,
        "loss": one.loss,
        "bytes": _size(one.path),
        "ranks": _ranks(one),
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_changed(one.path))),
        "faults": faults,
        "marks": marks,
        "path": str(one.path),
    }


def _ranks(one: Saved) -> int | None:
    try:
        ranks = saved.description(one.path)["world_size"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return ranks if isinstance(ranks, int) else None


@app.command("verify")
def verify(
    where: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="The directory of a run, for all of its checkpoints, or one checkpoint.",
            show_default=False,
        ),
    ],
) -> None:
    """Read every file, and compare it with what was written; exit with 1 if one is not the same."""
    one = (where / saved.MANIFEST).exists() or (where / saved.RUN_FILE).exists()
    paths = [where] if one else list(saved.steps(_checkpoints_of(where)).values())
    broken = []
    for path in paths:
        faults = saved.verify(path)
        print(f"{path}: {'broken' if faults else 'whole'}", flush=True)
        if faults:
            broken.append(f"the checkpoint {path} is broken:\n  " + "\n  ".join(faults))
    if broken:
        raise CheckpointError("\n".join(broken))


@app.command("prune")
def prune(
    run: Run,
    keep: Annotated[
        int,
        typer.Option(
            min=1, help="How many of the newest to keep, beside the best.", show_default=False
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
) -> None:
    """Remove a run's checkpoints but for the newest and the best, and what interrupted saves left.

    Kept are the --keep newest ones and the one with the lowest loss. They are verified first: one
    that is found to be broken does not count, and is left alone.

    Removed are, in this order: all others, the oldest first; broken ones that a run has set aside;
    and what interrupted saves left, unless it has changed within the last hour.
    """
    directory = _checkpoints_of(run)
    checkpoints = saved.listed(directory)
    broken: dict[Saved, list[str]] = {}

    def is_whole(one: Saved) -> bool:
        if faults := saved.verify(one.path):
            broken[one] = faults
        return one not in broken

    kept = saved.kept(checkpoints, keep, keep_best=True, is_whole=is_whole)
    for one, faults in broken.items():
        if one.path.exists():
            _warn(f"{one.path} is broken, and left alone: {'; '.join(faults)}")
    if checkpoints and not kept:
        raise CheckpointError(f"no checkpoint in {directory} is whole: nothing is removed")
    doomed = [one.path for one in checkpoints if one not in kept and one not in broken]
    doomed += [one.path for one in saved.set_aside(directory) if kept]
    doomed += list(_abandoned(directory))
    for path in doomed:
        size = decimal(_size(path))
        print(f"{'would remove' if dry_run else 'removing'} {path} ({size})", flush=True)
        if not dry_run:
            _remove(path)
    for one in kept:
        print(f"keeping {one.path}")


def _abandoned(directory: Path) -> Iterator[Path]:
    """What interrupted saves left, but for what may be a save that goes on."""
    for path in saved.left_over(directory):
        since = time.time() - _last_change(path)
        if since < QUIET:
            _warn(
                f"{path} has changed {since:.0f} s ago, and is left alone: a run may be at it. "
                "Remove it yourself if none is"
            )
        else:
            yield path


def _last_change(path: Path) -> float:
    """When something in a directory has changed: now, if it vanishes meanwhile."""
    try:
        return max(map(_changed, (path, *path.rglob("*"))))
    except FileNotFoundError:
        return time.time()


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.name.startswith(".") else saved.remove(path)
    except OSError as error:
        if path.exists():
            raise CheckpointError(f"{path} cannot be removed: {error}") from error


def _checkpoints_of(run: Path) -> Path:
    directory = run / "checkpoints"
    if not directory.is_dir():
        raise ConfigError(f"{run} is not the directory of a run: it has no checkpoints in it")
    return directory


def _changed(path: Path) -> float:
    try:
        return (path / saved.MANIFEST).stat().st_mtime
    except OSError:
        return path.stat().st_mtime


def _size(path: Path) -> int:
    return sum(size for _, size, _ in saved.stamps(path))


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
