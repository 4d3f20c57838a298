"""Optimizers on the device: the CPU's parameters after several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core_plugin.testing.device.comparison import normal

pytestmark = pytest.mark.level(1)

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

STEPS = 4


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """The losses of some steps."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(normal(5, 6, seed=step).to(device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def _assert_trains_as_on_cpu(make: Make, device: torch.device) -> None:
    """Check losses and parameters after some steps."""
    reference, model = _model(), _model().to(device)
    expected = _train(reference, make(list(reference.parameters())), torch.device("cpu"))
    losses = _train(model, make(list(model.parameters())), device)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    _assert_same_parameters(model, reference)


def _assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    initial = _model().state_dict()
    for name, expected in reference.state_dict().items():
        actual = model.state_dict()[name].cpu()
        assert not torch.equal(actual, initial[name]), f"{name} was not trained"
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# An epsilon that is not tiny: a gradient near zero has no sign that two devices agree on.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_cpu(device: torch.device, name: str, foreach: bool | None) -> None:
    """SGD and AdamW train as on the CPU, tensor by tensor and with lists of tensors."""
    optimizer, options = OPTIMIZERS[name]
    _assert_trains_as_on_cpu(lambda p: optimizer(p, **options, foreach=foreach), device)


@pytest.mark.requires("fused_optimizers")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_steps_are_those_of_the_cpu(device: torch.device, name: str) -> None:
    """SGD and AdamW with ``fused=True`` train as on the CPU."""
    optimizer, options = OPTIMIZERS[name]
    _assert_trains_as_on_cpu(lambda p: optimizer(p, **options, fused=p[0].device == device), device)


def test_an_optimizer_made_before_the_move_trains_the_moved_module(device: torch.device) -> None:
    """An optimizer holds the module's parameters, also if the module moves afterwards."""
    reference, model = _model(), _model()
    optimizer, options = OPTIMIZERS["SGD"]
    before = optimizer(model.parameters(), **options)
    model.to(device)
    _train(reference, optimizer(reference.parameters(), **options), torch.device("cpu"))
    _train(model, before, device)
    _assert_same_parameters(model, reference)


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_are_clipped_to_a_norm(device: torch.device, foreach: bool) -> None:
    """``clip_grad_norm_`` returns the CPU's norm and leaves its gradients."""
    reference, model = _model(), _model().to(device)
    norms = []
    for each, where in ((reference, torch.device("cpu")), (model, device)):
        (100 * each(normal(5, 6).to(where))).pow(2).sum().backward()
        norm = nn.utils.clip_grad_norm_(each.parameters(), 1.0, foreach=foreach)
        norms.append(norm.cpu())
    assert norms[0] > 1
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=1e-5)
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None, "a gradient is gone"
        torch.testing.assert_close(parameter.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.requires("float64")  # GradScaler computes the inverse of the scale in it
def test_a_scaled_loss_trains_as_one_that_is_not(device: torch.device) -> None:
    """With ``GradScaler`` the parameters are those without it."""
    reference, model = _model(), _model().to(device)
    optimizer, options = OPTIMIZERS["SGD"]
    _train(reference, optimizer(reference.parameters(), **options), torch.device("cpu"))
    scaled = optimizer(model.parameters(), **options)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    for step in range(STEPS):
        scaled.zero_grad()
        loss = model(normal(5, 6, seed=step).to(device)).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(scaled)
        scaler.update()
    assert scaler.get_scale() == 1024.0
    _assert_same_parameters(model, reference)


@pytest.mark.requires("float64")  # GradScaler computes the inverse of the scale in it
def test_a_step_with_infinite_gradients_is_left_out(device: torch.device) -> None:
    """``GradScaler`` sees a gradient that is not finite, skips the step and halves the scale."""
    weight = nn.Parameter(normal(3).to(device))
    before = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    for factor in (float("inf"), float("nan")):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.testing.assert_close(weight.detach(), before)
    assert scaler.get_scale() == 256.0


def test_newton_schulz_iterations_in_bfloat16(device: torch.device) -> None:
    """The iterations of Muon in bfloat16 give singular values near 1, and nearly the CPU's."""
    matrix = normal(24, 64)
    expected = _newton_schulz(matrix.bfloat16()).float()
    result = _newton_schulz(matrix.to(device).bfloat16())
    assert result.dtype == torch.bfloat16, f"the result is in {result.dtype}"
    difference = torch.linalg.norm(result.cpu().float() - expected) / torch.linalg.norm(expected)
    assert difference < 0.03, f"it differs from the CPU's by {difference:.1%}"
    values = torch.linalg.svdvals(result.cpu().float())
    assert values.min() > 0.6, f"the smallest singular value is {values.min():.2f}"
    assert values.max() < 1.3, f"the largest singular value is {values.max():.2f}"


def _newton_schulz(matrix: Tensor) -> Tensor:
    x: Tensor = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, polynomial, x, beta=3.4445)
    return x
