"""States saved and loaded: our own, and those of torch's two optimizers, both ways."""

import copy
import io
from typing import Any

import pytest
import torch
from muon_parameters import assert_same, mixed, parameters, run, set_gradients, vectors
from torch import nn

from core_plugin_muon import Muon

SCALES = ["original", "match_rms_adamw"]


def clones(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def part_of(state_dict: dict[str, Any], group: int) -> dict[str, Any]:
    """One group of a state dict, as an optimizer of that group alone would have it."""
    entry = state_dict["param_groups"][group]
    numbers = dict(zip(entry["params"], range(len(entry["params"])), strict=True))
    state = {numbers[key]: value for key, value in state_dict["state"].items() if key in numbers}
    return copy.deepcopy(
        {"state": state, "param_groups": [{**entry, "params": list(numbers.values())}]}
    )


def joined(*state_dicts: dict[str, Any]) -> dict[str, Any]:
    """State dicts of several optimizers, as one optimizer with all their groups would have it."""
    state, groups = {}, []
    for each in state_dicts:
        offset = sum(len(group["params"]) for group in groups)
        state |= {offset + key: value for key, value in each["state"].items()}
        groups += [
            {**group, "params": [offset + key for key in group["params"]]}
            for group in each["param_groups"]
        ]
    return copy.deepcopy({"state": state, "param_groups": groups})


def assert_halves_same(left: list[nn.Parameter], right: list[nn.Parameter]) -> None:
    """Matrices bit for bit, and what AdamW trains but for rounding."""
    count = len(parameters())
    assert_same(left[:count], right[:count])
    for p, q in zip(left[count:], right[count:], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_state_that_was_saved_to_a_file_continues_bit_for_bit() -> None:
    optimizer, params = mixed()
    run(optimizer, params, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed, copies = mixed(seed=1)
    with torch.no_grad():
        for p, q in zip(copies, params, strict=True):
            p.copy_(q)
    resumed.load_state_dict(torch.load(file))
    run(optimizer, params, range(3, 6))
    run(resumed, copies, range(3, 6))
    assert_same(params, copies)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("nesterov", [True, False])
def test_loads_what_torch_muon_and_adamw_saved(scale: str, nesterov: bool) -> None:
    matrices, rest = parameters(), vectors()
    muon = torch.optim.Muon(
        matrices, lr=0.02, weight_decay=0.3, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale
    )
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    for step in range(2):
        run(muon, matrices, range(step, step + 1))
        run(adamw, rest, range(step, step + 1))
    ours = clones(matrices + rest)
    count = len(matrices)
    groups = [{"params": ours[:count]}, {"params": ours[count:], "algorithm": "adamw"}]
    optimizer = Muon(groups, ns_dtype="bfloat16", momentum=0.5)
    optimizer.load_state_dict(joined(muon.state_dict(), adamw.state_dict()))
    for step in range(2, 5):
        set_gradients(matrices, step)
        set_gradients(rest, step + 10)
        for p, q in zip(ours, matrices + rest, strict=True):
            p.grad = q.grad.clone()
        for each in (muon, adamw, optimizer):
            each.step()
        assert_halves_same(ours, matrices + rest)


def test_torch_muons_own_scale_is_kept() -> None:
    theirs = parameters()
    reference = torch.optim.Muon(theirs)  # whose adjust_lr_fn is None
    run(reference, theirs, range(1))
    optimizer = Muon(parameters())
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "original"


@pytest.mark.parametrize("scale", [*SCALES, "none"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_torch_muon_and_adamw_load_what_ours_saved(scale: str, nesterov: bool) -> None:
    optimizer, params = mixed(
        adjust_lr_fn=scale, nesterov=nesterov, ns_dtype="bfloat16", ns_steps=4, momentum=0.9
    )
    run(optimizer, params, range(2))
    copies = clones(params)
    count = len(optimizer.param_groups[0]["params"])
    muon, adamw = torch.optim.Muon(copies[:count]), torch.optim.AdamW(copies[count:])
    muon.load_state_dict(part_of(optimizer.state_dict(), 0))
    adamw.load_state_dict(part_of(optimizer.state_dict(), 1))
    for step in range(2, 5):
        set_gradients(params, step)
        set_gradients(copies, step)
        for each in (optimizer, muon, adamw):
            each.step()
        assert_halves_same(params, copies)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_what_torch_adamw_does_and_ours_does_not_is_refused(option: str) -> None:
    rest = vectors()
    adamw = torch.optim.AdamW(rest, **{option: True})
    run(adamw, rest, range(1))
    optimizer = Muon([{"params": vectors(), "algorithm": "adamw"}])
    with pytest.raises(ValueError, match=f"loaded parameter group 0 has {option}=True"):
        optimizer.load_state_dict(adamw.state_dict())


def test_a_state_of_the_other_algorithm_is_refused_and_changes_nothing() -> None:
    optimizer, params = mixed()
    run(optimizer, params, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    swapped = copy.deepcopy(before)
    swapped["param_groups"].reverse()
    with pytest.raises(ValueError, match=r"parameter group 0 is of muon, but .* one of adamw"):
        optimizer.load_state_dict(swapped)
    matrices = parameters()
    adamw = torch.optim.AdamW(matrices)
    run(adamw, matrices, range(1))
    with pytest.raises(
        ValueError, match="has step, exp_avg, exp_avg_sq, but muon needs momentum_buffer"
    ):
        Muon(matrices).load_state_dict(adamw.state_dict())
    muon = torch.optim.Muon(matrices)
    run(muon, matrices, range(1))
    with pytest.raises(ValueError, match="has momentum_buffer, but adamw needs step, exp_avg"):
        Muon([{"params": matrices, "algorithm": "adamw"}]).load_state_dict(muon.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][name]) for name, value in state.items())


@pytest.mark.parametrize(
    ("option", "value"), [("lr", float("nan")), ("adjust_lr_fn", "matched"), ("ns_steps", 0)]
)
def test_options_that_are_loaded_are_checked(option: str, value: object) -> None:
    optimizer, _ = mixed()
    saved = optimizer.state_dict()
    saved["param_groups"][0][option] = value
    with pytest.raises(ValueError, match=f"{option} of loaded parameter group 0 must be"):
        optimizer.load_state_dict(saved)


def named(order: str, rename: str = "{}") -> tuple[Muon, dict[str, nn.Parameter]]:
    """Matrices of one shape, a group each."""
    params = {name: nn.Parameter(torch.full((2, 2), float(ord(name)))) for name in "abc"}
    groups = [{"params": [(rename.format(name), params[name])]} for name in order]
    return Muon(groups), params


def test_a_state_whose_parameters_are_in_another_order_is_refused() -> None:
    optimizer, params = named("abc")
    run(optimizer, [*params.values()], range(1))
    other, _ = named("acb")
    with pytest.raises(ValueError, match=r"loaded state has b in the place of c: .* another order"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_a_model_may_be_renamed_between_saving_and_loading() -> None:
    optimizer, params = named("abc")
    run(optimizer, [*params.values()], range(1))
    other, params = named("abc", rename="module.{}")
    other.load_state_dict(optimizer.state_dict())
    assert all(other.state[p] for p in params.values())


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_state_of_another_shape_is_refused(algorithm: str) -> None:
    tall, wide = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2, 4))
    optimizer, other = (Muon([{"params": [p], "algorithm": algorithm}]) for p in (tall, wide))
    run(optimizer, [tall], range(1))
    with pytest.raises(ValueError, match=r"has shape \(4, 2\), but the parameter \(2, 4\)"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state


def test_how_parameters_are_seen_is_not_loaded() -> None:
    stack = nn.Parameter(torch.ones(4, 4, 2))
    saved = Muon([{"params": [stack], "flatten": False, "split": (1, 3)}]).state_dict()
    optimizer = Muon([{"params": [stack], "flatten": True, "lr": 1.0}])
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["flatten"], group["split"], group["lr"]) == (True, (), 3e-3)


def test_adam_that_adds_decay_to_gradients_is_refused() -> None:
    rest = vectors()
    optimizer = Muon([{"params": rest, "algorithm": "adamw"}])
    optimizer.load_state_dict(torch.optim.Adam(rest).state_dict())
    with pytest.raises(ValueError, match=r"torch\.optim\.Adam, which adds weight_decay"):
        optimizer.load_state_dict(torch.optim.Adam(rest, weight_decay=0.1).state_dict())


def test_adamw_without_a_term_in_the_denominator_is_loaded() -> None:
    rest = vectors()
    optimizer = Muon([{"params": rest, "algorithm": "adamw"}])
    optimizer.load_state_dict(torch.optim.AdamW(rest, eps=0.0).state_dict())
    assert optimizer.param_groups[0]["eps"] == 0.0


@pytest.mark.parametrize("keep", [1, 3])
def test_loading_another_number_of_groups_is_refused(keep: int) -> None:
    optimizer, _ = mixed()
    saved = optimizer.state_dict()
    saved["param_groups"] = (saved["param_groups"] * 2)[:keep]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_a_loaded_momentum_has_the_dtype_of_its_parameter(
    dtype: torch.dtype, saved: torch.dtype
) -> None:
    theirs, ours = parameters(dtype=saved), parameters(dtype=dtype)
    wrote, reads = Muon(theirs), Muon(ours)
    run(wrote, theirs, range(1))
    reads.load_state_dict(copy.deepcopy(wrote.state_dict()))
    for p, q in zip(ours, theirs, strict=True):
        expected = wrote.state[q]["momentum_buffer"].to(dtype)
        assert torch.equal(reads.state[p]["momentum_buffer"], expected)
        assert reads.state[p]["momentum_buffer"].dtype == dtype
    run(reads, ours, range(1, 2))


def test_a_momentum_that_is_finer_than_its_parameter_is_used_as_it_is() -> None:
    """As after a run in float32 that goes on in bfloat16 through a loader that keeps dtypes."""
    coarse = parameters(dtype=torch.bfloat16)
    optimizer = Muon(coarse, ns_dtype="float32")
    for p in coarse:
        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p, dtype=torch.float32)
    run(optimizer, coarse, range(2))
    for p in coarse:
        assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
        assert p.dtype == torch.bfloat16


def test_a_parameter_that_is_new_in_a_loaded_state_begins_at_zero() -> None:
    optimizer, params = mixed()
    run(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]
    optimizer.load_state_dict(saved)
    run(optimizer, params, range(1, 2))
    expected = (1 - 0.95) * params[0].grad
    torch.testing.assert_close(optimizer.state[params[0]]["momentum_buffer"], expected)


def test_a_state_of_before_the_first_step_leaves_none() -> None:
    """As a launcher hands an optimizer its own state; torch would restore nothing into one."""
    optimizer, params = mixed()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state
    run(optimizer, params, range(1))
    assert all(optimizer.state[p] for p in params)


def test_copies_train_alike_and_still_take_groups() -> None:
    optimizer, params = mixed()
    run(optimizer, params, range(2))
    twin, copies = copy.deepcopy((optimizer, params))
    run(optimizer, params, range(2, 4))
    run(twin, copies, range(2, 4))
    assert_same(params, copies)
    twin.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    assert twin.param_groups[2]["momentum"] == 0.95
