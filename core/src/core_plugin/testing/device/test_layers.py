"""The layers that models are made of: results and gradients of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core_plugin.testing.device.comparison import Computation, assert_same_as_on_cpu, leaf, normal

pytestmark = pytest.mark.level(1)

ROUNDED = {"rtol": 0.02, "atol": 0.02}
"""By default, torch lets GPUs round inputs of convolutions and recurrent layers to 10 bits."""


PRODUCTS: dict[str, tuple[Computation, tuple[Tensor, ...]]] = {
    "matmul": (torch.matmul, (leaf(6, 8), leaf(8, 5, seed=2))),
    "matmul of transposed": (lambda a, b: a.t() @ b.t(), (leaf(8, 6), leaf(5, 8, seed=2))),
    "matmul over a batch": (torch.matmul, (leaf(2, 3, 6, 8), leaf(8, 5, seed=2))),
    "bmm": (torch.bmm, (leaf(3, 6, 8), leaf(3, 8, 5, seed=2))),
    "matrix and vector": (torch.mv, (leaf(6, 8), leaf(8, seed=2))),
    "addmm": (torch.addmm, (leaf(6, 5, seed=3), leaf(6, 8), leaf(8, 5, seed=2))),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->ik", a, b), (leaf(3, 6, 8), leaf(3, 8, 5))),
    "linear": (F.linear, (leaf(2, 3, 8), leaf(5, 8, seed=2), leaf(5, seed=3))),
    "linear without bias": (F.linear, (leaf(2, 3, 8), leaf(5, 8, seed=2))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_matrix_products(device: torch.device, name: str) -> None:
    """Products of matrices give the CPU's results and gradients."""
    product, inputs = PRODUCTS[name]
    assert_same_as_on_cpu(product, *inputs, device=device, rtol=1e-4, atol=1e-4)


ACTIVATIONS: dict[str, Computation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "leaky relu": F.leaky_relu,
    "glu": lambda x: F.glu(x, dim=-1),
    "swiglu": lambda x: F.silu(x[..., :4]) * x[..., 4:],
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(device: torch.device, name: str) -> None:
    """Activation functions give the CPU's results and gradients."""
    assert_same_as_on_cpu(ACTIVATIONS[name], leaf(3, 8), device=device)


NORMS: dict[str, Computation] = {
    "layer_norm": lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias),
    "rms_norm": lambda x, weight, bias: F.rms_norm(x, (6,), weight) + bias,
    "group_norm": lambda x, weight, bias: F.group_norm(x, 3, weight, bias),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(device: torch.device, name: str) -> None:
    """Norms give the CPU's results and gradients, their weight's and bias's too."""
    inputs = leaf(2, 6, 6), leaf(6, seed=2), leaf(6, seed=3)
    assert_same_as_on_cpu(NORMS[name], *inputs, device=device, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(device: torch.device, name: str, size: int) -> None:
    """``softmax`` and ``log_softmax`` give the CPU's results and gradients."""
    softmax, x = getattr(torch, name), size * normal(4, 5)
    for dim in (0, -1):
        assert_same_as_on_cpu(partial(softmax, dim=dim), x.requires_grad_(), device=device)


@pytest.mark.parametrize("padding", [None, 0])
def test_embedding(device: torch.device, padding: int | None) -> None:
    """A row that is read twice gets both gradients, and the padding row none."""
    index = torch.tensor([[1, 3, 3], [0, 1, 3]])
    weight = leaf(5, 4)
    assert_same_as_on_cpu(
        lambda index, weight: F.embedding(index, weight, padding), index, weight, device=device
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy(device: torch.device, reduction: str) -> None:
    """Ignored targets take no part in the loss, its divisor and the gradients."""
    targets = torch.tensor([2, -100, 0, -100, 4, 1])
    assert_same_as_on_cpu(
        lambda logits, targets: F.cross_entropy(logits, targets, reduction=reduction),
        leaf(6, 5),
        targets,
        device=device,
    )


@pytest.mark.parametrize("kind", ["whole", "causal", "masked"])
def test_attention(device: torch.device, kind: str) -> None:
    """``scaled_dot_product_attention`` gives the CPU's results and gradients."""
    query, key, value = (leaf(2, 3, 6, 8, seed=seed) for seed in (1, 2, 3))
    mask = (normal(6, 6) > 0) | torch.eye(6, dtype=torch.bool)

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        options = {"attn_mask": mask} if kind == "masked" else {"is_causal": kind == "causal"}
        return F.scaled_dot_product_attention(query, key, value, **options)

    inputs = query, key, value, mask
    assert_same_as_on_cpu(attention, *inputs, device=device, rtol=1e-4, atol=1e-5)


def test_a_transformer_layer(device: torch.device) -> None:
    """A whole layer gives the CPU's output and the gradient of every parameter."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    assert_same_as_on_cpu(layer, leaf(2, 5, 8), device=device, rtol=1e-4, atol=1e-5)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one dimension": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "two dimensions": (lambda: nn.Conv2d(4, 6, 3, stride=2), (2, 4, 9, 9)),
    "groups and dilation": (lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), (2, 4, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5)),
}


@pytest.mark.requires("convolution")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(device: torch.device, name: str) -> None:
    """Convolutions give the CPU's results and gradients."""
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    assert_same_as_on_cpu(make(), leaf(*shape), device=device, **ROUNDED)


@pytest.mark.requires("convolution")
def test_batch_norm_and_pooling(device: torch.device) -> None:
    """A block of an image model gives the CPU's results, gradients and running statistics."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    assert_same_as_on_cpu(block, leaf(2, 3, 8, 8), device=device, **ROUNDED)


@pytest.mark.requires("recurrent_layers")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(device: torch.device, kind: type[nn.Module]) -> None:
    """LSTM and GRU give the CPU's results and gradients."""
    torch.manual_seed(0)
    layer = _Outputs(kind(4, 6, num_layers=2, bidirectional=True, batch_first=True))
    assert_same_as_on_cpu(layer, leaf(3, 5, 4), device=device, **ROUNDED)


class _Outputs(nn.Module):
    """A recurrent layer without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all steps."""
        outputs: Tensor = self.layer(x)[0]
        return outputs
