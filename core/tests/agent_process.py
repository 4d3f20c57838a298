"""Runs three workers twice, slowly forked, and writes down who did what in which order.

Each attempt has a file in the directory that is the argument: a line ``fork`` when the agent has
forked a worker, and ``begin`` when one begins.
"""

import multiprocessing.process
import os
import sys
import time
from pathlib import Path

from core_plugin.builtin.agent import Agent

DIRECTORY = Path(sys.argv[1])
FORKS = []


def write(attempt: int, what: str) -> None:
    file = os.open(DIRECTORY / f"attempt-{attempt}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(file, f"{what}\n".encode())
    os.close(file)


def begin() -> int:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    write(attempt, "begin")
    time.sleep(0.5)
    return 1 - attempt


start = multiprocessing.process.BaseProcess.start


def start_slowly(process: multiprocessing.process.BaseProcess) -> None:
    start(process)
    write(len(FORKS) // 3, "fork")
    FORKS.append(process)
    time.sleep(0.2)


multiprocessing.process.BaseProcess.start = start_slowly
code = Agent(begin, processes=3, start_method="fork", max_restarts=1, shutdown_seconds=5).execute()
assert code == 0, code
