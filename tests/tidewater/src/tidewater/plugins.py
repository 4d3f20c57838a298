"""The entry points; torch is imported where it is used."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core_plugin.types import hookimpl
from core_plugin.types.peft import BasePeft, PeftParams
from tidewater import CALLS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.optim import Optimizer

    from core_plugin.adapters.layer import AdapterLayer
    from core_plugin.types import Run


@dataclass(frozen=True)
class SextantParams:
    """``lr`` is the size of a step, ``memory`` the weight of the past."""

    lr: float = 1e-3
    memory: float = 0.9


def sextant(model: nn.Module, params: SextantParams) -> Optimizer:
    """Steps of one size along the sign of averaged gradients."""
    from tidewater.modules import Sextant

    trained = [p for p in model.parameters() if p.requires_grad]
    return Sextant(trained, {"lr": params.lr, "memory": params.memory})


@dataclass(frozen=True)
class KeelsonParams(PeftParams):
    """``noise`` is the standard deviation of what the scales are shaken by in training."""

    noise: float = 0.0


class Keelson(BasePeft):
    """Trains a scale for each output of a linear layer."""

    Params = KeelsonParams
    peft_type = "KEELSON"
    prefix = "keelson_"

    @staticmethod
    def layers() -> Mapping[type[nn.Module] | str, type[AdapterLayer]]:
        """``nn.Linear`` has a layer."""
        from torch import nn

        from tidewater.modules import ScaledLinear

        return {nn.Linear: ScaledLinear}


@dataclass(frozen=True)
class LogbookParams:
    """``prefix`` begins the names of the files."""

    prefix: str = "logbook"


def logbook(params: LogbookParams, run: Run) -> object:
    """Keep a book on every rank."""
    return Logbook(run.directory / f"{params.prefix}-{run.rank}.jsonl")


class Logbook:
    """Writes each loss, to the last bit, and at the end what was called."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def write(self, **entry: Any) -> None:
        """Add a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    @hookimpl
    def on_log(self, metrics: Mapping[str, float]) -> None:
        """A step's loss."""
        self.write(step=metrics["step"], loss=metrics["loss"].hex())

    @hookimpl
    def on_end(self, run: Run) -> None:
        """The calls in this process."""
        self.write(calls=CALLS, first_step=run.start_step)
