"""The optimizer in one process, against torch's own Muon and AdamW."""

import pytest
import torch
from muon_parameters import assert_same, mixed, parameters, run, set_gradients, vectors
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from core_plugin_muon import Muon, adamw


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_is_bitwise_torch_muon_in_bfloat16(scale: str, nesterov: bool) -> None:
    ours, theirs = parameters(), parameters()
    muon = Muon(ours, lr=0.02, adjust_lr_fn=scale, nesterov=nesterov, ns_dtype="bfloat16")
    torch_muon = torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn=scale, nesterov=nesterov)
    run(muon, ours, range(4))
    run(torch_muon, theirs, range(4))
    assert_same(ours, theirs)


@pytest.mark.parametrize("nesterov", [True, False])
def test_of_bfloat16_parameters_only_the_last_sum_is_rounded_otherwise(nesterov: bool) -> None:
    """torch rounds it once or twice, by where in the memory an element is."""
    ours, theirs = (parameters(dtype=torch.bfloat16) for _ in range(2))
    muon = Muon(ours, lr=0.02, adjust_lr_fn="original", nesterov=nesterov, ns_dtype="bfloat16")
    # torch overwrites the momentum of such matrices without nesterov, in its first step
    for step in range(4 if nesterov else 1):
        torch_muon = torch.optim.Muon(theirs, lr=0.02, nesterov=nesterov)
        for p, q in zip(ours, theirs, strict=True):
            q.data.copy_(p)
            if step:
                torch_muon.state[q]["momentum_buffer"] = muon.state[p]["momentum_buffer"].clone()
        run(muon, ours, range(step, step + 1))
        run(torch_muon, theirs, range(step, step + 1))
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=2**-7, atol=2**-13)
            if nesterov:
                momenta = muon.state[p], torch_muon.state[q]
                assert torch.equal(*(state["momentum_buffer"] for state in momenta))


def test_float32_is_torch_muon_with_the_rounding_taken_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = parameters(), parameters()
    run(Muon(ours, lr=0.02, adjust_lr_fn="original", ns_dtype="float32"), ours, range(4))
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    run(torch.optim.Muon(theirs, lr=0.02), theirs, range(4))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_adamw_groups_are_torch_adamw() -> None:
    ours, theirs = vectors(), vectors()
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    run(Muon([{"params": ours, "algorithm": "adamw", **options}]), ours, range(5))
    run(torch.optim.AdamW(theirs, **options), theirs, range(5))
    for p, q in zip(ours, theirs, strict=True):  # torch itself rounds otherwise where it is fused
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


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
        optimizer = Muon(params, lr=0.02, ns_dtype="float32")
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
    optimizer = Muon([p], momentum=0.5, nesterov=nesterov, ns_dtype="bfloat16")
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


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ((4,), "fewer than two dimensions"),
        ((), "fewer than two dimensions"),
        ((2, 3, 4), "needs flatten=True"),
    ],
)
def test_what_is_no_matrix_is_refused_when_it_is_added(shape: tuple[int, ...], fault: str) -> None:
    p = nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=rf"parameter bias of parameter group 0.*{fault}"):
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
        ("adjust_lr_fn", "matched"),
        ("ns_dtype", "float16"),
        ("adamw_betas", (0.9, 1.0)),
        ("adamw_betas", 0.9),
        ("adamw_eps", -1e-8),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{option} must be "):
        Muon(parameters(), **{option: value})
    algorithm, key = ("adamw" if "adamw" in option else "muon"), option.removeprefix("adamw_")
    with pytest.raises(ValueError, match=f"^{key} of parameter group 0 must be "):
        Muon([{"params": parameters(), "algorithm": algorithm, key: value}])


def test_unknown_keys_and_those_of_the_other_algorithm_are_refused() -> None:
    with pytest.raises(ValueError, match="'momentun'; did you mean 'momentum'"):
        Muon([{"params": parameters(), "momentun": 0.9}])
    with pytest.raises(ValueError, match=r"\(adamw\) has the unknown key 'momentum'"):
        Muon([{"params": parameters(), "algorithm": "adamw", "momentum": 0.9}])
    with pytest.raises(ValueError, match="algorithm of parameter group 0 must be one of"):
        Muon([{"params": parameters(), "algorithm": "sgd"}])


@pytest.mark.parametrize("key", ["name", "max_lr", "max_momentum", "initial_lr", "layer"])
def test_keys_that_are_no_options_are_kept(key: str) -> None:
    optimizer = Muon([{"params": parameters(), key: 1}])
    assert optimizer.param_groups[0][key] == 1


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_what_adamw_groups_cannot_do_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"^parameter group 0 has {option}=True"):
        Muon([{"params": vectors(), "algorithm": "adamw", option: True}])


def test_options_of_adamw_and_of_muon_are_told_apart() -> None:
    optimizer, _ = mixed(adamw_betas=(0.8, 0.9), adamw_eps=0.0)
    muon, adamw = optimizer.param_groups
    assert muon["eps"] == 1e-7
    assert (adamw["betas"], adamw["eps"]) == ((0.8, 0.9), 0.0)


def test_torch_muons_own_scale_may_be_given_as_torch_has_it() -> None:
    for optimizer in (
        Muon(parameters(), adjust_lr_fn=None),
        Muon([{"params": parameters(), "adjust_lr_fn": None}]),
    ):
        assert optimizer.param_groups[0]["adjust_lr_fn"] == "original"


def test_a_whole_models_parameters_are_pointed_to_for_model() -> None:
    with pytest.raises(ValueError, match=r"Muon\.for_model\(model\)"):
        Muon(nn.Linear(3, 3).parameters())


def test_a_scale_that_is_misspelt_later_changes_nothing() -> None:
    optimizer, params = mixed()
    set_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["adjust_lr_fn"] = "spectra"
    with pytest.raises(ValueError, match=r"adjust_lr_fn must be one of .* 'spectra'"):
        optimizer.step()
    assert_same(params, before)
    assert not optimizer.state


def test_the_learning_rate_is_read_once_a_group() -> None:
    """Reading that of a tensor on a device waits for the device."""

    class Rate(float):
        reads = 0

        def __float__(self) -> float:
            Rate.reads += 1
            return 0.02

    params = parameters()
    optimizer = Muon(params)
    optimizer.param_groups[0]["lr"] = Rate(0.02)
    run(optimizer, params, range(2))
    assert Rate.reads == 2


def test_matrices_without_a_gradient_are_not_computed() -> None:
    matrix, stack = (nn.Parameter(torch.randn(shape)) for shape in [(64, 64), (4, 64, 64)])
    optimizer = Muon([{"params": [matrix]}, {"params": [stack], "flatten": False}])
    flops = []
    for with_gradient in ([matrix, stack], [matrix], []):
        for p in (matrix, stack):
            p.grad = torch.ones_like(p) if any(p is q for q in with_gradient) else None
        with FlopCounterMode(display=False) as counted:
            optimizer.step()
        flops.append(counted.get_total_flops())
    assert flops[0] == 5 * flops[1] > 0 == flops[2]


@pytest.mark.parametrize("sizes", [(64,), (0, 1, 63, 65, 128, 257)])
def test_adamw_is_torchs_whatever_the_number_of_elements(sizes: tuple[int, ...]) -> None:
    ours, theirs = ([nn.Parameter(torch.ones(size)) for size in sizes] for _ in range(2))
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 0.0, "weight_decay": 0.3}
    optimizer = Muon([{"params": ours, "algorithm": "adamw", **options}])
    run(optimizer, ours, range(3))
    run(torch.optim.AdamW(theirs, **options), theirs, range(3))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
        assert optimizer.state[p]["step"] == 3


def test_adamw_fills_up_only_what_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []
    pad = adamw.pad
    monkeypatch.setattr(adamw, "pad", lambda end, by: filled.append(len(end)) or pad(end, by))
    params = [nn.Parameter(torch.ones(shape)) for shape in [(64,), (8, 16), (0,), (3,), (70,)]]
    run(Muon([{"params": params, "algorithm": "adamw"}]), params, range(1))
    assert filled == [3] * 4 + [6] * 4


def test_sparse_gradients_are_refused_before_anything_moves() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    first, last = parameters(), vectors()
    groups = [
        {"params": first},
        {"params": last, "algorithm": "adamw"},
        {"params": embedding.parameters(), "algorithm": "adamw"},
    ]
    optimizer = Muon(groups)
    set_gradients(first + last, 0)
    embedding(torch.tensor([1])).sum().backward()
    before = [p.detach().clone() for p in first + last]
    with pytest.raises(RuntimeError, match=r"dense gradients.*\(5, 3\)"):
        optimizer.step()
    assert_same(first + last, before)
    assert not optimizer.state
