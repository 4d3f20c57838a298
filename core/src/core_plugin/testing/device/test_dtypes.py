"""Dtypes: casts from each to each, rounding, and filling with a value."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from core_plugin.testing.device.subject import Subject
from core_plugin.testing.device.values import (
    DTYPES,
    REQUIRED_DTYPES,
    assert_equal,
    sample,
    synchronize,
)

pytestmark = pytest.mark.level(1)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

Cast = Callable[[Tensor, torch.dtype, torch.device], Tensor]


def _without_blocking(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    result = torch.zeros(x.shape, dtype=dtype).copy_(x.to(device), non_blocking=True)
    synchronize(device)
    return result


CASTS: dict[str, Cast] = {
    "on the device": lambda x, dtype, device: x.to(device).to(dtype),
    "while copying to it": lambda x, dtype, device: x.to(device, dtype),
    "while copying from it": lambda x, dtype, device: x.to(device).to("cpu", dtype),
    "without blocking": _without_blocking,
    "by copy_": lambda x, dtype, device: torch.empty(x.shape, dtype=dtype, device=device).copy_(
        x.to(device)
    ),
    "by copy_ from the CPU": lambda x, dtype, device: torch.empty(
        x.shape, dtype=dtype, device=device
    ).copy_(x),
    "of a strided tensor": lambda x, dtype, device: (
        torch.stack([x, x], dim=-1).to(device)[..., 0].to(dtype)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_are_the_cpus(device: torch.device, dtype: torch.dtype) -> None:
    """A cast to and from each other dtype gives the CPU's values; integers wrap around."""
    for other in REQUIRED_DTYPES:
        for source, target in ((dtype, other), (other, dtype)):
            _assert_cast_like_the_cpu(_that_all_have(source), target, device)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fractions_are_cut_off(device: torch.device, dtype: torch.dtype) -> None:
    """A cast to integers rounds towards zero."""
    values = torch.tensor([2.75, 2.5, 0.5, -0.5, -2.5, -2.75, 100.0], dtype=dtype)
    for target in (torch.int64, torch.int32, torch.int16, torch.int8):
        _assert_cast_like_the_cpu(values, target, device)
        assert values.to(device).to(target).tolist() == [2, 2, 0, 0, -2, -2, 100]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_around(device: torch.device, dtype: torch.dtype) -> None:
    """An integer that the target lacks loses its high bits, as on the CPU."""
    limits = torch.iinfo(dtype)
    values = torch.tensor([limits.min, limits.max, 127, 100, 3], dtype=dtype)
    for target in (*INTEGERS, torch.bool):
        _assert_cast_like_the_cpu(values, target, device)


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_and_nan_are_kept(device: torch.device, dtype: torch.dtype) -> None:
    """Casts among floats keep infinities, NaN and the zero's sign; NaN and infinities are true."""
    values = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0], dtype=dtype)
    for target in (*FLOATS, torch.bool):
        _assert_cast_like_the_cpu(values, target, device)
        if target != torch.bool:
            signs = values.to(device).to(target).signbit().tolist()
            assert signs[:2] + signs[3:] == [False, True, True, False], f"{target}: {signs}"


BFLOAT16, FLOAT16 = 2.0**-8, 2.0**-11
"""Half of the distance from 1 to the next number."""
ROUNDED = {
    torch.bfloat16: [
        (1 + BFLOAT16, 1.0),
        (1 + 3 * BFLOAT16, 1 + 4 * BFLOAT16),
        (1 + BFLOAT16 + 2.0**-20, 1 + 2 * BFLOAT16),
        (1 + 1.5 * BFLOAT16, 1 + 2 * BFLOAT16),
        (-1 - 3 * BFLOAT16, -1 - 4 * BFLOAT16),
        (255.5, 256.0),
        (257.0, 256.0),
        (259.0, 260.0),
        (3.4028234663852886e38, math.inf),
        (-3.3895313892515355e38, -3.3895313892515355e38),
    ],
    torch.float16: [
        (1 + FLOAT16, 1.0),
        (1 + 3 * FLOAT16, 1 + 4 * FLOAT16),
        (1 + FLOAT16 + 2.0**-20, 1 + 2 * FLOAT16),
        (1 + 1.5 * FLOAT16, 1 + 2 * FLOAT16),
        (-1 - 3 * FLOAT16, -1 - 4 * FLOAT16),
        (2049.0, 2048.0),
        (2051.0, 2052.0),
        (65519.0, 65504.0),
        (65520.0, math.inf),
        (-1e6, -math.inf),
    ],
}
"""Numbers in float32, and what they are in a dtype with fewer bits."""


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dtype", ROUNDED)
def test_casts_round_to_nearest_even(device: torch.device, dtype: torch.dtype, cast: str) -> None:
    """A cast to fewer bits takes the nearest number, of two the even one; too large is infinite."""
    numbers, expected = map(list, zip(*ROUNDED[dtype], strict=True))
    result = CASTS[cast](torch.tensor(numbers), dtype, device)
    assert result.dtype == dtype
    assert result.tolist() == expected, f"{numbers} became {result.tolist()}"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers_round_to_nearest_even(device: torch.device, dtype: torch.dtype) -> None:
    """An integer with more digits than a float takes the nearest float."""
    numbers = [2049, 2051, 257, 259, -259, (1 << 24) + 1, (1 << 24) + 3]
    for target in FLOATS:
        _assert_cast_like_the_cpu(torch.tensor(numbers, dtype=dtype), target, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_filling_sets_every_element(device: torch.device, dtype: torch.dtype) -> None:
    """A number, a tensor of the device and one of the CPU fill all of a tensor or a view."""
    for value in (1, torch.tensor(1), torch.tensor(1, device=device), torch.tensor(1.0)):
        base = torch.zeros(4, 6, dtype=dtype, device=device)
        expected = torch.zeros(4, 6, dtype=dtype)
        for tensor in (base, expected):
            tensor[1:3, ::2].fill_(value.item() if isinstance(value, Tensor) else value)
        base.zero_()[1:3, ::2].fill_(value)
        assert_equal(base, expected, on=device)
        assert_equal(base.fill_(value), torch.ones(4, 6, dtype=dtype), on=device)


@pytest.mark.parametrize("value", [2.5, -0.0, math.inf, -math.inf, math.nan, 1e-3])
def test_filling_converts(device: torch.device, value: float) -> None:
    """What a tensor is filled with is converted to its dtype as on the CPU."""
    for dtype in FLOATS:
        filled = torch.full((3,), value, dtype=dtype, device=device)
        assert_equal(filled, torch.full((3,), value, dtype=dtype), on=device)
        assert_equal(torch.zeros_like(filled).fill_(value), filled.cpu(), on=device)
    assert torch.zeros(1, dtype=torch.int32, device=device).fill_(2.5).item() == 2
    assert torch.zeros(1, dtype=torch.bool, device=device).fill_(0.5).item()


@pytest.mark.requires("complex_numbers")
def test_filling_with_complex_numbers(device: torch.device) -> None:
    """A complex number fills a complex tensor; a real one refuses it."""
    filled = torch.zeros(2, 3, dtype=torch.complex64, device=device).fill_(1.5 - 2j)
    assert_equal(filled, torch.full((2, 3), 1.5 - 2j), on=device)
    filled.fill_(torch.tensor(3j, device=device))
    assert_equal(filled, torch.full((2, 3), 3j), on=device)
    assert_equal(filled.fill_(2.0), torch.full((2, 3), 2 + 0j), on=device)
    with pytest.raises(RuntimeError):
        torch.zeros(2, device=device).fill_(1j)


def test_autocasts_dtype_is_supported(device: torch.device, subject: Subject) -> None:
    """Matrix products run in float32 and in the dtype that autocast has by default."""
    for dtype in (torch.float32, getattr(torch, subject.backend.default_autocast_dtype)):
        reason = subject.implementation.unsupported(device, dtype)
        assert reason is None, f"{dtype}: {reason}"


def _that_all_have(dtype: torch.dtype) -> Tensor:
    """Values whose cast to an integer is defined: no negative fractions for unsigned ones."""
    values = sample(4, 6, dtype=dtype)
    return values + 6 if dtype.is_floating_point or dtype.is_complex else values


def _assert_cast_like_the_cpu(values: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    for name, cast in CASTS.items():
        result = cast(values, dtype, device).cpu()
        how = f"{values.dtype} to {dtype}, cast {name}: "
        torch.testing.assert_close(
            result, values.to(dtype), rtol=0, atol=0, equal_nan=True, msg=how.__add__
        )
