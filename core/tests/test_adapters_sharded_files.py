"""The files of an adapter that is sharded over real processes; see adapter_files_processes.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("adapter_files_processes.py")


@pytest.mark.parametrize("processes", [2, 3])
def test_files_do_not_depend_on_the_number_of_processes(processes: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(processes), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
