"""The checkpoints on the disk: which there are, whether they are whole, and which are kept.

It asks no other rank, and needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
RUN_FILE = "run.json"
BROKEN = "broken-"
"""How the name of a checkpoint begins that a run found to be broken, and set aside."""
_COMPLETE = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    path: Path
    loss: float | None
    """The mean over the supervised tokens of the steps that were logged since the one before."""


def steps(directory: Path) -> dict[int, Path]:
    """The complete checkpoints by step, in order; what an interrupted save left is none."""
    if not directory.is_dir():
        return {}
    found = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := _COMPLETE.fullmatch(path.name))
    }
    return dict(sorted(found.items()))


def listed(directory: Path) -> list[Saved]:
    """The complete checkpoints with their losses, in order."""
    return [Saved(step, path, _loss(path)) for step, path in steps(directory).items()]


def set_aside(directory: Path) -> list[Saved]:
    """The broken ones that runs have set aside, in order."""
    return sorted(
        (
            Saved(int(match[1]), path, _loss(path))
            for path in directory.glob(f"{BROKEN}*")
            if (match := _COMPLETE.fullmatch(path.name.removeprefix(BROKEN)))
        ),
        key=lambda one: one.step,
    )


def left_over(directory: Path) -> list[Path]:
    """What interrupted saves and removals left."""
    return sorted((*directory.glob(".partial-*"), *directory.glob(".removed-*")))


def description(path: Path) -> dict[str, Any]:
    """What a checkpoint says of its run. Raises OSError or ValueError if it cannot be read."""
    text = (path / RUN_FILE).read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def _loss(path: Path) -> float | None:
    try:
        loss = float(description(path)["loss"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return loss if math.isfinite(loss) else None


# Retention


def best(checkpoints: Sequence[Saved], is_whole: Callable[[Saved], bool]) -> Saved | None:
    """The whole one with the lowest loss, of equal ones the newest; one without a loss is none."""
    with_loss = [one for one in checkpoints if one.loss is not None]
    return next(filter(is_whole, sorted(with_loss, key=lambda one: (one.loss, -one.step))), None)


def kept(
    checkpoints: Sequence[Saved], keep: int, keep_best: bool, is_whole: Callable[[Saved], bool]
) -> list[Saved]:
    """Those that retention keeps: the newest ones that are whole, and the best one.

    Args:
        checkpoints: All, in the order of their steps.
        keep: How many of the newest.
        keep_best: Whether the best is kept too.
        is_whole: Asked once of each, from the newest on and then from the best on, until enough
            are found.
    """
    is_whole = functools.cache(is_whole)
    newest = list(itertools.islice(filter(is_whole, reversed(checkpoints)), keep))
    lowest = best(checkpoints, is_whole) if keep_best else None
    return [one for one in checkpoints if one in newest or one == lowest]


def remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that an interruption leaves no broken one."""
    doomed = path.with_name(f".removed-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


# Verification


def verify(path: Path, rank: int = 0, world_size: int = 1, *, content: bool = True) -> list[str]:
    """What is wrong with the files of a checkpoint, one rank's share of them.

    Without ``content`` only the names and sizes are compared.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        format_, entries = manifest["format"], manifest["files"].items()
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in entries}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{path / MANIFEST} cannot be read ({type(error).__name__}: {error})"]
    if format_ != FORMAT:
        return [f"{path / MANIFEST} has the format {format_!r}, not {FORMAT}"]
    found = [
        _fault(path, name, *expected[name], content) for name in sorted(expected)[rank::world_size]
    ]
    faults = [fault for fault in found if fault]
    if rank == 0:
        try:
            added = set(files(path)) - set(expected) - {MANIFEST}
            faults += [f"{name} was added" for name in sorted(added)]
        except OSError as error:
            faults.append(f"{path} cannot be listed ({error})")
    return faults


def _fault(path: Path, name: str, size: int, digest: str, content: bool) -> str | None:
    """What is wrong with one file."""
    file = path / name
    try:
        if not file.is_file():
            return f"{name} is missing"
        if (found := file.stat().st_size) != size:
            return f"{name} has {found} bytes, not {size}"
        if content and sha256(file) != digest:
            return f"{name} has another content than was written (SHA-256)"
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None


def files(directory: Path) -> list[str]:
    """The names of all files in a directory and below it."""
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def stamps(directory: Path) -> list[tuple[str, int, int]]:
    """The path, size and time of change of each file: while they stay, so does the content.

    What cannot be looked at, or vanishes meanwhile, is left out.
    """
    stamps = []
    for where, _, names in os.walk(directory):
        for file in (os.path.join(where, name) for name in names):
            with contextlib.suppress(OSError):
                stat = os.stat(file)
                stamps.append((file, stat.st_size, stat.st_mtime_ns))
    return sorted(stamps)


def sha256(file: Path) -> str:
    """The SHA-256 of a file's content."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
