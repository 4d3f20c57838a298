"""Runs that something happens to."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from forked_command import Command, children


class Faulty:
    """Starts runs of a workspace."""

    def __init__(self, workspace: Any) -> None:
        self.workspace = workspace

    def job(self, strategy: str = "ddp", **changes: Any) -> dict[str, Any]:
        """Six quick steps, with a checkpoint after every second one."""
        return (
            self.workspace.small(
                distributed=strategy,
                train={
                    "steps": 6,
                    "global_batch_size": 6,
                    "micro_batch_size": 1,
                    "hang_timeout": None,
                },
                checkpoint={"every": 2, "keep": 10},
            )
            | changes
        )

    def start(
        self,
        document: Mapping[str, Any],
        ranks: int = 1,
        *options: str,
        directory: str = "run",
        **environment: str,
    ) -> Command:
        file = self.workspace.write(document, ranks, directory)
        return self.workspace.start(["train", str(file), *options], **environment)

    def train(self, *arguments: Any, **keywords: Any) -> list[dict[str, float]]:
        """The metrics of a run that must succeed."""
        code, output = self.start(*arguments, **keywords).wait()
        assert code == 0, output
        return self.workspace.metrics(keywords.get("directory", "run"))

    def reaches(self, step: int, directory: str = "run") -> bool:
        """Whether a run logs a step in time."""
        return self.soon(lambda: len(self.workspace.metrics(directory)) >= step)

    @staticmethod
    def lose(pid: int) -> None:
        """Kill a process and those that it started, as the loss of their host does."""
        for each in (pid, *children(pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    @staticmethod
    def soon(condition: Callable[[], object], seconds: float = 60) -> bool:
        """Whether something becomes true in time."""
        deadline = time.monotonic() + seconds
        while not (true := condition()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(true)


@pytest.fixture
def faulty(workspace: Any) -> Faulty:
    return Faulty(workspace)
