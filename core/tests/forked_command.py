"""The command, in a process that is forked from one where everything is imported already."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from core_plugin.testing.processes import forks


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    with contextlib.suppress(FileNotFoundError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


class Command:
    """A command that runs.

    It leads a session of its own, as a command does that a shell or a scheduler starts.

    Args:
        arguments: What comes after ``core-plugin``.
        directory: Where it runs.
        environment: All of its variables.
        file: Where what it prints is kept.
    """

    def __init__(
        self, arguments: Sequence[str], directory: Path, environment: Mapping[str, str], file: Path
    ) -> None:
        self._file = file
        self._process = forks().Process(
            target=_run, args=([*arguments], directory, dict(environment), file)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        """All that was printed so far."""
        return self._file.read_text() if self._file.exists() else ""

    def workers(self) -> list[int]:
        """The processes that it started, in the order of their ranks."""
        return children(self.pid)

    def wait(self, seconds: float = 120) -> tuple[int, str]:
        """The exit code, as a shell tells it, and all that was printed."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"it did not end within {seconds} s:\n{self.output}"
        return 128 - code if code < 0 else code, self.output

    def kill(self) -> None:
        """End it, and all that is left of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


def run_command(
    arguments: Sequence[str], directory: Path, environment: Mapping[str, str], seconds: float = 120
) -> tuple[int, str]:
    """The exit code of a command, and all that it printed; nothing of it is left then."""
    with tempfile.TemporaryDirectory() as folder:
        command = Command(arguments, directory, environment, Path(folder, "output"))
        try:
            return command.wait(seconds)
        finally:
            command.kill()


def _run(arguments: list[str], directory: Path, environment: Mapping[str, str], file: Path) -> None:
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    warnings.simplefilter("default")
    with file.open("wb") as opened:
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    sys.argv = ["core-plugin", *arguments]
    from core_plugin.cli import main

    main()
