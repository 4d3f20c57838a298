"""The training loop: a run from its device to its final checkpoint, top to bottom."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import signal
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pluggy
import torch
import torch.distributed as dist

from core_plugin import config as run_config
from core_plugin import provenance
from core_plugin.config import RunConfig
from core_plugin.errors import PluginContractError, TrainingError
from core_plugin.training import assembly, placement, resume, watchdog
from core_plugin.training.assembly import Training
from core_plugin.training.batches import Batch, supervised_tokens
from core_plugin.training.checkpoint import Checkpoints
from core_plugin.training.saving import Saver
from core_plugin.training.stop import StopRequest, on_signals
from core_plugin.training.world import World
from core_plugin.types.hook import Events, Run
from core_plugin.types.launcher import INTERRUPTED, PREEMPTED


class Outcome(Enum):
    """How a run ended, with its exit code."""

    FINISHED = 0
    PREEMPTED = PREEMPTED
    INTERRUPTED = INTERRUPTED


def train(config: RunConfig, world: World) -> Outcome:
    """One rank's part of a run.

    Raises:
        CorePluginError: What the user can mend; the others end as well.
    """
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS then needs
    with world.agreement(provenance.identity(config)):
        device = assembly.select_device(config, world)
        backend = assembly.collective_backend(config, device, world)
    torch.use_deterministic_algorithms(config.train.deterministic)
    with (
        watchdog.watch(world, config.train.hang_timeout),
        config["device"].implementation.workarounds(),
    ):
        world.start(backend)
        return _train_on(device, config, world)


def _train_on(device: torch.device, config: RunConfig, world: World) -> Outcome:
    """The run from its model on."""
    directory = Path(config.checkpoint.directory)
    checkpoints = _checkpoints(config, world)
    with world.together("choosing a checkpoint", TrainingError, collective=True):
        restarted = resume.is_restarted(config, world)
        start = resume.choose(config, checkpoints, restarted)
    resume.mark_launch(config, world)

    training = assembly.build(config, device, world)
    resume.seed_rank(config, world, 0)
    if start is None:
        with (
            world.together("preparing the adapter", TrainingError, collective=True),
            resume.generators_kept(training),
        ):
            assembly.prepare_adapter(training)
    else:
        with world.together(f"loading {start}", TrainingError, collective=True):
            resume.load(training, start)
    _tell_the_start(training, start, restarted)
    with world.together("writing the configuration", TrainingError):
        if world.rank == 0 and training.step < config.train.steps:
            run_config.dump(config.resolved(), directory / "config.yaml")

    run = _run_for_hooks(training, directory)
    with world.together("making the hooks", TrainingError), resume.generators_kept(training):
        events = _events(config, run, world)

    def announce(path: Path) -> None:
        with resume.generators_kept(training):
            events.on_checkpoint(run=run, path=path)

    saver = Saver(training, checkpoints, announce)
    with on_signals() as stop:
        try:
            return _steps(training, saver, run, events, stop)
        except BaseException as error:
            saver.abandon(error)
            with contextlib.suppress(Exception):  # what went wrong first is what is told
                events.on_error(run=run, error=error)
            raise


def _checkpoints(config: RunConfig, world: World) -> Checkpoints:
    wanted = config.checkpoint
    directory = Path(wanted.directory, "checkpoints")
    ranks = world.separate() if wanted.asynchronous else world
    return Checkpoints(directory, ranks, wanted.keep, wanted.keep_best)


def _tell_the_start(training: Training, start: Path | None, restarted: bool) -> None:
    """Say where a run that was to go on begins, since a typo could make it begin anew."""
    held = placement.report(training.model, training.world)
    if training.world.rank > 0:
        return
    print(held, flush=True)
    done, steps = training.step, training.config.train.steps
    if start is not None:
        print(f"going on from {start}", flush=True)
    elif restarted or training.config.checkpoint.resume == "auto":
        print(f"no checkpoint in {training.config.checkpoint.directory}: starting anew", flush=True)
    if done >= steps:
        print(f"nothing to do: {done} steps are done, and train.steps is {steps}", flush=True)


def _run_for_hooks(training: Training, directory: Path) -> Run:
    return Run(
        directory=directory,
        config=training.config.resolved(),
        rank=training.world.rank,
        world_size=training.world.size,
        steps=training.config.train.steps,
        start_step=training.step,
        model=training.model,
        device=training.device,
        tokenizer=training.tokenizer,
        step=training.step,
    )


def _events(config: RunConfig, run: Run, world: World) -> Any:
    manager = pluggy.PluginManager("core_plugin")
    manager.add_hookspecs(Events)
    manager.add_hookcall_monitoring(
        lambda event, *_: world.progress.enter(f"{event} of the hooks"), lambda *_: None
    )
    for selection in reversed(config.selections["hooks"]):  # pluggy calls the last one first
        hook = selection.implementation(selection.params, run)
        try:
            if hook is not None:
                manager.register(hook)
                manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginContractError(
                f"the hook {selection.route.name!r} ({selection.route.registration().origin}) is "
                f"not what HookPlugin asks for: {error}. The events are {_event_signatures()}"
            ) from error
    return manager.hook


def _event_signatures() -> str:
    events = {n: inspect.signature(f) for n, f in vars(Events).items() if not n.startswith("_")}
    return ", ".join(f"{n}({', '.join(list(s.parameters)[1:])})" for n, s in events.items())


def _steps(training: Training, saver: Saver, run: Run, events: Any, stop: StopRequest) -> Outcome:
    """All steps that are left, with their logs and checkpoints."""
    settings, every = training.config.train, training.config.checkpoint.every
    stepper = Stepper(training, stop, saver)
    log = Log(training)
    saved = training.step if training.step else None

    def save() -> None:
        training.world.progress.enter("saving")
        _require_finite(training.step, "grad_norm", float(stepper.grad_norm))
        saver.save()

    with resume.generators_kept(training):
        events.on_start(run=run)
    while training.step < settings.steps and stepper.step():
        run.step = training.step
        events.on_step(run=run)
        if training.step % settings.log_every == 0 or training.step == settings.steps:
            events.on_log(run=run, metrics=log.metrics(stepper.grad_norm))
        saver.heed(stepper.saves_ended)
        if every and training.step % every == 0:
            save()
            saved = training.step
    if saved != training.step:
        save()
    saver.finish()
    if training.step < settings.steps:
        return stepper.outcome
    events.on_end(run=run)
    return Outcome.FINISHED


class Stepper:
    """One optimizer step after the other. Everything that a step calls is bound here, once."""

    def __init__(self, training: Training, stop: StopRequest, saver: Saver) -> None:
        self._training = training
        self._stop = stop
        self._saver = saver
        self._loss = training.architecture.loss
        self._gradient_sync = training.strategy.gradient_sync
        self._clip = training.strategy.clip_grad_norm
        self._max_norm = training.config.train.max_grad_norm
        self._autocast = assembly.precision(training)
        params = training.config["distributed"].params
        self._gradient_factor = training.strategy.gradient_divisor(params, training.world.size)
        self.grad_norm = torch.zeros(())
        self.outcome = Outcome.FINISHED
        self.saves_ended = 0
        """The saves that had ended before this step, added up over the ranks."""
        self._read(training.step)

    def _read(self, step: int) -> None:
        """Read a step's batches, and begin to add up over the ranks how many tokens they have.

        It is done one step ahead, so that no rank waits for the sum. The same sum tells how many
        are asked to stop, and how many saves have ended on them. After the last step nothing is
        read: its samples are not the run's.
        """
        if step >= self._training.config.train.steps:
            return
        self._batches = self._training.batches.step(step)
        self._counts = self._training.world.sum_later(
            supervised_tokens(self._batches),
            self._stop.signal == signal.SIGINT,
            self._stop.signal == signal.SIGTERM,
            self._saver.ended,
        )

    def step(self) -> bool:
        """Take one step, unless a rank was asked to stop.

        The loss is the mean over all supervised tokens of the global batch: each micro-batch's
        sum is divided by their number.
        """
        training = self._training
        training.world.progress.step = training.step + 1
        training.world.progress.enter("step")
        tokens, interrupted, preempted, self.saves_ended = self._counts()
        if interrupted or preempted:
            self.outcome = Outcome.INTERRUPTED if interrupted else Outcome.PREEMPTED
            return False
        if tokens == 0:
            raise TrainingError(f"step {training.step + 1}: no token is supervised in its batch")
        if not training.model.training:
            training.model.train()
        for number, batch in enumerate(self._batches, 1):
            self._forward_backward(batch, tokens, last=number == len(self._batches))
        self._read(training.step + 1)
        self.grad_norm = self._clip(training.model, self._max_norm)
        training.optimizer.step()
        training.scheduler.step()
        training.optimizer.zero_grad(set_to_none=True)
        training.unlogged_tokens += tokens
        training.tokens += tokens
        training.step += 1
        return True

    def _forward_backward(self, batch: Batch, tokens: int, last: bool) -> None:
        training = self._training
        batch = {k: v.to(training.device, non_blocking=True) for k, v in batch.items()}
        with self._gradient_sync(training.model, last):
            with self._autocast:
                loss = self._loss(training.model, batch)
            (loss * (self._gradient_factor / tokens)).backward()
        training.unlogged_loss += loss.detach()


class Log:
    """The metrics since the last log; the only place where the device is waited for."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._started = self._last = time.perf_counter()
        self._tokens = training.tokens

    def metrics(self, grad_norm: torch.Tensor) -> Mapping[str, float]:
        """See :meth:`core_plugin.types.hook.Events.on_log`. Collective.

        Raises:
            TrainingError: The loss or the gradients are not finite.
        """
        training = self._training
        loss = training.unlogged_loss.to("cpu", torch.float64)
        if training.world.size > 1:
            dist.all_reduce(loss, group=training.world.control)
        now = time.perf_counter()
        metrics = {
            "step": training.step,
            "loss": loss.item() / training.unlogged_tokens,
            "grad_norm": float(grad_norm),
            "lr": float(training.scheduler.get_last_lr()[0]),
            "tokens": training.tokens,
            "tokens_per_second": (training.tokens - self._tokens) / (now - self._last),
            "seconds": now - self._started,
        }
        for name in ("loss", "grad_norm"):
            _require_finite(training.step, name, metrics[name])
        self._last, self._tokens = now, training.tokens
        training.logged_loss += loss.item()
        training.logged_tokens += training.unlogged_tokens
        training.unlogged_loss.zero_()
        training.unlogged_tokens = 0
        return metrics


def _require_finite(step: int, name: str, value: float) -> None:
    if not math.isfinite(value):
        raise TrainingError(
            f"step {step}: the {name} is {value}; lower the learning rate, or look at the data of "
            "this step. The checkpoints before it are kept"
        )
