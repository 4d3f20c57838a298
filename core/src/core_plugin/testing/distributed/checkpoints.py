"""Models that have been trained, and what is in a checkpoint's files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from core_plugin import state, tensors
from core_plugin.testing.distributed.loop import Loop, MakeOptimizer, Values, adamw


def trained(
    loop: Loop, kind: str = "plain", make: MakeOptimizer = adamw
) -> tuple[nn.Module, Optimizer]:
    """A model after two steps, and its optimizer."""
    model = loop.model(kind)
    _, optimizer = loop.train(model, make, steps=(0, 1))
    return model, optimizer


def fresh(
    loop: Loop, kind: str = "plain", make: MakeOptimizer = adamw
) -> tuple[nn.Module, Optimizer]:
    """A model of other values, and an optimizer that has taken no step."""
    model = loop.model(kind, seed=1)
    return model, loop.optimizer(model, make)


def save(
    loop: Loop, model: nn.Module, optimizer: Optimizer, directory: Path, include_frozen: bool = True
) -> Path:
    """Write a checkpoint, and wait for all ranks."""
    if loop.rank == 0:
        directory.mkdir(exist_ok=True)
    dist.barrier()
    loop.strategy.save_checkpoint(model, optimizer, directory, include_frozen=include_frozen)
    dist.barrier()
    return directory


def load(
    loop: Loop, model: nn.Module, optimizer: Optimizer, directory: Path, include_frozen: bool = True
) -> None:
    """Read one."""
    loop.strategy.load_checkpoint(model, optimizer, directory, include_frozen=include_frozen)


def optimizer_values(loop: Loop, model: nn.Module, optimizer: Optimizer) -> Values:
    """The optimizer's tensors by parameter and key, whole. Collective."""
    held = state.optimizer_tensors(loop.unwrapped(model), optimizer)
    return {name: tensors.gather(value).clone() for name, value in held.items()}


def read_with_torch(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by key, whole, as torch alone reads them in one process."""
    metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)  # type: ignore[union-attr]
        for name, stored in metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(dict(found), checkpoint_id=directory, no_dist=True)
    return found


def write_with_torch(directory: Path, found: dict[str, Tensor], optimizer_file: Path) -> None:
    """Write tensors by key as torch alone writes them in one process, and the optimizer's rest."""
    directory.mkdir()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        writer = dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)
        dcp.save(dict(found), storage_writer=writer, no_dist=True)
    rest = json.loads(optimizer_file.read_text(encoding="utf-8"))
    (directory / state.OPTIMIZER_FILE).write_text(json.dumps(rest), encoding="utf-8")
