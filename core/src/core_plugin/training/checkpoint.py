"""Checkpoint directories: written aside, verified, renamed; complete or absent.

checkpoints/step-00000100/
manifest.json    size and SHA-256 of every other file
run.json         step, loss, configuration, fingerprints of the plugins
state/           the strategy's: tensors of the model and the optimizer
scheduler.pt     rank-00000.pt ...    tokenizer.json    adapter/ (if there is one)
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from core_plugin.errors import CheckpointError
from core_plugin.training import saved
from core_plugin.training.saved import FORMAT, MANIFEST, Saved
from core_plugin.training.saved import verify as verify
from core_plugin.training.world import Progress, World

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: Where they are.
        world: The ranks; every method but :meth:`steps` is collective. What they exchange goes
            over its control group alone, so that with a group of its own they can be called in a
            thread of its own.
        keep: How many are kept, the newest ones.
        keep_best: Keep the one with the lowest loss, too.
    """

    def __init__(self, directory: Path, world: World, keep: int, keep_best: bool = True) -> None:
        self._directory = directory
        self._world = world
        self._keep, self._keep_best = keep, keep_best
        self._verified: dict[Path, Any] = {}
        """On the first rank: the stamps of the files of those that were found to be whole."""

    @property
    def progress(self) -> Progress:
        """How a save that is under way gets on."""
        return self._world.progress

    def steps(self) -> dict[int, Path]:
        """The complete checkpoints by step, in order; what an interrupted save left is none."""
        return saved.steps(self._directory)

    def save(self, step: int, write: Callable[[Path, World], None]) -> Path:
        """Write a checkpoint, and remove those that are not to be kept.

        Args:
            step: Its step.
            write: Called on every rank, with an empty directory and the ranks.

        Raises:
            CheckpointError: On every rank, if it failed on one; nothing is left of it. That others
                cannot be removed is no failure: it is warned about.
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
                write(partial, self._world)
                files = self._world.from_first(
                    saved.files(partial) if self._world.rank == 0 else None
                )
            with self._world.together(what, CheckpointError):
                hashes = _hash_files(partial, files[self._world.rank :: self._world.size])
            shares = self._world.gather(hashes)
            with self._world.together(what, CheckpointError):
                if self._world.rank == 0:
                    _complete(partial, final, {k: v for share in shares for k, v in share.items()})
                    self._verified[final] = saved.stamps(final)
        except BaseException:
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        try:
            self._prune(final)
        except CheckpointError as error:
            if self._world.rank == 0:
                warnings.warn(f"the checkpoint {final} is complete, but {error}", stacklevel=2)
        return final

    def _prune(self, new: Path) -> None:
        """Remove what is not to be kept, and what interrupted saves left."""
        what = f"removing old checkpoints in {self._directory}"
        checkpoints = self._on_first(what, lambda: saved.listed(self._directory))
        kept = saved.kept(checkpoints, self._keep, self._keep_best, self._is_whole)
        with self._world.together(what, CheckpointError):
            if self._world.rank == 0:
                for directory in saved.left_over(self._directory):
                    shutil.rmtree(directory, ignore_errors=True)
                for one in checkpoints:
                    if one not in kept and one.path != new and one.path.exists():
                        saved.remove(one.path)

    def newest(self) -> Path | None:
        """The newest checkpoint whose files are as its manifest says; None if there is none.

        Ones that are broken are warned about and set aside, so that they do not count among those
        that are kept.
        """
        what = f"looking for checkpoints in {self._directory}"
        checkpoints = self._on_first(what, lambda: saved.listed(self._directory))
        return next((one.path for one in reversed(checkpoints) if self._is_whole(one)), None)

    def _is_whole(self, checkpoint: Saved) -> bool:
        """Whether a checkpoint verifies; what did, and has not changed since, is not read again."""
        path, what = checkpoint.path, f"verifying the checkpoint {checkpoint.path}"
        if self._on_first(what, lambda: self._verified.get(path) == saved.stamps(path)):
            return True
        faults = self.verify(path)
        with self._world.together(what, CheckpointError):
            if self._world.rank == 0:
                if faults:
                    _set_aside(path, faults)
                else:
                    self._verified[path] = saved.stamps(path)
        return not faults

    def _on_first(self, what: str, ask: Callable[[], T]) -> T:
        """The first rank's answer, on every rank."""
        with self._world.together(what, CheckpointError):
            answer = ask() if self._world.rank == 0 else None
        return self._world.from_first(answer)

    def verify(self, path: Path) -> list[str]:
        """What is wrong with a checkpoint's files; the ranks share the work."""
        faults = verify(path, self._world.rank, self._world.size)
        return sorted({fault for of_rank in self._world.gather(faults) for fault in of_rank})


def _set_aside(path: Path, faults: Sequence[str]) -> None:
    aside = path.with_name(saved.BROKEN + path.name)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    warnings.warn(
        f"the checkpoint {path} is broken, and set aside as {aside.name}: {'; '.join(faults)}",
        stacklevel=3,
    )


def _hash_files(directory: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Hash files, and see that they are on the disk."""
    hashes = {}
    for name in names:
        file = directory / name
        sync(file)
        hashes[name] = {"size": file.stat().st_size, "sha256": saved.sha256(file)}
    return hashes


def _complete(partial: Path, final: Path, files: Mapping[str, Any]) -> None:
    manifest = partial / MANIFEST
    with manifest.open("w", encoding="utf-8") as opened:
        json.dump({"format": FORMAT, "files": files}, opened, indent=1, sort_keys=True)
        opened.flush()
        os.fsync(opened.fileno())
    for directory in [p for p in partial.rglob("*") if p.is_dir()] + [partial]:
        sync(directory)
    if final.exists():
        saved.remove(final)
    partial.rename(final)
    for directory in (final.parent, final.parent.parent):
        sync(directory)


def sync(path: Path) -> None:
    """See that a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
