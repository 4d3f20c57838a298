"""Compressed gradients: what is sent, how near it is, and that a run goes on from a checkpoint."""

import pytest

from core_plugin import config
from core_plugin.errors import ConfigError
from core_plugin.types import DistributedPlugin


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("gradients_are_summed_in_half_precision", 2),
        ("compressed_gradients_are_near_the_exact_ones_and_accumulate", 3),
        ("compression_goes_with_unused_parameters", 2),
        ("one_rank_sends_nothing_that_could_be_compressed", 1),
        ("a_library_that_cannot_add_up_is_refused", 2),
        ("steps_before_the_start_are_exact", 2),
        ("gradients_of_the_rank_are_exact", 2),
        ("gradients_of_zero_are_zero_until_they_are_not", 2),
        ("a_scalar_is_refused", 2),
    ],
)
def test_on_real_ranks(ddp_processes, scenario, world_size):
    ddp_processes.run(f"ddp_compression:{scenario}", world_size)


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("what_is_left_out_is_added_later", 2),
        ("what_is_left_out_is_added_later", 3),
        ("staged_is_what_is_saved", 2),
        ("checkpoints_without_its_memory_are_taken", 2),
    ],
)
def test_its_memory(ddp_processes, tmp_path, scenario, world_size):
    ddp_processes.run(f"ddp_compression:{scenario}", world_size, tmp_path / "state")


def test_a_run_goes_on_bit_by_bit(ddp_processes, tmp_path):
    ddp_processes.run("ddp_compression:a_run_goes_on_bit_by_bit", 2, tmp_path)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_its_memory_goes_to_another_number_of_ranks(ddp_processes, tmp_path, before, after):
    state = tmp_path / "state"
    ddp_processes.run("ddp_compression:save_for_another_number_of_ranks", before, state)
    ddp_processes.run("ddp_compression:load_on_another_number_of_ranks", after, state)


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        ({"compression": "fp8"}, "compression.*'fp8'"),
        ({"compression": "fp16", "average_in_collective": True}, "fp16 divides before it sums"),
        ({"powersgd": {"rank": 2}}, "powersgd has parameters, but compression is none"),
        ({"compression": "powersgd", "powersgd": {"rank": 0}}, "rank must be at least 1, got 0"),
        ({"compression": "powersgd", "powersgd": {"start_step": 1}}, "start_step must be at least"),
        ({"compression": "powersgd", "powersgd": {"ranks": 1}}, "did you mean rank"),
    ],
)
def test_parameters_are_checked(params, fault):
    strategy = DistributedPlugin("ddp")
    with pytest.raises(ConfigError, match=fault):
        strategy.parse_params(params, strategy.Params)


def test_powersgd_that_never_starts_is_told_before_the_run():
    train = {"steps": 3, "global_batch_size": 4}
    run = {"distributed": {"name": "ddp", "compression": "powersgd"}, "train": train}
    with pytest.raises(ConfigError, match="start_step is 1000, but the run has 3 steps"):
        config.resolve(run)
    run["distributed"]["powersgd"] = {"rank": 4, "start_step": 2}
    params = config.resolve(run)["distributed"].params
    assert (params.powersgd.rank, params.powersgd.start_step) == (4, 2)
