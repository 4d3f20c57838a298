"""Linear layers and embeddings in a group of real processes; see lora_matrix_processes.py."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("lora_matrix_processes.py")


def test_two_processes_are_as_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "2", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
