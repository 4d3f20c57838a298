"""What a checkpoint holds beside the strategy's tensors, and going on from one."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from core_plugin import provenance
from core_plugin.config import RunConfig
from core_plugin.errors import CheckpointError, ConfigError
from core_plugin.training.assembly import Training
from core_plugin.training.checkpoint import Checkpoints, rng_state, seed_everything, set_rng_state
from core_plugin.training.world import World

RUN_FILE = "run.json"
_FREE_TO_CHANGE = (
    "checkpoint",
    "device",
    "distributed",
    "hooks",
    "launcher",
    "plugins",
    "train.deterministic",
    "train.log_every",
    "train.micro_batch_size",
    "train.steps",
)
"""What a resumed run may have otherwise than the one that saved, without being asked."""


def write(training: Training, directory: Path) -> None:
    """Write a checkpoint's content; called on every rank. See :mod:`.checkpoint` for the files."""
    config, world = training.config, training.world
    peft = config.get("peft")
    tensors = directory / "state"
    if world.rank == 0:
        tensors.mkdir()
        _write_run(training, directory)
        torch.save(training.scheduler.state_dict(), directory / "scheduler.pt")
        training.tokenizer.save(str(directory / "tokenizer.json"))
    generators = rng_state(training.backend.rng_state(training.device))
    torch.save(generators, directory / f"rng-{world.rank:05d}.pt")
    world.barrier()
    training.strategy.save_checkpoint(
        training.model, training.optimizer, tensors, include_frozen=peft is None
    )
    if peft is not None:
        trained = training.strategy.full_state_dict(training.model, True)
        if world.rank == 0:
            peft.implementation.save(directory / "adapter", peft.params, trained)


def _write_run(training: Training, directory: Path) -> None:
    document = {
        "step": training.step,
        "tokens": training.tokens,
        "world_size": training.world.size,
        "samples": training.batches.samples,
        "config": training.config.resolved(),
        "plugins": [dataclasses.asdict(f) for f in provenance.fingerprints(training.config)],
    }
    text = json.dumps(document, indent=1)
    (directory / RUN_FILE).write_text(text, encoding="utf-8")


def choose(config: RunConfig, checkpoints: Checkpoints) -> Path | None:
    """The checkpoint to go on from, verified; None for a new run.

    Raises:
        ConfigError: A new run would mix its checkpoints with those of another one.
        CheckpointError: The one that is asked for is missing or broken.
    """
    wish = config.checkpoint.resume
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and wish == "none":
        wish = "auto"  # an elastic agent started all ranks again after one was lost
    existing = list(checkpoints.steps().values())
    if wish == "none":
        if existing:
            raise ConfigError(
                f"{config.checkpoint.directory} has checkpoints already (up to "
                f"{existing[-1].name}); go on from the newest with --resume, or choose another "
                "checkpoint.directory"
            )
        return None
    if wish == "auto":
        newest = checkpoints.newest()
        if newest is None and existing:
            raise CheckpointError(
                f"every checkpoint in {config.checkpoint.directory} is broken; there is nothing to "
                "go on from"
            )
        return newest
    faults = checkpoints.verify(Path(wish))
    if faults:
        raise CheckpointError(f"the checkpoint {wish} is broken:\n  " + "\n  ".join(faults))
    return Path(wish)


def load(training: Training, directory: Path) -> None:
    """Put the training into the state that a verified checkpoint has; called on every rank.

    Raises:
        CheckpointError: The checkpoint is of another run, or its tensors do not fit.
    """
    saved = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
    if not training.config.checkpoint.allow_changes:
        changes = list(_changes(saved, training.config))
        if saved["samples"] != training.batches.samples:
            changes.append(
                f"the data had {saved['samples']} samples and has {training.batches.samples}"
            )
        if changes:
            raise CheckpointError(
                f"{directory} was written by another run:\n  "
                + "\n  ".join(changes)
                + "\nto go on all the same: checkpoint.allow_changes=true"
            )
    training.strategy.load_checkpoint(
        training.model,
        training.optimizer,
        directory / "state",
        include_frozen=training.config.get("peft") is None,
    )
    scheduler = torch.load(directory / "scheduler.pt", weights_only=True)
    training.scheduler.load_state_dict(scheduler)
    training.step, training.tokens = saved["step"], saved["tokens"]
    _restore_generators(training, directory, saved["world_size"])


def _restore_generators(training: Training, directory: Path, world_size: int) -> None:
    """The rank's own generators; new ones where the number of ranks has changed."""
    if world_size == training.world.size:
        state = torch.load(directory / f"rng-{training.world.rank:05d}.pt", weights_only=True)
        set_rng_state(state, lambda s: training.backend.set_rng_state(training.device, s))
    else:
        seed_rank(training.config, training.world, training.step)


def seed_rank(config: RunConfig, world: World, step: int) -> None:
    """Seed what is random in training, such as dropout: differently on each rank."""
    seed_everything((config.train.seed * 1_000_003 + step) * 65_537 + world.rank & 2**63 - 1)


def _changes(saved: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    before, now = dict(_flat(saved["config"])), dict(_flat(config.resolved()))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not key.startswith(_FREE_TO_CHANGE):
            yield f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
    written = {tuple(_identity(mark)): mark for mark in saved["plugins"]}
    for mark in provenance.fingerprints(config):
        if mark.slot in _FREE_TO_CHANGE:
            continue
        same_slot = [m for m in written.values() if m["slot"] == mark.slot]
        if mark.identity not in written and any(m["name"] == mark.name for m in same_slot):
            yield (
                f"{mark.slot} {mark.name!r} was {same_slot[0]['distribution']}'s and is "
                f"{mark.distribution}'s"
            )


def _identity(mark: Mapping[str, Any]) -> tuple[str, str, str | None]:
    return mark["slot"], mark["name"].rpartition(":")[2], mark["distribution"]


def _flat(document: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _flat(value, f"{path}.{key}" if path else key)
    else:
        yield path, document
