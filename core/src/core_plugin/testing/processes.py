"""Running cases in processes of their own, since a faulty device can crash or stop a process."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

PRELOAD = [
    "pytest",
    "torch._dynamo",  # which the first optimizer imports
    "torch.distributed.fsdp",
    "core_plugin.adapters",
    "core_plugin.cli",
    "core_plugin.training.worker",
]
"""What takes long to import, and is imported once for all processes."""
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""The variable with which torch loads no devices by itself, if it is 0."""
GRACE = 5.0
"""Seconds that the other ranks have once one of them has failed."""


@dataclass(frozen=True)
class Call:
    """A case's function, and the values that its parameters have."""

    module: str
    function: str
    names: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank, or on the first rank that failed."""

    kind: Literal["passed", "wrong", "raised", "not here", "crashed", "timed out"]
    message: str = ""

    @property
    def clean(self) -> bool:
        """Whether it ended as a refusal should: by an exception that is no failed assertion."""
        return self.kind == "raised"


class NotHereError(Exception):
    """The machine lacks what a case needs, such as a second device."""


class Session(Protocol):
    """What the cases of one process share."""

    def argument(self, name: str, directory: Path) -> Any:
        """The value of a case's argument."""


class Subject(Protocol):
    """What a suite tests. It can be pickled."""

    def session(self, rank: int, size: int, store: Path | None) -> AbstractContextManager[Session]:
        """What the cases of a process share; with a store, its ranks form a process group."""


class Team:
    """Processes that run one case after the other, each of them on all ranks.

    Args:
        subject: What is tested.
        size: The number of ranks.
        grouped: Whether the ranks form a process group.
    """

    def __init__(self, subject: Subject, size: int, grouped: bool) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="core-plugin-test-"))
        self._cases = 0
        context = forks()
        store = self._directory / "store" if grouped else None
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            self._log(rank).touch()
            here, there = context.Pipe()
            arguments = (subject, rank, size, store, self._log(rank), there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(self, call: Call, timeout: float) -> Outcome:
        """The outcome on the first rank that does not pass, or that all passed."""
        self._cases += 1
        directory = self._directory / f"case-{self._cases}"
        directory.mkdir()
        self._printed = [self._log(r).stat().st_size for r in range(len(self._connections))]
        for connection in self._connections:
            with suppress(ConnectionError):  # one that has ended since is found when it is heard
                connection.send((call, directory))
        outcomes = self._collect(timeout)
        failed = [(rank, o) for rank, o in sorted(outcomes.items()) if o.kind != "passed"]
        shutil.rmtree(directory, ignore_errors=True)
        if not failed:
            return outcomes[0]
        rank, outcome = min(failed, key=lambda pair: pair[1].kind == "timed out")
        where = f"rank {rank}: " if len(self._connections) > 1 else ""
        return Outcome(outcome.kind, where + outcome.message + self._said(rank))

    def _collect(self, timeout: float) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + timeout
        while len(outcomes) < len(self._connections):
            waiting = {c: r for r, c in enumerate(self._connections) if r not in outcomes}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].kind != "passed":
                    end = min(end, time.monotonic() + GRACE)
            if not ready:
                message = f"no answer within {timeout:g} s"
                outcomes |= {r: Outcome("timed out", message) for r in waiting.values()}
        return outcomes

    def _receive(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = self._connections[rank].recv()
            return outcome
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join(GRACE)
            return Outcome("crashed", f"the process ended: {_exit_told(process.exitcode)}")

    def _log(self, rank: int) -> Path:
        return self._directory / f"output-{rank}"

    def _said(self, rank: int) -> str:
        """The last lines that a rank printed in this case."""
        printed = self._log(rank).read_bytes()[self._printed[rank] :]
        lines = printed.decode(errors="replace").splitlines()[-20:]
        return "\nit printed:\n" + "\n".join(lines) if lines else ""

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # with all that its case started
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)


_starting = threading.Lock()


def forks() -> ForkServerContext:
    """The context of processes that are forked from one which has imported what takes long.

    Devices that torch would load by itself are left out: a process begins without them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with _starting:
        before = os.environ.get(AUTOLOAD)
        os.environ[AUTOLOAD] = "0"
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            del os.environ[AUTOLOAD]
            if before is not None:
                os.environ[AUTOLOAD] = before
    return context


def _exit_told(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _serve(
    subject: Subject, rank: int, size: int, store: Path | None, log: Path, connection: Connection
) -> None:
    os.setsid()  # so that all it starts can be ended with it
    multiprocessing.current_process().daemon = False  # so that a case can start processes
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(output)
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        session: Session | None = None
        while True:
            try:
                call, directory = connection.recv()
            except EOFError:
                return
            try:
                if session is None:
                    session = stack.enter_context(subject.session(rank, size, store))
                outcome = _run(session, call, directory)
            except BaseException as error:
                outcome = _failure(error)
            connection.send(outcome)


def _run(session: Session, call: Call, directory: Path) -> Outcome:
    function = getattr(importlib.import_module(call.module), call.function)
    arguments = {name: session.argument(name, directory) for name in call.names}
    function(**arguments, **call.values)
    return Outcome("passed")


def _failure(error: BaseException) -> Outcome:
    text = "".join(traceback.format_exception(error))
    if isinstance(error, NotHereError):
        return Outcome("not here", str(error))
    # pytest's failure is that of pytest.raises, if nothing was raised.
    wrong = isinstance(error, AssertionError | pytest.fail.Exception)
    return Outcome("wrong" if wrong else "raised", text)
