"""The launchers of core-plugin: this process, or torch's elastic agent on this host."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
        max_restarts: How often all are started again after one failed.
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

    For several hosts, start the same command under an outer ``torchrun`` instead.
    """

    Params = TorchrunParams

    @staticmethod
    def processes(params: TorchrunParams) -> int:
        """As many as the parameters say."""
        return params.processes_per_host

    @staticmethod
    def launch(params: TorchrunParams, worker: Callable[[], int]) -> int:
        """Start the processes and watch them; if one fails, the others are ended."""
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # The agent shares its store with the workers, where keys of a killed attempt mislead the
        # next one (pytorch/pytorch#167288).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=params.processes_per_host,
            run_id=f"core-plugin-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=params.max_restarts,
            monitor_interval=0.1,
            start_method=params.start_method,
            local_addr="127.0.0.1",
            shutdown_timeout=params.shutdown_seconds,
        )
        try:
            elastic_launch(settings, _process)(worker, _threads(params.processes_per_host))
        except ChildFailedError as error:
            failures = sorted(error.failures.values(), key=lambda f: f.timestamp)
            return _exit_code(failures[0].exitcode)
        except SignalException as error:
            return 128 + error.sigval
        return 0


def _threads(processes: int) -> int | None:
    """Each process's share of the cores, unless the environment says how many threads to use."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, torch.get_num_threads() // processes)


def _process(worker: Callable[[], int], threads: int | None) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)
    code = worker()
    if code:
        sys.exit(code)


def _exit_code(code: int) -> int:
    """A process that a signal ended has a negative code; as shells do, 128 and the signal."""
    return 128 - code if code < 0 else code
