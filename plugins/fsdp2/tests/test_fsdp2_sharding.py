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
        ("each_mode_reduces_as_it_says_and_gradients_are_equal", 2),
        ("each_mode_reduces_bf16_as_it_says", 2),
        ("one_rank_needs_no_collective", 1),
        ("half_precision_gradients_are_always_summed", 2),
        ("an_average_that_the_device_does_not_declare_is_refused", 1),
        ("replicas_are_averaged_over_both_dimensions", 4),
        ("replicas_are_copies_each_sharded_over_its_part", 6),
        ("the_norm_of_replicas_is_that_of_the_whole", 4),
        ("replicas_that_do_not_fit_are_refused", 3),
        ("no_blocks_are_an_error", 1),
    ],
)
def test_on_real_ranks(scenario, world_size):
    run(scenario, world_size)


def test_a_checkpoint_goes_from_hybrid_to_plain_sharding_and_back(tmp_path):
    run("hybrid_begins", 4, tmp_path)
    run("plain_goes_on", 2, tmp_path)
    run("hybrid_goes_on", 4, tmp_path)


def run(scenario, world_size, *directory):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), scenario, str(world_size), *map(str, directory)],
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
    with pytest.raises(ConfigError, match="replicas must be at least 1, got 0"):
        strategy.parse_params({"replicas": 0}, strategy.Params)


@pytest.mark.parametrize("value", ["auto", True, False])
def test_averaging_is_auto_or_a_boolean(value):
    strategy = DistributedPlugin("fsdp2")
    params = strategy.parse_params({"average_in_collective": value}, strategy.Params)
    assert params.average_in_collective == value
    with pytest.raises(ConfigError, match=r"average_in_collective.*'auto' or .*boolean, got 'AVG'"):
        strategy.parse_params({"average_in_collective": "AVG"}, strategy.Params)
