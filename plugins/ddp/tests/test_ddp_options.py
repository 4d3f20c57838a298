"""DDP's options: the same numbers with all of them, and errors that name parameters."""

import pytest


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("steps_are_those_of_one_process", 2),
        ("steps_are_those_of_one_process", 3),
        ("parameters_that_some_micro_batches_use_are_exchanged", 2),
        ("a_static_graph_finds_unused_parameters_once", 2),
        ("gradients_live_in_the_buckets_if_asked_to", 2),
        ("unused_parameters_are_named_at_once", 1),
        ("unused_parameters_are_named_at_once", 2),
        ("frozen_parameters_count_for_nothing_in_the_names", 2),
        ("only_the_last_micro_batch_exchanges_and_is_looked_at", 2),
        ("later_steps_are_looked_at_as_well", 2),
        ("a_graph_that_is_not_static_is_told", 2),
        ("a_parameter_with_two_gradients_is_named", 2),
        ("other_errors_stay_as_they_are", 1),
        ("a_parameter_unused_on_one_rank_ends_both", 2),
    ],
)
def test_options(ddp_processes, scenario, world_size):
    ddp_processes.run(f"ddp_options:{scenario}", world_size)


@pytest.mark.parametrize(
    ("what", "world_size"),
    [
        ("parameters_by_rank", 2),
        ("buffers_by_rank", 2),
        ("the_order_by_rank", 2),
        ("many_differences_by_rank", 2),
        ("what_is_trained_on_one_rank_alone", 3),
    ],
)
def test_models_that_differ_are_told_on_all_ranks(ddp_processes, what, world_size):
    ddp_processes.run(f"ddp_differences:{what}", world_size)


def test_equal_models_are_taken_as_they_are(ddp_processes):
    ddp_processes.run("ddp_differences:equal_models_on_meta", 2)


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("running_statistics_are_the_mean_of_all_ranks", 2),
        ("running_statistics_are_the_mean_of_all_ranks", 3),
        ("all_micro_batches_of_a_step_count", 2),
        ("what_no_step_changes_stays_bit_by_bit", 3),
        ("loaded_values_are_what_the_next_step_begins_with", 2),
        ("they_cost_one_collective_a_step_or_none", 2),
    ],
)
def test_buffers(ddp_processes, scenario, world_size):
    ddp_processes.run(f"ddp_buffers:{scenario}", world_size)
