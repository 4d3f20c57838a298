"""Orthogonalization against a float64 singular value decomposition and against torch's own."""

import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from core_plugin_muon.coefficients import SETS, schedule
from core_plugin_muon.newton_schulz import flops, orthogonalize, update_scale, working_dtype

JORDAN = SETS["keller_jordan"][0]
FIVE = schedule("keller_jordan", 5)
DTYPES = (torch.float32, torch.bfloat16)


def gauss(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(rows: int, columns: int, values: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(gauss(rows, columns).double(), full_matrices=False)
    return ((u * values) @ vh).float()


@cache
def matrix_of(kind: str, rows: int, columns: int) -> torch.Tensor:
    rank = min(rows, columns)
    index = torch.arange(rank).double()
    if kind == "gauss":
        return gauss(rows, columns)
    if kind == "power law":
        return with_spectrum(rows, columns, 1 / (index + 1))
    if kind == "condition 1e4":
        return with_spectrum(rows, columns, 10 ** (-4 * index / max(1, rank - 1)))
    if kind == "low rank and noise":
        low = gauss(rows, 32, seed=1) @ gauss(32, columns, seed=2)
        return low + 0.1 * gauss(rows, columns)
    if kind == "low rank":
        return gauss(rows, 3, seed=1) @ gauss(3, columns, seed=2)
    return torch.outer(gauss(rows, seed=1), gauss(columns, seed=2))  # rank one


@cache
def decomposition(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    u, s, vh = torch.linalg.svd(matrix_of(kind, rows, columns).double(), full_matrices=False)
    return u, s / torch.linalg.vector_norm(s), vh


def polynomials(values: torch.Tensor, triples: tuple) -> torch.Tensor:
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    return values


def oracle(kind: str, rows: int, columns: int, triples: tuple) -> torch.Tensor:
    """U p(S / |S|) V^T: what the iteration computes in exact arithmetic."""
    u, s, vh = decomposition(kind, rows, columns)
    return (u * polynomials(s, triples)) @ vh


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.norm(result.double() - expected) / torch.linalg.norm(expected))


def one(matrix: torch.Tensor, triples: tuple = FIVE, dtype: torch.dtype = torch.float32):
    (result,) = orthogonalize([matrix], triples, dtype)
    return result


SPECTRA = ["gauss", "power law", "condition 1e4", "low rank and noise"]
NEARLY_SQUARE = [(48, 48), (80, 96), (96, 80), (128, 130), (272, 272), (300, 310)]
OBLONG = [(48, 160), (160, 48), (120, 400), (272, 600), (640, 256)]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", NEARLY_SQUARE)
@pytest.mark.parametrize("kind", SPECTRA)
def test_equals_the_polynomials_of_the_singular_values(kind, shape, name) -> None:
    triples = schedule(name, 5)
    result = one(matrix_of(kind, *shape), triples)
    assert result.shape == shape
    assert relative_error(result, oracle(kind, *shape, triples)) <= 1e-5


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", OBLONG)
@pytest.mark.parametrize("kind", SPECTRA)
def test_equals_them_within_a_thousandth_where_it_iterates_on_the_gram_matrix(
    kind, shape, name
) -> None:
    triples = schedule(name, 5)
    result = one(matrix_of(kind, *shape), triples)
    assert result.shape == shape
    assert relative_error(result, oracle(kind, *shape, triples)) <= 1e-3


def plainly(matrix: torch.Tensor, triples: tuple) -> torch.Tensor:
    """The iteration as one would write it down, in float32."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / torch.linalg.norm(x)
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("steps", [1, 3, 5, 6, 8, 10])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", [(48, 48), (160, 48), (256, 600)])
@pytest.mark.parametrize("kind", ["low rank", "rank one"])
def test_matrices_of_low_rank(kind, shape, name, steps) -> None:
    """Rounding errors in the directions that a matrix lacks grow, however one computes."""
    triples = schedule(name, steps)
    matrix, expected = matrix_of(kind, *shape), oracle(kind, *shape, triples)
    error = relative_error(one(matrix, triples), expected)
    assert error <= 1e-3 + 2 * relative_error(plainly(matrix, triples), expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (2, 2), (2, 3), (5, 3), (1, 1000)])
@pytest.mark.parametrize("name", SETS)
def test_tiny_matrices(shape, name) -> None:
    triples = schedule(name, 5)
    result, expected = one(gauss(*shape), triples), oracle("gauss", *shape, triples)
    assert result.shape == shape
    assert relative_error(result, expected) <= 1e-4


def test_brings_singular_values_near_one() -> None:
    for shape in [(384, 1024), (1024, 384)]:
        result = one(gauss(*shape))
        values = torch.linalg.svdvals(result)
        assert values.min() > 0.65
        assert values.max() < 1.25
        u, _, vh = torch.linalg.svd(gauss(*shape), full_matrices=False)
        assert torch.cosine_similarity(result.flatten(), (u @ vh).flatten(), dim=0) >= 0.98


SHAPES = [(1, 1), (1, 9), (9, 1), (3, 7), (16, 16), (33, 64), (64, 33), (65, 48), (130, 128)]
LARGE = [(272, 272), (144, 400), (400, 144)]


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", [1, 5])
def test_equals_torch_in_bfloat16_bit_for_bit(steps: int, source: torch.dtype) -> None:
    matrices = [gauss(*shape, seed=seed).to(source) for shape in SHAPES + LARGE for seed in (0, 1)]
    results = orthogonalize(matrices, (JORDAN,) * steps, torch.bfloat16)
    for matrix, result in zip(matrices, results, strict=True):
        expected = _zeropower_via_newtonschulz(matrix.clone(), JORDAN, steps, 1e-7)
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, expected)


def test_equals_torch_in_float32_within_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = [gauss(*shape) for shape in SHAPES + LARGE]
    results = orthogonalize(matrices, FIVE, torch.float32)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for matrix, result in zip(matrices, results, strict=True):
        expected = _zeropower_via_newtonschulz(matrix, JORDAN, 5, 1e-7)
        assert result.dtype == torch.float32
        assert (result - expected).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_beside_others(dtype: torch.dtype) -> None:
    zeros, other = torch.zeros(4, 6), gauss(4, 6)
    results = orthogonalize([zeros, other, zeros.T], FIVE, dtype)
    assert torch.equal(results[0], zeros.to(dtype))
    assert torch.equal(results[1], one(other, FIVE, dtype))
    assert torch.equal(results[2], zeros.T.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_matrices(dtype: torch.dtype) -> None:
    assert orthogonalize([], FIVE, dtype) == []
    shapes = [(0, 5), (5, 0), (0, 0), (2, 3), (1, 0)]
    results = orthogonalize([torch.zeros(shape) for shape in shapes], FIVE, dtype)
    assert [tuple(result.shape) for result in results] == shapes
    assert {result.dtype for result in results} == {dtype}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_matrix_is_not_passed_off_as_sound_nor_poisons_others(poison, dtype) -> None:
    matrices = [gauss(5, 9, seed=0), gauss(9, 5, seed=1), gauss(5, 9, seed=2)]
    poisoned = matrices[1].clone()
    poisoned[2, 3] = poison
    results = orthogonalize([matrices[0], poisoned, matrices[2]], FIVE, dtype)
    assert results[1].isnan().all()
    for i in (0, 2):
        assert torch.equal(results[i], one(matrices[i], FIVE, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (16, 16), (16, 64), (272, 272)])
def test_neither_writes_to_its_arguments_nor_shares_their_memory(shape, dtype) -> None:
    matrices = [gauss(*shape), gauss(*shape).to(dtype), torch.nn.Parameter(gauss(*shape))]
    before = [matrix.detach().clone() for matrix in matrices]
    results = orthogonalize(matrices, FIVE, dtype)
    for matrix, copy, result in zip(matrices, before, results, strict=True):
        assert torch.equal(matrix, copy)
        assert not result.requires_grad
        assert result.is_contiguous()
        assert result.untyped_storage().data_ptr() != matrix.untyped_storage().data_ptr()


def test_does_not_read_memory_that_it_has_not_written() -> None:
    """With deterministic algorithms, torch fills new memory with nan."""
    torch.set_deterministic_debug_mode("error")
    try:
        assert torch.empty(3).isnan().all()
        for shape in [(5, 9), (48, 160), (272, 272)]:
            assert one(gauss(*shape)).isfinite().all()
    finally:
        torch.set_deterministic_debug_mode("default")


def list_of(seed: int, count: int) -> list[torch.Tensor]:
    """Matrices of a few shapes, tall and wide."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 7), (9, 33), (6, 24), (22, 72), (65, 48), (8, 31)]
    picks = torch.randint(len(shapes), (count,), generator=generator).tolist()
    matrices = [torch.randn(shapes[pick], generator=generator) for pick in picks]
    return [matrix.T if i % 3 == 0 else matrix for i, matrix in enumerate(matrices)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 40),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from(DTYPES),
)
def test_what_else_is_in_the_list_changes_no_bit(seed, count, order, dtype) -> None:
    matrices = list_of(seed, count)
    whole = orthogonalize(matrices, FIVE, dtype)
    some = order.sample(range(count), order.randint(1, count))
    for index, result in zip(
        some, orthogonalize([matrices[i] for i in some], FIVE, dtype), strict=True
    ):
        assert torch.equal(result, whole[index])


@pytest.mark.parametrize("shape", [(1, 9), (6, 24), (9, 33), (22, 72), (48, 130), (75, 210)])
def test_neither_batch_size_nor_threads_change_a_bit_in_float32(shape: tuple[int, int]) -> None:
    matrices = [gauss(*shape, seed=seed) for seed in range(17)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [one(matrix) for matrix in matrices]
        for size in range(1, 18):
            results = orthogonalize(matrices[:size], FIVE, torch.float32)
            assert all(map(torch.equal, results, alone))
        torch.set_num_threads(2)
        for size in (1, 3):
            results = orthogonalize(matrices[:size], FIVE, torch.float32)
            assert all(map(torch.equal, results, alone))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_a_matrix_lies_in_memory_changes_no_bit(dtype: torch.dtype) -> None:
    for shape in [(9, 33), (33, 9), (100, 100), (100, 300)]:
        matrix = gauss(*shape)
        expected = one(matrix, FIVE, dtype)
        apart = torch.zeros(shape[0], shape[1] + 3)[:, 1:-2].copy_(matrix)
        shifted = torch.zeros(matrix.numel() + 1)[1:].view(shape).copy_(matrix)
        for other in (apart, shifted, matrix.T.contiguous().T):
            assert torch.equal(one(other, FIVE, dtype), expected)


@settings(max_examples=40, deadline=None)
@given(
    exponent=st.integers(-100, 100),
    shape=st.sampled_from([(8, 12), (12, 8), (9, 9), (16, 64)]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_power_of_two_changes_no_bit(exponent, shape, dtype) -> None:
    matrix = gauss(*shape)
    scaled = one(matrix * 2.0**exponent, FIVE, dtype)
    assert torch.equal(scaled, one(matrix, FIVE, dtype))


@settings(max_examples=40, deadline=None)
@given(
    exponent=st.floats(-30, 30),
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(8, 12), (12, 8), (9, 9), (16, 64)]),
)
def test_magnitude_does_not_matter(exponent, seed, shape) -> None:
    matrix = gauss(*shape, seed=seed)
    torch.testing.assert_close(one(matrix * 10**exponent), one(matrix), rtol=0, atol=1e-4)


@pytest.mark.parametrize("magnitude", [3.0e38, 1e-38, 1e-42])
def test_the_ends_of_the_float32_range(magnitude: float) -> None:
    torch.testing.assert_close(
        one(torch.eye(3, 5) * magnitude), one(torch.eye(3, 5)), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("steps", [5, 8])
def test_flops_are_those_computed(steps, name, dtype) -> None:
    triples = schedule(name, steps)
    shapes = [(3, 7), (100, 30), (30, 100), (40, 100), (272, 272), (301, 512), (600, 256), (0, 4)]
    matrices = [gauss(*shape) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        orthogonalize(matrices, triples, dtype)
    assert counter.get_total_flops() == sum(flops(shape, triples, dtype) for shape in shapes)


def standard_flops(rows: int, columns: int, steps: int) -> int:
    return steps * (4 * rows * rows * columns + 2 * rows**3)


def test_fewer_flops_in_float32_and_no_others_in_bfloat16() -> None:
    for shape, part in [((384, 1024), 0.75), ((768, 3072), 0.6), ((768, 768), 0.8)]:
        standard = standard_flops(*shape, 5)
        assert flops(shape, FIVE, torch.float32) < part * standard
        assert flops(shape, FIVE, torch.bfloat16) == standard
        assert flops(shape[::-1], FIVE, torch.float32) == flops(shape, FIVE, torch.float32)


def test_does_not_iterate_on_the_gram_matrix_where_rounding_would_run_away() -> None:
    shape, standard = (160, 640), standard_flops(160, 640, 1)
    for name in ("keller_jordan", "you"):
        assert flops(shape, schedule(name, 5), torch.float32) < 0.7 * 5 * standard
    for name in SETS:
        for steps in (6, 8, 10):
            assert flops(shape, schedule(name, steps), torch.float32) == steps * standard
    torch.set_float32_matmul_precision("high")  # products in TF32, on devices that have it
    try:
        assert flops(shape, FIVE, torch.float32) == 5 * standard
    finally:
        torch.set_float32_matmul_precision("highest")


def test_update_scales() -> None:
    assert update_scale("match_rms_adamw", 16, 100) == pytest.approx(2.0)
    assert update_scale("match_rms_adamw", 100, 16) == pytest.approx(2.0)
    assert update_scale("original", 100, 25) == pytest.approx(2.0)
    assert update_scale("original", 25, 100) == 1.0
    assert update_scale("spectral", 100, 25) == pytest.approx(2.0)
    assert update_scale("spectral", 25, 100) == pytest.approx(0.5)
    assert update_scale("none", 100, 25) == 1.0


def test_matched_update_is_as_large_as_one_of_adamw() -> None:
    for shape in [(64, 64), (32, 128), (128, 32)]:
        size = one(gauss(*shape)).square().mean().sqrt() * update_scale("match_rms_adamw", *shape)
        assert 0.15 < size < 0.25


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_f": True}, torch.float32),
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_automatic_dtype_on_a_cpu(monkeypatch, capabilities, expected) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert working_dtype("auto", torch.device("cpu")) == expected


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (SimpleNamespace(is_bf16_supported=lambda including_emulation: True), torch.bfloat16),
        (SimpleNamespace(is_bf16_supported=lambda including_emulation: False), torch.float32),
        (SimpleNamespace(is_bf16_supported=lambda: True), torch.float32),
        (SimpleNamespace(), torch.float32),
    ],
)
def test_automatic_dtype_on_other_devices(monkeypatch, module, expected) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert working_dtype("auto", torch.device("cuda")) == expected


def test_dtype_of_ones_choice_and_where_there_is_no_device() -> None:
    assert working_dtype("auto", torch.device("meta")) == torch.float32
    assert working_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert working_dtype("float32", torch.device("cuda")) == torch.float32
