"""A third-party distribution with a plugin of every type, for the tests.

Each does what a built-in (or one of the published packages) does, and writes down which of its
methods was called: a line ``type.method`` in ``$RECORDER_DIRECTORY/calls-<pid>``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_plugin.builtin.decoder import Decoder
from core_plugin.builtin.device import CPU
from core_plugin.builtin.launcher import Torchrun
from core_plugin.builtin.text import Text
from core_plugin.contract import contract_methods
from core_plugin.errors import ConfigError
from core_plugin.types import (
    BaseData,
    BaseDevice,
    BaseDistributed,
    BaseLauncher,
    BaseModel,
    BasePeft,
    hookimpl,
)
from core_plugin_fsdp2.plugin import FSDP2
from core_plugin_lora.plugin import LoRA

if TYPE_CHECKING:
    from torch import nn

    from core_plugin.types import Run


def directory() -> Path:
    return Path(os.environ["RECORDER_DIRECTORY"])


def note(call: str) -> None:
    with (directory() / f"calls-{os.getpid()}").open("a") as file:
        file.write(call + "\n")


def recorded(type_name: str, contract: type) -> Any:
    """A class decorator: every method of the contract is written down when it is called."""

    def decorate(cls: type) -> type:
        for name in contract_methods(contract):
            setattr(cls, name, staticmethod(noting(f"{type_name}.{name}", getattr(cls, name))))
        return cls

    return decorate


def noting(call: str, method: Any) -> Any:
    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(call)
        return method(*args, **kwargs)

    noted.__signature__ = inspect.signature(method)
    return noted


@recorded("device", BaseDevice)
class RecordingDevice(CPU):
    @staticmethod
    def device(params: Any, local_rank: int) -> Any:
        if os.environ.get("BROKEN_DEVICE"):
            raise RuntimeError("no such device")
        return CPU.device(params, local_rank)

    @staticmethod
    def rng_state(device: Any) -> Any:
        """A generator of its own, as an accelerator has."""
        import torch

        return torch.zeros(8, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(device: Any, state: Any) -> None:
        assert state.numel() == 8


@recorded("model", BaseModel)
class RecordingModel(Decoder):
    """The decoder in float64, so that gradients can be compared closely."""

    @staticmethod
    def build(params: Any, vocabulary_size: int) -> nn.Module:
        return Decoder.build(params, vocabulary_size).double()


@recorded("data", BaseData)
class RecordingData(Text):
    pass


@recorded("peft", BasePeft)
class RecordingPeft(LoRA):
    peft_type = "RECORDING"


@recorded("distributed", BaseDistributed)
class RecordingDistributed(FSDP2):
    pass


@recorded("launcher", BaseLauncher)
class RecordingLauncher(Torchrun):
    pass


@dataclasses.dataclass(frozen=True)
class OptimizerParams:
    lr: float = 0.1
    momentum: float = 0.9


def optimizer(model: nn.Module, params: OptimizerParams) -> Any:
    """SGD that writes every step's whole gradients into ``grads-<step>.pt``."""
    import torch

    from core_plugin.tensors import canonical_name, gather

    note("optimizer")
    names = {p: canonical_name(n).removeprefix("module.") for n, p in model.named_parameters()}

    class Recording(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            grads = {names[p]: gather(p.grad) for p in names if p.grad is not None}
            if int(os.environ.get("RANK", 0)) == 0:
                torch.save(grads, directory() / f"grads-{self.steps}.pt")
            self.steps += 1
            super().step(closure)

    trained = [p for p in model.parameters() if p.requires_grad]
    return Recording(trained, lr=params.lr, momentum=params.momentum)


def scheduler(optimizer: Any, params: Any, *, steps: int) -> Any:
    import torch

    note("scheduler")
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)


def kernel(model: nn.Module, params: Any) -> nn.Module:
    note("kernel")
    assert all(p.is_meta for p in model.parameters())
    return model


def interrupted(model: nn.Module, params: Any) -> nn.Module:
    """A kernel during which the user presses Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    return model


def preempted(model: nn.Module, params: Any) -> nn.Module:
    """A kernel during which the scheduler wants its machine back."""
    os.kill(os.getpid(), signal.SIGTERM)
    return model


class RecordingHook:
    @hookimpl
    def on_start(self, run: Run) -> None:
        note("hook.on_start")

    @hookimpl
    def on_step(self, run: Run) -> None:
        note("hook.on_step")

    @hookimpl
    def on_log(self, run: Run, metrics: Any) -> None:
        note("hook.on_log")

    @hookimpl
    def on_checkpoint(self, run: Run, path: Path) -> None:
        note("hook.on_checkpoint")

    @hookimpl
    def on_end(self, run: Run) -> None:
        note("hook.on_end")

    @hookimpl
    def on_error(self, run: Run, error: BaseException) -> None:
        note(f"hook.on_error {type(error).__name__}")


class Misspelt:
    @hookimpl
    def on_log(self, step: int) -> None:
        pass


def misspelt(params: Any, run: Run) -> Misspelt:
    return Misspelt()


def hook(params: Any, run: Run) -> RecordingHook:
    return RecordingHook()


@dataclasses.dataclass(frozen=True)
class FaultsParams:
    """What goes wrong, on which rank, after which step."""

    step: int
    rank: int = 0
    what: str = "kill"
    once: bool = False


def faults(params: FaultsParams, run: Run) -> object | None:
    class Faults:
        @hookimpl
        def on_step(self, run: Run) -> None:
            if run.step != params.step or run.rank != params.rank:
                return
            if params.once and (marker := directory() / "done").exists():
                return
            if params.once:
                marker.touch()
            FAULTS[params.what]()

    return Faults()


def _replace(module: str, function: str, what: Any) -> None:
    """From now on, a function does something else on this rank."""
    setattr(importlib.import_module(module), function, lambda *_, **__: what())


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ValueError("a fault of this hook")


def _mistake() -> None:
    raise ConfigError("a mistake that this hook found")


def _sleep() -> None:
    time.sleep(3600)


def _loop() -> None:
    while True:
        time.sleep(0.001)


def _hold() -> None:
    """Sleep in C code that does not let the interpreter go on."""
    ctypes.PyDLL(None).sleep(3600)


def _full() -> None:
    raise OSError(28, "No space left on device")


WRITE_TENSOR = ("torch.distributed.checkpoint.filesystem", "_write_item")
WRITE_FILE = ("torch", "save")
READ_STATE = ("core_plugin.state", "optimizer_tensors")
FAULTS = {
    "kill": _kill,
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "preempt": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raise": _raise,
    "mistake": _mistake,
    "exit": lambda: sys.exit(0),
    "sleep": _sleep,
    "hold": _hold,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop in data": lambda: setattr(Text, "collate", staticmethod(lambda *_: _loop())),
    "full disk": lambda: _replace(*WRITE_TENSOR, _full),
    "full disk for generators": lambda: _replace(*WRITE_FILE, _full),
    "full disk for the optimizer": lambda: _replace(
        "core_plugin.state", "optimizer_tensors", _full
    ),
    "full disk after the tensors": lambda: _replace("core_plugin.state", "_rank", _full),
    "kill in writing tensors": lambda: _replace(*WRITE_TENSOR, _kill),
    "kill in hashing": lambda: _replace("core_plugin.training.checkpoint", "_hash_files", _kill),
    "kill in completing": lambda: _replace("core_plugin.training.checkpoint", "_complete", _kill),
}


@dataclasses.dataclass(frozen=True)
class SlowParams:
    """How slow a hook is in each step, and in which step the reading of data is as slow."""

    seconds: float
    rank: int = 0
    reads: int = 0


def slow(params: SlowParams, run: Run) -> object | None:
    collate = Text.collate

    def slow_collate(samples: Any) -> Any:
        time.sleep(params.seconds)
        Text.collate = staticmethod(collate)
        return collate(samples)

    class Slow:
        @hookimpl
        def on_step(self, run: Run) -> None:
            if run.step == params.reads - 1:
                Text.collate = staticmethod(slow_collate)
            elif run.step >= params.reads:
                time.sleep(params.seconds)

    return Slow() if run.rank == params.rank else None


@dataclasses.dataclass(frozen=True)
class SlowDiskParams:
    """Which step's tensors are not written before the end of which later step."""

    step: int
    until: int


def slow_disk(params: SlowDiskParams, run: Run) -> object:
    """Holds back a save, and notes the events of saves in ``saved-<rank>``."""
    from core_plugin import state

    reached = threading.Event()
    writer_for = state._writer

    def slow_writer(path: Path, **options: Any) -> Any:
        writer = writer_for(path, **options)
        write_data = writer.write_data

        def wait_and_write(*args: Any) -> Any:
            if f"step-{params.step:08d}" in str(path):
                reached.wait()
            return write_data(*args)

        writer.write_data = wait_and_write
        return writer

    state._writer = slow_writer

    class SlowDisk:
        @hookimpl
        def on_step(self, run: Run) -> None:
            if run.step >= params.until:
                reached.set()

        @hookimpl
        def on_checkpoint(self, run: Run, path: Path) -> None:
            with (directory() / f"saved-{run.rank}").open("a") as file:
                file.write(f"{path.name} is complete at {run.step}\n")

    return SlowDisk()


def collectives(params: Any, run: Run) -> object:
    """Counts the collectives of a run's steps and writes them to ``collectives-<rank>.json``."""
    import json

    import torch

    class Collectives:
        @hookimpl
        def on_start(self, run: Run) -> None:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profile.start()

        @hookimpl
        def on_step(self, run: Run) -> None:
            if run.step != run.steps:
                return
            self.profile.stop()
            counts = {
                e.key: e.count for e in self.profile.key_averages() if e.key.startswith("c10d::")
            }
            (directory() / f"collectives-{run.rank}.json").write_text(json.dumps(counts))

    return Collectives()


def workarounds(params: Any, run: Run) -> None:
    """Writes whether a module that moves keeps its parameters, to ``workarounds.txt``."""
    import torch

    active = torch.__future__.get_swap_module_params_on_conversion()
    (directory() / "workarounds.txt").write_text(str(active))


def _fail_later() -> None:
    while not list(directory().glob("*/metrics.jsonl")):
        time.sleep(0.01)
    sys.exit(3)


if os.environ.get("BYSTANDER"):  # a process of the launcher's that is no worker
    multiprocessing.get_context("fork").Process(target=_fail_later).start()
if os.environ.get("PREEMPT_FORKED"):  # before a forked process has come to anything of its own
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
