"""FSDP2 in groups of real processes; what each does is in the modules of scenarios."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core_plugin import config
from core_plugin.builtin.device import CPU
from core_plugin.errors import ConfigError
from core_plugin.privateuse1 import DeviceBackend
from core_plugin.types import DistributedPlugin

SCRIPT = Path(__file__).with_name("fsdp2_group.py")


@pytest.fixture(scope="module")
def run():
    """Runs a scenario in a group of processes; they are forked from one that has torch."""
    group = subprocess.Popen(
        [sys.executable, "-W", "error", str(SCRIPT)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(module, scenario, world_size, *arguments):
        print(json.dumps([module, scenario, world_size, *arguments]), file=group.stdin, flush=True)
        fault = json.loads(group.stdout.readline())
        assert not fault, fault

    yield run
    group.stdin.close()
    assert group.wait(timeout=60) == 0
    group.stdout.close()


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
def test_sharding(run, scenario, world_size):
    run("fsdp2_processes", scenario, world_size)


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("values_are_those_of_one_process", 2),
        ("values_are_those_of_one_process", 3),
        ("parts_are_filled_in_any_order", 2),
        ("it_trains_as_one_process", 3),
        ("no_rank_holds_more_than_its_parts_and_a_module", 2),
        ("after_a_step_a_rank_holds_its_parts_alone", 2),
    ],
)
def test_sharding_on_meta(run, scenario, world_size):
    run("fsdp2_meta", scenario, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_rank_reads_its_part_of_weights_alone(run, tmp_path, world_size):
    run("fsdp2_meta", "each_rank_reads_its_part_alone", world_size, str(tmp_path))


def test_adapters_begin_and_train_as_in_one_process(run, tmp_path):
    run("fsdp2_meta", "adapters_begin_and_train_as_in_one_process", 2, str(tmp_path))


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("parameters_are_freed_down_to_two_ranks", 4),
        ("the_last_blocks_are_kept_after_forward", 4),
        ("blocks_are_gathered_ahead", 2),
        ("parameters_are_offloaded", 2),
        ("gradients_are_divided_by_the_factor", 2),
        ("gradients_are_divided_by_the_factor", 4),
        ("one_rank_divides_by_nothing", 1),
        ("float32_is_reduced_and_returned_as_asked", 2),
        ("ties_over_blocks_stay", 2),
        ("what_cannot_be_sharded_is_refused", 1),
        ("everything_at_once", 4),
    ],
)
def test_options(run, scenario, world_size):
    run("fsdp2_options", scenario, world_size)


@pytest.mark.parametrize(("checkpointed", "compiled"), [(True, False), (False, True), (True, True)])
def test_blocks_are_checkpointed_and_compiled(run, checkpointed, compiled):
    run("fsdp2_options", "blocks_are_checkpointed_and_compiled", 2, checkpointed, compiled)


def test_a_checkpoint_goes_from_hybrid_to_plain_sharding_and_back(run, tmp_path):
    run("fsdp2_processes", "hybrid_begins", 4, str(tmp_path))
    run("fsdp2_processes", "plain_goes_on", 2, str(tmp_path))
    run("fsdp2_processes", "hybrid_goes_on", 4, str(tmp_path))


def parse(**params):
    strategy = DistributedPlugin("fsdp2")
    return strategy.parse_params(params, strategy.Params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"reduce_dtype": "float8"}, "reduce_dtype"),
        ({"output_dtype": "float16"}, "output_dtype"),
        ({"replicas": 0}, "replicas must be at least 1, got 0"),
        ({"reshard_after_forward": 1}, "a number of ranks of at least 2, got 1"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward"),
        ({"keep_last_blocks": -1}, "keep_last_blocks must be at least 0, got -1"),
        ({"forward_prefetch": -1}, "forward_prefetch must be at least 0, got -1"),
        ({"backward_prefetch": -2}, "backward_prefetch must be at least 0, got -2"),
        ({"gradient_divide_factor": 0}, "gradient_divide_factor must be above 0 and finite"),
        (
            {"keep_last_blocks": 2, "reshard_after_forward": False},
            "keep_last_blocks is 2, but reshard_after_forward is false",
        ),
        (
            {"gradient_divide_factor": 2, "average_in_collective": True},
            "average_in_collective is true; remove one",
        ),
    ],
)
def test_parameters_are_checked(params, message):
    with pytest.raises(ConfigError, match=message):
        parse(**params)


@pytest.mark.parametrize("value", [True, False, 2])
def test_parameters_are_freed_or_not_or_down_to_a_number_of_ranks(value):
    assert parse(reshard_after_forward=value).reshard_after_forward is value


def test_offloading_needs_a_device_that_can():
    run = {"train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1}}
    run |= {"model": "decoder", "data": "text", "optimizer": "adamw"}
    resolved = config.resolve(run | {"distributed": {"name": "fsdp2", "cpu_offload": True}})
    assert resolved["distributed"].params.cpu_offload
    with pytest.MonkeyPatch.context() as patch:
        backend = DeviceBackend("cpu", "bfloat16", "gloo")
        patch.setattr(CPU, "backend", staticmethod(lambda params: backend))
        with pytest.raises(ConfigError, match=r"distributed.*does not declare .* cpu_offload"):
            config.resolve(
                run | {"device": "cpu", "distributed": {"name": "fsdp2", "cpu_offload": True}}
            )


@pytest.mark.parametrize("value", ["auto", True, False])
def test_averaging_is_auto_or_a_boolean(value):
    assert parse(average_in_collective=value).average_in_collective == value
    with pytest.raises(ConfigError, match=r"average_in_collective.*'auto' or .*boolean, got 'AVG'"):
        parse(average_in_collective="AVG")
