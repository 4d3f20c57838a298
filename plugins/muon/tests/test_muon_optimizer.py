"""The optimizer in one process, against torch's own Muon and AdamW."""

import copy
import io

import pytest
import torch
from torch import nn

from core_plugin_muon import Muon

SHAPES = [(16, 16), (8, 24), (24, 8), (3, 5)]


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def vectors(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator)) for s in [(7,), (5, 3), (2, 3, 4)]]


def set_gradients(params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * factor).to(p.dtype)


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def assert_same(left: list[nn.Parameter], right: list[nn.Parameter]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_bitwise_torch_muon_in_bfloat16(dtype: torch.dtype, scale: str, nesterov: bool) -> None:
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    muon = Muon(ours, lr=0.02, scale=scale, nesterov=nesterov, dtype="bfloat16")
    torch_muon = torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn=scale, nesterov=nesterov)
    # torch overwrites the momentum of bfloat16 matrices without nesterov, in its first step
    steps = range(1) if dtype == torch.bfloat16 and not nesterov else range(4)
    run(muon, ours, steps)
    run(torch_muon, theirs, steps)
    assert_same(ours, theirs)


def test_float32_is_torch_muon_with_the_rounding_taken_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = parameters(), parameters()
    run(Muon(ours, lr=0.02, scale="original"), ours, range(4))
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    run(torch.optim.Muon(theirs, lr=0.02), theirs, range(4))
    assert_same(ours, theirs)


def test_adamw_groups_are_torch_adamw() -> None:
    ours, theirs = vectors(), vectors()
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    run(Muon([{"params": ours, "algorithm": "adamw", **options}]), ours, range(5))
    run(torch.optim.AdamW(theirs, **options), theirs, range(5))
    assert_same(ours, theirs)


def mixed(seed: int = 0, **options: object) -> tuple[Muon, list[nn.Parameter]]:
    matrices, rest = parameters(seed), vectors(seed)
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 0.001}]
    return Muon(groups, lr=0.02, **options), matrices + rest


def test_each_algorithm_has_its_own_options() -> None:
    optimizer, _ = mixed(weight_decay=0.2)
    muon, adamw = optimizer.param_groups
    assert (muon["algorithm"], muon["lr"], muon["weight_decay"]) == ("muon", 0.02, 0.2)
    assert (adamw["algorithm"], adamw["lr"], adamw["weight_decay"]) == ("adamw", 0.001, 0.2)
    assert "betas" not in muon
    assert "momentum" not in adamw


def test_weight_decay_is_decoupled_and_not_scaled() -> None:
    p = nn.Parameter(torch.ones(4, 100))
    optimizer = Muon([p], lr=0.5, weight_decay=0.5)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, torch.full((4, 100), 0.75))


@pytest.mark.parametrize("factor", [1e-30, 1e-15, 1e15, 1e30])
def test_update_does_not_depend_on_the_size_of_gradients(factor: float) -> None:
    reference, scaled = parameters(), parameters()
    for params, by in ((reference, 1.0), (scaled, factor)):
        optimizer = Muon(params, lr=0.02)
        for step in range(3):
            set_gradients(params, step, by)
            optimizer.step()
    for a, b in zip(reference, scaled, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_and_momentum_are_not_overwritten(dtype: torch.dtype, nesterov: bool) -> None:
    p = nn.Parameter(torch.ones(4, 6, dtype=dtype))
    p.grad = torch.full_like(p, 3.0)
    optimizer = Muon([p], momentum=0.5, nesterov=nesterov, dtype="bfloat16")
    optimizer.step()
    assert torch.equal(p.grad, torch.full_like(p, 3.0))
    buffer = optimizer.state[p]["momentum_buffer"]
    assert torch.equal(buffer, torch.full_like(p, 1.5))
    assert buffer.dtype == dtype


def test_a_parameter_without_gradient_stays_and_has_state_all_the_same() -> None:
    optimizer, params = mixed()
    set_gradients(params, 0)
    for p in (params[1], params[-1]):
        p.grad = None
    before = [p.detach().clone() for p in params]
    optimizer.step()
    changed = [not torch.equal(p, old) for p, old in zip(params, before, strict=True)]
    assert changed == [True, False, True, True, True, True, False]
    assert all(optimizer.state[p] for p in params)
    assert not optimizer.state[params[1]]["momentum_buffer"].any()
    assert optimizer.state[params[-1]]["step"] == 0


def test_frozen_parameters_are_left_alone_and_have_no_state() -> None:
    params = parameters()
    params[0].requires_grad_(False)
    optimizer = Muon(params)
    set_gradients(params[1:], 0)
    before = params[0].clone()
    optimizer.step()
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state


def test_state_is_empty_until_the_first_step() -> None:
    optimizer, params = mixed()
    assert len(optimizer.state) == 0
    run(optimizer, params, range(1))
    assert {frozenset(optimizer.state[p]) for p in params} == {
        frozenset({"momentum_buffer"}),
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }


def test_a_step_of_lr_zero_and_zero_gradients_changes_nothing() -> None:
    optimizer, params = mixed()
    before = [p.detach().clone() for p in params]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step(closure=None)
    assert_same(params, before)


def test_state_dict_round_trip_continues_bit_for_bit() -> None:
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


def test_loads_a_state_of_torch_muon() -> None:
    ours, theirs = parameters(), parameters()
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.3, momentum=0.9)
    run(reference, theirs, range(2))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    optimizer = Muon(ours, scale="original", dtype="bfloat16")
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    run(reference, theirs, range(2, 4))
    run(optimizer, ours, range(2, 4))
    assert_same(ours, theirs)


def test_torch_muon_and_adamw_load_our_state() -> None:
    optimizer, params = mixed(scale="original", dtype="bfloat16")
    run(optimizer, params, range(2))
    clones = [nn.Parameter(p.detach().clone()) for p in params]
    count = len(SHAPES)
    muon = torch.optim.Muon(clones[:count], lr=0.02)
    adamw = torch.optim.AdamW(clones[count:], lr=0.001, betas=(0.9, 0.95), weight_decay=0.1)
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    for other, offset in ((muon, 0), (adamw, count)):
        own = other.state_dict()["param_groups"]
        state = {i: saved[i + offset] for i in own[0]["params"]}
        other.load_state_dict({"state": state, "param_groups": own})
    set_gradients(params, 2)
    set_gradients(clones, 2)
    for each in (optimizer, muon, adamw):
        each.step()
    assert_same(params, clones)


def test_loading_a_state_of_the_other_algorithm_is_refused() -> None:
    optimizer, _ = mixed()
    saved = optimizer.state_dict()
    saved["param_groups"].reverse()
    with pytest.raises(ValueError, match="parameter group 0 is of muon"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("keep", [1, 3])
def test_loading_another_number_of_groups_is_refused(keep: int) -> None:
    optimizer, _ = mixed()
    saved = optimizer.state_dict()
    saved["param_groups"] = (saved["param_groups"] * 2)[:keep]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(saved)


def test_copies_train_alike_and_still_take_groups() -> None:
    optimizer, params = mixed()
    run(optimizer, params, range(2))
    twin, copies = copy.deepcopy((optimizer, params))
    run(optimizer, params, range(2, 4))
    run(twin, copies, range(2, 4))
    assert_same(params, copies)
    twin.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    assert twin.param_groups[2]["momentum"] == 0.95


def test_schedulers_drive_both_halves() -> None:
    optimizer, params = mixed()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    run(optimizer, params, range(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.0005]


def test_lr_may_be_a_tensor() -> None:
    ours, theirs = parameters(), parameters()
    run(Muon(ours, lr=torch.tensor(0.25)), ours, range(2))
    run(Muon(theirs, lr=0.25), theirs, range(2))
    assert_same(ours, theirs)


def test_closure_is_called_with_gradients_enabled_and_its_loss_returned() -> None:
    p = nn.Parameter(torch.eye(3))
    optimizer = Muon([p])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert not torch.equal(p, torch.eye(3))
    assert optimizer.step() is None


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (0, 5), ()])
def test_only_matrices_go_to_muon(shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"parameter bias of parameter group 0 has shape \("):
        Muon([("bias", p)])
    optimizer, _ = mixed()
    with pytest.raises(ValueError, match="number 0 of parameter group 2"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 2


def test_complex_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("lr", torch.zeros(2)),
        ("lr", "fast"),
        ("weight_decay", -0.1),
        ("momentum", 1.0),
        ("nesterov", 1),
        ("ns_steps", 0),
        ("ns_steps", 2.5),
        ("scale", "matched"),
        ("dtype", "float16"),
        ("betas", (0.9, 1.0)),
        ("betas", 0.9),
        ("eps", 0.0),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{option} must be "):
        Muon(parameters(), **{option: value})
    algorithm = "adamw" if option in ("betas", "eps") else "muon"
    with pytest.raises(ValueError, match=f"^{option} of parameter group 0 must be "):
        Muon([{"params": parameters(), "algorithm": algorithm, option: value}])


def test_unknown_keys_and_those_of_the_other_algorithm_are_refused() -> None:
    with pytest.raises(ValueError, match="'momentun'; did you mean 'momentum'"):
        Muon([{"params": parameters(), "momentun": 0.9}])
    with pytest.raises(ValueError, match=r"\(adamw\) has the unknown key 'momentum'"):
        Muon([{"params": parameters(), "algorithm": "adamw", "momentum": 0.9}])
    with pytest.raises(ValueError, match="algorithm of parameter group 0 must be one of"):
        Muon([{"params": parameters(), "algorithm": "sgd"}])


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = Muon([{"params": embedding.parameters(), "algorithm": "adamw"}])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients.*\(5, 3\)"):
        optimizer.step()
