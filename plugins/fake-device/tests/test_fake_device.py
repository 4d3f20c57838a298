from pathlib import Path

import pytest

from core_plugin.testing.children import run_script

PROCESSES = Path(__file__).with_name("fake_processes.py")
COLLECTIVES = Path(__file__).with_name("fake_collectives.py")


@pytest.mark.parametrize(
    "scenario",
    [
        "the_hardware_is_opened_by_the_first_tensor",
        "many_threads_open_it_once",
        "a_forked_child_cannot_use_it",
        "a_forked_child_can_free",
        "a_bad_index_changes_nothing",
        "the_number_of_devices_is_fixed_by_use",
        "devices_are_not_mixed",
        "windows_are_those_of_the_cpu",
        "memory_is_counted",
        "memory_has_an_end_on_each_device",
        "what_is_switched_off_says_so",
        "random_numbers_are_the_devices_own",
        "seeding_waits_for_what_is_being_drawn",
        "recurrent_layers_are_those_of_the_cpu",
        "a_profile_has_the_devices_time",
    ],
)
def test_the_device(scenario: str) -> None:
    run_script(PROCESSES, scenario)


@pytest.mark.parametrize(
    "scenario",
    [
        "work_is_done_when_it_is_finished",
        "work_that_is_looked_at_is_finished",
        "an_error_at_the_end_stays",
    ],
)
def test_the_work_of_collectives(scenario: str) -> None:
    run_script(COLLECTIVES, scenario)


@pytest.mark.parametrize(
    "scenario",
    [
        "calls_are_recorded",
        "what_cannot_be_reduced_is_refused",
        "results_arrive_later",
        "what_gloo_has_not_works_too",
        "strides_are_heeded_or_refused",
        "a_dead_peer_is_an_error",
    ],
)
def test_the_collective_library(scenario: str) -> None:
    run_script(COLLECTIVES, scenario, 2)
