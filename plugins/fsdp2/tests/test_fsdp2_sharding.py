"""FSDP2 in groups of real processes; what each does is in fsdp2_processes.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core_plugin.errors import ConfigError
from core_plugin.types import DistributedPlugin

SCRIPT = Path(__file__).with_name("fsdp2_processes.py")


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("every_parameter_is_sharded", 2),
        ("every_parameter_is_sharded", 3),
        ("gradients_are_averaged", 2),
        ("gradients_are_averaged", 3),
        ("gradients_are_kept_until_asked_for", 2),
        ("blocks_are_freed_after_forward_or_kept", 2),
        ("bf16_is_computed_in_and_float32_comes_out", 2),
        ("trained_parameters_of_two_dtypes", 2),
        ("frozen_parameters_are_sharded_too", 2),
        ("the_norm_is_that_of_the_whole", 3),
        ("memory_is_asked_for_block_by_block", 2),
        ("no_blocks_are_an_error", 1),
    ],
)
def test_on_real_ranks(scenario, world_size):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), scenario, str(world_size)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_parameters_are_checked():
    strategy = DistributedPlugin("fsdp2")
    params = strategy.parse_params({"reduce_dtype": "bfloat16"}, strategy.Params)
    assert params.reshard_after_forward is True
    with pytest.raises(ConfigError, match="reduce_dtype"):
        strategy.parse_params({"reduce_dtype": "float8"}, strategy.Params)
