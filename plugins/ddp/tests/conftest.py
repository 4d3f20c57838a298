import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


class Processes:
    """The program that runs scenarios on real ranks; see ddp_processes.py."""

    def __init__(self) -> None:
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._program = subprocess.Popen(
            [sys.executable, "-W", "error", str(Path(__file__).with_name("ddp_processes.py"))],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, scenario: str, world_size: int, *rest: object) -> None:
        """Run ``module:function`` on so many ranks.

        The test fails if it fails on one of them, or does not end.
        """
        print(scenario, world_size, *rest, file=self._program.stdin, flush=True)
        answer = self._program.stdout.readline()
        assert answer, "the program that runs scenarios has ended"
        if failure := json.loads(answer):
            pytest.fail(failure, pytrace=False)

    def close(self) -> None:
        self._program.stdin.close()
        self._program.wait(60)
        self._program.stdout.close()


@pytest.fixture(scope="session")
def ddp_processes():
    processes = Processes()
    yield processes
    processes.close()
