"""Launchers: how a run's processes come to be."""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from core_plugin.contract import Implementation
from core_plugin.plugin import BasePlugin

PREEMPTED = 75
"""The exit code of a run that SIGTERM stopped after it saved, and that is to go on with --resume;
it is what ``sysexits.h`` calls EX_TEMPFAIL."""
INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a run that SIGINT stopped after it saved, or before it began."""
MISTAKEN = 2
"""The exit code of a run that cannot be as it is configured; started again, it would fail again."""


class BaseLauncher(Implementation, abstract=True):
    """A launcher. It is not asked where an outer launcher already made the processes."""

    @staticmethod
    @abstractmethod
    def processes(params: Any) -> int:
        """The number of processes on this host; also told before anything is launched."""

    @staticmethod
    @abstractmethod
    def launch(params: Any, worker: Callable[[], int]) -> int:
        """Run the worker in every process and wait for all of them.

        Args:
            params: The implementation's ``Params``.
            worker: Picklable. Each process calls it in its main thread, with ``RANK``,
                ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
                ``MASTER_PORT`` in its environment (or none of them, for a run of one process).
                It reports its own errors and returns an exit code. Asked by SIGTERM or SIGINT, all
                workers save and return :data:`PREEMPTED` or :data:`INTERRUPTED`: they are not
                started again, and neither are they after :data:`MISTAKEN`.

        Returns:
            The exit code: the workers', if it is the same for all. If one fails, the others are
            ended.
        """


class LauncherPlugin(BasePlugin, contract=BaseLauncher):
    """The type of launchers."""
