"""The launchers of core-plugin: this process, or torch's elastic agent on this host."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from core_plugin.types.launcher import BaseLauncher


class Local(BaseLauncher):
    """This process, and no other."""

    @staticmethod
    def processes(params: object) -> int:
        """One."""
        return 1

    @staticmethod
    def launch(params: object, worker: Callable[[], int]) -> int:
        """Call the worker."""
        return worker()


@dataclass(frozen=True)
class TorchrunParams:
    """How torch's elastic agent starts processes.

    Attributes:
        processes_per_host: How many, each with its own device.
        start_method: ``fork`` starts them from this process, which has imported everything once;
            ``spawn`` starts each from nothing, where something does not survive a fork.
        max_restarts: How often all are started again, from the newest checkpoint, after one failed.
            A run that is told to stop is not, nor one whose configuration cannot be.
        shutdown_seconds: How long they may take to save when the run is told to stop.
    """

    processes_per_host: int = 1
    start_method: Literal["fork", "spawn"] = "fork"
    max_restarts: int = 0
    shutdown_seconds: int = 300

    def __post_init__(self) -> None:
        if self.processes_per_host < 1:
            raise ValueError(
                f"processes_per_host must be at least 1, got {self.processes_per_host}"
            )
        for name in ("max_restarts", "shutdown_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


class Torchrun(BaseLauncher):
    """The processes of one host, under torch's own elastic agent.

    SIGTERM or SIGINT to this process is enough to stop the run: it is passed on, all save, and the
    exit code is 75 ("go on with ``--resume``") or 130. For several hosts, start the same command
    under an outer ``torchrun`` instead.
    """

    Params = TorchrunParams

    @staticmethod
    def processes(params: TorchrunParams) -> int:
        """As many as the parameters say."""
        return params.processes_per_host

    @staticmethod
    def launch(params: TorchrunParams, worker: Callable[[], int]) -> int:
        """Start the processes and watch them; if one fails, the others are ended."""
        from core_plugin.builtin.agent import Agent

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        agent = Agent(
            partial(_process, worker, _threads(params.processes_per_host)),
            processes=params.processes_per_host,
            start_method=params.start_method,
            max_restarts=params.max_restarts,
            shutdown_seconds=params.shutdown_seconds,
        )
        return agent.execute()


def _threads(processes: int) -> int | None:
    """Each process's share of the cores, unless the environment says how many threads to use."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, torch.get_num_threads() // processes)


def _process(worker: Callable[[], int], threads: int | None) -> int:
    import torch

    if threads:
        torch.set_num_threads(threads)
    return worker()
