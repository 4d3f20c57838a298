"""The faults of what is saved, loaded, staged and gathered."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from faulty_strategy import Faulty, FaultySharded
from strategy_faults import fault
from torch import Tensor, nn
from torch.optim import Optimizer

from core_plugin import state, tensors
from core_plugin.errors import CheckpointError

# Checkpoints


@fault("the optimizer's state is not loaded")
def _() -> None:
    def load(
        model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool
    ) -> None:
        state.load_model(model.inner, directory, include_frozen=include_frozen)

    Faulty.load_checkpoint = staticmethod(load)


@fault("what is missing is passed over")
def _() -> None:
    load = Faulty.load_checkpoint

    def forgiving(*args: Any, **options: Any) -> None:
        with contextlib.suppress(CheckpointError):
            load(*args, **options)

    Faulty.load_checkpoint = staticmethod(forgiving)


@fault("loading begins before it is checked")
def _() -> None:
    load = Faulty.load_checkpoint

    def hasty(model: nn.Module, *args: Any, **options: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load(model, *args, **options)

    Faulty.load_checkpoint = staticmethod(hasty)


@fault("a failed save is no error")
def _() -> None:
    save = Faulty.save_checkpoint

    def quiet(*args: Any, **options: Any) -> None:
        with contextlib.suppress(Exception):
            save(*args, **options)

    Faulty.save_checkpoint = staticmethod(quiet)


@fault("files are in a format of its own")
def _() -> None:
    def save(
        model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool
    ) -> None:
        if dist.get_rank() == 0:
            torch.save((model.state_dict(), optimizer.state_dict()), directory / "all.pt")

    def load(
        model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool
    ) -> None:
        of_model, of_optimizer = torch.load(directory / "all.pt")
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)

    Faulty.save_checkpoint, Faulty.load_checkpoint = staticmethod(save), staticmethod(load)


@fault("frozen parameters are always saved")
def _() -> None:
    save = Faulty.save_checkpoint
    Faulty.save_checkpoint = staticmethod(
        lambda *args, include_frozen: save(*args, include_frozen=True)
    )


@fault("only the first rank's part is saved")
def _() -> None:
    def save(
        model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool
    ) -> None:
        state.save(model, optimizer, directory, include_frozen=include_frozen)
        dist.barrier()
        if dist.get_rank() > 0:
            for file in directory.glob(f"__{dist.get_rank()}_*"):
                file.write_bytes(bytes(file.stat().st_size))

    FaultySharded.save_checkpoint = staticmethod(save)


@fault("nothing is copied ahead of writing")
def _() -> None:
    def stage(model: nn.Module, optimizer: Optimizer, *, include_frozen: bool) -> Any:
        return lambda directory, group: state.save(
            model.inner, optimizer, directory, include_frozen=include_frozen
        )

    Faulty.stage_checkpoint = staticmethod(stage)


@fault("writing goes over the group of training")
def _() -> None:
    stage = Faulty.stage_checkpoint

    def staged(*args: Any, **options: Any) -> Any:
        write = stage(*args, **options)
        return lambda directory, group: write(directory, None)

    Faulty.stage_checkpoint = staticmethod(staged)


# Whole tensors


@fault("every rank gets all")
def _() -> None:
    def full(model: nn.Module, trainable: bool) -> dict[str, Tensor]:
        found = tensors.model_tensors(model.inner).items()
        return {n: t.detach().clone() for n, t in found if t.requires_grad or not trainable}

    Faulty.full_state_dict = staticmethod(full)


@fault("whole tensors are the model's own")
def _() -> None:
    def full(model: nn.Module, trainable: bool) -> dict[str, Tensor]:
        found = tensors.model_tensors(model.inner).items() if dist.get_rank() == 0 else ()
        return {n: t.detach() for n, t in found if t.requires_grad or not trainable}

    Faulty.full_state_dict = staticmethod(full)


@fault("frozen parameters are among the trained")
def _() -> None:
    full = Faulty.full_state_dict
    Faulty.full_state_dict = staticmethod(lambda model, trainable: full(model, False))


@fault("parts are taken for wholes")
def _() -> None:
    def full(model: nn.Module, trainable: bool) -> dict[str, Tensor]:
        found = tensors.model_tensors(model).items() if dist.get_rank() == 0 else ()
        return {n: tensors.local(t).detach().clone() for n, t in found}

    FaultySharded.full_state_dict = staticmethod(full)
