"""Checkpoint directories: written aside, verified, renamed; complete or absent.

checkpoints/step-00000100/
manifest.json    size and SHA-256 of every other file
run.json         step, configuration, fingerprints of the plugins
state/           the strategy's: tensors of the model and the optimizer
scheduler.pt     rank-00000.pt ...    tokenizer.json    adapter/ (if there is one)
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core_plugin.errors import CheckpointError
from core_plugin.training.world import World

FORMAT = 1
MANIFEST = "manifest.json"
_COMPLETE = re.compile(r"step-(\d{8,})")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: Where they are.
        world: The ranks; every method but :meth:`steps` is collective.
        keep: How many are kept, the newest ones.
    """

    def __init__(self, directory: Path, world: World, keep: int) -> None:
        self._directory = directory
        self._world = world
        self._keep = keep

    def steps(self) -> dict[int, Path]:
        """The complete checkpoints by step, in order; what an interrupted save left is none."""
        if not self._directory.is_dir():
            return {}
        found = {
            int(match[1]): path
            for path in self._directory.iterdir()
            if (match := _COMPLETE.fullmatch(path.name))
        }
        return dict(sorted(found.items()))

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint; ``write`` is called on every rank with an empty directory.

        Raises:
            CheckpointError: On every rank, if it failed on one; nothing is left of it.
        """
        final = self._directory / f"step-{step:08d}"
        partial = self._directory / f".partial-{final.name}"
        what = f"saving the checkpoint {final}"
        try:
            with self._world.together(what, CheckpointError):
                if self._world.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
            with self._world.together(what, CheckpointError, collective=True):
                write(partial)
                files = self._world.from_first(_files(partial) if self._world.rank == 0 else None)
            with self._world.together(what, CheckpointError):
                hashes = _hash_files(partial, files[self._world.rank :: self._world.size])
            shares = self._world.gather(hashes)
            with self._world.together(what, CheckpointError):
                if self._world.rank == 0:
                    _complete(partial, final, {k: v for share in shares for k, v in share.items()})
        except BaseException:
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        with self._world.together(
            f"removing old checkpoints in {self._directory}", CheckpointError
        ):
            if self._world.rank == 0:
                self._prune(final)
        return final

    def _prune(self, saved: Path) -> None:
        """Remove what is older than the newest ones, and what interrupted saves left."""
        for left_over in (*self._directory.glob(".removed-*"), *self._directory.glob(".partial-*")):
            shutil.rmtree(left_over, ignore_errors=True)
        for path in list(self.steps().values())[: -self._keep]:
            if path != saved:
                _remove(path)

    def newest(self) -> Path | None:
        """The newest checkpoint whose files are as its manifest says; None if there is none.

        Ones that are broken are warned about and set aside, so that they do not count among those
        that are kept.
        """
        candidates = self._world.from_first([str(p) for p in reversed(self.steps().values())])
        for path in map(Path, candidates):
            faults = self.verify(path)
            if not faults:
                return path
            if self._world.rank == 0:
                aside = path.with_name(f"broken-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                warnings.warn(
                    f"the checkpoint {path} is broken, and set aside as {aside.name}: "
                    f"{'; '.join(faults)}",
                    stacklevel=2,
                )
        return None

    def verify(self, path: Path) -> list[str]:
        """What is wrong with a checkpoint's files; the ranks share the work."""
        faults = verify(path, self._world.rank, self._world.size)
        return sorted({fault for of_rank in self._world.gather(faults) for fault in of_rank})


def verify(path: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, one rank's share of them."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files: Mapping[str, Mapping[str, Any]] = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        return [f"{path / MANIFEST} cannot be read ({error})"]
    if manifest.get("format") != FORMAT:
        return [f"{path / MANIFEST} has the format {manifest.get('format')!r}, not {FORMAT}"]
    faults = []
    for name in sorted(files)[rank::world_size]:
        file = path / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif file.stat().st_size != files[name]["size"]:
            faults.append(f"{name} has {file.stat().st_size} bytes, not {files[name]['size']}")
        elif _sha256(file) != files[name]["sha256"]:
            faults.append(f"{name} has another content than was written (SHA-256)")
    if rank == 0:
        added = set(_files(path)) - set(files) - {MANIFEST}
        faults += [f"{name} was added" for name in sorted(added)]
    return faults


def _files(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def _hash_files(directory: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Hash files, and see that they are on the disk."""
    hashes = {}
    for name in names:
        file = directory / name
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        hashes[name] = {"size": file.stat().st_size, "sha256": _sha256(file)}
    return hashes


def _complete(partial: Path, final: Path, files: Mapping[str, Any]) -> None:
    manifest = partial / MANIFEST
    with manifest.open("w", encoding="utf-8") as opened:
        json.dump({"format": FORMAT, "files": files}, opened, indent=1, sort_keys=True)
        opened.flush()
        os.fsync(opened.fileno())
    for directory in [p for p in partial.rglob("*") if p.is_dir()] + [partial]:
        _sync_directory(directory)
    if final.exists():
        _remove(final)
    partial.rename(final)
    for directory in (final.parent, final.parent.parent):
        _sync_directory(directory)


def _remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that an interruption leaves no broken one."""
    doomed = path.with_name(f".removed-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# Random generators


def rng_state(device_state: Tensor | None) -> dict[str, Any]:
    """The state of this process's random generators, as plain data and tensors."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
    }
    if device_state is not None:
        state["device"] = device_state
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, words.tolist(), *rest]
    return state


def set_rng_state(state: Mapping[str, Any], set_device: Callable[[Tensor], None]) -> None:
    """Put back what :func:`rng_state` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "device" in state:
        set_device(state["device"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def seed_everything(seed: int) -> None:
    """Seed the random generators of this process."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
