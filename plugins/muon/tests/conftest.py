import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


class Processes:
    """The program that runs scenarios on real ranks; see muon_processes.py."""

    def __init__(self) -> None:
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._program = subprocess.Popen(
            [sys.executable, "-W", "error", str(Path(__file__).with_name("muon_processes.py"))],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, module: str, scenarios: str, world_size: int, directory: Path) -> None:
        """Run functions of a module, whose names are in one string, on so many ranks.

        The test fails if one fails on one of them, or does not end.
        """
        line = json.dumps([module, scenarios.split(), world_size, str(directory)])
        print(line, file=self._program.stdin, flush=True)
        answer = self._program.stdout.readline()
        assert answer, "the program that runs scenarios has ended"
        if failure := json.loads(answer):
            pytest.fail(failure, pytrace=False)

    def close(self) -> None:
        self._program.stdin.close()
        assert self._program.wait(timeout=60) == 0
        self._program.stdout.close()


@pytest.fixture(scope="session")
def launch():
    processes = Processes()
    yield processes
    processes.close()
