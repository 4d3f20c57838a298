"""Saving a run: at once, or in the background while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from core_plugin.errors import CheckpointError
from core_plugin.training import resume
from core_plugin.training.assembly import Training
from core_plugin.training.checkpoint import Checkpoints
from core_plugin.training.world import lost_contact

BETWEEN_QUESTIONS = 0.1
"""Seconds between two times that ranks who wait for a save ask each other how it goes."""
GRACE = 30.0
"""Seconds that a save has to end by itself, once training or the save has failed on a rank."""
NOTICE = 1.0
"""Seconds that it has if a rank is lost: it fails as soon as it asks the others something."""


class Saver:
    """Saves the state of a run. At most one save is under way.

    Args:
        training: The run.
        checkpoints: Where to. To save in the background it needs a group of its own.
        announce: Called on every rank, in the same step, with each checkpoint that is complete.
    """

    def __init__(
        self, training: Training, checkpoints: Checkpoints, announce: Callable[[Path], None]
    ) -> None:
        self._training = training
        self._checkpoints = checkpoints
        self._announce = announce
        self._in_background = training.config.checkpoint.asynchronous
        self._under_way: Future[Path] | None = None
        self._finished = 0

    def save(self) -> None:
        """Save the state that the run has now, once the save before it is over. Collective.

        In the background only a copy is taken, and what follows is done by a thread.

        Raises:
            CheckpointError: On every rank, if this save or the one before it failed on one.
        """
        self.finish()
        write = resume.stage(self._training, copy=self._in_background)
        save = partial(self._checkpoints.save, self._training.step, write)
        if self._in_background:
            self._under_way = _in_thread(save)
        else:
            self._announce(save())

    @property
    def ended(self) -> int:
        """How many saves in the background have ended on this rank."""
        return self._finished + (self._under_way is not None and self._under_way.done())

    def heed(self, ended: int) -> None:
        """Finish the save that is under way if it has ended on a rank.

        Args:
            ended: The sum of all ranks' :attr:`ended`, as they were at some time before.

        Raises:
            CheckpointError: As :meth:`finish`.
        """
        if ended > self._finished * self._training.world.size:
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way, if there is one. Collective.

        A rank that has failed may have left the others waiting for it in their threads. So the
        ranks ask each other, instead of waiting for their own threads.

        Raises:
            CheckpointError: On every rank, if it failed on one.
        """
        if self._under_way is None:
            return
        save, world, beats = self._under_way, self._training.world, -1
        while not _is_over(world.gather((save.done(), _has_failed(save)))):
            if beats != (beats := self._checkpoints.progress.beats):
                world.progress.enter("waiting for a save in the background")
            futures.wait([save], BETWEEN_QUESTIONS)
        with world.together("saving in the background", CheckpointError):
            if save.done():
                save.result()
        self._under_way = None
        self._finished += 1
        self._announce(save.result())

    def abandon(self, error: BaseException) -> None:
        """Give the save that is under way some time to end by itself, once the run has failed.

        A process that ends with a thread in C++ may be aborted.

        Args:
            error: How it failed.
        """
        if self._under_way is not None:
            futures.wait([self._under_way], NOTICE if lost_contact(error) else GRACE)


def _is_over(states: list[tuple[bool, bool]]) -> bool:
    return all(done for done, _ in states) or any(failed for _, failed in states)


def _has_failed(save: Future[Path]) -> bool:
    return save.done() and save.exception() is not None


def _in_thread(save: Callable[[], Path]) -> Future[Path]:
    """Begin a save in a thread, which does not keep a process that ends."""
    future: Future[Path] = Future()

    def run() -> None:
        try:
            future.set_result(save())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="saving a checkpoint", daemon=True).start()
    return future
