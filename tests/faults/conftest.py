"""Runs that something happens to, started quickly."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))
from forked_command import run_command

WARM = (
    "core_plugin.builtin.agent",
    "core_plugin.builtin.decoder_model",
    "core_plugin.cli",
    "core_plugin.training.worker",
    "core_plugin_ddp.plugin",
    "core_plugin_fsdp2.plugin",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
)


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    with contextlib.suppress(FileNotFoundError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


class Command:
    """The command in a process that is forked from one where everything is imported already.

    It leads a session of its own, as a command does that a shell or a scheduler starts.
    """

    def __init__(
        self, arguments: list[str], directory: Path, environment: Mapping[str, str], file: Path
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(WARM))
        self._file = file
        self._process = context.Process(
            target=run_command, args=(arguments, directory, dict(environment), file)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._file.read_text() if self._file.exists() else ""

    def workers(self) -> list[int]:
        """The processes that it started, in the order of their ranks."""
        return children(self.pid)

    def wait(self, seconds: float = 60) -> tuple[int, str]:
        """The exit code, as a shell tells it, and all that was printed."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"it did not end within {seconds} s:\n{self.output}"
        return 128 - code if code < 0 else code, self.output

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


class Faulty:
    """Starts runs of a workspace, and ends what is left of them."""

    def __init__(self, workspace: Any) -> None:
        self.workspace = workspace
        self._started: list[Command] = []

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
        output = self.workspace.path / f"output-{len(self._started)}"
        environment = self.workspace.environment | environment
        command = Command(["train", str(file), *options], self.workspace.path, environment, output)
        self._started.append(command)
        return command

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

    def end(self) -> None:
        for command in self._started:
            command.kill()


@pytest.fixture
def faulty(workspace: Any) -> Iterator[Faulty]:
    faulty = Faulty(workspace)
    yield faulty
    faulty.end()
