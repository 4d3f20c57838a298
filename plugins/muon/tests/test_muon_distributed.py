"""Muon in groups of real processes; the scenarios are functions of the modules named here."""

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("world_size", "scenarios"),
    [
        (1, "fsdp2"),
        (2, "fsdp2 fsdp2_backward in_common ddp ignored_by_ddp gradients_laid_out_otherwise"),
        (3, "fsdp2 missing_gradients"),
        (4, "fsdp2 hybrid in_common ddp other_layouts"),
    ],
)
def test_is_bitwise_one_process(launch, world_size: int, scenarios: str, tmp_path: Path) -> None:
    launch("muon_alike", scenarios, world_size, tmp_path)


@pytest.mark.parametrize(
    ("world_size", "scenarios"),
    [
        (2, "work_is_shared bytes_are_as_the_formula_says"),
        (2, "owners_without_a_gradient_do_not_compute"),
        (3, "all_gathers_are_few"),
        (4, "work_is_shared bytes_are_as_the_formula_says hybrid_gathers_nothing"),
    ],
)
def test_each_matrix_is_computed_once_and_travels_twice(
    launch, world_size: int, scenarios: str, tmp_path: Path
) -> None:
    launch("muon_work", scenarios, world_size, tmp_path)


def test_ranks_that_differ_are_told_on_all_ranks(launch, tmp_path: Path) -> None:
    launch("muon_work", "ranks_that_differ ranks_with_another_order_or_rate", 3, tmp_path)


def test_ranks_talk_only_when_all_do(launch, tmp_path: Path) -> None:
    scenarios = "ranks_may_write_options_in_another_way a_rank_alone_may_load_and_describe"
    launch("muon_work", scenarios, 2, tmp_path)


def test_every_layout_resumes_what_every_other_one_saved(launch, tmp_path: Path) -> None:
    for world_size in (2, 4):
        launch("muon_checkpoints", "save", world_size, tmp_path)
    for world_size in (1, 2, 4):
        launch("muon_checkpoints", "resume", world_size, tmp_path)


def test_states_by_name_move_between_optimizers(launch, tmp_path: Path) -> None:
    launch("muon_checkpoints", "torch_to_ours ours_to_torch skipped", 2, tmp_path)


@pytest.mark.parametrize(
    ("world_size", "scenarios"),
    [
        (2, "overflow_on_one_rank groups_come_and_go parameters_are_swapped dtypes"),
        (2, "clipped_and_scheduled compiled"),
        (3, "adamw fewer_matrices_than_ranks"),
        (4, "gradients_on_some_ranks"),
    ],
)
def test_trains_on_several_ranks(launch, world_size: int, scenarios: str, tmp_path: Path) -> None:
    launch("muon_training", scenarios, world_size, tmp_path)
