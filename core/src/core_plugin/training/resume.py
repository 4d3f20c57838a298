"""What a checkpoint holds beside the strategy's tensors, and going on from one."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from core_plugin import provenance, state
from core_plugin.config import RunConfig
from core_plugin.errors import CheckpointError, ConfigError
from core_plugin.training.assembly import Training
from core_plugin.training.checkpoint import Checkpoints, rng_state, seed_everything, set_rng_state
from core_plugin.training.saved import RUN_FILE as RUN_FILE
from core_plugin.training.saved import description
from core_plugin.training.world import World
from core_plugin.types import BaseDistributed, BasePeft

ADAPTER = "adapter"
LAUNCH_MARK = ".launched"
NO_ID = "none"
"""What an elastic agent calls its run if it is not told otherwise."""
SHOWN_MISFITS = 3
"""Tensors that do not fit which a message lists; the rest are counted."""
SEEN_WITHIN = 30.0
"""Seconds after which a disk that hosts share has shown on each what was written on one."""
_FREE_TO_CHANGE = (
    "checkpoint",
    "device",
    "distributed",
    "hooks",
    "launcher",
    "plugins",
    "train.activation_checkpointing",
    "train.blocks",
    "train.compile",
    "train.deterministic",
    "train.hang_timeout",
    "train.log_every",
    "train.micro_batch_size",
    "train.steps",
)
"""What a resumed run may have otherwise than the one that saved, without being asked."""


def stage(training: Training, *, copy: bool) -> Callable[[Path, World], None]:
    """Take what a checkpoint holds of this moment. Collective.

    Args:
        training: What is saved; its loss since the last checkpoint counts from here anew.
        copy: Copy the tensors to the host, too, so that training can go on before they are written.

    Returns:
        What writes it into a directory, called on every rank. See :mod:`.checkpoint` for the files.

    Raises:
        CheckpointError: On every rank, if it failed on one.
    """
    what = f"saving step {training.step}"
    with training.world.together(what, CheckpointError, collective=True):
        write_tensors = _stage_tensors(training, copy)
        adapter = training.strategy.full_state_dict(training.model, True) if _peft(training) else {}
    with training.world.together(what, CheckpointError):
        files = _files(training) | (_adapter_files(training, adapter) if adapter else {})
    training.logged_loss, training.logged_tokens = 0.0, 0

    def write(directory: Path, world: World) -> None:
        tensors = directory / "state"
        with world.together(f"writing {directory}", CheckpointError):
            if world.rank == 0:
                tensors.mkdir()
            for name, content in files.items():
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_bytes(content)
        write_tensors(tensors, world.control)

    return write


def _files(training: Training) -> dict[str, bytes]:
    """What is no tensor of the model or the optimizer: this rank's files."""
    rank = training.world.rank
    of_rank = {
        "device": training.device.type,
        "generators": rng_state(training.backend.rng_state(training.device)),
        "unlogged_loss": training.unlogged_loss.cpu(),
    }
    files = {_rank_file(rank): _serialized(of_rank)}
    if rank == 0:
        files[RUN_FILE] = json.dumps(_description(training), indent=1).encode()
        files["scheduler.pt"] = _serialized(training.scheduler.state_dict())
        files["tokenizer.json"] = training.tokenizer.to_str(pretty=True).encode()
    return files


def _serialized(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _description(training: Training) -> dict[str, Any]:
    tokens = training.logged_tokens
    return {
        "step": training.step,
        "loss": training.logged_loss / tokens if tokens else None,
        "tokens": training.tokens,
        "unlogged_tokens": training.unlogged_tokens,
        "world_size": training.world.size,
        "samples": training.batches.samples,
        "config": training.config.resolved(),
        "plugins": [dataclasses.asdict(f) for f in provenance.fingerprints(training.config)],
    }


def _stage_tensors(training: Training, copy: bool) -> Callable[[Path, ProcessGroup | None], None]:
    strategy, model, optimizer = training.strategy, training.model, training.optimizer
    include_frozen = _peft(training) is None
    if copy:
        return strategy.stage_checkpoint(model, optimizer, include_frozen=include_frozen)
    return lambda directory, group: strategy.save_checkpoint(
        model, optimizer, directory, include_frozen=include_frozen
    )


def _peft(training: Training) -> type[BasePeft] | None:
    chosen = training.config.get("peft")
    return chosen.implementation if chosen else None


def _adapter_files(training: Training, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The adapter's files. Its method writes them, so they are written elsewhere first."""
    model = training.strategy.unwrap_model(training.model)
    with tempfile.TemporaryDirectory(prefix="core-plugin-") as name:
        elsewhere = Path(name)
        training.config["peft"].implementation.save(elsewhere / ADAPTER, model, tensors)
        found = [path for path in elsewhere.rglob("*") if path.is_file()]
        return {str(path.relative_to(elsewhere)): path.read_bytes() for path in found}


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def choose(config: RunConfig, checkpoints: Checkpoints, restarted: bool) -> Path | None:
    """The checkpoint to go on from, verified; None for a new run. Collective.

    Args:
        config: The run's; it says which one is wished for.
        checkpoints: Those that there are.
        restarted: See :func:`is_restarted`. The run's own checkpoints then go before the wish.

    Raises:
        ConfigError: A new run would mix its checkpoints with those of another one.
        CheckpointError: The one that is asked for is missing or broken.
    """
    existing = checkpoints.steps()
    wish = "auto" if restarted and existing else config.checkpoint.resume
    if wish == "none" and existing:
        raise ConfigError(
            f"{config.checkpoint.directory} has checkpoints already (up to step {max(existing)}); "
            "go on from the newest with --resume, or choose another checkpoint.directory"
            + _advice_for_agents()
        )
    if wish == "none":
        return None
    if wish == "auto":
        newest = checkpoints.newest()
        if newest is None and existing:
            raise CheckpointError(
                f"every checkpoint in {config.checkpoint.directory} is broken; there is nothing to "
                "go on from. Start anew in another checkpoint.directory"
            )
        return newest
    if not Path(wish).is_dir():
        raise ConfigError(
            f"checkpoint.resume is {wish!r}, which is no directory; write none, auto or the path "
            "of a checkpoint"
        )
    faults = checkpoints.verify(Path(wish))
    if faults:
        raise CheckpointError(f"the checkpoint {wish} is broken:\n  " + "\n  ".join(faults))
    if later := [step for step in existing if step > description(Path(wish))["step"]]:
        raise ConfigError(
            f"{config.checkpoint.directory} has checkpoints after {wish} (up to step "
            f"{max(later)}), which those of the run would be mixed with; choose another "
            "checkpoint.directory"
        )
    return Path(wish)


def is_restarted(config: RunConfig, world: World) -> bool:
    """Whether an elastic agent started all ranks again, after this run had begun. Collective.

    The attempt before has left a mark with its launch's name when it had chosen where to start.
    A name that is not unique may be another launch's, so then the agent must say it, too; it does
    not where other hosts came or left. The first attempt takes away what it finds.
    """
    mark = Path(config.checkpoint.directory, LAUNCH_MARK)
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or _launch() != NO_ID
    found = False
    with world.together("looking into checkpoint.directory", ConfigError):
        if world.rank == 0:
            with _directory_faults(config):
                mark.parent.mkdir(parents=True, exist_ok=True)
                found = again and mark.exists() and mark.read_text().split()[:1] == [_launch()]
                if not found:
                    mark.unlink(missing_ok=True)
    return world.from_first(found)


def mark_launch(config: RunConfig, world: World) -> None:
    """Leave the mark that :func:`is_restarted` looks for, and see that all see it. Collective.

    Raises:
        ConfigError: A rank does not: its host does not share the directory.
    """
    mark = Path(config.checkpoint.directory, LAUNCH_MARK)
    content = world.from_first(f"{_launch()} {secrets.token_hex(8)}")
    with world.together("writing into checkpoint.directory", ConfigError):
        if world.rank == 0:
            with _directory_faults(config):
                mark.write_text(content)
    with world.together("reading checkpoint.directory", ConfigError):
        if not _comes_to_be(lambda: mark.exists() and mark.read_text() == content):
            raise ConfigError(
                f"checkpoint.directory: rank {world.rank} does not see in "
                f"{config.checkpoint.directory} what rank 0 has written there; choose a directory "
                "on a disk that all hosts share"
            )


def _launch() -> str:
    """What names all attempts of an elastic agent, and is unique unless it is :data:`NO_ID`."""
    return "-".join(os.environ.get("TORCHELASTIC_RUN_ID", NO_ID).split())


def _comes_to_be(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return true


def _advice_for_agents() -> str:
    if "TORCHELASTIC_RUN_ID" not in os.environ or _launch() != NO_ID:
        return ""
    return (
        ". Where torchrun's hosts may come and leave, start the run with --resume from the first "
        "time on, or give torchrun an --rdzv-id of its own"
    )


@contextmanager
def _directory_faults(config: RunConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"checkpoint.directory: {config.checkpoint.directory} cannot be written into "
            f"({error.strerror}); choose another one, or mend its permissions"
        ) from None


def load(training: Training, directory: Path) -> None:
    """Put the training into the state that a verified checkpoint has; called on every rank.

    Raises:
        CheckpointError: The checkpoint is of another run, or its tensors do not fit.
    """
    saved = description(directory)
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
                + f"\n{_remedy(training, directory)}"
            )
    changed = training.config.checkpoint.allow_changes
    hyperparameters = _Hyperparameters(training) if changed else None
    training.strategy.load_checkpoint(
        training.model,
        training.optimizer,
        directory / "state",
        include_frozen=training.config.get("peft") is None,
    )
    scheduler = torch.load(directory / "scheduler.pt", weights_only=True)
    training.scheduler.load_state_dict(scheduler)
    if hyperparameters is not None:
        hyperparameters.restore()
    training.step, training.tokens = saved["step"], saved["tokens"]
    training.unlogged_tokens = saved["unlogged_tokens"]
    _load_of_rank(training, directory, saved["world_size"])


def _remedy(training: Training, directory: Path) -> str:
    """What to do about a checkpoint of another run; its tensors may not fit this one."""
    misfits = _misfits(training, directory / "state")
    if not misfits:
        return "to go on all the same: checkpoint.allow_changes=true"
    more = f"\n  and {len(misfits) - SHOWN_MISFITS} more" if len(misfits) > SHOWN_MISFITS else ""
    return (
        "so what it holds does not fit:\n  "
        + "\n  ".join(misfits[:SHOWN_MISFITS])
        + f"{more}\nundo what has changed, or start anew in another checkpoint.directory"
    )


def _misfits(training: Training, directory: Path) -> list[str]:
    """What of the tensors does not fit; nothing is known of a strategy that has its own format."""
    strategy = training.strategy
    common = vars(BaseDistributed)["load_checkpoint"]
    if inspect.getattr_static(strategy, "load_checkpoint") is not common:
        return []
    return state.misfits(
        strategy.unwrap_model(training.model),
        training.optimizer,
        directory,
        include_frozen=training.config.get("peft") is None,
    )


class _Hyperparameters:
    """What the run's own configuration says of the optimizer, to go before the checkpoint's."""

    def __init__(self, training: Training) -> None:
        self._optimizer, self._scheduler = training.optimizer, training.scheduler
        self._groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups
        ]
        self._base_lrs = list(self._scheduler.base_lrs)

    def restore(self) -> None:
        """Put it back; the learning rates stay at the same place of their schedule."""
        groups = self._optimizer.param_groups
        for group, options, before, now in zip(
            groups, self._groups, self._scheduler.base_lrs, self._base_lrs, strict=True
        ):
            lr = group["lr"] * (now / before) if before else now
            group.update(options)
            group["lr"] = lr
        self._scheduler.base_lrs = self._base_lrs


def _load_of_rank(training: Training, directory: Path, world_size: int) -> None:
    """What each rank keeps for itself.

    Where the number of ranks or the device has changed, generators are seeded anew; rank 0 takes
    all that is left to log of ranks that are no more.
    """
    rank = training.world.rank
    seed_rank(training.config, training.world, training.step)
    if world_size == training.world.size:
        own = torch.load(directory / _rank_file(rank), weights_only=True)
        training.unlogged_loss.copy_(own["unlogged_loss"])
        if own.get("device", training.device.type) == training.device.type:
            set_rng_state(
                own["generators"], lambda s: training.backend.set_rng_state(training.device, s)
            )
    elif rank == 0:
        for other in range(world_size):
            of_rank = torch.load(directory / _rank_file(other), weights_only=True)
            training.unlogged_loss += of_rank["unlogged_loss"].to(training.device)


@contextmanager
def generators_kept(training: Training) -> Iterator[None]:
    """A block that leaves the random generators as they were, whatever draws in it."""
    kept = rng_state(training.backend.rng_state(training.device))
    try:
        yield
    finally:
        set_rng_state(kept, lambda s: training.backend.set_rng_state(training.device, s))


def seed_rank(config: RunConfig, world: World, step: int) -> None:
    """Seed what is random in training, such as dropout: differently on each rank."""
    seed_everything((config.train.seed * 1_000_003 + step) * 65_537 + world.rank & 2**63 - 1)


def _changes(saved: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    before, now = dict(_flat(saved["config"])), dict(_flat(config.resolved()))
    for key in sorted(before.keys() | now.keys()):
        free = any(f"{key}.".startswith(f"{name}.") for name in _FREE_TO_CHANGE)
        if before.get(key) != now.get(key) and not free:
            yield f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
    written = {_identity(mark) for mark in saved["plugins"]}
    for mark in provenance.fingerprints(config):
        if mark.slot in _FREE_TO_CHANGE:
            continue
        others = [m for m in saved["plugins"] if (m["slot"], m["name"]) == (mark.slot, mark.name)]
        if others and mark.identity not in written:
            yield (
                f"{mark.slot} {mark.name!r} was {others[0]['distribution']}'s and is "
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
