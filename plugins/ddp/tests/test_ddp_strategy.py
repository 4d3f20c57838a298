"""DDP in groups of real processes; what each does is in ddp_processes.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core_plugin import config
from core_plugin.errors import ConfigError
from core_plugin.types import DistributedPlugin

SCRIPT = Path(__file__).with_name("ddp_processes.py")


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("gradients_are_averaged", 2),
        ("gradients_are_averaged", 3),
        ("gradients_are_kept_until_asked_for", 2),
        ("unused_parameters_are_found_if_asked_to", 2),
        ("each_mode_reduces_as_it_says_and_gradients_are_equal", 2),
        ("each_mode_reduces_as_it_says_and_gradients_are_equal", 3),
        ("each_mode_keeps_gradients_until_asked_for", 2),
        ("one_rank_is_not_averaged_in_the_collective", 1),
        ("half_precision_gradients_do_not_overflow", 2),
        ("an_average_that_the_device_does_not_declare_is_refused", 1),
        ("the_norm_is_that_of_the_averaged_gradients", 2),
        ("the_model_is_materialized_before_it_is_wrapped", 2),
        ("a_model_that_trains_nothing_is_refused", 1),
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


@pytest.mark.parametrize("value", [0, -1.0])
def test_parameters_are_checked(value):
    strategy = DistributedPlugin("ddp")
    with pytest.raises(ConfigError, match="bucket_cap_mb must be positive"):
        strategy.parse_params({"bucket_cap_mb": value}, strategy.Params)


@pytest.mark.parametrize("value", ["auto", True, False])
def test_averaging_is_auto_or_a_boolean(value):
    strategy = DistributedPlugin("ddp")
    params = strategy.parse_params({"average_in_collective": value}, strategy.Params)
    assert params.average_in_collective == value
    with pytest.raises(ConfigError, match=r"average_in_collective.*'auto' or .*boolean, got 'AVG'"):
        strategy.parse_params({"average_in_collective": "AVG"}, strategy.Params)


def test_what_torch_cannot_do_is_said_before_the_run():
    train = {"steps": 1, "global_batch_size": 4, "micro_batch_size": 1}
    run = {"distributed": {"name": "ddp", "static_graph": True}, "train": train}
    with pytest.raises(ConfigError, match="static_graph does not go with several micro-batches"):
        config.resolve(run)
    config.resolve({**run, "train": {**train, "micro_batch_size": 4}})
