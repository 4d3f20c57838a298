"""The watch over a run: ranks that all stand still are told apart, named, and ended.

In each rank a thread looks whether the main thread goes on. When it has not for the timeout, the
thread asks the others through the store. If one of them goes on, this rank only waits for it. If
none does, one of them prints where each stands, and all end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from core_plugin.training.blame import distance
from core_plugin.training.world import World

T = TypeVar("T")
Row = Mapping[str, Any]
"""What a rank says of itself."""

EXIT_CODE = 1
PATIENCE = 3.0
"""Seconds that a rank has to answer; one that does not is silent."""
_WAITING = ("torch.distributed", "torch.autograd", "core_plugin.training.world")
"""Modules that wait for other ranks; backward does where gradients are exchanged."""
_OUTSIDE = "core_plugin.training.worker"
"""What calls the run; the frames outside of it tell nothing."""


@contextmanager
def watch(world: World, timeout: float | None) -> Iterator[None]:
    """A block that has to make progress, as :attr:`World.progress` tells, on one rank at least.

    Args:
        world: The ranks; all of them enter the block.
        timeout: After how many seconds without progress the processes end with code 1; None does
            not watch.
    """
    if timeout is None:
        yield
        return
    watchdog = Watchdog(world, timeout)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
    with contextlib.suppress(RuntimeError):  # the others may take their time
        world.leave_together("watched")


class Watchdog(threading.Thread):
    """The thread of one rank."""

    def __init__(self, world: World, timeout: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._rank, self._size = world.rank, world.size
        self._progress = world.progress
        own: dist.Store = world.store.clone()  # type: ignore[attr-defined]
        self._store = _ImpatientStore(dist.PrefixStore("hang", own))
        self._main = threading.get_ident()
        self._timeout = timeout
        self._interval = min(2.0, timeout / 10)
        self._ended = threading.Event()
        self._beats = -1
        self._still = 0.0
        self._settled = 0
        self._answered = 0

    @property
    def _is_asked(self) -> bool:
        return self._answered > self._settled

    def stop(self) -> None:
        """End the watch; while the ranks ask each other, it is the answer that ends this one."""
        deadline = time.monotonic() + 2 * PATIENCE
        while self._is_asked and time.monotonic() < deadline:
            time.sleep(0.05)
        self._ended.set()
        self.join(PATIENCE)
        faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        """Look, every now and then, until :meth:`stop`."""
        looked = time.monotonic()
        self._wind_up()
        while not self._ended.wait(self._interval):
            self._wind_up()
            now = time.monotonic()
            self._count(now - looked)
            looked = now
            with contextlib.suppress(RuntimeError, TimeoutError):  # the store is gone, or stopped
                self._confer()
            if self._still >= self._timeout + 2 * PATIENCE:
                _leave(_report({self._rank: self._row()}, self._size, self._timeout))

    def _wind_up(self) -> None:
        """Set the timer in C: code that keeps the interpreter to itself stops this thread, too."""
        faulthandler.dump_traceback_later(self._timeout + 2 * PATIENCE, file=2, exit=True)

    def _count(self, passed: float) -> None:
        """Count the time without progress.

        That in which the whole process stood does not count, unless it stood for longer than the
        timer in C is set to: that one cannot tell it from C code that keeps the interpreter.
        """
        beats = self._progress.beats
        self._still = self._still + min(passed, 2 * self._interval) if beats == self._beats else 0.0
        self._beats = beats

    def _row(self) -> Row:
        place, waits = _place(sys._current_frames()[self._main])
        return {
            "step": self._progress.step,
            "phase": self._progress.phase,
            "place": place,
            "waits": waits,
            "beats": self._progress.beats,
            "still": self._still,
        }

    def _confer(self) -> None:
        """Answer the question that is open; ask one if this rank stands still and none is."""
        question = self._store.add("questions", 0)
        if question > self._settled:
            self._answer(question)
            self._heed(question)
        elif self._still >= self._timeout and self._store.add(f"{question + 1}/judge", 1) == 1:
            self._judge(question + 1)

    def _answer(self, question: int) -> None:
        if self._answered < question:
            self._answered = question
            self._store.set(f"{question}/{self._rank}", json.dumps(self._row()))

    def _heed(self, question: int) -> None:
        if (verdict := self._store.look(f"{question}/verdict")) is None:
            return
        if verdict["hangs"]:
            self._store.add(f"{question}/seen", 1)
            _leave("")
        self._still = min(self._still, verdict["still"])
        self._settled = question

    def _judge(self, question: int) -> None:
        """Ask all ranks, and tell them whether the run hangs."""
        self._store.add("questions", 1)
        self._answer(question)
        rows = self._rows(question)
        still = min(row["still"] for row in rows.values())
        hangs = still >= self._timeout - 2 * self._interval
        self._store.set(f"{question}/verdict", json.dumps({"hangs": hangs, "still": still}))
        if hangs:
            os.write(2, _report(rows, self._size, self._timeout).encode())
            self._wait(lambda: self._store.add(f"{question}/seen", 0) >= len(rows) - 1)
            _leave("")
        self._still, self._settled = min(self._still, still), question

    def _rows(self, question: int) -> dict[int, Row]:
        """What the ranks say that answer in time."""
        rows: dict[int, Row] = {}

        def all_are_there() -> bool:
            for rank in range(self._size):
                if rank not in rows and (row := self._store.look(f"{question}/{rank}")):
                    rows[rank] = row
            return len(rows) == self._size

        self._wait(all_are_there)
        return rows

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition() and time.monotonic() < deadline:
            time.sleep(self._interval / 4)


class _ImpatientStore:
    """A store that does not make its caller wait, though its host may be stopped.

    Raises:
        TimeoutError: The store does not answer, and neither did it the last time.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._waiting: threading.Thread | None = None

    def add(self, key: str, amount: int) -> int:
        return self._soon(lambda: self._store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        self._soon(lambda: self._store.set(key, value))

    def look(self, key: str) -> Any:
        """The JSON under a key, or None if it is not there."""
        there = self._soon(lambda: self._store.check([key]))
        return json.loads(self._soon(lambda: self._store.get(key))) if there else None

    def _soon(self, call: Callable[[], T]) -> T:
        results: list[T] = []

        def answer() -> None:
            with contextlib.suppress(RuntimeError):
                results.append(call())

        if self._waiting is None or not self._waiting.is_alive():
            self._waiting = threading.Thread(target=answer, daemon=True)
            self._waiting.start()
            self._waiting.join(PATIENCE / 2)
        if not results:
            raise TimeoutError("the store does not answer")
        return results[0]


def _place(frame: FrameType | None) -> tuple[str, bool]:
    """Where a stack stands, and whether it waits for other ranks.

    The place is the innermost one in code of a user or a plugin; else the innermost in core-plugin.
    """
    places: list[tuple[int, int, str]] = []
    waits, is_innermost = False, True
    while frame is not None and (module := frame.f_globals.get("__name__", "")) != _OUTSIDE:
        is_innermost = is_innermost and module.startswith(("torch.", *_WAITING))
        waits = waits or (is_innermost and module.startswith(_WAITING))
        code = frame.f_code
        place = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
        places.append((distance(module), len(places), place))
        frame = frame.f_back
    return min(places)[2] if places else "", waits


def _report(rows: Mapping[int, Row], size: int, timeout: float) -> str:
    """A table of the ranks, those first that the others probably wait for."""
    silent = [rank for rank in range(size) if rank not in rows]
    suspects = silent + sorted(rows, key=lambda r: (rows[r]["waits"], rows[r]["beats"], r))
    cells = [("rank", "step", "phase", "place"), *(_cells(r, rows.get(r)) for r in suspects)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = ("  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in cells)
    blame = f"; the others probably wait for rank {suspects[0]}" if size > 1 else ""
    head = f"error: no progress for {timeout:g} seconds (train.hang_timeout){blame}"
    return "\n  ".join([head, *lines]) + "\n"


def _cells(rank: int, row: Row | None) -> tuple[str, str, str, str]:
    if row is None:
        return str(rank), "?", "silent", "stopped, gone, or in C code that does not let others run"
    waits = " (waits for other ranks)" if row["waits"] else ""
    return str(rank), str(row["step"]), row["phase"], row["place"] + waits


def _leave(text: str) -> NoReturn:
    """End the process with a last word, whatever its main thread does."""
    os.write(2, text.encode())
    flushing = threading.Thread(target=_flush, daemon=True)  # the main thread may keep the lock
    flushing.start()
    flushing.join(1)
    os._exit(EXIT_CODE)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
