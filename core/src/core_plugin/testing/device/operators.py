"""Every operator that torch has test samples for, on a device and on the CPU.

An operator that crashes its process or does not end is one finding; the others are compared in a
new process.
"""

from __future__ import annotations

import itertools
import pickle
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from core_plugin.errors import CorePluginError
from core_plugin.testing.device import operators_comparison
from core_plugin.testing.device.operators_comparison import Kind, OperatorResult
from core_plugin.testing.device.subject import Subject
from core_plugin.testing.processes import Call, Team

PROCESSES = 2
START_SECONDS = 300.0
"""How long a process may take to import torch's samples and to make the device current."""
OPERATOR_SECONDS = 30.0
CRASHES = 5
"""A process is replaced no more often, and what is left is reported as crashed."""


def compare_operators(
    subject: Subject,
    kinds: Sequence[Kind] = ("forward", "backward"),
    names: Sequence[str] = (),
) -> list[OperatorResult]:
    """Compare torch's operators on a device with the CPU.

    Args:
        subject: The device.
        kinds: The results, the gradients of the inputs, or both.
        names: The operators, as torch's ``op_db`` calls them; all of them if none is given.

    Returns:
        One result an operator and kind.

    Raises:
        CorePluginError: The device cannot be used, or torch's samples cannot be imported.
    """
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def compare(task: tuple[str, Kind]) -> OperatorResult:
        worker = idle.get()
        try:
            return worker.compare(*task)
        finally:
            idle.put(worker)

    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(subject)) for _ in range(PROCESSES)]
        threads = stack.enter_context(ThreadPoolExecutor(PROCESSES))
        known, *_ = threads.map(_Worker.operators, workers)
        for worker in workers:
            idle.put(worker)
        return list(threads.map(compare, itertools.product(names or known, kinds)))


class _Worker:
    """Compares operators in a process, and in a new one after that has ended."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._team: Team | None = None
        self._crashes = 0

    def __enter__(self) -> _Worker:
        self._directory = tempfile.TemporaryDirectory()
        self._answer = Path(self._directory.name) / "answer"
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()
        self._directory.cleanup()

    def operators(self) -> list[str]:
        """The names of the operators; starts the process."""
        call = Call(
            operators_comparison.__name__, "list_operators", ("device",), {"answer": self._answer}
        )
        operators: list[str] = self._ask(call, START_SECONDS)
        return operators

    def compare(self, operator: str, kind: Kind) -> OperatorResult:
        """Compare an operator, or say how the process ended over it."""
        if self._crashes == CRASHES:
            message = f"not compared: {CRASHES} crashed before it"
            return OperatorResult(operator, kind, "crashed", message)
        values = {"operator": operator, "kind": kind, "answer": self._answer}
        call = Call(
            operators_comparison.__name__, "compare_operator", ("subject", "device"), values
        )
        started = time.perf_counter()
        try:
            if self._team is None:
                self.operators()
            result: OperatorResult = self._ask(call, OPERATOR_SECONDS)
            return result
        except CorePluginError as error:
            self._crashes += 1
            seconds = time.perf_counter() - started
            return OperatorResult(operator, kind, "crashed", str(error), seconds)

    def _ask(self, call: Call, seconds: float) -> Any:
        self._team = self._team or Team(self._subject, 1, grouped=False)
        outcome = self._team.run(call, seconds)
        if outcome.kind != "passed":
            self._end()
            raise CorePluginError(outcome.message)
        return pickle.loads(self._answer.read_bytes())

    def _end(self) -> None:
        if self._team:
            self._team.close()
            self._team = None
