"""The same computation on the CPU and on a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

Computation = nn.Module | Callable[..., Tensor | Sequence[Tensor]]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers from a normal distribution, on the CPU and always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaf(*shape: int, seed: int = 0) -> Tensor:
    """As :func:`normal`, and it gets a gradient."""
    return normal(*shape, seed=seed).requires_grad_()


def assert_same_as_on_cpu(
    computation: Computation,
    *inputs: Tensor,
    device: torch.device,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check outputs and gradients on a device against those on the CPU.

    Args:
        computation: A module (its parameters' gradients and its buffers are compared too) or a
            function; it gives a tensor or several.
        inputs: What it gets, on the CPU; those that require a gradient are compared by it.
        device: The device.
        rtol: That of ``torch.testing.assert_close``.
        atol: The same.

    Raises:
        AssertionError: A result differs, or is not on the device.
    """
    moved = copy.deepcopy(computation)
    if isinstance(moved, nn.Module):
        moved.to(device)
    expected = _results(computation, inputs, torch.device("cpu"))
    for name, result in _results(moved, inputs, device).items():
        assert result.device == device, f"the {name} is on {result.device}, not on {device}"
        torch.testing.assert_close(
            result.cpu(), expected[name], rtol=rtol, atol=atol, msg=partial("{}: {}".format, name)
        )


def _results(
    computation: Computation, inputs: Sequence[Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Every output, gradient and buffer, by what to call it."""
    given = [i.detach().to(device, copy=True).requires_grad_(i.requires_grad) for i in inputs]
    outputs = computation(*given)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    torch.autograd.backward(outputs, [_cotangent(o) for o in outputs])
    results = {f"output {number}": o.detach() for number, o in enumerate(outputs)}
    results |= {
        f"gradient of input {n}": _gradient(g) for n, g in enumerate(given) if g.requires_grad
    }
    if isinstance(computation, nn.Module):
        for name, parameter in computation.named_parameters():
            results[f"gradient of {name}"] = _gradient(parameter)
        results |= dict(computation.named_buffers())
    return results


def _cotangent(output: Tensor) -> Tensor:
    """A gradient without symmetry: with one of ones, that of a softmax would be zero."""
    return normal(*output.shape, seed=1).to(output)


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "no gradient arrived"
    return tensor.grad
