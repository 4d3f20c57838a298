"""The command in a process that is forked: what ``Command`` in conftest.py starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def run_command(
    arguments: list[str], directory: Path, environment: Mapping[str, str], file: Path
) -> None:
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    with file.open("wb") as opened:
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    sys.argv = ["core-plugin", *arguments]
    from core_plugin.cli import main

    main()
