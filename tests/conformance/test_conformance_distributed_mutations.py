"""Every fault of a distributed strategy is found by the case that is meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_plugin.contract import contract_methods
from core_plugin.types import BaseDistributed

# One worker runs them all, in a process that is there for all of them.
pytestmark = pytest.mark.xdist_group("faults of strategies")

BROKEN = Path(__file__).parent / "broken_strategies"

REPLICATED = {
    "gradients are never exchanged": "training/gradients_are_those_of_one_process",
    "gradients are summed": "training/the_divisor_is_what_is_divided_by",
    "another divisor is told": "training/the_divisor_is_what_is_divided_by",
    "the last rank's data are dropped": "training/uneven_batches",
    "ranks drift apart": "training/ranks_stay_equal",
    "frozen parameters are trained": "training/frozen_parameters_stay",
    "evaluation uses old values": "training/evaluation_after_training",
    "every micro-batch is exchanged": "accumulation/gradients_wait_for_the_last_micro_batch",
    "only the last micro-batch is used": "accumulation/micro_batches_are_one_batch",
    "ranks have values of their own": "materialization/values_are_those_of_one_process",
    "buffers are garbage": "materialization/buffers_have_their_values",
    "a part stays on meta": "materialization/nothing_is_left_on_meta",
    "values are looked at while sharding": "materialization/a_dry_run_leaves_all_on_meta",
    "weights come untied": "materialization/tied_weights_are_one",
    "parameters are cast for good": "materialization/float32_stays_when_computing_in_bfloat16",
    "trained dtypes are made one": "materialization/dtypes_and_flags_are_kept",
    "blocks are wrapped": "materialization/names_are_the_architectures",
    "no limit is a limit": "clipping/nothing_is_scaled",
    "each gradient is clipped by itself": "clipping/the_norm_is_that_of_one_process",
    "the optimizer's state is not loaded": "checkpoints/training_goes_on_exactly",
    "what is missing is passed over": "checkpoint_faults/what_does_not_fit_changes_nothing",
    "loading begins before it is checked": "checkpoint_faults/what_does_not_fit_changes_nothing",
    "files are in a format of its own": "checkpoints/torch_reads_it",
    "frozen parameters are always saved": "checkpoints/frozen_parameters_are_left_out",
    "nothing is copied ahead of writing": "staging/the_values_are_those_of_before",
    "writing goes over the group of training": "staging/it_exchanges_over_its_group_alone",
    "every rank gets all": "whole_tensors/the_first_rank_has_all",
    "whole tensors are the model's own": "whole_tensors/whole_tensors_are_copies",
    "frozen parameters are among the trained": "whole_tensors/only_what_is_trained",
    "an error in materialising is swallowed": "failures/materialising_fails_on_one_rank",
    "a failed save is no error": "failures/after_a_failed_save_another_succeeds",
}
"""The case that must fail, by the fault of a strategy that leaves models whole."""
SHARDED = {
    "sharding is declared, and nothing is sharded": "materialization/each_rank_holds_a_part",
    "casting is declared, and nothing is cast": "training/the_strategy_casts_by_itself",
    "shards are reduced in every micro-batch": (
        "accumulation/gradients_wait_for_the_last_micro_batch"
    ),
    "only its own part is in the norm": "clipping/the_norm_is_that_of_one_process",
    "only the first rank's part is saved": "checkpoints/all_values_come_back",
    "parts are taken for wholes": "whole_tensors/the_first_rank_has_all",
}
"""The same for one that shards them."""
HEAVY = (
    "contract/the_entry_points_module_does_not_import_torch",
    "contract/parameters_have_defaults",
    "contract/the_divisor_is_a_number",
    "contract/parameters_have_a_place",
    "contract/memory_is_planned",
)
"""The cases that must fail for a strategy that says of itself what is wrong."""


@pytest.fixture(scope="module", autouse=True)
def calls(tmp_path_factory):
    """Where the strategies leave a file for each method that is called."""
    folder = tmp_path_factory.mktemp("calls")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATEGY_CALLS", str(folder))
        yield folder


def results(cases: list[dict], name: str) -> set[str]:
    """How the variants of a case ended that were run."""
    of_case = [case for case in cases if case["name"].partition("[")[0] == name]
    return {case["result"] for case in of_case} - {"not run"}


@pytest.mark.parametrize("fault", [*REPLICATED, *SHARDED])
def test_the_fault_is_found_by_its_case(fault, suite):
    plugin = "distributed:faulty" if fault in REPLICATED else "distributed:faulty_sharded"
    case = (REPLICATED | SHARDED)[fault]
    expression = f"{case.partition('/')[2]} and not 1_rank"
    code, cases = suite(plugin, expression, f"fault={fault}")
    assert code == 1
    assert "fail" in results(cases, case)


@pytest.mark.parametrize(
    ("plugin", "meant"),
    [("distributed:faulty", REPLICATED), ("distributed:faulty_sharded", SHARDED)],
)
def test_a_strategy_without_a_fault_passes_these_cases(plugin, meant, suite):
    names = " or ".join(case.partition("/")[2] for case in sorted({*meant.values()}))
    code, cases = suite(plugin, f"({names}) and not 1_rank")
    assert code == 0
    for case in meant.values():
        assert results(cases, case) == {"pass"}, case


def test_every_method_is_called(suite, calls):
    for file in calls.iterdir():
        file.unlink()
    code, _ = suite("distributed:faulty", "1_rank or test_contract")
    assert code == 0
    assert {file.name for file in calls.iterdir()} == set(contract_methods(BaseDistributed))


def test_what_a_strategy_says_of_itself_is_checked(suite):
    code, cases = suite("distributed:heavy", "test_contract and not ranks")
    assert code == 1
    for case in HEAVY:
        assert results(cases, case) == {"fail"}, case
