"""Torch's elastic agent, as the torchrun launcher runs it on one host."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters

from core_plugin.types.launcher import INTERRUPTED, MISTAKEN, PREEMPTED

POLL = 0.1
"""Seconds between two looks at workers that do not end."""
ASKING = (signal.SIGTERM, signal.SIGINT)
"""The signals that ask a run to stop."""
STOPPED = (PREEMPTED, INTERRUPTED)
"""The exit codes of a worker that has saved because it was asked to stop."""
LAST_WORDS = 5.0
"""Seconds that the others have to tell what they know, once a worker has failed and told why."""


class Agent(LocalElasticAgent):
    """Starts workers, watches them, and starts all again if one fails.

    It differs from torch's own in two ways. What is left of a failed attempt is killed: it only
    waits for the dead one, and has nothing to save. And a signal that asks it to stop is passed on
    to the workers, which save and end by themselves; their exit codes are then the result.

    Args:
        worker: What each process calls; it returns an exit code.
        processes: How many there are.
        start_method: ``fork`` or ``spawn``.
        max_restarts: How often all are started again.
        shutdown_seconds: How long they have to end when they are asked to stop.
    """

    def __init__(
        self,
        worker: Callable[[], int],
        *,
        processes: int,
        start_method: str,
        max_restarts: int,
        shutdown_seconds: float,
    ) -> None:
        if start_method == "fork":
            importlib.import_module("torch._dynamo")  # every optimizer does, and it is slow
        run_id = f"core-plugin-{secrets.token_hex(8)}"
        meeting = RendezvousParameters("c10d", "127.0.0.1:0", run_id, 1, 1, local_addr="127.0.0.1")
        shared = multiprocessing.get_context(start_method)
        self._all_started = shared.RawValue("b", 0)
        # Once all have finished, torch looks at them; until then only this class does.
        self._finished = shared.RawArray("b", processes)
        spec = WorkerSpec(
            role="default",
            local_world_size=processes,
            rdzv_handler=rendezvous.get_rendezvous_handler(meeting),
            entrypoint=_work,
            args=(worker, self._all_started, self._finished),
            max_restarts=max_restarts,
            monitor_interval=0.001,  # the wait is in _monitor_workers
            local_addr="127.0.0.1",
        )
        super().__init__(spec, DefaultLogsSpecs(), start_method)
        self._shutdown_seconds = shutdown_seconds
        self._workers: list[BaseProcess] = []
        self._signal: int | None = None
        self._deadline: float | None = None
        self._failure = 0

    def execute(self) -> int:
        """Run the workers to their end.

        Returns:
            The exit code: 0, or that of the worker which failed first; of one that a signal ended
            it is 128 and the signal's number, as in a shell. Where several have failed, a signal
            goes first: the others may only have lost contact.
        """
        handlers = {n: signal.signal(n, self._ask) for n in ASKING}
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"  # not those two
        try:
            result = self.run()
        except SignalException as error:
            return 128 + error.sigval
        finally:
            self._worker_group.spec.rdzv_handler.shutdown()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return _in_shell(self._failure or int(result.is_failed()))

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._failure = 0
        self._all_started.value = 0
        self._finished[:] = [0] * len(self._finished)
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)  # a forked worker has _ask until it starts
        try:
            ids: dict[int, Any] = super()._start_workers(worker_group)
            self._all_started.value = 1
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
        self._workers = self._pcontext._pc.processes  # type: ignore[union-attr]
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        wait([worker.sentinel for worker in self._workers], POLL)
        if self._signal and self._deadline is None:
            self._pass_on(self._signal)
        if failed := [worker.exitcode for worker in self._workers if worker.exitcode]:
            self._end(next((code for code in failed if code < 0), failed[0]))
        elif not all(self._finished):
            if self._deadline and time.monotonic() > self._deadline:
                self._kill()
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _pass_on(self, number: int) -> None:
        self._remaining_restarts = 0
        self._deadline = time.monotonic() + self._shutdown_seconds
        for worker in self._workers:
            if worker.pid and worker.is_alive():
                os.kill(worker.pid, number)

    def _end(self, code: int) -> None:
        """End all workers, of which one has failed with a code."""
        seconds = LAST_WORDS if code > 0 else 0.0
        if stops := self._deadline is not None or code in STOPPED:
            seconds = self._shutdown_seconds
        deadline = time.monotonic() + seconds
        while (busy := self._busy()) and time.monotonic() < deadline:
            wait(busy, POLL)
        if MISTAKEN in [w.exitcode for w in self._workers]:
            code = MISTAKEN
        if stops or code == MISTAKEN:
            self._remaining_restarts = 0
        else:
            self._tell(dict(enumerate(w.exitcode or 0 for w in self._workers)))
        self._kill()
        unfinished = [w for w, done in zip(self._workers, self._finished, strict=True) if not done]
        others = [w.exitcode for w in unfinished if w.exitcode not in STOPPED]
        self._failure = (stops and others and others[0]) or code

    def _busy(self) -> list[int]:
        """The sentinels of the workers that have something to do yet."""
        workers = zip(self._workers, self._finished, strict=True)
        return [w.sentinel for w, finished in workers if w.is_alive() and not finished]

    def _tell(self, codes: Mapping[int, int]) -> None:
        """Say who was ended by a signal, which cannot say so itself, and what comes next."""
        told = [
            f"rank {rank} was ended by {signal.Signals(-code).name}"
            for rank, code in codes.items()
            if code < 0
        ]
        if left := self._remaining_restarts:
            allowed = self._worker_group.spec.max_restarts
            told.append(f"all ranks are started again ({allowed - left + 1} of {allowed})")
        elif told:
            told.append("no restart is left; go on with --resume")
        if told:
            print("; ".join(told), file=sys.stderr, flush=True)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(LAST_WORDS)


def _work(worker: Callable[[], int], all_started: Any, finished: Any) -> None:
    # For each worker that connects, a thread of the agent's store looks its address up, under a
    # lock of the C library that a process which is forked meanwhile would wait for forever.
    agent = multiprocessing.parent_process()
    while not all_started.value and agent and agent.is_alive():
        time.sleep(0.001)
    if code := worker():
        sys.exit(code)
    for number in ASKING:  # torch's agent hangs if one ends it from here
        signal.signal(number, signal.SIG_IGN)
    finished[int(os.environ["LOCAL_RANK"])] = 1


def _in_shell(code: int) -> int:
    """The exit code as shells tell it: 128 and the signal for a process that one ended."""
    return 128 - code if code < 0 else code
