"""Orthogonalization against a float64 singular value decomposition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_plugin_muon.newton_schulz import COEFFICIENTS, orthogonalize, update_scale, working_dtype


def oracle(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """U p(S / |S|) V^T: what the iteration computes in exact arithmetic."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


def gauss(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)))


MATRICES = {
    "square": gauss(48, 48),
    "wide": gauss(24, 80),
    "tall": gauss(80, 24),
    "low rank": gauss(40, 3) @ gauss(3, 30),
    "one row": gauss(1, 7),
    "one column": gauss(7, 1),
    "one entry": gauss(1, 1),
    "two by two": gauss(2, 2),
}


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("kind", MATRICES)
def test_equals_the_polynomial_of_the_singular_values(kind: str, steps: int) -> None:
    matrix = MATRICES[kind]
    expected = oracle(matrix, steps)
    result = orthogonalize(matrix, steps=steps, dtype=torch.float32)
    # Rounding in the directions that a low-rank matrix lacks grows with every step, 3.4445 times.
    tolerance = 5e-5 if kind == "low rank" else 1e-5
    assert result.shape == matrix.shape
    assert torch.linalg.norm(result.double() - expected) <= tolerance * torch.linalg.norm(expected)


def test_brings_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalize(gauss(96, 256), steps=5, dtype=torch.float32))
    assert values.min() > 0.65
    assert values.max() < 1.25


def test_bfloat16_result_is_near_the_oracle_and_of_that_dtype() -> None:
    matrix = MATRICES["wide"]
    result = orthogonalize(matrix, steps=5, dtype=torch.bfloat16)
    expected = oracle(matrix, 5)
    assert result.dtype == torch.bfloat16
    assert torch.linalg.norm(result.double() - expected) <= 0.05 * torch.linalg.norm(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    assert torch.equal(
        orthogonalize(torch.zeros(4, 6), steps=5, dtype=dtype), torch.zeros(4, 6, dtype=dtype)
    )


@pytest.mark.parametrize("shape", [(5, 9), (9, 5)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_matrix_is_not_passed_off_as_sound(
    shape: tuple[int, int], poison: float
) -> None:
    matrix = gauss(*shape)
    matrix[2, 3] = poison
    assert orthogonalize(matrix, steps=5, dtype=torch.float32).isnan().all()


def test_does_not_write_to_its_argument() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for matrix in (gauss(6, 9).to(dtype), gauss(9, 6).to(dtype)):
            before = matrix.clone()
            orthogonalize(matrix, steps=5, dtype=dtype)
            assert torch.equal(matrix, before)


@settings(max_examples=40, deadline=None)
@given(
    exponent=st.integers(-100, 100),
    shape=st.sampled_from([(8, 12), (12, 8), (9, 9)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_power_of_two_changes_no_bit(
    exponent: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrix = gauss(*shape)
    scaled = orthogonalize(matrix * 2.0**exponent, steps=5, dtype=dtype)
    assert torch.equal(scaled, orthogonalize(matrix, steps=5, dtype=dtype))


@settings(max_examples=40, deadline=None)
@given(
    exponent=st.floats(-30, 30),
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(8, 12), (12, 8), (9, 9)]),
)
def test_magnitude_does_not_matter(exponent: float, seed: int, shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    scaled = orthogonalize(matrix * 10**exponent, steps=5, dtype=torch.float32)
    expected = orthogonalize(matrix, steps=5, dtype=torch.float32)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("magnitude", [3.0e38, 1e-38, 1e-42])
def test_the_ends_of_the_float32_range(magnitude: float) -> None:
    matrix = torch.eye(3, 5) * magnitude
    expected = orthogonalize(torch.eye(3, 5), steps=5, dtype=torch.float32)
    result = orthogonalize(matrix, steps=5, dtype=torch.float32)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


def test_update_scales() -> None:
    assert update_scale("match_rms_adamw", 16, 100) == pytest.approx(2.0)
    assert update_scale("match_rms_adamw", 100, 16) == pytest.approx(2.0)
    assert update_scale("original", 100, 25) == pytest.approx(2.0)
    assert update_scale("original", 25, 100) == 1.0
    assert update_scale("none", 100, 25) == 1.0


def test_matched_update_is_as_large_as_one_of_adamw() -> None:
    for shape in [(64, 64), (32, 128), (128, 32)]:
        update = orthogonalize(gauss(*shape), steps=5, dtype=torch.float32)
        size = update.square().mean().sqrt() * update_scale("match_rms_adamw", *shape)
        assert 0.15 < size < 0.25


def test_automatic_dtype_is_bfloat16_on_cuda_alone() -> None:
    assert working_dtype("auto", torch.device("cuda")) == torch.bfloat16
    for device in ("cpu", "meta", "mps"):
        assert working_dtype("auto", torch.device(device)) == torch.float32
    assert working_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert working_dtype("float32", torch.device("cuda")) == torch.float32
