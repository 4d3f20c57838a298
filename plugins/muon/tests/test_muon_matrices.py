"""Parameters of every shape and dtype: each of their matrices is stepped by itself."""

from math import sqrt

import pytest
import torch
from muon_parameters import assert_same, run, set_gradients
from torch import nn

from core_plugin_muon import Muon

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def of(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    p.grad = torch.randn(shape, generator=generator).to(dtype)
    return p


def alone(value: torch.Tensor, gradient: torch.Tensor, **options: object) -> torch.Tensor:
    """A matrix after one step of an optimizer that has no other."""
    p = nn.Parameter(value.detach().clone())
    p.grad = gradient.clone()
    Muon([p], **options).step()
    return p.detach()


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw", "spectral", "none"])
def test_convolutions_of_one_shape_are_stepped_one_by_one(scale: str) -> None:
    convolutions = [of(6, 3, 2, 2, seed=seed) for seed in range(3)]
    expected = [
        alone(p.flatten(1), p.grad.flatten(1), adjust_lr_fn=scale).view(p.shape)
        for p in convolutions
    ]
    Muon([{"params": convolutions, "flatten": True}], adjust_lr_fn=scale).step()
    assert_same(convolutions, expected)


def test_a_convolutions_scale_is_that_of_its_flattened_matrix() -> None:
    p = of(64, 1, 3, 3)
    optimizer = Muon([{"params": [p], "flatten": True}], lr=1.0, weight_decay=0.0)
    sizes = {}
    for scale in ("none", "original", "spectral", "match_rms_adamw"):
        optimizer.param_groups[0]["adjust_lr_fn"] = scale
        optimizer.state.clear()
        before = p.detach().clone()
        optimizer.step()
        sizes[scale] = float((p.detach() - before).norm())
    assert sizes["original"] / sizes["none"] == pytest.approx(sqrt(64 / 9), rel=1e-3)
    assert sizes["spectral"] / sizes["none"] == pytest.approx(sqrt(64 / 9), rel=1e-3)
    assert sizes["match_rms_adamw"] / sizes["none"] == pytest.approx(0.2 * sqrt(64), rel=1e-3)


def test_experts_are_stepped_one_by_one() -> None:
    p = of(4, 6, 9)
    expected = [alone(value, gradient) for value, gradient in zip(p, p.grad, strict=True)]
    Muon([{"params": [p], "flatten": False}]).step()
    assert_same([*p], expected)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (12, 5, 7), (6, 6, 6, 6)])
def test_blocks_of_a_fused_matrix_are_stepped_one_by_one(sizes: tuple[int, ...]) -> None:
    p = of(24, 10)
    expected = [
        alone(value, gradient)
        for value, gradient in zip(p.split(sizes), p.grad.split(sizes), strict=True)
    ]
    Muon([{"params": [p], "split": sizes}]).step()
    assert_same(p.split(sizes), expected)


def test_blocks_that_are_not_the_matrix_are_refused() -> None:
    """As where a gated attention has four blocks, and three are assumed."""
    with pytest.raises(ValueError, match=r"split is \(6, 6, 6\), 18 rows in all, of 24"):
        Muon([{"params": [of(24, 10)], "split": (6, 6, 6)}])


def test_flat_parameters_are_refused() -> None:
    """As of optimizers that join all parameters to one: there is nothing to orthogonalize."""
    with pytest.raises(ValueError, match="no matrices, having fewer than two dimensions"):
        Muon([of(4096)])


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw", "spectral", "none"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 3, 4), (2, 0, 4), (1, 5), (5, 1), (1, 1)])
def test_what_is_empty_or_has_one_row_is_no_trouble(shape: tuple[int, ...], scale: str) -> None:
    p, matrix = of(*shape), of(4, 4)
    groups = [{"params": [p], "flatten": False}, {"params": [matrix]}]
    optimizer = Muon(groups, adjust_lr_fn=scale)
    optimizer.step()
    assert p.isfinite().all()
    Muon(groups[:1], adjust_lr_fn=scale).step()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_does_not_matter(memory_format: torch.memory_format) -> None:
    reference, p = of(8, 3, 2, 2), of(8, 3, 2, 2)
    p.data = p.data.to(memory_format=memory_format)
    for each in (reference, p):
        optimizer = Muon([{"params": [each], "flatten": True}])
        run(optimizer, [each], range(3))
    assert torch.equal(p, reference)
    assert p.is_contiguous(memory_format=memory_format)


def test_decay_is_exact_beside_an_update() -> None:
    """With a decay so large that no tolerance hides it, and an update whose size is known."""
    start, lr, decay = torch.full((4, 4), 3.0), 0.5, 1.5
    p = nn.Parameter(start.clone())
    p.grad = torch.eye(4)
    optimizer = Muon([p], lr=lr, weight_decay=decay, adjust_lr_fn="none", ns_dtype="float32")
    optimizer.step()
    size = 0.5  # of a singular value of the identity over its norm
    for _ in range(5):
        size = 3.4445 * size - 4.7750 * size**3 + 2.0315 * size**5
    expected = start * (1 - lr * decay) - lr * size * torch.eye(4)
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("gradients", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_may_have_another_dtype(
    dtype: torch.dtype, gradients: torch.dtype, algorithm: str
) -> None:
    reference, p = of(5, 7, dtype=dtype), of(5, 7, dtype=dtype)
    rounded = p.grad.to(gradients)
    p.grad = None
    p.grad_dtype = None
    p.grad, reference.grad = rounded, rounded.to(dtype)
    for each in (reference, p):
        Muon([{"params": [each], "algorithm": algorithm}], ns_dtype="float32").step()
    assert torch.equal(p, reference)
    assert torch.equal(p.grad, rounded)
    assert p.grad.dtype == gradients


def test_dtypes_may_be_mixed_in_one_optimizer() -> None:
    def make() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return [of(6, 8, dtype=d) for d in DTYPES], [of(6, dtype=d) for d in DTYPES]

    matrices, rest = make()
    together = Muon([{"params": matrices}, {"params": rest, "algorithm": "adamw"}])
    run(together, matrices + rest, range(3))
    for index, (p, q) in enumerate(zip(matrices, rest, strict=True)):
        assert together.state[p]["momentum_buffer"].dtype == DTYPES[index]
        assert together.state[q]["exp_avg"].dtype == DTYPES[index]
    others, vectors = make()
    apart = [Muon([p]) for p in others]
    apart += [Muon([{"params": [p], "algorithm": "adamw"}]) for p in vectors]
    for step in range(3):
        set_gradients(others + vectors, step)
        for optimizer in apart:
            optimizer.step()
    assert_same(matrices + rest, others + vectors)


def test_what_is_on_two_devices_does_not_travel_together() -> None:
    params = [nn.Parameter(torch.zeros(4, 4, device=device)) for device in ("cpu", "meta", "cpu")]
    teams, _ = Muon(params, ns_dtype="float32").teams()
    assert [[p.device.type for p, _ in team.members] for team in teams] == [["cpu"] * 2, ["meta"]]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_momentum_is_the_plain_average_of_gradients(
    dtype: torch.dtype, ns_dtype: str, nesterov: bool
) -> None:
    """It is no alias of what is normalized: its size after three steps tells."""
    p = of(4, 6, dtype=dtype)
    optimizer = Muon([p], momentum=0.5, nesterov=nesterov, ns_dtype=ns_dtype)
    for gradient in (8.0, 16.0, 32.0):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
        assert torch.equal(p.grad, torch.full_like(p, gradient))
    buffer = optimizer.state[p]["momentum_buffer"]
    expected = torch.full_like(p, 8.0 / 8 + 16.0 / 4 + 32.0 / 2)
    assert torch.equal(buffer, expected)
    assert buffer.untyped_storage().data_ptr() not in (
        p.untyped_storage().data_ptr(),
        p.grad.untyped_storage().data_ptr(),
    )
