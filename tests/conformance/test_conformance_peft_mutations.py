"""Every fault of a PEFT method is found by the case that is meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest

# One worker runs them all, in a process that is there for all of them.
pytestmark = pytest.mark.xdist_group("faults of PEFT methods")

BROKEN = Path(__file__).parent / "broken_methods"

LAYERS = {
    "a new adapter is not neutral": "layers/a_new_adapter_changes_nothing",
    "the output is float32": "layers/the_output_is_of_the_bases_shape_and_dtype",
    "the weights' dtype is taken for the output's": "layers/bfloat16_gives_about_what_float32_does",
    "a backward pass is wrong": "layers/gradients_are_those_of_finite_differences",
    "a part is never trained": "training/every_layers_parameters_are_trained",
    "dropout never ends": "layers/nothing_is_dropped_in_evaluation",
    "every call draws": "layers/calls_draw_no_random_numbers",
    "the input is written to": "layers/the_base_is_not_written_to",
    "strides are not looked at": "layers/strides_make_no_difference",
    "samples depend on each other": "layers/samples_do_not_depend_on_each_other",
    "an empty batch is an error": "layers/an_empty_batch_gives_an_empty_output",
    "adapters have the base's dtype": "layers/adapters_of_a_bfloat16_base_are_float32",
    "the base layer is not called": "injection/hooks_of_the_model_go_on",
    "only a new adapter is filled": "injection/a_model_from_meta_is_whole",
    "filled again it is different": ("injection/values_from_meta_are_distributed_as_made_at_once"),
    "the graph breaks": "training/a_compiled_model_is_traced_whole",
    "the last adapter is used": "switching/a_second_adapter_is_another",
    "disabled it goes on": "switching/disabled_it_is_the_model",
    "an adapter leaves something behind": "switching/deleting_the_last_gives_the_model_back",
    "a copy uses the original": "copies/a_copy_goes_on",
    "something is in no state dict": "files/a_loaded_adapter_gives_the_same",
    "merging forgets the scale": "merging/a_merged_layer_gives_the_same",
    "merging rounds in between": "merging/merged_values_are_rounded_once",
    "merging writes into the base": "merging/unmerging_is_exact",
    "what is no number is merged as zero": "merging/what_is_no_number_is_not_merged",
    "ranks begin with different values": "distributed/sharded_training_is_that_of_one_process",
    "parameters are kept from before": "distributed/sharded_training_is_that_of_one_process",
}
"""The case that must fail, by the fault of a method that changes layers."""
DOOR = {
    "the hook stays": "switching/deleting_the_last_gives_the_model_back",
    "the hook is the original's": "copies/a_copy_goes_on",
    "the output has another shape": "injection/the_outputs_are_of_the_models_shape",
}
"""The same for a method that adapts a model at its door."""
HEAVY = (
    "contract/the_entry_points_module_does_not_import_torch",
    "contract/parameters_have_defaults",
    "contract/parameters_say_which_modules_are_meant",
    "contract/layers_are_adapter_layers",
    "contract/patterns_name_fields",
    "contract/the_configuration_is_plain_data",
)
"""The cases that must fail for a method that says of itself what is wrong."""


def results(cases: list[dict], name: str) -> set[str]:
    return {case["result"] for case in cases if case["name"].partition("[")[0] == name}


@pytest.mark.parametrize("fault", [*LAYERS, *DOOR])
def test_the_fault_is_found_by_its_case(fault, suite):
    plugin = "peft:faulty" if fault in LAYERS else "peft:faulty_door"
    case = (LAYERS | DOOR)[fault]
    code, cases = suite(plugin, case.partition("/")[2], f"fault={fault}")
    assert code == 1
    assert "fail" in results(cases, case)


@pytest.mark.parametrize("plugin", ["peft:faulty", "peft:faulty_door"])
def test_a_method_without_a_fault_passes_every_case(plugin, suite):
    code, cases = suite(plugin, "test")
    assert code == 0
    assert {case["result"] for case in cases} <= {"pass", "not for it", "not declared"}
    for case in (LAYERS if plugin == "peft:faulty" else DOOR).values():
        assert results(cases, case) in ({"pass"}, {"pass", "not for it"}), case


def test_what_a_method_says_of_itself_is_checked(suite):
    code, cases = suite("peft:heavy", "test_contract", "rank=2")
    assert code == 1
    for case in HEAVY:
        assert results(cases, case) == {"fail"}, case
