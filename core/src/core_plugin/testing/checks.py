"""Comparisons of tensors, and of models with what they were."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from core_plugin import tensors


def assert_same(actual: Tensor, expected: Tensor, what: str = "the output") -> None:
    """Check a tensor bit for bit.

    Raises:
        AssertionError: The shape, the dtype or a value differs; all NaN are equal.
    """
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, msg=f"{what}: {{}}".format
    )


def assert_near(
    actual: Tensor, expected: Tensor, relative: float = 1e-5, what: str = "the output"
) -> None:
    """Check a tensor against another, by the largest value of the expected one.

    Raises:
        AssertionError: The shape differs, or a value by more than ``relative`` of the largest.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    if not expected.numel():
        return
    error = (actual.double() - expected.double()).abs().max()
    limit = relative * expected.double().abs().max()
    assert error <= limit, f"{what} is off by {error:.3g}, more than {limit:.3g}"


def assert_differs(actual: Tensor, expected: Tensor, what: str) -> None:
    """Check that something has changed.

    Raises:
        AssertionError: It is equal, bit for bit.
    """
    assert not torch.equal(actual, expected), what


def assert_all_near(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], relative: float = 1e-4
) -> None:
    """Check tensors by name, each by its own largest value, and by 1e-6 at least.

    Raises:
        AssertionError: The names differ, or a tensor does.
    """
    assert actual.keys() == expected.keys(), f"{sorted(actual)} instead of {sorted(expected)}"
    for name, tensor in expected.items():
        atol = relative * float(tensor.abs().max()) + 1e-6
        torch.testing.assert_close(
            actual[name], tensor, rtol=0, atol=atol, msg=f"{name}: {{}}".format
        )


def assert_all_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check tensors by name, bit for bit.

    Raises:
        AssertionError: The names differ, or a tensor does.
    """
    assert actual.keys() == expected.keys(), f"{sorted(actual)} instead of {sorted(expected)}"
    for name, tensor in expected.items():
        assert_same(actual[name], tensor, name)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers by name."""
    return {n: t.detach().clone() for n, t in model.state_dict(keep_vars=True).items()}


def assert_unchanged(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Check a model's tensors against :func:`snapshot`, bit for bit.

    Raises:
        AssertionError: A name came or went, or a value differs.
    """
    now = snapshot(model)
    assert now.keys() == before.keys(), f"{sorted(now)} instead of {sorted(before)}"
    for name, tensor in before.items():
        assert_same(now[name], tensor, name)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, whole; collective if they are sharded."""
    trained = tensors.trained_parameters(model).items()
    found = {name: parameter.grad for name, parameter in trained}
    without = [name for name, grad in found.items() if grad is None]
    assert not without, f"no gradient arrived at {', '.join(without)}"
    return {n: tensors.gather(grad).clone() for n, grad in found.items() if grad is not None}


def trained_values(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, by name, whole; collective if it is sharded."""
    trained = tensors.trained_parameters(model).items()
    return {n: tensors.gather(p.detach()).clone() for n, p in trained}
