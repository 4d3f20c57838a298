"""Muon in groups of real processes; what each does is in muon_processes.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("muon_processes.py")


def launch(scenario: str, world_size: int, directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), scenario, str(world_size), str(directory)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("fsdp2", 1),
        ("fsdp2", 2),
        ("fsdp2", 3),
        ("fsdp2_computes_once", 3),
        ("fsdp2_backward", 2),
        ("ddp", 2),
        ("missing_gradients", 3),
        ("other_layouts", 2),
        ("gradients_laid_out_otherwise", 2),
    ],
)
def test_is_bitwise_one_process(scenario: str, world_size: int, tmp_path: Path) -> None:
    launch(scenario, world_size, tmp_path)


def test_a_checkpoint_resumes_on_any_number_of_ranks(tmp_path: Path) -> None:
    launch("save", 2, tmp_path)
    for world_size in (1, 3):
        launch("resume", world_size, tmp_path)
