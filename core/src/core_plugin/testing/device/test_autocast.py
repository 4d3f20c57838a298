"""Autocast on the device, by ``torch.autocast`` and by ``core_plugin.devices.autocast``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core_plugin.devices import autocast
from core_plugin.errors import PluginUnavailableError
from core_plugin.testing.device.comparison import normal
from core_plugin.testing.device.subject import Subject

pytestmark = pytest.mark.level(1)

DTYPES = [torch.bfloat16, torch.float16]


def _product(device: torch.device) -> Tensor:
    """A matrix product of float32."""
    return normal(4, 4).to(device) @ normal(4, 4, seed=2).to(device)


def test_the_default_dtype_is_the_declared_one(subject: Subject, device: torch.device) -> None:
    """Without a dtype, autocast computes in the one that the backend declares."""
    declared = getattr(torch, subject.backend.default_autocast_dtype)
    assert torch.get_autocast_dtype(device.type) == declared
    with torch.autocast(device.type):
        assert _product(device).dtype == declared
    with autocast(device.type):
        assert _product(device).dtype == declared


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_given_dtype_wins(device: torch.device, dtype: torch.dtype) -> None:
    """With a dtype, products are computed and given in it; one without support is refused."""
    if dtype not in _supported(device):
        with pytest.raises(PluginUnavailableError, match=str(dtype)):
            autocast(device.type, dtype)
        return
    x = normal(16, 32)
    weight = normal(8, 32, seed=2)
    with autocast(device.type, dtype):
        products = {
            "linear": F.linear(x.to(device), weight.to(device)),
            "matmul": x.to(device) @ weight.to(device).t(),
            "bmm": torch.bmm(x.to(device)[None], weight.to(device).t()[None])[0],
        }
    expected = x.to(dtype).float() @ weight.to(dtype).float().t()
    step = torch.finfo(dtype).eps
    for name, product in products.items():
        assert product.dtype == dtype, f"{name} gives {product.dtype}"
        torch.testing.assert_close(product.cpu().float(), expected, rtol=step, atol=8 * step)


def test_products_have_the_range_and_the_steps_of_the_dtype(device: torch.device) -> None:
    """Inputs are rounded as the dtype rounds: bfloat16 has the range, float16 the small steps."""
    for dtype in _supported(device):
        values = torch.tensor([[torch.finfo(dtype).max / 2], [1 + 2**-10]])
        with autocast(device.type, dtype):
            product = values.to(device) @ torch.ones(1, 1, device=device)
        torch.testing.assert_close(product.cpu().float(), values.to(dtype).float(), rtol=0, atol=0)


def test_a_dtype_without_support_is_an_error(device: torch.device) -> None:
    """It is refused, or with ``torch.autocast`` float32 stays: it is no other low precision."""
    with pytest.raises(PluginUnavailableError, match="float64"):
        autocast(device.type, torch.float64)
    with torch.autocast(device.type, dtype=torch.float64):
        assert _product(device).dtype == torch.float32


def test_the_loss_is_computed_in_float32(device: torch.device) -> None:
    """Cross entropy is a float32, and not rounded if the logits are not."""
    logits, targets = 5 * normal(6, 5), torch.tensor([2, -100, 0, 3, 4, 1])
    with autocast(device.type):
        low = logits.to(device, torch.get_autocast_dtype(device.type))
        losses = [F.cross_entropy(x, targets.to(device)).cpu() for x in (logits.to(device), low)]
    expected = F.cross_entropy(logits, targets)
    torch.testing.assert_close(losses[0], expected)
    torch.testing.assert_close(losses[1], expected, rtol=0.02, atol=0.02)


# On the CPU torch computes these in the dtype of their inputs.
FLOAT32: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "sum": lambda x: x.sum(-1),
    "exp": torch.exp,
}


@pytest.mark.only("accelerator")
@pytest.mark.parametrize("name", FLOAT32)
def test_what_needs_precision_is_computed_in_float32(device: torch.device, name: str) -> None:
    """Softmax, norms and sums of inputs in low precision are computed and given in float32."""
    with autocast(device.type):
        x = normal(4, 8).to(device, torch.get_autocast_dtype(device.type))
        result = FLOAT32[name](x)
    assert result.dtype == torch.float32, f"the result is in {result.dtype}"
    torch.testing.assert_close(result.cpu(), FLOAT32[name](x.cpu().float()))


def test_an_operator_without_a_rule_keeps_its_dtype(device: torch.device) -> None:
    """Operators that autocast has no rule for run as they do outside, in place too."""
    x = normal(4, 4).to(device)
    with autocast(device.type):
        low = x.to(torch.get_autocast_dtype(device.type))
        results = [torch.relu(x), x + 1, x.clone().mul_(2).fill_(3), torch.relu(low), low.t()]
    expected = [x.dtype] * 3 + [low.dtype] * 2
    assert [result.dtype for result in results] == expected
    torch.testing.assert_close(results[0].cpu(), torch.relu(x.cpu()))


def test_autocast_nests_and_can_be_turned_off(device: torch.device) -> None:
    """An inner block's setting counts inside it, and the outer one's after it, errors included."""
    outer, *others = _supported(device)
    with autocast(device.type, outer):
        for inner in others:
            with autocast(device.type, inner):
                assert _product(device).dtype == inner
        assert _product(device).dtype == outer
        with torch.autocast(device.type, enabled=False):
            assert _product(device).dtype == torch.float32
            with autocast(device.type, outer):
                assert _product(device).dtype == outer
            assert _product(device).dtype == torch.float32
        with contextlib.suppress(ArithmeticError), torch.autocast(device.type, enabled=False):
            raise ArithmeticError
        assert _product(device).dtype == outer
    assert _product(device).dtype == torch.float32


def test_autocast_is_of_the_thread_that_entered_it(device: torch.device) -> None:
    """Another thread computes in float32 while this one is inside autocast."""
    with autocast(device.type):
        found = _in_a_new_thread(lambda: _product(device).dtype)
    assert found == torch.float32, f"the other thread computes in {found}"


def test_a_new_thread_has_the_declared_dtype(subject: Subject, device: torch.device) -> None:
    """Autocast without a dtype is in the declared one in threads that set nothing up, too."""

    def default() -> torch.dtype:
        with autocast(device.type):
            return _product(device).dtype

    found = _in_a_new_thread(default)
    declared = getattr(torch, subject.backend.default_autocast_dtype)
    assert found == declared, f"a new thread computes in {found}, not in {declared}"


def _in_a_new_thread(function: Callable[[], torch.dtype]) -> torch.dtype:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def test_gradients_of_float32_parameters_are_float32(device: torch.device) -> None:
    """A model trained under autocast gets float32 gradients, near those of float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    x, targets = normal(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    expected = torch.autograd.grad(F.cross_entropy(model(x), targets), list(model.parameters()))
    model.to(device)
    with autocast(device.type):
        loss = F.cross_entropy(model(x.to(device)), targets.to(device))
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None, "no gradient arrived"
        assert parameter.grad.dtype == torch.float32, f"a gradient is in {parameter.grad.dtype}"
        torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=0.1, atol=0.02)


def test_weights_are_cast_anew_in_each_block(device: torch.device) -> None:
    """A weight that was changed between two blocks is used as it is now."""
    layer = nn.Linear(4, 4, bias=False).to(device)
    x = torch.ones(1, 4, device=device)
    for value in (1.0, 2.0):
        with torch.no_grad():
            layer.weight.fill_(value)
        with autocast(device.type):
            output = layer(x)
        torch.testing.assert_close(output.detach().cpu().float(), torch.full((1, 4), 4 * value))


def _supported(device: torch.device) -> list[torch.dtype]:
    module = torch.get_device_module(device)
    supported = getattr(module, "get_amp_supported_dtype", lambda: DTYPES)()
    return [dtype for dtype in DTYPES if dtype in supported]
