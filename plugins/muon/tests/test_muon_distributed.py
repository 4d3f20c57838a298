"""Muon in groups of real processes; what each does is in muon_processes.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("muon_processes.py")


@pytest.fixture(scope="module")
def launch():
    """Runs a scenario in a group of processes; they are forked from one that has torch."""
    group = subprocess.Popen(
        [sys.executable, "-W", "error", str(SCRIPT)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def launch(scenario: str, world_size: int, directory: Path) -> None:
        print(json.dumps([scenario, world_size, str(directory)]), file=group.stdin, flush=True)
        fault = json.loads(group.stdout.readline())
        assert not fault, fault

    yield launch
    group.stdin.close()
    assert group.wait(timeout=60) == 0
    group.stdout.close()


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
def test_is_bitwise_one_process(launch, scenario: str, world_size: int, tmp_path: Path) -> None:
    launch(scenario, world_size, tmp_path)


def test_a_checkpoint_resumes_on_any_number_of_ranks(launch, tmp_path: Path) -> None:
    launch("save", 2, tmp_path)
    for world_size in (1, 3):
        launch("resume", world_size, tmp_path)
