"""Values that cases put into a device, and whether the same ones come out."""

import pytest
import torch
from torch import Tensor

REQUIRED_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""What every device stores."""

DTYPES = (
    *REQUIRED_DTYPES,
    pytest.param(torch.float64, marks=pytest.mark.requires("float64")),
    pytest.param(torch.complex64, marks=pytest.mark.requires("complex_numbers")),
)
"""To parametrize a case with."""


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values on the CPU, always the same, that each dtype has exactly.

    Sums and products of a few of them are exact in float32 too.
    """
    numbers = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.bool:
        return numbers % 2 == 0
    if dtype.is_complex:
        real = sample(*shape, seed=seed)
        return torch.complex(real, sample(*shape, seed=seed + 1)).to(dtype)
    if dtype.is_floating_point:
        return (numbers / 8 - 6).to(dtype)
    return (numbers - 50 if dtype.is_signed else numbers).to(dtype)


def assert_equal(actual: Tensor, expected: Tensor, on: torch.device, what: str = "it") -> None:
    """Check that a tensor is on a device and has the shape, dtype and values of one on the CPU.

    Args:
        actual: The tensor.
        expected: What it must be.
        on: Where it must be.
        what: What the message calls it.

    Raises:
        AssertionError: It is elsewhere, or a single bit of a value differs; all NaN are equal.
    """
    assert actual.device == on, f"{what} is on {actual.device}, not on {on}"
    torch.testing.assert_close(
        actual.cpu(), expected, rtol=0, atol=0, equal_nan=True, msg=f"{what}: ".__add__
    )


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was asked for."""
    torch.get_device_module(device).synchronize()
