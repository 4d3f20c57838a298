"""Every fault of a device is found by the case that is meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest

# One worker runs them all, in a process that is there for all of them.
pytestmark = pytest.mark.xdist_group("faults of devices")

BROKEN = Path(__file__).parent / "broken"

CAUGHT = {
    "strides are lost": "allocation/strides_are_those_asked_for",
    "casts cut off": "dtypes/casts_round_to_nearest_even",
    "a copy takes the wrong leg": "copies/a_copy_between_devices_lands_on_its_target",
    "copies that do not block never arrive": (
        "copies/copies_that_do_not_block_are_there_after_a_wait"
    ),
    "initialised twice": "initialization/an_allocation_initialises",
    "views do not share": "views/a_view_shares_its_bases_memory",
    "writes in place are dropped": "views/what_is_written_through_a_view_is_in_its_base",
    "random numbers are the CPU's": "random/the_device_and_the_cpu_have_a_generator_each",
    "the slot is used up": "registration/registering_again_gives_the_same",
    "tied weights come apart": "modules/tied_weights_stay_tied",
    "autocast computes in float16": "autocast/a_given_dtype_wins",
    "memory is counted and never given back": (
        "memory_statistics/allocated_memory_is_counted_until_it_is_freed"
    ),
    "a backward pass is wrong": "layers/softmax",
    "an operator ends the process": "autograd/reductions",
    "an operator never returns": "autograd/reductions",
    "a kernel is missing": "copies/values_are_read",
    "an average is the sum": "collectives/an_average_is_never_the_sum",
    "every rank gets the first part": "collectives/reduce_scatter",
    "ranks are gathered in the wrong order": "collectives/all_gather_of_a_list",
    "a future holds nothing": "collectives/a_future_holds_the_tensors",
}
"""The case that must fail, by the fault."""


def results(cases: list[dict], case: str) -> set[str]:
    """How the variants of a case ended."""
    return {c["result"] for c in cases if c["name"].partition("[")[0] == case}


@pytest.mark.parametrize("fault", CAUGHT)
def test_the_fault_is_found_by_its_case(fault, suite):
    case = CAUGHT[fault]
    code, cases = suite("device:broken", case.partition("/")[2], f"fault={fault}")
    assert code == 1
    assert "fail" in results(cases, case)


def test_the_cases_pass_on_the_device_without_the_faults(suite):
    functions = " or ".join(case.partition("/")[2] for case in CAUGHT.values())
    code, cases = suite("device:fake", functions)
    assert code == 0
    for case in CAUGHT.values():
        assert results(cases, case) == {"pass"}, case


def test_a_crash_and_a_hang_are_told_by_name_and_end_nothing(suite):
    _, cases = suite("device:broken", "reductions", "fault=an operator ends the process")
    assert any("signal SIGABRT" in case["reason"] for case in cases)
    assert "pass" in results(cases, "autograd/reductions")
