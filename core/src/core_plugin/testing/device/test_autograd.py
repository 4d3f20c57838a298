"""Gradients on the device: those of single operators, and what autograd can do with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core_plugin.testing.device.comparison import Computation, assert_same_as_on_cpu, leaf, normal

pytestmark = pytest.mark.level(1)


ELEMENTWISE: dict[str, Computation] = {
    "add and subtract": lambda a, b: a + b - 2 * a,
    "multiply and divide": lambda a, b: a * b / (b * b + 1),
    "power and root": lambda a, b: (a * a + 1).sqrt() + b.pow(3),
    "exp and log": lambda a, b: a.exp() + (b.abs() + 1).log(),
    "trigonometric": lambda a, b: a.sin() * b.cos() + a.tanh(),
    "maximum": lambda a, b: torch.maximum(a, b) + a.clamp(-0.5, 0.5),
    "where": lambda a, b: torch.where(a > 0, a * 2, b * 3),
    "lerp": lambda a, b: torch.lerp(a, b.expand_as(a), 0.3) + torch.addcmul(a, a, b, value=0.5),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operators(device: torch.device, name: str) -> None:
    """Elementwise operators give the CPU's results and gradients, with broadcast inputs too."""
    inputs = leaf(3, 4, 5), leaf(4, 1, seed=2)
    assert_same_as_on_cpu(ELEMENTWISE[name], *inputs, device=device)


REDUCTIONS: dict[str, Computation] = {
    "sum": lambda a: a.sum(dim=(0, 2)),
    "mean": lambda a: a.mean(dim=1, keepdim=True),
    "var": lambda a: a.var(dim=-1),
    "norm": lambda a: torch.linalg.vector_norm(a, dim=-1),
    "amax": lambda a: a.amax(dim=1),
    "max": lambda a: a.max(dim=0).values,
    "prod": lambda a: a.prod(dim=-1),
    "cumsum": lambda a: a.cumsum(dim=1),
    "logsumexp": lambda a: a.logsumexp(dim=-1),
    "all of it": lambda a: a.sum() * a.mean(),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(device: torch.device, name: str) -> None:
    """Reductions give the CPU's results and gradients."""
    assert_same_as_on_cpu(REDUCTIONS[name], leaf(3, 4, 5), device=device, rtol=1e-5, atol=1e-5)


INDEXING: dict[str, Computation] = {
    "index": lambda a, i: a[i],
    "index_select": lambda a, i: a.index_select(0, i),
    "index_add": lambda a, i: a.index_add(0, i, a[:4] * 2),
    "index_put": lambda a, i: a.index_put((i,), a[:4] * 2, accumulate=True),
    "gather": lambda a, i: a.gather(0, i[:, None].expand(4, 3)),
    "scatter": lambda a, i: torch.zeros_like(a).scatter(0, i.unique()[:, None].expand(3, 3), a[:3]),
    "scatter_add": lambda a, i: a.scatter_add(0, i[:, None].expand(4, 3), a[:4]),
    "masked_select": lambda a, i: a[a > 0],
    "masked_fill": lambda a, i: a.masked_fill(a > 0, 2.0),
    "triu and roll": lambda a, i: a.triu() + a.roll(1, 0),
    "cat and stack": lambda a, i: torch.stack(torch.cat([a, a[:1] * 2]).chunk(2)),
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(device: torch.device, name: str) -> None:
    """Indexing gives the CPU's results and gradients; a repeated index adds up."""
    index = torch.tensor([4, 0, 4, 2])
    assert_same_as_on_cpu(INDEXING[name], leaf(5, 3), index, device=device)


def test_a_gradient_of_a_gradient(device: torch.device) -> None:
    """Gradients can be differentiated again."""

    def gradient(a: Tensor, b: Tensor) -> Tensor:
        loss = (torch.tanh(a @ b) ** 3).sum()
        return torch.autograd.grad(loss, a, create_graph=True)[0]

    assert_same_as_on_cpu(gradient, leaf(3, 4), leaf(4, 2, seed=2), device=device)


def test_gradients_through_writes_into_views(device: torch.device) -> None:
    """What is written in place into a view has its part in the gradient of the base."""

    def written(a: Tensor) -> Tensor:
        base = a * 2
        base[1:3].mul_(a[0])
        base.t()[0].add_(a[:, 1])
        base.view(-1)[::3].zero_()
        return base * a

    assert_same_as_on_cpu(written, leaf(4, 4), device=device)


@pytest.mark.requires("float64")
def test_gradients_are_the_numerical_ones(device: torch.device) -> None:
    """In float64, gradients agree with differences of the function's own values."""
    a = normal(3, 4).double().to(device).requires_grad_()
    b = normal(4, 2, seed=2).double().to(device).requires_grad_()

    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.softmax(torch.sin(a) @ b, dim=-1)

    assert torch.autograd.gradcheck(function, (a, b))
    assert torch.autograd.gradgradcheck(function, (a, b))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(
    device: torch.device, reentrant: bool
) -> None:
    """Activations that are computed again give the same gradients, in both of torch's modes."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(device)
    calls = []
    layers[1].register_forward_hook(lambda *_: calls.append(1))
    x = normal(2, 4).to(device).requires_grad_()
    expected = torch.autograd.grad(layers(x).pow(2).sum(), [x, *layers.parameters()])

    calls.clear()
    checkpoint(layers, x, use_reentrant=reentrant).pow(2).sum().backward()
    assert len(calls) == 2, (
        f"the layers ran {len(calls)} times, not in forward and again in backward"
    )
    actual = [x.grad, *(p.grad for p in layers.parameters())]
    torch.testing.assert_close(actual, list(expected))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = 3 * x * x * gradient
        return result


def _cube_of_twice(x: Tensor) -> Tensor:
    cube: Tensor = _Cube.apply(2 * x)  # type: ignore[no-untyped-call]
    return cube


def test_an_own_function_gets_its_backward_called(device: torch.device) -> None:
    """A ``torch.autograd.Function`` of one's own runs, with tensors of the device."""
    assert_same_as_on_cpu(_cube_of_twice, leaf(3, 4), device=device)


class _Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("raised inside backward")


def test_an_exception_inside_backward_reaches_the_caller(device: torch.device) -> None:
    """What Python code raises inside backward is raised by it, and the next backward works."""
    x = normal(4).to(device).requires_grad_()
    with pytest.raises(ArithmeticError, match="raised inside backward"):
        _Faulty.apply(x * 2).sum().backward()  # type: ignore[no-untyped-call]
    (gradient,) = torch.autograd.grad((x * 2).sum(), x)
    torch.testing.assert_close(gradient.cpu(), torch.full((4,), 2.0))


def test_gradients_go_through_copies_between_the_host_and_the_device(device: torch.device) -> None:
    """A tensor of the CPU gets its gradient, on the CPU, from what the device computed."""
    x = leaf(4)
    y = (x.to(device) ** 2).cpu() * 3
    y.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach())


def test_gradients_of_several_backwards_add_up(device: torch.device) -> None:
    """Gradients accumulate, and a hook sees each sum on the device."""
    seen = []
    x = normal(4).to(device).requires_grad_()
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for factor in (1.0, 2.0, 3.0):
        (x * factor).sum().backward()
    assert all(gradient.device == device for gradient in seen)
    sums = [gradient.cpu() for gradient in seen]
    torch.testing.assert_close(sums, [torch.full((4,), total) for total in (1.0, 3.0, 6.0)])


@pytest.mark.requires("multiple_devices")
def test_gradients_go_through_copies_between_devices(
    device: torch.device, other_device: torch.device
) -> None:
    """A graph over two devices gives each tensor its gradient on the tensor's own device."""
    x = normal(4).to(device).requires_grad_()
    weight = normal(4, seed=2).to(other_device).requires_grad_()
    ((x * 2).to(other_device) * weight).to(device).sum().backward()
    assert x.grad is not None, "no gradient for the first device"
    assert weight.grad is not None, "no gradient for the second device"
    assert (x.grad.device, weight.grad.device) == (device, other_device)
    torch.testing.assert_close(x.grad.cpu(), 2 * weight.detach().cpu())
    torch.testing.assert_close(weight.grad.cpu(), 2 * x.detach().cpu())
