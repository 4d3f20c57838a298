"""Processes that a case starts itself; each ends, or is ended, before the case's own limit."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from core_plugin.testing.processes import forks

RETURNED, RAISED, WRONG = 0, 1, 2
"""The exit codes of a forked process; ``RAISED`` is multiprocessing's own."""


def run_python(program: str, *arguments: str, autoload: bool = False, seconds: float = 25) -> str:
    """Run a program in a new interpreter, which can import what this one can.

    Args:
        program: Python code.
        arguments: Its ``sys.argv[1:]``.
        autoload: Whether torch loads the extensions that are installed for it.
        seconds: How long it may take.

    Returns:
        What it prints.

    Raises:
        AssertionError: It fails, with what it wrote to stderr, or it does not end in time.
    """
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0",
    }
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"a new process did not end within {seconds:g} s") from error
    assert ended.returncode == 0, f"exit code {ended.returncode}: {ended.stderr[-2000:]}"
    return ended.stdout


def run_script(script: Path, *arguments: object, seconds: float = 120) -> str:
    """Run a script as ``python -W error`` does, but forked from a process that has torch.

    Args:
        script: The file.
        arguments: Its ``sys.argv[1:]``.
        seconds: How long it may take. What it has started is ended with it.

    Returns:
        What it prints.

    Raises:
        AssertionError: It fails, with what it printed, or it does not end in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "output")
        file.touch()
        process = forks().Process(target=_script, args=(str(script), arguments, file))
        process.start()
        process.join(seconds)
        code, output = process.exitcode, file.read_text(errors="replace")
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
    assert code is not None, f"{script.name} did not end within {seconds:g} s: {output[-2000:]}"
    assert code == 0, f"exit code {code}: {output}"
    return output


def _script(script: str, arguments: Sequence[object], file: Path) -> None:
    os.setsid()
    output = os.open(file, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    warnings.simplefilter("error")
    sys.argv = [script, *map(str, arguments)]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


def exit_code_of_fork(function: Callable[[], object], seconds: float = 20) -> int | None:
    """How a forked process ends that runs a function.

    Returns:
        ``RETURNED``, ``WRONG`` (an assertion failed), ``RAISED`` (any other exception), the
        negative number of a signal, or None if it did not end within the seconds.
    """
    process = multiprocessing.get_context("fork").Process(target=_run, args=(function,))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def _run(function: Callable[[], object]) -> None:
    try:
        function()
    except AssertionError:
        traceback.print_exc()
        sys.exit(WRONG)
