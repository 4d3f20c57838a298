"""The wish to stop: SIGINT and SIGTERM end a run after the step that is under way, or the next."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Which signal asked this process to stop, if one did."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number


@contextmanager
def on_signals() -> Iterator[StopRequest]:
    """A request that SIGINT and SIGTERM set, until the end of the block.

    A launcher and a terminal may each send the signal once, so a second one changes nothing: not
    in the block, and not in the rest of a process that was asked to stop.
    """
    request = StopRequest()
    earlier = {n: signal.signal(n, request._ask) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, signal.SIG_IGN if request.signal else handler)


def restore_default_handlers() -> None:
    """Undo what a launcher set for SIGINT and SIGTERM in the process that this one was forked from.

    Those that came while it blocked them are delivered now. Until a run takes its first step, there
    is nothing to save: they end the process.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
