"""DDP averages gradients on real ranks (see ddp_averaging.py), and checks its parameters."""

import pytest

from core_plugin import config
from core_plugin.errors import ConfigError
from core_plugin.types import DistributedPlugin


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
def test_on_real_ranks(ddp_processes, scenario, world_size):
    ddp_processes.run(f"ddp_averaging:{scenario}", world_size)


@pytest.mark.parametrize("value", [0, -1.0])
def test_parameters_are_checked(value):
    strategy = DistributedPlugin("ddp")
    with pytest.raises(ConfigError, match="bucket_cap_mb must be positive"):
        strategy.parse_params({"bucket_cap_mb": value}, strategy.Params)


def test_a_static_graph_needs_no_search_for_unused_parameters():
    strategy = DistributedPlugin("ddp")
    both = {"static_graph": True, "find_unused_parameters": True}
    with pytest.raises(ConfigError, match="static_graph finds the unused parameters in the first"):
        strategy.parse_params(both, strategy.Params)


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
